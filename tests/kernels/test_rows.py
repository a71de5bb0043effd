"""Heads that hold unequally many slots, by kernels that read where they lie."""

from __future__ import annotations

from dataclasses import replace
from sys import getrefcount
from types import SimpleNamespace

import pytest
import torch
from conftest import small_policy, tiny_model
from interpreted import DEVICE, pytestmark  # noqa: F401
from pretended_graphs import RowGraph, pretend

import kvcap
from kvcap import kernels
from kvcap.kernels import keydiff, rows, window
from kvcap.kernels import rotate as rotate_kernel
from kvcap.kernels.arguments import Pins
from kvcap.policies.base import Observation, Rows
from kvcap.policies.base.order import lowest
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache import row_table
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.cache.row_table import RowTable
from kvcap.runtime.models.rope import Rotation, rotate

SEEN, FREE = 4000, 6


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ints(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


class Layer:
    """Rows of a pool, each of so many slots, with room behind it."""

    def __init__(self, lengths, targets, pins=((0, 0),), spans=(), seed=0, ties=True):
        self.lengths, self.targets, self.spans = lengths, targets, spans
        self.pins = list(pins) * (len(lengths) if len(pins) == 1 else 1)
        room = [max(n, t) + FREE for n, t in zip(lengths, targets, strict=True)]
        self.starts = [sum(room[:i]) for i in range(len(room) + 1)]
        kinds = {"mass": torch.float32, "shift": torch.int32}
        self.pool = SlotPool(sum(room), 8, torch.float32, DEVICE, kinds)
        self.segments = []
        for k, (n, slots) in enumerate(zip(lengths, room, strict=True)):
            segment = Segment(self.pool, self.starts[k], slots - FREE, FREE)
            g = torch.Generator().manual_seed(seed + k)
            segment.append(random(1, 1, n, 8, seed=seed + k), random(1, 1, n, 8, seed=k),
                           torch.randperm(SEEN, generator=g)[:n].int().to(DEVICE))  # fmt: skip
            segment.aux("mass").copy_(random(1, 1, n, seed=k + 9))
            segment.aux("shift").copy_(segment.positions % 5)
            self.segments.append(segment)
        self.longest = max(room) + 3
        self.rows = Rows(ints(self.starts), ints(lengths), self.longest)
        self.scores = random(1, len(lengths), self.longest, seed=seed + 50)
        if ties:
            self.scores = self.scores.round()
        self.newer = ints([[[k, 3] for k in range(len(lengths))]])

    def moved(self):
        return rows.Pool(
            self.pool.buffers(), self.pool.aux["shift"], self.rows, ints(self.pins),
            ints(self.targets),
        )  # fmt: skip

    def expected(self, k):
        """What a row is to hold, in time order, and how many it gave up."""
        segment, n = self.segments[k], self.lengths[k]
        positions, (sinks, recents) = segment.positions[0, 0], self.pins[k]
        pinned = (positions < sinks) | (positions >= SEEN - recents)
        for start, stop in self.spans:
            pinned |= (positions >= start) & (positions < stop)
        worth = self.scores[0, k, :n].masked_fill(pinned, float("inf"))
        count = max(0, n - self.targets[k])
        gone = lowest(worth, positions, count)
        stays = torch.ones(n, dtype=torch.bool, device=DEVICE)
        stays[gone] = False
        order = positions[stays].argsort()
        older = (positions[gone][None] < positions[stays][:, None]).sum(1)
        found = [segment.view(x)[0, 0][stays] for x in self.pool.buffers()]
        names = list(self.pool.named())
        found[names.index("shift")] = found[names.index("shift")] + older.int()
        return [x[order] for x in found], count

    def found(self, k, start, held):
        part = [x[start : start + held] for x in self.pool.buffers()]
        order = part[2].argsort()
        return [x[order] for x in part]


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
    layer = Layer(lengths, targets, pins, spans)
    expected = [layer.expected(k) for k in range(len(lengths))]
    starts, left = layer.starts, torch.full((len(lengths),), -1, dtype=torch.int32, device=DEVICE)
    if moving:  # to where each has as much room as it needs, and the last one the rest
        kept = [min(n, t) for n, t in zip(lengths, targets, strict=True)]
        starts = [sum(kept[:i]) + i for i in range(len(kept))] + [layer.starts[-1]]
    rows.give_up(
        layer.scores, Pins(0, 0, SEEN, spans), layer.moved(), left, layer.newer,
        ints(starts) if moving else None,
    )  # fmt: skip
    for k, (tensors, count) in enumerate(expected):
        held = lengths[k] - count
        assert int(left[k]) == held
        assert layer.newer[0, k].tolist() == [k + count, 3 + count]
        for one, other in zip(layer.found(k, starts[k], held), tensors, strict=True):
            assert torch.equal(one, other)


def test_rows_of_other_layers_in_the_pool_stay_where_they_are():
    layer, left = Layer([40, 7, 30, 12], [30, 5, 20, 4]), ints([-1, -1])
    expected, starts = [layer.expected(k) for k in range(2)], layer.starts
    others = [x[starts[2] :].clone() for x in layer.pool.buffers()]
    these = layer.moved()._replace(
        rows=Rows(ints(starts[:3]), ints(layer.lengths[:2]), layer.longest),
        pins=ints(layer.pins[:2]), targets=ints(layer.targets[:2]),
    )  # fmt: skip
    rows.give_up(layer.scores[:, :2], Pins(0, 0, SEEN, ()), these, left, layer.newer[:, :2])
    assert left.tolist() == [30, 5]
    for k, (tensors, count) in enumerate(expected):
        found = layer.found(k, starts[k], layer.lengths[k] - count)
        assert all(map(torch.equal, found, tensors))
    assert all(map(torch.equal, others, (x[starts[2] :] for x in layer.pool.buffers())))


@pytest.mark.parametrize(("lengths", "targets"), [([40, 7, 300, 25], [39, 9, 299, 25]),
                                                  ([2100, 3], [2099, 2])])  # fmt: skip
def test_a_token_evicts_one_slot_of_the_rows_that_are_full(lengths, targets):
    layer = Layer(lengths, targets, ((1, 2),), ties=False)
    expected = [layer.expected(k) for k in range(len(lengths))]
    left = torch.full((len(lengths),), -1, dtype=torch.int32, device=DEVICE)
    clock = torch.tensor(SEEN, device=DEVICE)
    rows.give_up_one(layer.scores, Pins(0, 0, clock, ()), layer.moved(), left, layer.newer)
    for k, (tensors, count) in enumerate(expected):
        held = lengths[k] - count
        assert int(left[k]) == held
        assert layer.newer[0, k].tolist() == [k + count, 3 + count]
        for one, other in zip(layer.found(k, layer.starts[k], held), tensors, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("most", [0, rows.MOST_COPIED])
@pytest.mark.parametrize("size", [8, 24])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_all_that_a_slot_holds_moves_with_it_at_once_or_by_columns(kind, size, most, monkeypatch):
    monkeypatch.setattr(rows, "MOST_COPIED", most)
    source = torch.arange(70)
    source[:50] = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    wide = [random(70, size).to(kind) for _ in range(2)]
    narrow = [random(70), *((100 * random(70)).to(x) for x in (torch.int32, torch.int8))]
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
    places = rows.padded_positions(layer.pool.positions, layer.rows, 1)
    for k, segment in enumerate(layer.segments):
        n = layer.lengths[k]
        assert torch.equal(copy[0, k, :n], segment.aux("mass")[0, 0])
        assert copy[0, k, n:].count_nonzero() == 0
        assert torch.equal(places[0, k, :n], segment.positions[0, 0])
        assert (places[0, k, n:] >= 1 << 30).all()
    before = mass.clone()
    rows.put(copy + 1, mass, layer.rows)
    assert (mass != before).sum() == sum(layer.lengths)
    rows.put(torch.zeros(1, 3, 2, device=DEVICE), mass, layer.rows, layer.rows.lengths - 2)
    assert (mass == 0).sum() == 6 + 3 * FREE


@pytest.mark.parametrize("kind", ["attention", "joint", "dropkv", "cake", "keydiff"])
def test_rows_score_as_each_alone(kind):
    layer = Layer([40, 7, 290], [40, 7, 290])
    queries = random(1, 6, 3, 8)
    whole = [x[None, None].expand(1, 3, -1, -1) for x in (layer.pool.keys, layer.pool.values)]
    places = rows.padded_positions(layer.pool.positions, layer.rows, 1)
    obs = Observation(*whole, places, SEEN, 9, queries=queries, rows=layer.rows)

    def score(obs):
        if kind == "keydiff":
            return kernels.score(KeyDiff(), obs)
        return window.scores(obs, kind, "mean", epsilon=0.5)

    with kernels.use("triton"):
        found = score(obs)
        for k, segment in enumerate(layer.segments):
            mine = queries[:, 2 * k : 2 * k + 2]
            alone = score(Observation(
                segment.keys, segment.values, segment.positions, SEEN, 9, queries=mine,
            ))  # fmt: skip
            n = layer.lengths[k]
            torch.testing.assert_close(found[:, k, :n], alone[:, 0], rtol=1e-5, atol=1e-6)


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
        found = keydiff.scores_turned(keys, shift, table, sums, layer.rows)
    for k, mine in enumerate(turned):
        expected = -torch.cosine_similarity(mine, mine.mean(2, keepdim=True), dim=-1)
        torch.testing.assert_close(
            found[:, k, : layer.lengths[k]], expected[:, 0], rtol=1e-5, atol=1e-6
        )


def read(policy, positions, choice, captured=False):
    ids = 3 + torch.randperm(60, generator=torch.Generator().manual_seed(0))[None, :53].to(DEVICE)
    layers = 3 if "cake" in policy else 1
    model = tiny_model("llama", num_hidden_layers=layers, vocab_size=64).to(DEVICE)
    base, _, heads = policy.partition("+")
    eviction = small_policy(heads or base, model.config)
    if heads:
        eviction = replace(eviction, policy=small_policy(base, model.config).policy)
    cache = kvcap.BudgetCache(model.config, 24, 16, eviction, positions=positions)
    cache.allocate(1, torch.float32, DEVICE)
    with kernels.use(choice):
        assert cache.by_rows() == (choice == "triton")
        loop = BlockLoop(model, cache, graphs=False)
        loop.graphs = cuda_graphs.BlockGraphs(model, cache) if captured else None
        logits = [loop.prefill(ids[:, :43])]
        cache.pin([(43, 44)])
        logits += [loop.read(ids[:, i : i + 1]) for i in range(43, 46)]
        logits += [loop.prefill(ids[:, 46:53])]
    segments = [s for layer in cache.capped_layers for s in layer.segments]
    kept = [sorted(s.positions.flatten().tolist()) for s in segments]
    kinds = set() if loop.graphs is None else {k.length for k in loop.graphs.captured}
    return torch.stack(logits), kept, kinds, [s.held for s in segments]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("policy", "positions"),
    [("criticalkv-adakv", "compact"), ("duoattention", "true"), ("h2o+headkv", "compact"),
     ("knorm+adakv", "true"), ("cake", "compact"), ("cake", "true"), ("dropkv+cake", "compact")],
)  # fmt: skip
def test_the_same_tokens_stay_as_eagerly(policy, positions):
    eager, kept, _, held = read(policy, positions, "eager")
    found, kept_too, _, held_too = read(policy, positions, "triton")
    assert len(set(held)) > 1
    assert (kept_too, held_too) == (kept, held)
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_layers_hold_and_have_what_they_do_eagerly():
    """After every token, too, which fill what a block left empty; of two sequences."""
    g, states = torch.Generator().manual_seed(3), []
    ids = torch.stack([3 + torch.randperm(190, generator=g) for _ in range(2)]).to(DEVICE)
    for choice in ("eager", "triton"):
        model = tiny_model("llama", num_hidden_layers=3, vocab_size=200).to(DEVICE)
        cache = kvcap.BudgetCache(model.config, 24, 8, small_policy("cake", model.config))
        cache.allocate(2, torch.float32, DEVICE)
        found = []
        with kernels.use(choice):
            loop = BlockLoop(model, cache, graphs=False)
            for start, stop, length in ((0, 37, 8), (37, 39, 1), (39, 47, 8), (47, 48, 1)):
                for first in range(start, stop, length):
                    loop.read(ids[:, first : min(first + length, stop)])
                    each = [layer.segments[0] for layer in cache.capped_layers]
                    found += [(s.start, s.budget, s.held, s.target_length) for s in each]
        found += [sorted(x.tolist()) for s in each for x in s.positions.flatten(0, 1)]
        states.append(found)
    assert states[0] == states[1]


def test_the_host_is_told_what_the_device_knows(monkeypatch):
    monkeypatch.setattr(row_table, "STEP", 512)  # as outside of tests
    layer = Layer([40, 7, 30], [40, 9, 30])
    for segment, slots in zip(layer.segments, layer.targets, strict=True):
        segment.target_length = slots
    layer.segments[1].target_length = 8  # it has room for one more
    before = [(s.start, s.budget, s.target_length, s.held) for s in layer.segments]
    table = RowTable([layer.segments], [lambda _: (0, 3)], [min(3, n) for n in range(99)])
    table.tell(4)
    table.agreed(5, divided=True)
    assert table.seen == 5
    assert [(s.start, s.budget, s.target_length, s.held) for s in layer.segments] == before
    first, end = layer.starts[0], layer.starts[-1]
    table.divide(0, ints([first, first + 31, first + 39, end]), ints([25, 2, 52]))
    table.held[0].copy_(ints([25, 2, 50]))
    table.agreed(6, divided=True)
    found = [(s.start, s.budget, s.target_length, s.held) for s in layer.segments]
    assert found == [
        (first, 25, 25, 25), (first + 31, 2, 2, 2), (first + 39, end - first - 45, 52, 50),
    ]  # fmt: skip
    assert table.pins[0].tolist() == [[0, 3], [0, 2], [0, 3]]
    assert table.longest(1) == table.longest(16) == 528


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("policy", ["pyramidkv", "h2o+pyramidkv"])
def test_layers_that_are_full_beside_layers_that_fill_are_read_by_rows(policy, positions):
    """Then all are full, and read as any others; the same stays as eagerly."""
    ids = 3 + torch.randperm(90, generator=torch.Generator().manual_seed(0))[None, :78].to(DEVICE)
    model = tiny_model("llama", num_hidden_layers=3, vocab_size=96).to(DEVICE)
    base, _, layers = policy.partition("+")
    eviction = small_policy(layers or base, model.config)
    if layers:
        eviction = replace(eviction, policy=small_policy(base, model.config).policy)
    found, by_rows = [], []
    for choice in ("triton", "eager"):
        cache = kvcap.BudgetCache(model.config, 24, 8, eviction, positions=positions)
        cache.allocate(1, torch.float32, DEVICE)
        loop, logits = BlockLoop(model, cache, graphs=False), []
        loop.graphs = cuda_graphs.Uncaptured(model, cache) if choice == "triton" else None
        with kernels.use(choice):
            for start, stop in ((0, 16), (16, 24), (24, 25), (25, 33), (33, 70), (70, 71)):
                by_rows.append(cache.by_rows())
                logits.append(loop.prefill(ids[:, start:stop]))
        segments = [s for layer in cache.capped_layers for s in layer.segments]
        kept = [[sorted(head) for head in s.positions[0].tolist()] for s in segments]
        found.append((torch.stack(logits), kept, cache.counters))
    assert by_rows == [False, True, True, True, True, False] + 6 * [False]
    assert found[0][1:] == found[1][1:]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["headkv", "adakv"])
