"""Models whose layers are partly recurrent: delta nets, short convolutions and Mamba 2."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from conftest import as_cache, small_policy
from families import STATES as FAMILIES
from families import model_of as tiny_model
from tools import runtime_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    DynamicCache,
)

import kvcap
from kvcap.runtime.backends.pytorch.cuda_graphs import why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import (
    BlockTooLarge,
    CacheMismatch,
    KvcapError,
    NotExportable,
    PaddingUnsupported,
    PositionMismatch,
    SessionBroken,
    SessionFileCorrupt,
    SessionFileForeign,
    UnsupportedModel,
)
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.files import load_config, load_model
from kvcap.runtime.models.weights import held_weights, read_headers, weigh
from kvcap.runtime.session.session import Session
from kvcap.runtime.units import layers_named

SOME = ["qwen3_5_text", "lfm2", "nemotron_h"]  # a delta net, a short convolution, Mamba 2
BESIDE = ["falcon_h1", "zaya"]  # beside slots in one layer


def in_blocks(loop: BlockLoop, ids: Tensor, block: int = 8) -> Tensor:
    """Logits after every block, and after each of the last ten tokens."""
    parts = (*ids[:, :-10].split(block, 1), *ids[:, -10:].split(1, 1))
    return torch.stack([loop.read(part) for part in parts], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers_cache_to_the_bit(family, tokens):
    """While all tokens fit, at the same blocks, of two sequences; blocks have no fillers."""
    model, ids = tiny_model(family), tokens(60, batch=2)
    cache, plain = kvcap.BudgetCache(model.config, 64, 8), DynamicCache(config=model.config)
    loop = BlockLoop(model, cache)
    for part in (*ids[:, :45].split(8, 1), *ids[:, 45:].split(1, 1)):
        assert loop.padded(part.shape[1]) == part.shape[1]
        with torch.no_grad():
            expected = model(part, **as_cache(plain), logits_to_keep=1).logits[:, -1]
        torch.testing.assert_close(loop.read(part), expected, rtol=1e-5, atol=1e-5)
    for index, layer in cache.state_layers.items():
        theirs = plain.layers[index]
        assert layer.seen == 60
        assert torch.equal(layer.named["conv"], theirs.conv_states[0])
        if "recurrent" in layer.named:
            torch.testing.assert_close(layer.named["recurrent"], theirs.recurrent_states[0])
    assert cache.consistent


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_bytes_are_held(family, dtype, tokens):
    """And a state has the type that the model makes, as transformers' own cache shows."""
    model, ids = tiny_model(family, dtype=dtype), tokens(60, batch=2)
    plan = kvcap.MemoryPlan.of(
        model.config, budget_tokens=16, block_size=8, dtype=dtype, positions="compact", batch=2
    )
    cache = kvcap.BudgetCache(model.config, 16, 8)
    in_blocks(BlockLoop(model, cache), ids)
    early = kvcap.BudgetCache(model.config, 16, 8)
    early.allocate(2, dtype, "cpu")
    states = sum(
        layer.named[x].nbytes for layer in cache.state_layers.values() for x in layer.named
    )
    assert plan.state_layers == states > 0
    if plan.sliding_layers:
        assert 0 <= plan.cache_bytes - cache.nbytes < plan.sliding_layers
    else:
        assert plan.cache_bytes == cache.nbytes == early.nbytes
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :9], **as_cache(plain))
    for index, layer in cache.state_layers.items():
        theirs = plain.layers[index]
        made = {"conv": theirs.conv_states[0], "recurrent": theirs.recurrent_states[0]}
        shapes = {name: (x.shape, x.dtype) for name, x in made.items() if x is not None}
        assert shapes == {name: (x.shape, x.dtype) for name, x in layer.named.items()}


def test_sessions_of_other_models_and_broken_states_are_refused(tokens, tmp_path):
    model = tiny_model("qwen3_5_text")
    session = runtime_of(model).session(seed=1)
    in_blocks(session.loop, tokens(40))
    session.save(tmp_path / "s")
    other = runtime_of(tiny_model("qwen3_5_text", linear_value_head_dim=8))
    with pytest.raises(SessionFileForeign):
        Session.load(other, tmp_path / "s")
    session.cache.state_layers[0].named["recurrent"][0, 0, 0, 0] = torch.nan
    session.save(tmp_path / "s")
    with pytest.raises(SessionFileCorrupt, match=r"state\.0\.recurrent"):
        Session.load(runtime_of(model), tmp_path / "s")


