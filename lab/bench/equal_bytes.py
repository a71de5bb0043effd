"""Compares kvcap with llama.cpp's own context shift, both with one number of bytes for KV cells.

The bytes are those of the first of `budgets` cells of float16. Each side has as many cells of each
type (q4_0, f16, q8_0) as they hold, in whole pages of 256, and the same library. kvcap keeps the
slots that its policy chooses, a block less than there are cells, and reads evicted text again;
llama.cpp fills all its cells, then keeps the first 4 tokens and drops half of the rest. Both read
the same tokens, `block_size` at once. Every figure is measured in a process of its own: times one
after another, and quality, 4 samples a process, in as many processes as cores allow.

`perplexity` is that of the last quarter of texts of the second of `lengths` tokens, one for every
4 samples; tasks have prompts of the first of them. `chat` has 20 turns, by turns a told fact and
other text, and then asks for all 10 facts. Times are of a question behind such a prompt, in 3
turns: median (least–most). Behind other figures stand 95 % intervals. What is finished is kept in
`pieces.jsonl` in `files`, and the same command goes on from there. Reads also `repeats`
(samples), `threads`, `model` (a GGUF file), `vs`, `text` (a file, for perplexity) and the first of
`policies`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.quality.prompts import has_template
from kvcap.evals.quality.scores import UNITS, cell_score
from kvcap.evals.reports import device_name, versions
from kvcap.lab.peers.process import cores
from kvcap.lab.quality.equal_bytes import (
    CHAT,
    KVCAP,
    PERPLEXITY,
    PIECE,
    SHIFTED,
    SIDES,
    TIME,
    SideWork,
    measured,
    read_rows,
)
from kvcap.lab.quality.intervals import interval
from kvcap.runtime.backends.llamacpp.library import PAGE, load_library
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.backends.llamacpp.plan import LlamaPlanner
from kvcap.runtime.backends.llamacpp.rank import DEFAULT, ranking_of
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cores import usable_cores
from kvcap.runtime.models.gguf import is_gguf
from kvcap.runtime.models.names import names_gguf, resolve
from kvcap.runtime.units import format_bytes

KINDS = ("q4_0", "f16", "q8_0")  # types of cells, the ones that hold most first
ROWS = {
    PERPLEXITY: "perplexity",
    "niah_single_2": "one fact",
    "multi_turn_facts": "facts of a dialogue",
    "niah_multivalue": "several facts",
    CHAT: "chat of 20 turns",
    TIME: "",
}
"""Holds the name of each row for people; that of times has several."""
TIMED = 3  # turns of times
DEFAULTS = {
    "lengths": (4096, 8000), "budgets": (512,), "policies": (DEFAULT,), "repeats": 12,
    "threads": (len(usable_cores()),), "vs": (SHIFTED,), "model": "smollm2",
    "files": Path("out/equal-bytes"),
}  # fmt: skip
COLUMNS = ("row", *(f"{side} {kind}" for side, kind in product(SIDES, KINDS)))


def run(options: BenchmarkOptions) -> Result:
    """Return a row for each task and figure, with a column for each side and type of cells.

    Raises:
        ValueError: another peer, a model that is no GGUF file, or sizes that will not work.
        PeerFailed: a process ended early.
    """
    works = list(_works(options))
    options.files.mkdir(parents=True, exist_ok=True)
    file = options.files / "pieces.jsonl"
    by_work = read_rows(file)
    try:
        for done, row in enumerate(_measure([x for x in works if x not in by_work]), len(by_work)):
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            work = SideWork.of(row)
            by_work[work] = row
            line = f"{done + 1} of {len(works)}: {work.row}, {work.side}, {work.cells}"
            print(f"kvcap: {line}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("kvcap: stopped; the same command goes on from here", file=sys.stderr, flush=True)
    rows = [by_work[work] for work in works if work in by_work]
    _check_alike(rows)
    facts = {"model": Path(works[0].model).name, "budget": works[0].budget}
    return Result("equal-bytes", COLUMNS, _table(rows), {**facts, "kv_bytes": works[0].kv_bytes})


def _measure(works: Sequence[SideWork]) -> Iterator[dict[str, Any]]:
    """Yield rows as they are finished: of quality several at once, then of times one by one."""
    quality = [work for work in works if work.row != TIME]
    if quality:
        with ThreadPoolExecutor(max(1, len(usable_cores()) // quality[0].threads)) as pool:
            futures = [pool.submit(_row, work) for work in quality]
            try:
                yield from (future.result() for future in as_completed(futures))
            finally:
                pool.shutdown(cancel_futures=True)
    yield from (_row(work) for work in works if work.row == TIME)


def _row(work: SideWork) -> dict[str, Any]:
    row = {**measured(work), "device": device_name("cpu", work.threads)}
    row["versions"] |= versions()
    return row


def _works(options: BenchmarkOptions) -> Iterator[SideWork]:
    """Yield all that is to be measured, the sides by turns."""
    if tuple(options.vs) != (SHIFTED,):
        raise ValueError(f"--vs {','.join(options.vs)}: equal-bytes compares with {SHIFTED} alone")
    if not (names_gguf(options.model) or is_gguf(options.model)):
        raise ValueError(f"{options.model!r} is no GGUF file, which {SHIFTED} could run")
    if len(options.lengths) != 2 or options.repeats < 1 or options.budgets[0] < PAGE:
        raise ValueError(
            f"equal-bytes needs two --lengths (of tasks, of perplexity), a sample, and --budgets "
            f"of at least {PAGE}"
        )
    cores(options.threads[0])
    model, policy, block = resolve(options.model), options.policies[0], options.block_size
    header = LlamaModel(load_library(), Path(model), planned=True)
    planner = LlamaPlanner(header, ranking_of(policy, {}), CacheSettings(block_size=block))
    nbytes = planner.plan(options.budgets[0] - block, block).cache_bytes
    for kind, row in product(KINDS, ROWS):
        if row == CHAT and not has_template(header.tokenizer):
            continue
        firsts = (0,) if row == TIME else range(0, options.repeats, PIECE)
        turns = range(TIMED if row == TIME else 1)
        for first, turn, side in product(firsts, turns, SIDES):
            yield SideWork(
                model=model,
                row=row,
                side=side,
                cells=kind,
                budget=options.budgets[0],
                kv_bytes=nbytes,
                policy=policy if side == KVCAP else None,
                block_size=block,
                threads=options.threads[0],
                length=options.lengths[row == PERPLEXITY],
                samples=options.repeats,
                text=str(options.text) if options.text and row == PERPLEXITY else None,
                first=first,
                turn=turn,
            )


def _check_alike(rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows whose sides read different prompts, as files of two versions would have them."""
    digests: dict[tuple[str, int], int] = {}
    for row in rows:
        if digests.setdefault((row["row"], row["first"]), row["digest"]) != row["digest"]:
            raise ValueError(
                f"the sides read different prompts in row {row['row']}; give another --files"
            )


