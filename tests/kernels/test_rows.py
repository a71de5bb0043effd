"""Heads that hold unequally many slots, by kernels that read where they lie."""

from __future__ import annotations

from sys import getrefcount

import pytest
import torch
from conftest import small_policy, tiny_model
from interpreted import DEVICE, pytestmark  # noqa: F401
from twins import ints, randn

import kvcap
from kvcap import kernels
from kvcap.kernels import keydiff, lagkv, rows, window
from kvcap.kernels.arguments import Pins
from kvcap.policies.base import Observation, RowRanges
from kvcap.policies.base.eviction import LOWEST, by_tier
from kvcap.policies.base.order import lowest
from kvcap.policies.keydiff import KeyDiff
from kvcap.policies.lagkv import LagKV
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.models.rope import Rotation, rotate

SEEN, FREE = 4000, 6


class Layer:
    """Rows of a pool, each of so many slots, with room behind it."""

    def __init__(
        self,
        lengths,
        targets,
        pins=((0, 0),),
        spans=(),
        seed=0,
        ties=True,
        size=8,
        dtype=torch.float32,
        more=(),
    ):
        self.lengths, self.targets, self.spans = lengths, targets, spans
        self.pins = list(pins) * (len(lengths) if len(pins) == 1 else 1)
        room = [max(n, t) + FREE for n, t in zip(lengths, targets, strict=True)]
        self.starts = [sum(room[:i]) for i in range(len(room) + 1)]
        kinds = {"mass": torch.float32, "shift": torch.int32}
        kinds |= {str(kind): kind for kind in more}
        self.pool = SlotPool(sum(room), size, dtype, DEVICE, kinds)
        self.segments = []
        for k, (n, slots) in enumerate(zip(lengths, room, strict=True)):
            segment = Segment(self.pool, self.starts[k], slots - FREE, FREE)
            g = torch.Generator().manual_seed(seed + k)
            segment.append(
                randn(1, 1, n, size, seed=seed + k),
                randn(1, 1, n, size, seed=k),
                torch.randperm(SEEN, generator=g)[:n].int().to(DEVICE),
            )
            segment.aux("mass").copy_(randn(1, 1, n, seed=k + 9))
            for name in map(str, more):
                segment.aux(name).copy_(randn(1, 1, n, seed=k + 9).round())
            segment.aux("shift").copy_(segment.positions % 5)
            self.segments.append(segment)
        self.longest = max(room) + 3
        self.rows = RowRanges(ints(self.starts), ints(lengths), self.longest)
        self.scores = randn(1, len(lengths), self.longest, seed=seed + 50)
        if ties:
            self.scores = self.scores.round()
        self.newer = ints([[[k, 3] for k in range(len(lengths))]])

    def moved(self):
        return rows.Pool(
            self.pool.buffers(),
            self.pool.aux["shift"],
            self.rows,
            ints(self.pins),
            ints(self.targets),
        )

    def expected(self, k):
        """What a row is to hold, in time order, and how many it gave up."""
        segment, n = self.segments[k], self.lengths[k]
        positions, (sinks, recents) = segment.positions[0, 0], self.pins[k]
        pinned = (positions < sinks) | (positions >= SEEN - recents)
        for start, stop in self.spans:
            pinned |= (positions >= start) & (positions < stop)
        finite = self.scores[0, k, :n].nan_to_num(nan=LOWEST, neginf=LOWEST)
        worth = finite.masked_fill(pinned, float("inf"))
        count = max(0, n - self.targets[k])
        gone = lowest(worth, positions, count)
        stays = torch.ones(n, dtype=torch.bool, device=DEVICE)
        stays[gone] = False
        order = positions[stays].argsort()
        older = (positions[gone][None] < positions[stays][:, None]).sum(1)
        contents = [segment.view(x)[0, 0][stays] for x in self.pool.buffers()]
        names = list(self.pool.named())
        contents[names.index("shift")] = contents[names.index("shift")] + older.int()
        return [x[order] for x in contents], count

    def contents(self, k, start, held):
        part = [x[start : start + held] for x in self.pool.buffers()]
        order = part[2].argsort()
        return [x[order] for x in part]

    def check(self, evict=rows.evict, seen=SEEN, starts=None):
        """Check that `evict` leaves what eager code does, in time order, and tells what is left.

        `starts` is where rows are moved to, if they are.
        """
        expected = [self.expected(k) for k in range(len(self.lengths))]
        left = ints([-1] * len(expected))
        more = [] if starts is None else [ints(starts)]
        pins, moved = Pins(seen, self.spans), self.moved()
        slot_positions = rows.padded(
            self.pool.positions, moved.rows, len(self.scores), positions=True
        )
        scores = pins.mark(self.scores, slot_positions)
        evict(scores, pins, moved, left, self.newer, *more)
        for k, (tensors, count) in enumerate(expected):
            held = self.lengths[k] - count
            assert int(left[k]) == held
            assert self.newer[0, k].tolist() == [k + count, 3 + count]
            assert all(
                map(torch.equal, self.contents(k, (starts or self.starts)[k], held), tensors)
            )


