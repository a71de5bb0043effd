"""kvcap's own decoder: which models it stands for, and that it answers as they do."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import transformers
from conftest import FAMILIES, small_policy, tiny_model
from interpreted import DEVICE, pytestmark  # noqa: F401
from torch import nn

import kvcap
from kvcap import kernels
from kvcap.kernels import linear as matvec_kernel
from kvcap.runtime.cache.positions import CompactPositions
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.fused import decoder as fused
from kvcap.runtime.models.fused import linear
from kvcap.runtime.models.fused.decoder import decoder_of


def cache_of(model, policy="keydiff", positions="compact"):
    eviction = small_policy(policy, model.config)
    cache = kvcap.BudgetCache(model.config, 24, 8, eviction, positions=positions)
    return cache.allocate(1, model.dtype, model.device)


def read(run, cache, ids, last=None):
    """Logits of a block's every token, or of so many of its last."""
    start, tokens = cache.next_position, ids.shape[1]
    positions = torch.arange(tokens, device=ids.device)
    with torch.inference_mode(), cache.passing(ForwardContext(start, tokens)) as context:
        if cache.by_rows:
            context.rows = cache.row_pass(tokens)
        return run(
            input_ids=ids,
            position_ids=(start + positions)[None].expand(ids.shape[0], -1),
            **cache_argument(run, cache),
            use_cache=True,
            logits_to_keep=positions if last is None else positions[tokens - last :],
        ).logits


def conversation():
    """Blocks and single tokens: a cache fills, and evicts."""
    ids = 3 + torch.randint(90, (1, 36), generator=torch.Generator().manual_seed(0))
    return ids.to(DEVICE).split([8, 8, 1, 8, 8, 1, 1, 1], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_it_stands_for(family):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = tiny_model(family, dtype=dtype).to(DEVICE)
        assert (decoder_of(model) is not None) == (family in fused.FAMILIES)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("choice", ["triton", "eager"])
@pytest.mark.parametrize("family", fused.FAMILIES)
def test_it_answers_as_the_model_through_blocks_tokens_and_evictions(family, choice, monkeypatch):
    # Keys lie as on a GPU.
    monkeypatch.setattr(CompactPositions, "can_rotate_in_place", lambda *_: False)
    model, logits = tiny_model(family).to(DEVICE), []
    with kernels.use("eager"):
        cache = cache_of(model)
        expected = [read(model, cache, ids) for ids in conversation()]
        held = [
            sorted(x.tolist()) for layer in cache.layers for x in layer.segments[0].positions[0]
        ]
    decoder = decoder_of(model)
    with kernels.use(choice):
        cache = cache_of(model)
        logits = [read(decoder, cache, ids) for ids in conversation()]
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    kept = [sorted(x.tolist()) for layer in cache.layers for x in layer.segments[0].positions[0]]
    assert kept == held


@pytest.mark.parametrize("family", fused.FAMILIES)
def test_a_token_takes_four_products_a_layer_and_attention_rotates_it(family, monkeypatch):
    model = tiny_model(family).to(DEVICE)
    decoder, layers = decoder_of(model), model.config.num_hidden_layers
    made, rotated, matvec = [], [], matvec_kernel.matvec
    rotate = decoder.parts.rotate
    noted = lambda *a: (rotated.append(1), rotate(*a))[1]  # noqa: E731
    decoder.parts = decoder.parts._replace(rotate=noted)
    with kernels.use("triton"):
        cache = cache_of(model)
        monkeypatch.setattr(
            matvec_kernel, "matvec", lambda *a, **k: (made.append(1), matvec(*a, **k))[1]
        )
        for ids in conversation():
            made.clear()
            rotated.clear()
            read(decoder, cache, ids)
            single = ids.shape[1] == 1
            assert len(made) == (4 * layers + 1 if single else 0)
            assert bool(rotated) != single


@pytest.mark.parametrize("family", fused.FAMILIES)
def test_several_sequences_and_few_logits(family):
    model, logits = tiny_model(family).to(DEVICE), []
    ids = 3 + torch.randint(90, (2, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for run in (model, decoder_of(model)):
        cache = kvcap.BudgetCache(model.config, 24, 8).allocate(2, model.dtype, DEVICE)
        blocks = ids.split([8, 8, 1, 1, 1, 1, 1], dim=1)
        logits.append(torch.cat([read(run, cache, block, last=1) for block in blocks]))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_without_wanted_logits_there_are_none():
    model = tiny_model("llama").to(DEVICE)
    ids = torch.tensor([[5, 7]], device=DEVICE)
    assert read(decoder_of(model), cache_of(model), ids, last=0).shape == (1, 0, 97)


def doubled(forward):
    return lambda *a, **k: 2 * forward(*a, **k)


@pytest.mark.parametrize("multiplier", [1.0, 0.5])
def test_a_formula_of_another_kind_is_not_taken(multiplier, monkeypatch):
    """As of Granite, whose residuals are scaled, under the name of a family that is covered."""
    monkeypatch.setitem(fused.FAMILIES, "granite", fused.Family("GraniteForCausalLM"))
    model = tiny_model("granite", residual_multiplier=multiplier)
    assert fused.covers(model)
    old = transformers.__version__ < "5"  # whose layers return tuples
    assert (decoder_of(model) is not None) == (multiplier == 1.0 and not old)


@pytest.mark.parametrize(
    "fault",
    ["attention", "mlp", "norm", "rotation", "activation", "head norm", "last norm", "call"],
)
def test_a_layer_whose_answer_is_another_is_not_taken(fault, monkeypatch):
    """Whatever of its formula was changed, also in the last layer alone."""
    model = tiny_model("qwen3")
    layer = model.model.layers[-1]
    assert decoder_of(model) is not None
    if fault == "activation":
        layer.mlp.act_fn = nn.GELU()
    elif fault == "norm":
        layer.post_attention_layernorm = nn.RMSNorm(64)
    elif fault == "rotation":
        file = __import__(type(model).__module__, fromlist=["_"])
        rotate = file.apply_rotary_pos_emb
        monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, c, s: rotate(q, k, c, -s))
    elif fault == "call":
        monkeypatch.setattr(type(layer), "forward", lambda self, x: x)
    else:
        of = {
            "attention": layer.self_attn.o_proj,
            "mlp": layer.mlp,
            "last norm": model.model.norm,
            "head norm": layer.self_attn.k_norm,
        }[fault]
        kind = type(f"{type(of).__name__}", (type(of),), {"forward": doubled(type(of).forward)})
        kind.__module__ = type(of).__module__
        of.__class__ = kind
    assert decoder_of(model) is None


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("smollm3", 2)])
def test_one_layer_of_each_kind_is_tried(family, kinds, monkeypatch):
    """A layer of which a number differs is of a kind of its own."""
    model, tried = tiny_model(family), []
    forward = type(model.model.layers[0]).forward
    noted = lambda self, *a, **k: (tried.append(self), forward(self, *a, **k))[1]  # noqa: E731
    monkeypatch.setattr(type(model.model.layers[0]), "forward", noted)
    decoder_of(model)
    assert len(tried) == kinds < len(model.model.layers)
    tried.clear()
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-3
    assert decoder_of(model) is not None
    assert len(tried) == kinds + 1


