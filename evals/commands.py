"""`kvcap eval`, `kvcap demo` and `kvcap bench`, for the command line to register.

Imports of torch wait until a command runs. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from kvcap.evals.cells import Cell
    from kvcap.evals.demo import Demo, Question, Report

Model = Annotated[str, typer.Argument(help="'pocket', a directory, or a repository of the hub.")]
BlockSize = Annotated[
    int,
    typer.Option("--block-size", "--prefill-chunk-size", min=1, help="Tokens read at once."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Of the CPU, that compute (all cores by default)."),
]
Seed = Annotated[int, typer.Option(help="Of texts and facts.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16 (fp32, bf16, fp16, half).")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or mps; the best there is.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def eval_command(
    model: Model = "pocket",
    policies: Annotated[
        str, typer.Option(help="Names, with commas; all is every one that kvcap policies lists.")
    ] = "keydiff,streaming_llm,full",
    policy_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of every policy that has it; repeatable."),
    ] = None,
    budgets: Annotated[str, typer.Option(help="Slots per KV head, with commas.")] = "128,256",
    tasks: Annotated[str, typer.Option(help="Names, with commas.")] = "niah_single",
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, with commas.")] = "4096",
    samples: Annotated[int, typer.Option(help="Prompts per cell.")] = 50,
    positions: Annotated[str, typer.Option(help="compact, true or both.")] = "compact,true",
    block_size: BlockSize = 128,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of cells.jsonl and results.md.")] = Path(
        "out/eval"
    ),
    batch_size: Annotated[int, typer.Option(help="Prompts read at once.")] = 8,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw results.png (kvcap[plot]).")] = False,
    json: Json = False,
) -> None:
    """Recall under a cap: policies × budgets × positions, each cell with its interval.

    Cells that the folder already holds are not run again; after Ctrl-C, run the same command.
    """
    from kvcap.evals.cells import current_cells
    from kvcap.evals.plot import plot as draw
    from kvcap.evals.plot import require_matplotlib
    from kvcap.evals.runner import Sweep, run
    from kvcap.evals.table import results
    from kvcap.runtime.cli.commands import quiet_libraries, use_threads
    from kvcap.runtime.cli.options import pairs

    quiet_libraries()
    use_threads(threads)
    if plot:
        require_matplotlib()
    sweep = Sweep(
        policies=_names(policies),
        budgets=_numbers("budgets", budgets),
        tasks=_names(tasks),
        lengths=_numbers("lengths", lengths),
        positions=_names(positions),  # type: ignore[arg-type]  # run() refuses other names
        samples=samples,
        model=model,
        block_size=block_size,
        seed=seed,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        options=pairs(policy_option or []),
    )
    with _meter("{task.completed}/{task.total} cells") as progress:
        meter = progress.add_task("eval", total=None)

        def report(done: int, total: int, cell: Cell | None) -> None:
            progress.update(meter, completed=done, total=total)
            if cell is not None:
                progress.console.print(_cell_line(cell))

        cells = run(sweep, out, report)
    if plot:
        draw(current_cells(out / "cells.jsonl"), out / "results.png")
    print(jsonlib.dumps([cell.as_dict() for cell in cells]) if json else results(cells))


def demo_command(
    model: Model = "pocket",
    tokens: Annotated[int, typer.Option(help="Of text between facts and questions.")] = 1_000_000,
    kv_budget_tokens: Annotated[
        int, typer.Option("--kv-budget-tokens", "--max-kv-size", min=1, help="Slots per KV head.")
    ] = 256,
    facts: Annotated[int, typer.Option(help="Facts told first and asked for last.")] = 16,
    policy: Annotated[str, typer.Option(help="See `kvcap policies`.")] = "keydiff",
    positions: Annotated[
        str | None, typer.Option(help="compact or true; compact where exact.")
    ] = None,
    block_size: BlockSize = 128,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Tell facts, read a very long text in fixed memory, then ask for every fact."""
    from kvcap.evals.demo import Demo
    from kvcap.runtime.backends.pytorch.runtime import Runtime
    from kvcap.runtime.cli.commands import quiet_libraries, use_threads

    quiet_libraries()
    use_threads(threads)
    runtime = Runtime.from_pretrained(
        model,
        policy,
        kv_budget_tokens=kv_budget_tokens,
        block_size=block_size,
        dtype=dtype,
        device=device,
        positions=positions,  # type: ignore[arg-type]  # the plan refuses other names
    )
    demo = Demo(runtime, tokens=tokens, facts=facts, seed=seed)
    with _meter("{task.fields[figures]}", "eta") as progress:
        meter = progress.add_task("demo", total=tokens, figures="")

        def report(state: Demo) -> None:
            progress.update(meter, completed=state.read, figures=_figures(state))

        def answered(question: Question) -> None:
            progress.stop()  # it would break the lines
            if not json:
                print(_question_line(question), flush=True)

        measured = demo.run(report, answered)
    print(jsonlib.dumps(measured.as_dict()) if json else _summary(measured))


