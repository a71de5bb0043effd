"""Every family against full attention under a mask of what was kept, and its keys elsewhere."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models_page
import pytest
import torch
from click.testing import CliRunner
from conftest import as_cache, in_turn
from families import (
    ALL,
    ELSEWHERE,
    MLA,
    NEIGHBOURS,
    OLD,
    STATES,
    TRIED,
    config_of,
    longrope,
    model_of,
    model_type,
)
from masked import POLICIES, compare, eviction_of, rotary_frequencies
from reference import rotate
from tools import distinct, greedy, runtime_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvcap
from kvcap import pocket
from kvcap.runtime.attention import functions
from kvcap.runtime.attention.functions import attend
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.layout import usual_positions
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models import config as reading
from kvcap.runtime.models import trial
from kvcap.runtime.models.config import FAMILIES as SUPPORTED
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import Rotation, rope_of, with_one_rope
from kvcap.runtime.models.trial import small_copy, try_model
from kvcap.runtime.session.session import Session

NAMES = sorted((ALL | ELSEWHERE).keys() - MLA.keys())  # latents: test_latent_attention.py
WRAPPED = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}  # held by test_wrappers.py


def test_every_family_of_the_list_is_held_somewhere():
    assert set(SUPPORTED) <= {model_type(name) for name in ALL | ELSEWHERE} | WRAPPED


@pytest.mark.slow(keep=24, ci=40)
@pytest.mark.parametrize("family", NAMES)
def test_a_key_moves_as_the_model_would_have_read_it(family):
    """By kvcap's frequencies and layout, of every capped layer; logits alone cannot tell."""
    if OLD and family in STATES:
        pytest.skip("this transformers keeps no states in a cache")
    shape = ModelShape.of(config_of(family))
    near, far = keys_of(family, 0), keys_of(family, 37)
    for index in shape.capped:
        rope = shape.layers[index].rope
        if rope is None:
            assert torch.allclose(near[index], far[index], atol=1e-5)
        elif rope.inv_freq is not None:
            shift = torch.full(far[index].shape[:3], 37, dtype=torch.int32)
            table = Rotation(rope.inv_freq, 38, "cpu", interleaved=rope.interleaved)
            error = (table.back(far[index], shift) - near[index]).abs().max()
            assert error <= 1e-5 * near[index].abs().max()
        else:
            assert family == "hunyuan_v1_dense"  # normalises keys after it rotates them


def keys_of(family: str, start: int) -> list[Any]:
    """Keys of every layer of a text that begins at `start`."""
    model, ids = model_of(family, "eager"), distinct(12)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **as_cache(cache), position_ids=start + torch.arange(12)[None])
    return [getattr(layer, "keys", None) for layer in cache.layers]  # recurrent ones have none


@pytest.mark.slow(keep=12, ci=24)
@pytest.mark.parametrize(("family", "policy"), in_turn(
    sorted({**ALL, **ELSEWHERE}), ["keydiff", "snapkv", "h2o"]
))  # fmt: skip
def test_generation_and_sessions(family, policy, tokens, tmp_path):
    """Within the budget all is as uncapped; a saved session goes on to the bit past it."""
    if OLD and family in STATES | MLA:
        pytest.skip("this transformers keeps neither states nor latents in a cache")
    ids = distinct(20)
    options = greedy(ids, 8)
    expected = model_of(family, "eager").generate(ids, **options).tolist()
    stock = ["eager", "sdpa"] if type(model_of(family))._supports_sdpa else ["eager"]
    for attention in ("kvcap", *stock):
        model = model_of(family, attention)
        if attention == "kvcap":
            roomy = kvcap.BudgetCache(model.config, 40, 8)
            given = {**options, **as_cache(roomy), "prefill_chunk_size": 8}
            assert model.generate(ids, **given).tolist() == expected
            assert (roomy.seen, roomy.consistent) == (27, True)
        with kvcap.cap(model, 40, 8):
            assert model.generate(ids, **options).tolist() == expected
    model = model_of(family)
    positions = "compact" if ModelShape.of(model.config).moves_exactly else "true"
    runtime, ids = runtime_of(model, policy, positions=positions), tokens(80)
    session = runtime.session(seed=1)
    session.loop.prefill(ids[:, :60])
    session.save(tmp_path / "s")
    loaded = Session.load(runtime, tmp_path / "s")
    for part in (ids[:, 60:73], *ids[:, 73:].split(1, 1)):
        assert torch.equal(loaded.loop.prefill(part), session.loop.prefill(part))


