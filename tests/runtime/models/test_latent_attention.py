"""Multi-head latent attention: slots hold the latent and the rope part, and all else is exact.

The reference reads the whole text at once by the model's own `expand_kv`, each token seeing what
was kept. Blocks of 6 tokens attend over latents, blocks of 24 over expanded slots.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import as_cache, in_turn
from families import MLA, OLD, config_of, model_of
from masked import POLICIES, compare, eviction_of, rotary_frequencies
from reference import rotate
from tools import distinct, runtime_of
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache

import kvcap
from kvcap.evals.measure import allocator_peak
from kvcap.export.decoder.spec import layout_for
from kvcap.policies import Observation
from kvcap.policies.base import Expansion, Logits
from kvcap.runtime.attention import latents
from kvcap.runtime.backends.pytorch import snapshot
from kvcap.runtime.backends.pytorch.cuda_graphs import why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import NotExportable, UnsupportedModel
from kvcap.runtime.models import trial
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.latents import expansion_of, latent_of
from kvcap.runtime.models.rope import Rotation
from kvcap.runtime.models.trial import try_model
from kvcap.runtime.planning.dry_run import rehearse_block
from kvcap.runtime.session.session import Session

if OLD:
    pytest.skip("this transformers caches no latents", allow_module_level=True)

ROTATED = 8  # r, of all configs


def rotate_last(x: Tensor, moves: Tensor, inv_freq: Tensor) -> Tensor:
    """A head's own keys or queries, whose last numbers the model rotates by halves."""
    return torch.cat((x[:, :-ROTATED], rotate(x[:, -ROTATED:], moves, inv_freq)), -1)


def rotate_last_neighbours(x: Tensor, moves: Tensor, inv_freq: Tensor) -> Tensor:
    """The same by neighbours, as DeepSeek V2."""
    turned = rotate(x[:, -ROTATED:], moves, inv_freq, interleaved=True)
    return torch.cat((x[:, :-ROTATED], turned), -1)


def compared(
    name: str, policy: str, positions: Any, block: int, budget: int = 14
) -> tuple[Tensor, Tensor]:
    """Logits under the cap, and those of full attention over what was kept."""
    shape = ModelShape.of(config_of(name))
    cache = kvcap.BudgetCache(
        config_of(name), budget, block, eviction_of(policy), positions=positions
    )
    inv_freq = rotary_frequencies(model_of(name, "eager"))
    turning = dict.fromkeys(shape.capped, inv_freq)
    rotation = rotate_last_neighbours if name.startswith("deepseek_v2") else rotate_last
    comparison = compare(lambda a: model_of(name, a), cache, distinct(60), block, rotation, turning)
    assert cache.held == budget
    return comparison


# Exactness ----------------------------------------------------------------------------------------


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize(("name", "positions", "block", "policy"), in_turn(
    [(name, positions, block) for name in MLA for positions in ("compact", "true")
     for block in (6, 24)], POLICIES, 2,
))  # fmt: skip
def test_logits_are_those_of_the_models_attention_over_what_was_kept(
    name, policy, positions, block
):
    latent = latent_of(config_of(name))
    assert latent.expands(block, 14 + block) == (block == 24)
    logits, expected = compared(name, policy, positions, block)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", MLA)
def test_a_rope_part_moves_as_the_model_would_have_read_it(name):
    """By kvcap's frequencies and layout; logits below the budget cannot tell."""
    shape = ModelShape.of(config_of(name))
    model, near, far = model_of(name, "eager"), *(DynamicCache(), DynamicCache())
    with torch.no_grad():
        model(distinct(12), **as_cache(near))
        model(distinct(12), **as_cache(far), position_ids=37 + torch.arange(12)[None])
    for index in shape.capped:
        rope = shape.layers[index].rope
        here, there = (
            torch.cat((c.layers[index].values, c.layers[index].keys), -1) for c in (near, far)
        )
        table = Rotation(rope.inv_freq, 38, "cpu", interleaved=rope.interleaved)
        back = table.back(there, torch.full(there.shape[:3], 37, dtype=torch.int32))
        if index == 0:  # further up latents differ by the rounding of the layers below
            assert torch.equal(back[..., ROTATED:], here[..., ROTATED:])
        assert (back - here).abs().max() <= 1e-5 * here.abs().max()


