"""Writes results as Markdown: what ran, medians with their fits, relative times, doubts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from kvcap.android_bench.results.judge import (
    WILD,
    Row,
    key,
    measured,
    series,
    spread,
    timed,
)
from kvcap.android_bench.results.judge import (
    said as identity,
)
from kvcap.android_bench.results.source import believed, title
from kvcap.android_bench.runner.statistics import PERCENTILES
from kvcap.android_bench.safe_text import escaped, plain
from kvcap.export.graphs.formulations import TRACED

MOST = 24  # windows of a sustained run that are shown
COSTLY = 5  # operators of a cell that are shown
FEW = 3  # flags of one kind that are written out
WORST = 0.25  # relative error beyond which a line does not describe a series
LONG = 3000  # the most characters of a sentence, which may have several names
ROW = ("policy", "formulation", "queries")


def markdown(results: Sequence[Row]) -> str:
    """Write one or several judged results as Markdown, side by side where there are several.

    Every text goes through `_title`, `_said`, `_listed` or `table`, which escape it.
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
    """List regressions."""
    return "\n".join(_listed(f"slower: {line}") for line in lines)


def _title(level: int, text: str) -> str:
    return f"{'#' * level} {escaped(text, LONG)}"


def _said(text: str, mark: str = "") -> str:
    return f"{mark}{escaped(text, LONG)}{mark}"


def _listed(text: str) -> str:
    return f"- {escaped(text, LONG)}"


def heading(results: Sequence[Row]) -> str:
    """Return the title of everything; whatever is not from a real device says so."""
    return "Latency of eviction scores. " + "; ".join(title(result) for result in results)


def label(row: Row) -> str:
    """Name a policy with what distinguishes it in a table."""
    parts = [row["policy"]]
    if row["formulation"] != TRACED or row["policy"] == "keydiff":
        parts.append(row["formulation"])
    if row["queries"]:
        parts.append("1 query" if row["queries"] == 1 else f"{row['queries']} queries")
    return plain(", ".join(parts), 450)


def short(result: Row, provider: str) -> str:
    """Return a column's heading: the device, and what it is where it is none; runner, provider."""
    source, _ = believed(result["device"])
    tag = {"real": "", "emulated": "EMULATED ", "host": "HOST "}[source]
    by = f"{result['run']['runner']}, {plain(provider)}"
    return f"{tag}{plain(result['device']['model'], 60)} ({by})"


