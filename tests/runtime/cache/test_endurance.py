"""Long texts and many random turns: what must hold between turns, and faults that break it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcap.evals.bench import BenchmarkOptions, load
from kvcap.lab.bench.turns import Broken, Walk, check, interrupt_after
from kvcap.runtime.backends.pytorch.runtime import Runtime

SMALL = BenchmarkOptions(lengths=(3000,), budgets=(64,), block_size=32, steps=40)


def test_a_long_text_takes_the_bytes_of_a_short_one() -> None:
    result = load("stream")(SMALL)
    assert [row["tokens"] for row in result.rows] == [30, 300, 750, 1500, 2250, 3000]
    assert {row["kv_bytes"] for row in result.rows} == {result.derived["planned_kv_bytes"]}
    assert result.rows[-1]["held"] == 64


@pytest.mark.slow
def test_random_turns_break_nothing() -> None:
    result = load("turns")(SMALL)
    assert [row["turns"] for row in result.rows] == list(range(4, 41, 4))
    assert result.rows[-1]["interrupts"] > 0
    assert result.rows[-1]["tokens"] > 1000
    assert len({row["kv_bytes"] for row in result.rows}) == 1


def twice(session: Any) -> None:
    positions = session.cache.capped_layers[2].segments[0].positions
    positions[..., 0] = positions[..., 1]


def unpinned(session: Any) -> None:
    gone = set(range(session.cache.seen)) - set(
        session.cache.capped_layers[0].segments[0].positions[0, 0].tolist()
    )
    session.cache.pinned_spans.append((min(gone), min(gone) + 1))


def behind(session: Any) -> None:
    session.cache.capped_layers[1].seen -= 1


def grown(session: Any) -> None:
    pool = session.cache.capped_layers[0].segments[0].pool
    pool.named()["values"] = pool.values.new_zeros(pool.values.numel() + 1)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (twice, "a head holds a token once"),
        (unpinned, "pinned tokens are held"),
        (behind, "all layers have read the same"),
        (grown, "the bytes it began with"),
        (lambda session: session.messages.pop(), "every message has its answer"),
    ],
)
def test_a_planted_fault_is_seen(fault: Callable[[Any], Any], says: str) -> None:
    session = Runtime.from_pretrained(budget_tokens=64, block_size=32).session(seed=0)
    nbytes = session.cache.nbytes
    session.set_generation(max_new_tokens=4)
    for _ in session.send("Mosses survive the cold. " * 20):
        pass
    check(session, nbytes)
    fault(session)
    with pytest.raises(Broken, match=says):
        check(session, nbytes)


def test_a_file_left_behind_is_seen(tmp_path: Any) -> None:
    walk = Walk(Runtime.from_pretrained(budget_tokens=64, block_size=32), tmp_path)
    (tmp_path / ".turns.safetensors.x.part").write_bytes(b"")
    with pytest.raises(Broken, match="left behind"):
        walk.step()


def test_an_interrupt_comes_or_does_not() -> None:
    with pytest.raises(KeyboardInterrupt), interrupt_after(0.01):
        time.sleep(5)
    with interrupt_after(5.0):
        pass
    with interrupt_after(None):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
