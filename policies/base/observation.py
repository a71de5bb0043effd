"""Defines what a policy may look at when it scores one layer's slots.

Letters, here and in every policy: `B` batch, `H` query heads, `K` KV heads, `G = H/K`, `n` slots
held (cache and block), `w` observed queries, `D` head size. Pure tensor code: no cache, no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvcap.policies.base.logits import PRODUCTS, Logits


class Weigher(Protocol):
    """A protocol of the part of a `Saliency` that an observation uses."""

    def weigh(self, obs: Observation) -> Tensor:
        """Return the weights to add up instead of attention. Shape [B, K, G, w, n]."""


class Expansion(NamedTuple):
    """A pair of weights by which query heads read slots that hold latents, in MLA.

    MLA is multi-head latent attention. A slot is `[k_rot, c]`: `r` rotated numbers that all heads
    share, and a latent `c` of `R` numbers, of which head `h` makes its key `[k_rot, W_uk c]` and
    its value `W_uv c`. DeepSeek-V2, https://arxiv.org/abs/2405.04434, Eq. 9-19.
    """

    keys: Tensor  # [H, nope, R], W_uk
    values: Tensor  # [H, v, R], W_uv
    rotated: int  # r

    def head_keys(self, slots: Tensor) -> Tensor:
        """Return every query head's keys [B, H, n, r + nope] of slots [B, 1, n, r + R]."""
        rotated, latents = slots.tensor_split((self.rotated,), dim=-1)
        own = torch.matmul(latents, self.keys.to(slots.dtype).mT)  # [B, H, n, nope]
        return torch.cat((rotated.expand(*own.shape[:-1], -1), own), dim=-1)

    def each_head_keys(self, slots: Tensor) -> Iterator[Tensor]:
        """Yield the keys of one query head after another, [B, 1, n, r + nope] each."""
        for keys in self.keys.split(1):
            yield Expansion(keys, self.values, self.rotated).head_keys(slots)

    def head_values(self, latents: Tensor) -> Tensor:
        """Return `W_uv c` [B, H, n, v] of latents [B, 1 or H, n, R]: values, or sums of them."""
        return torch.matmul(latents, self.values.to(latents.dtype).mT)


class RowRanges(NamedTuple):
    """A table of places in a pool, side by side, where heads of unequally many slots lie."""

    starts: Tensor  # [B·K or one more] int32, the first slot of each, and where the last ends
    lengths: Tensor  # [B·K] int32, its slots in use
    longest: int  # no row is longer


@dataclass
class Observation:
    """A view of one layer's slots and, if the policy asks for them, of its last queries.

    Keys and queries are rotated as attention saw them. Derived tensors are float32, and computed
    once, when they are first read. What a policy does not declare in `observes` may be `None`.
    """

    keys: Tensor  # [B, K, n, D]
    values: Tensor  # [B, K, n, D]; of latents the last numbers of the keys
    positions: Tensor  # [B, K, n] int, the token's place in the conversation
    num_tokens: int | Tensor  # tokens read so far, this block's included; [] inside a CUDA graph
    budget: int  # slots per KV head that stay
    new: int = 0  # tokens of this block: the last slots in memory
    layer: int = 0  # index among the capped layers
    first_head: int = 0  # the KV head of row 0; heads of unequal lengths are observed one by one
    queries: Tensor | None = None  # [B, H, w, D], the last w queries, oldest first
    rule: Logits = PRODUCTS  # of the model: how products become logits
    attended: Tensor | None = None  # [B, H, w, D], attention's output for them, if it is known
    state: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [B, K, n]
    output_projection: Tensor | None = None  # [K, G, D, hidden], W_O by query head
    saliency: Weigher | None = None  # replaces the attention weights, see `weight`
    expansion: Expansion | None = None  # of slots that hold latents (MLA)
    rows: RowRanges | None = None
    """Says where unequal heads lie, if kernels score them.

    Keys and values are [B, K, slots, D] views of a pool then, state is [slots], and positions are
    [B, K, longest].
    """
    pinned_spans: tuple[tuple[int, int], ...] = ()  # [start, stop) positions that are never evicted
    regions: tuple[tuple[int, int, int], ...] = ()
    """Holds regions [start, stop) with their tiers; `Eviction` weighs them, no policy need look."""

    @property
    def groups(self) -> int:
        """Return `G`: how many query heads share a KV head."""
        assert self.queries is not None
        return self.queries.shape[1] // self.keys.shape[1]

    @cached_property
    def visible(self) -> Tensor:
        """Return which slots a query may see, its own and older ones. Bool [B, K, 1, w, n]."""
        assert self.queries is not None
        w = self.queries.shape[2]
        times = self.num_tokens + torch.arange(-w, 0, device=self.positions.device)  # [w]
        visible: Tensor = self.positions[:, :, None, None, :] <= times[:, None]
        return visible

    @cached_property
    def _products(self) -> Tensor:
        """Return `q·k` of every query and slot, visible or not. Shape [B, K, G, w, n]."""
        assert self.queries is not None, "the policy must name 'queries' in observes"
        q = self.queries.float().unflatten(1, (-1, self.groups))  # [B, K, G, w, D]
        products = torch.matmul(q.flatten(2, 3), self.keys.float().mT)  # [B, K, G·w, n]
        grouped: Tensor = products.unflatten(2, (self.groups, -1))
        return grouped

    @cached_property
    def logits(self) -> Tensor:
        """Return logits `z`, 0 (not -inf) where masked, so that products stay finite.

        Shape [B, K, G, w, n].
        """
        return self.unmasked_logits * self.visible

    @property
    def unmasked_logits(self) -> Tensor:
        """Return `z` of every query and slot, also of slots newer than the query.

        The queries then stand for later ones. Shape [B, K, G, w, n].
        """
        return self.rule.of(self._products)

    @cached_property
    def attention(self) -> Tensor:
        """Return `A = softmax(z)` over the visible slots. Shape [B, K, G, w, n].

        With sink logits `A = softmax([z, sink])` without the sink's own weight: a row sums to less
        than 1, as in the model.
        """
        # On a CPU, adding a mask while scaling takes a fraction of the time of `masked_fill`.
        mask = torch.where(self.visible, 0.0, float("-inf"))  # [B, K, 1, w, n]
        if self.rule.linear:
            z = torch.add(mask, self._products, alpha=self.rule.scale)
        else:
            z = mask + self.unmasked_logits
        del mask  # before the weights take their memory
        return self.rule.weights(z)

    @cached_property
    def variance(self) -> Tensor:
        """Return `var_t A_tj`, the population's, over the queries. Shape [B, K, G, n]."""
        # `Tensor.var` over any dimension but the last takes a CPU ten times as long.
        mean = self.attention.mean(-2, keepdim=True)
        return (self.attention - mean).square().mean(-2)

    @cached_property
    def output(self) -> Tensor:
        """Return `a = A·v`, before the output projection. Shape [B, K, G, w, D].

        If a policy observes all queries of a block, it is the output that the model's attention
        returned, in the model's type.
        """
        if self.attended is not None:
            attended: Tensor = self.attended.float().unflatten(1, (-1, self.groups))
            return attended
        out: Tensor = torch.matmul(self.attention.flatten(2, 3), self.values.float())
        return out.view(*self.attention.shape[:4], -1)

    @cached_property
    def weight(self) -> Tensor:
        """Return the weights that scores add up: attention `A`, or a saliency in its place.

        Shape [B, K, G, w, n].
        """
        return self.attention if self.saliency is None else self.saliency.weigh(self)
