"""Families whose RoPE rotates neighbours, and those without positions in their full layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import SIZES, as_cache, in_turn, small_policy
from families import NEIGHBOURS as FAMILIES
from reference import NAME, STEPS, Setting, run_reference
from tools import in_blocks, runtime_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvcap
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.models import config as models
from kvcap.runtime.models.config import INTERLEAVED, ModelShape
from kvcap.runtime.models.rope import Rope, Rotation, moved_by, rope_of, rotate, rotations
from kvcap.runtime.session.session import Session

NEW = [name for name in FAMILIES if name != "llama"]
TURNING = [name for name in NEW if name.split()[0] in INTERLEAVED and name != "cohere2"]
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("keydiff", {}),
    ("snapkv", {"window": 9, "kernel": 5, "pool": "avg"}),  # longer than the block
    ("h2o", {}),
    ("dropkv", {"window": 4, "kernel": 3, "pool": "avg"}),
    ("streaming_llm", {"sinks": 2}),
]


def tiny_config(name: str, **changes: Any) -> Any:
    family = name.split()[0]
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[name], **changes})


def tiny_model(name: str, attention: str = "kvcap", **changes: Any) -> Any:
    """A random model, as `conftest.tiny_model`."""
    config = tiny_config(name, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    for part, weight in model.named_parameters():
        mean, deviation = (1.0 if "norm" in part else 0.0, 0.1) if weight.dim() == 1 else (0, 0.15)
        torch.nn.init.normal_(weight, mean, deviation)
    return model.eval()


def distinct(length: int) -> Tensor:
    """Tokens [1, length], none twice: equal keys would tie."""
    return 3 + torch.randperm(56, generator=torch.Generator().manual_seed(1))[None, :length]


@contextmanager
def other_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The planted fault: halves rotate together where neighbours do, and the other way round."""
    families = tuple({*models.FAMILIES} - {*INTERLEAVED})
    with monkeypatch.context() as patch:
        patch.setattr(models, "INTERLEAVED", families)
        yield


# --- keys that are moved --------------------------------------------------------------------------


def moved_error(rope: Rope, keys: Tensor, later: Tensor) -> float:
    """How far keys read 37 positions later, moved back, are from those; of the largest number."""
    return float((moved_by(rope, later, -37) - keys).abs().max() / keys.abs().max())


def keys_at(model: Any, position: int) -> list[Tensor]:
    """Keys [1, K, 1, D] of every layer of one token read there: it attends to itself alone."""
    cache = DynamicCache()
    with torch.no_grad():
        model(
            torch.tensor([[7]]), position_ids=torch.tensor([[position]]), **as_cache(cache),
            cache_position=torch.tensor([0]),
        )  # fmt: skip
    return [layer.keys for layer in cache.layers]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_moved_back_is_the_one_read_there_and_by_the_other_layout_is_not(name):
    model = tiny_model(name, "eager")
    shape = ModelShape.of(model.config)
    ropes = 0
    for layer, keys, later in zip(shape.layers, keys_at(model, 5), keys_at(model, 42), strict=True):
        if layer.rope is None:
            assert layer.kind == "capped"
            torch.testing.assert_close(later, keys, rtol=1e-5, atol=1e-6)
            continue
        ropes += 1
        assert layer.rope.interleaved == (shape.family in INTERLEAVED)
        assert moved_error(layer.rope, keys, later) <= 1e-5
        other = replace(layer.rope, interleaved=not layer.rope.interleaved)
        assert moved_error(other, keys, later) > 0.1
    assert ropes == 2


@pytest.mark.parametrize("name", NEW)
def test_frequencies_are_the_models_own(name):
    model = tiny_model(name)
    rope = rope_of(model.config)
    torch.testing.assert_close(rope.inv_freq, model.model.rotary_emb.inv_freq)
    assert len(rope.inv_freq) == (4 if name.startswith("glm") else 8)


def test_what_no_table_moves_is_refused_by_name():
    with pytest.raises(ValueError, match="dynamic"):
        moved_by(Rope("dynamic", None), torch.zeros(1, 8), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("size", "rotated"), [(16, 16), (10, 6), (17, 12), (6, 2)])