def test_both_ways_to_attend_are_the_formula():
    """Softmax over `[k_rot, W_uk c]` of every head, times `W_uv c`, in float64."""
    g = torch.Generator().manual_seed(2)
    heads, rank, nope, value, length, n = 3, 11, 7, 5, 4, 9
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.double)  # noqa: E731
    expansion = Expansion(draw(heads, nope, rank), draw(heads, value, rank), 6)
    query, slots = draw(2, heads, length, 6 + nope), draw(2, 1, n, 6 + rank)
    expected = torch.zeros(2, heads, length, value, dtype=torch.double)
    for b in range(2):
        for h in range(heads):
            for t in range(length):
                seen = slots[b, 0, : n - length + t + 1]
                keys = torch.stack([torch.cat((s[:6], expansion.keys[h] @ s[6:])) for s in seen])
                weights = (keys @ query[b, h, t] * 0.3).softmax(0)
                expected[b, h, t] = weights @ (seen[:, 6:] @ expansion.values[h].T)
    expanded = latents.attend_expanded(query, slots, expansion, Logits(0.3))
    taken = latents.absorbed(query, expansion)
    over = latents.attend_absorbed(taken, slots, expansion, Logits(0.3))
    torch.testing.assert_close(expanded, expected)
    torch.testing.assert_close(over, expected)


# The cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MLA)
def test_slots_hold_the_latent_and_the_rope_part_only(name):
    config, latent = config_of(name), latent_of(config_of(name))
    cache = kvcap.BudgetCache(config, 14, 6)
    BlockLoop(model_of(name), cache).prefill(distinct(60))
    plan = kvcap.MemoryPlan.of(config, budget_tokens=14, block_size=6, dtype=torch.float32)
    assert plan.cache_bytes == cache.nbytes
    assert plan.keys_values == 2 * (14 + 6) * latent.slot * 4
    assert plan.token_bytes == 2 * latent.slot * 4
    assert "latents" in plan.layers
    segment = cache.capped_layers[0].segments[0]
    assert segment.keys.shape == (1, 1, 14, latent.slot)
    assert segment.values.shape == (1, 1, 14, latent.rank)
    assert torch.equal(segment.values, segment.keys[..., ROTATED:])


@pytest.mark.parametrize("policy", ["snapkv", "snapkv+adakv"])
@pytest.mark.parametrize("block", [6, 24])
def test_a_batch_is_its_sequences(policy, block):
    model, ids = model_of("deepseek_v3"), torch.cat((distinct(54), distinct(60)[:, 6:]))
    eviction = kvcap.load_policy(policy, window=4, kernel=3, pool="avg")

    def read(rows: Tensor) -> Tensor:
        loop = BlockLoop(model, kvcap.BudgetCache(model.config, 14, block, eviction))
        return loop.prefill(rows)

    separate = torch.cat([read(ids[:1]), read(ids[1:])])
    torch.testing.assert_close(read(ids), separate, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("policy", "block"), in_turn(sorted(kvcap.policies.policies()), [6, 24]))
def test_every_policy_runs_or_is_refused_by_name(policy, block):
    """Each sees an attention of one KV head, whose keys are slots and whose values are latents."""
    recipe = kvcap.policies.policies()[policy]
    config = config_of("youtu")
    try:
        cache = kvcap.BudgetCache(config, 40, block, kvcap.load_policy(policy))
    except kvcap.PolicyError:
        pytest.skip("it pins more than 40 slots")
    except kvcap.KvcapError as error:
        assert "corrector" in recipe.parts
        assert "hold latents" in str(error)  # noqa: PT017
        return
    if not cache.eviction.policy.evicts:
        return
    logits = BlockLoop(model_of("youtu"), cache).prefill(distinct(88))
    assert logits.isfinite().all()
    assert cache.held == 40


