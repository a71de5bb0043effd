"""Measures candidate policies on a user's model and text at one budget, within a time limit.

Each policy reads pieces of the text, finds needles in prose without and with recall, and is timed,
by the same functions as in `kvcap eval`. In each round all policies read the same pieces or
needles, so that their figures can be compared; rounds go on while another one fits the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.table import Table
from transformers import PretrainedConfig

from kvcap.dtypes import of_model
from kvcap.evals.measure import decode_ms, eviction_ms, seconds
from kvcap.evals.quality.answering import Prompt, losses, measure, new_cache
from kvcap.evals.quality.cells import Setting, as_options
from kvcap.evals.quality.recommend import (
    FLOOR,
    NEVER,
    UNCAPPED,
    PolicyFigures,
    Recommendation,
    choose,
    flow_beside,
    near_best,
    share,
)
from kvcap.evals.quality.sweep import ALL, PLAIN, spelled_out
from kvcap.evals.quality.tasks import (
    GOLDEN,
    Sample,
    has_template,
    make_samples,
    prompt_parts,
)
from kvcap.evals.reports import environment
from kvcap.policies import Eviction, PolicyError, load_policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime, usual_every
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.devices import best_device
from kvcap.runtime.models.files import encode, load_config, load_tokenizer
from kvcap.runtime.models.names import resolve
from kvcap.runtime.models.weights import read_headers
from kvcap.runtime.planning.plan import MemoryPlan, Sizes, parse_cap
from kvcap.runtime.recall.settings import RecallSettings, index_bytes
from kvcap.runtime.units import format_bytes

CANDIDATES = ("dropkv", "snapkv", "lagkv", "streaming_llm", "keydiff-window")
FACTS_TASK = "niah_single_2"
LEAST_PIECES, WANTED_PIECES, MOST_PIECES = 2, 3, 12  # with one piece no difference is significant
LONGEST = 4096  # most tokens of a piece by default
SCORED = 1024  # most scored tokens of a piece, at its end, after most evictions
LEAST_SAMPLES, MOST_SAMPLES, LEAST_FACTS_LENGTH = 2, 16, 512
ANSWER = 32  # tokens of an answer, enough for a number
AT_ONCE = 4  # pieces or facts that a GPU reads at once; a CPU reads one
FLOW_SHARE = 0.4  # flow's share of the time after loading the model; facts get the rest
WARM_UPS, TIMED_BLOCKS, TIMED_TOKENS = 3, 4, 8
Report = Callable[[float, str], None]  # takes seconds since the start, and the current step


@dataclass(frozen=True)
class TuningRequest:
    """A request to tune: the model, the text, the budget and the time."""

    model: str
    text: str
    sizes: Sizes
    pins: Mapping[str, int] = field(default_factory=dict)  # sink and recent tokens of all policies
    policies: Sequence[str] = ()  # candidates; (): the usual ones that can be run
    length: int | None = None  # tokens of a piece; None: as many as the time allows
    minutes: float = 5.0  # limit of the whole time
    seed: int = 0  # seed of needles
    dtype: str | None = None
    device: str | None = None

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
    block_size: int
    positions: str
    text_tokens: int  # tokens of the whole text
    length: int  # tokens of a piece
    scored: int  # tokens at the end of a piece that are scored
    pieces: int
    facts_task: str
    facts_length: int  # tokens of a prompt with facts
    samples: int
    recall: int  # most tokens that were read again for a question
    plain: bool  # whether the model was asked in plain text, without a chat template
    minutes: float  # the request's limit
    seconds: float  # the time that was used
    environment: dict[str, Any]
    rows: tuple[PolicyFigures, ...]
    choice: Recommendation

    def as_dict(self) -> dict[str, Any]:
        """Return the tuning as one object of JSON."""
        near = self.choice.near
        rows = [{**row.as_dict(), "flow_near_best": row.policy in near} for row in self.rows]
        chosen = {"policy": self.choice.policy, "recall": self.choice.recall}
        rest = {"rows": rows, **chosen, "remarks": list(self.choice.remarks)}
        return {**{k: v for k, v in vars(self).items() if k != "choice"}, **rest}


@dataclass
class _Side:
    """A policy that is being measured, with its figures so far."""

    policy: str
    plan: MemoryPlan
    setting: Setting  # the setting for flow; that for facts differs in task, length and recall
    losses: list[float] = field(default_factory=list)
    facts: list[float] = field(default_factory=list)
    recalled: list[float] = field(default_factory=list)
    eviction_ms: float | None = None
    decode_ms: float | None = None

    def row(self) -> PolicyFigures:
        return PolicyFigures(
            self.policy,
            self.setting.budget,
            None if self.setting.budget is None else self.plan.cache_bytes,
            tuple(self.losses),
            tuple(self.facts),
            tuple(self.recalled),
            self.eviction_ms,
            self.decode_ms,
        )


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

    def rounds(self, count: int, least: int, size: int, until: float) -> Iterator[slice]:
        """Yield slices of `count` things while another one fits the time.

        Args:
            count: most things.
            least: number of things that are yielded in any case.
            size: things of a slice.
            until: time by which a slice must be done, if it takes as long as the last one.
        """
        took = 0.0
        for first in range(0, count, size):
            begun = self.now
            if first >= least and begun + took > until:
                return
            yield slice(first, first + size)
            took = self.now - begun


def tune(
    request: TuningRequest,
    started: float,
    report: Report = lambda *_: None,
    note: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Measure the candidates, and choose one.

    Args:
        request: the model, the text, the budget and the time.
        started: the time when the limit began, by `time.perf_counter`.
        report: called with the seconds so far and the next step.
        note: called with a sentence on each usual candidate that cannot be run, and on how a base
            model is asked.

    Raises:
        ValueError: the text is too short for the budget, or the time for the model; the message
            names values that would work, and nothing is measured.
        PolicyError, PlanInfeasible, UnsupportedModel, ModelNotFound, ModelFilesBroken: the model or
            a policy cannot be used so; weights are not read.
    """
    clock = _Clock(started, request.minutes)
    if not request.text.strip():
        raise ValueError("the text is empty; give one of some thousand tokens")
    where = resolve(request.model)
    config = request.sizes.config_for(load_config(where))
    sides = _sides(request, where, config, note)
    tokenizer = load_tokenizer(where)
    opening, ids = encode(tokenizer, request.text)
    trained = ModelShape.of(config.get_text_config(decoder=True)).trained_length
    _check_lengths(request, sides, trained, len(opening), len(ids))
    if not has_template(tokenizer):
        note(PLAIN.format(request.model))
    report(clock.now, "loading the model")
    plan = sides[0].plan
    runtime = Runtime.from_pretrained(
        request.model,
        plan.sized(request.sizes.cache),
        dtype=request.dtype,
        device=request.device,
    )
    run = _Run(request, runtime, sides, opening, ids, clock, report)
    facts_length = max(_least_length(sides), min(LEAST_FACTS_LENGTH, trained))
    length, pace = run.fit(trained, facts_length)
    run.time()
    run.read_pieces(length, _facts_seconds(sides, facts_length, pace))
    near = {row.policy for row in near_best([side.row() for side in sides])}
    recall = run.find_facts(facts_length, near) if near else 0
    rows = tuple(side.row() for side in sides)
    return Tuning(
        model=request.model,
        dtype=runtime.plan.dtype,
        block_size=plan.block_size,
        positions=plan.positions,
        text_tokens=len(ids),
        length=length,
        scored=_scored(length),
        pieces=len(rows[0].losses),
        facts_task=FACTS_TASK,
        facts_length=facts_length,
        samples=len(rows[0].facts),
        recall=recall,
        plain=not has_template(tokenizer),
        minutes=request.minutes,
        seconds=round(clock.now, 1),
        environment=environment(runtime.model.device),
        rows=rows,
        choice=choose(rows),
    )


