"""Measures how far a cap moves a model's predictions on a text: first choices and KL divergence.

The text is cut into passages, each read from an empty cache. The uncapped model and every setting
of policy, budget and positions read a passage in parallel, block by block. So the uncapped model's
predictions are computed once, and memory holds those of one block. Predictions before a setting's
first eviction are counted separately from those after it.

Intervals are bootstrapped over the blocks of the text, as neighbouring tokens are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvcap import dtypes
from kvcap.evals.quality.scores import bootstrap
from kvcap.evals.reports import environment, grid
from kvcap.lab.quality.cells import Setting
from kvcap.lab.quality.measuring import new_cache
from kvcap.lab.quality.sweep import Sweep, usual_positions
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.files import encode, load_config, load_tokenizer
from kvcap.runtime.models.names import resolve

STRETCHES = 4  # parts of a passage that have figures of their own
ROWS = 64  # predictions that are compared at once


def compare(mine: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Compare predictions with the uncapped model's, both as log-probabilities [T, V].

    Returns:
        KL(truth ‖ mine) in nats [T], and whether the first choice is the same, bool [T].
    """
    divergence = (truth.exp() * (truth - mine)).sum(-1)
    return divergence.clamp(min=0), mine.argmax(-1) == truth.argmax(-1)


@dataclass(frozen=True)
class PartAgreement:
    """The agreement of some predictions with the uncapped model's, with 95 % intervals.

    Without predictions, all figures are None; with predictions of one block, intervals are None.
    """

    tokens: int  # number of predictions
    same: float | None = None  # share of equal first choices
    same_interval: tuple[float, float] | None = None
    kl: float | None = None  # mean KL divergence from the uncapped model's prediction, nats
    kl_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class SettingAgreement:
    """A setting of the cache, and how its predictions agree with the uncapped model's."""

    setting: Setting
    kv_bytes: int  # bytes of a cache for one sequence
    fits: PartAgreement  # predictions before anything was evicted
    evicted: PartAgreement  # predictions after the first eviction
    stretches: tuple[PartAgreement, ...]  # all predictions, by their place in the passage

    def as_dict(self) -> dict[str, Any]:
        """Return the row as one object of JSON."""
        s = self.setting
        return {
            "policy": s.policy,
            "options": dict(s.options),
            "budget": s.budget,
            "positions": s.positions,
            "kv_dtype": s.kv_dtype,
            "kv_bytes": self.kv_bytes,
            "fits": vars(self.fits),
            "evicted": vars(self.evicted),
            "stretches": [vars(part) for part in self.stretches],
        }


@dataclass(frozen=True)
class Agreement:
    """A measurement of how capped settings agree with the uncapped model on a text."""

    model: str
    dtype: str
    block_size: int
    tokens: int  # tokens of all passages
    passages: int
    length: int  # tokens of the longest passage
    rows: tuple[SettingAgreement, ...]
    environment: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the agreement as one object of JSON."""
        return {**vars(self), "rows": [row.as_dict() for row in self.rows]}


@dataclass
class _Counts:
    """Sums over a block's predictions."""

    stretch: int  # index of the passage's stretch, by the block's first token
    evicted: bool  # whether anything was evicted before the block
    tokens: int  # number of predictions
    same: float  # number of equal first choices
    kl: float  # sum of KL divergences


@dataclass
class _Side:
    """A setting that reads a passage, with its counts so far."""

    setting: Setting
    loop: BlockLoop
    counts: list[_Counts] = field(default_factory=list)


