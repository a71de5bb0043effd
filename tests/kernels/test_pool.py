"""Scores pooled in time by kernels: on CUDA where there is one, else in triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE, pytestmark, unwritten  # noqa: F401
from torch import Tensor

from kvcap import kernels
from kvcap.kernels import pool
from kvcap.policies import Observation, Policy
from kvcap.policies.base import Logits, pool_in_time
from kvcap.policies.dropkv import DropKV
from kvcap.policies.snapkv import SnapKV

ODD = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3e38, 1e-40])
pytestmark = [pytestmark, pytest.mark.usefixtures("unwritten")]


def observe(*shape: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random scores of this shape, and positions with gaps in no order, views of longer rows."""
    g = torch.Generator().manual_seed(seed)
    batch, heads, slots = shape[0], shape[1], shape[-1]
    scores = torch.randn(shape, generator=g)
    ages = torch.stack([torch.randperm(3 * slots, generator=g) for _ in range(batch * heads)])
    ages = ages.view(batch, heads, -1).to(DEVICE, dtype) - 2 * slots  # counted from some time
    return scores.to(DEVICE), ages[..., :slots]


def check(
    scores: Tensor, positions: Tensor, kernel: int, mode: str, window: int | None = None
) -> Tensor:
    """The same as eagerly, two runs to the bit; positions lie below the number of slots."""
    seen = scores.shape[-1]
    window = seen // 3 if window is None else window
    clock = torch.tensor(seen, device=DEVICE)
    assert pool.covers(scores, positions, kernel)
    before = scores.clone(), positions.clone()
    pooled = pool.pool_in_time(scores, positions, kernel, mode, seen, window)
    again = pool.pool_in_time(scores, positions, kernel, mode, clock, window)
    expected = pool_in_time(scores, positions, kernel, mode, seen, window)
    assert pooled.shape == expected.shape
    assert pooled.dtype == torch.float32
    rtol, atol = (0, 0) if mode == "max" else (1e-6, 1e-7)  # of sums whose terms are about 1
    torch.testing.assert_close(pooled, expected, rtol=rtol, atol=atol, equal_nan=True)
    assert torch.equal(pooled.view(torch.int32), again.view(torch.int32))
    torch.testing.assert_close((scores, positions), before, rtol=0, atol=0, equal_nan=True)
    return pooled


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("mode", ["max", "avg"])
@pytest.mark.parametrize("kernel", [3, 11])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (1, 2, 2), (2, 3, 7), (1, 1, 16), (1, 1, 127), (1, 1, 513),
     (1, 1, 1, 1), (2, 2, 3, 33), (2, 1, 2, 128), (1, 1, 8, 129), (1, 1, 5, 300)],
    ids=str,
)  # fmt: skip
def test_pooled_as_eagerly(shape, kernel, mode):
    dtype = torch.int32 if kernel == 3 else torch.int64
    check(*observe(*shape, dtype=dtype, seed=kernel), kernel, mode)


def test_a_window_of_one_leaves_scores():
    scores, positions = observe(1, 2, 9)
    assert pool.pool_in_time(scores, positions, 1, "avg", 9, 2) is scores


@pytest.mark.parametrize(
    ("log_tile", "slots"), [(7, 1100), (8, 255), (8, 256), (8, 513), (10, 1025)]
)
def test_tiles_of_any_size(log_tile, slots, monkeypatch):
    """And more of them than are searched at once."""
    monkeypatch.setattr(pool, "LOG_TILE", log_tile)
    scores, positions = observe(1, 1, slots, dtype=torch.int64)
    pooled = pool.pool_in_time(scores, positions, 5, "max", slots, 40)
    assert torch.equal(pooled, pool_in_time(scores, positions, 5, "max", slots, 40))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["max", "avg"])
def test_scores_can_be_a_view(mode):
    """Every other number of a row, one row for all heads, groups last in memory."""
    scores, positions = observe(2, 3, 4, 70)
    check(scores[..., ::2], positions[..., :35], 5, mode)
    check(scores[:, :, 1], positions, 5, mode)
    check(scores[:1, :1].expand(2, 3, -1, -1), positions, 5, mode)
    check(scores.mT.contiguous().mT, positions, 5, mode)
    check(scores[:, 1:2], positions[:, 2:], 5, mode)


@pytest.mark.slow(keep=2)
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("mode", ["max", "avg"])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_infinities_nan_and_zeros(share, mode):
    scores, positions = observe(1, 2, 3, 140)
    g = torch.Generator().manual_seed(0)
    odd = ODD[torch.randint(len(ODD), scores.shape, generator=g)].to(DEVICE)
    some = torch.rand(scores.shape, generator=g).to(DEVICE) < share
    check(torch.where(some, odd, scores), positions, 7, mode)
    lowest = torch.full_like(scores, float("-inf"))
    assert torch.equal(check(lowest, positions, 7, mode), lowest)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_ends_of_the_range_are_positions_too(dtype):
    ends = torch.iinfo(dtype)
    positions = torch.tensor([[[ends.max, 0, ends.min, -1, ends.max - 1]]], device=DEVICE).to(dtype)
    scores = torch.tensor([[[5.0, 3.0, 1.0, 2.0, 4.0]]], device=DEVICE)
    expected = torch.tensor([[[5.0, 3.0, 2.0, 3.0, 4.0]]], device=DEVICE)  # two are left out
    assert torch.equal(check(scores, positions, 3, "max", window=1), expected)


