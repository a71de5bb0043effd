"""Queries into a layer's ring by the kernel: on CUDA, else in triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401
from torch import Tensor
from twins import DTYPES

from kvcap import kernels
from kvcap.kernels import ring as kernel
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.cache.query_window import QueryWindow
from kvcap.runtime.models.rope import Rotation

AROUND = 64  # elements of poison before and after what the kernel may write
POISON = {True: float("nan"), False: -(2**31)}


def amid_poison(x: Tensor) -> Tensor:
    """A contiguous copy with poison around it."""
    value = POISON[x.is_floating_point()]
    whole = torch.full((x.numel() + 2 * AROUND,), value, dtype=x.dtype, device=x.device)
    part = whole[AROUND:-AROUND].view(x.shape)
    part.copy_(x)
    return part


def unharmed(x: Tensor) -> bool:
    """Whether the poison around it is as it was."""
    whole = x.new_empty(0).set_(x.untyped_storage())
    odd = whole.isnan() if x.is_floating_point() else whole == POISON[False]
    return bool(odd[:AROUND].all() and odd[-AROUND:].all())


def blocks(lengths: list[int], B: int, H: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries as models make them, every second one contiguous: views amid NaN."""
    g = torch.Generator().manual_seed(sum(lengths))
    queries_of_blocks = []
    for i, length in enumerate(lengths):
        whole = torch.full((B, length + 2, H + 1, D + 8), float("nan"))
        whole[:, 1:-1, 1:, :D] = torch.randn(B, length, H, D, generator=g)
        queries = whole.to(DEVICE, dtype)[:, 1:-1, 1:, :D].transpose(1, 2)
        queries_of_blocks.append(queries.contiguous() if i % 2 else queries)
    return queries_of_blocks


def new_ring(B: int, H: int, K: int, w: int, D: int, dtype: torch.dtype) -> QueryWindow:
    """Queries and shifts of earlier blocks, the same in every one."""
    g = torch.Generator().manual_seed(w)
    ring = QueryWindow(torch.zeros(B, K, 1, D, dtype=dtype, device=DEVICE), H, w)
    ring.queries = amid_poison(torch.randn(ring.queries.shape, generator=g).to(DEVICE, dtype))
    shift = torch.randint(900, ring.shift.shape, generator=g, dtype=torch.int32)
    ring.shift = amid_poison(shift.to(DEVICE))
    return ring


def whole_layer(B: int, K: int, D: int, dtype: torch.dtype) -> Segment:
    return Segment(SlotPool(B * K, D, dtype, DEVICE), 0, 1, 0, B, K)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("w", "B", "K", "G", "D", "lengths"),
    [
        (1, 1, 1, 1, 64, [1, 5, 1]),
        (2, 2, 3, 2, 80, [1, 1, 2, 3]),
        (5, 1, 2, 8, 128, [1, 4, 5, 6, 40]),
        (16, 2, 1, 7, 64, [1, 15, 16, 17]),
        (32, 1, 2, 4, 80, [1, 1, 1, 31, 100, 7]),
        (33, 2, 2, 3, 128, [1, 32, 33, 34, 2]),
        (64, 1, 1, 2, 256, [1, 63, 64, 65]),
    ],
)
def test_memory_is_the_eager_codes(w, B, K, G, D, lengths, dtype, monkeypatch):
    calls, plain = [], kernel.append
    monkeypatch.setattr(kernel, "append", lambda *a: (calls.append(1), plain(*a)))
    mine, its = (new_ring(B, K * G, K, w, D, dtype) for _ in range(2))
    segment = whole_layer(B, K, D, dtype)
    for i, queries in enumerate(blocks(lengths, B, K * G, D, dtype)):
        before = queries.clone()
        for ring, choice in ((mine, "triton"), (its, "eager")):
            with kernels.use(choice):
                ring.append(queries)
            ring.move_down(segment, i + 1)  # an eviction, so that shifts differ
        assert torch.equal(mine.queries, its.queries)
        assert torch.equal(mine.shift, its.shift)
        assert torch.equal(queries, before)
    assert len(calls) == len(lengths)
    assert unharmed(mine.queries)
    assert unharmed(mine.shift)