def measure(sweep: Sweep, text: str, report: Callable[[int, int], None] | None = None) -> Agreement:
    """Read `text` under every setting of a sweep and without a cap.

    Args:
        sweep: the settings; read are policies, budgets, positions, options, the first of lengths
            (most tokens of a passage), samples (most passages) and how the model is loaded.
            Passages are at most as long as the model's trained length.
        text: the text to read.
        report: called after each block with (tokens read, tokens in all).

    Raises:
        ValueError: there is no text, or so little that a budget's evictions would change nothing.
        PolicyError, PlanInfeasible, UnsupportedModel, ModelNotFound, ModelFilesBroken: the model
            or a policy cannot be used so; weights are not read.
    """
    # The sweep's settings of tasks are not used, and get any valid value.
    sweep = replace(sweep, tasks=("niah_single",), questions=("aware",), depths=(None,))
    sweep.check()
    if sweep.by_llamacpp:
        raise UnsupportedModel(
            f"agreement is measured in PyTorch, and {sweep.model!r} would be run by llama.cpp; "
            "give --backend torch"
        )
    if not text.strip():
        raise ValueError("the text is empty; give one that is longer than the budget")
    where = resolve(sweep.model)
    config = load_config(where)
    dtype = str(dtypes.of_model(sweep.dtype, config)).removeprefix("torch.")
    settings = sweep.settings(dtype, usual_positions(sweep, config))
    opening, ids = encode(load_tokenizer(where), text)
    shape = ModelShape.of(config.get_text_config(decoder=True))
    length = max(1, min(sweep.lengths[0], shape.trained_length) - len(opening))
    starts = range(0, len(ids), length)[: sweep.samples]
    passages = [[*opening, *ids[i : i + length]] for i in starts]
    longest = max(map(len, passages), default=0)
    for setting in settings:
        _check_length(setting, longest)
        _new_cache(config, setting, longest)
    runtime = Runtime.from_pretrained(
        sweep.model,
        budget_tokens=longest,
        block_size=sweep.block_size,
        dtype=sweep.dtype,
        device=sweep.device,
    )
    model, device = runtime.model, runtime.model.device
    truth = BlockLoop(model, _new_cache(model.config, None, longest, sweep.block_size))
    sides = [_Side(s, BlockLoop(model, _new_cache(model.config, s, longest))) for s in settings]
    total, done = sum(map(len, passages)), 0
    for passage in passages:
        for loop in (truth, *(side.loop for side in sides)):
            loop.cache.reset()
        for start in range(0, len(passage), sweep.block_size):
            block = torch.tensor([passage[start : start + sweep.block_size]], device=device)
            expected = _logits(truth, block)
            for side in sides:
                _add(side, block, expected, start * STRETCHES // longest)
            done += block.shape[1]
            if report is not None:
                report(done, total)
    return Agreement(
        model=sweep.model,
        dtype=settings[0].dtype,
        block_size=sweep.block_size,
        tokens=total,
        passages=len(passages),
        length=longest,
        rows=tuple(_row(side) for side in sides),
        environment=environment(device),
    )


def _check_length(setting: Setting, longest: int) -> None:
    """Refuse a budget whose evictions come too late to change a prediction.

    Raises:
        ValueError: naming a length and a budget that would work.
    """
    if setting.budget is None:
        return
    size = setting.block_size
    first = (setting.budget // size + 1) * size  # tokens read before the first eviction
    if longest <= first:
        raise ValueError(
            f"{longest:,} tokens are read at once, and under a budget of {setting.budget:,} slots, "
            f"in blocks of {size:,}, an eviction shows only after {first:,}; give a longer text, "
            "smaller --budgets, a smaller --block-size or, if they are fewer, more --lengths"
        )


def _new_cache(
    config: Any, setting: Setting | None, longest: int, block_size: int = 0
) -> BudgetCache:
    """Return a cache for a setting, or for a whole passage without a setting or a budget."""
    if setting is None:
        return BudgetCache(config, longest, block_size, "full", positions="true")
    return new_cache(config, replace(setting, budget=setting.budget or longest))


def _logits(loop: BlockLoop, block: Tensor) -> Tensor:
    """Return logits [T, V] of a block [1, T], which is read in parts if it does not fit."""
    logits = []
    while block.shape[1]:
        room = loop.cache.room
        logits.append(loop.read_every(block[:, :room])[0])
        block = block[:, room:]
    return torch.cat(logits) if len(logits) > 1 else logits[0]


def _add(side: _Side, block: Tensor, expected: Tensor, stretch: int) -> None:
    """Read a block under a setting, and count how its predictions agree with `expected`."""
    evicted = any(count < seen for seen, held in side.loop.cache.counters for count in held)
    same = kl = 0.0
    logits = _logits(side.loop, block)
    for mine, truth in zip(logits.split(ROWS), expected.split(ROWS), strict=True):
        divergence, equal = compare(mine.float().log_softmax(-1), truth.float().log_softmax(-1))
        same, kl = same + float(equal.sum()), kl + float(divergence.double().sum())
    side.counts.append(_Counts(stretch, evicted, len(expected), same, kl))


def _row(side: _Side) -> SettingAgreement:
    counts = side.counts
    return SettingAgreement(
        side.setting,
        side.loop.cache.nbytes,
        fits=_part([c for c in counts if not c.evicted]),
        evicted=_part([c for c in counts if c.evicted]),
        stretches=tuple(_part([c for c in counts if c.stretch == i]) for i in range(STRETCHES)),
    )


def _part(counts: Sequence[_Counts]) -> PartAgreement:
    """Return shares and means over blocks, with intervals."""
    if not counts:
        return PartAgreement(0)
    sizes = [c.tokens for c in counts]
    figures: dict[str, Any] = {"tokens": sum(sizes)}
    for name in ("same", "kl"):
        sums = [getattr(c, name) for c in counts]
        figures[name] = sum(sums) / sum(sizes)
        if len(counts) > 1:
            means = [x / size for x, size in zip(sums, sizes, strict=True)]
            figures[f"{name}_interval"] = bootstrap(means, sizes)
    return PartAgreement(**figures)


def table(agreement: Agreement) -> str:
    """Return the figures as a Markdown text."""
    edges = [agreement.length * i // STRETCHES for i in range(STRETCHES + 1)]
    spans = [f"{a + 1:,} to {b:,}" for a, b in pairwise(edges)]
    head = ["policy", "positions", "budget"]
    passages = f"{agreement.passages} passage{'s' * (agreement.passages > 1)}"
    return "\n".join(
        [
            f"# Agreement with the uncapped model, {agreement.model}",
            "",
            f"{agreement.tokens:,} tokens in {passages} of up to {agreement.length:,}, blocks of "
            f"{agreement.block_size}, {agreement.dtype}, {agreement.environment['device']}. "
            "Same: the share of equal first choices. KL: the mean divergence from the uncapped "
            "model's prediction, in nats. In brackets: 95 % intervals (bootstrap over blocks).",
            "",
            *grid(
                [
                    *head,
                    "same after evictions",
                    "KL after evictions",
                    "tokens",
                    "same before",
                    "KL before",
                ],
                [
                    [
                        *_names(row.setting),
                        _figure(row.evicted.same, row.evicted.same_interval, 3),
                        _figure(row.evicted.kl, row.evicted.kl_interval, 4),
                        f"{row.evicted.tokens:,}",
                        _figure(row.fits.same, None, 3),
                        _figure(row.fits.kl, None, 4),
                    ]
                    for row in agreement.rows
                ],
            ),
            "",
            "By the place of a block in its passage, same / KL:",
            "",
            *grid(
                [*head, *spans],
                [
                    [
                        *_names(row.setting),
                        *(
                            f"{_figure(part.same, None, 3)} / {_figure(part.kl, None, 4)}"
                            for part in row.stretches
                        ),
                    ]
                    for row in agreement.rows
                ],
            ),
            "",
        ]
    )


def _names(s: Setting) -> list[str]:
    given = [*(f"{name}={value}" for name, value in s.options), *([s.slots] if s.slots else [])]
    budget = "uncapped" if s.budget is None else f"{s.budget:,}"
    return [", ".join([s.policy, *given]), s.positions, budget]


def _figure(value: float | None, interval: tuple[float, float] | None, digits: int) -> str:
    if value is None:
        return "none"
    ends = "" if interval is None else f" ({interval[0]:.{digits}f}–{interval[1]:.{digits}f})"
    return f"{value:.{digits}f}{ends}"
