"""Computes statistics, relative times and fits from a result's raw samples, and flags doubts.

It does so for all runners; statistics that a file already has are compared with its samples.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvcap.android_bench.errors import NotComparable, ResultBroken
from kvcap.android_bench.plan.presets import Rules
from kvcap.android_bench.results.source import believed
from kvcap.android_bench.runner.statistics import statistics
from kvcap.android_bench.safe_text import plain

Row = dict[str, Any]
Flag = dict[str, Any]
HOUSE = Rules()
AGREES = 0.01  # relative error allowed of a runner's own statistics, which may be rounded
WILD = 2.5  # 90th percentile over least sample; 95 % of 293 cells in docs/results are below 2
SHORT = 0.8  # share of min_seconds that samples must last, as some runners count pauses
REMARKS = {"rules", "skipped"}  # flags that do not make a result invalid


def judged(result: Row) -> Row:
    """Return a copy of a valid result with statistics, derived numbers and flags.

    Raises:
        ResultBroken: the result has other statistics than its samples, or a row twice.
    """
    judgement = {
        **result,
        **{name: [dict(row) for row in result[name]] for name in ("cells", "baselines")},
    }
    for row in (*judgement["cells"], *judgement["baselines"]):
        if any(row.get("samples_us", [])):
            _complete(row)
    if "decoders" in result:
        judgement["decoders"] = [_timed(row) for row in result["decoders"]]
    counts = Counter(map(identity, (*judgement["cells"], *judgement.get("decoders", []))))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ResultBroken(f"the result has {twice[0]} twice")
    judgement["derived"] = {"relative": _relative(judgement), "fits": fits(judgement)}
    flags = [
        *_run_flags(judgement),
        *(f for row in judgement["cells"] for f in _row_flags(judgement, row)),
        *(f for row in judgement.get("decoders", []) for f in _decoder_flags(judgement, row)),
    ]
    ok = not [flag for flag in flags if flag["kind"] not in REMARKS]
    judgement["validity"] = {"ok": ok, "flags": flags}
    return judgement


def _timed(row: Row) -> Row:
    """Return a decoder's row with speeds computed from its samples."""
    if row["status"] != "ok":
        return row
    tokens = np.concatenate([np.asarray(part, dtype=np.float64) for part in row["token_us"]])
    p50, p90 = np.percentile(tokens, (50, 90))
    speeds = [window["tokens"] / window["seconds"] for window in row["sustained"]]
    long_s = float(np.median(row["long_ms"])) / 1000
    return {
        **row,
        "first_p50_ms": float(np.median(row["first_ms"])),
        "token_p50_us": float(p50),
        "token_p90_us": float(p90),
        "tokens_per_s": float(1e6 / tokens.mean()),
        "prefill_tokens_per_s": row["long_tokens"] / long_s,
        "sustained_change": speeds[-1] / speeds[0] - 1 if len(speeds) > 1 else None,
    }


def relative(result: Row, reference: str | None) -> Row:
    """Return a judged result with times relative to another cell; unchanged for None.

    Raises:
        NotComparable: the result has no such cell.
    """
    if reference is None:
        return result
    if reference not in {row["id"] for row in result["cells"]}:
        raise NotComparable(f"no cell {reference!r} in the result of {result['device']['model']}")
    return {**result, "run": {**result["run"], "reference": reference}}


def rows_of(result: Row) -> Row:
    """Return a judged result without its samples, which are most of it."""
    lean = {
        name: [{k: v for k, v in row.items() if k != "samples_us"} for row in result[name]]
        for name in ("cells", "baselines")
    }
    if "decoders" in result:
        lean["decoders"] = [
            {k: v for k, v in row.items() if k != "token_us"} for row in result["decoders"]
        ]
    return {**result, **lean}


def key(row: Row) -> tuple[str, int, str]:
    """Return the key of a row: cell, threads and provider."""
    return row["id"], row["threads"], row["provider_asked"]


def identity(row: Row) -> str:
    """Return a row's cell, threads and provider as text."""
    return plain(f"{row['id']} ({row['provider_asked']}, {row['threads']})", 450)