def test_what_tells_the_device_of_rows_does_not_keep_the_cache(policy):
    """A session leaves its cache to the next one where nobody else refers to it."""
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    cache = kvcap.BudgetCache(model.config, 24, 16, small_policy(policy, model.config))
    cache.allocate(1, torch.float32, DEVICE)
    before = getrefcount(cache)
    with kernels.use("triton"):
        assert cache.row_table() is not None
    assert getrefcount(cache) == before


def test_a_layer_that_was_left_too_many_slots_reads_a_token_without_a_graph():
    """A graph gives up one of each row; slots that moved to other layers are more."""
    model = tiny_model("llama", num_hidden_layers=2).to(DEVICE)
    cache = kvcap.BudgetCache(model.config, 24, 16, small_policy("cake", model.config))
    cache.allocate(1, torch.float32, DEVICE)
    (segment,), ids = cache.capped_layers[1].segments, torch.zeros(1, 1, dtype=torch.long)
    with kernels.use("triton"):
        graphs = cuda_graphs.BlockGraphs(model, cache)
        for above, replayed in ((0, True), (1, False), (-1, True)):
            segment.held, cache._table = segment.target_length + above, None
            assert (graphs._kind(ids, True) is not None) == replayed


def test_blocks_that_cannot_be_captured_leave_tokens_their_graphs(monkeypatch):
    """As where a budget of one's own reads numbers to share slots out."""

    def captured(_, cache, ids, kind, pool=None, at_once=False):
        if kind.length > 1:
            raise RuntimeError("a number was read")
        return SimpleNamespace(pool=None, replay=lambda *_: torch.zeros(1, 64))

    monkeypatch.setattr(cuda_graphs, "BlockGraph", captured)
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    cache = kvcap.BudgetCache(model.config, 24, 16, small_policy("adakv", model.config))
    cache.allocate(1, torch.float32, DEVICE)
    with kernels.use("triton"):
        graphs = cuda_graphs.BlockGraphs(model, cache)
        for length, replayed in ((16, False), (1, True), (16, False)):
            ids = torch.zeros(1, length, dtype=torch.long, device=DEVICE)
            graphs.warm_up(ids)
            assert (graphs.read(ids) is not None) == replayed
            assert (graphs._kind(ids, True) is not None) == replayed
    assert graphs.refused is None
    assert graphs.eager_blocks == "capture failed: a number was read"
    told = BlockLoop(model, cache, graphs=graphs).execution
    assert told == "CUDA graphs, but for blocks: capture failed: a number was read"


