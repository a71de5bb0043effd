"""Reads the sizes of multi-head latent attention (MLA), and the weights that expand a latent.

A layer caches of a token one latent and one rotated part of a key, both shared by all query heads;
DeepSeek-V2, https://arxiv.org/abs/2405.04434.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcap.policies.base import Expansion
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.quantised import is_plain, name_of


@dataclass(frozen=True)
class Latent:
    """A set of sizes that multi-head latent attention has.

    A slot is `[k_rot, c]`, rotated numbers first.
    """

    rank: int  # R, of the latent c
    rotated: int  # r, of the rotated part that all heads share
    nope: int  # of a query head's key, the numbers that are made of the latent
    value: int  # v, of a query head's value

    @property
    def slot(self) -> int:
        """Return the numbers of a slot."""
        return self.rotated + self.rank

    def expands(self, tokens: int, slots: int) -> bool:
        """Return whether so many tokens attend more cheaply to expanded slots than to latents.

        Counted in multiplications of a query head. To expand takes `R (nope + v)` for every slot;
        to take queries to the latents, and outputs from them, as many for every token. Then every
        pair of a token and a slot takes two for each number of an expanded key, or of a slot.

        Args:
            tokens: of the block.
            slots: of a full cache: what costs more memory while it fills is not done.
        """
        own = self.rank * (self.nope + self.value)
        wide = max(self.rotated + self.nope, self.value)
        return (slots - tokens) * own < 2 * tokens * slots * (self.slot - wide)

    def workspace(self, tokens: int, slots: int) -> int:
        """Return about how many numbers per query head attention of a block takes."""
        if self.expands(tokens, slots):
            return slots * (2 * max(self.rotated + self.nope, self.value) + self.value)
        return tokens * (2 * self.slot + self.rank)


def latent_of(config: Any) -> Latent | None:
    """Return the sizes of a config's latent attention; None if it has none."""
    if getattr(config, "is_heterogeneous", False):  # its layers' sizes differ
        return None
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes: list[int] = [getattr(config, name, None) or 0 for name in names]
    return Latent(*sizes) if all(sizes) else None


def expansion_of(module: Any, latent: Latent) -> Expansion:
    """Return the weights by which a module expands latents, as views of its `kv_b_proj`.

    Raises:
        UnsupportedModel: they are quantised, adapted or otherwise no plain `nn.Linear`.
    """
    projection = getattr(module, "kv_b_proj", None)
    if not is_plain(projection) or getattr(projection, "bias", None) is not None:
        raise UnsupportedModel(
            "attention over latents reads the weights of kv_b_proj, which is "
            f"{name_of(projection)} here; it must be a plain nn.Linear of floating point weights "
            "without a bias: load the model unquantised and merge adapters"
        )
    weight: Tensor = projection.weight.unflatten(0, (-1, latent.nope + latent.value))
    keys, values = weight.split((latent.nope, latent.value), dim=1)  # [H, nope, R], [H, v, R]
    return Expansion(keys, values, latent.rotated)


def check_expansions(model: Any, latent: Latent) -> None:
    """Refuse a model whose latents cannot be expanded, before it runs.

    Raises:
        UnsupportedModel: as `expansion_of`.
    """
    for module in model.get_decoder().modules():
        if hasattr(module, "kv_b_proj"):
            expansion_of(module, latent)
