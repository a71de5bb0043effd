"""Writes results as Markdown: device and runtime, medians with fits, relative times, doubts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from kvcap.android_bench.results.judge import (
    WILD,
    Row,
    identity,
    key,
    measured,
    series,
    spread,
    timed,
)
from kvcap.android_bench.results.source import believed, title
from kvcap.android_bench.runner.statistics import PERCENTILES
from kvcap.android_bench.safe_text import escaped, plain
from kvcap.export.graphs.formulations import TRACED

MOST = 24  # windows of a sustained run that a table lists
COSTLY = 5  # operators of a cell that a table lists
FEW = 3  # flags of one kind that are written out
WORST = 0.25  # relative error beyond which a line does not describe a series
LONG = 3000  # the most characters of a sentence, which may have several names
ROW = ("policy", "formulation", "queries")


def markdown(results: Sequence[Row]) -> str:
    """Write one or several judged results as Markdown; several also side by side.

    Every text goes through `_title`, `_sentence`, `_listed` or `table`, which escape it.
    """
    lines = [_title(1, heading(results)), ""]
    if len(results) > 1:
        lines += _beside(results)
    for result in results:
        lines += [_title(2, title(result)), "", *_facts(result), ""]
        lines += [*_score_tables(result), *_evict_table(result), *_percentiles(result)]
        lines += [*_operators(result), *_decoder_table(result)]
        lines += _doubts(result)
    return "\n".join(lines).rstrip() + "\n"


def slower(lines: Sequence[str]) -> str:
    """Write regressions as a Markdown list with a title."""
    return "\n".join(_listed(f"slower: {line}") for line in lines)


def _title(level: int, text: str) -> str:
    return f"{'#' * level} {escaped(text, LONG)}"


def _sentence(text: str, mark: str = "") -> str:
    return f"{mark}{escaped(text, LONG)}{mark}"


def _listed(text: str) -> str:
    return f"- {escaped(text, LONG)}"


def heading(results: Sequence[Row]) -> str:
    """Return the title of the document, which names results that are of no real device."""
    return "Latency of eviction scores. " + "; ".join(title(result) for result in results)


def label(row: Row) -> str:
    """Return a row's name in a table: the policy with its formulation, queries and options."""
    parts = [row["policy"]]
    if row["formulation"] != TRACED or row["policy"] == "keydiff":
        parts.append(row["formulation"])
    if row["queries"]:
        parts.append("1 query" if row["queries"] == 1 else f"{row['queries']} queries")
    return plain(", ".join(parts), 450)


def short(result: Row, provider: str) -> str:
    """Return a column's heading: the device (or that it is none), runner and provider."""
    source, _ = believed(result["device"])
    tag = {"real": "", "emulated": "EMULATED ", "host": "HOST "}[source]
    by = f"{result['run']['runner']}, {plain(provider)}"
    return f"{tag}{plain(result['device']['model'], 60)} ({by})"