def _table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table, each with the figures that it was made of."""
    table = []
    for row, name in ROWS.items():
        mine = [one for one in rows if one["row"] == row]
        if mine and row == TIME:
            table += _line("first token of a question, s", mine, lambda x: _spread(x, "ttft_s"))
            table += _line("decode, tokens/s", mine, lambda x: _spread(x, "decode_tok_s"))
            table += _line("whole process' peak", mine, _peak)
            table += _line("slots", mine, lambda x: f"{x[0]['slots']:,}")
        elif mine:
            table += _line(f"{name}, {mine[0]['length']:,} tokens", mine, _score)
    return table


def _line(name: str, rows: Sequence[Mapping[str, Any]], text: Any) -> list[dict[str, Any]]:
    by_column: dict[str, list[Mapping[str, Any]]] = {column: [] for column in COLUMNS[1:]}
    for row in rows:
        by_column[f"{row['side']} {row['cells']}"].append(row)
    figures = {column: text(some) if some else "–" for column, some in by_column.items()}
    return [{"row": name, **figures, "measured": {k: v for k, v in by_column.items() if v}}]


def _score(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a score with its interval."""
    scores, unit = [score for row in rows for score in row["scores"]], UNITS[rows[0]["unit"]]
    low, high = interval(scores, unit)
    return f"{cell_score(scores, unit):.2f} ({low:.2f}–{high:.2f})"


def _spread(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the median of turns, with the least and the most."""
    values = [row[name] for row in rows]
    return f"{median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def _peak(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the most that a process held."""
    return format_bytes(max(row["peak_bytes"] for row in rows))
