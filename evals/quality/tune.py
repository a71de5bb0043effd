"""Measures candidate policies on a user's model and text at one budget, within a time limit.

In each round every policy reads the same piece of the text and answers the same question, as a
chat would run it, so that figures can be compared; rounds go on while another one fits the time.
Knows no backend: `tune_torch.py` and `tune_llama.py` have the models that are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from kvcap.evals.measure import decode_ms, seconds
from kvcap.evals.quality.answering import Prompt, recall_as_in_chats, split_at_question
from kvcap.evals.quality.prompts import (
    GOLDEN,
    PLAIN,
    Sample,
    drawn,
    has_template,
    prompt_parts,
    tokens_to_say,
)
from kvcap.evals.quality.recommend import (
    FLOOR,
    NEVER,
    UNCAPPED,
    PolicyFigures,
    Recommendation,
    choose,
    flow_beside,
    share,
)
from kvcap.evals.quality.ruler import Needles, string_match_all
from kvcap.policies import PolicyError, policies
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.models.files import encode
from kvcap.runtime.planning.plan import MemoryPlan, Sizes
from kvcap.runtime.recall.recall import Recall
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.runtime.session.engine import Engine, Loop
from kvcap.runtime.units import format_bytes

FEWEST = 2  # candidates that are measured however little time there is
ALL = "all"  # among the names of policies
FACTS_TASK = "niah_single_2"
WANTED_ROUNDS, MOST_ROUNDS = 4, 16
LEAST_PIECES = 2  # pieces that a text must have
PASSAGE = 64  # scored tokens that are compared as one; with a piece as one, no few could differ
LONGEST = 4096  # most tokens of a piece by default
SCORED = 1024  # most scored tokens of a piece, at its end, after most evictions
LEAST_FACTS_LENGTH = 512
ANSWER = 32  # tokens of an answer, enough for a number
MARGIN = 1.25  # times the expected duration for which there must be time
TIMED_BLOCKS, TIMED_TOKENS, REPEATED = 2, 4, range(2)
Report = Callable[[float, str], None]  # takes seconds since the start, and the current step


def spelled_out(names: Iterable[str]) -> list[str]:
    """Return every policy once, with 'all' replaced by the names of all policies."""
    parts = ([*policies()] if name == ALL else [name] for name in names)
    return list(dict.fromkeys(name for part in parts for name in part))


@dataclass(frozen=True)
class TuningRequest:
    """A request to tune: the model, the text, the budget and the time."""

    model: str
    text: str
    sizes: Sizes
    pins: Mapping[str, int] = field(default_factory=dict)  # sink and recent tokens of all policies
    policies: Sequence[str] = ()  # candidates, the last left out first; (): the usual ones
    length: int | None = None  # tokens of a piece; None: as many as the time allows
    minutes: float = 5.0  # limit of the whole time
    seed: int = 0  # seed of needles
    dtype: str | None = None
    device: str | None = None
    weights: str | None = None  # as they are held; None: as a chat would hold them

    @property
    def budget_option(self) -> str:
        """Return the command's option that sets the budget."""
        if self.sizes.cache.kv_budget is not None:
            return "--kv-budget"
        tokens = self.sizes.cache.budget_tokens is not None or self.sizes.memory_cap is None
        return "--budget-tokens" if tokens else "--memory-cap"


@dataclass(frozen=True)
class Tuning:
    """The result of tuning: the figures of all policies, and the recommendation."""

    model: str
    dtype: str
    weights: str | None  # type of weights that are held in fewer bits
    block_size: int
    positions: str
    text_tokens: int  # tokens of the whole text
    length: int  # tokens of a piece
    scored: int  # tokens at the end of a piece that are scored
    pieces: int
    facts_task: str
    facts_length: int  # tokens of a prompt with facts
    samples: int
    recall: int  # most tokens that are read again for a question
    plain: bool  # whether the model was asked in plain text, without a chat template
    minutes: float  # the request's limit
    seconds: float  # the time that was used
    environment: dict[str, Any]
    left_out: tuple[str, ...]  # candidates for which there was no time
    rows: tuple[PolicyFigures, ...]
    choice: Recommendation

    def as_dict(self) -> dict[str, Any]:
        """Return the tuning as one object of JSON."""
        reasons = self.choice.reasons
        rows = [{**row.as_dict(), "dropped": reasons.get(row.policy)} for row in self.rows]
        rest = {"rows": rows, "policy": self.choice.policy, "remarks": list(self.choice.remarks)}
        return {**{k: v for k, v in vars(self).items() if k != "choice"}, **rest}