def microseconds(value: float) -> str:
    """Write a time in microseconds with three significant digits.

    >>> microseconds(23.456), microseconds(14523.2)
    ('23.5', '14,523')
    """
    return "0" if value < 0.005 else _digits(value)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a Markdown table; the first column is text, the others numbers."""
    first, *others = (list(map(escaped, row)) for row in (head, *rows))
    yield "| " + " | ".join(first) + " |"
    yield "|---|" + "---:|" * (len(first) - 1)
    for row in others:
        yield "| " + " | ".join(row) + " |"


def setting(row: Row) -> tuple[Any, ...]:
    """Return the setting that all rows of a table share: type, provider and threads."""
    return row["dtype"], row["provider_asked"], row["threads"]


def setting_name(name: tuple[Any, ...]) -> str:
    """Name a setting in words."""
    dtype, provider, threads = name
    return plain(f"{dtype}, {provider}, {threads} thread{'s' * (threads > 1)}")


def _facts(result: Row) -> Iterator[str]:
    runtime, rules, run = result["runtime"], result["rules"], result["run"]
    shape, before = result["shape"], result["conditions"]["before"]
    cores = runtime.get("cores")
    yield _sentence(
        f"{shape['name']}: {shape['kv_heads']} KV heads of {shape['head_dim']}, "
        f"{shape['heads']} query heads, blocks of {shape['block']}. Preset {run['preset']}, plan "
        f"{run['plan']}, {run['started']}. At least {rules['min_runs']} runs and "
        f"{rules['min_seconds']:g} s a cell in {rules['rounds']} rounds of random order, after "
        f"{rules['warmup_runs']} runs and {rules['warmup_seconds']:g} s to warm up."
    )
    yield ""
    facts = [f"pinned to cores {', '.join(map(str, cores))}" if cores else "not pinned"]
    facts.append(f"clock's step {runtime['timer_us']:g} µs")
    if before.get("governor"):
        facts.append(f"governor {', '.join(sorted(set(before['governor']))[:FEW])}")
    for name, unit in (("battery_percent", "% battery"), ("charging", "charging")):
        if before.get(name) is not None:
            facts.append(f"{before[name]} {unit}" if unit[0] == "%" else f"{unit}: {before[name]}")
    facts += [f"{name}: {_change(result, name)}" for name in ("thermal",) if before.get(name)]
    facts += [_memory(result["memory"])] if "memory" in result else []
    yield _sentence("; ".join(facts) + ".")


def _memory(memory: Row) -> str:
    """Return a text with the peak of memory, or why it is unknown."""
    if memory["peak_bytes"] is None:
        return f"peak memory unknown: {memory['reason']}"
    return f"peak memory of the {memory['of']} {_digits(memory['peak_bytes'] / 1e6)} MB"


def _change(result: Row, name: str) -> str:
    """Return the temperature of the hottest zone before and after the run."""
    before, after = (result["conditions"][when].get(name) or {} for when in ("before", "after"))
    return f"{max(before.values()):.0f} °C before, {max(after.values(), default=0):.0f} °C after"


def _score_tables(result: Row) -> Iterator[str]:
    rows = [row for row in measured(result) if row["stage"] == "score"]
    relative = {key(entry): entry["value"] for entry in result["derived"]["relative"]}
    lines = {
        tuple(fit[name] for name in (*ROW, "dtype", "provider_asked", "threads")): fit
        for fit in result["derived"]["fits"]
    }
    for name, _ in groupby(sorted(rows, key=setting), key=setting):
        part = [points for points in series(result).values() if setting(points[0]) == name]
        sizes = sorted({row["n"] for points in part for row in points})
        caption = setting_name(name)
        yield _sentence(
            f"Score, {caption}: median (least to 90th percentile) in µs by slots held", "**"
        )
        yield ""
        body = [
            [
                label(points[0]),
                *_by_size(points, sizes, lambda row: _median(row)),
                _line(lines.get((*(points[0][n] for n in ROW), *name))),
            ]
            for points in part
        ]
        body += _copies(result, sizes)
        yield from table(["policy", *(f"{n:,}" for n in sizes), "t0 + slope"], body)
        yield ""
        yield _sentence(f"Score, {caption}: relative to {result['run']['reference']}", "**")
        yield ""
        values = [
            [label(points[0]), *_by_size(points, sizes, lambda r: _ratio(relative.get(key(r))))]
            for points in part
        ]
        yield from table(["policy", *(f"{n:,}" for n in sizes)], values)
        yield ""


def _by_size(rows: list[Row], sizes: list[int], show: Any) -> list[str]:
    by_slots = {row["n"]: row for row in rows}
    return [show(by_slots[n]) if n in by_slots else "" for n in sizes]


def _median(row: Row) -> str:
    """Return the median with its spread, and marks for doubts about it."""
    least, most = microseconds(row["min_us"]), microseconds(row["p90_us"])
    wild = " WILD" if spread(row) > WILD else ""
    wrong = "" if row["parity"]["passed"] else " WRONG"
    return f"{microseconds(row['p50_us'])} ({least}–{most}){wild}{wrong}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _line(fit: Row | None) -> str:
    if fit is None:
        return ""
    if fit["worst"] > WORST:
        return f"no line (off by {fit['worst']:.0%})"
    slope = microseconds(fit["us_per_1024"])
    return f"{microseconds(fit['t0_us'])} + {slope} per 1,024 (±{fit['worst']:.0%})"


def _copies(result: Row, sizes: list[int]) -> Iterator[list[str]]:
    baselines = {entry["id"]: entry for entry in result["baselines"]}
    rows = [baselines.get(f"memcpy.n{n}") for n in sizes]
    if any(rows):
        shown = [microseconds(row["p50_us"]) if row and "p50_us" in row else "" for row in rows]
        yield ["copy of the fp16 keys", *shown, ""]


def _evict_table(result: Row) -> Iterator[str]:
    rows = [row for row in measured(result) if row["stage"] == "evict"]
    if not rows:
        return
    yield _sentence("Evict: score, select, gather keys and values", "**")
    yield ""
    head = [
        "policy",
        "slots",
        "kept",
        "type",
        "on",
        "threads",
        "median (least to 90th percentile) in µs",
    ]
    body = [
        [
            label(row),
            str(row["n"]),
            str(row["budget"]),
            row["dtype"],
            row["provider_asked"],
            str(row["threads"]),
            _median(row),
        ]
        for row in rows
    ]
    yield from table(head, body)
    yield ""


def _percentiles(result: Row) -> Iterator[str]:
    rows = measured(result)
    if not rows:
        return
    yield _sentence("Percentiles of all cells, in µs", "**")
    yield ""
    yield from table(
        ["cell", "on", "threads", *(f"p{share}" for share in PERCENTILES)],
        (
            [
                row["id"],
                row["provider_asked"],
                str(row["threads"]),
                *(microseconds(row[f"p{share}_us"]) for share in PERCENTILES),
            ]
            for row in rows
        ),
    )
    yield ""


def _operators(result: Row) -> Iterator[str]:
    """Yield the operators of each profiled cell, the costliest first."""
    rows = [row for row in measured(result) if row.get("operators")]
    if not rows:
        return
    yield _sentence("Operators of a run, by ONNX Runtime's profiler, which takes time itself", "**")
    yield ""
    yield from table(
        ["cell", "on", "threads", "operators by their share, each with its µs"],
        (
            [row["id"], row["provider_got"] or "", str(row["threads"]), _shares(row["operators"])]
            for row in rows
        ),
    )
    yield ""


def _shares(operators: list[Row]) -> str:
    whole = sum(entry["us"] for entry in operators) or 1
    ranked = sorted(operators, key=lambda entry: -float(entry["us"]))
    shown = [
        f"{plain(entry['operator'], 60)} ({plain(entry['provider'], 60)}) "
        f"{entry['us'] / whole:.0%}, {microseconds(entry['us'])}"
        for entry in ranked[:COSTLY]
    ]
    return "; ".join(shown) + ("; …" if len(ranked) > COSTLY else "")


def _decoder_table(result: Row) -> Iterator[str]:
    rows = timed(result)
    if not rows:
        return
    yield _sentence("Whole decoders under their cap", "**")
    yield ""
    head = [
        "decoder",
        "on",
        "threads",
        "first token, ms",
        "tokens/s",
        "a token, ms",
        "long prompt, tokens/s",
        "slots, MB",
        "weights, MB",
    ]
    yield from table(
        head,
        (
            [
                f"{row['id']}{'' if row['parity']['passed'] else ' WRONG'}",
                row["provider_asked"],
                str(row["threads"]),
                f"{_digits(row['first_p50_ms'])} ({row['prompt_tokens']:,} tokens)",
                _digits(row["tokens_per_s"]),
                f"{_digits(row['token_p50_us'] / 1000)} (to {_digits(row['token_p90_us'] / 1000)})",
                f"{_digits(row['prefill_tokens_per_s'])} ({row['long_tokens']:,} tokens, "
                f"{row['evicting_blocks']:,} blocks evict)",
                _digits(row["held_bytes"] / 1e6),
                _digits(row["weights_bytes"] / 1e6),
            ]
            for row in rows
        ),
    )
    yield ""
    yield from _sustained_table(rows)


def _sustained_table(rows: list[Row]) -> Iterator[str]:
    """Yield the tokens per second of each window; of many, only the first and last ones."""
    rows = [row for row in rows if row["sustained"]]
    if not rows:
        return
    yield _sentence("Sustained: tokens a second of each window of writing on and on", "**")
    yield ""
    for row in rows:
        windows = row["sustained"]
        speeds = [_digits(window["tokens"] / window["seconds"]) for window in windows]
        if len(speeds) > MOST:
            speeds = [*speeds[: MOST // 2], "…", *speeds[-MOST // 2 :]]
        change = row["sustained_change"]
        drift = "" if change is None else f", {change:+.0%} from first to last"
        yield _listed(
            f"{identity(row)}, windows of {windows[0]['seconds']:.0f} s{drift}: {', '.join(speeds)}"
        )
    yield ""


def _digits(value: float) -> str:
    """Return a number with three significant digits.

    >>> _digits(3.14159), _digits(2715.0)
    ('3.14', '2,715')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _doubts(result: Row) -> Iterator[str]:
    """Yield flags as a list, only the first few of each kind."""
    passed = sum(row["parity"]["passed"] for row in measured(result))
    yield _sentence(f"{passed} of {len(result['cells'])} cells ran and gave what eager code gives.")
    kinds: dict[str, list[str]] = defaultdict(list)
    for flag in result["validity"]["flags"]:
        where = f"{flag['cell']}: " if flag["cell"] else ""
        kinds[flag["kind"]].append(where + flag["text"])
    for kind, texts in kinds.items():
        yield from (_listed(f"{kind}: {plain(text)}") for text in texts[:FEW])
        if len(texts) > FEW:
            yield _listed(f"{kind}: {len(texts) - FEW} cells more")
    yield ""


