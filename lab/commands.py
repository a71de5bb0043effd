"""Defines the commands of kvcap's makers: `kvcap eval`, `analyze`, `report`, and all of `bench`."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcap.evals.arguments import (
    DEVICE,
    DTYPE,
    JSON,
    MODEL,
    SEED,
    THREADS,
    USED,
    BenchOptions,
    names_of,
    note,
    numbers_of,
    progress_bar,
)
from kvcap.runtime.cli.declare import argument, option
from kvcap.runtime.cli.options import Backend, checked_folder, pairs

if TYPE_CHECKING:
    from kvcap.lab.quality.cells import Cell
    from kvcap.lab.quality.sweep import Sweep


BLOCK_SIZE: Any = option(128, "Read N tokens at once.", min=1, panel="Memory")
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


def policy_options(texts: list[str] | None, sink_tokens: int | None) -> dict[str, Any]:
    """Return options for the policies that have them, from KEY=VALUE and --sink-tokens."""
    pins = {} if sink_tokens is None else {"sink_tokens": sink_tokens}
    return pins | pairs(texts or [])


def shares_of(option: str, text: str) -> tuple[float, ...]:
    """Return the numbers that commas separate; raise as `numbers_of` does."""
    try:
        return tuple(float(part) for part in names_of(text))
    except ValueError as error:
        raise ValueError(f"--{option} {text!r}: give numbers, such as 0,0.5,1") from error


def _peer(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not path:
        raise ValueError(f"--peer-python {text!r}: give a peer and a Python, llama.cpp=PATH")
    return name, path


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
        check=checked_folder,
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
    from kvcap.lab.analyze import AnalysisOptions, named, require_matplotlib, run
    from kvcap.runtime.cli.commands import quiet_libraries, read_input, use_threads

    require_matplotlib()
    names = named(what)
    given = AnalysisOptions(
        policies=names_of(policies or ""),
        budgets=numbers_of("budgets", budgets) if budgets else (),
        block_size=block_size,
        layer=layer,
        head=head,
        policy_options=policy_options(policy_option, sink_tokens),
    )
    files = {name: read_input(name) for name in file or []}
    quiet_libraries()
    use_threads(threads)
    from kvcap.lab.texts import texts as made
    from kvcap.runtime.backends.pytorch.runtime import Runtime

    runtime = Runtime.from_pretrained(
        model, budget_tokens=tokens, block_size=block_size, dtype=dtype, device=device
    )
    readings = made(runtime, files, kind, texts, tokens, seed, positions)  # type: ignore[arg-type]
    with progress_bar("{task.completed}/{task.total} measurements") as progress:
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
        check=checked_folder,
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
    from kvcap.lab.quality.sweep import Sweep, run
    from kvcap.lab.quality.table import describe, results
    from kvcap.lab.quality.tasks import spelled_out, with_data
    from kvcap.lab.quality.workers.crew import Crew
    from kvcap.runtime.cli.commands import quiet_libraries, use_threads
    from kvcap.runtime.errors import CellsFailed

    quiet_libraries()
    use_threads(threads)
    crew = Crew(engine, workers, threads, ray_address)  # type: ignore[arg-type]  # checked by run()
    against, failed = names_of(compare or ""), None
    sweep = Sweep(
        policies=names_of(policies),
        budgets=numbers_of("budgets", budgets),
        tasks=spelled_out(with_data(names_of(tasks), data)),
        lengths=numbers_of("lengths", lengths),
        positions=names_of(positions),  # type: ignore[arg-type]  # run() refuses other names
        samples=samples,
        model=model,
        block_size=block_size,
        seed=seed,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        options=policy_options(policy_option, sink_tokens),
        kv_dtype=kv_dtype,
        questions=names_of(question.replace("both", "aware,after")),  # type: ignore[arg-type]
        depths=(None,) if depths is None else shares_of("depths", depths),
        max_new_tokens=max_new_tokens,
        recalls=names_of(recall),
        by_llamacpp=Backend(backend).by_llamacpp(model),  # type: ignore[arg-type]
    )
    if agreement != (file is not None):
        raise ValueError("--agreement and --file go together: --agreement -f FILE")
    if agreement:
        others = {
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
            note("interrupted: nothing is kept, the same command begins again")
            raise
        return
    kept = f"nothing is kept in {out}"
    with progress_bar("{task.completed}/{task.total} cells") as progress:
        meter = progress.add_task("eval", total=None)

        def report(done: int, total: int, cell: Cell | None) -> None:
            nonlocal kept
            kept = f"{done} of {total} cells are kept in {out}"
            progress.update(meter, completed=done, total=total)
            if cell is not None:
                line = f"{cell.score:.2f}  {describe(cell.setting)}  ({cell.seconds:.1f} s)"
                progress.console.print(line, markup=False)

        def say(text: str) -> None:
            progress.console.print(f"kvcap: {text}", markup=False)

        try:
            cells = run(sweep, out, report, crew=crew, compared=against, note=say)
        except CellsFailed as error:
            cells, failed = error.cells, error
        except KeyboardInterrupt:
            say(f"interrupted: {kept}; the same command runs the rest")
            raise
    print(jsonlib.dumps([cell.as_dict() for cell in cells]) if json else results(cells, against))
    if failed is not None:
        raise failed


def _agreement(sweep: Sweep, file: str, out: Path, json: bool) -> None:
    """Run `kvcap eval --agreement`."""
    from kvcap.lab.quality.agreement import measure, table
    from kvcap.runtime.cli.commands import read_input

    if len(sweep.lengths) > 1:
        raise ValueError("--agreement: give one of --lengths, the most tokens of a passage")
    with progress_bar("{task.completed:,}/{task.total:,} tokens") as progress:
        meter = progress.add_task("agreement", total=0)

        def report(done: int, total: int) -> None:
            progress.update(meter, completed=done, total=total)

        agreement = measure(sweep, read_input(file), report)
    text, document = table(agreement), jsonlib.dumps(agreement.as_dict())
    out.mkdir(parents=True, exist_ok=True)
    (out / "agreement.md").write_text(text, encoding="utf-8")
    (out / "agreement.json").write_text(document + "\n", encoding="utf-8")
    print(document if json else text)


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
        False,
        "Draw results.png, pareto.png and, of cells with depths, needles.png into DIR; with "
        "--leaderboard a PNG per model and task beside the page.",
        panel="Output",
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
    if json and compare is None:
        raise ValueError("--json needs --compare; cells.jsonl has the cells themselves")
    if compare is not None:
        if out is not None:
            raise ValueError("--compare prints; leave --out out")
        _compare(folders, compare, json)
        return
    if leaderboard:
        from kvcap.lab.report import leaderboard as board

        for path in board.write(folders, out or folders[0] / "leaderboard.md", plot):
            print(path)
        return
    from kvcap.lab.plots import draw
    from kvcap.lab.quality.cells import read_folder
    from kvcap.lab.report import write

    if len(folders) > 1:
        raise ValueError("a page is of one folder; --leaderboard and --compare take several")
    if plot:
        for picture in draw(read_folder(folders[0]), folders[0]):
            note(f"wrote {picture}")
    target = folders[0] / "report.html" if out is None else out
    write(folders[0], target)
    print(target)


def _compare(folders: list[Path], compare: str, json: bool) -> None:
    """Run `kvcap report --compare`."""
    from kvcap.lab.quality.cells import cells_of
    from kvcap.lab.report.comparison import comparison, comparison_text

    names = names_of(compare)
    if len(set(names)) != 2:
        raise ValueError(f"--compare {compare!r}: give two policies, such as keydiff,snapkv")
    cells = cells_of(folders)
    if json:
        print(jsonlib.dumps(comparison(cells, *names)))
    else:
        print(comparison_text(cells, *names))


@dataclass(frozen=True)
class LabBenchOptions(BenchOptions):
    """The options of `kvcap bench` in the repository, which has more benchmarks."""

    STARTING: ClassVar[tuple[str, ...]] = ("cpu",)
    READ: ClassVar[dict[str, Any]] = {
        **BenchOptions.READ,
        **{x: partial(numbers_of, x) for x in ("starts", "depths")},
        **dict.fromkeys(("weights", "vs"), names_of),
        "peer_python": lambda texts: dict(map(_peer, texts)),
    }

    depths: str | None = option(
        None,
        "Read so many tokens before decoding; numbers separated by commas, for cpu (0 by default).",
        "--depths",
        "-d",
        metavar="TOKENS",
        panel="Texts",
    )
    starts: str | None = option(
        None,
        "Time new processes until the first token after prompts of so many words; "
        "numbers separated by commas, for cpu.",
        metavar="NUMBERS",
        panel="Texts",
    )
    model: str | None = option(
        None,
        "Run a directory, pocket, or a model of random weights: random-3b "
        "(Llama-3.2-3B's shape), random-360m (SmolLM2's) or random-tiny (each benchmark has "
        "its own default).",
        "--model",
        "-m",
        metavar="MODEL",
        panel="Model",
    )
    weights: str | None = option(
        None,
        "Hold weights in these types, separated by commas: bf16, int8 or another "
        "--dtype of an export (int8 by default).",
        metavar="NAMES",
        panel="Model",
    )
    backend: str | None = option(
        None,
        "Run on pytorch or onnxruntime (by default as suits the weights).",
        metavar="NAME",
        panel="Model",
    )
    vs: str | None = option(
        None,
        "Run these beside kvcap, separated by commas: llama.cpp, transformers or "
        "kvpress, of which each benchmark takes some.",
        metavar="NAMES",
        panel="Measure",
    )
    peer_python: list[str] | None = option(
        None,
        "Run a peer of --vs by the Python at PATH; repeatable.",
        metavar="NAME=PATH",
        panel="Device",
    )
    files: Path | None = option(
        None,
        "Keep models, exports and finished rows in this folder (each benchmark has its own in "
        "out by default).",
        metavar="DIR",
        check=checked_folder,
        panel="Output",
    )
    text: Path | None = option(
        None,
        "Measure the perplexity of this text; for equal-bytes (generated prose by default).",
        metavar="FILE",
        panel="Texts",
    )
    evictions: int | None = option(
        None, "Evict N times before measuring; for positions (10000 by default).", panel="Measure"
    )
    clients: int | None = option(
        None, "Ask by N clients at once; for clients (64 by default).", min=1, panel="Measure"
    )
    conversations: int | None = option(
        None, "Have N conversations; for serve (1000 by default).", min=1, panel="Measure"
    )
    kills: int | None = option(
        None, "Kill the server N times; for serve (100 by default).", min=1, panel="Measure"
    )

    def given(self) -> dict[str, Any]:
        """Return what was given, as `BenchmarkOptions` has it."""
        given = super().given()
        return {"peer_pythons" if name == "peer_python" else name: x for name, x in given.items()}


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
    *,
    given: LabBenchOptions,
) -> None:
    """Measure time and memory; the last line of stdout is JSON."""
    given.run(name)