def test_neighbours_rotate_by_the_plain_formula(size, rotated, dtype):
    """Whatever lies behind R, whatever the strides, one table row each or one for all."""
    frequencies = 100.0 ** -(torch.arange(0, rotated, 2) / rotated)
    x = torch.randn(2, 3, 9, size + 1).to(dtype)[:, :, 2:7, 1:]  # gaps, and an odd start
    shift = torch.randint(40, (2, 3, 5))
    expected = x.double().clone()
    for i, frequency in enumerate(frequencies.double().tolist()):
        cos, sin = (shift * frequency).cos(), (shift * frequency).sin()
        a, b = x[..., 2 * i].double(), x[..., 2 * i + 1].double()
        expected[..., 2 * i], expected[..., 2 * i + 1] = a * cos + b * sin, b * cos - a * sin
    close = (
        {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    rotation = Rotation(frequencies, 40, "cpu", interleaved=True)
    found = rotation.back(x, shift)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, **close)
    rope = Rope("default", frequencies, interleaved=True)
    torch.testing.assert_close(moved_by(rope, x, -shift), found)
    torch.testing.assert_close(moved_by(rope, found, shift), x, **close)
    one = rotation.back_by(x, rotation.rows([7]))
    torch.testing.assert_close(one, moved_by(rope, x, -7))
    each = rotation.back_by(x, rotation.rows(range(6)))
    torch.testing.assert_close(each, moved_by(rope, x, -torch.arange(6).view(2, 3, 1)))


def test_exported_graphs_rotate_the_same():
    """They have no complex numbers; what is traced is another expression of the same."""

    class Turned(torch.nn.Module):
        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            return rotate(x, rows, interleaved=True)

    x, rows = torch.randn(1, 2, 5, 10), rotations(torch.rand(4).double(), torch.arange(5))
    program = torch.export.export(Turned(), (x, rows))
    assert "complex" not in str(program.graph)
    torch.testing.assert_close(program.module()(x, rows), Turned()(x, rows))


# --- whole models past the budget -----------------------------------------------------------------


def run(model: Any, setting: Setting, ids: Tensor) -> tuple[Any, Tensor, Setting]:
    """A capped run; the tokens that it held after every pass are what the reference is to hold."""
    eviction = kvcap.load_policy(setting.policy, **setting.options).plain()
    cache = kvcap.BudgetCache(
        model.config, setting.budget, 6, eviction, positions=setting.positions
    )
    loop, logits = BlockLoop(model, cache), []
    chosen: dict[int, list[list[list[int]]]] = {i: [] for i in ModelShape.of(model.config).capped}
    for part in [*ids.split(6, 1), *STEPS]:
        logits.append(loop.read(part))
        for i, passes in chosen.items():
            passes.append(cache.layers[i].segments[0].positions[0].tolist())
    return cache, torch.cat(logits), replace(setting, chosen=chosen)


@pytest.mark.slow(keep=16)
@pytest.mark.parametrize(("name", "positions", "policy", "options"), in_turn(
    [(name, positions) for name in NEW for positions in ("compact", "true")], POLICIES, 2,
))  # fmt: skip
def test_logits_and_kept_sets_past_the_budget(name, policy, options, positions):
    setting, ids = Setting(policy, 12, positions, options), distinct(31)
    cache, logits, followed = run(tiny_model(name), setting, ids)
    model = tiny_model(name, NAME)
    if policy != "dropkv":  # the reference scores by itself
        reference, expected = run_reference(model, ids, 6, setting)
        for i in ModelShape.of(model.config).capped:
            held = cache.layers[i].segments[0].positions[0]
            assert [sorted(head.tolist()) for head in held] == reference.kept(i)
    else:
        _, expected = run_reference(model, ids, 6, followed)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["glm", "cohere", "llama"])