def test_criticalkv_reads_the_heads_own_values():
    """`‖v_j W_O‖₁` of the values that latents expand to, and of no latents."""
    model = model_of("deepseek_v3")
    eviction = kvcap.load_policy("snapkv+criticalkv", window=4, kernel=3, pool="avg")
    cache = kvcap.BudgetCache(model.config, 40, 6, eviction)
    BlockLoop(model, cache).prefill(distinct(30))
    for layer, block in zip(cache.capped_layers, model.model.layers, strict=True):
        slots, module = layer.segments[0].keys, block.self_attn
        with torch.no_grad():
            values = module.expand_kv(slots[..., ROTATED:], slots[..., :ROTATED])[1]
            heads = module.o_proj.weight.T.unflatten(0, (4, -1))  # [H, v, hidden]
            norms = (values[0] @ heads).abs().sum(-1).mean(0)
        torch.testing.assert_close(layer.segments[0].aux("output_norm")[0, 0], norms)


def test_a_session_of_before_an_option_goes_on_exactly(tmp_path, monkeypatch):
    """As saved by a version that did not know the option yet."""
    runtime, ids = runtime_of(model_of("youtu"), "keydiff"), distinct(70)
    session = runtime.session()
    session.loop.prefill(ids[:, :60])
    known = snapshot.parts

    def older(eviction: kvcap.Eviction) -> dict[str, Any]:
        parts = known(eviction)
        parts["policy"][1].pop("expand")
        return parts

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "parts", older)
        session.save(tmp_path / "s")
    loaded = Session.load(runtime, tmp_path / "s")
    for each in ids[:, 60:].split(1, 1):
        assert torch.equal(loaded.loop.prefill(each), session.loop.prefill(each))


# Refusals -----------------------------------------------------------------------------------------


def test_the_block_stands_in_for_no_other_tensor():
    class Layer:
        taken_back = 0

        def take_back(self) -> None:
            self.taken_back += 1

    layer, tensor = Layer(), torch.ones(1, 1, 3, 4)
    block = latents.LatentBlock(tensor, layer)
    shaped = block.view(1, 3, 2, 2).transpose(1, 2)
    assert shaped.kvcap_layer is layer
    assert nn.Linear(4, 6)(block).shape == (1, 1, 3, 6)
    assert [x.shape[-1] for x in torch.split(block, [1, 3], dim=-1)] == [1, 3]
    uses = (
        lambda: tensor @ block,
        lambda: torch.cat((tensor, block)),
        lambda: block.float(),
        lambda: torch.nn.functional.scaled_dot_product_attention(tensor, block, block),
        lambda: tensor.copy_(block),
        lambda: torch.matmul(block, tensor.mT),
        lambda: block.mean(),
    )
    for use_it in uses:
        with pytest.raises(UnsupportedModel, match="knows of no slots"):
            use_it()
    assert layer.taken_back == len(uses)


def test_weights_that_cannot_be_read_are_refused():
    class Packed(nn.Linear):
        pass

    for broken in (Packed(28, 88, bias=False), nn.Linear(28, 88, bias=True)):
        model = model_of("deepseek_v3")
        model.model.layers[1].self_attn.kv_b_proj = broken
        cache = kvcap.BudgetCache(model.config, 14, 6)
        with pytest.raises(UnsupportedModel, match=r"kv_b_proj.*plain nn\.Linear"):
            BlockLoop(model, cache)
        with pytest.raises(UnsupportedModel, match=r"kv_b_proj.*plain nn\.Linear"):
            model(distinct(6), **as_cache(cache))