CASES = [
    ([40, 7, 300, 25], [30, 7, 120, 25], ((0, 0),), ()),
    ([33, 50], [20, 60], ((2, 5), (0, 9)), ((100, 140),)),
    ([2100, 17, 9], [1500, 3, 9], ((4, 8),), ()),
]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize(("lengths", "targets", "pins", "spans"), CASES)
def test_a_block_evicts_what_each_row_has_too_much(
    lengths, targets, pins, spans, moving, at_once, monkeypatch
):
    if not at_once:
        monkeypatch.setattr(rows, "MOST_AT_ONCE", 0)
    layer, starts = Layer(lengths, targets, pins, spans), None
    if moving:  # to where each has as much room as it needs, and the last one the rest
        kept = [min(n, t) for n, t in zip(lengths, targets, strict=True)]
        starts = [sum(kept[:i]) + i for i in range(len(kept))] + [layer.starts[-1]]
    layer.check(starts=starts)


def test_rows_of_other_layers_in_the_pool_stay_where_they_are():
    layer, left = Layer([40, 7, 30, 12], [30, 5, 20, 4]), ints([-1, -1])
    expected, starts = [layer.expected(k) for k in range(2)], layer.starts
    others = [x[starts[2] :].clone() for x in layer.pool.buffers()]
    these = layer.moved()._replace(
        rows=RowRanges(ints(starts[:3]), ints(layer.lengths[:2]), layer.longest),
        pins=ints(layer.pins[:2]),
        targets=ints(layer.targets[:2]),
    )
    rows.evict(layer.scores[:, :2], Pins(SEEN, ()), these, left, layer.newer[:, :2])
    assert left.tolist() == [30, 5]
    for k, (tensors, count) in enumerate(expected):
        contents = layer.contents(k, starts[k], layer.lengths[k] - count)
        assert all(map(torch.equal, contents, tensors))
    assert all(map(torch.equal, others, (x[starts[2] :] for x in layer.pool.buffers())))


@pytest.mark.parametrize(("lengths", "targets"), [([40, 7, 300, 25], [39, 9, 299, 25]),
                                                  ([2100, 3], [2099, 2])])  # fmt: skip
def test_a_token_evicts_one_slot_of_the_rows_that_are_full(lengths, targets):
    layer = Layer(lengths, targets, ((1, 2),), ties=False)
    layer.check(rows.evict_one, torch.tensor(SEEN, device=DEVICE))


def hard_scores(n, g):
    """Rows [K, n] to which a search for the lowest is not used."""
    nan, inf = float("nan"), float("inf")
    normal, order = torch.randn(n, generator=g), torch.arange(n)
    pick = torch.rand(n, generator=g)
    return torch.stack(
        [
            torch.zeros(n),
            torch.full((n,), nan),
            torch.full((n,), inf),
            torch.where(pick < 0.5, 0.0, -0.0),  # alike
            torch.where(pick < 0.5, 0.0, normal),  # many at the bound
            torch.where(pick < 0.1, -1.0, 1.0),
            torch.where(pick < 0.9, nan, -inf),  # alike, and as low as can be
            torch.where(pick < 0.5, 3.4e38, -3.4e38) * (1 + normal / 1000),  # further than an int32
            normal * 1e-42,  # denormal
            (order + 0x3F800000).to(torch.int32).view(torch.float32),  # neighbours
            (0x3F800000 - order).to(torch.int32).view(torch.float32),
            normal.bfloat16().float(),
            -normal.abs().pow(30),
        ]
    ).to(DEVICE)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("held", "count"), [(1, 1), (2, 2), (31, 10), (32, 32), (45, 40), (130, 1), (300, 256)]
)
def test_scores_that_are_hard_to_tell_apart(held, count, at_once, monkeypatch):
    if not at_once:
        monkeypatch.setattr(rows, "MOST_AT_ONCE", 0)
    scores = hard_scores(held, torch.Generator().manual_seed(held))
    for evict in (rows.evict, rows.evict_one)[: 1 + (count == 1)]:
        layer = Layer([held] * len(scores), [held - count] * len(scores))
        layer.scores[0, :, :held] = scores
        layer.check(evict)