# What is read by a trial ------------------------------------------------------------------------


@pytest.mark.slow(keep=20, ci=40)
@pytest.mark.parametrize(
    # Not Granite SWA, whose layers have a frequency each: a trial would have it true only. Nor
    # Zaya, a token of which takes one expert, where a trial's copy takes two.
    "family",
    sorted(
        {
            x
            for x in {**ALL, **NEIGHBOURS, **STATES, **MLA, "gpt_oss": 0}
            if model_type(x) in SUPPORTED
        }
        - {"zaya"}
    ),
)
def test_a_trial_finds_what_the_list_says(family, monkeypatch):
    if OLD and family in STATES | MLA:
        pytest.skip("this transformers keeps neither states nor latents in a cache")
    config = config_of(family)
    listed = ModelShape.of(config)
    monkeypatch.setattr(reading, "FAMILIES", ())
    shape = ModelShape.of(config)
    assert try_model(config).obstacle == ""
    assert shape.latent == listed.latent
    assert [layer.kind for layer in shape.layers] == [layer.kind for layer in listed.layers]
    assert [layer.states for layer in shape.layers] == [layer.states for layer in listed.layers]
    for i in listed.capped:
        mine, theirs = listed.layers[i].rope, shape.layers[i].rope
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.exact == theirs.exact
        assert mine is None or mine.interleaved == theirs.interleaved
        assert mine is None or mine.inv_freq is None or torch.equal(mine.inv_freq, theirs.inv_freq)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v32", r"layers 0 to 60 are sparse attention by an index of its own"),
        ("llama4_text", r"layers 0 to 2, 4 to 6.* are attention within chunks"),
        ("inkling_text", r"layers 0 to 4, .* are attention over a window and a recurrent state"),
        ("zamba", r"layers 0 to 75 are recurrent, but no gated delta net"),
        ("bloom", r"compute attention by code of their own"),
        ("gpt2", r"its positions are no rotation of keys"),
        ("openai-gpt", r"it keeps no keys and values"),
        ("diffllama", r"layers 0 to 15 attend to something else"),
        ("doge", r"a mask of its own"),
        ("bart", r"no causal language model of it"),
        ("bert", r"its positions are no rotation of keys|code of their own"),
        ("mamba", r"names no layers with attention heads"),
    ],
)
def test_refusals_name_the_layers_and_why(family, reason):
    if family not in CONFIG_MAPPING or (OLD and family in ("zamba", "diffllama")):
        pytest.skip("this transformers does not know it")
    config = AutoConfig.for_model(family).get_text_config(decoder=True)
    with pytest.raises(kvcap.KvcapError, match=reason) as refused:
        kvcap.BudgetCache(config, 24, 8)
    assert re.search(rf"{config.model_type}.*supported: .*llama, .* run", str(refused.value))


@pytest.mark.skipif(not OLD, reason="transformers 5.23 caches latents: test_latent_attention.py")
def test_latents_need_a_transformers_that_caches_them():
    reason = r"layers 0 to 60 are multi-head latent attention.* install 5\.23 or newer"
    with pytest.raises(kvcap.KvcapError, match=reason):
        kvcap.BudgetCache(AutoConfig.for_model("deepseek_v3"), 24, 8)


