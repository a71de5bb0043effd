"""Defines the commands of kvcap's makers: `kvcap analyze`, `report`, and `bench` with all of it."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvcap.evals.arguments import (
    BLOCK_SIZE,
    DEVICE,
    DTYPE,
    JSON,
    POLICY_OPTION,
    SEED,
    SINK_TOKENS,
    THREADS,
    USED,
    BenchOptions,
    names_of,
    note,
    numbers_of,
    policy_options,
    progress_bar,
)
from kvcap.runtime.cli.declare import argument, option
from kvcap.runtime.cli.options import checked_folder


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
    from kvcap.evals.quality.cells import read_folder
    from kvcap.lab.plots import draw
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
    from kvcap.evals.quality.cells import cells_of
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