def test_the_other_layout_shows_in_logits(name, monkeypatch):
    setting, ids = Setting("streaming_llm", 12, "compact", {"sinks": 2}), distinct(31)
    _, expected = run_reference(tiny_model(name, NAME), ids, 6, setting)
    with other_layout(monkeypatch):
        _, logits, _ = run(tiny_model(name), setting, ids)
    assert (logits - expected).abs().max() > 1e-2
    _, right, _ = run(tiny_model(name), setting, ids)
    torch.testing.assert_close(right, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cohere2", "exaone4"])
def test_rope_where_a_layer_has_none_shows(name, monkeypatch):
    setting, ids = Setting("streaming_llm", 12, "compact", {"sinks": 2}), distinct(31)
    _, expected = run_reference(tiny_model(name, NAME), ids, 6, setting)
    monkeypatch.setattr(models, "layers_with_rope", lambda config, kinds: [True] * len(kinds))
    _, logits, _ = run(tiny_model(name), setting, ids)
    assert (logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("name", ["glm4", "cohere2"])
def test_evicted_tokens_that_are_attended_to(name, positions):
    """They are rotated as they come back from their store."""
    options, ids = {"window": 4, "kernel": 3, "pool": "avg"}, distinct(31)
    model = tiny_model(name)
    eviction = kvcap.load_policy("snapkv+calidrop", **options, theta1=1.0, calibration_size=1000)
    cache = kvcap.BudgetCache(model.config, 12, 6, eviction, positions=positions, sink_tokens=0)
    loop = BlockLoop(model, cache)
    logits = torch.cat([loop.read(part) for part in [*ids.split(6, 1), *STEPS]])
    setting = Setting("snapkv", 12, positions, options, recalls=True)
    _, expected = run_reference(tiny_model(name, NAME), ids, 6, setting)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", TURNING)
def test_heads_of_unequal_lengths(name):
    """Each is aligned by its own rotation: the first layer's keys stand where their rank is."""
    model, ids = tiny_model(name), distinct(50)
    cache = kvcap.BudgetCache(model.config, 16, 8, small_policy("adakv", model.config))
    BlockLoop(model, cache).prefill(ids)
    layer = cache.capped_layers[0]
    assert len(layer.segments) == 2
    stand_by_rank(model, layer, ids)


def stand_by_rank(model: Any, layer: Any, ids: Tensor) -> None:
    """The keys that the first layer attends to are those of the same tokens read at their ranks."""
    cache = DynamicCache()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        model(ids, position_ids=torch.zeros_like(ids), **as_cache(cache))
        model.set_attn_implementation("kvcap")
    raw, rope = cache.layers[0].keys[0], ModelShape.of(model.config).layers[0].rope
    for segment in layer.segments:
        seen = layer.storage.rotation.back(segment.keys, segment.aux("shift"))
        for k in range(segment.heads):
            times = segment.positions[0, k].long()
            expected = moved_by(rope, raw[segment.head + k, times], times.argsort().argsort())
            torch.testing.assert_close(seen[0, k], expected, rtol=1e-4, atol=1e-4)


# --- what surrounds a cache -----------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_logits_equal_the_uncapped_model_while_tokens_fit(name, tokens):
    ids = tokens(40)
    with torch.no_grad():
        expected = tiny_model(name, "eager")(ids).logits
    model = tiny_model(name)
    cache = kvcap.BudgetCache(model.config, 64, 7)
    found = in_blocks(model, cache, ids, 7)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NEW)
def test_the_plan_is_what_is_held(name, tokens):
    model = tiny_model(name)
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 16, 8, "keydiff"))
    plan = kvcap.MemoryPlan.of(
        model.config, budget_tokens=16, block_size=8, dtype=torch.float32,
        positions=loop.cache.layout.positions,
    )  # fmt: skip
    loop.prefill(tokens(64))  # whole blocks
    assert loop.cache.layout.positions == "compact"
    assert loop.cache.nbytes == plan.cache_bytes


@pytest.mark.parametrize("name", NEW)
def test_generate_equals_the_uncapped_model_below_the_budget(name, tokens):
    ids = tokens(30)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2,
               "attention_mask": torch.ones_like(ids)}  # fmt: skip
    expected = tiny_model(name, "sdpa").generate(ids, **as_cache(DynamicCache()), **options)
    model = tiny_model(name)
    cache = kvcap.BudgetCache(model.config, 64, 16)
    found = model.generate(ids, **as_cache(cache), prefill_chunk_size=16, **options)
    assert found.tolist() == expected.tolist()
    with kvcap.cap(model, 64, 16):
        assert model.generate(ids, **options).tolist() == expected.tolist()


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "h2o"])
@pytest.mark.parametrize("name", ["glm", "cohere", "cohere2", "exaone4", "ernie4_5_moe"])
def test_a_loaded_session_goes_on_exactly(name, policy, tokens, tmp_path):
    model, ids = tiny_model(name), tokens(80)
    runtime = runtime_of(model, policy)
    session = runtime.session(seed=1)
    session.loop.prefill(ids[:, :60])
    session.save(tmp_path / "s")
    loaded = Session.load(runtime, tmp_path / "s")
    for each in (ids[:, 60:73], *ids[:, 73:].split(1, 1)):
        assert torch.equal(loaded.loop.prefill(each), session.loop.prefill(each))


@pytest.mark.parametrize("name", ["glm", "cohere"])
def test_a_session_loaded_into_a_smaller_cache_rotates_what_its_table_cannot(name, tmp_path):
    model, ids = tiny_model(name), distinct(56)
    session = runtime_of(model, "keydiff", 48).session()
    session.loop.prefill(ids)
    session.save(tmp_path / "s")
    cache = Session.load(runtime_of(model, "keydiff", 6, block=2), tmp_path / "s").cache
    assert cache.held == 6
    stand_by_rank(model, cache.capped_layers[0], ids)