REASONS = (
    r"layers? \d.* are ", r"its last \d+ layers read", r"its layers have unequal heads",
    r"names no layers with attention heads", r"no causal language model of it",
    r"its layers compute attention by code of their own", r"attend to something else",
    r"its positions are no rotation of keys", r"it keeps no keys and values", r"a mask of its own",
    r"kvcap's attention does not take \w+", r"its config tells of \d+ KV heads",
    r"cannot be made small enough", r"its keys and values have different sizes",
    r"no layer attends to all tokens",
)  # fmt: skip
UNTRIED = {  # what transformers makes of a small copy of these, or of their own default config
    "bamba", "beam", "codegen", "cohere_compass_text", "dbrx", "ernie4_5_moe", "gpt_neo", "gptj",
    "lfm2_moe", "mpt", "reformer", "roberta-prelayernorm", "xlm-roberta-xl", "xlnet", "xmod",
    "dory",  # its layers run in loops, of which some attend past the cache
}  # fmt: skip


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_model_type_of_transformers_runs_or_is_refused_with_its_reason(model_type):
    if OLD:
        pytest.skip("the reasons are those of the newest transformers")
    try:
        config = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    except Exception:
        pytest.skip("transformers cannot make its default config")
    try:
        ModelShape.of(config)
    except UnsupportedModel as error:
        if not any(re.search(reason, str(error)) for reason in REASONS):
            assert model_type in UNTRIED, error  # noqa: PT017
        return
    if config.model_type in SUPPORTED or config.model_type in TRIED:
        return  # the tests above run it
    small = small_copy(type(config), config.to_dict())
    loop = BlockLoop(
        AutoModelForCausalLM.from_config(small, attn_implementation="kvcap", dtype=torch.float32),
        kvcap.BudgetCache(small, 14, 6),
    )
    assert loop.prefill(distinct(44)).isfinite().all()
    assert loop.cache.held == 14


def test_a_trial_sees_attention_that_is_not_the_models(monkeypatch):
    """In the copy that runs with kvcap's attention, and in no other."""

    def wrong(*given: Any, **options: Any) -> torch.Tensor:
        return 1.1 * attend(*given, **options)

    monkeypatch.setattr(functions, "attend", wrong)
    monkeypatch.setattr(trial, "attend", wrong)
    tried = try_model(config_of("llama", attention_bias=True))  # which no other test tries
    assert "kvcap's attention gives other logits than its own" in tried.obstacle


def test_a_config_of_other_heads_is_found_out(tokens):
    """GPT-NeoX has no grouped heads, whatever its config is given."""
    config = config_of("gpt_neox", num_key_value_heads=2)
    with pytest.raises(kvcap.KvcapError, match=r"2 KV heads of size 16.* have keys .* 4 of 16"):
        kvcap.BudgetCache(config, 24, 8)
    cache = kvcap.BudgetCache(config_of("llama", num_key_value_heads=1), 24, 8)
    with pytest.raises(kvcap.KvcapError, match="1 KV heads of size 16, and the model's keys are 2"):
        model_of("llama", "kvcap")(tokens(8), **as_cache(cache))
    assert cache.seen == 0


def test_a_copy_too_large_to_be_tried_is_not_made():
    config = AutoConfig.for_model("gpt_neox", rotary_pct=0.25)
    config.hidden_size_unknown_to_all = 1
    assert small_copy(type(config), config.to_dict()).hidden_size == 64
    if not OLD:
        large = AutoConfig.for_model("phi4_multimodal")
        with pytest.raises(kvcap.KvcapError, match="cannot be made small enough"):
            ModelShape.of(large)


# What is told of a model ------------------------------------------------------------------------


def test_the_page_of_models_is_what_the_tests_hold():
    if not {model_type(name) for name in ALL | ELSEWHERE} <= set(CONFIG_MAPPING):
        pytest.skip("the page is of the newest transformers")
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    assert page == models_page.page(), "run scripts/list-models"