def test_what_is_covered():
    ring = new_ring(2, 4, 2, 6, 64, torch.float32)
    ours = (ring.queries, ring.shift)
    queries = torch.zeros(2, 4, 3, 64, device=DEVICE)
    assert kernel.covers(*ours, queries)
    assert not kernel.covers(*ours, queries.half())  # eager code converts
    assert not kernel.covers(*ours, queries[:, :, :0])
    assert not kernel.covers(*ours, queries.mT.contiguous().mT)
    assert not kernel.covers(*ours, queries[:1])
    assert not kernel.covers(ring.queries[:, :2], ring.shift, queries[:, :2])
    long = new_ring(1, 2, 2, 65, 64, torch.float32)
    assert not kernel.covers(long.queries, long.shift, queries[:1, :2])


def test_what_is_not_covered_runs_eagerly():
    mine, its = (new_ring(1, 2, 1, 65, 64, torch.float16) for _ in range(2))
    (queries,) = blocks([7], 1, 2, 64, torch.float32)
    for ring, choice in ((mine, "triton"), (its, "eager")):
        with kernels.use(choice):
            ring.append(queries)
    assert torch.equal(mine.queries, its.queries)
    assert torch.equal(mine.shift, its.shift)


@pytest.mark.parametrize("choice", ["eager", "triton"])
@pytest.mark.parametrize(
    ("B", "K", "G", "batch", "heads", "copies"),
    [
        (1, 1, 1, (0, 1), (0, 1), False),
        (2, 3, 4, (0, 2), (0, 3), False),  # a whole layer
        (1, 4, 3, (0, 1), (1, 2), False),  # some heads of a sequence
        (3, 4, 2, (1, 2), (2, 1), False),  # one head of some sequences
        (3, 4, 2, (1, 2), (1, 2), True),  # some heads of some sequences
    ],
)
def test_the_last_are_rotated_by_their_kv_heads_shifts(
    B, K, G, batch, heads, copies, choice, monkeypatch
):
    ring = new_ring(B, K * G, K, 7, 80, torch.float32)
    rotation = Rotation(10000.0 ** -(torch.arange(0, 64, 2) / 64), 1000, DEVICE)
    pool = SlotPool(64, 80, torch.float32, DEVICE)
    (row, rows), (head, count) = batch, heads
    segment = Segment(pool, 0, 1, 0, rows, count, row=row, head=head, layer_heads=K)
    seen = []
    back = rotation.back
    monkeypatch.setattr(rotation, "back", lambda x, s: (seen.append((x, s)), back(x, s))[1])
    with kernels.use(choice):
        newest = ring.last(segment, 5, rotation)
        queries = ring.queries[row : row + rows, head * G : (head + count) * G, -5:]
        shift = ring.shift[row : row + rows, head : head + count, -5:]
        expected = back(queries, shift.repeat_interleave(G, dim=1))
    assert torch.equal(newest, expected)
    assert newest.is_contiguous()
    ours = {x.untyped_storage().data_ptr() for x in (ring.queries, ring.shift)}
    assert ({x.untyped_storage().data_ptr() for x in seen[0]} == ours) is not copies


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no CUDA graphs")
def test_replayed_in_a_graph():
    mine, its = (new_ring(1, 8, 2, 32, 128, torch.bfloat16) for _ in range(2))
    queries = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    mine.append(queries)
    its.append(queries)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.append(queries)
    for _ in range(40):
        queries.normal_()
        graph.replay()
        with kernels.use("eager"):
            its.append(queries)
    assert torch.equal(mine.queries, its.queries)
    assert torch.equal(mine.shift, its.shift)