def test_models_of_one_formula_are_tried_once(monkeypatch):
    """Another type of numbers, or another function in transformers' file, makes another formula."""
    tried, agrees = [], fused.Decoder.agrees
    noted = lambda self: (tried.append(self), agrees(self))[1]  # noqa: E731
    monkeypatch.setattr(fused.Decoder, "agrees", noted)
    monkeypatch.setattr(fused, "_agreed", {})
    for layers in (2, 3):
        assert decoder_of(tiny_model("llama", num_hidden_layers=layers)) is not None
    assert len(tried) == 1
    model = tiny_model("llama", dtype=torch.bfloat16)
    assert decoder_of(model) is not None
    assert len(tried) == 2
    file = sys.modules[type(model).__module__]
    monkeypatch.setattr(file, "rotate_half", lambda x: -x)
    for _ in range(2):
        assert decoder_of(model) is None
        assert len(tried) == 3


@pytest.mark.parametrize("how", ["hook", "hook before", "forward", "adapter", "training"])
def test_where_somebody_elses_code_runs_it_is_left_alone(how, monkeypatch):
    """Also where it comes when the decoder is there, and goes again."""
    model = tiny_model("llama").to(DEVICE)
    ids, layer = torch.tensor([[5, 7]], device=DEVICE), model.model.layers[1]
    decoder, calls = decoder_of(model), []
    plain, undo = layer.self_attn.o_proj, lambda: None
    if how == "hook":
        undo = plain.register_forward_hook(lambda *_: calls.append(1)).remove
    elif how == "hook before":
        undo = layer.register_forward_pre_hook(lambda *_: calls.append(1)).remove
    elif how == "forward":
        plain.forward = lambda x, f=plain.forward: (calls.append(1), f(x))[1]
        undo = lambda: delattr(plain, "forward")  # noqa: E731
    elif how == "adapter":
        layer.self_attn.o_proj = Adapter(plain, calls)
        undo = lambda: setattr(layer.self_attn, "o_proj", plain)  # noqa: E731
    else:
        model.train()
        undo = model.eval
    assert decoder_of(model) is None
    assert not calls
    logits = read(decoder, cache_of(model), ids)
    assert len(calls) == (how != "training")
    undo()
    again = read(decoder, cache_of(model), ids)
    assert len(calls) == (how != "training")
    torch.testing.assert_close(logits, again, rtol=1e-4, atol=1e-4)
    assert decoder_of(model) is not None


