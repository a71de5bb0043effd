"""One layer's keys, values and side tensors in buffers of a fixed size.

Allocated once, never grown, never replaced. Slots are unordered: `positions` says where a token
belongs. Everything that belongs to a slot moves in `compact`, and only there. Knows no policy, no
model and no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class FixedKVCache:
    """`[B, K, budget + block, D]` keys and values, `positions` and named side tensors.

    `budget` slots stay after an eviction, `block` more take the arriving tokens.

    >>> cache = FixedKVCache(1, 2, budget=4, block=2, head_size=8, dtype=torch.float32)
    >>> cache.append(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), first_position=0)
    >>> cache.held, cache.nbytes
    (2, 816)
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        *,
        budget: int,
        block: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        side: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.budget, self.block, self.capacity = budget, block, budget + block
        self.held = 0
        shape = (batch, kv_heads, self.capacity)
        self._keys = torch.zeros(*shape, head_size, dtype=dtype, device=device)
        self._values = torch.zeros(*shape, head_size, dtype=dtype, device=device)
        self._positions = torch.zeros(shape, dtype=torch.int32, device=device)
        self._side = {
            name: torch.zeros(shape, dtype=dt, device=device) for name, dt in (side or {}).items()
        }
        # Row of slot 0 of every head in the buffers seen as [B·K·capacity, ...].
        heads = torch.arange(batch * kv_heads, device=device).view(batch, kv_heads, 1)
        self._rows = heads * self.capacity

    @property
    def keys(self) -> Tensor:
        """The held keys, a view [B, K, held, D]."""
        return self._keys[:, :, : self.held]

    @property
    def values(self) -> Tensor:
        """The held values, a view [B, K, held, D]."""
        return self._values[:, :, : self.held]

    @property
    def positions(self) -> Tensor:
        """The held tokens' places in the conversation, a view [B, K, held] int32."""
        return self._positions[:, :, : self.held]

    def side(self, name: str) -> Tensor:
        """A side tensor's held part, a view [B, K, held]."""
        return self._side[name][:, :, : self.held]

    @property
    def nbytes(self) -> int:
        """Exact bytes of storage, used or not; constant for the life of the cache."""
        return sum(x.untyped_storage().nbytes() for x in self._buffers())

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot takes in all heads."""
        return self.nbytes // self.capacity

    def append(self, keys: Tensor, values: Tensor, first_position: int) -> None:
        """Write a block [B, K, T, D] whose first token is number `first_position`."""
        start, stop = self.held, self.held + keys.shape[2]
        assert stop <= self.capacity, f"{stop} slots needed, {self.capacity} allocated"
        self._keys[:, :, start:stop] = keys
        self._values[:, :, start:stop] = values
        self._positions[:, :, start:stop] = torch.arange(
            first_position, first_position + stop - start, device=self._positions.device
        )
        for tensor in self._side.values():
            tensor[:, :, start:stop] = 0
        self.held = stop

    def compact(self, evicted: Tensor) -> None:
        """Give up the slots `evicted` [B, K, e], each head's its own; `held` falls by `e`.

        Survivors beyond the new `held` move into evicted slots below it, in place: at most `e`
        slots are written, and no temporary is larger than that.
        """
        count = evicted.shape[-1]
        kept = self.held - count
        target = evicted.sort(dim=-1).values  # [B, K, e]: first the holes below `kept`
        # Tail slots [kept, held) survive unless they are evicted themselves; a spare last place
        # takes the marks of the holes. Survivors come first, as many as there are holes.
        gone = torch.zeros(*target.shape[:2], count + 1, dtype=torch.int8, device=target.device)
        gone.scatter_(-1, torch.where(target < kept, count, target - kept), 1)
        source = kept + gone[..., :count].argsort(dim=-1, stable=True)
        source = torch.where(target < kept, source, target)  # no hole: the slot onto itself
        rows_to, rows_from = self._rows + target, self._rows + source
        for buffer in self._buffers():
            flat = buffer.view(-1, *buffer.shape[3:])
            flat.index_copy_(0, rows_to.flatten(), flat.index_select(0, rows_from.flatten()))
        self.held = kept

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        self.held = 0

    def _buffers(self) -> list[Tensor]:
        return [self._keys, self._values, self._positions, *self._side.values()]