def _beside(results: Sequence[Row]) -> Iterator[str]:
    """Yield tables of all cells and decoders, with a column per result and provider."""
    shown = (
        ("Median (least to 90th percentile) in µs", "cell", measured, _median),
        ("Whole decoders: first token in ms, tokens a second, long prompt in tokens/s", "decoder",
         timed, _speeds),
    )  # fmt: skip
    for heading_, text, rows_of, show in shown:
        columns = [
            (
                result,
                provider,
                [row for row in rows_of(result) if row["provider_asked"] == provider],
            )
            for result in results
            for provider in _providers(rows_of(result))
        ]
        if not columns:
            continue
        names = [short(result, provider) for result, provider, _ in columns]
        if len(set(names)) < len(names):
            names = [f"{index}. {name}" for index, name in enumerate(names, 1)]
        by_key = [{(row["id"], row["threads"]): row for row in rows} for *_, rows in columns]
        keys = dict.fromkeys(k for rows in by_key for k in rows)
        yield _sentence(heading_, "**")
        yield ""
        yield from table(
            [text, "threads", *names],
            (
                [k[0], str(k[1]), *(show(rows[k]) if k in rows else "" for rows in by_key)]
                for k in keys
            ),
        )
        yield ""


def _providers(rows: list[Row]) -> list[str]:
    """Return the providers of these rows, in their order."""
    return list(dict.fromkeys(row["provider_asked"] for row in rows))


def _speeds(row: Row) -> str:
    three = (row["first_p50_ms"], row["tokens_per_s"], row["prefill_tokens_per_s"])
    return ", ".join(map(_digits, three))
