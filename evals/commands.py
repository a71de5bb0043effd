"""Defines the commands that measure, such as `kvcap eval`, `tune`, `analyze` and `bench`.

Imports of torch wait until a command runs. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import click
from click.exceptions import Exit

from kvcap.runtime.cli import options
from kvcap.runtime.cli.console import styled
from kvcap.runtime.cli.declare import CommandGroup, argument, option
from kvcap.runtime.types import SlotUse

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvcap.evals.calibrate import Calibration
    from kvcap.evals.memory import Baseline, Matrix
    from kvcap.evals.quality.cells import Cell
    from kvcap.evals.quality.demo import Demo, DemoReport, Question
    from kvcap.evals.quality.sweep import Sweep
    from kvcap.runtime.session.engine import Engine

ANSWER_SHOWN = 60  # letters of an answer in a table
BASELINE = Path("memory-baseline.json")
USED = (
    "Use this model: a repository of the hub, a directory, a GGUF file, smollm2, a chat "
    "model that is downloaded once, or pocket, pocket-plain or pocket-text, which are built in."
)
MODEL: Any = argument("pocket", USED)
BLOCK_SIZE: Any = option(
    128, "Read N tokens at once.", "--block-size", "--prefill-chunk-size", min=1, panel="Memory"
)
THREADS: Any = option(
    None, "Compute with N threads of the CPU (all cores by default).", min=1, panel="Device"
)
SEED: Any = option(0, "Make the same texts and facts with the same N.", panel="Texts")
DTYPE: Any = option(
    None,
    "Compute in float32, bfloat16 or float16, also written fp32, bf16, fp16, half (the "
    "checkpoint's type by default).",
    metavar="NAME",
    panel="Model",
)
DEVICE: Any = option(
    None, "Run on cpu, cuda or mps (the best there is by default).", metavar="NAME", panel="Device"
)
JSON: Any = option(False, "Print one JSON document.", panel="Output")

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
POLICY_OPTION: Any = option(
    None,
    "Set an option of every policy that has it; repeatable.",
    metavar="KEY=VALUE",
    panel="Measure",
)
SINK_TOKENS: Any = option(
    None,
    "Never evict the first N tokens, whatever the policy (by default those that its paper pins).",
    min=0,
    panel="Memory",
)


def eval_command(
    model: str = MODEL,
    policies: str = option(
        "keydiff,streaming_llm,full",
        "Measure these policies, separated by commas; all takes every one that kvcap "
        "policies lists.",
        metavar="NAMES",
        panel="Measure",
    ),
    policy_option: list[str] | None = POLICY_OPTION,
    sink_tokens: int | None = SINK_TOKENS,
    budgets: str = option(
        "128,256",
        "Keep so many slots per KV head; numbers separated by commas.",
        metavar="SLOTS",
        panel="Memory",
    ),
    tasks: str = option(
        "niah_single",
        "Run these tasks, separated by commas. ruler takes all of RULER's that are made "
        "here; perplexity:FILE, file:PATH, longbench/SET, ruler/TASK and math read files.",
        metavar="NAMES",
        panel="Texts",
    ),
    data: str | None = option(
        None, "Read tasks that are files from this folder or file.", metavar="PATH", panel="Texts"
    ),
    lengths: str = option(
        "4096",
        "Make prompts of so many tokens; numbers separated by commas.",
        metavar="TOKENS",
        panel="Texts",
    ),
    max_new_tokens: int | None = option(
        None,
        "Answer with at most N tokens (as many as the task says by default).",
        min=1,
        panel="Measure",
    ),
    question: str = option(
        "aware",
        "Read the question with the text, or after the text was evicted to the budget.",
        metavar="aware|after|both",
        panel="Measure",
    ),
    depths: str | None = option(
        None,
        "Put the facts at these places of the text, from 0 (start) to 1; numbers "
        "separated by commas (spread out by default).",
        metavar="SHARES",
        panel="Texts",
    ),
    recall: str = option(
        "off",
        "Read at most N evicted tokens again before a question; several settings "
        "separated by commas.",
        metavar="off|auto|N",
        panel="Measure",
    ),
    samples: int = option(50, "Read N prompts in every cell.", panel="Measure"),
    positions: str = option(
        "",
        "Renumber kept tokens (compact), leave their positions (true), or renumber them "
        "in long texts (auto); several separated by commas (as chat does by default).",
        metavar="NAMES",
        panel="Memory",
    ),
    block_size: int = BLOCK_SIZE,
    seed: int = SEED,
    out: Path = option(
        Path("out/eval"),
        "Write cells.jsonl and results.md into this folder.",
        metavar="DIR",
        panel="Output",
    ),
    batch_size: int = option(8, "Read N prompts at once.", panel="Device"),
    dtype: str | None = DTYPE,
    device: str | None = DEVICE,
    threads: int | None = THREADS,
    kv_dtype: str | None = option(
        None,
        "Hold keys and values as int8, int8-int4 or int4 (as the model makes them by default).",
        metavar="NAME",
        panel="Memory",
    ),
    compare: str | None = option(
        None,
        "Compare the first of these policies with each of the others, sample by sample.",
        metavar="NAMES",
        panel="Output",
    ),
    plot: bool = option(
        False, "Draw results.png, pareto.png and, with --depths, needles.png.", panel="Output"
    ),
    workers: int | None = option(
        None,
        "Share the cells among N processes (by default one per GPU, or one on a CPU).",
        min=1,
        panel="Device",
    ),
    engine: str = option(
        "local",
        "Start these processes here, or on a cluster by Ray, which needs kvcap[ray].",
        metavar="local|ray",
        panel="Device",
    ),
    backend: str | None = option(
        None,
        "Run a GGUF file by llama.cpp's library, where all layers share their slots (the "
        "default where it is found), or in PyTorch.",
        metavar="llamacpp|torch",
        panel="Device",
    ),
    ray_address: str | None = option(
        None,
        "Join the Ray cluster at this address (by default the one that Ray finds).",
        metavar="HOST:PORT",
        panel="Device",
    ),
    agreement: bool = option(
        False,
        "Measure how near predictions stay to the uncapped model's on the text of "
        "--file, instead of running tasks.",
        panel="Measure",
    ),
    file: str | None = option(
        None,
        "Read the text of --agreement from this file; - reads stdin.",
        "--file",
        "-f",
        metavar="FILE",
        panel="Texts",
    ),
    json: bool = JSON,
) -> None:
    """Measure what models recall under a cap, by policy, budget and positions.

    Cells that the folder already holds are not run again; after Ctrl-C or a power cut, run the same
    command. A cell whose worker dies is given to another one once; then it fails, and the others go
    on.

    With --agreement the text of --file is read under each of them and without a cap, in passages of
    --lengths tokens, --samples at most; agreement.md and agreement.json go to the folder.
    """
    from kvcap.evals.quality.cells import current_cells
    from kvcap.evals.quality.plots import draw
    from kvcap.evals.quality.plots.style import require_matplotlib
    from kvcap.evals.quality.sweep import Sweep, run
    from kvcap.evals.quality.table import describe, results
    from kvcap.evals.quality.tasks import spelled_out, with_data
    from kvcap.evals.quality.workers.crew import Crew
    from kvcap.runtime.cli.commands import quiet_libraries, use_threads
    from kvcap.runtime.errors import CellsFailed

    quiet_libraries()
    use_threads(threads)
    _check_folder("--out", out)
    if plot:
        require_matplotlib()
    crew = Crew(engine, workers, threads, ray_address)  # type: ignore[arg-type]  # checked by run()
    against, failed = _names(compare or ""), None
    sweep = Sweep(
        policies=_names(policies),
        budgets=_numbers("budgets", budgets),
        tasks=spelled_out(with_data(_names(tasks), data)),
        lengths=_numbers("lengths", lengths),
        positions=_names(positions),  # type: ignore[arg-type]  # run() refuses other names
        samples=samples,
        model=model,
        block_size=block_size,
        seed=seed,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        options=_policy_options(policy_option, sink_tokens),
        kv_dtype=kv_dtype,  # type: ignore[arg-type]  # the cache refuses other names
        questions=_names(question.replace("both", "aware,after")),  # type: ignore[arg-type]
        depths=(None,) if depths is None else _shares("depths", depths),
        max_new_tokens=max_new_tokens,
        recalls=_names(recall),
        by_llamacpp=options.Backend(backend).by_llamacpp(model),  # type: ignore[arg-type]
    )
    if agreement != (file is not None):
        raise ValueError("--agreement and --file go together: --agreement -f FILE")
    if agreement:
        others = {
            "--plot": plot,
            "--compare": compare,
            "--data": data,
            "--max-new-tokens": max_new_tokens,
            "--workers": workers,
            "--engine": engine != "local",
            "--ray-address": ray_address,
        }
        if given := [name for name, value in others.items() if value]:
            raise ValueError(f"--agreement has no use for {', '.join(given)}; leave that out")
    if file is not None:
        try:
            _agreement(sweep, file, out, json)
        except KeyboardInterrupt:
            _note("interrupted: nothing is kept, the same command begins again")
            raise
        return
    kept = f"nothing is kept in {out}"
    with _meter("{task.completed}/{task.total} cells") as progress:
        meter = progress.add_task("eval", total=None)

        def report(done: int, total: int, cell: Cell | None) -> None:
            nonlocal kept
            kept = f"{done} of {total} cells are kept in {out}"
            progress.update(meter, completed=done, total=total)
            if cell is not None:
                line = f"{cell.score:.2f}  {describe(cell.setting)}  ({cell.seconds:.1f} s)"
                progress.console.print(line, markup=False)

        def note(text: str) -> None:
            progress.console.print(f"kvcap: {text}", markup=False)

        try:
            cells = run(sweep, out, report, crew=crew, compared=against, note=note)
        except CellsFailed as error:
            cells, failed = error.cells, error
        except KeyboardInterrupt:
            note(f"interrupted: {kept}; the same command runs the rest")
            raise
    if plot:
        for picture in draw(current_cells(out / "cells.jsonl"), out):
            _note(f"wrote {picture}")
    print(jsonlib.dumps([cell.as_dict() for cell in cells]) if json else results(cells, against))
    if failed is not None:
        raise failed


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
    budget = options.Budget(**vars(cap))
    running = options.Running(device=device, threads=threads)
    request = TuningRequest(
        model,
        text,
        Sizes(cap.settings(), cap.memory_cap),
        cap.pins,
        _names(policies or ""),
        length,
        minutes,
        seed,
        cap.dtype,
        device,
        backend.weights,
    )

    def load_with(policy: str) -> Engine:
        own = replace(budget, policy=policy)
        return load(model, backend, own, running, options.Output(quiet=True))

    with _meter("{task.fields[doing]}") as progress:
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


def analyze_command(
    model: str = argument(..., USED),
    what: list[str] = argument(
        ...,
        "Draw all analyses, or some of correlation, pca, volume (KeyDiff), perturbation "
        "(CriticalKV), cone (DropKV), oracle (OBCache), queries (CaliDrop) and kept (which "
        "tokens stay).",
        metavar="WHAT...",
    ),
    file: list[str] | None = option(
        None, "Read this text; - reads stdin; repeatable.", "--file", "-f", panel="Texts"
    ),
    kind: Literal["prose", "conversation"] = option(
        "prose",
        "Make prose or a conversation to read, where no --file is given.",
        "--text",
        panel="Texts",
    ),
    texts: int = option(4, "Make N texts, where no --file is given.", min=1, panel="Texts"),
    tokens: int = option(
        1024, "Read at most N tokens of a text, which bounds the memory.", min=64, panel="Texts"
    ),
    policies: str | None = option(
        None,
        "Analyse these policies, separated by commas (each analysis has its own by default).",
        metavar="NAMES",
        panel="Measure",
    ),
    policy_option: list[str] | None = POLICY_OPTION,
    sink_tokens: int | None = SINK_TOKENS,
    budgets: str | None = option(
        None,
        "Keep so many slots per KV head; numbers separated by commas (shares of the "
        "text by default).",
        metavar="SLOTS",
        panel="Memory",
    ),
    positions: str | None = option(
        None,
        "Renumber kept tokens (compact), leave their positions (true), or renumber them "
        "in long texts (auto), where policies evict (as chat does by default).",
        metavar="NAME",
        panel="Memory",
    ),
    block_size: int = BLOCK_SIZE,
    layer: int | None = option(
        None, "Draw layer N in pca and queries (the middle one by default).", panel="Measure"
    ),
    head: int | None = option(
        None, "Draw KV head N in pca and queries (0 by default).", panel="Measure"
    ),
    seed: int = SEED,
    out: Path = option(
        Path("out/analyze"),
        "Write a PNG and a JSON of every analysis into this folder.",
        metavar="DIR",
        panel="Output",
    ),
    dtype: str | None = DTYPE,
    device: str | None = DEVICE,
    threads: int | None = THREADS,
    json: bool = JSON,
) -> None:
    """Draw the papers' diagnostics of a model's keys, queries and policies.

    A text is read uncapped for its queries, keys and values, and under a cap for what policies
    keep. Each analysis writes a picture and its figures, and says how to read them.
    """
    from kvcap.evals.analyze import AnalysisOptions, named, require_matplotlib, run
    from kvcap.runtime.cli.commands import quiet_libraries, read_input, use_threads

    require_matplotlib()
    names = named(what)
    given = AnalysisOptions(
        policies=_names(policies or ""),
        budgets=_numbers("budgets", budgets) if budgets else (),
        block_size=block_size,
        layer=layer,
        head=head,
        policy_options=_policy_options(policy_option, sink_tokens),
    )
    files = {name: read_input(name) for name in file or []}
    _check_folder("--out", out)
    quiet_libraries()
    use_threads(threads)
    from kvcap.evals.texts import texts as made
    from kvcap.runtime.backends.pytorch.runtime import Runtime

    runtime = Runtime.from_pretrained(
        model, budget_tokens=tokens, block_size=block_size, dtype=dtype, device=device
    )
    readings = made(runtime, files, kind, texts, tokens, seed, positions)  # type: ignore[arg-type]
    with _meter("{task.completed}/{task.total} measurements") as progress:
        meter = progress.add_task("analyze", total=None)

        def report(done: int, total: int) -> None:
            progress.update(meter, completed=done, total=total)

        documents = run(names, readings, given, out, report)
    if json:
        print(jsonlib.dumps(list(documents.values())))
        return
    for name, document in documents.items():
        paper = f" ({document['paper']})" if document["paper"] else ""
        print(f"{document['title']}{paper}: {out / name}.png, .json")
        print(f"  {document['read']}")


def report_command(
    folders: list[Path] = argument(
        ..., "Read what kvcap eval and analyze wrote here.", metavar="DIR..."
    ),
    out: Path | None = option(
        None,
        "Write the page here (report.html or leaderboard.md in the first DIR by default).",
        "--out",
        "-o",
        metavar="FILE",
        panel="Output",
    ),
    leaderboard: bool = option(
        False, "Write a page of Markdown that ranks the policies.", panel="Output"
    ),
    plot: bool = option(
        False, "Draw a PNG per model and task; needs --leaderboard.", panel="Output"
    ),
    compare: str | None = option(
        None, "Print how two policies differ on the same samples.", metavar="A,B", panel="Output"
    ),
    json: bool = JSON,
) -> None:
    """Write one page of a folder's tables, plots and analyses, and of the tokens each policy kept.

    It needs no server and asks for nothing else: pictures and data are in the file.

    With --leaderboard, the cells of several folders make one page of Markdown, in which policies
    are ranked; what stands between its marks <!-- text --> and <!-- /text --> stays when it is
    written again. With --compare, two policies are compared sample by sample.
    """
    if leaderboard and compare is not None:
        raise ValueError("--leaderboard and --compare are two reports; give one of them")
    if plot and not leaderboard:
        raise ValueError("--plot needs --leaderboard; for other plots, run kvcap eval --plot")
    if json and compare is None:
        raise ValueError("--json needs --compare; cells.jsonl has the cells themselves")
    if compare is not None:
        if out is not None:
            raise ValueError("--compare prints; leave --out out")
        _compare(folders, compare, json)
        return
    if leaderboard:
        from kvcap.evals.report import leaderboard as board

        for path in board.write(folders, out or folders[0] / "leaderboard.md", plot):
            print(path)
        return
    from kvcap.evals.report import write

    if len(folders) > 1:
        raise ValueError("a page is of one folder; --leaderboard and --compare take several")
    target = folders[0] / "report.html" if out is None else out
    write(folders[0], target)
    print(target)


def _compare(folders: list[Path], compare: str, json: bool) -> None:
    """Run `kvcap report --compare`."""
    from kvcap.evals.quality.cells import cells_of
    from kvcap.evals.quality.table import comparison, comparison_text

    names = _names(compare)
    if len(set(names)) != 2:
        raise ValueError(f"--compare {compare!r}: give two policies, such as keydiff,snapkv")
    cells = cells_of(folders)
    if json:
        print(jsonlib.dumps(comparison(cells, *names)))
    else:
        print(comparison_text(cells, *names))


def _agreement(sweep: Sweep, file: str, out: Path, json: bool) -> None:
    """Run `kvcap eval --agreement`."""
    from kvcap.evals.quality.agreement import measure, table
    from kvcap.runtime.cli.commands import read_input

    if len(sweep.lengths) > 1:
        raise ValueError("--agreement: give one of --lengths, the most tokens of a passage")
    with _meter("{task.completed:,}/{task.total:,} tokens") as progress:
        meter = progress.add_task("agreement", total=0)

        def report(done: int, total: int) -> None:
            progress.update(meter, completed=done, total=total)

        agreement = measure(sweep, read_input(file), report)
    text, document = table(agreement), jsonlib.dumps(agreement.as_dict())
    out.mkdir(parents=True, exist_ok=True)
    (out / "agreement.md").write_text(text, encoding="utf-8")
    (out / "agreement.json").write_text(document + "\n", encoding="utf-8")
    print(document if json else text)


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
    from kvcap.policies import load_policy
    from kvcap.runtime.backends.pytorch.runtime import Runtime
    from kvcap.runtime.cli.commands import load, quiet_libraries, use_threads

    quiet_libraries()
    backend = options.Backend()
    if by_llamacpp := backend.by_llamacpp(model):
        budget = options.Budget(policy=policy, **vars(cap))
        running = options.Running(device=device, threads=threads)
        runtime = load(model, backend, budget, running, options.Output(quiet=True))
    else:
        use_threads(threads)
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
    with _meter("{task.fields[figures]}", "eta") as progress:
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
    name: str = argument(
        ...,
        "Run this benchmark: prefill, decode, scoring, positions or ragged; cpu, beside "
        "llama.cpp and others; "
        "equal-bytes, beside llama.cpp with as many bytes of cache; "
        "slots, of fewer bits beside floats; encoding, a text made into tokens; "
        "recall, evicted text found and read again; "
        "use, the first answers of machines, processes and sessions; "
        "serve, a server under load; clients, many long conversations at one; "
        "on CUDA: kernels, token, parts, gpu, throughput; "
        "on pocket: stream and turns (endurance), perturbation (CriticalKV), "
        "proxy (DropKV), saliency (OBCache), weights.",
    ),
    lengths: str | None = option(
        None,
        "Read texts of so many tokens; numbers separated by commas, and in cpu 0 for "
        "none (each benchmark has its own default).",
        "--lengths",
        "-p",
        metavar="TOKENS",
        panel="Texts",
    ),
    budgets: str | None = option(
        None,
        "Keep so many slots per KV head; numbers separated by commas (each benchmark "
        "has its own default).",
        metavar="SLOTS",
        panel="Memory",
    ),
    policies: str | None = option(
        None,
        "Measure these policies, separated by commas, or all (each benchmark has its own default).",
        metavar="NAMES",
        panel="Measure",
    ),
    block_size: int | None = option(
        None, "Read N tokens at once (each benchmark has its own default).", panel="Memory"
    ),
    repeats: int | None = option(
        None,
        "Measure every row N times, or on N texts (each benchmark has its own default).",
        "--repeats",
        "-r",
        panel="Measure",
    ),
    steps: int | None = option(
        None,
        "Decode N tokens, or in turns have N turns (each benchmark has its own default).",
        "--steps",
        "-n",
        panel="Measure",
    ),
    evictions: int | None = option(
        None, "Evict N times before measuring; for positions (10000 by default).", panel="Measure"
    ),
    layers: int | None = option(
        None, "Give the random model of prefill N layers (8 by default).", panel="Model"
    ),
    hidden: int | None = option(
        None,
        "Give the random model of prefill a hidden size of N, a multiple of 64 (512 by default).",
        panel="Model",
    ),
    threads: str | None = option(
        None,
        "Compute with so many threads of the CPU (all cores by default); cpu takes "
        "several numbers, separated by commas.",
        "--threads",
        "-t",
        metavar="COUNTS",
        panel="Device",
    ),
    depths: str | None = option(
        None,
        "Read so many tokens before decoding; numbers separated by commas, for cpu (0 by default).",
        "--depths",
        "-d",
        metavar="TOKENS",
        panel="Texts",
    ),
    clients: int | None = option(
        None, "Ask by N clients at once; for clients (64 by default).", min=1, panel="Measure"
    ),
    conversations: int | None = option(
        None, "Have N conversations; for serve (1000 by default).", min=1, panel="Measure"
    ),
    kills: int | None = option(
        None, "Kill the server N times; for serve (100 by default).", min=1, panel="Measure"
    ),
    starts: str | None = option(
        None,
        "Time new processes until the first token after prompts of so many words; "
        "numbers separated by commas, for cpu.",
        metavar="NUMBERS",
        panel="Texts",
    ),
    model: str | None = option(
        None,
        "Run a directory, pocket, or a model of random weights: random-3b "
        "(Llama-3.2-3B's shape), random-360m (SmolLM2's) or random-tiny (each benchmark has "
        "its own default).",
        "--model",
        "-m",
        metavar="MODEL",
        panel="Model",
    ),
    weights: str | None = option(
        None,
        "Hold weights in these types, separated by commas: bf16, int8 or another "
        "--dtype of an export; for cpu and slots (int8 by default).",
        metavar="NAMES",
        panel="Model",
    ),
    backend: str | None = option(
        None,
        "Run on pytorch or onnxruntime; for cpu and slots (by default as suits the weights).",
        metavar="NAME",
        panel="Model",
    ),
    vs: str | None = option(
        None,
        "Run these beside kvcap, separated by commas: llama.cpp, transformers or "
        "kvpress; for cpu, llama.cpp for equal-bytes, and transformers for clients.",
        metavar="NAMES",
        panel="Measure",
    ),
    peer_python: list[str] | None = option(
        None,
        "Run a peer of --vs by the Python at PATH; for cpu and clients; repeatable.",
        metavar="NAME=PATH",
        panel="Device",
    ),
    files: Path | None = option(
        None,
        "Keep models, exports and finished rows in this folder; for cpu, clients, equal-bytes, "
        "serve, slots and use (each has its own folder in out by default).",
        metavar="DIR",
        panel="Output",
    ),
    text: Path | None = option(
        None,
        "Measure the perplexity of this text; for equal-bytes (generated prose by default).",
        metavar="FILE",
        panel="Texts",
    ),
    output: Literal["md", "json", "csv"] | None = option(
        None,
        "Print only a table (md), an object (json) or all rows (csv).",
        "--output",
        "-o",
        panel="Output",
    ),
    rows: Path | None = option(
        None, "Write the rows as a JSON list here, too.", metavar="FILE", panel="Output"
    ),
) -> None:
    """Measure time and memory; the last line of stdout is JSON."""
    from kvcap.evals.bench import load, options_for
    from kvcap.runtime.cli.commands import quiet_libraries, use_threads

    quiet_libraries()
    counts = _numbers("threads", threads) if threads else None
    if counts and (min(counts) < 1 or (len(counts) > 1 and name != "cpu")):
        raise ValueError(f"--threads {threads}: give one count, or to `bench cpu` several")
    if name != "cpu":
        use_threads(counts[0] if counts else None)
    given: dict[str, Any] = {
        "lengths": lengths and _numbers("lengths", lengths),
        "budgets": budgets and _numbers("budgets", budgets),
        "policies": policies and _names(policies),
        "block_size": block_size,
        "repeats": repeats,
        "steps": steps,
        "evictions": evictions,
        "clients": clients,
        "conversations": conversations,
        "kills": kills,
        "layers": layers,
        "hidden": hidden,
        "starts": starts and _numbers("starts", starts),
        "depths": depths and _numbers("depths", depths),
        "threads": counts,
        "model": model,
        "weights": weights and _names(weights),
        "backend": backend,
        "vs": vs and _names(vs),
        "peer_pythons": peer_python and dict(_peer(text) for text in peer_python),
        "files": files,
        "text": text,
    }
    run = load(name)
    result = run(options_for(name, {k: value for k, value in given.items() if value is not None}))
    if rows is not None:
        rows.write_text(jsonlib.dumps(list(result.rows), indent=1) + "\n")
    if output in (None, "md"):
        print(result.table())
    if output == "csv":
        print(result.csv())
    if output in (None, "json"):
        print(jsonlib.dumps(result.as_dict()))


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
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"cannot write {str(out)!r}: no such folder, or it is one")
    with _meter("{task.completed}/{task.total} tokens", off=quiet or not styled()) as progress:
        meter = progress.add_task("calibrate", total=None)

        def report(done: int, total: int) -> None:
            progress.update(meter, completed=done, total=total)

        calibration = calibrate(
            model, text, tokens=tokens, dtype=dtype, device=device, report=report
        )
    document = jsonlib.dumps(calibration.as_dict())
    try:
        out.write_text(document + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {str(out)!r}: {error.strerror}") from error
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
        _note(f"peaks were not compared: {unlike}")
    if grown:
        _note(f"{len(grown)} figures grew; where that is meant, run kvcap memory update")
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
    now = _measured(_matrix(known, model, policies, budgets, lengths))
    now.write(baseline)
    print(jsonlib.dumps(now.as_dict()) if json else table(now.cells))
    _note(f"wrote {baseline}")


@contextmanager
def _meter(*columns: str, off: bool = False) -> Iterator[Progress]:
    """Show a live line on stderr, if that is a terminal, and remove it after the work."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    shown = [BarColumn(bar_width=24), *(TextColumn(c) for c in columns), TimeRemainingColumn()]
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    shown.append(TimeElapsedColumn())
    off = off or not console.is_interactive  # where it would print an empty line at every stop
    with Progress(*shown, console=console, transient=True, disable=off) as progress:
        yield progress


