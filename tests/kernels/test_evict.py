"""Slots given up by kernels: on CUDA where there is one, else in triton's interpreter."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401
from torch import Tensor

from kvcap.kernels import choose_triton, evict
from kvcap.policies import Eviction, Observation
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.cache.slot_format import SlotFormat

SIDE = {"shift": torch.int32, "a": torch.float32, "b": torch.bool, "c": torch.float16}
SEEN = 1000  # tokens; positions lie below


@dataclass(frozen=True)
class Case:
    """Sizes of a segment, what is given up and what is pinned."""

    held: int
    count: int
    batch: int = 1
    heads: int = 2
    size: int = 8
    start: int = 0  # the segment's first slot
    spare: int = 0  # slots of a row behind those held
    dtype: torch.dtype = torch.bfloat16
    sinks: int = 0
    recents: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    wild: bool = False  # NaN, infinities and equal scores
    side: tuple[str, ...] = ("shift", "a")
    quantised: str | None = None

    def __str__(self) -> str:
        sizes = self.held, self.count, self.batch, self.heads, self.size, self.quantised
        return "-".join(map(str, sizes if self.quantised else sizes[:-1]))


ONE = (
    Case(1, 1),
    Case(2, 1, heads=1, start=3, spare=2, side=("shift",)),
    Case(17, 1, batch=2, start=5, spare=1, dtype=torch.float32, sinks=100, recents=200),
    Case(64, 1, size=80, spans=((100, 200), (250, 700), (0, 50)), wild=True),
    Case(129, 1, heads=1, start=7, spare=9, wild=True, side=tuple(SIDE)),  # one head, ragged
    Case(300, 1, batch=3, heads=3, spare=4, dtype=torch.float16, side=()),
    Case(257, 1, spans=tuple((100 * i, 100 * i + 90) for i in range(8)), recents=100, wild=True),
    Case(35, 1, size=128, start=2, spare=3, side=("shift",), quantised="int4"),
    Case(35, 1, size=16, side=("shift",), quantised="int8-int4"),
)
MANY = (
    Case(2, 2),
    Case(3, 2, heads=1, start=4, side=("shift",)),
    Case(33, 32, batch=2, spare=3, side=tuple(SIDE), wild=True),  # all but one
    Case(40, 8, start=1, spare=7, sinks=50, recents=150, spans=((300, 400),)),
    Case(64, 33, heads=1, start=9, spare=2, dtype=torch.float32, side=(), wild=True),
    Case(97, 31, batch=2, heads=3, size=24, spare=5, dtype=torch.float16, side=("a", "b")),
    Case(300, 128, heads=1, size=128, spare=1, recents=20, side=tuple(SIDE)),
    Case(
        531, 20, batch=1, heads=1, wild=True, spans=tuple((i, i + 30) for i in range(0, 800, 100))
    ),
    Case(700, 600, heads=1, size=4, side=("shift",)),  # more than are compared at once
    Case(40, 9, batch=2, size=64, start=1, spare=2, quantised="int8-int4"),
)


class Slots:
    """A segment in a pool with slots before and behind it; everything random."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        c, g = case, torch.Generator().manual_seed(seed)
        self.case, self.rows = case, case.batch * case.heads
        capacity = c.held + c.spare
        slots = c.start + self.rows * capacity + 3
        self.pool = SlotPool(
            slots, c.size, c.dtype, DEVICE, {name: SIDE[name] for name in c.side},
            slot_format=SlotFormat.of(c.quantised),
        )  # fmt: skip
        for name, buffer in self.pool.named().items():
            x = torch.randn(buffer.shape, generator=g)
            if name in ("shift", "positions") or not buffer.is_floating_point():
                x = torch.randint(SEEN, buffer.shape, generator=g)
            buffer.copy_(x > 0 if buffer.dtype == torch.bool else x)
        self.segment = Segment(self.pool, c.start, c.held, c.spare, c.batch, c.heads)
        self.segment.held = c.held
        ages = torch.stack([torch.randperm(SEEN, generator=g)[: c.held] for _ in range(self.rows)])
        self.segment.positions.copy_(ages.view(c.batch, c.heads, -1))
        scores = torch.randn(c.batch, c.heads, c.held, generator=g)
        if c.wild:
            odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3e38])
            some = torch.randint(len(odd), scores.shape, generator=g)
            scores = torch.where(torch.rand(scores.shape, generator=g) < 0.3, odd[some], scores)
        self.scores = scores.to(DEVICE)
        self.eviction = Eviction(KeyDiff(), sink_tokens=c.sinks, recent_tokens=c.recents)
        self.observation = Observation(
            keys=self.segment.keys, values=self.segment.values, positions=self.segment.positions,
            num_tokens=SEEN, budget=c.held - c.count, pinned_spans=c.spans,
        )  # fmt: skip

    @property
    def shift(self) -> Tensor | None:
        return self.segment.aux("shift") if "shift" in self.pool.aux else None

    @property
    def buffers(self) -> list[Tensor]:
        return [self.segment.view(x) for x in self.pool.buffers()]

    @property
    def pins(self) -> dict:
        c = self.case
        return {"sinks": c.sinks, "recents": c.recents, "seen": SEEN, "spans": c.spans}

    def covered(self) -> bool:
        c = self.case
        return evict.covers(self.segment.positions, c.count, c.spans, self.buffers)

    def worth(self) -> Tensor:
        obs, raw = self.observation, self.scores
        finite = self.eviction.score(obs, lambda policy, obs: raw)
        return finite.masked_fill(self.eviction.pinned(obs), float("inf"))

    def evict(self, **changed) -> Tensor:
        """By the kernels."""
        pins = evict.Pins(**{name: changed.pop(name, x) for name, x in self.pins.items()})
        arguments = {
            "scores": self.scores, "positions": self.segment.positions, "count": self.case.count,
            "pins": pins, "shift": self.shift, "buffers": self.buffers,
        }  # fmt: skip
        return evict.give_up(**{**arguments, **changed})

    def expected(self) -> Tensor:
        """The lowest, of equal ones the older."""
        worth, ages = self.worth().tolist(), self.segment.positions.tolist()
        found = [
            sorted(range(self.case.held), key=lambda j: (worth[b][k][j], ages[b][k][j]))
            for b in range(self.case.batch)
            for k in range(self.case.heads)
        ]
        chosen = torch.tensor(found, device=DEVICE).view(self.case.batch, self.case.heads, -1)
        return chosen[..., : self.case.count]

    def choose(self) -> Tensor:
        """Eagerly."""
        obs, raw = self.observation, self.scores
        scores = self.eviction.score(obs, lambda policy, obs: raw)
        return self.eviction.choose(scores, self.eviction.pinned(obs), obs, self.case.count)

    def give_up(self, evicted: Tensor) -> None:
        """Eagerly."""
        if self.shift is not None:
            positions = self.segment.positions
            gone = positions.gather(-1, evicted).sort(dim=-1).values
            self.shift.add_(torch.searchsorted(gone, positions.contiguous(), out_int32=True))
        self.segment.compact(evicted)

    def bits(self) -> list[Tensor]:
        return [x.view(torch.uint8).clone() for x in self.pool.buffers()]