def test_what_cannot_run_is_refused_by_name():
    config, layers = config_of("youtu"), "layers 0 to 1 are multi-head latent attention"
    with pytest.raises(NotExportable, match=layers):
        layout_for(config, CacheSettings(14, 6, kvcap.load_policy("keydiff")))
    with pytest.raises(UnsupportedModel, match="without the corrector"):
        kvcap.BudgetCache(config, 14, 6, "calidrop")
    assert why_unsteady(kvcap.BudgetCache(config, 14, 6)) == "slots hold latents"


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "axk2"])
def test_sparse_attention_over_latents_is_refused(family):
    with pytest.raises(UnsupportedModel, match="sparse attention by an index"):
        ModelShape.of(AutoConfig.for_model(family))


def test_no_gradient_flows(tokens):
    model = model_of("deepseek_v3")
    cache = kvcap.BudgetCache(model.config, 14, 6)
    with pytest.raises(UnsupportedModel, match="keeps no gradients"):
        model(distinct(6), **as_cache(cache)).logits.sum().backward()
    model.requires_grad_(False)  # but for the latents
    model.model.layers[1].self_attn.kv_a_proj_with_mqa.requires_grad_(True)
    cache.reset()
    with pytest.raises(UnsupportedModel, match="keeps no gradients"):
        model(distinct(6), **as_cache(cache)).logits.sum().backward()


# What a trial shows -------------------------------------------------------------------------------


def test_a_trial_sees_a_wrong_expansion(monkeypatch):
    wrong = lambda *given: (e := expansion_of(*given))._replace(values=e.values.roll(1, 0))  # noqa: E731
    monkeypatch.setattr(trial, "expansion_of", wrong)
    config = config_of("youtu", hidden_size=48)  # which no other test tries
    assert "kvcap's attention gives other logits than its own" in try_model(config).obstacle


# Memory and kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [8, 64])
def test_a_dry_run_finds_the_allocators_peak(block):
    """Of either way: expanded keys and values, and none that fused attention makes in secret."""
    config, eviction = config_of("deepseek_v3", num_hidden_layers=1), eviction_of("keydiff")
    assert latent_of(config).expands(block, 400 + block) == (block == 64)
    planned = rehearse_block(config, CacheSettings(400, block, eviction), torch.float32)
    model, ids = model_of("deepseek_v3", num_hidden_layers=1), distinct(block)
    cache = kvcap.BudgetCache(config, 400, block, eviction).allocate(1, torch.float32, "cpu")
    loop = BlockLoop(model, cache)
    while cache.seen < 400 + 2 * block:
        loop.read(ids)
    # Torch's fused attention has buffers of its own, of some 64 KiB a thread, which are not seen.
    peak = allocator_peak(lambda: loop.read(ids))
    assert planned == pytest.approx(peak, rel=0.05, abs=64 << 10)


# KeyDiff's two scores -----------------------------------------------------------------------------


def test_keydiff_scores_the_expanded_keys_of_every_head():
    model = model_of("glm4_moe_lite")
    for expand in (False, True):
        cache = kvcap.BudgetCache(model.config, 30, 6, kvcap.load_policy("keydiff", expand=expand))
        BlockLoop(model, cache).prefill(distinct(30))
        layer, module = cache.capped_layers[0], model.model.layers[0].self_attn
        slots = layer.segments[0].keys
        keys = slots
        if expand:
            with torch.no_grad():
                keys = module.expand_kv(slots[..., ROTATED:], slots[..., :ROTATED])[0]
        expected = -torch.cosine_similarity(keys, keys.mean(2, keepdim=True), -1).mean(1)
        obs = Observation(
            keys=slots,
            values=slots[..., ROTATED:],
            positions=layer.segments[0].positions,
            num_tokens=30,
            budget=30,
            expansion=expansion_of(module, cache.layout.shape.latent),
        )
        with torch.no_grad():
            torch.testing.assert_close(cache.eviction.policy.score(obs)[:, 0], expected)
