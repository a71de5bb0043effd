"""Wrappers, which read more than text: their text model runs alone, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import SIZES as TEXT
from conftest import as_cache
from families import randomised
from safetensors.torch import load_file, save_file
from tools import goes_on, greedy
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, AutoTokenizer

import kvcap
from kvcap import Runtime, pocket
from kvcap.cli import run
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.errors import KvcapError, ModelFilesBroken, UnsupportedModel
from kvcap.runtime.models.config import FAMILIES
from kvcap.runtime.models.files import load_config, load_model
from kvcap.runtime.models.states import KEPT
from kvcap.runtime.models.weights import SINGLE, held_weights, read_headers, weigh
from kvcap.runtime.models.wrappers import text_config, text_name

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
M_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
ROPE = "rope_parameters" if transformers.__version__ >= "5" else "rope_scaling"
IMAGE = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
LLAMA = {"model_type": "llama", "head_dim": 16, **TEXT}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            "head_dim": 16, "sliding_window": 24, **TEXT, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 90,
        "boi_token_index": 91, "eoi_token_index": 92,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 16, "sliding_window": None, **TEXT},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION},
        "image_token_index": 90,
    },
    "llava": {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": 90},
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
        "image_token_id": 90,
    },
    "idefics3": {"text_config": LLAMA, "vision_config": VISION, "image_token_id": 90},
    "qwen2_vl": {
        "text_config": {ROPE: M_ROPE, **TEXT},
        "vision_config": {"embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2,
                          "patch_size": 8},
        **IMAGE,
    },
    "qwen2_5_vl": {
        "text_config": {ROPE: M_ROPE, **TEXT},
        "vision_config": {"hidden_size": 32, "out_hidden_size": 64, "depth": 2, "num_heads": 2,
                          "intermediate_size": 32, "patch_size": 8, "fullatt_block_indexes": [1]},
        **IMAGE,
    },
    "qwen3_vl": {
        "text_config": {"head_dim": 16, ROPE: {"mrope_interleaved": True, **M_ROPE}, **TEXT},
        "vision_config": {"hidden_size": 32, "out_hidden_size": 64, "depth": 2, "num_heads": 2,
                          "intermediate_size": 32, "patch_size": 8, "num_position_embeddings": 16,
                          "deepstack_visual_indexes": [0, 1]},
        **IMAGE,
    },
    "lfm2_vl": {
        "text_config": {"model_type": "lfm2", **TEXT,
                        "layer_types": ["conv", "full_attention"]},
        "vision_config": {"model_type": "siglip2_vision_model", **VISION}, "image_token_id": 90,
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", "head_dim": 16, **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **VISION}, "image_token_id": 90,
    },
}  # fmt: skip
RUN = [name for name in WRAPPERS if name != "paligemma"]


def wrapper(name: str, attention: Any = "eager", **changes: Any) -> Any:
    """A random wrapper with its vision tower."""
    if name not in CONFIG_MAPPING or (name == "lfm2_vl" and not KEPT):
        pytest.skip(f"this transformers has no {name}, or keeps no states in a cache")
    given = {**WRAPPERS[name], **changes}
    config = AutoConfig.for_model(name, **given)
    inner = config.get_text_config(decoder=True).model_type
    if inner not in FAMILIES:
        pytest.skip(f"{inner} does not run")
    torch.manual_seed(0)
    return randomised(
        AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    )


def loaded(where: str) -> Any:
    return load_model(where, load_config(where), torch.float32).eval()


# The text model alone ---------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Saves a wrapper; returns it and the directory."""

    def save(name: str, **changes: Any) -> tuple[Any, str]:
        model = wrapper(name, **changes)
        model.save_pretrained(tmp_path)
        files = load_file(tmp_path / SINGLE)
        if transformers.__version__ < "5" and not any(x.startswith("model") for x in files):
            pytest.skip("4.57 cannot load these files' text model alone")
        return model, str(tmp_path)

    return save


