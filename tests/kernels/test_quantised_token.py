"""A token quantised, appended and attended at once: on CUDA, else in triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from interpreted import DEVICE, assert_as_near, pytestmark  # noqa: F401
from torch import Tensor

from kvcap import kernels
from kvcap.kernels import decode, elementwise, keydiff, quantised_token
from kvcap.runtime.cache.pool import SHIFT, Segment, SlotPool
from kvcap.runtime.cache.slot_format import SlotFormat
from kvcap.runtime.cache.storage import LayerStorage
from kvcap.runtime.models.rope import Rotation, rotate, table_dtype

KINDS = ("int8", "int8-int4", "int4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPAN, SPARE, TIME, STATE = 320, 3, 4711, "state"


@dataclass(frozen=True)
class Case:
    """Sizes of a token's attention over `slots` that are held."""

    batch: int
    kv_heads: int
    group: int
    slots: int
    size: int
    moved: bool = True  # keys are held without rotation and mean; else as the model rotated them
    processors: int = 4  # the more, the shorter the parts

    def __str__(self) -> str:
        return "-".join(str(x) for x in vars(self).values())


CASES = (
    Case(1, 2, 3, 0, 64),  # the first token of all, which is the mean of its block
    Case(3, 1, 4, 1, 80),
    Case(1, 2, 1, 65, 96),
    Case(1, 1, 3, 300, 128, processors=1),  # several blocks in a part
    Case(3, 2, 4, 130, 64),
    Case(1, 1, 16, 70, 32),
    Case(1, 1, 5, 40, 256),
    Case(2, 2, 3, 200, 128, moved=False),
)