def _complete(row: Row) -> None:
    """Add statistics to a row, and check the statistics that it has against its samples."""
    numbers = statistics(row["samples_us"])
    numbers["gb_per_s"] = row["bytes"] / numbers["p50_us"] / 1000
    samples = np.concatenate([np.asarray(part) for part in row["samples_us"]])
    for name, value in numbers.items():
        least, most = value, value
        if name[0] == "p":  # runners interpolate percentiles by different rules
            share = float(name[1:3])
            least = float(np.percentile(samples, share, method="lower"))
            most = float(np.percentile(samples, share, method="higher"))
        if name == "std_us":
            least = float(samples.std())  # some runners divide by n, not n - 1
        reported = row.get(name, value)
        if name != "gb_per_s" and not least * (1 - AGREES) <= reported <= most * (1 + AGREES):
            raise ResultBroken(
                f"{row['id']}: {name} is {reported:.6g}, its samples give {value:.6g}"
            )
    row |= numbers


def spread(row: Row) -> float:
    """Return a row's 90th percentile divided by its least sample; 1 if all samples are equal."""
    return float(row["p90_us"] / row["min_us"])


def measured(result: Row) -> list[Row]:
    """Return the rows that have samples."""
    return [row for row in result["cells"] if row["status"] == "ok"]


def _relative(result: Row) -> list[Row]:
    """Return each median divided by the reference's with the same threads and provider."""
    base = {
        (row["threads"], row["provider_asked"]): row["p50_us"]
        for row in measured(result)
        if row["id"] == result["run"]["reference"]
    }
    entries = []
    for row in measured(result):
        reference = base.get((row["threads"], row["provider_asked"]))
        if reference is not None:
            name, threads, provider = key(row)
            entries.append(
                {
                    "id": name,
                    "threads": threads,
                    "provider_asked": provider,
                    "value": row["p50_us"] / reference,
                }
            )
    return entries


def series(result: Row) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows of the stage score that differ only in their slots; sort each group by slots."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in measured(result):
        if row["stage"] == "score":
            same = ("policy", "formulation", "queries", "dtype", "threads", "provider_asked")
            groups[tuple(row[name] for name in same)].append(row)
    return {name: sorted(rows, key=lambda row: int(row["n"])) for name, rows in groups.items()}


def fits(result: Row) -> list[Row]:
    """Fit `t0 + slope · n` to every series of at least three sizes, by `fit`."""
    lines = []
    for name, rows in series(result).items():
        if len({row["n"] for row in rows}) >= 3:
            names = ("policy", "formulation", "queries", "dtype", "threads", "provider_asked")
            numbers = fit([row["n"] for row in rows], [row["p50_us"] for row in rows])
            lines.append({**dict(zip(names, name, strict=True)), **numbers})
    return lines


def fit(slots: list[int], times: list[float]) -> dict[str, float]:
    """Fit the line `t0 + slope · n` with t0 ≥ 0 by least relative errors.

    With absolute errors the largest size would decide t0.

    Returns:
        t0_us, us_per_1024 (slots), and worst: the largest relative error of the line.
    """
    n, t = np.asarray(slots, dtype=np.float64), np.asarray(times, dtype=np.float64)
    matrix = np.stack((1 / t, n / t), axis=1)
    (t0, slope), *_ = np.linalg.lstsq(matrix, np.ones_like(t), rcond=None)
    if t0 < 0:
        t0, slope = 0.0, float((n / t).sum() / ((n / t) ** 2).sum())
    worst = np.abs((t0 + slope * n) / t - 1).max()
    return {"t0_us": float(t0), "us_per_1024": float(slope * 1024), "worst": float(worst)}


def _flag(kind: str, cell: str | None, text: str) -> Flag:
    return {"kind": kind, "cell": cell, "text": text}


def _run_flags(result: Row) -> Iterator[Flag]:
    """Yield doubts about the whole run."""
    rules, run = result["rules"], result["run"]
    source, why = believed(result["device"])
    if source != result["device"]["source"]:
        yield _flag("source", None, f"says it is {result['device']['source']}, but {why}")
    if not run["complete"] or run["interrupted"]:
        spans = "; ".join(span["reason"] for span in run["interrupted"]) or "it ended early"
        yield _flag("interrupted", None, f"the run was interrupted: {spans}")
    less = [
        f"{name} {rules[name]:g} in place of {getattr(HOUSE, name):g}"
        for name in ("warmup_runs", "warmup_seconds", "min_runs", "min_seconds", "rounds")
        if rules[name] < getattr(HOUSE, name)
    ]
    if less:
        yield _flag("rules", None, f"measured by shorter rules: {', '.join(less)}")
    yield from _drift(result)
    yield from _throttled(result)