@dataclass
class Side:
    """A policy that is being measured, with its figures so far."""

    policy: str
    plan: MemoryPlan  # of `full`, that of the policy it is compared with
    kept: Any  # what stays in its caches, as the backend has it
    losses: list[float] = field(default_factory=list)
    facts: list[float] = field(default_factory=list)
    read_ms: float = math.inf

    @property
    def capped(self) -> bool:
        """Return whether it ever evicts."""
        return self.policy != UNCAPPED

    def slots(self, length: int) -> int:
        """Return the slots of a cache for a text of so many tokens."""
        return self.plan.budget_tokens if self.capped else length

    def row(self) -> PolicyFigures:
        """Return the figures."""
        return PolicyFigures(
            self.policy,
            self.plan.budget_tokens if self.capped else None,
            self.plan.cache_bytes if self.capped else None,
            tuple(self.losses),
            tuple(self.facts),
            self.read_ms,
        )


class TunedModel(Protocol):
    """A protocol of models whose policies are measured, each bound to the backend that runs it.

    Token ids are arrays [1, T] of the backend's own kind, by `Engine.token_ids`.
    """

    @property
    def candidates(self) -> Sequence[str]:
        """Return the usual candidates; where time is short, the last are left out."""

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer, before the model is loaded."""

    @property
    def trained_length(self) -> int:
        """Return the longest sequence, in tokens, that the model was trained on."""

    def side(self, policy: str) -> Side:
        """Plan a policy as a conversation would run it: its slots, block, positions and sinks.

        Raises:
            PolicyError, PlanInfeasible, UnsupportedModel: it cannot be run so.
        """

    def uncapped(self, plan: MemoryPlan) -> Side:
        """Return the uncapped model, which reads as this plan says."""

    def load(self, policy: str) -> Engine:
        """Load the model with this policy, as a chat does."""

    def loop(self, side: Side, length: int) -> Loop:
        """Return a loop over an empty cache of a policy, for a text of so many tokens."""

    def losses(self, loop: Loop, ids: Any, start: int) -> NDArray[np.floating[Any]]:
        """Return the losses in nats of a text's tokens after the first `start` + 1."""

    def answer(self, loop: Loop, parts: Sequence[Any], limit: int, recall: Recall | None) -> str:
        """Return the greedy answer to a prompt in parts, of at most `limit` tokens."""

    def environment(self) -> dict[str, Any]:
        """Return device, versions and threads of the loaded model, for JSON."""


class _Clock:
    """The clock of a run, with its time limit."""

    def __init__(self, started: float, minutes: float) -> None:
        self._started, self.limit = started, 60 * minutes

    @property
    def now(self) -> float:
        return time.perf_counter() - self._started

    @property
    def left(self) -> float:
        return self.limit - self.now

    def rounds(self) -> Iterator[int]:
        """Yield numbers of rounds, the first in any case, while another as long as it fits."""
        for number in range(MOST_ROUNDS):
            begun = self.now
            yield number
            if self.now + MARGIN * (self.now - begun) > self.limit:
                return


