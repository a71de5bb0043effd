"""positions='auto': true until the trained window would be left, compact from then on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import as_cache, tiny_model
from families import longrope, model_of
from reference import NAME, Setting, run_reference
from tools import distinct, greedy
from torch import Tensor

import kvcap
from kvcap import cli
from kvcap.evals.measure import allocator_peak
from kvcap.runtime.backends.onnxruntime.runtime import PolicyRequest, check_policy
from kvcap.runtime.backends.pytorch.cuda_graphs import BlockGraphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache import layout
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.errors import (
    BlockTooLarge,
    KvcapError,
    MemoryCapExceeded,
    NotExportable,
    SessionBroken,
    UnsupportedModel,
)
from kvcap.runtime.models.rope import Rotation

WINDOW = 21  # within the block of tokens 18 to 23, which is the first that is read compactly
BLOCK = 6


def text(length: int = 31) -> Tensor:
    return distinct(length, of=50, seed=2)


def auto(model: Any, policy: Any = "keydiff", budget: int = 12, **more: Any) -> BlockLoop:
    eviction = policy if isinstance(policy, kvcap.Eviction) else kvcap.load_policy(policy)
    more = {"positions": "auto", **more}
    return BlockLoop(model, BudgetCache(model.config, budget, BLOCK, eviction, **more))


def model_with_window(family: str = "llama", attention: str = "kvcap", **changes: Any) -> Any:
    return tiny_model(family, attention, max_position_embeddings=WINDOW, **changes)


# Exactness ----------------------------------------------------------------------------------------


def logits_of(model: Any, ids: Tensor, **more: Any) -> Tensor:
    loop = auto(model, **more)
    return torch.cat([loop.read(part) for part in ids.split(BLOCK, 1)])


@pytest.mark.parametrize("kind", ["int8", "int8-int4"])
def test_quantised_slots(kind):
    """To the bit before the change; after it as near to exact ones as where all is compact."""
    model, ids = model_with_window(), text()
    newest = kvcap.load_policy("streaming_llm", sinks=2)
    logits, exact = (logits_of(model, ids, policy=newest, kv_dtype=k) for k in (kind, None))
    true, compact = (
        logits_of(model, ids, policy=newest, kv_dtype=kind, positions=mode)
        for mode in ("true", "compact")
    )
    plain = logits_of(model, ids, policy=newest, positions="compact")
    assert torch.equal(logits[:3], true[:3])
    difference, usual = (logits - exact)[3:].abs().max(), (compact - plain)[3:].abs().max()
    assert 0 < difference <= 3 * usual
    assert (true - exact)[3:].abs().max() > 2 * difference  # it did change


@pytest.mark.parametrize("positions", ["auto", "compact", "true"])
def test_in_generation_by_transformers(positions):
    """generate() counts true positions by itself, and kvcap.cap reads blocks of its own."""
    model, ids = model_with_window(), text(13)  # whose last block is a token
    loop = auto(model, positions=positions)
    token = loop.prefill(ids).argmax(-1)
    expected = [int(token)]
    for _ in range(15):
        token = loop.read(token[:, None]).argmax(-1)
        expected.append(int(token))
    options = greedy(ids, 16)
    cache = BudgetCache(model.config, 12, BLOCK, "keydiff", positions=positions)
    got = model.generate(ids, **as_cache(cache), prefill_chunk_size=BLOCK, **options)
    assert got[0, 13:].tolist() == expected
    assert cache.allocation.compact == (positions != "true")
    mode = {"auto": "auto (compact now)"}.get(positions, positions)
    assert f"{mode} positions" in repr(cache)
    other = model_with_window("llama", "sdpa")
    with kvcap.cap(other, 12, BLOCK, "keydiff", positions=positions) as capped:
        got = other.generate(ids, **options)
        assert got[0, 13:].tolist() == expected
        mode = {"auto": "auto (true now)"}.get(positions, positions)
        assert f"{mode} positions" in repr(capped._make())


def test_a_block_that_is_refused_changes_nothing():
    model, ids = model_with_window(), text()
    cache = BudgetCache(model.config, 12, BLOCK, positions="auto")
    with torch.no_grad():
        for part in ids[:, :18].split(BLOCK, 1):
            model(part, **as_cache(cache))
        with pytest.raises(BlockTooLarge):
            model(ids[:, 18:], **as_cache(cache))
        assert not cache.allocation.compact
        model(ids[:, 18:21], **as_cache(cache))
        assert not cache.allocation.compact  # up to the window
        model(ids[:, 21:22], **as_cache(cache))
    assert cache.allocation.compact


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError("no more")], ids=str)
def test_a_change_that_fails_half_way_is_no_state_to_go_on_from(error, monkeypatch):
    model, ids = model_with_window(), text()
    loop, calls = auto(model), []
    loop.prefill(ids[:, :18])
    moved = Rotation.moved

    def fails(self: Rotation, x: Tensor, by: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:  # in the second layer
            raise error
        return moved(self, x, by)

    monkeypatch.setattr(Rotation, "moved", fails)
    if isinstance(error, MemoryError):
        with pytest.raises(MemoryCapExceeded, match="forgotten"):
            loop.read(ids[:, 18:24])
        assert loop.cache.seen == 0
    else:
        with pytest.raises(RuntimeError, match="broken"):
            loop.read(ids[:, 18:24])
        with pytest.raises(SessionBroken):
            loop.read(ids[:, 18:24])
        loop.cache.reset()
    fresh = auto(model)
    for start in range(0, 30, BLOCK):
        part = ids[:, start : start + BLOCK]
        assert torch.equal(loop.read(part), fresh.read(part))


# Sizes --------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", ["snapkv", "criticalkv"])
def test_plan_and_workspace(policy):
    """Buffers of either kind are counted; the change takes no more than a block does."""
    sizes = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32}
    model = tiny_model("llama", max_position_embeddings=400, **sizes)
    given = {"policy": policy, "budget_tokens": 120, "block_size": 40, "rehearse": True}
    plans = {
        mode: kvcap.MemoryPlan.of(model.config, positions=mode, dtype=torch.float32, **given)
        for mode in ("auto", "compact")
    }
    assert plans["auto"].cache_bytes == plans["compact"].cache_bytes
    assert plans["auto"].positions == "auto"
    cache = BudgetCache(model.config, 120, 40, policy, positions="auto")
    loop = BlockLoop(model, cache.allocate(1, torch.float32, "cpu"))
    assert cache.nbytes == plans["auto"].cache_bytes
    loop.prefill(torch.randint(3, 90, (1, 400)))
    assert not cache.allocation.compact
    peak = allocator_peak(lambda: loop.read(torch.randint(3, 90, (1, 40))))
    assert cache.allocation.compact
    assert cache.nbytes == plans["auto"].cache_bytes
    assert peak <= 1.05 * plans["auto"].workspace


# CUDA graphs, without a GPU -----------------------------------------------------------------------


def test_graphs_of_true_positions_are_not_replayed_after_the_change():
    model, ids = tiny_model("llama", max_position_embeddings=60), text()
    loop = auto(model)
    graphs = BlockGraphs(model, loop.cache)
    kinds = []
    for start in range(0, 30, BLOCK):
        part = ids[:, start : start + BLOCK]
        kinds.append(graphs._kind(part[:, :1], True))
        loop.read(part)
    assert {kind.compact for kind in kinds if kind} == {False}
    assert graphs.pass_length(1, 1000) is None  # several blocks would leave the window
    assert loop.cache.leaves_window(31)
    steady = graphs._kind(ids[:, :BLOCK], True)
    loop.cache.become_compact()
    assert graphs._kind(ids[:, :BLOCK], True) == steady._replace(compact=True)
    assert graphs.pass_length(1, 1000) == 510
    loop.cache.reset()
    loop.prefill(ids[:, :30])
    assert graphs._kind(ids[:, :BLOCK], True) == steady


# Commands, defaults and refusals ------------------------------------------------------------------


def test_the_default_is_one_constant(monkeypatch):
    """Keys of 4 bits keep to one way, as do exported graphs."""
    config = model_with_window().config
    assert BudgetCache(config, 12, BLOCK).layout.positions == layout.DEFAULT_POSITIONS == "compact"
    monkeypatch.setattr(layout, "DEFAULT_POSITIONS", "auto")
    assert BudgetCache(config, 12, BLOCK).layout.positions == "auto"
    assert BudgetCache(config, 12, BLOCK, kv_dtype="int8").layout.positions == "auto"
    assert BudgetCache(config, 12, BLOCK, kv_dtype="int4").layout.positions == "compact"
    with pytest.raises(UnsupportedModel, match="'int4' holds keys without their rotation"):
        BudgetCache(config, 12, BLOCK, positions="auto", kv_dtype="int4")
    given = {"budget_tokens": 12, "block_size": BLOCK}
    assert kvcap.MemoryPlan.of(config, **given).positions == "auto"
    assert kvcap.MemoryPlan.of(config, **given, kv_dtype="int4").positions == "compact"
    assert layout.default_positions(BudgetCache(config).layout.shape, unchanging=True) == "compact"


def test_longrope_changes_where_its_short_factors_end():
    changes = longrope(WINDOW)
    model = model_of("phi3", max_position_embeddings=400, **changes)
    loop, ids = auto(model, sink_tokens=0), text()
    assert loop.cache.layout.shape.trained_window == WINDOW
    setting = Setting("keydiff", 12, "auto", trained=WINDOW)
    logits = [loop.read(part) for part in ids.split(BLOCK, 1)]
    other = model_of("phi3", NAME, max_position_embeddings=400, **changes)
    _, expected = run_reference(other, ids[:, :18], BLOCK, setting)
    torch.testing.assert_close(torch.cat(logits[:3]), expected[:3], rtol=1e-4, atol=1e-4)
    assert torch.cat(logits).isfinite().all()
    for mode in ("auto", "compact"):  # transformers would take the long factors
        cache = BudgetCache(model.config, 12, BLOCK, positions=mode)
        model(ids[:, :BLOCK], **as_cache(cache))
        for start in range(BLOCK, WINDOW, 3):
            model(ids[:, start : start + 3], **as_cache(cache))
        with pytest.raises(UnsupportedModel, match="longrope takes other frequencies"):
            model(ids[:, WINDOW : WINDOW + 1], **as_cache(cache))
        assert cache.seen == WINDOW
    with pytest.raises(KvcapError, match=f"'auto' are exact up to {WINDOW} tokens held"):
        BudgetCache(model.config, WINDOW, BLOCK, positions="auto")


def test_exported_decoders_refuse_it(capsys):
    command = ["generate", "pocket", "Hello!", "--weights", "int8", "--positions", "auto"]
    assert cli.run(command) == 2
    assert "an exported decoder has them of one kind" in capsys.readouterr().err
    facts = {"policy": {"name": "keydiff"}, "positions": "compact"}
    with pytest.raises(NotExportable, match="run the model by PyTorch"):
        check_policy(SimpleNamespace(facts=facts), PolicyRequest(), "auto")  # type: ignore[arg-type]
