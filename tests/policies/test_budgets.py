"""Budgets of layers and heads: exact sums, limits, pins, tables, and their papers' formulas."""

from __future__ import annotations

import json
import math
import os
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observations import attention_by_loops, newer_than_some_queries, observe, same

from kvcap.policies import PolicyError, load_policy
from kvcap.policies.base import apportion, apportion_rows, companions
from kvcap.policies.budgets.adakv import AdaKV
from kvcap.policies.budgets.cake import CakeBudget
from kvcap.policies.budgets.duoattention import DuoAttention
from kvcap.policies.budgets.headkv import HeadKV
from kvcap.policies.budgets.pyramidkv import PyramidKV


def test_options_of_a_preset_reach_the_part_that_has_them():
    cake = load_policy("cake", gamma=100, tau1=2, floor=0.5)
    assert (cake.policy.gamma, cake.layer_budget.tau1, cake.layer_budget.floor) == (100, 2, 0.5)


# PyramidKV


@given(
    budget=st.integers(1, 400),
    layers=st.integers(1, 40),
    pinned=st.integers(0, 420),
    beta=st.integers(1, 40),
)
def test_pyramid_sums_exactly_and_falls(budget, layers, pinned, beta):
    split = PyramidKV(beta).split(budget, layers, pinned)
    assert sum(split) == budget * layers
    assert split == sorted(split, reverse=True)
    if budget > pinned:
        assert min(split) >= pinned + 1
        left = budget - pinned
        least = max(1, left // beta)
        for i, slots in enumerate(split):  # the straight line between both ends
            middle = least + 2 * (left - least) * (layers - 1 - i) / max(1, layers - 1)
            assert layers == 1 or abs(slots - pinned - middle) < 1
    else:
        assert split == [budget] * layers


def test_pyramid_by_hand():
    """R = 100: from 195 down to 5, and the window of 32 in each."""
    assert load_policy("pyramidkv").split(132, 3) == [195 + 32, 100 + 32, 5 + 32]
    assert load_policy("pyramidkv", beta=1).split(132, 3) == [132] * 3
    assert load_policy("pyramidkv").split(32, 4) == [32] * 4


# CAKE


@pytest.mark.parametrize(
    "obs", [observe(17, group=g) for g in (1, 4)] + [newer_than_some_queries()]
)
@pytest.mark.parametrize(("tau1", "tau2"), [(1.0, 1.0), (2.0, 0.5)])
def test_cake_preference_by_its_formula(obs, tau1, tau2):
    entropies, variances = [], []
    for rows in attention_by_loops(obs).flatten(0, 2).tolist():
        entropies.append(-sum(a * math.log(a) for row in rows for a in row if a > 0))
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        variances.append(
            sum((a - m) ** 2 for row in rows for a, m in zip(row, means, strict=True)) / len(rows)
        )
    heads = len(entropies)
    expected = (sum(entropies) / heads) ** (1 / tau1) * (sum(variances) / heads) ** (1 / tau2)
    preferences = CakeBudget(tau1, tau2).preference(obs)
    assert preferences.shape == ()
    same(preferences, torch.tensor(expected))


def test_cake_preference_is_always_a_number():
    single = observe(9, window=1)  # no variance
    assert CakeBudget().preference(single) == 0
    sharp = observe(9)
    sharp.keys = 1e4 * sharp.keys  # nearly no entropy, and many zeros
    for budget in (CakeBudget(), CakeBudget(tau1=0.01, tau2=0.01)):
        for obs in (sharp, observe(9)):
            preference = float(budget.preference(obs))
            assert math.isfinite(preference)
            assert preference >= 0


@pytest.mark.parametrize(
    ("floor", "budget", "pinned", "least"),
    [(0, 100, 0, 1), (0.25, 100, 0, 25), (0.25, 100, 32, 33), (0.1, 7, 0, 1), (1, 9, 3, 9),
     (0.25, 8, 20, 8)],
)  # fmt: skip
def test_cake_leaves_every_layer_its_floor_and_room_beside_pins(floor, budget, pinned, least):
    assert CakeBudget(floor=floor).least(budget, pinned) == least


# Ada-KV


def split_of(budget, scores, pinned, positions, slots):
    """Slots of each head by `budget.split`, of lists [n_k] of each; what lies behind is garbage."""
    longest = max(map(len, scores)) + 2

    def rows(each, garbage):
        parts = [torch.cat((x, x.new_full((longest - len(x),), garbage))) for x in each]
        return torch.stack(parts)[None]

    lengths = torch.tensor([[len(x) for x in scores]])
    budgets = budget.split(
        rows(scores, math.nan), rows(pinned, True), rows(positions, 1 << 30), lengths, slots
    )
    return budgets[0].tolist()


def apportioned(shares, total, most):
    """`apportion` of fractions, by its definition."""
    slots, open_, left = [0] * len(shares), set(range(len(shares))), min(total, sum(most))
    while open_:
        weights = {i: Fraction(shares[i]) for i in open_}
        if not any(weights.values()):
            weights = dict.fromkeys(open_, Fraction(1))
        exact = {i: left * weights[i] / sum(weights.values()) for i in open_}
        full = [i for i in open_ if exact[i] >= most[i]]
        for i in full:
            slots[i], left = most[i], left - most[i]
        open_ -= set(full)
        if not full:
            for i in open_:
                slots[i] = int(exact[i])
            rest = left - sum(slots[i] for i in open_)
            for i in sorted(open_, key=lambda i: (slots[i] - exact[i], i))[:rest]:
                slots[i] += 1
            break
    return slots


def adakv_by_loops(scores, pinned, positions, budget, safeguard):
    """Ada-KV's slots, as plain lists and fractions."""
    pins, lengths, f = [int(p.sum()) for p in pinned], list(map(len, scores)), Fraction(safeguard)
    left = budget * len(scores) - sum(pins)
    ranked = [
        (-math.inf if pin else x, position, -k)
        for k, (s, p, at) in enumerate(zip(scores, pinned, positions, strict=True))
        for x, pin, position in zip(s.tolist(), p.tolist(), at.tolist(), strict=True)
    ]
    best = sorted(ranked, reverse=True)[:left]
    sure = [max(pin, min(1, n)) for pin, n in zip(pins, lengths, strict=True)]
    shares = [
        max(0, (1 - f) * sum(-k == head for *_, k in best) + f * left / len(scores) - (s - pin))
        for head, (s, pin) in enumerate(zip(sure, pins, strict=True))
    ]
    most = [n - s for n, s in zip(lengths, sure, strict=True)]
    more = apportioned(shares, left - sum(sure) + sum(pins), most)
    return [s + m for s, m in zip(sure, more, strict=True)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    budget=st.integers(1, 40),
    safeguard=st.sampled_from(["0", "0.2", "0.125", "1"]),
    pins=st.integers(0, 6),
    ties=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_adakv_is_its_formula_and_shares_every_slot(lengths, budget, safeguard, pins, ties, seed):
    g = torch.Generator().manual_seed(seed)
    scores = [torch.randn(n, generator=g) for n in lengths]
    if ties:
        scores = [s.sign() for s in scores]
    pinned = [torch.arange(n) < min(pins, budget, n) for n in lengths]
    positions = [torch.randperm(n, generator=g) for n in lengths]
    split = split_of(AdaKV(float(safeguard)), scores, pinned, positions, budget)
    assert sum(split) == min(budget * len(lengths), sum(lengths))
    for slots, length, pin in zip(split, lengths, pinned, strict=True):
        assert max(1, int(pin.sum())) <= slots <= length
    assert split == adakv_by_loops(scores, pinned, positions, budget, safeguard)


@given(
    heads=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=9),
    total=st.integers(0, 200),
)
def test_rows_are_apportioned_by_the_definition(heads, total):
    shares, most = ([head[i] for head in heads] for i in range(2))
    tensors = [torch.tensor([x]) for x in (shares, [total], most)]
    expected = apportioned(shares, total, most)
    assert apportion(shares, total, most) == expected
    for by in apportion_rows, companions._apportion_on_device:
        assert by(*tensors)[0].tolist() == expected


def test_adakv_splits_each_sequence_as_if_it_were_alone():
    g = torch.Generator().manual_seed(3)
    scores, pinned = torch.randn(3, 4, 30, generator=g), torch.rand(3, 4, 30, generator=g) < 0.1
    positions, lengths = (
        torch.arange(30).expand(3, 4, 30),
        torch.randint(20, 31, (3, 4), generator=g),
    )
    given = scores, pinned, positions, lengths
    alone = [AdaKV().split(*(x[i : i + 1] for x in given), 14) for i in range(3)]
    assert torch.equal(AdaKV().split(*given, 14), torch.cat(alone))


def test_adakv_reads_no_number_on_a_gpu():
    """A CUDA graph captures it, which nothing may wait for."""
    scores = torch.empty(1, 4, 50, device="meta")  # where there is no number to be read
    positions = torch.arange(50, device="meta")
    lengths = torch.full((1, 4), 50, device="meta")
    kept = AdaKV().split(scores, scores > 1, positions, lengths, 20)
    assert (kept.shape, kept.dtype) == ((1, 4), torch.int64)


# Tables


@pytest.fixture
def table(tmp_path):
    def write(scores, **others):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(
            json.dumps({"model": "a-model", "kind": "heads", "scores": scores, **others})
        )
        return str(path)

    return write


@pytest.mark.parametrize("name", ["headkv", "duoattention", "criticalkv-headkv"])
def test_a_missing_table_says_how_to_make_one(name, tmp_path):
    """Listing and loading work without; the slots cannot be allotted."""
    command = "kvcap policies calibrate (headkv|duoattention) MODEL -f TEXT -o heads.json"
    with pytest.raises(PolicyError, match=f"none was given; make one with `{command}`, then give"):
        load_policy(name).allot(100, 2, 4)
    gone = str(tmp_path / "gone.json")
    with pytest.raises(PolicyError, match=r"gone.json' cannot be read \(No such file.*calibrate"):
        load_policy(name, table=gone).allot(100, 2, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads", "is not JSON"),
        ("\x80", "is not JSON"),
        ("[1, 2]", 'has no "scores"'),
        ('{"kind": "layers", "scores": [[1, 2], [1, 2]]}', 'has no "scores" of "kind" "heads"'),
        ('{"scores": []}', 'has no "scores"'),
        ('{"scores": [[1, 2], [1]]}', "rows of as many numbers each"),
        ('{"scores": [[1, "2"], [1, 2]]}', "rows of as many numbers each"),
        ('{"scores": [[1, true], [1, 2]]}', "rows of as many numbers each"),
        ('{"scores": [[1, -2], [1, 2]]}', "below 0 or not finite"),
        ('{"scores": [[1, NaN], [1, 2]]}', "below 0 or not finite"),
        ('{"scores": [[1, Infinity], [1, 2]]}', "below 0 or not finite"),
        ('{"model": "m", "scores": [[1, 2]]}', "made for m, 1 layers of 2 heads; this model has 2"),
        ('{"scores": [[1, 2, 3], [1, 2, 3]]}', "an unnamed model, 2 layers of 3 heads; .* 2 KV"),
        ('{"scores": [[1], [1]]}', "2 layers of 1 heads"),
        ('{"scores": [[], []]}', "2 layers of 0 heads"),
    ],
)
@pytest.mark.parametrize("name", ["headkv", "duoattention"])
def test_bad_tables_are_refused(name, text, message, tmp_path):
    path = tmp_path / "heads.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PolicyError, match=f"{name}: table=.*{message}.*make one with"):
        load_policy(name, table=str(path)).allot(100, 2, 2)