def _drift(result: Row) -> Iterator[Flag]:
    repeat, limit = result["repeat"], result["rules"]["max_drift"]
    first = next((row for row in measured(result) if repeat and key(row) == key(repeat)), None)
    if repeat is None or first is None or not repeat["samples_us"]:
        yield _flag("drift", None, "the first cell was not measured again at the end")
        return
    change = float(np.median(repeat["samples_us"]) / np.median(first["samples_us"][0])) - 1
    if abs(change) > limit:
        text = f"took {change:+.0%} when measured again at the end; allowed are {limit:.0%}"
        yield _flag("drift", repeat["id"], text)


def _throttled(result: Row) -> Iterator[Flag]:
    """Yield a doubt if all cells together were slower in the last round than in the first."""
    limit = result["rules"]["max_drift"]
    changes = [
        np.median(row["samples_us"][-1]) / np.median(row["samples_us"][0])
        for row in measured(result)
        if len(row["samples_us"]) > 1
    ]
    if changes and (change := float(np.median(changes)) - 1) > limit:
        text = f"the cells' median took {change:+.0%} in the last round; allowed are {limit:.0%}"
        yield _flag("throttled", None, text)


def _decoder_flags(result: Row, row: Row) -> Iterator[Flag]:
    """Yield doubts about a decoder's times."""
    name, rules = identity(row), result["rules"]
    if row["status"] != "ok":
        yield _flag(row["status"], name, row["reason"] or "no reason is given")
        return
    if row["provider_got"] != row["provider_asked"]:
        yield _flag("endpoint", name, f"ran on {row['provider_got']}")
    if not row["parity"]["passed"]:
        yield _flag("parity", name, row["parity"].get("text", "differs from this kvcap"))
    if len(row["token_us"]) < rules["rounds"]:
        yield _flag("rounds", name, f"{len(row['token_us'])} rounds of {rules['rounds']}")
    change = row["sustained_change"]
    if change is not None and change < -rules["max_drift"]:
        yield _flag(
            "throttled",
            name,
            f"wrote {change:+.0%} tokens a second in the last window of "
            f"its sustained run; allowed are {rules['max_drift']:.0%}",
        )


def timed(result: Row) -> list[Row]:
    """Return the decoders that have samples."""
    return [row for row in result.get("decoders", []) if row["status"] == "ok"]


def _row_flags(result: Row, row: Row) -> Iterator[Flag]:
    """Yield doubts about one cell."""
    name = identity(row)
    if row["status"] != "ok":
        yield _flag(row["status"], name, row["reason"] or "no reason is given")
        return
    rules, rounds, runs = result["rules"], row["samples_us"], row["runs_per_sample"]
    count = sum(map(len, rounds)) * runs
    seconds = sum(map(sum, rounds)) * runs / 1e6
    if row["provider_got"] != row["provider_asked"]:
        yield _flag("endpoint", name, f"ran on {row['provider_got']}")
    if not row["parity"]["passed"]:
        yield _flag("parity", name, row["parity"].get("text", "differs from eager"))
    if len(rounds) < rules["rounds"]:
        yield _flag("rounds", name, f"{len(rounds)} rounds of {rules['rounds']}")
    if count < rules["min_runs"]:
        yield _flag("runs", name, f"{count} runs of {rules['min_runs']}")
    if seconds < SHORT * rules["min_seconds"]:
        yield _flag("runs", name, f"{seconds:.3g} s of {rules['min_seconds']:g}")
    step = result["runtime"]["timer_us"] / (row["min_us"] * runs)
    if step > rules["max_timer_share"]:
        yield _flag("timer", name, f"the clock's step is {step:.0%} of a sample")
    if (times := spread(row)) > WILD:
        yield _flag(
            "spread",
            name,
            f"a tenth of the samples took {times:.1f} times the least or "
            f"more: {row['min_us']:,.0f} to {row['p90_us']:,.0f} µs, median "
            f"{row['p50_us']:,.0f}",
        )
