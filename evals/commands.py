"""Defines the commands that measure, such as `kvcap tune`, `bench` and `memory`.

Imports of torch wait until a command runs. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from kvcap.evals.arguments import (
    DEVICE,
    DTYPE,
    JSON,
    MODEL,
    SEED,
    THREADS,
    BenchOptions,
    names_of,
    note,
    numbers_of,
    progress_bar,
)
from kvcap.runtime.cli import options
from kvcap.runtime.cli.console import styled
from kvcap.runtime.cli.declare import CommandGroup, argument, option
from kvcap.runtime.types import SlotUse

if TYPE_CHECKING:
    from kvcap.evals.calibrate import Calibration
    from kvcap.evals.memory import Baseline, Matrix
    from kvcap.evals.quality.demo import Demo, DemoReport, Question
    from kvcap.runtime.session.engine import Engine

ANSWER_SHOWN = 60  # letters of an answer in a table
BASELINE = Path("memory-baseline.json")
memory = CommandGroup("Compare memory figures with a baseline.")

BASELINE_FILE: Any = option(
    BASELINE, "Keep the figures to compare with here.", "--baseline", metavar="FILE"
)
BASELINE_MODEL: Any = option(
    None, "Run this model (the baseline's, or pocket, by default).", metavar="MODEL"
)
BASELINE_POLICIES: Any = option(
    None,
    "Measure these policies, separated by commas (the baseline's by default).",
    metavar="NAMES",
)
BASELINE_BUDGETS: Any = option(
    None,
    "Keep so many slots per KV head: numbers separated by commas, such as 64,256 (the "
    "baseline's by default).",
    metavar="SLOTS",
)
BASELINE_LENGTHS: Any = option(
    None,
    "Read prompts of so many tokens: numbers separated by commas, such as 1024,2048 "
    "(the baseline's by default).",
    metavar="TOKENS",
)


def tune_command(
    model: str = options.MODEL,
    *,
    file: str = option(
        ...,
        "Read this text, of some thousand tokens, like those that the model will read; "
        "- reads stdin.",
        "--file",
        "-f",
        panel="Texts",
    ),
    policies: str | None = option(
        None,
        "Choose among these policies, separated by commas; all takes every one that "
        "kvcap policies lists (lagkv, snapkv, dropkv, keydiff-window and streaming_llm by "
        "default; of a GGUF file by llama.cpp streaming_llm, keydiff-window and lagkv). Where "
        "time is short the last are left out.",
        metavar="NAMES",
        panel="Measure",
    ),
    length: int | None = option(
        None,
        "Cut the text into pieces of N tokens (by default as many as the time allows, "
        "from twice the budget to 4,096).",
        min=2,
        panel="Texts",
    ),
    minutes: float = option(
        5.0,
        "Take at most N minutes for everything, loading the model included.",
        min=0.01,
        metavar="N",
        panel="Measure",
    ),
    seed: int = option(0, "Make the same facts with the same N.", panel="Texts"),
    backend: options.Backend,
    cap: options.CacheOptions,
    device: str | None = options.DEVICE,
    threads: int | None = options.THREADS,
    json_: bool = options.JSON,
) -> None:
    """Measure which policy suits a model and a text at a budget; print the command to use.

    The model is loaded as chat loads it. Candidates read pieces of the text and find facts, with
    recall, beside random eviction and the uncapped model, as often as the time allows. The one of
    the lowest perplexity is taken, where finding all facts rather than none outweighs a perplexity
    10 % higher; of equals, the fastest. The table says why others were dropped. The last line of
    stdout is the command alone; it is empty, and the exit code 1, if nothing can be recommended.
    """
    started = perf_counter()
    from kvcap.evals.quality.recommend import command
    from kvcap.evals.quality.tune import TuningRequest, describe, table, tune
    from kvcap.evals.quality.tune_llama import LlamaTuned
    from kvcap.evals.quality.tune_torch import TorchTuned
    from kvcap.runtime.cli.commands import load, quiet_libraries, read_input
    from kvcap.runtime.cli.tables import show
    from kvcap.runtime.errors import NothingRecommended, UnsupportedModel
    from kvcap.runtime.planning.plan import Sizes

    text = read_input(file)
    quiet_libraries()
    by_llamacpp = backend.by_llamacpp(model)
    if not by_llamacpp and backend.exported(model):
        raise UnsupportedModel(
            "policies are measured in PyTorch or by llama.cpp, and this would run in ONNX Runtime; "
            "give --backend torch, and instead of an export the model that it was made from"
        )
    budget, running = options.Budget(**vars(cap)), options.Running(device=device, threads=threads)
    run = options.Run(model, backend, budget, running, options.Output(quiet=True))
    request = TuningRequest(
        model,
        text,
        Sizes(cap.settings(), cap.memory_cap),
        cap.pins,
        names_of(policies or ""),
        length,
        minutes,
        seed,
        cap.dtype,
        device,
        backend.weights,
    )

    def load_with(policy: str) -> Engine:
        return load(replace(run, budget=replace(run.budget, policy=policy)))

    with progress_bar("{task.fields[doing]}") as progress:
        meter = progress.add_task("tune", total=60 * minutes, doing="")

        def report(seconds: float, doing: str) -> None:
            progress.update(meter, completed=seconds, doing=doing)

        def note(text: str) -> None:
            progress.console.print(f"kvcap: {text}", markup=False)

        bound = LlamaTuned if by_llamacpp else TorchTuned
        tuning = tune(request, bound(request, load_with), started, report, note)
    line: list[str] | None = None
    if tuning.choice.policy is not None:
        given = _given(**vars(cap), **vars(backend), device=device, threads=threads)
        if not {"--kv-budget", "--budget-tokens", "--memory-cap"} & set(given):
            given["--budget-tokens"] = tuning.rows[0].slots
        line = command(tuning.choice, model, file, given, tuning.recall, plain=tuning.plain)
    if json_:
        shown = None if line is None else shlex.join(line)
        print(jsonlib.dumps({**tuning.as_dict(), "command": line, "command_line": shown}))
    else:
        print(f"{describe(tuning)}\n")
        show(table(tuning))
        print("".join(f"\n{remark}" for remark in tuning.choice.remarks))
    if line is None:
        if not json_:
            print()  # the last line is the command alone, and there is none
        raise NothingRecommended(
            "every policy that was measured is worse than random eviction on this text; give a "
            "larger budget, or --policies others"
        )
    if not json_:
        print(shlex.join(line))


def demo_command(
    model: str = MODEL,
    tokens: int | None = option(
        None,
        "Read N tokens of text between the facts and the questions (1,000,000 of filler; "
        "of licences, 6,000, if llama.cpp runs MODEL).",
        panel="Texts",
    ),
    facts: int | None = option(
        None,
        "State N facts first and ask for them last (16, or 10 if llama.cpp runs MODEL).",
        panel="Texts",
    ),
    policy: str | None = option(
        None,
        "Choose what is evicted by this policy (keydiff by default, or streaming_llm if "
        "llama.cpp runs MODEL). `kvcap policies` lists all.",
        metavar="NAME",
        panel="Memory",
    ),
    *,
    cap: options.CacheOptions,
    seed: int = SEED,
    device: str | None = DEVICE,
    threads: int | None = THREADS,
    json: bool = JSON,
) -> None:
    """Tell facts, read a long text in fixed memory, then ask for every fact.

    Of smollm2 or a GGUF file that llama.cpp runs, the text is of licences, every question is asked
    with recall and without, and a table compares the answers.
    """
    from kvcap.evals.quality.demo import Demo, licences
    from kvcap.runtime.cli.commands import load, quiet_libraries, use_threads

    backend = options.Backend()
    if by_llamacpp := backend.by_llamacpp(model):
        budget = options.Budget(policy=policy, **vars(cap))
        running = options.Running(device=device, threads=threads)
        runtime = load(options.Run(model, backend, budget, running, options.Output(quiet=True)))
    else:
        quiet_libraries()
        use_threads(threads)
        from kvcap.policies import load_policy
        from kvcap.runtime.backends.pytorch.runtime import Runtime

        runtime = Runtime.from_pretrained(
            model,
            cap.settings(policy=load_policy(policy or "keydiff", **cap.pins)),
            memory_cap=cap.memory_cap,
            dtype=cap.dtype,
            device=device,
        )
    usual_tokens, usual_facts = (6_000, 10) if by_llamacpp else (1_000_000, 16)
    demo = Demo(
        runtime,
        tokens=usual_tokens if tokens is None else tokens,
        facts=usual_facts if facts is None else facts,
        seed=seed,
        text=licences() if by_llamacpp else None,
        recall=by_llamacpp,
    )
    with progress_bar("{task.fields[figures]}", "eta") as progress:
        meter = progress.add_task("demo", total=demo.tokens, figures="")

        def report(state: Demo) -> None:
            progress.update(meter, completed=state.read, figures=_figures(state))

        def answered(question: Question) -> None:
            progress.stop()  # a progress bar would break the lines
            if not json and not by_llamacpp:
                print(_question_line(question), flush=True)

        measured = demo.run(report, answered)
    print(jsonlib.dumps(measured.as_dict()) if json else _summary(measured))


def bench_command(
    name: str = argument(..., "Run this benchmark: prefill or decode, beside transformers."),
    *,
    given: BenchOptions,
) -> None:
    """Measure time and memory; the last line of stdout is JSON."""
    given.run(name)


def lm_eval_command(context: click.Context) -> None:
    """Run lm-evaluation-harness, which then knows the model kvcap (kvcap[lm-eval]).

    What follows is lm-eval's own command line, as in --model_args
    pretrained=MODEL,policy=keydiff,budget_tokens=512 --tasks hellaswag; `lm_eval run --help` lists
    its options. Without --model, that is kvcap.
    """
    from kvcap.evals.lm_eval import main
    from kvcap.runtime.cli.commands import quiet_libraries

    quiet_libraries()
    main(context.args)


def calibrate_command(
    name: str = argument(..., "Measure for this policy, such as headkv or duoattention."),
    model: str = options.MODEL,
    *,
    file: str = option(..., "Read this text; - reads stdin.", "--file", "-f"),
    out: Path = option(Path("heads.json"), "Write the table here.", "--out", "-o", metavar="FILE"),
    tokens: int = option(1024, "Read at most N tokens of the text, twice.", min=32),
    dtype: str | None = DTYPE,
    device: str | None = DEVICE,
    json: bool = option(False, "Print the table as JSON."),
    quiet: bool = option(False, "Print only where the table is.", "--quiet", "-q"),
) -> None:
    """Measure how much every head of a model retrieves: the table of headkv and duoattention.

    The model reads a text twice, uncapped; a head that retrieves looks, in the second copy, at what
    followed in the first. Best is a text of names and numbers, which nobody can guess.
    """
    from kvcap.runtime.cli.commands import quiet_libraries, read_input

    quiet_libraries()
    from kvcap.evals.calibrate import calibrate
    from kvcap.policies import companions

    names = [other for other, cls in companions().items() if "table" in cls.__dataclass_fields__]
    if name not in names:
        raise ValueError(f"{name!r} takes no table of heads; only {' and '.join(names)} do")
    text = read_input(file)
    if not text.strip():
        raise ValueError("the text is empty; give one of at least 32 tokens")
    _check_place(out)
    with progress_bar(
        "{task.completed}/{task.total} tokens", off=quiet or not styled()
    ) as progress:
        meter = progress.add_task("calibrate", total=None)

        def report(done: int, total: int) -> None:
            progress.update(meter, completed=done, total=total)

        calibration = calibrate(
            model, text, tokens=tokens, dtype=dtype, device=device, report=report
        )
    document = jsonlib.dumps(calibration.as_dict())
    with _writing(out):
        out.write_text(document + "\n", encoding="utf-8")
    if json:
        print(document)
        return
    print(f"{out} written; use it with --policy {name} --policy-option table={out}")
    if not quiet:
        print(_heads(calibration))


@memory.adds("check")
def check_command(
    baseline: Path = BASELINE_FILE,
    model: str | None = BASELINE_MODEL,
    policies: str | None = BASELINE_POLICIES,
    budgets: str | None = BASELINE_BUDGETS,
    lengths: str | None = BASELINE_LENGTHS,
    tolerance: float = option(2.0, "Let a peak grow by so many percent.", min=0, metavar="PERCENT"),
    json: bool = JSON,
) -> None:
    """Measure what reading a prompt takes and compare with the baseline; exit 1 where it grew.

    Without options, everything that the baseline holds.
    """
    from kvcap.evals.memory import Baseline, regressions, table

    before = Baseline.read(baseline)
    now = _measured(_matrix(before.matrix, model, policies, budgets, lengths))
    grown, unlike = regressions(now, before, tolerance / 100)
    if json:
        document = {**now.as_dict(), "regressions": grown, "peaks_not_compared": unlike or None}
        print(jsonlib.dumps(document))
    else:
        print(table(now.cells, before))
        print("\n".join(grown) or f"nothing grew in {len(now.cells)} cells")
    if unlike:
        note(f"peaks were not compared: {unlike}")
    if grown:
        note(f"{len(grown)} figures grew; where that is meant, run kvcap memory update")
        raise Exit(1)


@memory.adds("update")
def update_command(
    baseline: Path = BASELINE_FILE,
    model: str | None = BASELINE_MODEL,
    policies: str | None = BASELINE_POLICIES,
    budgets: str | None = BASELINE_BUDGETS,
    lengths: str | None = BASELINE_LENGTHS,
    json: bool = JSON,
) -> None:
    """Measure and write the baseline anew; an earlier one is replaced whole or not at all.

    Without options, what the earlier one held.
    """
    from kvcap.evals.memory import Baseline, BaselineUnusable, Matrix, table

    try:
        known = Baseline.read(baseline).matrix
    except BaselineUnusable:
        known = Matrix()
    _check_place(baseline)
    now = _measured(_matrix(known, model, policies, budgets, lengths))
    with _writing(baseline):
        now.write(baseline)
    print(jsonlib.dumps(now.as_dict()) if json else table(now.cells))
    note(f"wrote {baseline}")


def _check_place(path: Path) -> None:
    """Refuse a path that no file can have, before anything is measured for it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: no such folder, or it is one")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the path that a `with` block cannot write."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _given(**values: Any) -> dict[str, Any]:
    """Return the options that have a value, by their names on the command line."""
    return {f"--{k.replace('_', '-')}": v for k, v in values.items() if v is not None}