WIDE = (torch.int8, torch.float16, torch.bool, torch.float32)


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize(
    ("size", "dtype", "more"),
    [(80, torch.bfloat16, WIDE), (24, torch.float16, ()), (128, torch.float32, WIDE[:2])],
)
def test_all_that_may_pin_a_slot_and_all_that_moves_with_it(size, dtype, more, count):
    spans = tuple((400 * i, 400 * i + 90) for i in range(8))
    layer = Layer(
        [200, 130],
        [200 - count, 130 - count],
        ((50, 150), (0, 700)),
        spans,
        size=size,
        dtype=dtype,
        more=more,
    )
    clock = torch.tensor(SEEN, device=DEVICE)
    layer.check(rows.evict_one if count == 1 else rows.evict, clock)


@pytest.mark.parametrize("count", [1, 5])
def test_scores_can_be_a_view(count):
    """One row for all heads, or every other number of a row."""
    for scores in (randn(1, 1, 50).expand(-1, 3, -1), randn(1, 3, 100)[..., ::2]):
        layer = Layer([50] * 3, [50 - count] * 3)
        layer.scores = scores
        layer.check(rows.evict_one if count == 1 else rows.evict)


def test_what_is_covered(monkeypatch):
    kinds = {str(i): torch.float32 for i in range(6)}
    buffers = SlotPool(9, 8, torch.float32, DEVICE, kinds).buffers()
    assert rows.covers(buffers)
    assert not rows.covers([*buffers, buffers[-1]])
    assert not rows.covers([*buffers[:2], buffers[2][::2]])
    assert not rows.covers([*buffers[:2], buffers[0]])
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        assert not rows.covers(buffers)


@pytest.mark.parametrize("most", [0, rows.MOST_COPIED])
@pytest.mark.parametrize("size", [8, 24])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_all_that_a_slot_holds_moves_with_it_at_once_or_by_columns(kind, size, most, monkeypatch):
    monkeypatch.setattr(rows, "MOST_COPIED", most)
    source = torch.arange(70)
    source[:50] = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    wide = [randn(70, size).to(kind) for _ in range(2)]
    narrow = [randn(70), *((100 * randn(70)).to(x) for x in (torch.int32, torch.int8))]
    before = [x.clone() for x in (*wide, *narrow)]
    rows._gather([*wide, *narrow], source.int().to(DEVICE))
    for x, was in zip((*wide, *narrow), before, strict=True):
        assert torch.equal(x, was[source.to(DEVICE)])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_keys_are_copied_and_rotated(interleaved):
    layer = Layer([40, 7, 30], [40, 7, 30])
    rotation = Rotation(0.1 ** torch.arange(3), 9, DEVICE, interleaved=interleaved)
    longest, shift = layer.longest, layer.pool.aux["shift"]
    values = rows.copied(layer.pool.values, layer.rows).view(3, longest, 8)
    keys = rows.copied(
        layer.pool.keys, layer.rows, shift, rotation.table, interleaved=interleaved
    ).view(3, longest, 8)
    for k, segment in enumerate(layer.segments):
        n = layer.lengths[k]
        assert torch.equal(values[k, :n], segment.values[0, 0])
        with kernels.use("eager"):
            expected = rotation.back(segment.keys, segment.aux("shift"))[0, 0]
        torch.testing.assert_close(keys[k, :n], expected, rtol=1e-5, atol=1e-6)


def test_numbers_of_slots_are_copied_and_put_back():
    layer = Layer([40, 7, 30], [40, 7, 30])
    mass = layer.pool.aux["mass"]
    copy = rows.padded(mass, layer.rows, 1)
    slot_positions = rows.padded(layer.pool.positions, layer.rows, 1, positions=True)
    for k, segment in enumerate(layer.segments):
        n = layer.lengths[k]
        assert torch.equal(copy[0, k, :n], segment.aux("mass")[0, 0])
        assert copy[0, k, n:].count_nonzero() == 0
        assert torch.equal(slot_positions[0, k, :n], segment.positions[0, 0])
        assert (slot_positions[0, k, n:] >= 1 << 30).all()
    before = mass.clone()
    rows.put(copy + 1, mass, layer.rows)
    assert (mass != before).sum() == sum(layer.lengths)
    rows.put(torch.zeros(1, 3, 2, device=DEVICE), mass, layer.rows, layer.rows.lengths - 2)
    assert (mass == 0).sum() == 6 + 3 * FREE