@pytest.mark.slow(keep=2)
@pytest.mark.skipif(DEVICE == "cuda", reason="there graphs are captured")
@pytest.mark.parametrize(
    ("policy", "lengths"),
    [("adakv", {1, 16}), ("cake", {1, 16}), ("headkv", {1, 16}), ("criticalkv-adakv", {1, 16})],
)
def test_what_is_captured_is_what_is_read(policy, lengths, monkeypatch):
    """Capturing does the work here, so that each graph serves once."""
    noted = pretend(monkeypatch)
    graphs, make = [], cuda_graphs.BlockGraphs.__init__
    keep = lambda self, *given: make(self, *given) or graphs.append(self)  # noqa: E731
    monkeypatch.setattr(cuda_graphs.BlockGraphs, "__init__", keep)
    found, kept, _, held = read(policy, "compact", "triton", captured=True)
    expected, kept_too, _, held_too = read(policy, "compact", "eager")
    assert {kind.length for kind in noted.kinds} == lengths
    assert (kept, held) == (kept_too, held_too)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # Captured in an empty cache it serves a full one: keys and queries are rotated.
    cache, rotated = graphs[0].cache, []
    cache.reset()
    turn = rotate_kernel._rotate
    monkeypatch.setattr(rotate_kernel, "_rotate", lambda *x: rotated.append(x[1].shape) or turn(*x))
    length = max(lengths)
    cache.pin([(43, 44)] if length == 1 else [])  # as when such a pass was prepared
    with kernels.use("triton"):
        assert graphs[0].read(torch.full((1, length), 5), need_logits=length == 1) is not None
    # The queries and keys of the block, all keys, and the window of queries.
    assert len(rotated) == 4 * len(cache.capped_layers)