def test_a_plan_says_what_the_layers_hold():
    from kvcap.cli import application

    text = CliRunner().invoke(application(), ["plan", "pocket", "--budget-tokens", "64"]).output
    assert "layers: 6 capped (RoPE default); positions: compact, true or auto" in text
    assert "exported, with ONNX Runtime: yes" in text
    plan = kvcap.MemoryPlan.of(config_of("afmoe"), budget_tokens=14, block_size=6)
    assert plan.layers == "2 capped (no positions), 2 over a window of their own"
    assert plan.not_exportable == "every token chooses among experts"
    sliding = kvcap.MemoryPlan.of(config_of("cwm"), budget_tokens=14, block_size=6)
    assert sliding.not_exportable == ""
    hunyuan = config_of("hunyuan_v1_dense")
    with pytest.warns(UserWarning, match="is not the same key rotated"):
        moved = kvcap.MemoryPlan.of(hunyuan, budget_tokens=14, block_size=6)
    assert moved.position_modes.startswith("true only (RoPE of type default: a key")


# Longrope ---------------------------------------------------------------------------------------


def long_model(attention: str = "kvcap") -> Any:
    return model_of("phi3", attention, **longrope(64), vocab_size=2560)  # of the built-in model


@pytest.mark.parametrize("policy", POLICIES)
def test_longrope_is_compact_while_what_is_held_fits(policy):
    """The text is longer than the trained length; every position stays below it."""
    ids = torch.cat((distinct(44), distinct(40) % 89 + 3), 1)
    config = long_model().config
    cache = kvcap.BudgetCache(config, 14, 6, eviction_of(policy))
    assert cache.layout.positions == "compact"
    rotary = rotary_frequencies(long_model("eager"))
    # The reference reads true positions, which would take the long factors: it counts from 0 to
    # less than 64 in the text's first part only.
    logits, expected = compare(long_model, cache, ids[:, :60], 6, rotate, {0: rotary, 1: rotary})
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_longrope_beyond_its_short_factors():
    config = long_model().config
    for budget, block in ((60, 8), (60, 128)):  # the latter fits no budget
        with pytest.raises(kvcap.KvcapError, match=r"exact up to 64 tokens held.*above 64$"):
            kvcap.BudgetCache(config, budget, block, positions="compact")
    assert kvcap.BudgetCache(config, 60, 8).layout.positions == "true"
    with pytest.warns(UserWarning, match="keys move exactly up to 64 tokens held"):
        plan = kvcap.MemoryPlan.of(config, budget_tokens=60, block_size=8)
    assert plan.positions == "true"
    by_bytes = kvcap.MemoryPlan.of(config, kv_budget="64MiB", block_size=8)
    assert (by_bytes.positions, by_bytes.budget_tokens) == ("compact", 56)


def loaded_longrope(folder: Path, budget: int, positions: Any, policy: str = "full") -> Any:
    long_model().save_pretrained(folder)
    AutoTokenizer.from_pretrained(pocket.path()).save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return kvcap.Runtime.from_pretrained(
            folder, policy, budget_tokens=budget, block_size=8, positions=positions, device="cpu"
        )


