"""One token rotated, appended and attended at once: on CUDA, else in triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from interpreted import DEVICE, multiprocessors, pytestmark, unwritten  # noqa: F401
from torch import Tensor
from twins import DTYPES, assert_as_near

from kvcap.kernels import decode, token
from kvcap.policies.base import RowRanges
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.models.rope import Rotation, rotate, table_dtype

pytestmark = [pytestmark, pytest.mark.usefixtures("unwritten", "multiprocessors")]
SPAN, SPARE, TIME = 300, 3, 4711


@dataclass(frozen=True)
class Case:
    """Sizes of a token's attention over `slots` that are held."""

    batch: int
    kv_heads: int
    group: int
    slots: int
    size: int
    moved: bool = True
    sides: int = 0  # tensors besides positions and shifts
    processors: int = 4  # the more, the shorter the parts

    def __str__(self) -> str:
        return "-".join(str(x) for x in vars(self).values())


CASES = (
    Case(1, 1, 1, 0, 64),  # the first token of all
    Case(1, 2, 3, 1, 128),
    Case(2, 2, 2, 64, 64, moved=False),
    Case(1, 2, 4, 65, 80, sides=1),
    Case(1, 1, 8, 161, 96),
    Case(1, 1, 3, 300, 128, processors=1),  # several blocks in a part
    Case(2, 1, 7, 130, 32, sides=4),
    Case(1, 1, 5, 40, 256, moved=False, sides=2),
    Case(1, 8, 1, 200, 128, processors=30),
)


