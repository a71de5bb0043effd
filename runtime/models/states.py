"""Describes the states of recurrent layers: gated delta nets, short convolutions and Mamba 2.

Such a layer holds as much after a million tokens as after one, so there is nothing to evict. Its
sizes are read from the config, and checked against what the model makes (tests/runtime/models/).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache

KEPT = hasattr(Cache, "get_conv_state")
"""Says whether this version of transformers keeps states in a cache: 5.23 does, 4.57 does not."""


@dataclass(frozen=True)
class StateShape:
    """A tensor that a recurrent layer holds for each sequence."""

    name: Literal["conv", "recurrent"]  # a convolution's last inputs, or what was summed up
    shape: tuple[int, ...]  # of one sequence
    float32: bool  # whatever the model runs in

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Return the type of its numbers in a model of type `model`."""
        return torch.float32 if self.float32 else model

    @property
    def size(self) -> int:
        """Return how many numbers it has for one sequence."""
        return prod(self.shape)


def states_of(config: Any, layer_type: str) -> tuple[StateShape, ...]:
    """Return the states of a layer of that type, from a transformers config; () if not known."""
    if layer_type == "conv":
        return (StateShape("conv", (config.hidden_size, config.conv_L_cache), False),)
    if hasattr(config, "linear_num_key_heads"):  # a gated delta net
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        heads, size = config.linear_num_value_heads, config.linear_value_head_dim
        channels, kernel = 2 * keys + heads * size, config.linear_conv_kernel_dim
        return _pair(channels, kernel, (heads, config.linear_key_head_dim, size))
    if hasattr(config, "cca_time0"):  # Zaya: last queries and keys, and half of the last value
        channels = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
        value = config.num_key_value_heads * config.head_dim // 2
        return (
            StateShape("conv", (channels, config.cca_time0 + config.cca_time1 - 2), False),
            StateShape("recurrent", (value,), False),
        )
    if hasattr(config, "mamba_n_heads"):  # Mamba 2, as Granite 4 names its sizes
        heads, size, state = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
        groups, kernel = config.mamba_n_groups, config.mamba_d_conv
        return _pair(heads * size + 2 * groups * state, kernel, (heads, size, state))
    if hasattr(config, "mamba_num_heads"):  # and as Nemotron-H does
        heads, size, state = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
        groups, kernel = config.n_groups, config.conv_kernel
        return _pair(heads * size + 2 * groups * state, kernel, (heads, size, state))
    return ()


def _pair(channels: int, kernel: int, recurrent: tuple[int, ...]) -> tuple[StateShape, ...]:
    return (
        StateShape("conv", (channels, kernel), False),
        StateShape("recurrent", recurrent, True),
    )