def bench_command(
    name: Annotated[
        str,
        typer.Argument(
            help="prefill, decode, scoring, positions, ragged; on CUDA: kernels, parts, gpu, "
            "throughput; on pocket: stream and turns (endurance), perturbation (CriticalKV), "
            "proxy (DropKV), saliency (OBCache)."
        ),
    ],
    lengths: Annotated[str | None, typer.Option(help="Tokens of a text, with commas.")] = None,
    budgets: Annotated[str | None, typer.Option(help="Slots per KV head, with commas.")] = None,
    policies: Annotated[str | None, typer.Option(help="Names, with commas; or all.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens read at once.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Measurements per row, or texts.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="prefill, decode: tokens decoded; turns: turns.")
    ] = None,
    evictions: Annotated[int | None, typer.Option(help="positions: before measuring.")] = None,
    layers: Annotated[int | None, typer.Option(help="Of a model of random weights.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Of such a model, multiple of 64.")] = None,
    threads: Threads = None,
    rows: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rows as a JSON list, too.")
    ] = None,
) -> None:
    """Time and memory on random weights; the papers' claims on pocket. The last line is JSON."""
    from kvcap.evals.bench import load, options_for
    from kvcap.runtime.cli.commands import quiet_libraries, use_threads

    quiet_libraries()
    use_threads(threads)
    given: dict[str, Any] = {
        "lengths": lengths and _numbers("lengths", lengths),
        "budgets": budgets and _numbers("budgets", budgets),
        "policies": policies and _names(policies),
        "block_size": block_size,
        "repeats": repeats,
        "steps": steps,
        "evictions": evictions,
        "layers": layers,
        "hidden": hidden,
    }
    run = load(name)
    result = run(options_for(name, {k: value for k, value in given.items() if value is not None}))
    if rows is not None:
        rows.write_text(jsonlib.dumps(list(result.rows), indent=1) + "\n")
    print(result.table())
    print(jsonlib.dumps(result.as_dict()))


@contextmanager
def _meter(*columns: str) -> Iterator[Progress]:
    """A live line on stderr that is gone when the work is done."""
    shown = [BarColumn(bar_width=24), *(TextColumn(c) for c in columns), TimeRemainingColumn()]
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with Progress(*shown, TimeElapsedColumn(), console=console, transient=True) as progress:
        yield progress


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.replace("_", "")) for part in _names(text))
    except ValueError as error:
        raise ValueError(f"--{option} {text!r}: give whole numbers, such as 128,256") from error


def _cell_line(cell: Cell) -> str:
    s = cell.setting
    budget = "uncapped" if s.budget is None else f"{s.budget} slots"
    policy = " ".join([s.policy, *(f"{name}={value}" for name, value in s.options)])
    return (
        f"{cell.score:.2f}  {s.task}, {s.length:,} tokens, {policy}, {budget}, {s.positions}"
        f"  ({cell.seconds:.1f} s)"
    )


def _figures(demo: Demo) -> str:
    stats = demo.session.stats
    return (
        f"{demo.read:,} tokens  {demo.tokens_per_second:,.0f} tok/s  "
        f"{stats.held_tokens}/{stats.budget_tokens} slots  "
        f"{_size(stats.bytes)}/{_size(stats.cap_bytes)}"
    )


def _question_line(q: Question) -> str:
    said = "right" if q.right else "value found" if q.found else "wrong"
    expected = "" if q.right else f"  expected: {q.expected!r}"
    return f"{said:<11}  {q.question} {q.answer!r}{expected}"


def _summary(report: Report) -> str:
    kv = report.kv
    right = sum(q.right for q in report.questions)
    beside = sum(q.found and not q.right for q in report.questions)
    more = f"; {beside} more say the value of something else" if beside else ""
    return "\n".join(
        [
            f"recall   {right} of {len(report.questions)} right after "
            f"{report.filler_tokens:,} tokens{more}",
            f"kv       {kv['held_tokens']} of {kv['budget_tokens']} slots held, "
            f"{kv['evicted_tokens']:,} tokens evicted ({kv['policy']}, {report.positions})",
            f"bytes    {_size(kv['bytes'])} held, {_size(kv['cap_bytes'])} cap, "
            f"{_size(kv['peak_bytes'])} peak",
            f"tokens   {report.tokens:,} in {report.seconds:,.1f} s",
        ]
    )


def _size(count: int) -> str:
    return f"{count / 1024:,.0f} KiB" if count < 1024**2 else f"{count / 1024**2:,.1f} MiB"