def same(found: Slots, expected: Slots) -> bool:
    """The whole pool, bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(found.bits(), expected.bits(), strict=True))


def after(case: Case, seed: int, evicted: Tensor) -> Slots:
    """The same slots, `evicted` given up eagerly."""
    slots = Slots(case, seed)
    slots.give_up(evicted)
    return slots


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """What is compared with is eager whatever it is built into."""
    monkeypatch.setenv("KVCAP_KERNELS", "eager")


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize("case", ONE + MANY, ids=str)
@pytest.mark.parametrize("clock", [False, True])
def test_the_lowest_are_given_up_as_by_eager_code(case, clock):
    runs = []
    for seed in (0, 1, 1):
        slots = Slots(case, seed)
        assert slots.covered()
        expected = slots.expected()
        assert torch.equal(slots.choose().sort().values, expected.sort().values)
        found = slots.evict(seen=torch.tensor(SEEN, device=DEVICE) if clock else SEEN)
        assert found.shape == (case.batch, case.heads, case.count)
        assert torch.equal(found.sort().values, expected.sort().values.int())
        assert same(slots, after(case, seed, expected))
        runs.append(slots)
    assert same(*runs[1:])


class Noted:
    """A kernel, and how often it is launched."""

    def __init__(self, kernel) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


NOMINATING = (
    Case(40, 8, start=1, spare=7, sinks=50, recents=150, spans=((300, 400),)),
    Case(531, 20, heads=1, wild=True, spans=tuple((i, i + 30) for i in range(0, 800, 100))),
    Case(700, 9, batch=2, heads=1, sinks=450, recents=450),  # most parts have fewer to give
    Case(897, 50, spare=3, wild=True, side=()),  # of the last part there is one slot
)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", NOMINATING, ids=str)
def test_parts_of_long_rows_nominate_slots(case, monkeypatch):
    noted = Noted(choose_triton.nominate_slots)
    monkeypatch.setattr(choose_triton, "nominate_slots", noted)
    monkeypatch.setattr(evict, "MOST_ALONE", 32)
    monkeypatch.setattr(evict, "PART", 32)
    test_the_lowest_are_given_up_as_by_eager_code(case, clock=True)
    assert noted.launches == 3


@pytest.mark.parametrize("held", [*range(2, 40, 5), 300])
def test_any_slots_can_go(held):
    """None of the last, only those, every other one."""
    for count in {1, 2, held // 2, held - 1}:
        case = Case(held, count, heads=1, size=2, start=1, spare=1)
        order = torch.arange(held, device=DEVICE)
        picks = {"first": order[:count], "last": order[held - count :], "mixed": order[::2]}
        for pick in picks.values():
            if len(pick) == count:
                slots = Slots(case)
                slots.scores = torch.ones(1, 1, held, device=DEVICE)
                slots.scores[..., pick] = -1
                assert torch.equal(slots.evict()[0, 0].long(), pick)
                assert same(slots, after(case, 0, pick.view(1, 1, -1)))


def hard_scores(n: int, generator: torch.Generator) -> Tensor:
    """Rows to which a search for the lowest is not used. [1, K, n]."""
    nan, inf = float("nan"), float("inf")
    normal, order = torch.randn(n, generator=generator), torch.arange(n)
    pick = torch.rand(n, generator=generator)
    rows = [
        torch.zeros(n),
        torch.full((n,), nan),
        torch.full((n,), inf),
        torch.where(pick < 0.5, 0.0, -0.0),  # alike
        torch.where(pick < 0.5, 0.0, normal),  # many at the bound
        torch.where(pick < 0.1, -1.0, 1.0),
        torch.where(pick < 0.9, nan, -inf),  # alike, and as low as can be
        torch.where(pick < 0.5, 3.4e38, -3.4e38) * (1 + normal / 1000),  # further apart than int32
        normal * 1e-42,  # denormal
        (order + 0x3F800000).to(torch.int32).view(torch.float32),  # neighbours
        (0x3F800000 - order).to(torch.int32).view(torch.float32),
        normal.bfloat16().float(),
        -normal.abs().pow(30),
    ]
    return torch.stack(rows)[None]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("held", "count"),
    [(2, 2), (31, 10), (32, 32), (45, 40), (300, 7), (512, 256)],
)
def test_scores_that_are_hard_to_tell_apart(held, count):
    scores = hard_scores(held, torch.Generator().manual_seed(held))
    case = Case(held, count, heads=scores.shape[1], size=2, start=1, spare=1)
    slots = Slots(case)
    slots.scores = scores.to(DEVICE)
    expected = slots.expected()
    assert torch.equal(slots.evict(), expected.sort().values.int())
    assert same(slots, after(case, 0, expected))


@pytest.mark.parametrize("wild", [False, True])
def test_all_that_nothing_pins_can_go(wild):
    case = Case(60, 2, heads=1, sinks=100, recents=300, wild=wild)
    free = int((Slots(case).worth() < float("inf")).sum())
    case = replace(case, count=free)
    slots = Slots(case)
    expected = slots.expected()
    assert torch.equal(slots.evict(), expected.sort().values.int())
    assert same(slots, after(case, 0, expected))


@pytest.mark.parametrize("count", [1, 5])
def test_a_long_row(count, monkeypatch):
    case = Case(9000, count, heads=1, size=2, recents=3, side=("shift",))
    monkeypatch.setattr(sys.modules[__name__], "SEEN", 20_000)
    slots = Slots(case)
    expected = slots.expected()
    found = slots.evict()
    assert torch.equal(found.sort().values, expected.sort().values.int())
    assert same(slots, after(case, 0, expected))


@pytest.mark.parametrize("count", [1, 4])
def test_scores_can_be_a_view(count):
    """One row for all heads, or every other number of a row."""
    for scores in (torch.randn(1, 1, 50).expand(-1, 3, -1), torch.randn(1, 3, 100)[..., ::2]):
        slots = Slots(Case(50, count, heads=3))
        slots.scores = scores.to(DEVICE)
        expected = slots.expected()
        assert torch.equal(slots.evict().sort().values, expected.sort().values.int())


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("length", [1, 5])
def test_shifts_of_newer_tokens_grow(count, length):
    """A ring's, of which a segment has its own heads; nothing around them is written."""
    slots = Slots(Case(40, count, batch=2, heads=2))
    ring = torch.arange(2 * 5 * length, dtype=torch.int32, device=DEVICE).view(2, 5, length)
    expected = ring.clone()
    expected[:, 1:3] += count
    slots.evict(newer=ring[:, 1:3])
    assert torch.equal(ring, expected)