def tune(
    request: TuningRequest,
    model: TunedModel,
    started: float,
    report: Report = lambda *_: None,
    note: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Measure the candidates, and choose one.

    Args:
        request: the model, the text, the budget and the time.
        model: the model as its backend runs it.
        started: the time when the limit began, by `time.perf_counter`.
        report: called with the seconds so far and the next step.
        note: called with a sentence on how long it will take, on each candidate that is left out,
            and on how a base model is asked.

    Raises:
        ValueError: the text is too short for the budget, or the time for the model; the message
            names values that would work, and nothing is measured.
        PolicyError, PlanInfeasible, UnsupportedModel, ModelNotFound, ModelFilesBroken: the model or
            a policy cannot be used so; weights are not read.
    """
    clock = _Clock(started, request.minutes)
    if not request.text.strip():
        raise ValueError("the text is empty; give one of some thousand tokens")
    sides = _sides(request, model, note)
    plan, tokenizer, trained = sides[0].plan, model.tokenizer, model.trained_length
    opening, ids = encode(tokenizer, request.text)
    _check_lengths(request, sides, trained, len(opening), len(ids))
    if not has_template(tokenizer):
        note(PLAIN.format(request.model))
    note(f"this takes at most {request.minutes:g} minutes (--minutes)")
    report(clock.now, "loading the model")
    engine = model.load(sides[0].policy)
    report(clock.now, "timing a block")
    pace = _pace(model, engine, sides[0], ids)
    facts_length = max(_least_length(sides), min(LEAST_FACTS_LENGTH, trained))
    size = _Size(len(opening) + len(ids), trained, plan.block_size, facts_length)
    measured, length, expected = _fit(request, clock, sides, size, pace)
    left_out = tuple(side.policy for side in sides if side not in measured)
    note(_announced(request, measured, left_out, length, facts_length, expected))
    pieces = _pieces(opening, ids, length)
    recall = _measure(request, model, engine, measured, pieces, facts_length, clock, report)
    rows = tuple(side.row() for side in measured)
    return Tuning(
        model=request.model,
        dtype=engine.plan.dtype,
        weights=engine.plan.weights_dtype,
        block_size=plan.block_size,
        positions=plan.positions,
        text_tokens=len(ids),
        length=length,
        scored=_scored(length),
        pieces=len(rows[0].losses) // _passages(length),
        facts_task=FACTS_TASK,
        facts_length=facts_length,
        samples=len(rows[0].facts),
        recall=recall,
        plain=not has_template(tokenizer),
        minutes=request.minutes,
        seconds=round(clock.now, 1),
        environment=model.environment(),
        left_out=left_out,
        rows=rows,
        choice=choose(rows),
    )


def _sides(request: TuningRequest, model: TunedModel, note: Callable[[str], None]) -> list[Side]:
    """Plan the candidates, and for comparison random eviction and the uncapped model, last.

    Raises:
        ValueError: a requested candidate is none, or never evicts.
        PolicyError, PlanInfeasible, UnsupportedModel: a requested candidate cannot be run, or none
            of the usual ones can.
    """
    strict = bool(request.policies) and ALL not in request.policies
    requested = spelled_out(request.policies or model.candidates)
    names = [name for name in requested if name not in NEVER]
    if not names:
        raise ValueError(
            f"--policies {','.join(request.policies)}: {' and '.join(NEVER)} are measured beside "
            "others and never recommended; name at least one other policy"
        )
    refused = list[Exception]()

    def planned(name: str) -> Side | None:
        try:
            return model.side(name)
        except (PolicyError, PlanInfeasible, UnsupportedModel) as error:
            if strict:
                raise
            note(f"{name} is left out: {error}")
            refused.append(error)
            return None

    sides = [side for name in names if (side := planned(name)) is not None]
    if not sides:
        raise refused[0]
    floor = model.side(FLOOR)
    return [*sides, floor, model.uncapped(floor.plan)]


def _least_length(sides: Sequence[Side]) -> int:
    """Return the fewest tokens of a piece in which evictions matter, twice the largest budget."""
    plans = [side.plan for side in sides]
    return max(
        max(2 * plan.budget_tokens, (plan.budget_tokens // plan.block_size + 2) * plan.block_size)
        for plan in plans
    )


def _check_lengths(
    request: TuningRequest, sides: Sequence[Side], trained: int, opening: int, tokens: int
) -> None:
    """Refuse a text or a piece that is too short for evictions to matter.

    Raises:
        ValueError: naming lengths that would work.
    """
    least, slots = _least_length(sides), max(side.plan.budget_tokens for side in sides)
    budget = f"a budget of {slots:,} slots ({request.budget_option})"
    if least > trained:
        raise ValueError(
            f"{budget} shows only in pieces of {least:,} tokens, and the model was trained on "
            f"{trained:,} at once; give a smaller budget"
        )
    length = request.length or least
    if not least <= length <= trained:
        raise ValueError(
            f"--length {length:,}: under {budget} give one from {least:,} to {trained:,} tokens"
        )
    if (needed := LEAST_PIECES * (length - opening)) > tokens:
        raise ValueError(
            f"the text has {tokens:,} tokens, and {budget} needs at least {needed:,}, "
            f"{LEAST_PIECES} pieces of {length:,}; give a longer text, or a smaller "
            + ("--length" if length > least else request.budget_option)
        )


class _Pace(NamedTuple):
    """The measured pace, in seconds per token."""

    predict: float  # for a piece, with logits of every token
    read: float  # for a prompt, with logits of the last token
    write: float  # for an answer

    def round(self, length: int, facts_length: int) -> float:
        """Return the seconds of one policy's piece and fact."""
        scored = _scored(length)
        read = length - scored + facts_length
        return read * self.read + scored * self.predict + ANSWER * self.write


def _pace(model: TunedModel, engine: Engine, side: Side, ids: Sequence[int]) -> _Pace:
    """Time some blocks of the text as a piece and as a prompt, at best, and an answer."""
    text = engine.token_ids([*ids[: TIMED_BLOCKS * side.plan.block_size]])
    token, length = text[:, :1], text.shape[1]
    loop = model.loop(side, length)

    def read() -> None:
        loop.cache.reset()
        loop.prefill(text).sum().item()

    pieces = [seconds(lambda: model.losses(model.loop(side, length), text, 0)) for _ in REPEATED]
    prompts = [seconds(read) for _ in REPEATED]
    written = decode_ms(lambda _: loop.read(token).sum().item(), TIMED_TOKENS)
    return _Pace(min(pieces) / length, min(prompts) / length, min(written) / 1000)


class _Size(NamedTuple):
    """The lengths that bound a piece and give a prompt."""

    text: int  # tokens of the text
    trained: int
    block: int
    facts: int  # tokens of a prompt with a fact


def _fit(
    request: TuningRequest, clock: _Clock, sides: Sequence[Side], size: _Size, pace: _Pace
) -> tuple[list[Side], int, float]:
    """Choose as many candidates, and then as long pieces, as there is time for.

    Candidates are left out from the last one on, down to `FEWEST`, until two rounds fit. Pieces are
    then as long as `WANTED_ROUNDS` allow.

    Returns:
        The policies to measure, the tokens of a piece, and the minutes until the end.

    Raises:
        ValueError: not even one round fits; the message names the minutes that would be enough.
    """
    candidates, compared = sides[: -len(NEVER)], sides[-len(NEVER) :]
    least = request.length or _least_length(sides)

    def needed(count: int, rounds: int, length: int = least) -> float:
        each = pace.round(length, size.facts)
        return MARGIN * rounds * (count + len(compared)) * each

    few = min(FEWEST, len(candidates))
    if needed(few, 1) > clock.left:
        minutes = math.ceil((clock.now + needed(few, 1)) / 60)
        raise ValueError(
            f"--minutes {request.minutes:g} are too few: the model reads {1 / pace.read:,.0f} "
            f"tokens a second here and predicts {1 / pace.predict:,.0f} of a text, and the least "
            f"that compares policies takes about {minutes}; give --minutes {minutes}, or a smaller "
            "budget"
        )
    counts = range(len(candidates), few, -1)
    count = next((n for n in counts if needed(n, 2) <= clock.left), few)
    most = min(LONGEST, size.trained, size.text // LEAST_PIECES)
    lengths = range(most // size.block * size.block, least, -size.block)
    fitting = (n for n in lengths if needed(count, WANTED_ROUNDS, n) <= clock.left)
    length = request.length or next(fitting, least)
    rounds = max(1, min(MOST_ROUNDS, int(clock.left / needed(count, 1, length) * MARGIN)))
    expected = clock.now + rounds * needed(count, 1, length) / MARGIN
    return [*candidates[:count], *compared], length, expected / 60


def _announced(
    request: TuningRequest,
    measured: Sequence[Side],
    left_out: Sequence[str],
    length: int,
    facts_length: int,
    minutes: float,
) -> str:
    """Return a sentence on what is going to be measured, and how long that takes."""
    names = ", ".join(side.policy for side in measured)
    sentence = (
        f"measuring {names} on pieces of {length:,} tokens and facts in {facts_length:,}; done "
        f"after about {minutes:.1f} of {request.minutes:g} minutes"
    )
    if not left_out:
        return sentence
    return f"{sentence}; there is no time for {', '.join(left_out)}, give more --minutes for them"


def _measure(
    request: TuningRequest,
    model: TunedModel,
    engine: Engine,
    sides: Sequence[Side],
    pieces: Sequence[Sequence[int]],
    facts_length: int,
    clock: _Clock,
    report: Report,
) -> int:
    """Have all policies read a piece and find a fact in every round, as long as there is time.

    Returns:
        The most tokens that are read again for a question.
    """
    tokenizer, most = engine.tokenizer, 0
    report(clock.now, "hiding facts")
    threads = torch.get_num_threads()
    samples = drawn(
        FACTS_TASK,
        Needles().make,
        tokenizer,
        facts_length,
        MOST_ROUNDS,
        request.seed,
        None,
        threads,
    )
    for number in clock.rounds():
        for side in sides:
            if number < len(pieces):
                report(clock.now, f"piece {number + 1}, {side.policy}")
                _read_piece(model, engine, side, pieces[number])
            report(clock.now, f"fact {number + 1}, {side.policy}")
            recalled = RecallSettings.parse().limit(side.plan.budget_tokens) if side.capped else 0
            side.facts.append(_find_fact(model, engine, side, samples[number], recalled))
            most = max(most, recalled)
    return most


def _read_piece(model: TunedModel, engine: Engine, side: Side, ids: Sequence[int]) -> None:
    """Add the losses of a piece's passages to a policy's figures, and the time."""
    length, text = len(ids), engine.token_ids([*ids])
    loop = model.loop(side, length)
    begun = time.perf_counter()
    losses = model.losses(loop, text, length - _scored(length))
    side.read_ms = min(side.read_ms, 1000 * (time.perf_counter() - begun) / length)
    side.losses += [fmean(part.tolist()) for part in np.array_split(losses, _passages(length))]


def _find_fact(
    model: TunedModel, engine: Engine, side: Side, sample: Sample, recalled: int
) -> float:
    """Return the score of a policy's answer, with recall as in a chat."""
    tokenizer, limit = engine.tokenizer, ANSWER
    if not has_template(tokenizer):  # a base model does not end its answer
        limit = min(limit, tokens_to_say(tokenizer, sample))
    recall = recall_as_in_chats(engine, recalled, side.plan.budget_tokens)
    prompt: Prompt = sample, prompt_parts(tokenizer, sample, "aware")
    if recall is not None:
        prompt = split_at_question(tokenizer, recall, prompt)
    parts = [engine.token_ids([*ids]) for ids in prompt[1]]
    loop = model.loop(side, sum(ids.shape[1] for ids in parts) + limit)
    return string_match_all(sample, model.answer(loop, parts, limit, recall))


def _pieces(opening: Sequence[int], ids: Sequence[int], length: int) -> list[list[int]]:
    """Cut a text into pieces that do not overlap, ordered so that the first ones are spread out."""
    size = length - len(opening)
    count = len(ids) // size
    order = dict.fromkeys(int(k * GOLDEN % 1 * count) for k in range(4 * count))
    return [[*opening, *ids[i * size : (i + 1) * size]] for i in [*order][:MOST_ROUNDS]]


def _scored(length: int) -> int:
    """Return how many tokens at the end of a piece are scored, at most half of them."""
    return min(SCORED, length // 2)


def _passages(length: int) -> int:
    """Return the number of passages into which the scored tokens of a piece are cut."""
    return max(1, _scored(length) // PASSAGE)


def table(tuning: Tuning) -> Table:
    """Return the figures of all policies, the best first, and why candidates were dropped."""
    shown = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    shown.add_column("policy")
    for name in ("slots", "KV cache", "perplexity", "times the chosen (95 %)", "facts", "ms/token"):
        shown.add_column(name, justify="right")
    shown.add_column("")
    choice = tuning.choice
    rows = sorted(tuning.rows, key=lambda row: row.cost)
    chosen = next((row for row in rows if row.policy == choice.policy), None)
    for row in rows:
        dropped = f"dropped: {choice.reasons[row.policy]}" if row.policy in choice.reasons else ""
        shown.add_row(
            row.policy,
            "uncapped" if row.slots is None else f"{row.slots:,}",
            "" if row.kv_bytes is None else format_bytes(row.kv_bytes),
            f"{row.perplexity:.3f}",
            "" if chosen is None else _beside(row, chosen),
            share(row.facts),
            "" if row.read_ms is None else f"{row.read_ms:.1f}",
            "chosen" if row is chosen else dropped or "for comparison",
            style="bold" if row is chosen else "",
        )
    return shown


def describe(tuning: Tuning) -> str:
    """Return a sentence on the measurements: pieces, facts, lengths and time."""
    template = ", asked in plain text" if tuning.plain else ""
    weights = f" with {tuning.weights} weights" if tuning.weights else ""
    return (
        f"{tuning.model}: {tuning.pieces} pieces of {tuning.length:,} tokens of a text of "
        f"{tuning.text_tokens:,}, the last {tuning.scored:,} of each scored; {tuning.samples} "
        f"facts, one in {tuning.facts_length:,} tokens each ({tuning.facts_task}{template}), with "
        f"recall; {tuning.dtype}{weights}, blocks of {tuning.block_size:,}, {tuning.positions} "
        f"positions, {tuning.environment['device']}; {tuning.seconds:,.0f} s of "
        f"{60 * tuning.minutes:,.0f}"
    )


def _beside(row: PolicyFigures, chosen: PolicyFigures) -> str:
    if row is chosen:
        return "1"
    beside = flow_beside(row, chosen)
    return f"{beside.difference:.3f} ({beside.ci_low:.3f}–{beside.ci_high:.3f})"
