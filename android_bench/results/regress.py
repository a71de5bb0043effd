"""Finds the cells that became slower than in an earlier result of the same device, for CI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcap.android_bench.errors import NotComparable
from kvcap.android_bench.results.judge import Row, key, measured, said, timed

SPEEDS = (  # 1: more is slower, -1: less is
    ("first_p50_ms", "first token in ms", 1), ("tokens_per_s", "tokens a second", -1),
    ("prefill_tokens_per_s", "tokens a second of a long prompt", -1),
)  # fmt: skip


def regressions(now: Row, before: Row, allowed: float) -> list[str]:
    """Return cells whose median grew by more than `allowed` (0.1: a tenth), and those not run.

    Raises:
        NotComparable: another device or shape, or no cell in common.
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
    found = []
    for k, row in old.items():
        if k in new and (change := new[k]["p50_us"] / row["p50_us"] - 1) > allowed:
            found.append(
                f"{said(row)}: {new[k]['p50_us']:,.1f} µs, "
                f"{change:+.0%} over {row['p50_us']:,.1f} µs"
            )
        elif k in tried and k not in new:
            found.append(f"{said(row)}: ran before and does no more")
    return found


def _slower_decoders(now: Row, before: Row, allowed: float) -> Iterator[str]:
    """Yield decoders whose first token takes longer, or that read or write fewer tokens/s."""
    new = {key(row): row for row in timed(now)}
    tried = {key(row) for row in now.get("decoders", [])}
    for row in timed(before):
        k = key(row)
        if k not in new:
            if k in tried:
                yield f"{said(row)}: ran before and does no more"
            continue
        for name, what, times in SPEEDS:
            grown = (new[k][name] / row[name]) ** times - 1
            if grown > allowed:
                yield f"{said(row)}: {what} {new[k][name]:,.1f}, {row[name]:,.1f} before"


def _rows(result: Row) -> dict[tuple[str, int, str], Row]:
    return {key(row): row for row in measured(result)}
