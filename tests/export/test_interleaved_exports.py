"""Exported decoders of models whose RoPE rotates neighbours: right, or found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import SIZES, small_policy
from tools import made, operations  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM

from kvcap.export.decoder.spec import Source, layout_for
from kvcap.export.decoder.write import write
from kvcap.policies import load_policy
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import ToleranceError
from kvcap.runtime.models import config as models


def tiny_model(family: str, **changes: Any) -> Any:
    """Return a random model whose attention picks tokens."""
    sizes = {"head_dim": 16} if family != "cohere" else {"logit_scale": 1.0}
    config = AutoConfig.for_model(family, **{**SIZES, **sizes, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="kvcap", dtype=torch.float32
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0.0, 0.15)
    return model.eval()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
@pytest.mark.parametrize("family", ["glm", "cohere", "ernie4_5"])
def test_a_decoder_in_one_graph_passes_its_own_check(family, policy, tmp_path):
    """Logits and kept slots of graph, module and runtime agree past the budget."""
    model = tiny_model(family)
    layout = layout_for(
        model.config, CacheSettings(20, 8, small_policy(policy, model.config), "compact")
    )
    _, report = write(Source("tiny", model, None), layout, "fp32", tmp_path / "x", True)
    assert report.ok


@pytest.mark.slow
def test_a_graph_that_rotates_by_the_other_layout_is_not_written(tmp_path, monkeypatch):
    model = tiny_model("glm")
    with monkeypatch.context() as patch:
        patch.setattr(models, "INTERLEAVED", ())
        layout = layout_for(model.config, CacheSettings(20, 8, load_policy("keydiff"), "compact"))
    with pytest.raises(ToleranceError, match="differs"):
        write(Source("tiny", model, None), layout, "fp32", tmp_path / "x", True)
    assert not (tmp_path / "x").exists()