@dataclass
class _Run:
    """A run of tuning: the loaded model, and the policies that it measures step by step."""

    request: TuningRequest
    runtime: Runtime
    sides: Sequence[_Side]
    opening: Sequence[int]  # tokens that begin every piece
    ids: Sequence[int]  # tokens of the text
    clock: _Clock
    report: Report

    def fit(self, trained: int, facts_length: int) -> tuple[int, _Pace]:
        """Return the tokens of a piece for which there is time, and the measured pace.

        A block is timed first, so that hopeless cases are refused soon, and then a piece.

        Raises:
            ValueError: there is not enough time; the message names the minutes that would be.
        """
        request, clock, first = self.request, self.clock, self.sides[0]
        least = request.length or _least_length(self.sides)
        for doing, tokens, repeats in (
            ("timing a block", first.plan.block_size + 1, WARM_UPS),
            ("timing a piece", least, 1),
        ):
            self.report(clock.now, doing)
            pace = _pace(self.runtime, first.setting, self.ids[:tokens], repeats)
            needed = _least_seconds(self.sides, least, facts_length, pace)
            _check_time(request, clock, needed, pace)
        most = min(LONGEST, trained, (len(self.opening) + len(self.ids)) // WANTED_PIECES)
        each = FLOW_SHARE * clock.left / (len(self.sides) * WANTED_PIECES)
        block = first.plan.block_size
        lengths = range(most // block * block, least, -block)
        longest = next((n for n in lengths if _piece_seconds(n, pace) <= each), least)
        return request.length or longest, pace

    def time(self) -> None:
        """Time the evictions and the decoding of every policy."""
        for side in self.sides:
            if side.setting.budget is not None:
                self.report(self.clock.now, f"timing {side.policy}")
                _time(self.runtime, side, self.ids)

    def read_pieces(self, length: int, kept: float) -> None:
        """Read pieces of the text, and leave at least `kept` seconds for facts."""
        clock = self.clock
        prompts = _pieces(self.opening, self.ids, length)
        until = min(clock.now + FLOW_SHARE * clock.left, clock.limit - kept)
        for part in clock.rounds(len(prompts), LEAST_PIECES, self._at_once(1), until):
            for side in self.sides:
                self.report(clock.now, f"piece {part.start + 1}, {side.policy}")
                setting = replace(side.setting, length=length)
                side.losses += _scores(self.runtime, setting, prompts[part])

    def find_facts(self, length: int, near: Collection[str]) -> int:
        """Ask all policies for needles, and those named `near` also with recall.

        Returns:
            The most tokens that were read again for a question.
        """
        clock, seed, most = self.clock, self.request.seed, 0
        tokenizer, threads = self.runtime.tokenizer, torch.get_num_threads()
        self.report(clock.now, "hiding facts")
        samples = make_samples(FACTS_TASK, tokenizer, length, MOST_SAMPLES, seed, None, threads)
        prompts = [(sample, prompt_parts(tokenizer, sample, "aware")) for sample in samples]
        size = self._at_once(LEAST_SAMPLES)
        for part in clock.rounds(MOST_SAMPLES, LEAST_SAMPLES, size, clock.limit):
            for side in self.sides:
                if side.policy == FLOOR:
                    continue
                setting = replace(
                    side.setting,
                    task=FACTS_TASK,
                    length=length,
                    question="aware",
                    max_new_tokens=ANSWER,
                )
                self.report(clock.now, f"fact {part.start + 1}, {side.policy}")
                side.facts += _scores(self.runtime, setting, prompts[part])
                if side.policy in near:
                    tokens = RecallSettings.parse().limit(setting.budget or 0)
                    most = max(most, tokens)
                    self.report(clock.now, f"fact {part.start + 1}, {side.policy} with recall")
                    setting = replace(setting, recall=tokens)
                    side.recalled += _scores(self.runtime, setting, prompts[part])
        return most

    def _at_once(self, fewest: int) -> int:
        """Return how many prompts a round has: `fewest` on a CPU, `AT_ONCE` on a GPU."""
        return fewest if self.runtime.model.device.type == "cpu" else AT_ONCE


def _sides(
    request: TuningRequest, where: str, config: PretrainedConfig, note: Callable[[str], None]
) -> list[_Side]:
    """Plan the candidates, and for comparison random eviction and the uncapped model, last.

    Raises:
        ValueError: a requested candidate is none, or never evicts.
        PolicyError, PlanInfeasible, UnsupportedModel: a requested candidate cannot be run, or none
            of the usual ones can.
    """
    strict = bool(request.policies) and ALL not in request.policies
    names = [name for name in spelled_out(request.policies or CANDIDATES) if name not in NEVER]
    if not names:
        raise ValueError(
            f"--policies {','.join(request.policies)}: {' and '.join(NEVER)} are measured beside "
            "others and never recommended; name at least one other policy"
        )
    refused = list[Exception]()

    def planned(name: str) -> _Side | None:
        try:
            return _side(request, where, config, name)
        except (PolicyError, PlanInfeasible, UnsupportedModel) as error:
            if strict:
                raise
            note(f"{name} is left out: {error}")
            refused.append(error)
            return None

    sides = [side for name in names if (side := planned(name)) is not None]
    if not sides:
        raise refused[0]
    floor = _side(request, where, config, FLOOR)
    full = replace(
        floor.setting, policy=UNCAPPED, budget=None, options=(), kv_dtype=None, positions="true"
    )
    return [*sides, floor, _Side(UNCAPPED, floor.plan, full)]


def _side(request: TuningRequest, where: str, config: PretrainedConfig, policy: str) -> _Side:
    """Plan a policy as a conversation would run it: its slots, block, positions and sinks."""
    eviction = load_policy(policy, **request.pins)
    if not eviction.policy.evicts:
        raise PolicyError(f"{policy} never evicts, so that it needs no budget; leave it out")
    dtype = of_model(request.dtype, config)
    cap = request.sizes.memory_cap
    plan = MemoryPlan.of(
        config,
        replace(request.sizes.cache, policy=eviction),
        dtype=dtype,
        device=request.device or best_device(),
        memory_cap=cap,
        headers=read_headers(where),
        recall_store=index_bytes(cap=None if cap is None else parse_cap(cap)),
    )
    run = _with_sinks(eviction, config, plan.budget_tokens)
    setting = Setting(
        model=request.model,
        dtype=plan.dtype,
        task="perplexity",
        length=0,  # set once a piece was timed
        policy=policy,
        positions=plan.positions,
        budget=plan.budget_tokens,
        samples=1,
        seed=request.seed,
        block_size=plan.block_size,
        options=as_options({**request.pins, "sink_tokens": run.sink_tokens}),
        kv_dtype=plan.kv_dtype,
        question=None,
    )
    return _Side(policy, plan, setting)


def _with_sinks(eviction: Eviction, config: PretrainedConfig, budget: int) -> Eviction:
    """Return an eviction with the sinks that conversations pin, and evaluations do not."""
    shape = ModelShape.of(config.get_text_config(decoder=True))
    return eviction.with_sinks(budget, len(shape.capped), shape.kv_heads)


def _least_length(sides: Sequence[_Side]) -> int:
    """Return the fewest tokens of a piece in which evictions matter, twice the largest budget."""
    plans = [side.plan for side in sides]
    return max(
        max(2 * plan.budget_tokens, (plan.budget_tokens // plan.block_size + 2) * plan.block_size)
        for plan in plans
    )


def _check_lengths(
    request: TuningRequest, sides: Sequence[_Side], trained: int, opening: int, tokens: int
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


def _pace(runtime: Runtime, setting: Setting, ids: Sequence[int], repeats: int = 1) -> _Pace:
    """Time `ids` as a piece and as a prompt, the best of `repeats` times each, and an answer."""
    model = runtime.model
    text = torch.tensor([[*ids]], device=model.device)
    setting = replace(setting, length=len(ids))
    loop = BlockLoop(model, new_cache(model.config, setting))

    def predict() -> None:
        losses(model, new_cache(model.config, setting), text).sum().item()

    def read() -> None:
        loop.cache.reset()
        loop.prefill(text).sum().item()

    pieces, prompts = ([seconds(one) for _ in range(repeats)] for one in (predict, read))
    write = median(decode_ms(_reader(loop), TIMED_TOKENS)) / 1000
    return _Pace(min(pieces) / len(ids), min(prompts) / len(ids), write)


def _reader(loop: BlockLoop) -> Callable[[torch.Tensor], float]:
    """Return a function that reads a token and waits for the device."""
    return lambda token: float(loop.read(token.to(loop.model.device))[0, 0])


def _least_seconds(sides: Sequence[_Side], length: int, asked: int, pace: _Pace) -> float:
    """Return the seconds of the fewest pieces and facts that can show a difference."""
    plans = [side.plan for side in sides[:-1]]
    timed = sum(2 * plan.budget_tokens + 2 * TIMED_BLOCKS * plan.block_size for plan in plans)
    pieces = LEAST_PIECES * len(sides) * _piece_seconds(length, pace)
    return pace.read * timed + pieces + _facts_seconds(sides, asked, pace)


def _piece_seconds(length: int, pace: _Pace) -> float:
    """Return the seconds in which one policy reads one piece."""
    scored = _scored(length)
    return (length - scored) * pace.read + scored * pace.predict


def _facts_seconds(sides: Sequence[_Side], asked: int, pace: _Pace) -> float:
    """Return the seconds of the fewest facts, without recall in a batch, with it one by one."""
    without, recalled = len(sides) - 1, len(sides) - 2  # random eviction is not asked for facts
    answers = without + LEAST_SAMPLES * recalled
    prompts = LEAST_SAMPLES * (without + recalled)
    return prompts * asked * pace.read + answers * ANSWER * pace.write


def _check_time(request: TuningRequest, clock: _Clock, needed: float, pace: _Pace) -> None:
    """Refuse a request whose measurements would not be done in time.

    Raises:
        ValueError: naming the minutes that would be enough.
    """
    if needed > clock.left:
        minutes = math.ceil((clock.now + 1.25 * needed) / 60)
        raise ValueError(
            f"--minutes {request.minutes:g} are too few: the model reads {1 / pace.read:,.0f} "
            f"tokens a second here and predicts {1 / pace.predict:,.0f} of a text, and the least "
            f"that tells policies apart takes about {minutes}; give --minutes {minutes}, fewer "
            "--policies, or a smaller budget"
        )


def _time(runtime: Runtime, side: _Side, ids: Sequence[int]) -> None:
    """Time the eviction of a block, and a token of an answer over a full cache."""
    model, setting = runtime.model, side.setting
    every = usual_every(model.device, setting.block_size)
    text = torch.tensor([[*ids]], device=model.device)
    cache = new_cache(model.config, setting)
    side.eviction_ms = median(eviction_ms(model, cache, text, TIMED_BLOCKS))
    loop = BlockLoop(model, new_cache(model.config, setting, every))
    loop.prefill(text[:, : setting.budget])
    side.decode_ms = median(decode_ms(_reader(loop), TIMED_TOKENS))


def _pieces(opening: Sequence[int], ids: Sequence[int], length: int) -> list[Prompt]:
    """Cut a text into pieces that do not overlap, ordered so that the first ones are spread out."""
    size = length - len(opening)
    count = len(ids) // size
    order = dict.fromkeys(int(k * GOLDEN % 1 * count) for k in range(4 * count))
    sample = Sample("", "", (), chat=False)
    pieces = [[*opening, *ids[i * size : (i + 1) * size]] for i in [*order][:MOST_PIECES]]
    before = length - _scored(length)
    return [(sample, (piece[:before], piece[before:])) for piece in pieces]


def _scored(length: int) -> int:
    """Return how many tokens at the end of a piece are scored, at most half of them."""
    return min(SCORED, length // 2)


def _scores(runtime: Runtime, setting: Setting, prompts: Sequence[Prompt]) -> tuple[float, ...]:
    """Return the score of every prompt; prompts of equal lengths are read at once."""
    cell = measure(runtime, setting, prompts, len(prompts), timed=False)
    return cell.scores or ()


def table(tuning: Tuning) -> Table:
    """Return the figures of all policies, the best flow first."""
    shown = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    shown.add_column("policy")
    for name in (
        "slots",
        "KV cache",
        "perplexity",
        "times the best (95 %)",
        "facts",
        "with recall",
        "eviction/block",
        "token",
    ):
        shown.add_column(name, justify="right")
    rows = sorted(tuning.rows, key=lambda row: row.perplexity)
    best = next((row for row in rows if row.policy in tuning.choice.near), None)
    for row in rows:
        shown.add_row(
            row.policy,
            "uncapped" if row.slots is None else f"{row.slots:,}",
            "" if row.kv_bytes is None else format_bytes(row.kv_bytes),
            f"{row.perplexity:.3f}",
            "" if best is None else _beside(row, best),
            share(row.facts),
            share(row.recalled),
            _ms(row.eviction_ms),
            _ms(row.decode_ms),
            style="bold" if row.policy == tuning.choice.policy else "",
        )
    return shown


def describe(tuning: Tuning) -> str:
    """Return a sentence on the measurements: pieces, facts, lengths and time."""
    template = ", asked in plain text" if tuning.plain else ""
    facts = f"{tuning.samples} facts, one in {tuning.facts_length:,} tokens each"
    facts = f"{facts} ({tuning.facts_task}{template})" if tuning.samples else "no facts"
    return (
        f"{tuning.model}: {tuning.pieces} pieces of {tuning.length:,} tokens of a text of "
        f"{tuning.text_tokens:,}, the last {tuning.scored:,} of each scored; {facts}; "
        f"{tuning.dtype}, blocks of {tuning.block_size:,}, {tuning.positions} positions, "
        f"{tuning.environment['device']}; {tuning.seconds:,.0f} s of {60 * tuning.minutes:,.0f}"
    )


def _beside(row: PolicyFigures, best: PolicyFigures) -> str:
    if row is best:
        return "1"
    beside = flow_beside(row, best)
    return f"{beside.difference:.3f} ({beside.ci_low:.3f}–{beside.ci_high:.3f})"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"