class Inputs:
    """A token, and slots in a pool whose other slots hold NaN and wild numbers."""

    def __init__(self, case: Case, kind: str, dtype: torch.dtype, seed: int = 0) -> None:
        c, g = case, torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE, dtype)  # noqa: E731
        self.case, self.scaling = case, case.size**-0.5 * 1.3
        # Transformers hands them over as transposed views of one product.
        parts = rand(c.batch, 1, c.kv_heads * (c.group + 2), c.size).transpose(1, 2)
        sizes = c.kv_heads * c.group, c.kv_heads, c.kv_heads
        self.query, self.key, self.value = parts.split(sizes, dim=1)
        frequencies = 10000.0 ** -(torch.arange(0, c.size, 2) / c.size)
        rotation = Rotation(frequencies, SPAN, DEVICE, table_dtype(dtype)) if c.moved else None
        angles = (c.slots * frequencies).repeat(2)[None, None]
        self.angles = tuple(x.to(DEVICE, dtype) for x in (angles.cos(), angles.sin()))
        self.time = torch.tensor([TIME], dtype=torch.int32, device=DEVICE)
        aux = {SHIFT: torch.int32} if c.moved else {}
        rows = c.batch * c.kv_heads * (c.slots + SPARE)
        self.pool = SlotPool(
            rows, c.size, dtype, DEVICE, {**aux, STATE: torch.float32},
            slot_format=SlotFormat.of(kind),
        )  # fmt: skip
        self.segment = Segment(self.pool, 0, c.slots, SPARE, c.batch, c.kv_heads)
        for x in self.pool.buffers():
            x.fill_(float("nan") if x.is_floating_point() else 2**6)
        mean = rand(c.batch, c.kv_heads, c.size).float() if c.moved else None
        if mean is not None and not c.slots:
            mean.fill_(float("nan"))
        self.storage = LayerStorage([self.segment], None, None, rotation, None, mean)
        if c.slots:
            heads = rand(2, c.batch, c.kv_heads, c.slots, c.size)
            self.segment.append(*heads, torch.arange(c.slots, dtype=torch.int32, device=DEVICE))
        if c.moved:  # as if others had been evicted
            shift = self.segment.aux(SHIFT)
            shift.copy_(-torch.randint(SPAN, shift.shape, generator=g))

    @property
    def slots(self) -> dict[str, Tensor]:
        return dict(self.segment.named(0, self.case.slots + 1))

    def attend(self, **changed) -> tuple[Tensor, Tensor, Tensor | None]:
        rotation = self.storage.rotation
        arguments = {
            "query": self.query, "key": self.key, "value": self.value, "angles": self.angles,
            "time": self.time, "slots": self.slots, "scaling": self.scaling,
            "mean": self.storage.mean, "table": None if rotation is None else rotation.table,
            **changed,
        }  # fmt: skip
        assert quantised_token.covers(*(arguments[x] for x in ("query", "key", "value", "slots")))
        return quantised_token.attend(**arguments)

    def append(self) -> Tensor:
        """The token written as a block of one is, by today's kernels; returns its query."""
        with kernels.use("triton"):
            query, key = elementwise.rotate(self.query, self.key, *self.angles)
            held = self.case.slots
            self.storage.append(key, self.value, self.time, held, not held)
        return query

    def attended(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, the token's included, in float64 by the plain formula."""
        found, form = [], self.pool.format
        for name, numbers in (("key", form.keys), ("value", form.values)):
            parts = form.parts(name, self.slots)
            out = torch.empty(*self.slots["positions"].shape, self.case.size, device=DEVICE)
            assert numbers is not None
            numbers.dequantise(parts, out, self.storage.mean if name == "key" else None)
            found.append(out.double())
        keys, values = found
        if self.storage.rotation is not None:
            rows = self.storage.rotation.table[-self.slots[SHIFT].long()]
            keys = rotate(keys, rows.double())
        return keys, values

    def answer(self, query: Tensor, dtype: torch.dtype) -> Tensor:
        """Attention by the plain formula, in a type that keys and values are rounded to."""
        keys, values = (x.to(dtype).repeat_interleave(self.case.group, 1) for x in self.attended())
        return (query.to(dtype) @ keys.mT * self.scaling).softmax(-1) @ values


def check(out: Tensor, query: Tensor, inputs: Inputs) -> None:
    """Attention over the slots and the token, at most twice as wrong as eager low precision."""
    assert_as_near(out, inputs.answer(query, torch.float64), inputs.answer(query, out.dtype))


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch, request):
    """What nothing wrote is NaN; and parts are as long as the case has it."""
    empty = torch.empty

    def poisoned(*shape, **options):
        new = empty(*shape, **options)
        return new.fill_(float("nan") if new.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    count = case.processors if case else 4
    monkeypatch.setattr(decode, "multiprocessors", lambda device: count)


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "case"), [*product(KINDS, CASES)], ids=str)
def test_it_is_appended_as_a_block_is_and_attended_as_by_the_formula(kind, case, dtype):
    inputs, others = Inputs(case, kind, dtype), Inputs(case, kind, dtype)
    before = {name: x.clone() for name, x in inputs.pool.named().items()}
    out, query, sums = inputs.attend(summed=True)
    expected = others.append()
    if DEVICE == "cpu":
        assert torch.equal(query, expected)
    else:  # a compiler may add a product to the other without rounding it, in one of the kernels
        near = torch.finfo(dtype).eps * float(inputs.query.abs().max())
        torch.testing.assert_close(query, expected, rtol=0, atol=near)
    assert out.transpose(1, 2).is_contiguous()  # as the output projection wants it
    for name, x in inputs.slots.items():
        own, other = x[:, :, case.slots], others.slots[name][:, :, case.slots]
        if DEVICE == "cpu" or name in ("positions", SHIFT, STATE):
            assert torch.equal(own, other), name
        elif own.dtype in (torch.int8, torch.uint8):  # a number between two steps may become either
            assert (own != other).float().mean() < 0.04, name
        else:
            torch.testing.assert_close(own, other, rtol=2e-3, atol=1e-5)
    if inputs.storage.mean is not None:
        torch.testing.assert_close(inputs.storage.mean, others.storage.mean)
    check(out, query, inputs)
    keys = inputs.attended()[0]
    # A bound for the sum of as many roundings, and of what is rounded the other way.
    near = float(keys.abs().max()) * 8 * torch.finfo(dtype).eps * (case.slots + 1)
    torch.testing.assert_close(sums.sum(2).double(), keys.sum(2), rtol=0, atol=near)
    for name, x in inputs.pool.named().items():
        rest = [
            inputs.segment.whole(y)[:, :, [*range(case.slots), -1, -2]] for y in (before[name], x)
        ]
        torch.testing.assert_close(*rest, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_equal_to_the_bit(kind):
    case = Case(1, 2, 3, 200, 64)
    one, two = (Inputs(case, kind, torch.bfloat16).attend(summed=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("kind", "fault"), [
    *product(KINDS, ["a shift", "an angle", "a slot", "the mean", "a key's scale", "a value's"]),
    ("int4", "a key's low"), ("int8-int4", "a value's low"),
])  # fmt: skip
def test_a_fault_is_noticed(kind, fault):
    inputs = Inputs(Case(1, 2, 2, 70, 64), kind, torch.float32)
    check(*inputs.attend()[:2], inputs)
    query, slots, table = inputs.append(), inputs.slots, inputs.storage.rotation.table
    rolled = {"a key's scale": "key_scale", "a value's": "value_scale",
              "a key's low": "key_low", "a value's low": "value_low"}  # fmt: skip
    if fault == "a shift":
        out = inputs.attend(table=table.roll(1, 0))
    elif fault == "an angle":
        out = inputs.attend(angles=inputs.angles[::-1])
    elif fault == "a slot":
        out = inputs.attend(used=torch.tensor(69, device=DEVICE))
    elif fault == "the mean":
        out = inputs.attend(mean=inputs.storage.mean + 0.1)
    else:
        right = slots[rolled[fault]].clone()
        slots[rolled[fault]].copy_(right.roll(1, 2))
        out = inputs.attend()
        slots[rolled[fault]].copy_(right)
    with pytest.raises(AssertionError):
        check(out[0], query, inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [
    {"tile": decode.Tile(32, 5, 4, 2)}, {"tile": decode.Tile(128, 2, 8, 2)},
    {"most_parts": 1}, {"most_parts": 3}, {"most_parts": 100},
], ids=str)  # fmt: skip
def test_how_slots_are_read_changes_no_more_than_the_order_of_sums(how, kind):
    case = Case(1, 2, 3, 300, 64)
    one, other = (Inputs(case, kind, torch.float32) for _ in range(2))
    (out, query, sums), usual = one.attend(summed=True, **how), other.attend(summed=True)
    torch.testing.assert_close(out, usual[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.sum(2), usual[2].sum(2), rtol=1e-5, atol=1e-3)
    assert torch.equal(query, usual[1])
    for x, y in zip(one.pool.buffers(), other.pool.buffers(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_how_many_slots_are_in_use_can_be_told_on_the_device(kind):
    """And may change between replays of a CUDA graph, where there is CUDA."""
    case, used = Case(1, 2, 2, 100, 64), torch.tensor(0, device=DEVICE)
    for held in (0, 1, 64, 99):
        inputs = Inputs(case, kind, torch.float32)
        few = Inputs(Case(1, 2, 2, held, 64), kind, torch.float32)
        few.query, few.key, few.value = inputs.query, inputs.key, inputs.value
        few.angles, few.storage.key_mean = inputs.angles, inputs.storage.mean.clone()
        for name, x in few.segment.named(0, held).items():
            x.copy_(inputs.slots[name][:, :, :held])
        used.fill_(held)
        out, query, _ = inputs.attend(used=used)
        expected = few.attend()
        assert torch.equal(query, expected[1])
        torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
        for name, x in few.slots.items():
            assert torch.equal(inputs.slots[name][:, :, : held + 1], x), name
        assert torch.equal(inputs.storage.mean, few.storage.mean)
    if DEVICE == "cuda":
        inputs, graph = Inputs(case, kind, torch.float32), torch.cuda.CUDAGraph()
        used.fill_(99)
        inputs.attend(used=used)  # compiled before it is captured
        with torch.cuda.graph(graph):
            out = inputs.attend(used=used)[0]
        for held in (99, 5):
            used.fill_(held)
            graph.replay()
            assert torch.equal(out, inputs.attend(used=used)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "case"), [*product(KINDS, CASES[1:])], ids=str)
def test_keydiff_scores_keys_as_they_are_stored(kind, case, dtype):
    """As it does copies that are dequantised and rotated."""
    inputs = Inputs(case, kind, dtype)
    sums = inputs.attend(summed=True)[2]
    inputs.segment.held += 1
    keys = inputs.attended()[0]
    found = keydiff.scores_quantised(inputs.storage.quantised_keys(inputs.segment), sums)
    assert found.shape == keys.shape[:3]
    expected = -torch.cosine_similarity(keys, keys.mean(2, keepdim=True), dim=-1)
    near = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=near)


def test_what_is_covered():
    def covered(tokens=1, size=64, group=2, dtype=torch.bfloat16, states=0):
        inputs = Inputs(Case(1, 2, group, 9, size), "int8", dtype)
        slots = inputs.slots
        slots |= {str(i): slots[STATE] for i in range(states)}
        query = inputs.query.expand(-1, -1, tokens, -1)
        return quantised_token.covers(query, inputs.key, inputs.value, slots)

    assert covered()
    assert covered(group=16, size=256)
    assert not covered(tokens=2)
    assert not covered(group=17)
    assert not covered(states=6)
    assert not covered(dtype=torch.float64)


def test_sums_are_of_all_slots_or_not_wanted():
    inputs = Inputs(Case(1, 1, 1, 5, 64), "int8", torch.float32)
    with pytest.raises(AssertionError, match="no sums"):
        inputs.attend(used=torch.tensor(3, device=DEVICE), summed=True)