@pytest.mark.parametrize("name", RUN)
def test_the_text_model_alone_gives_the_wrappers_logits(name, saved, tokens):
    model, where = saved(name)
    config, ids = load_config(where), tokens(40)
    alone = load_model(where, config, torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert (alone(input_ids=ids).logits - expected).abs().max() < 1e-4
        loop = BlockLoop(alone, kvcap.BudgetCache(alone.config, 48, 16))
        assert (loop.prefill(ids) - expected[:, -1]).abs().max() < 1e-4


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_is_of_what_is_held(name, dtype, saved):
    model, where = saved(name)
    config = load_config(where)
    weighed = weigh(config, dtype, read_headers(where))
    alone = load_model(where, config, dtype)
    assert weighed == (held_weights(alone).nbytes, "safetensors headers")
    assert weighed.nbytes == weigh(config, dtype).nbytes
    whole = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    assert weighed.nbytes < 0.9 * whole, "no vision tower is held"


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "llava"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_tied_where_the_wrapper_ties_it(name, tied, saved):
    text = {**WRAPPERS[name]["text_config"], "tie_word_embeddings": tied}
    _, where = saved(name, text_config=text, tie_word_embeddings=tied)
    config = load_config(where)
    alone = load_model(where, config, torch.float32)
    assert weigh(config, torch.float32, read_headers(where)).nbytes == held_weights(alone).nbytes
    assert (alone.lm_head.weight is alone.model.embed_tokens.weight) == tied


def test_names_of_older_files_are_those_of_the_text_model():
    """Before transformers 5 and since: files of Llava, Qwen3-VL, SmolVLM and Qwen2-VL."""
    names = {
        "language_model.model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.text_model.embed_tokens.weight": "model.embed_tokens.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.visual.blocks.0.mlp.weight": "model.visual.blocks.0.mlp.weight",
        "vision_tower.text_model.weight": "vision_tower.text_model.weight",
    }
    assert {name: text_name(name) for name in names} == names


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_a_text_model_that_is_missing_is_named_before_anything_is_loaded(name, saved):
    _, where = saved(name)
    path = Path(where, SINGLE)
    kept = {
        k: x for k, x in load_file(path).items() if not k.endswith("layers.1.mlp.up_proj.weight")
    }
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(ModelFilesBroken, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        weigh(load_config(where), torch.float32, read_headers(where))


def test_it_is_saved_as_the_model_it_is(saved, tmp_path):
    _, where = saved("qwen3_vl")
    alone = loaded(where)
    alone.save_pretrained(tmp_path / "alone")
    again = loaded(str(tmp_path / "alone"))
    assert all(
        torch.equal(a, b) for a, b in zip(alone.parameters(), again.parameters(), strict=True)
    )


# Runs -------------------------------------------------------------------------------------------


def chats(saved: Any, name: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    text = {**WRAPPERS[name]["text_config"], "vocab_size": len(tokenizer), "eos_token_id": None}
    _, where = saved(name, text_config=text)
    tokenizer.save_pretrained(where)
    return str(where)


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3_vl"])
def test_it_chats_from_the_command_line_and_goes_on_from_a_file(name, saved, tmp_path, kvcap):
    where = chats(saved, name)
    planned = kvcap.document("plan", where, "--budget-tokens", "32")
    assert planned["weights_from"] == "safetensors headers"
    given = ["--budget-tokens", "32", "--max-new-tokens", "4", "--quiet"]
    assert kvcap("generate", where, "one two three " * 20, *given)[0] == 0
    runtime = Runtime.from_pretrained(where, budget_tokens=32, block_size=16, device="cpu")
    plan, cache = runtime.plan, runtime.session().loop.cache
    assert plan.cache_bytes - plan.sliding_layers == cache.allocation.nbytes
    assert plan.weights == held_weights(runtime.model).nbytes
    goes_on(runtime, tmp_path)


OLD_M_ROPE = pytest.mark.skipif(
    transformers.__version__ < "5", reason="4.57 counts M-RoPE's positions by itself"
)
LOADED = [pytest.param(name, marks=OLD_M_ROPE if name.startswith("qwen") else ()) for name in RUN]


# A wrapper that is loaded already ---------------------------------------------------------------


@pytest.mark.parametrize("name", LOADED)
def test_a_capped_wrapper_generates_as_an_uncapped_one_below_the_budget(name, tokens):
    ids = tokens(30).clamp(max=89)
    options = greedy(ids, 12, eos_token_id=2)
    model = wrapper(name)
    expected = model.generate(ids, **options).tolist()
    model.set_attn_implementation(TEXT_ALONE)
    cache = kvcap.BudgetCache(model.config, 64, 32)
    assert model.generate(ids, **as_cache(cache), **options).tolist() == expected
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    with kvcap.cap(model, 64, 16) as capped:
        assert model.generate(ids, **options).tolist() == expected
        assert capped.cache.held == capped.cache.seen == len(expected[0]) - 1
        with torch.no_grad():
            assert (model(input_ids=ids).logits - logits).abs().max() < 1e-4
    assert model.generate(ids, **options).tolist() == expected


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("name", [LOADED[0], LOADED[2], LOADED[5], LOADED[7]])
def test_past_the_budget_a_wrapper_gives_what_its_text_model_gives(name, positions, saved, tokens):
    """Positions stay right past the budget, with M-RoPE as with the text model's own RoPE."""
    model, where = saved(name)
    alone, ids = loaded(where), tokens(90).clamp(max=89)
    loop = BlockLoop(alone, kvcap.BudgetCache(alone.config, 24, 8, positions=positions))
    logits, written = loop.prefill(ids), []
    for _ in range(10):
        written.append(int(logits.argmax()))
        logits = loop.read(logits.argmax(-1, keepdim=True))
    assert loop.cache.held == 24
    with kvcap.cap(model, 24, 8, positions=positions) as capped:
        out = model.generate(ids, **greedy(ids, 10))
        assert capped.cache.held == 24
    assert out[0, 90:].tolist() == written


def test_the_vision_towers_projections_are_not_asked_for(tokens):
    """Policies that weigh values by the output projection look at the text model's alone."""
    model = wrapper(
        "mistral3",
        vision_config={**WRAPPERS["mistral3"]["vision_config"], "hidden_size": 20, "head_dim": 10},
    )
    with kvcap.cap(model, 24, 8, "criticalkv") as capped, torch.no_grad():
        model(input_ids=tokens(60))
    assert capped.cache.held == 24


def test_under_a_cap_only_text_is_read(tokens):
    model = wrapper("gemma3")
    with kvcap.cap(model, 24, 8), pytest.raises(UnsupportedModel, match=r"given pixel_values; rem"):
        model(input_ids=tokens(12), pixel_values=torch.zeros(1, 3, 16, 16))
    encoded = {"mm_encoder_outputs": {"image": torch.zeros(1, 2)}}  # as generate hands them on
    with kvcap.cap(model, 24, 8), pytest.raises(UnsupportedModel, match=r"was given images; rem"):
        model(input_ids=tokens(12), **encoded)
    model.set_attn_implementation(TEXT_ALONE)
    cache = kvcap.BudgetCache(model.config, 24, 16)
    types = torch.zeros(1, 12, dtype=torch.long)
    types[0, 3:7] = 1
    with pytest.raises(KvcapError, match=r"not causal|ready-made"):
        model(input_ids=tokens(12), token_type_ids=types, **as_cache(cache))


IMAGES = [pytest.param(f"qwen{v}_vl", marks=OLD_M_ROPE) for v in ("2", "2_5", "3")]


TEXT_ALONE = {"text_config": "kvcap", "vision_config": "eager"}  # kvcap's attention is causal


def with_an_image(model: Any) -> dict[str, Any]:
    """A prompt of 18 tokens, 8 of which are an image's; they take 4 positions."""
    torch.manual_seed(1)
    ids = torch.tensor([[5, 6, 7, 92, *[90] * 8, 93, 8, 9, 10, 11, 12]])
    pixels = torch.randn(32, 3 * 2 * model.config.vision_config.patch_size**2)
    grid, types = torch.tensor([[1, 8, 4]]), (ids == 90).int()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": types,
    }


@pytest.mark.parametrize("name", IMAGES)
def test_images_under_m_rope_are_read_at_true_positions(name, tokens):
    """Past the budget logits are those of plain attention over the keys and values that stay."""
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    model, plain = wrapper(name, TEXT_ALONE), wrapper(name)
    given = with_an_image(model)
    expected = plain.generate(**given, **options)
    cache = kvcap.BudgetCache(model.config, 32, 32)
    assert torch.equal(model.generate(**given, **as_cache(cache), **options), expected)
    cache, reference = kvcap.BudgetCache(model.config, 12, 18), transformers.DynamicCache()
    with torch.no_grad():
        for part in (given, *({"input_ids": x} for x in tokens(14).clamp(max=89).split(6, 1))):
            positions = cache.seen + torch.arange(part["input_ids"].shape[1]).expand(3, 1, -1)
            if cache.seen:
                positions = positions + plain.model.rope_deltas
            capped_logits = model(**part, **as_cache(cache)).logits
            where = {"position_ids": positions} if cache.seen > 18 else {}
            logits = plain(**part, **where, **as_cache(reference)).logits
            assert (capped_logits - logits).abs().max() < 1e-4
            for mine, theirs in zip(cache.layers, reference.layers, strict=True):
                theirs.keys, theirs.values = mine.keys.clone(), mine.values.clone()
    assert cache.held == 12


@pytest.mark.parametrize("name", IMAGES)
def test_images_under_m_rope_have_no_compact_positions(name):
    """An eviction would move tokens of an image away from the tokens beside them."""
    config = wrapper(name, "kvcap").config
    assert kvcap.BudgetCache(config, 24, 8).layout.positions == "true"
    with pytest.raises(UnsupportedModel, match=r"tokens of images three \(M-RoPE\)"):
        kvcap.BudgetCache(config, 24, 8, positions="compact")
    text = config.get_text_config(decoder=True)
    assert kvcap.BudgetCache(text, 24, 8).layout.positions == "compact"


@pytest.mark.skipif(not OLD_M_ROPE.args[0], reason="runs since transformers 5")
def test_under_a_cap_old_transformers_do_not_count_m_rope():
    with pytest.raises(UnsupportedModel, match=r"counts positions by itself.*transformers 5"):
        kvcap.cap(wrapper("qwen2_vl"), 24, 8)


# Refusals ---------------------------------------------------------------------------------------


def test_a_wrapper_that_cannot_run_is_refused_in_its_own_terms(tmp_path, capsys):
    wrapper("paligemma").save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path)]) == 2
    assert "'paligemma' reads a prompt in both directions" in capsys.readouterr().err
    with pytest.raises(UnsupportedModel, match="both directions"):
        kvcap.cap(wrapper("paligemma"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("colpali", r"'colpali' wraps the text model 'gemma', but transformers maps it to no"),
        ("blip-2", r"'blip-2' reads more than text, around a text model: .*'opt' is not supp"),
        ("mllama", r"'mllama' wraps the text model 'mllama_text_model', which is no causal"),
    ],
)
def test_other_wrappers_are_refused_by_name(name, message, tmp_path):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        load_config(str(tmp_path))


def test_every_wrapper_of_transformers_runs_or_is_refused_by_name():
    """Walks all wrappers that can be made without being told anything."""
    running, refused = set(), dict[str, str]()
    for name in CONFIG_MAPPING:
        try:
            config = AutoConfig.for_model(name)
            text = config.get_text_config(decoder=True)
        except Exception:  # needs to be told more
            continue
        if text is config or text.model_type == name:
            continue
        try:
            text = text_config(config)
        except UnsupportedModel as error:
            refused[config.model_type] = str(error)
        else:
            running |= {name} if text.model_type in FAMILIES else set()
    assert all(f"model type {name!r}" in why for name, why in refused.items())
    assert {"gemma3", "llava", "mistral3", "qwen2_5_vl"} <= running
