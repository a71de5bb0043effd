"""The plan: bytes from the config alone, what is refused, and what there is no memory for."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from conftest import FAMILIES, tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from kvcap import KvcapError, MemoryPlan, PolicyError
from kvcap.runtime import plan as plan_module
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.free_memory import FreeMemory
from kvcap.runtime.plan import parse_bytes, warn_if_short
from kvcap.runtime.weights import Tensor

CONFIG = tiny_config("llama")  # 2 layers, 2 KV heads of 16


def test_bytes_by_hand():
    plan = MemoryPlan.of(
        CONFIG, policy="h2o", kv_budget_tokens=100, block_size=28, dtype=torch.bfloat16
    )
    slots = 2 * 2 * 128  # layers · KV heads · (N + T)
    assert plan.keys_values == slots * 2 * 16 * 2
    assert plan.slot_positions == slots * (4 + 4)
    assert plan.policy_state == slots * 4
    assert plan.query_window == 0
    assert plan.rotation_table == 129 * 16 * 2
    assert plan.cache_bytes == slots * (64 + 8 + 4) + 129 * 32
    window = MemoryPlan.of(CONFIG, policy="snapkv", kv_budget_tokens=100, dtype=torch.bfloat16)
    assert window.query_window == 2 * (32 * 4 * 16 * 2 + 32 * 2 * 4)  # queries, a shift per KV head


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_without_loading_them(family):
    model = tiny_model(family)
    plan = MemoryPlan.of(model.config, dtype=torch.float32)
    assert plan.weights == sum(p.numel() * 4 for p in model.parameters())


def test_other_families_are_refused_before_their_weights_are_counted():
    with pytest.raises(UnsupportedModel, match="mamba"):
        MemoryPlan.of(AutoConfig.for_model("mamba", num_hidden_layers=1))


def test_a_model_of_text_and_images_counts_all_of_its_files():
    text = tiny_config("gemma3_text")
    config = AutoConfig.for_model("gemma3", text_config=text.to_dict())
    headers = {"vision": Tensor("F32", (1000,)), "text": Tensor("BF16", (10,))}
    plan = MemoryPlan.of(config, dtype=torch.bfloat16, headers=headers)
    assert (plan.weights, plan.weights_from) == (2020, "safetensors headers")


@given(cap=st.integers(20_000, 3_000_000), policy=st.sampled_from(["keydiff", "h2o", "snapkv"]))
def test_a_byte_budget_takes_the_most_slots_that_fit(cap, policy):
    plan = MemoryPlan.of(CONFIG, policy=policy, kv_budget=cap, dtype=torch.float32)
    one_more = MemoryPlan.of(
        CONFIG, policy=policy, kv_budget_tokens=plan.budget_tokens + 1,
        block_size=plan.block_size, dtype=torch.float32,
    )  # fmt: skip
    assert plan.cache_bytes <= cap < one_more.cache_bytes
    assert plan.block_size <= 128
    assert plan.budget_tokens >= 2 * plan.block_size


def test_what_is_infeasible_names_what_is_not():
    for block in (1, 64, None):
        with pytest.raises(PlanInfeasible, match="the least that works is") as caught:
            MemoryPlan.of(CONFIG, kv_budget=500, block_size=block, dtype=torch.float32)
        assert isinstance(caught.value, KvcapError)
        least = int(re.search(r"works is ([\d,]+)", str(caught.value))[1].replace(",", ""))
        plan = MemoryPlan.of(CONFIG, kv_budget=least, block_size=block or 1, dtype=torch.float32)
        assert plan.budget_tokens == 1
    with pytest.raises(PlanInfeasible, match="not both"):
        MemoryPlan.of(CONFIG, kv_budget="1MiB", kv_budget_tokens=5)
    with pytest.raises(PlanInfeasible, match="block_size=0"):
        MemoryPlan.of(CONFIG, block_size=0)
    with pytest.raises(PolicyError, match="1 or more"):
        MemoryPlan.of(CONFIG, kv_budget_tokens=0)
    with pytest.raises(PolicyError, match="at least 4"):
        MemoryPlan.of(CONFIG, kv_budget_tokens=3, policy="streaming_llm")
    with pytest.raises(PlanInfeasible, match="positions='sideways'"):
        MemoryPlan.of(CONFIG, positions="sideways")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("256KiB", 262144), ("1.5 MB", 1_500_000), ("2G", 2 * 10**9), ("1gib", 2**30)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1KiB", "1KiBi", "12 parsecs", "i"])
def test_bad_sizes(text):
    with pytest.raises(PlanInfeasible, match="is not a size"):
        parse_bytes(text)


def test_what_there_is_no_memory_for_is_said(monkeypatch):
    monkeypatch.setattr(plan_module, "process_bytes", lambda: 1000)
    plan = MemoryPlan.of(CONFIG, dtype=torch.float32)
    needed = plan.run_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_short(plan, FreeMemory(needed, "here"))
        warn_if_short(plan, FreeMemory(needed, "here"), needed + 1000)
    short = FreeMemory(needed - 1, "the limit of cgroup box")
    said = (
        f"the plan needs {needed:,} bytes more than this process has, and {needed - 1:,} are free "
        "(the limit of cgroup box); the largest --memory-cap that there is memory for is "
        f"{needed + 999:,}"
    )
    with pytest.warns(UserWarning, match=re.escape(said)):
        warn_if_short(plan, short)
    with pytest.warns(UserWarning, match=r"the cap allows 9,000,000,000 bytes more"):
        warn_if_short(plan, FreeMemory(needed, "here"), 9_000_001_000)


def test_a_cap_of_all_that_is_free(monkeypatch):
    monkeypatch.setattr(plan_module, "process_bytes", lambda: 400 << 20)
    monkeypatch.setattr(plan_module, "free_memory", lambda: FreeMemory(80 << 20, "here"))
    config = tiny_config("llama", max_position_embeddings=100_000)
    found, given = (
        MemoryPlan.of(config, dtype=torch.float32, memory_cap=cap) for cap in ("auto", 480 << 20)
    )
    assert found == given
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_short(found, FreeMemory(79 << 20, "here"), "auto")
    with pytest.raises(PlanInfeasible, match="is not a size"):
        MemoryPlan.of(config, memory_cap="all")