class Inputs:
    """A token, and slots in a pool whose other slots hold NaN and a wild shift."""

    def __init__(self, case: Case, dtype: torch.dtype, seed: int = 0) -> None:
        c, g = case, torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE, dtype)  # noqa: E731
        self.case, self.scaling = case, case.size**-0.5 * 1.3
        # Transformers hands them over as transposed views of one product.
        parts = rand(c.batch, 1, c.kv_heads * (c.group + 2), c.size).transpose(1, 2)
        sizes = c.kv_heads * c.group, c.kv_heads, c.kv_heads
        self.query, self.key, self.value = parts.split(sizes, dim=1)
        frequencies = 10000.0 ** -(torch.arange(0, c.size, 2) / c.size)
        self.rotation = Rotation(frequencies, SPAN, DEVICE, table_dtype(dtype))
        angles = torch.arange(TIME, TIME + c.batch)[:, None, None].double() * frequencies.double()
        self.exact, self.frequencies = angles.to(DEVICE), frequencies.double().to(DEVICE)
        self.angles = tuple(
            x.repeat(1, 1, 2).to(DEVICE, dtype) for x in (angles.cos(), angles.sin())
        )
        self.time = torch.tensor([TIME], dtype=torch.int32, device=DEVICE)
        side = {"shift": torch.int32} if c.moved else {}
        side |= {str(i): (torch.float32, torch.int8)[i % 2] for i in range(c.sides)}
        rows = c.batch * c.kv_heads * (c.slots + SPARE)
        self.pool = SlotPool(rows, c.size, dtype, DEVICE, side)
        self.segment = Segment(self.pool, 0, c.slots, SPARE, c.batch, c.kv_heads)
        for x in self.pool.buffers():
            x.fill_(float("nan") if x.is_floating_point() else 2**6)
        self.segment.held = c.slots
        self.segment.keys.copy_(rand(*self.segment.keys.shape))
        self.segment.values.copy_(rand(*self.segment.keys.shape))
        if c.moved:
            shift = torch.randint(SPAN, self.segment.positions.shape, generator=g)
            self.pool.aux["shift"].fill_(2**30)
            self.segment.aux("shift").copy_(shift)

    def rows(self, lengths: Tensor | int | None = None) -> RowRanges:
        """Return where heads lie, each of which has so many slots in use."""
        c, capacity = self.case, self.segment.capacity
        starts = torch.arange(c.batch * c.kv_heads, dtype=torch.int32, device=DEVICE) * capacity
        lengths = c.slots if lengths is None else lengths
        return RowRanges(starts, torch.zeros_like(starts) + lengths, max(1, c.slots))

    def attend(self, **changed) -> tuple[Tensor, Tensor, Tensor | None]:
        buffers = self.pool.buffers()
        assert token.covers(self.query, self.key, self.value, buffers)
        turn = (self.pool.aux["shift"], self.rotation.table) if self.case.moved else None
        arguments = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "angles": self.angles,
            "time": self.time,
            "buffers": buffers,
            "scaling": self.scaling,
            "turn": turn,
            "rows": self.rows(),
        }
        return token.attend(**{**arguments, **changed})

    def attended(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Query, keys and values as they are attended with, computed and kept in a type."""
        cos, sin = (x.repeat(1, 1, 2)[:, None] for x in (self.exact.cos(), self.exact.sin()))
        if dtype != torch.float64:
            cos, sin = (x[:, None] for x in self.angles)
        query, key = (turned(x.to(dtype), cos, sin) for x in (self.query, self.key))
        keys = self.segment.keys.to(dtype)
        if self.case.moved:
            rows = self.rotation.table[self.segment.aux("shift").long()]
            keys = rotate(keys, rows.to(torch.promote_types(dtype, torch.float32)), back=True)
        keys, values = torch.cat((keys, key), 2), torch.cat((self.segment.values, self.value), 2)
        return query, keys, values.to(dtype)

    def answer(self, dtype: torch.dtype) -> Tensor:
        query, keys, values = self.attended(dtype)
        keys, values = (x.repeat_interleave(self.case.group, 1) for x in (keys, values))
        return (query @ keys.mT * self.scaling).softmax(-1) @ values


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def check(out: Tensor, inputs: Inputs) -> None:
    """Attention over the slots and the token, at most twice as wrong as eager low precision."""
    assert_as_near(out, inputs.answer(torch.float64), inputs.answer(out.dtype))


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_appended_and_attended_as_by_the_formula(case, dtype):
    inputs = Inputs(case, dtype)
    before = [x.clone() for x in inputs.pool.buffers()]
    out, query, sums = inputs.attend(summed=True)
    check(out, inputs)
    assert out.transpose(1, 2).is_contiguous()  # as the output projection wants it
    near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    expected, keys, values = inputs.attended(dtype)
    torch.testing.assert_close(query, expected, **near)
    inputs.segment.held += 1
    torch.testing.assert_close(inputs.segment.keys[:, :, -1], keys[:, :, -1], **near)
    assert torch.equal(inputs.segment.values[:, :, -1], values[:, :, -1])
    assert torch.unique(inputs.segment.positions[:, :, -1]).tolist() == [TIME]
    for name in inputs.pool.aux:
        assert not inputs.segment.aux(name)[:, :, -1].any()
    # A bound for the sum of as many roundings, and of what is rounded the other way.
    near = {"rtol": 0.0, "atol": float(keys.abs().max()) * near["atol"] * (case.slots + 1)}
    torch.testing.assert_close(sums.sum(2), keys.float().sum(2), **near)
    for old, new in zip(before, inputs.pool.buffers(), strict=True):
        every = [inputs.segment.view(x, 0, inputs.segment.capacity) for x in (old, new)]
        rest = [x[:, :, [*range(case.slots), -1, -2]] for x in every]
        torch.testing.assert_close(*rest, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_runs_are_equal_to_the_bit(dtype):
    case = Case(1, 2, 3, 200, 64)
    one, two = (Inputs(case, dtype).attend(summed=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("how", [
    {"tile": decode.Tile(32, 5, 4, 2)}, {"tile": decode.Tile(128, 2, 8, 2)},
    {"most_parts": 1}, {"most_parts": 3}, {"most_parts": 100},
], ids=str)  # fmt: skip
def test_how_slots_are_read_changes_no_more_than_the_order_of_sums(how, moved):
    case = Case(1, 2, 3, 300, 64, moved=moved)
    one, other = Inputs(case, torch.float32), Inputs(case, torch.float32)
    (out, query, sums), usual = one.attend(summed=True, **how), other.attend(summed=True)
    if most := how.get("most_parts"):
        assert sums.shape[2] == 1 + {1: 1, 3: 3, 100: 5}[most]
    torch.testing.assert_close(out, usual[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.sum(2), usual[2].sum(2), rtol=1e-5, atol=1e-4)
    assert torch.equal(query, usual[1])
    for x, y in zip(one.pool.buffers(), other.pool.buffers(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("moved", [True, False])
def test_each_row_has_as_many_slots_as_the_device_says(moved):
    """Rows may have others between replays of a CUDA graph, where there is CUDA."""
    case, held = Case(2, 2, 2, 100, 64, moved=moved), [0, 1, 64, 99]
    lengths = torch.tensor(held, dtype=torch.int32, device=DEVICE)

    def run(inputs):
        return inputs.attend(rows=inputs.rows()._replace(lengths=lengths), summed=True)

    inputs = Inputs(case, torch.float32)
    query, keys, values = (x.double() for x in inputs.attended(torch.float64))
    out, _, sums = run(inputs)
    for row, n in enumerate(held):
        b, k = divmod(row, 2)
        mine = [torch.cat((x[b, k, :n], x[b, k, -1:])) for x in (keys, values)]
        weights = (query[b, 2 * k : 2 * k + 2] @ mine[0].mT * inputs.scaling).softmax(-1)
        expected = weights @ mine[1]
        torch.testing.assert_close(
            out[b, 2 * k : 2 * k + 2].double(), expected, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(sums[b, k].sum(0).double(), mine[0].sum(0), rtol=1e-5, atol=1e-4)
        positions = inputs.segment.view(inputs.pool.positions, stop=inputs.segment.capacity)
        assert positions[b, k, n] == TIME
    if DEVICE == "cuda":
        inputs, graph = Inputs(case, torch.float32), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(inputs)[0]
        for n in (99, 5):
            lengths.fill_(n)
            graph.replay()
            assert torch.equal(out, run(inputs)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_that_was_read_further_on_counts_as_its_rows_next(dtype):
    inputs = Inputs(Case(2, 2, 3, 70, 64), dtype)
    past = torch.tensor([7, 11], device=DEVICE)  # of each sequence
    exact = inputs.exact - past[:, None, None] * inputs.frequencies
    out = inputs.attend(read_at=(70 + past).int())[0]
    inputs.exact = exact
    inputs.angles = tuple(x.repeat(1, 1, 2).to(dtype) for x in (exact.cos(), exact.sin()))
    check(out, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_keydiff_scores_keys_that_it_rotates_itself(case, dtype):
    """As it does rotated copies."""
    from kvcap.kernels import keydiff

    inputs = Inputs(replace(case, moved=True), dtype)
    shift, keys = inputs.segment.aux("shift"), inputs.segment.keys
    sums = inputs.attended(torch.float32)[1][:, :, :-1].sum(2, keepdim=True)
    scores = keydiff.scores_turned(keys, shift, inputs.rotation.table, sums.contiguous())
    assert scores.shape == keys.shape[:3]
    turned_keys = rotate(keys, inputs.rotation.table[shift.long()], back=True)
    expected = -torch.cosine_similarity(turned_keys.float(), sums / case.slots, dim=-1)
    near = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(scores, expected, rtol=0, atol=near)


def test_what_is_covered():
    def covered(tokens=1, size=64, group=2, sides=1, dtype=torch.bfloat16):
        inputs = Inputs(Case(1, 2, group, 9, size, sides=sides), dtype)
        query = inputs.query.expand(-1, -1, tokens, -1)
        return token.covers(query, inputs.key, inputs.value, inputs.pool.buffers())

    assert covered()
    assert covered(group=16, size=256)
    assert not covered(tokens=2)
    assert not covered(group=17)
    assert not covered(sides=7)
    assert not covered(dtype=torch.float64)