def _figures(demo: Demo) -> str:
    stats = demo.session.stats
    return (
        f"{demo.read:,} tokens  {demo.tokens_per_second:,.0f} tok/s  "
        f"{stats.slots}  "
        f"{_size(stats.bytes)}/{_size(stats.cap_bytes)}"
    )


def _question_line(q: Question) -> str:
    verdict = "right" if q.right else "value found" if q.found else "wrong"
    expected = "" if q.right else f"  expected: {q.expected!r}"
    return f"{verdict:<11}  {q.question} {q.answer!r}{expected}"


def _summary(report: DemoReport) -> str:
    kv = report.kv
    slots = SlotUse(kv["held_tokens"], kv["waiting_tokens"], kv["budget_tokens"])
    beside = sum(q.found and not q.right for q in report.questions)
    more = f"; {beside} more say the value of something else" if beside else ""
    return "\n".join(
        [
            *(_recall_table(report) if report.recalled else []),
            f"recall   {_right(report.questions)} after {report.filler_tokens:,} tokens{more}",
            *([f"         {_right(report.recalled)} with recall"] if report.recalled else []),
            f"kv       {slots}, "
            f"{kv['evicted_tokens']:,} tokens evicted ({kv['policy']}, {report.positions})",
            f"bytes    {_size(kv['bytes'])} held, {_size(kv['cap_bytes'])} cap, "
            f"{_size(kv['peak_bytes'])} peak",
            f"tokens   {report.tokens:,} in {report.seconds:,.1f} s",
        ]
    )