@pytest.mark.parametrize("positions", [None, "compact", "true", "auto"])
def test_longrope_reads_on_by_one_set_of_factors(positions, tmp_path):
    """The short ones up to their length; past it, as transformers, the whole text once more."""
    runtime, ids = loaded_longrope(tmp_path, 92, positions), distinct(90)
    assert runtime.plan.positions == (positions or usual_positions())
    loop = runtime.loop()
    for first in (62, 30, 70):
        loop.cache.reset()
        logits = [loop.prefill(ids[:, :first])]
        logits += [loop.read(ids[:, i : i + 1]) for i in range(first, 90)]
        with torch.no_grad():
            true = [long_model("eager")(ids[:, :i]).logits[:, -1] for i in range(first, 91)]
        stacked, expected = torch.stack(logits, 1), torch.stack(true, 1)
        assert (stacked - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("positions", ["compact", "true"])
def test_longrope_changes_its_factors_after_evictions_too(positions, tmp_path):
    """By then a loop and one that goes on from its copy hold what the long ones alone give."""
    runtime = loaded_longrope(tmp_path, 60 if positions == "compact" else 30, positions, "keydiff")
    ids, own, other = distinct(90), runtime.loop(), runtime.loop()
    own.prefill(ids[:, :40])
    other.go_on_from(own.copied())
    for loop in (own, other):
        begun, logits = [], []
        for i in range(40, 90):
            logits.append(loop.read(ids[:, i : i + 1]))
            begun += [i] * (not loop.read_short)
        again = runtime.loop()
        again.short = None
        again.prefill(ids[:, : begun[0]])
        expected = [again.read(ids[:, i : i + 1]) for i in begun]
        torch.testing.assert_close(logits[begun[0] - 40 :], expected, rtol=1e-4, atol=1e-4)
        assert loop.cache.held < loop.cache.seen == 90


def test_longrope_sessions_go_on_by_the_factors_of_what_they_hold(tmp_path):
    """Also where one is saved, or answers beside another."""
    runtime = loaded_longrope(tmp_path, 300, None, "keydiff")
    answers = []
    for way in ("alone", "saved", "together"):
        session, read = runtime.session(seed=0), ""
        for message in ("one", "two"):
            for each in (session, beside := runtime.session(seed=0)):
                each.set_generation(max_new_tokens=30, temperature=0, eos_token_id=9999)
            pieces = session.send(message)
            if way == "together":
                batch = runtime.batch(2)
                batch.add(beside, beside.send("three four"))
                batch.add(session, pieces)
                pieces = (piece for one, piece in batch if one is session)
            read += "".join(pieces)
            short = bool(session.loop.read_short)
            assert short == (message == "one")
            if way == "saved":
                session.save(tmp_path / "session")
                session = type(session).load(runtime, tmp_path / "session")
                assert bool(session.loop.read_short) == short
        answers.append(read)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("positions", ["compact", "auto"])
def test_longrope_keeps_its_short_factors_where_all_that_is_held_fits(positions, tmp_path):
    loop, ids = loaded_longrope(tmp_path, 56, positions).loop(), distinct(50)
    with torch.no_grad():
        expected = long_model("eager")(ids).logits[:, -1]
    assert (loop.prefill(ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_longrope_is_not_read_by_two_sets_of_factors():
    """With a model that kvcap has not loaded, and true positions."""
    model, ids = long_model(), distinct(90)
    for own in (True, False):
        loop = BlockLoop(model, kvcap.BudgetCache(model.config, 88, 8, positions="true"))
        for part in ids[:, :64].split(8, 1):
            loop.read(part) if own else model(part, **as_cache(loop.cache))
        with pytest.raises(UnsupportedModel, match="the 64 tokens held were rotated"):
            loop.read(ids[:, 64:65]) if own else model(ids[:, 64:65], **as_cache(loop.cache))
        assert loop.cache.seen == 64
    whole = BlockLoop(model, kvcap.BudgetCache(model.config, 88, 72, positions="true"))
    logits = [whole.read(ids[:, :70]), whole.read(ids[:, 70:90])]
    with torch.no_grad():
        expected = long_model("eager")(ids).logits[:, [69, 89]]
    assert (torch.stack(logits, 1) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_one_set_of_factors_is_chosen_by_what_can_be_reached():
    config, rope_parameters = long_model().config, longrope(64)["rope_parameters"]
    for reach, long in ((64, False), (0, False), (65, True), (None, True)):
        chosen = with_one_rope(config, reach)
        assert (chosen is not config) == long
        rope = rope_of(chosen)
        assert rope.longest == (None if long else 64)
        own = torch.tensor(rope_parameters["long_factor" if long else "short_factor"])
        torch.testing.assert_close(rope.inv_freq * own, rope_of(config_of("phi3")).inv_freq)
        assert "longrope" in ModelShape.of(chosen).not_exportable
    assert rope_of(config).longest == 64
    llama = config_of("llama")
    assert with_one_rope(llama, None) is llama
    parameters = {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_mscale": 1.0,
        "long_mscale": 1.2,
        "short_factor": [1.0],
        "long_factor": [2.0],
    }
    nested = SimpleNamespace(
        rope_parameters={"full_attention": parameters, "sliding_attention": {}},
        original_max_position_embeddings=64,
        max_position_embeddings=256,
    )
    full = with_one_rope(nested, 65).rope_parameters["full_attention"]
    assert full == {**parameters, "short_factor": [2.0], "short_mscale": 1.2}
