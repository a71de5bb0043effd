"""Models whose attention has a learned sink logit per query head: gpt-oss, Granite SWA.

Under the cap they give what eager attention over the kept tokens gives, and policies that score by
attention see its weights with the sink's share taken off.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import OLD
from families import SINKS as FAMILIES
from families import config_of as tiny_config
from families import model_of as tiny_model
from observations import attention_by_loops, observe, same
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvcap
from kvcap.evals.measure import allocator_peak
from kvcap.export.decoder.spec import layout_for
from kvcap.export.graphs.shape import model_sizes
from kvcap.runtime.attention.functions import (
    Logits,
    attend,
    attend_with_lse,
    attention_forward,
    causal,
)
from kvcap.runtime.backends.pytorch.cuda_graphs import why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import NotExportable, UnsupportedModel
from kvcap.runtime.models.config import SINKS
from kvcap.runtime.models.files import load_config, load_model
from kvcap.runtime.models.fused.decoder import decoder_of
from kvcap.runtime.models.weights import held_weights, weigh


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_uncapped_calls_give_eagers_logits(family, tokens):
    ids = tokens(60, batch=2)
    with torch.no_grad():
        close(tiny_model(family)(ids).logits, tiny_model(family, "eager")(ids).logits, 5e-5)


# Rotations ----------------------------------------------------------------------------------------


def test_full_layers_of_several_frequencies_are_refused_by_name():
    config = tiny_config("granite_swa", layer_rope_theta=[5e5, 1e4, 1e4, 1e4])
    with pytest.raises(UnsupportedModel, match=r"rope_theta 10000, 500000.*whose full layers"):
        kvcap.BudgetCache(config, 12, 6)


# Attention by itself ------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    z = q.double() @ k.mT * 0.3
    z = z if mask is None else z.masked_fill(~mask, -math.inf)
    column = sinks.double().view(1, -1, 1, 1).expand(*z.shape[:-1], 1)
    return torch.cat((z, column), -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 2, 3, 1, 17), (2, 2, 2, 5, 33), (2, 1, 4, 9, 9)], ids=str)
@pytest.mark.parametrize("masked", [None, "bool", "additive", "a batch's"])
def test_attention_with_sinks(sizes, masked, dtype):
    batch, kv_heads, group, length, slots = sizes
    q = torch.randn(batch, kv_heads * group, length, 16, dtype=dtype)
    pool = torch.randn(2, batch, kv_heads, slots + 3, 16, dtype=dtype)
    k, v = pool[:, :, :, :slots]
    sinks = torch.linspace(-2, 3, kv_heads * group).to(dtype)
    seen = causal(length, slots, q)
    given = None if masked is None else seen
    if masked == "additive":
        given = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    elif masked == "a batch's":
        seen = given = seen.repeat(batch, 1, 1, 1)
        seen[0, ..., 0] = slots == length  # a slot that the first sequence alone does not see
    got = attend(q, k, v, Logits(0.3, sinks=sinks), given)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert got.dtype == dtype
    close(got.double(), plain(q, k, v, sinks, seen), tolerance)


def test_no_matrix_of_queries_times_slots_on_a_cpu(monkeypatch):
    """Neither masked nor unmasked attention has a workspace [B, H, T, n]."""
    heads, length, slots = 8, 256, 2048
    q, k = torch.randn(1, heads, length, 16), torch.randn(1, 2, slots, 16)
    peak = allocator_peak(lambda: attend(q, k, k, Logits(0.3, sinks=torch.zeros(heads))))
    assert peak < heads * length * slots * 4 / 3


def test_gradients_reach_sinks_and_keys():
    """Uncapped training: the fused operator knows no gradient of the log-sum-exp."""
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True)
    out, _ = attention_forward(torch.nn.Module(), q, k, k, None, 0.3, s_aux=sinks)
    exact = plain(q, k, k, sinks, causal(5, 5, q)).transpose(1, 2)
    own = torch.autograd.grad(out.square().sum(), (k, sinks))
    for got, expected in zip(
        own, torch.autograd.grad(exact.square().sum(), (k, sinks)), strict=True
    ):
        close(got, expected)


def test_the_log_sum_exp_is_the_same_either_way():
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 11, 16)
    mask = causal(5, 11, q)
    fused, slow = (attend_with_lse(x, k, k, Logits(0.3), mask) for x in (q, q.requires_grad_()))
    close(fused[0], slow[0].detach(), 1e-5)
    close(fused[1], slow[1].detach(), 1e-5)


# Scores -------------------------------------------------------------------------------------------


def test_attention_weights_of_an_observation_have_the_sink_in_their_denominator():
    obs = observe()
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0])
    weights = attention_by_loops(obs)
    lse = obs.logits.masked_fill(~obs.visible, -math.inf).logsumexp(-1, keepdim=True)
    expected = weights * torch.sigmoid(lse.double() - sinks.view(1, 2, 2, 1, 1))
    sunk = replace(obs, rule=obs.rule._replace(sinks=sinks))
    same(sunk.attention, expected)
    same(sunk.output, (expected.flatten(2, 3) @ obs.values.double()).view_as(sunk.output))
    with pytest.raises(AssertionError):
        same(replace(obs, rule=obs.rule._replace(sinks=0 * sinks)).attention, expected)


def test_dropkv_is_the_change_of_the_output_with_a_sink_too():
    """With one query the score is the squared change when a token alone is removed (Lemma 1)."""
    obs = observe(9, window=1, batch=1, group=1)
    obs.rule = obs.rule._replace(sinks=torch.tensor([0.5, -1.0]))
    cost = kvcap.load_policy("dropkv", window=1, kernel=1).policy.score(obs)
    z = obs.logits[:, :, 0, 0].double()  # [1, K, n]
    whole = obs.output[:, :, 0, 0].double()
    for j in range(9):
        others = [i for i in range(9) if i != j]
        logits = torch.cat((z[..., others], obs.rule.sinks.double()[None, :, None]), -1)
        weights = logits.softmax(-1)[..., :-1]
        without = (weights[..., None] * obs.values[:, :, others].double()).sum(2)
        same(cost[:, :, j], (whole - without).square().sum(-1))


# What does not run --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_graphs_that_see_attention_nor_the_fused_decoder_take_them(family):
    model = tiny_model(family)
    assert decoder_of(model) is None
    whole = {"layer_types": ["full_attention"] * model.config.num_hidden_layers}
    whole |= {"layer_rope_theta": None} if "granite" in family else {}
    config = tiny_config(family, **whole)
    assert why_unsteady(kvcap.BudgetCache(config, 16, 8)) == "attention has sink logits"
    for one in (model.config, config):
        with pytest.raises(NotExportable, match=r"sink logits|experts"):
            layout_for(one, CacheSettings(16, 8, kvcap.load_policy("snapkv")))


def test_no_graph_of_scores_is_exported(tmp_path):
    tiny_config("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(NotExportable, match="sink logits"):
        model_sizes(str(tmp_path))


def test_these_are_the_families_with_sinks():
    assert set(FAMILIES) == set(SINKS)


# MXFP4 --------------------------------------------------------------------------------------------


def save_mxfp4(folder: Path) -> Any:
    """As gpt-oss is published: experts in blocks of 32 numbers of 4 bits, with a scale each."""
    model = tiny_model("gpt_oss", "eager", torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inside, outside = tensors.pop(name).shape
        blocks = (experts, outside, inside // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, blocks, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))
    return model


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_mxfp4_checkpoints_are_unpacked_and_planned_so(tmp_path):
    if OLD:
        pytest.importorskip("accelerate")
    save_mxfp4(tmp_path)
    config = load_config(str(tmp_path))
    planned = weigh(config, torch.bfloat16)
    model = load_model(str(tmp_path), config, torch.bfloat16)
    assert planned.source == "config, unpacked"
    assert planned.nbytes == held_weights(model).nbytes
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    packed, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    numbers = torch.tensor([*FP4, *(-x for x in FP4)])
    pairs = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # [E, out, in / 32, 32]
    whole = numbers[pairs.long()] * 2.0 ** (scales.float() - 127)[..., None]
    torch.testing.assert_close(
        model.model.layers[0].mlp.experts.down_proj.float(), whole.flatten(-2).mT, rtol=0, atol=0
    )
    ids = torch.randint(3, 90, (1, 20))
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 12, 6))
    assert loop.prefill(ids).isfinite().all()