def microseconds(value: float) -> str:
    """Write a time in three digits.

    >>> microseconds(23.456), microseconds(14523.2)
    ('23.5', '14,523')
    """
    if value < 0.005:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a Markdown table; the first column is text, the others numbers."""
    first, *others = (list(map(escaped, row)) for row in (head, *rows))
    yield "| " + " | ".join(first) + " |"
    yield "|---|" + "---:|" * (len(first) - 1)
    for row in others:
        yield "| " + " | ".join(row) + " |"


def setting(row: Row) -> tuple[Any, ...]:
    """Return the setting that a table is of: type of numbers, provider and threads."""
    return row["dtype"], row["provider_asked"], row["threads"]


def setting_name(name: tuple[Any, ...]) -> str:
    """Name a setting in words."""
    dtype, provider, threads = name
    return plain(f"{dtype}, {provider}, {threads} thread{'s' * (threads > 1)}")


def _facts(result: Row) -> Iterator[str]:
    runtime, rules, run = result["runtime"], result["rules"], result["run"]
    shape, before = result["shape"], result["conditions"]["before"]
    cores = runtime.get("cores")
    yield _said(
        f"{shape['name']}: {shape['kv_heads']} KV heads of {shape['head_dim']}, "
        f"{shape['heads']} query heads, blocks of {shape['block']}. Preset {run['preset']}, plan "
        f"{run['plan']}, {run['started']}. At least {rules['min_runs']} runs and "
        f"{rules['min_seconds']:g} s a cell in {rules['rounds']} rounds of random order, after "
        f"{rules['warmup_runs']} runs and {rules['warmup_seconds']:g} s to warm up."
    )
    yield ""
    said = [f"pinned to cores {', '.join(map(str, cores))}" if cores else "not pinned"]
    said.append(f"clock's step {runtime['timer_us']:g} µs")
    if before.get("governor"):
        said.append(f"governor {', '.join(sorted(set(before['governor']))[:FEW])}")
    for name, unit in (("battery_percent", "% battery"), ("charging", "charging")):
        if before.get(name) is not None:
            said.append(f"{before[name]} {unit}" if unit[0] == "%" else f"{unit}: {before[name]}")
    said += [f"{name}: {_change(result, name)}" for name in ("thermal",) if before.get(name)]
    said += [_memory(result["memory"])] if "memory" in result else []
    yield _said("; ".join(said) + ".")


def _memory(found: Row) -> str:
    """Say the peak of memory, or why it is unknown."""
    if found["peak_bytes"] is None:
        return f"peak memory unknown: {found['reason']}"
    return f"peak memory of the {found['of']} {_digits(found['peak_bytes'] / 1e6)} MB"


def _change(result: Row, name: str) -> str:
    """Return the hottest zone before and after."""
    before, after = (result["conditions"][when].get(name) or {} for when in ("before", "after"))
    return f"{max(before.values()):.0f} °C before, {max(after.values(), default=0):.0f} °C after"


def _score_tables(result: Row) -> Iterator[str]:
    rows = [row for row in measured(result) if row["stage"] == "score"]
    relative = {
        (v["id"], v["threads"], v["provider_asked"]): v["value"]
        for v in result["derived"]["relative"]
    }
    lines = {
        tuple(fit[name] for name in (*ROW, "dtype", "provider_asked", "threads")): fit
        for fit in result["derived"]["fits"]
    }
    for name, _ in groupby(sorted(rows, key=setting), key=setting):
        part = [found for found in series(result).values() if setting(found[0]) == name]
        sizes = sorted({row["n"] for found in part for row in found})
        said = setting_name(name)
        yield _said(f"Score, {said}: median (least to 90th percentile) in µs by slots held", "**")
        yield ""
        body = [
            [
                label(found[0]),
                *_by_size(found, sizes, lambda row: _median(row)),
                _line(lines.get((*(found[0][n] for n in ROW), *name))),
            ]
            for found in part
        ]
        body += _copies(result, sizes)
        yield from table(["policy", *(f"{n:,}" for n in sizes), "t0 + slope"], body)
        yield ""
        yield _said(f"Score, {said}: relative to {result['run']['reference']}", "**")
        yield ""
        values = [
            [label(found[0]), *_by_size(found, sizes, lambda r: _ratio(relative.get(key(r))))]
            for found in part
        ]
        yield from table(["policy", *(f"{n:,}" for n in sizes)], values)
        yield ""


def _by_size(rows: list[Row], sizes: list[int], show: Any) -> list[str]:
    found = {row["n"]: row for row in rows}
    return [show(found[n]) if n in found else "" for n in sizes]


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
    found = {entry["id"]: entry for entry in result["baselines"]}
    rows = [found.get(f"memcpy.n{n}") for n in sizes]
    if any(rows):
        shown = [microseconds(row["p50_us"]) if row and "p50_us" in row else "" for row in rows]
        yield ["copy of the fp16 keys", *shown, ""]


def _evict_table(result: Row) -> Iterator[str]:
    rows = [row for row in measured(result) if row["stage"] == "evict"]
    if not rows:
        return
    yield _said("Evict: score, select, gather keys and values", "**")
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
    yield _said("Percentiles of all cells, in µs", "**")
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
    yield _said("Operators of a run, by ONNX Runtime's profiler, which takes time itself", "**")
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
    yield _said("Whole decoders under their cap", "**")
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
    """Yield tokens a second of each window; of many, the first and last ones."""
    rows = [row for row in rows if row["sustained"]]
    if not rows:
        return
    yield _said("Sustained: tokens a second of each window of writing on and on", "**")
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
    """Return a number with three digits.

    >>> _digits(3.14159), _digits(2715.0)
    ('3.14', '2,715')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _doubts(result: Row) -> Iterator[str]:
    """Yield flags, of each kind the first few."""
    passed = sum(row["parity"]["passed"] for row in measured(result))
    yield _said(f"{passed} of {len(result['cells'])} cells ran and gave what eager code gives.")
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
    """Yield every cell and decoder, a column per result and provider."""
    shown = (
        ("Median (least to 90th percentile) in µs", "cell", measured, _median),
        ("Whole decoders: first token in ms, tokens a second, long prompt in tokens/s", "decoder",
         timed, _speeds),
    )  # fmt: skip
    for heading_, what, rows_of, show in shown:
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
            names = [f"{place}. {name}" for place, name in enumerate(names, 1)]
        found = [{(row["id"], row["threads"]): row for row in rows} for *_, rows in columns]
        keys = dict.fromkeys(k for rows in found for k in rows)
        yield _said(heading_, "**")
        yield ""
        yield from table(
            [what, "threads", *names],
            (
                [k[0], str(k[1]), *(show(rows[k]) if k in rows else "" for rows in found)]
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