@pytest.mark.parametrize("family", [*SOME, "falcon_h1"])
def test_states_keep_no_gradients(family, tokens):
    model, ids = tiny_model(family), tokens(24)
    cache = kvcap.BudgetCache(model.config, 16, 8)
    for part in ids.split(8, 1):
        logits = model(part, **as_cache(cache)).logits
    with pytest.raises(UnsupportedModel, match="no gradients"):
        logits.sum().backward()
    cache.reset()
    again = kvcap.BudgetCache(model.config, 16, 8)
    with torch.no_grad():
        for part in ids.split(8, 1):
            fresh = model(part, **as_cache(again)).logits
    torch.testing.assert_close(logits.detach(), fresh)


@pytest.mark.parametrize("family", SOME + BESIDE)
def test_what_is_refused_changes_nothing(family, tokens):
    """A state cannot go back, so what a capped layer would refuse is refused before any layer."""
    model, ids = tiny_model(family), tokens(60)
    cache = kvcap.BudgetCache(model.config, 16, 8)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(BlockTooLarge, match="60 tokens"):
                model(ids, **as_cache(cache))
            mask = torch.ones(1, cache.seen + 8, dtype=torch.long)
            mask[0, 0] = 0
            with pytest.raises(PaddingUnsupported):
                model(ids[:, :8], attention_mask=mask, **as_cache(cache))
            with pytest.raises(PaddingUnsupported):
                model(ids[:, :8], attention_mask=torch.ones(1, 1, 8, 8), **as_cache(cache))
            assert cache.consistent
            model(ids[:, :8], **as_cache(cache))
        with pytest.raises(CacheMismatch):
            model(tokens(8, batch=2), **as_cache(cache))
        assert (cache.seen, cache.consistent) == (16, True)
        again = kvcap.BudgetCache(model.config, 16, 8)
        for _ in range(2):
            model(ids[:, :8], **as_cache(again))
        for index, layer in cache.state_layers.items():
            for name, state in layer.named.items():
                assert torch.equal(again.state_layers[index].named[name], state)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "falcon_h1"])
def test_a_pass_that_failed_half_way_demands_a_reset(family, tokens):
    """A block that was taken back from capped layers stays in the states below them."""
    model, ids = tiny_model(family), tokens(24)
    cache = kvcap.BudgetCache(model.config, 16, 8)
    loop = BlockLoop(model, cache)
    first = loop.read(ids[:, :8])
    positions = torch.arange(50, 58)[None]
    with torch.no_grad(), pytest.raises(PositionMismatch):
        model(ids[:, 8:16], position_ids=positions, **as_cache(cache))
    assert (cache.seen, cache.consistent) == (8, False)
    with pytest.raises(SessionBroken):
        loop.read(ids[:, 8:16])
    with torch.no_grad(), pytest.raises(SessionBroken):
        model(ids[:, 8:16], **as_cache(cache))
    before = cache.counters
    cache.counters = before
    assert not cache.consistent
    cache.reset()
    assert cache.consistent
    assert torch.equal(loop.read(ids[:, :8]), first)


