"""Finds the cells that became slower than in an earlier result of the same device, for CI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcap.android_bench.errors import NotComparable
from kvcap.android_bench.results.judge import Row, identity, key, measured, timed

SPEEDS = (  # 1: a larger number is slower, -1: a smaller one is
    ("first_p50_ms", "first token in ms", 1), ("tokens_per_s", "tokens a second", -1),
    ("prefill_tokens_per_s", "tokens a second of a long prompt", -1),
)  # fmt: skip


def regressions(now: Row, before: Row, allowed: float) -> list[str]:
    """Return a line for each cell that became slower, or that is no longer run.

    Args:
        now: the new judged result.
        before: an earlier judged result of the same device.
        allowed: share by which a median may grow; 0.1 is a tenth.

    Raises:
        NotComparable: devices or shapes differ, or no cell is in both results.
    """
    for part, names in (("device", ("source", "model", "abi")), ("runtime", ("name",))):
        for name in names:
            if now[part][name] != before[part][name]:
                raise NotComparable(
                    f"the baseline's {part} has {name} {before[part][name]!r}, the result "
                    f"{now[part][name]!r}; measure the baseline again on this one"
                )
    if now["shape"] != before["shape"]:
        raise NotComparable("the baseline was measured on another shape; measure it again")
    old, new = _rows(before), _rows(now)
    tried = {key(row) for row in now["cells"]}
    if not set(old) & tried:
        raise NotComparable("the baseline has no cell in common with the result")
    return [*_slower(old, new, tried, allowed), *_slower_decoders(now, before, allowed)]


def _slower(
    old: dict[tuple[str, int, str], Row],
    new: dict[tuple[str, int, str], Row],
    tried: set[tuple[str, int, str]],
    allowed: float,
) -> Sequence[str]:
    lines = []
    for k, row in old.items():
        if k in new and (change := new[k]["p50_us"] / row["p50_us"] - 1) > allowed:
            lines.append(
                f"{identity(row)}: {new[k]['p50_us']:,.1f} µs, "
                f"{change:+.0%} over {row['p50_us']:,.1f} µs"
            )
        elif k in tried and k not in new:
            lines.append(f"{identity(row)}: ran before and does no more")
    return lines


def _slower_decoders(now: Row, before: Row, allowed: float) -> Iterator[str]:
    """Yield a line for each decoder that is slower to its first token, in reading or in writing."""
    new = {key(row): row for row in timed(now)}
    tried = {key(row) for row in now.get("decoders", [])}
    for row in timed(before):
        k = key(row)
        if k not in new:
            if k in tried:
                yield f"{identity(row)}: ran before and does no more"
            continue
        for name, label, times in SPEEDS:
            grown = (new[k][name] / row[name]) ** times - 1
            if grown > allowed:
                yield f"{identity(row)}: {label} {new[k][name]:,.1f}, {row[name]:,.1f} before"


def _rows(result: Row) -> dict[tuple[str, int, str], Row]:
    return {key(row): row for row in measured(result)}
