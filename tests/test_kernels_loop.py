"""Every kernel at once: whole runs by kernels against eager ones, in triton's interpreter too."""

from __future__ import annotations

import pytest
import torch
from conftest import small_policy, tiny_model
from torch import nn

import kvcap
from kvcap import kernels
from kvcap.kernels import evict
from kvcap.runtime.loop import BlockLoop
from kvcap.runtime.tuning import Tuning

tl = pytest.importorskip("triton.language", reason="needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and type(tl.sum).__name__ == "JITFunction",
    reason="triton was imported before TRITON_INTERPRET=1 was set",
)
POLICIES = ("keydiff-window", "dropkv", "h2o", "obcache", "pyramidkv", "headkv")


def read(policy, positions, choice):
    ids = 3 + torch.randint(90, (1, 56), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    eviction = small_policy(policy, model.config)
    cache = kvcap.BudgetCache(model.config, 40, 16, eviction, positions=positions)
    with kernels.use(choice):
        loop = BlockLoop(model, cache, graphs=False)
        logits = [loop.prefill(ids[:, :53])]
        cache.pin([(53, 54)])
        logits += [loop.read(ids[:, i : i + 1]) for i in range(53, 56)]
    heads = [h for layer in cache.capped_layers for s in layer.segments for h in s.positions[0]]
    return torch.stack(logits), [sorted(head.tolist()) for head in heads]


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_logits_and_the_same_tokens_kept(policy, positions, monkeypatch):
    eager, kept = read(policy, positions, "eager")
    calls = []
    count = evict.give_up
    monkeypatch.setattr(evict, "give_up", lambda *a: (calls.append(1), count(*a)))
    by_kernels, kept_too = read(policy, positions, "triton")
    assert calls  # kernels did run
    torch.testing.assert_close(by_kernels, eager, rtol=1e-4, atol=1e-4)
    assert kept_too == kept


def test_linear_layers_of_one_token_run_by_the_kernel_and_only_within():
    model, one = tiny_model("qwen2"), torch.tensor([[5]], device=DEVICE)  # has biases
    model = model.to(DEVICE)
    tuning = Tuning(model, compiled=False)
    with torch.inference_mode(), kernels.use("triton"):
        expected = model(one).logits
        with tuning.applied(1):
            assert all("forward" in vars(m) for m in model.modules() if type(m) is nn.Linear)
            found = model(one).logits
    assert not any("forward" in vars(m) for m in model.modules())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, expected)  # sums in another order


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_what_is_compiled_is_the_models_own_formula_and_only_within(family, monkeypatch):
    """Norms, rotations and gates in our order of calls; torch.compile itself is left out."""
    calls = []

    def watched(function, **_):
        return lambda *a, **k: (calls.append(function.__name__), function(*a, **k))[1]

    monkeypatch.setattr(torch, "compile", watched)
    model, ids = tiny_model(family), torch.tensor([[5, 7, 9]])
    tuning = Tuning(model, compiled=True)
    file = next(iter(tuning.rotations))
    plain = file.apply_rotary_pos_emb
    with torch.inference_mode():
        expected = model(ids).logits
        calls.clear()
        with tuning.applied(3):
            found = model(ids).logits
            assert file.apply_rotary_pos_emb is not plain
    assert torch.equal(found, expected)
    assert {"forward", "apply_rotary_pos_emb"} <= set(calls)
    assert ("_gate" in calls) == (family != "phi3")  # whose gate is half of another matrix
    assert file.apply_rotary_pos_emb is plain
    assert not any("forward" in vars(m) for m in model.modules())