class Interrupted(TorchDispatchMode):
    """Ctrl-C before an operator of a pass; counts them."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "length", "changes"),
    [
        ("lfm2", 1, {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
        ("granitemoehybrid", 8, {"layer_types": ["full_attention", "linear_attention"] * 2}),
        ("nemotron_h", 8, {}),
        ("falcon_h1", 1, {}),
    ],
)
def test_after_ctrl_c_in_a_pass_it_goes_on_rightly_or_is_refused(family, length, changes, tokens):
    """In a pass that transformers make, as nothing holds Ctrl-C back there."""
    model, ids = tiny_model(family, **changes), tokens(40)
    cache = kvcap.BudgetCache(model.config, 16, 8)

    def read(at: int | None, then: bool = True) -> tuple[int, Any]:
        """Operators of the pass that is interrupted, and logits of the next one; None: refused."""
        cache.reset()
        model(ids[:, :8], **as_cache(cache))
        model(ids[:, 8:16], **as_cache(cache))
        model(ids[:, 16:24], **as_cache(cache))
        mode = Interrupted(-1 if at is None else at)
        with mode if then else nullcontext(), suppress(KeyboardInterrupt):
            model(ids[:, 24 : 24 + length], **as_cache(cache)) if then else None
        try:
            return mode.count, model(ids[:, 32:], **as_cache(cache)).logits
        except SessionBroken:
            assert not cache.consistent
            return mode.count, None

    with torch.no_grad():
        unread, (total, whole) = read(None, then=False)[1], read(None)
        refusals = []
        for at in {*range(1, total, total // 12), *range(total - total // 5, total, total // 60)}:
            logits = read(at)[1]
            if logits is not None:
                assert torch.equal(logits, unread if cache.seen == 32 else whole), at
            refusals.append(logits is None)
    assert {True, False} == {*refusals}


@pytest.mark.parametrize("family", SOME + BESIDE)
def test_what_cannot_work_is_refused_by_name(family, tokens):
    from kvcap.export.decoder.spec import layout_for

    model = tiny_model(family)
    shape = ModelShape.of(model.config)
    with pytest.raises(NotExportable, match=f"{layers_named(shape.recurrent)} keep a recurrent"):
        layout_for(model.config, CacheSettings(16, 8, kvcap.load_policy("keydiff")))
    cache = kvcap.BudgetCache(model.config, 16, 8)
    assert why_unsteady(cache) == "some layers are recurrent"
    with pytest.raises(KvcapError, match="beam search"):
        model.generate(tokens(8), **as_cache(cache), num_beams=2, max_new_tokens=4)
    for what in ("crop", "reorder_cache", "activate_past_recording", "offload", "prefetch"):
        with pytest.raises(UnsupportedModel):
            getattr(cache.state_layers[shape.recurrent[0]], what)()


def test_states_beside_a_window_and_states_alone_are_refused():
    config = tiny_model("zaya", num_hidden_layers=4).config
    config.layer_types, config.sliding_window = ["hybrid", "hybrid_sliding"] * 2, 24
    with pytest.raises(UnsupportedModel, match="layers 1, 3 are attention over a window and a"):
        ModelShape.of(config)
    config = tiny_model("qwen3_5_text").config
    config.layer_types = ["linear_attention"] * 4
    with pytest.raises(UnsupportedModel, match="nothing to cap"):
        ModelShape.of(config)


@pytest.mark.parametrize("family", ["olmo_hybrid", "lfm2", "qwen3_5_text", *BESIDE])
def test_policies_that_read_the_output_projection(family, tokens):
    """Of attention, under either name, and not that of recurrent layers."""
    model = tiny_model(family)
    eviction = small_policy("criticalkv", model.config)
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 16, 8, eviction))
    assert in_blocks(loop, tokens(60)).isfinite().all()


def test_a_vision_tower_that_is_left_out_is_not_weighed(tmp_path):
    """Qwen3.5's files hold one, and layers that predict further tokens."""
    from safetensors.torch import load_file, save_file

    model = tiny_model("qwen3_5_text")
    model.save_pretrained(tmp_path)
    file, where = tmp_path / "model.safetensors", str(tmp_path)
    tensors = {
        name.replace("model.", "model.language_model.", 1): x for name, x in load_file(file).items()
    }
    further = {
        "model.visual.merger.norm.weight": torch.ones(999),
        "mtp.norm.weight": torch.ones(333),
    }
    save_file(tensors | further, file, {"format": "pt"})
    AutoConfig.for_model("qwen3_5", text_config=model.config.to_dict()).save_pretrained(where)
    config = load_config(where)
    nbytes = weigh(config, torch.float32, read_headers(where)).nbytes
    loaded = load_model(where, config, torch.float32)
    assert nbytes == held_weights(loaded).nbytes == held_weights(model).nbytes
    cache = kvcap.BudgetCache(loaded.config, 16, 8)
    assert BlockLoop(loaded, cache).read(torch.arange(3, 11)[None]).isfinite().all()