def test_a_changed_table_is_read_again(table):
    path = table([[1, 0]])
    headkv = HeadKV(path)
    first = headkv.allot([100], 2, 0)
    with open(path, "w") as file:
        json.dump({"scores": [[0, 1]]}, file)
    os.utime(path, (1, 1))
    assert headkv.allot([100], 2, 0) == [first[0][::-1]]


# HeadKV


@given(
    budgets=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    group=st.sampled_from([1, 2, 4]),
    pinned=st.integers(0, 310),
    beta=st.floats(1.01, 10),
    seed=st.integers(0, 10_000),
)
def test_headkv_by_its_formula(budgets, kv_heads, group, pinned, beta, seed, tmp_path_factory):
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(budgets), kv_heads * group, generator=g, dtype=torch.float64)
    path = tmp_path_factory.getbasetemp() / f"headkv-{seed}-{len(budgets)}-{kv_heads * group}.json"
    path.write_text(json.dumps({"scores": scores.tolist()}))
    heads = HeadKV(str(path), beta).allot(budgets, kv_heads, pinned)
    assert sum(map(sum, heads)) == kv_heads * sum(budgets)
    importance = scores.unflatten(1, (kv_heads, group)).mean(-1)
    bases = [max(0, budget - pinned) for budget in budgets]
    pool = sum(kv_heads * (base // beta) for base in bases)
    for layer, (budget, base) in enumerate(zip(budgets, bases, strict=True)):
        for head, slots in enumerate(heads[layer]):
            share = pool * float(importance[layer, head] / importance.sum())
            assert abs(slots - (budget - base // beta + share)) < 1
            assert slots >= (pinned + 1 if base else budget)


def test_headkv_composes_with_pyramid_layers(table):
    eviction = load_policy(
        "snapkv+pyramidkv+headkv", window=8, table=table([[1, 2], [3, 0], [0, 0]])
    )
    heads = eviction.allot(64, 3, 2)
    assert sum(map(sum, heads)) == 64 * 3 * 2
    assert heads[1][0] == max(max(layer) for layer in heads)
    eviction.check(64, 3, 2)
    with pytest.raises(PolicyError):
        load_policy("cake+cake+headkv")


# DuoAttention


@given(
    budgets=st.lists(st.integers(1, 600), min_size=1, max_size=12),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    retrieval=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    sinks=st.integers(0, 64),
    recents=st.integers(1, 256),
    pinned=st.integers(0, 64),
    seed=st.integers(0, 10_000),
)
def test_duoattention_shares_every_slot(
    budgets, kv_heads, retrieval, sinks, recents, pinned, seed, tmp_path_factory
):
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(budgets), kv_heads, generator=g, dtype=torch.float64)
    path = tmp_path_factory.getbasetemp() / f"duo-{seed}-{len(budgets)}-{kv_heads}.json"
    path.write_text(json.dumps({"scores": scores.tolist()}))
    duo = DuoAttention(str(path), retrieval, sinks, recents)
    heads = duo.allot(budgets, kv_heads, pinned)
    ranked = sorted(scores.flatten().tolist(), reverse=True)
    chosen = ranked[: int(retrieval * len(ranked) + 0.5)]
    for budget, row, slots in zip(budgets, scores.tolist(), heads, strict=True):
        assert sum(slots) == kv_heads * budget
        retrieves = [score in chosen for score in row]
        small = min(max(sinks + recents, pinned + 1), budget) if any(retrieves) else budget
        shared = [s for s, mine in zip(slots, retrieves, strict=True) if mine]
        assert all(s == small for s, mine in zip(slots, retrieves, strict=True) if not mine)
        assert not shared or (max(shared) - min(shared) <= 1 and min(shared) >= budget)


def at(layer: int, head: int, budget: int, **options):
    obs = observe(40, batch=1, kv_heads=1, budget=budget, gaps=False, **options)
    obs.layer, obs.first_head = layer, head
    return obs


def test_duoattention_gives_each_class_its_policy(table):
    """Streaming heads keep sinks and recents, also where both had to shrink."""
    path = table([[5, 1, 4, 1], [0, 0, 0, 0]])
    eviction = load_policy("duoattention", table=path, retrieval=0.25, sinks=4, recents=16)
    assert eviction.allot(24, 2, 2) == [[28, 20], [24, 24]]  # four query heads, two a group
    kept = {}
    for layer, head, budget in ((0, 1, 20), (1, 0, 24), (0, 1, 10), (0, 1, 1)):
        obs = at(layer, head, budget)
        gone = set(obs.positions.flatten()[eviction.select(obs, 40 - budget).flatten()].tolist())
        kept[layer, head, budget] = sorted(set(range(40)) - gone)
    assert kept[0, 1, 20] == [*range(4), *range(24, 40)]
    assert kept[1, 0, 24] == [*range(4), *range(20, 40)]  # no head retrieves here: all slots used
    assert kept[0, 1, 10] == [*range(2), *range(32, 40)]
    assert kept[0, 1, 1] == [39]
    retrieving = at(0, 0, 28)
    base = load_policy("keydiff")
    assert torch.equal(eviction.select(retrieving, 12), base.select(retrieving, 12))


def test_duoattention_keeps_room_for_what_is_pinned(table):
    duo = DuoAttention(table([[1, 0]]), sinks=4, recents=16)
    assert duo.allot([100], 2, 50) == [[149, 51]]


def test_duoattention_treats_equal_scores_by_place(table):
    duo = DuoAttention(table([[1, 1], [1, 1]]), sinks=1, recents=1)
    assert duo.allot([10, 10], 2, 0) == [[10, 10], [10, 10]]
    assert DuoAttention(duo.table, 0.25, 1, 1).allot([10, 10], 2, 0) == [[18, 2], [10, 10]]


def test_heads_are_allotted_before_they_are_looked_at():
    with pytest.raises(PolicyError, match="no slots were allotted by table='' yet"):
        load_policy("duoattention").score(at(0, 0, 10))
