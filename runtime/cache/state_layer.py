"""Holds a recurrent layer of the cache, or half of one: a state of fixed size.

Imported where a model has such layers, since transformers 4.57 knows none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvcap.runtime.cache.allocation import Allocation
from kvcap.runtime.cache.layer import refuse_moving, refuse_reordering


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A layer of transformers for a delta net, a convolution or Mamba 2, allocated by the layout.

    It counts the tokens it has read, as a state that has read some cannot go back.

    Args:
        index: of the layer in the model.
        allocation: of the cache.
    """

    is_compileable = is_croppable = False

    def __init__(self, index: int, allocation: Allocation) -> None:
        super().__init__()
        self.index, self.seen = index, 0  # tokens read
        self.named: Mapping[str, Tensor] = {}
        """Holds its states [B, ...] by name, once they are allocated."""
        self._written: dict[str, int] = {}  # how often each was when a pass began
        self._allocation = allocation

    def allocate(self, batch: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocate the states, all zeros, for a model of that type."""
        self.dtype, self.device = dtype, torch.device(device)
        self.named = self._allocation.states(self.index, batch, dtype, device)
        self.conv_states[0] = self.named["conv"]
        self.conv_kernel_size[0] = self.named["conv"].shape[-1]
        self.is_conv_states_initialized[0] = True
        if "recurrent" in self.named:
            self.recurrent_states[0] = self.named["recurrent"]
            self.is_recurrent_states_initialized[0] = True

    def begin(self, tokens: int) -> None:
        """Count the tokens of a pass that begins."""
        self.seen += tokens
        for state in self.named.values():
            if state.requires_grad:
                state.detach_()  # or every pass before would be kept for its gradients
        self._written = self._versions()

    def _versions(self) -> dict[str, int]:
        """Return how often each state was written to."""
        return {name: state._version for name, state in self.named.items()}

    @property
    def half_read(self) -> bool:
        """Return whether a pass began and did not write all states, as after a Ctrl-C.

        Every pass writes them in place, which tensors count on a CPU. Kernels on a GPU do not
        count, so that it is always false there.
        """
        if not self.named:
            return self.seen > 0
        counts = self.device is not None and self.device.type == "cpu"
        return counts and bool(self._written.items() & self._versions().items())

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Take in the inputs [B, channels, T] of the convolution; returns those it reads."""
        if not self.named:
            self.allocate(len(conv_states), conv_states.dtype, conv_states.device)
            self._written = self._versions()
        inputs: Tensor = super().update_conv_state(conv_states, state_idx, conv_kernel_size)
        return inputs

    def fill(self, states: Mapping[str, Tensor], seen: int) -> None:
        """Copy these states, which are those after `seen` tokens."""
        for name, state in self.named.items():
            state.copy_(states[name])
        self.seen, self.has_previous_state[0], self._written = seen, seen > 0, {}

    def reset(self) -> None:
        """Set all states to zero; the buffers stay allocated."""
        with torch.no_grad():
            for state in self.named.values():
                state.detach_().zero_()
        self.seen, self.has_previous_state[0], self._written = 0, False, {}

    offload = prefetch = refuse_moving
    crop = reorder_cache = activate_past_recording = refuse_reordering
    batch_repeat_interleave = batch_select_indices = refuse_reordering