def _policy_options(texts: list[str] | None, sink_tokens: int | None) -> dict[str, Any]:
    """Return options for the policies that have them, from KEY=VALUE and --sink-tokens."""
    pins = {} if sink_tokens is None else {"sink_tokens": sink_tokens}
    return pins | options.pairs(texts or [])


def _given(**values: Any) -> dict[str, Any]:
    """Return the options that have a value, by their names on the command line."""
    return {f"--{k.replace('_', '-')}": v for k, v in values.items() if v is not None}


def _check_folder(option: str, path: Path) -> None:
    """Refuse a path that cannot be a folder, before anything is measured.

    Raises:
        ValueError: the path is another kind of file.
    """
    above = next((part for part in (path, *path.parents) if part.exists()), path)
    if not above.is_dir():
        raise ValueError(f"{option} {str(path)!r}: {str(above)!r} is a file, not a folder")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _peer(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not path:
        raise ValueError(f"--peer-python {text!r}: give a peer and a Python, llama.cpp=PATH")
    return name, path


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.replace("_", "")) for part in _names(text))
    except ValueError as error:
        raise ValueError(f"--{option} {text!r}: give whole numbers, such as 128,256") from error


def _shares(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text))
    except ValueError as error:
        raise ValueError(f"--{option} {text!r}: give numbers, such as 0,0.5,1") from error


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
        "policies": policies and _names(policies),
        "budgets": budgets and _numbers("budgets", budgets),
        "lengths": lengths and _numbers("lengths", lengths),
    }
    return replace(known, **{name: value for name, value in given.items() if value})


def _measured(matrix: Matrix) -> Baseline:
    from kvcap.evals.memory import measure
    from kvcap.runtime.cli.commands import quiet_libraries

    quiet_libraries()
    return measure(matrix, lambda cell: _note(str(cell)))


def _note(text: str) -> None:
    print(f"kvcap: {text}", file=sys.stderr, flush=True)
