"""Measures how much every head retrieves: the table that headkv and duoattention need.

A head that retrieves attends to what followed an earlier occurrence of the same text. So the model
reads a text twice in a row, uncapped and block by block. The score of a query head is the mean,
over the tokens of the second copy, of the attention to the token that followed the same token in
the first copy: with `length` tokens, from position `t` to `t - length + 1`. Compare retrieval heads
(https://arxiv.org/abs/2404.15574) and HeadKV (https://arxiv.org/abs/2410.19258).

Attention is recomputed for one block of one layer at a time, so memory holds the text's keys and
values and the workspace of a block, never a whole attention matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcap import __version__
from kvcap.policies import Eviction, Observation, Policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.files import encode, load_config, load_tokenizer
from kvcap.runtime.models.names import resolve

LEAST = 32  # least tokens of a text


@dataclass(frozen=True, eq=False)
class RepetitionProbe(Policy):
    """A policy that sums the attention from a text's second copy to its first; never evicts."""

    length: int  # tokens of a copy
    before: int = 0  # tokens before the first copy
    mass: dict[int, Tensor] = field(default_factory=dict)  # attention by layer, [H], summed

    observes: ClassVar = frozenset({"keys", "positions", "queries", "attention"})
    evicts: ClassVar = False
    state: ClassVar = {"probe": torch.bool}  # `update` is called only for a policy with state

    @property
    def queries_observed(self) -> None:
        """Return None, which asks for every query of the block."""
        return

    def update(self, obs: Observation) -> dict[str, Tensor]:
        """Add the attention of the second copy's queries; the state stays as it is."""
        read = int(obs.num_tokens)
        count = min(obs.new, read - self.before - self.length)
        if count > 0:
            rows = obs.attention[:, :, :, -count:]  # [1, K, G, t, n]
            times = torch.arange(read - count, read, device=rows.device)  # [t]
            followed = times - self.length + 1
            follows = obs.positions[:, :, None, None] == followed[:, None]  # [1, K, 1, t, n]
            mass = (rows * follows).sum((0, 3, 4)).flatten().cpu().double()  # [H]
            self.mass[obs.layer] = self.mass.get(obs.layer, 0) + mass
        return {}


@dataclass(frozen=True)
class Calibration:
    """A table for `--policy-option table=FILE`, with the model and text that it was measured on."""

    model: str
    tokens: int  # tokens of a copy
    scores: list[list[float]]  # [L][H] of the capped layers

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the table's file."""
        return {
            "model": self.model,
            "kind": "heads",
            "tokens": self.tokens,
            "kvcap": __version__,
            "scores": self.scores,
        }

    def strongest(self, count: int) -> list[tuple[float, int, int]]:
        """Return score, layer and head of the `count` heads with the highest scores."""
        heads = [(x, i, h) for i, row in enumerate(self.scores) for h, x in enumerate(row)]
        return sorted(heads, key=lambda head: (-head[0], *head[1:]))[:count]


def calibrate(
    model: str | Path,
    text: str,
    *,
    tokens: int = 1024,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Measure the heads of a model on a text.

    Args:
        model: 'pocket', a local directory, or a repository of the hub.
        text: a text of at least 32 tokens.
        tokens: most tokens that are read of it, twice; at most half the model's trained length.
        dtype: the type of weights; the checkpoint's by default.
        device: the device; the best there is by default.
        report: called after each block with (tokens read, tokens in all).

    Raises:
        ModelNotFound, UnsupportedModel: the model cannot be run; weights are not read.
        ValueError: the text is too short, or attention is not finite.
    """
    where = resolve(model)
    trained = ModelShape.of(load_config(where).get_text_config(decoder=True)).trained_length
    before, ids = encode(load_tokenizer(where), text)
    ids = ids[: min(tokens, (trained - len(before)) // 2)]
    if len(ids) < LEAST:
        raise ValueError(
            f"a text of at least {LEAST} tokens is needed; of this one {len(ids)} would be read, "
            f"twice, by a model trained on {trained:,}"
        )
    twice = [*before, *ids, *ids]
    probe = RepetitionProbe(len(ids), len(before))
    runtime = Runtime.from_pretrained(
        model,
        Eviction(probe, name="calibrate"),
        budget_tokens=len(twice),
        dtype=dtype,
        device=device,
        positions="true",  # equal to compact ones without eviction
    )
    loop = BlockLoop(runtime.model, runtime.new_cache())
    on_block = None if report is None else lambda done: report(done, len(twice))
    loop.prefill(torch.tensor([twice], device=runtime.model.device), on_block)
    scores = [(probe.mass[layer] / len(ids)).tolist() for layer in sorted(probe.mass)]
    if not all(math.isfinite(x) for row in scores for x in row):
        raise ValueError(f"attention is not finite in {runtime.plan.dtype}; try --dtype float32")
    name = Path(model).resolve().name if Path(model).is_dir() else str(model)
    return Calibration(name, len(ids), [[float(f"{x:.6g}") for x in row] for row in scores])