def test_lengths_that_change_run_through_remembered_kernels():
    for slots in (40, 41, 300, 40, 17):
        check(*observe(1, 2, slots), 7, "avg")


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("window", [0, 1, 8, 40, 1000])
@pytest.mark.parametrize("mode", ["max", "avg"])
def test_any_number_of_the_newest_is_left_out(window, mode):
    scores, positions = observe(1, 2, 3, 40)
    pooled = check(scores, positions, 7, mode, window)
    newest = (positions >= 40 - window)[:, :, None].expand_as(scores)
    assert torch.equal(pooled[newest], scores[newest])
    assert bool(newest.any()) == (not torch.equal(pooled, check(scores, positions, 7, mode, 0)))


def _seen(slots: int) -> Observation:
    keys, values, queries = (
        torch.randn(1, heads, length, 16, device=DEVICE)
        for heads, length in ((2, slots), (2, slots), (8, 4))
    )
    positions = observe(1, 2, slots)[1] + 3 * slots
    return Observation(
        keys=keys,
        values=values,
        queries=queries,
        positions=positions,
        num_tokens=4 * slots,
        budget=slots // 2,
        rule=Logits(0.25),
    )


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(
    "policy",
    [DropKV(), DropKV(pool="avg", kernel=5), SnapKV(), SnapKV(pool="avg", group="max"),
     SnapKV(pool="avg")],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("clock", [False, True])
def test_scores_of_policies_are_pooled_by_kernels(policy, clock, monkeypatch):
    obs, calls = _seen(90), []
    if clock:  # on the device, as inside a CUDA graph
        obs = replace(obs, num_tokens=torch.tensor(obs.num_tokens, device=DEVICE))

    def counted(*args) -> Tensor:
        calls.append(args)
        return kernel(*args)

    def scored(policy: Policy) -> Tensor:
        with kernels.use("triton"):
            return kernels.score(policy, obs)

    kernel = pool.pool_in_time
    monkeypatch.setattr(pool, "pool_in_time", counted)
    by_kernels = scored(policy)
    assert len(calls) == 1
    monkeypatch.setattr(pool, "covers", lambda *_: False)
    torch.testing.assert_close(by_kernels, scored(policy), rtol=1e-6, atol=1e-7)
    assert len(calls) == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no CUDA graphs")
@pytest.mark.parametrize("mode", ["max", "avg"])
@pytest.mark.parametrize(("slots", "compiled"), [(2049, 700), (20_001, 1000)])
def test_replayed_in_a_graph(slots, compiled, mode, monkeypatch):
    monkeypatch.undo()  # a graph's memory is its own
    scores, positions = observe(1, 8, slots)
    # As any length, and with an int.
    pool.pool_in_time(scores[..., :compiled], positions[..., :compiled], 11, mode, slots, 32)
    graph, clock = torch.cuda.CUDAGraph(), torch.tensor(slots, device=DEVICE)
    with torch.cuda.graph(graph):
        pooled = pool.pool_in_time(scores, positions, 11, mode, clock, 32)
    for seed, now in ((1, slots), (2, slots - 100)):
        fresh = observe(1, 8, slots, seed=seed)
        scores.copy_(fresh[0])
        positions.copy_(fresh[1])
        clock.fill_(now)
        graph.replay()
        expected = pool_in_time(scores, positions, 11, mode, now, 32)
        torch.testing.assert_close(pooled, expected, rtol=1e-6, atol=1e-7)


def test_what_is_covered(monkeypatch):
    scores, positions = observe(1, 2, 3, 40)
    assert pool.covers(scores, positions, 11)
    assert pool.covers(scores[:, :, 0], positions.long(), 1)
    assert not pool.covers(scores.double(), positions, 11)
    assert not pool.covers(scores.bfloat16(), positions, 11)
    assert not pool.covers(scores[None], positions, 11)
    assert not pool.covers(scores[..., :0], positions[..., :0], 11)
    assert not pool.covers(scores[..., ::2], positions[..., ::2], 11)
    assert not pool.covers(scores, positions.short(), 11)
    assert not pool.covers(scores, positions, 65)
    assert not pool.covers(scores.repeat(1, 1, 30, 1), positions, 11)
    long = torch.zeros(1, 1, pool.MOST_SLOTS, device=DEVICE)
    assert pool.covers(long, long.int(), 11)
    longer = torch.zeros(1, 1, pool.MOST_SLOTS + 1, device=DEVICE)
    assert not pool.covers(longer, longer.int(), 11)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not pool.covers(scores.cpu(), positions.cpu(), 11)