def test_what_is_chosen_stays_until_it_is_moved():
    """While others still look at the slots; only shifts grow."""
    case = Case(97, 31, batch=2, heads=3, size=24, spare=5, side=("shift", "a"))
    slots, before = Slots(case), Slots(case)
    assert slots.shift is not None
    assert before.shift is not None
    choice = evict.choose(
        slots.scores, slots.segment.positions, case.count, evict.Pins(**slots.pins), slots.shift
    )
    assert not same(slots, before)
    before.shift.copy_(slots.shift)
    assert same(slots, before)
    evict.move(choice, slots.segment.positions, slots.buffers)
    assert same(slots, after(case, 0, before.expected()))


@pytest.mark.parametrize("fault", ["no shift", "a buffer less", "a pin", "a written slot"])
@pytest.mark.parametrize("count", [1, 9])
def test_a_fault_is_noticed(fault, count):
    case = Case(60, count, heads=2, spare=2, recents=300)
    slots = Slots(case)
    slots.scores = -slots.segment.positions.float()  # the newest would go if they were not pinned
    expected, changed = slots.expected(), {}
    if fault == "no shift":
        changed["shift"] = None
    elif fault == "a buffer less":
        changed["buffers"] = slots.buffers[:-1]
    elif fault == "a pin":
        changed["recents"] = 0
    else:
        slots.pool.keys[60, 0] += 1  # behind the first row
    slots.evict(**changed)
    assert not same(slots, after(case, 0, expected))


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no CUDA graphs")
@pytest.mark.parametrize("count", [1, 20])
def test_the_clock_can_change_between_replays_of_a_graph(count):
    case = Case(300, count, heads=4, size=64, spare=20, recents=60, spans=((0, 100),))
    slots = Slots(case)
    clock = torch.tensor(SEEN, device=DEVICE)

    Slots(case).evict()  # with an int: no more is compiled for a tensor
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots.evict(seen=clock)
    for seed, now in ((1, SEEN - 200), (2, SEEN), (3, SEEN + 500)):
        other = Slots(case, seed)
        for mine, its in zip(slots.pool.buffers(), other.pool.buffers(), strict=True):
            mine.copy_(its)
        slots.scores.copy_(other.scores)
        other.observation.num_tokens = now
        clock.fill_(now)
        graph.replay()
        other.give_up(other.expected())
        assert same(slots, other)