@pytest.mark.slow(keep=2)
@pytest.mark.skipif(DEVICE == "cuda", reason="there graphs are captured")
@pytest.mark.parametrize(
    ("policy", "positions", "filled"),
    [("adakv", "true", 5), ("cake", "compact", 5), ("criticalkv-adakv", "compact", 5),
     ("headkv", "compact", 6), ("keydiff+adakv", "true", 5)],
)  # fmt: skip
def test_a_prompt_ends_anywhere_in_the_block_that_is_captured(
    policy, positions, filled, monkeypatch
):
    """What fills the block up changes nothing, nor how far back the window of queries reaches."""
    noted, found = pretend(monkeypatch), []
    ids = 3 + torch.randperm(100, generator=torch.Generator().manual_seed(2))[None]
    ids = torch.cat((ids, ids.flip(1)))
    base, _, heads = policy.partition("+")
    layers = 3 if "cake" in policy else 1
    model = tiny_model("llama", num_hidden_layers=layers, vocab_size=128)
    eviction = small_policy(heads or base, model.config)
    if heads:
        eviction = replace(eviction, policy=small_policy(base, model.config).policy)
    for choice in ("triton", "eager"):
        cache = kvcap.BudgetCache(model.config, 24, 16, eviction, positions=positions)
        cache.allocate(2, torch.float32, DEVICE)
        loop, logits, start = BlockLoop(model, cache, graphs=False), [], 0
        with kernels.use(choice):
            loop.graphs = cuda_graphs.BlockGraphs(model, cache) if choice == "triton" else None
            for stop in (37, 44, 60, 62, 75, 76, 79):
                logits.append(loop.prefill(ids[:, start:stop]))
                start = stop
        segments = [s for layer in cache.capped_layers for s in layer.segments]
        kept = [[sorted(head) for head in s.positions.flatten(0, 1).tolist()] for s in segments]
        found.append((torch.stack(logits), kept, cache.counters))
    # Of 5 tokens, the first of which slots are shared out after, then 7, 16, 2, 13 and 3.
    assert [kind.length for kind in noted.kinds if kind.counted] == [16] * filled
    assert found[0][1:] == found[1][1:]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow(keep=2)