def _right(questions: Sequence[Question]) -> str:
    return f"{sum(q.right for q in questions)} of {len(questions)} right"


def _recall_table(report: DemoReport) -> list[str]:
    from kvcap.evals.reports import grid

    def cell(q: Question) -> str:
        answer = shorten(" ".join(q.answer.split()), ANSWER_SHOWN, placeholder=" ...")
        return f"{'right' if q.right else 'wrong'}: {answer.replace('|', '/')}"

    pairs = zip(report.questions, report.recalled, strict=True)
    rows = [(plain.question, cell(plain), cell(recalled)) for plain, recalled in pairs]
    return [*grid(("question", "without recall", "with recall"), rows), ""]


def _size(count: int) -> str:
    return f"{count / 1024:,.0f} KiB" if count < 1024**2 else f"{count / 1024**2:,.1f} MiB"


def _heads(calibration: Calibration) -> str:
    scores = [score for row in calibration.scores for score in row]
    figures = [("least", min(scores)), ("mean", sum(scores) / len(scores)), ("most", max(scores))]
    heads = [(f"layer {i} head {h}", score) for score, i, h in calibration.strongest(5)]
    return "\n".join(f"{label:<18}{score:.4f}" for label, score in [*figures, *heads])


def _matrix(
    known: Matrix,
    model: str | None,
    policies: str | None,
    budgets: str | None,
    lengths: str | None,
) -> Matrix:
    """Return the matrix of the options, with `known` in place of those that are missing."""
    given: dict[str, Any] = {
        "model": model,
        "policies": policies and names_of(policies),
        "budgets": budgets and numbers_of("budgets", budgets),
        "lengths": lengths and numbers_of("lengths", lengths),
    }
    return replace(known, **{name: value for name, value in given.items() if value})


def _measured(matrix: Matrix) -> Baseline:
    from kvcap.evals.memory import measure
    from kvcap.runtime.cli.commands import quiet_libraries

    quiet_libraries()
    return measure(matrix, lambda cell: note(str(cell)))