def test_what_is_covered():
    positions = torch.zeros(1, 2, 2000, dtype=torch.int32, device=DEVICE)
    assert evict.covers(positions, 1)
    assert evict.covers(positions, 1024, ((0, 1),) * 8)
    assert not evict.covers(positions, 1025)
    assert not evict.covers(positions[..., :9], 10)
    assert not evict.covers(positions, 0)
    long = torch.zeros(1, 1, 20_000, dtype=torch.int32, device=DEVICE)
    assert evict.covers(long, 1)
    assert evict.covers(long, 128)  # parts of it nominate some
    assert not evict.covers(long, 1024)  # too many
    assert not evict.covers(long.expand(1, 10, -1).reshape(1, 1, -1), 128)
    assert not evict.covers(positions, 1, ((0, 1),) * 9)
    assert not evict.covers(positions.long(), 1)
    assert not evict.covers(positions[..., ::2], 1)
    wide = torch.zeros(1, 2, 2000, 8, device=DEVICE)
    assert evict.covers(positions, 1, (), [wide, wide, *[positions] * 6])
    assert not evict.covers(positions, 1, (), [wide, wide, *[positions] * 7])
    assert not evict.covers(positions, 1, (), [wide, positions])


def test_a_cpu_is_covered_only_in_the_interpreter(monkeypatch):
    x = torch.zeros(1, 1, 5, dtype=torch.int32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert evict.covers(x, 1)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not evict.covers(x, 1)