def test_each_sequence_ranks_its_own_regions():
    regions = [(3, 90, -2), (80, 200, -1), (0, 5, 1), (2, 4, 2)], [], [(0, 1 << 30, 2), (9, 44, 3)]
    positions = torch.stack([torch.randperm(600)[:530] for _ in range(6)]).view(3, 2, 530)
    scores, positions = randn(3, 530, 2, seed=1).transpose(1, 2), positions.int().to(DEVICE)
    numbers = [[len(its), *(x for one in its for x in one)] for its in regions]
    weighed = rows.weigh(scores, positions, ints([[*x, *[7] * (13 - len(x))] for x in numbers]))
    for i, its in enumerate(regions):
        assert torch.equal(weighed[i], by_tier(scores[i], positions[i], its))


@pytest.mark.parametrize("kind", ["attention", "joint", "dropkv", "cake", "keydiff"])
def test_rows_score_as_each_alone(kind):
    layer = Layer([40, 7, 290], [40, 7, 290])
    queries = randn(1, 6, 3, 8)
    whole = [x[None, None].expand(1, 3, -1, -1) for x in (layer.pool.keys, layer.pool.values)]
    slot_positions = rows.padded(layer.pool.positions, layer.rows, 1, positions=True)
    obs = Observation(*whole, slot_positions, SEEN, 9, queries=queries, rows=layer.rows)

    def score(obs):
        if kind == "keydiff":
            return kernels.score(KeyDiff(), obs)
        return window.scores(obs, kind, "mean", epsilon=0.5)

    with kernels.use("triton"):
        scores = score(obs)
        for k, segment in enumerate(layer.segments):
            mine = queries[:, 2 * k : 2 * k + 2]
            alone = score(
                Observation(
                    segment.keys,
                    segment.values,
                    segment.positions,
                    SEEN,
                    9,
                    queries=mine,
                )
            )
            n = layer.lengths[k]
            torch.testing.assert_close(scores[:, k, :n], alone[:, 0], rtol=1e-5, atol=1e-6)


def test_keydiff_rotates_keys_of_rows_as_it_reads_them():
    """By sums of parts, of which those that a row does not have are 0."""
    layer, count = Layer([40, 7, 290], [40, 7, 290]), 3
    table = Rotation(torch.rand(4), 9, DEVICE, torch.float32).table
    shift = layer.pool.aux["shift"].expand(1, count, -1)
    keys = layer.pool.keys[None, None].expand(1, count, -1, -1)
    turned = [
        rotate(s.keys, table[s.aux("shift").long()], back=True) for s in layer.segments
    ]  # [1, 1, n, 8] each
    sums = torch.zeros(1, count, 5, 8, device=DEVICE)
    for k, mine in enumerate(turned):
        sums[0, k, 0] = mine[0, 0, :3].sum(0)
        sums[0, k, 1] = mine[0, 0, 3:].sum(0)
    with kernels.use("triton"):
        scores = keydiff.scores_turned(keys, shift, table, sums, layer.rows)
    for k, mine in enumerate(turned):
        expected = -torch.cosine_similarity(mine, mine.mean(2, keepdim=True), dim=-1)
        torch.testing.assert_close(
            scores[:, k, : layer.lengths[k]], expected[:, 0], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("lengths", "size", "lag", "dtype"),
    [
        ([40, 7, 90, 33], 8, 4, torch.float32),
        ([64, 65, 63, 1], 80, 32, torch.float32),
        ([200, 3], 64, 100, torch.bfloat16),
        ([31, 32, 96], 24, 5, torch.float16),
    ],
)
def test_lagkv_scores_rows_as_each_alone(lengths, size, lag, dtype):
    layer = Layer(lengths, lengths, size=size, dtype=dtype)
    slot_positions = rows.padded(layer.pool.positions, layer.rows, 1, positions=True)
    scores = lagkv.scores(layer.pool.keys, layer.pool.values, slot_positions, layer.rows, lag)
    for k, (segment, n) in enumerate(zip(layer.segments, lengths, strict=True)):
        alone = segment.keys.float(), segment.values.float(), segment.positions
        expected = LagKV(lag=lag).score(Observation(*alone, SEEN, n))
        torch.testing.assert_close(scores[0, k, :n], expected[0, 0], rtol=0, atol=1e-6)
    assert [lagkv.covers(LagKV(**x)) for x in ({}, {"sinks": 4}, {"lag": 200})] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("policy", ["headkv", "adakv"])
def test_what_tells_the_device_of_rows_does_not_keep_the_cache(policy):
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    cache = kvcap.BudgetCache(model.config, 24, 16, small_policy(policy, model.config))
    with kernels.use("triton"):
        cache.allocate(1, torch.float32, DEVICE)
    before = getrefcount(cache)
    assert cache.row_table() is not None
    assert getrefcount(cache) == before