class Adapter(nn.Module):
    def __init__(self, plain, calls):
        super().__init__()
        self.plain, self.calls = plain, calls

    def forward(self, x):
        self.calls.append(1)
        return self.plain(x)


def test_another_attention_runs_by_its_own_modules():
    assert decoder_of(tiny_model("llama", "sdpa")) is None


def test_layers_of_one_input_become_rows_of_one_matrix_and_stay_what_they_are(monkeypatch):
    model, ids = tiny_model("qwen2"), torch.tensor([[5, 7, 9]])  # has biases
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight  # shared
    before, made = copy.deepcopy(model.state_dict()), []
    product = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *a: made.append(1) or product(*a))
    expected = read(model, cache_of(model), ids)
    one_by_one = len(made)
    for _ in range(2):  # a second cache's graphs find the weights where they are
        decoder = decoder_of(model)
        made.clear()
        logits = read(decoder, cache_of(model), ids)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert len(made) == one_by_one - 3 * model.config.num_hidden_layers
        attention = model.model.layers[0].self_attn
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        storage = attention.q_proj.weight.untyped_storage()
        assert attention.v_proj.weight.untyped_storage().data_ptr() == storage.data_ptr()
        assert storage.nbytes() == sum(layer.weight.nbytes for layer in parts)
    monkeypatch.setattr(linear, "MOST_TOGETHER", 3 * 3)
    made.clear()
    read(decoder, cache_of(model), ids)
    assert len(made) == one_by_one
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_without_memory_to_move_weights_they_stay_apart(monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("no more")

    model, ids = tiny_model("llama").to(DEVICE), torch.tensor([[5, 7, 9]], device=DEVICE)
    expected = read(model, cache_of(model), ids)
    with monkeypatch.context() as patched:
        patched.setattr(linear, "_side_by_side", refuse)
        separate = decoder_of(model)
    assert separate.layers[0].inputs.weight is None
    torch.testing.assert_close(read(separate, cache_of(model), ids), expected, rtol=1e-5, atol=1e-5)
    with kernels.use("triton"):  # nor is a single token read by the kernel
        logits, cache = read(separate, cache_of(model), ids[:, :1]), cache_of(model)
    torch.testing.assert_close(logits, read(model, cache, ids[:, :1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", fused.FAMILIES)
def test_what_lies_between_products_runs_by_kernels(family, monkeypatch):
    """All of it, and to the same logits."""
    calls = []

    def watched(function):
        return lambda *a: (calls.append(function.__name__), function(*a))[1]

    model, ids = tiny_model(family).to(DEVICE), torch.tensor([[5, 7, 9]], device=DEVICE)
    expected = read(decoder_of(model), cache_of(model), ids)
    assert decoder_of(model).parts == (fused.KERNELS if DEVICE == "cuda" else fused.PARTS)
    parts = fused.Parts(*map(watched, fused.KERNELS))
    monkeypatch.setattr(fused, "KERNELS", parts)
    with kernels.use("triton"):
        decoder = decoder_of(model)
        logits = read(decoder, cache_of(model), ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    layers, heads = model.config.num_hidden_layers, 2 * fused.FAMILIES[family].norms_heads
    assert calls.count("add_norm") == 2 * layers + 1
    assert calls.count("gate") == layers
    assert calls.count("norm") == heads * layers
    assert calls.count("rotate") == sum(layer.rotates for layer in decoder.layers)


def test_a_mask_is_still_asked_for_by_whoever_comes_after():
    """A pass that needs none says so for itself alone."""
    model, ids = tiny_model("llama").to(DEVICE), torch.tensor([[5]], device=DEVICE)
    cache = cache_of(model)
    with kernels.use("triton"):
        for _ in range(2):
            read(decoder_of(model), cache, ids)
    key = torch.randn(1, 2, 1, 16, device=DEVICE)
    with pytest.raises(kvcap.KvcapError, match="ready-made"):
        cache.update(key, key, 0)
