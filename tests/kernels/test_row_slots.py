"""`RowSlots` beside `EagerSlots`: the same logits, and the same tokens kept, whatever rows hold.

Kernels run on CUDA where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import small_policy, tiny_model
from interpreted import DEVICE, pytestmark  # noqa: F401
from uncaptured import Uncaptured

import kvcap
from kvcap import kernels
from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.slots import EagerSlots
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.models.arguments import cache_argument

BUDGET, BLOCK, ROOM = 24, 8, 33
EVERY = [
    "keydiff", "keydiff-window", "snapkv", "tova", "h2o", "dropkv", "andpro", "obcache-h2o",
    "knorm", "streaming_llm", "random", "criticalkv", "pyramidkv", "headkv", "duoattention",
    "adakv", "criticalkv-adakv", "cake", "h2o+headkv", "dropkv+cake", "plain-lagkv",
]  # fmt: skip


def tokens(count, batch, seed=0):
    """Ids that repeat in no sequence: keys that are alike would score alike."""
    g = torch.Generator().manual_seed(seed)
    return torch.stack([3 + torch.randperm(120, generator=g)[:count] for _ in range(batch)])


def cache_of(model, policy, positions, batch, choice, kind=None):
    """An allocated cache with `RowSlots` ('triton') or `EagerSlots` ('eager')."""
    if policy == "plain-lagkv":  # without sinks of its own, as by default
        return made(model, kvcap.load_policy("lagkv", lag=4), positions, batch, choice, kind)
    base, _, heads = policy.partition("+")
    eviction = small_policy(heads or base, model.config)
    if heads:
        eviction = replace(eviction, policy=small_policy(base, model.config).policy)
    return made(model, eviction, positions, batch, choice, kind)


def made(model, eviction, positions, batch, choice, kind):
    with kernels.use(choice):
        cache = kvcap.BudgetCache(
            model.config, BUDGET, BLOCK, eviction, positions=positions, kv_dtype=kind
        )
        cache.allocate(batch, torch.float32, DEVICE)
    assert cache.by_rows == (choice == "triton")
    return cache


def model_of(policy, **changes):
    layers = 3 if "cake" in policy else 1
    return tiny_model("llama", num_hidden_layers=layers, vocab_size=130, **changes).to(DEVICE)


def kept(cache):
    """The tokens of every row, and how many slots it may have."""
    segments = [s for layer in cache.capped_layers for s in layer.segments]
    rows = [sorted(row.tolist()) for s in segments for b in s.positions for row in b]
    return rows, [s.budget for s in segments for _ in range(s.batch * s.heads)]


def replayed(loop, ids, length):
    """Read ids [B, T] as a CUDA graph of `length` does: by what the device knows, host apart."""
    cache, new = loop.cache, ids.shape[1]
    blocks = cuda_graphs.blocks_of(cache, length)
    with cache.only_captured(), cache.passing(ForwardContext(7, blocks=blocks)) as current:
        current.bind_token_counter(torch.tensor(cache.seen, device=DEVICE), BLOCK)
        count = None
        if length > 1 and blocks == 1:
            count = torch.tensor(new, dtype=torch.int32, device=DEVICE)
        part = -(-length // blocks)
        rows = current.rows = cache.row_pass(part, always=True, count=count)
        offsets = cache.offsets(torch.arange(length, device=DEVICE))
        model = loop.graphs.decoder or loop.model
        logits = model(
            input_ids=torch.nn.functional.pad(ids, (0, length - new), value=5),
            position_ids=(rows.first(current.token_counter) + offsets).expand(len(ids), -1),
            **cache_argument(model, cache),
            use_cache=True,
            logits_to_keep=torch.tensor([new - 1], device=DEVICE),
        ).logits.flatten(0, 1)
    cache.advance(new)
    return logits


def conversation(policy, positions, batch, choice, graphs=False, kind=None):
    """Logits, and what is kept after a prompt that fills slots, tokens, pins, a drop and a prompt.

    Of the tokens read, some leave before others from then on.
    """
    model, ids = model_of(policy), tokens(64, batch).to(DEVICE)
    cache = cache_of(model, policy, positions, batch, choice, kind)
    with kernels.use(choice), torch.inference_mode():
        loop = BlockLoop(model, cache, graphs=False)
        if graphs:
            loop.graphs = Uncaptured(model, cache)
        fills_up = cache.eviction.policy.queries_observed is not None

        def read(start, stop):
            whole = 1 if stop - start == 1 else BLOCK
            if graphs and (fills_up or whole == stop - start):
                return replayed(loop, ids[:, start:stop], whole)
            return loop.read(ids[:, start:stop])

        stops = [*range(0, 41, BLOCK), 45, *range(46, 50)]
        logits = [read(a, b) for a, b in itertools.pairwise(stops)]
        cache.pin([(41, 43)])
        assert loop.drop([(46, 48)])
        cache.regions.add({"thoughts": [(43, 46)], "system prompt and tools": [(0, 36)]})
        stops = [49, 50, 56, 64]
        logits += [read(a, b) for a, b in itertools.pairwise(stops)]
    return torch.stack(logits), kept(cache)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("policy", "positions", "batch", "graphs"),
    [(name, ("compact", "true", "auto")[i % 3], 1 + i % 2, graphs)
     for i, name in enumerate(EVERY) for graphs in (False, True)],
)  # fmt: skip
def test_rows_keep_what_the_eager_engine_keeps(policy, positions, batch, graphs):
    expected, mine = conversation(policy, positions, batch, "eager")
    logits, its = conversation(policy, positions, batch, "triton", graphs)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert its == mine


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("kind", "policy", "positions", "batch"),
    [
        ("int8", "keydiff", "compact", 2),
        ("int8", "h2o", "auto", 1),
        ("int8", "criticalkv", "true", 1),
        ("int8-int4", "adakv", "true", 2),
        ("int8-int4", "plain-lagkv", "compact", 1),
        ("int4", "snapkv", "compact", 2),
        ("int4", "cake", "compact", 1),
    ],
)
def test_rows_of_fewer_bits_keep_what_the_eager_engine_keeps(
    kind, policy, positions, batch, graphs
):
    expected, mine = conversation(policy, positions, batch, "eager", kind=kind)
    logits, its = conversation(policy, positions, batch, "triton", graphs, kind)
    # A number between two steps may become either of them.
    torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2)
    assert its == mine


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", ["keydiff", "adakv", "cake"])
@pytest.mark.parametrize("positions", ["compact", "true"])
def test_passes_that_transformers_makes_by_itself_have_rows_too(policy, positions):
    model, ids, outcomes = model_of(policy), tokens(50, 2).to(DEVICE), []
    for choice in ("eager", "triton"):
        cache = cache_of(model, policy, positions, 2, choice)
        with kernels.use(choice), torch.no_grad():
            stops = [*range(0, 41, BLOCK), 45, 46, 47]
            logits = [
                model(ids[:, a:b], **cache_argument(model, cache), use_cache=True).logits[:, -1]
                for a, b in itertools.pairwise(stops)
            ]
        outcomes.append((torch.stack(logits), kept(cache)))
    torch.testing.assert_close(outcomes[1][0], outcomes[0][0], rtol=1e-4, atol=1e-4)
    assert outcomes[1][1] == outcomes[0][1]


@pytest.mark.parametrize("policy", ["keydiff", "h2o"])
def test_several_blocks_of_a_full_cache_in_one_pass_equal_passes_of_their_own(policy):
    model, ids, outcomes = model_of(policy), tokens(64, 1).to(DEVICE), []
    for several in (True, False):
        cache = cache_of(model, policy, "compact", 1, "triton")
        with kernels.use("triton"):
            loop = BlockLoop(model, cache, graphs=False)
            loop.prefill(ids[:, :ROOM])
            rest = ids[:, ROOM : ROOM + 3 * BLOCK]
            assert cuda_graphs.blocks_of(cache, rest.shape[1]) == 3
            logits = loop.read(rest) if several else loop.prefill(rest)
        outcomes.append((logits, kept(cache)))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-4, atol=1e-4)
    assert outcomes[0][1] == outcomes[1][1]


@pytest.mark.parametrize(("budget", "spans"), [
    (BUDGET, [(2 * i, 2 * i + 1) for i in range(2, 12)]),
    (64, [(10, 73)]),  # to which the first tokens yield
])  # fmt: skip
def test_what_is_pinned_between_two_passes_stays(budget, spans):
    """Pins alone change, which must reach the device without another change of its rows."""
    model, ids, held = model_of("keydiff"), tokens(110, 1).to(DEVICE), []
    for choice in ("eager", "triton"):
        with kernels.use(choice):
            cache = kvcap.BudgetCache(model.config, budget, BLOCK, "keydiff")
            loop = BlockLoop(model, cache.allocate(1, torch.float32, DEVICE), graphs=False)
            loop.prefill(ids[:, :budget])
            cache.pin(spans)
            loop.prefill(ids[:, budget:])
        assert cache.by_rows == (choice == "triton")
        held.append(kept(cache))
        pinned = {i for span in spans for i in range(*span)}
        assert all(pinned <= set(row) for row in held[-1][0])
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("family", "policy", "more"),
    [
        ("llama", "calidrop", {}),
        ("llama", "keydiff", {"evict_every": 2}),
        ("llama", "expected_attention", {}),
        ("gemma2", "keydiff", {}),
    ],
)
def test_what_no_kernels_cover_has_the_eager_engine(family, policy, more):
    model = tiny_model(family).to(DEVICE)
    with kernels.use("triton"):
        cache = kvcap.BudgetCache(model.config, 40, 8, small_policy(policy, model.config), **more)
        cache.allocate(1, torch.float32, DEVICE)
    assert not cache.by_rows
    assert all(isinstance(layer.engine, EagerSlots) for layer in cache.capped_layers)