@pytest.mark.skipif(DEVICE == "cuda", reason="there graphs are captured")
@pytest.mark.parametrize(("policy", "step"), [("adakv", 64), ("cake", 64), ("adakv", 44)])
def test_the_host_may_hear_of_passes_late(policy, step, monkeypatch):
    """Graphs follow each other meanwhile, but where rows may be longer than those of one."""
    monkeypatch.setattr(cuda_graphs, "BlockGraph", RowGraph)
    monkeypatch.setattr(cuda_graphs, "RUN", 3)
    monkeypatch.setattr(row_table, "STEP", step)
    told, be_told = [], RowTable._be_told
    monkeypatch.setattr(RowTable, "_be_told", lambda *x: told.append(x[1]) or be_told(*x))
    late, hear_late = [], RowTable._hear_late
    monkeypatch.setattr(RowTable, "_hear_late", lambda *x: late.append(x[1]) or hear_late(*x))
    ids = 3 + torch.randperm(150, generator=torch.Generator().manual_seed(4))[None]
    model = tiny_model("llama", num_hidden_layers=2, vocab_size=160)
    found = []
    for choice in ("triton", "eager"):
        cache = kvcap.BudgetCache(model.config, 40, 8, small_policy(policy, model.config))
        cache.allocate(1, torch.float32, DEVICE)
        with kernels.use(choice):
            loop, logits, start = BlockLoop(model, cache, graphs=False), [], 0
            loop.graphs = cuda_graphs.BlockGraphs(model, cache) if choice == "triton" else None
            for stop in (68, 130, 131, 143):
                logits.append(loop.prefill(ids[:, start:stop]))
                start = stop
            if choice == "triton":
                assert loop.next_length(1, 100) == 3 * 8
                loop.in_batch = True
                assert loop.next_length(1, 100) == 8
        segments = [s for layer in cache.capped_layers for s in layer.segments]
        held = [(s.start, s.budget, s.held, s.target_length) for s in segments]
        kept = [sorted(head) for s in segments for head in s.positions[0].tolist()]
        found.append((torch.stack(logits), held, kept))
    assert found[0][1:] == found[1][1:]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    # The host waits once for every three blocks, and before a pass that is captured (at 64).
    waited = [n for n in told if 16 < n <= 130]
    assert waited == [40, 64, 68, 92, 116, 130] if step == 64 else len(waited) > 6
    assert 48 in late
