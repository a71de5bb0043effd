"""The plan: bytes from the config alone, what is refused, and what there is no memory for."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from conftest import FAMILIES, as_cache, tiny_config, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, DynamicCache

from kvcap import Eviction, KvcapError, MemoryPlan, Policy, PolicyError, load_policy
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.memory.free_memory import FreeMemory
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.weights import Tensor, held_weights
from kvcap.runtime.planning import plan as plan_module
from kvcap.runtime.planning.plan import warn_if_short
from kvcap.runtime.recall.settings import vectors_bytes
from kvcap.runtime.units import parse_bytes

CONFIG = tiny_config("llama")  # 2 layers, 2 KV heads of 16


def test_bytes_by_hand():
    plan = MemoryPlan.of(
        CONFIG, policy="h2o", budget_tokens=100, block_size=28, dtype=torch.bfloat16
    )
    slots = 2 * 2 * 128  # layers · KV heads · (N + T)
    assert plan.keys_values == slots * 2 * 16 * 2
    assert plan.slot_positions == slots * (4 + 4)
    assert plan.policy_state == slots * 4
    assert plan.query_window == 0
    assert plan.rotation_table == 129 * 16 * 2
    assert plan.cache_bytes == slots * (64 + 8 + 4) + 129 * 32
    window = MemoryPlan.of(CONFIG, policy="snapkv", budget_tokens=100, dtype=torch.bfloat16)
    assert window.query_window == 2 * (32 * 4 * 16 * 2 + 32 * 2 * 4)  # queries, a shift per KV head


def values(config):
    """All that a config holds, with its parts."""
    parts = {k: values(x) if hasattr(x, "to_dict") else x for k, x in vars(config).items()}
    return copy.deepcopy(parts)


@pytest.mark.parametrize("options", [{}, {"rehearse": True}, {"weights": "int8"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma3"])
def test_a_live_models_config_stays_as_it_is(family, options):
    """Of a model that the program runs with attention and numbers of its own."""
    text = tiny_config("gemma3_text" if family == "gemma3" else family)
    wraps = family == "gemma3"
    config = AutoConfig.for_model(family, text_config=text.to_dict()) if wraps else text
    config._attn_implementation, config.dtype = "eager", torch.float32
    before = values(config)
    dtype = torch.float32 if options.get("weights") else torch.bfloat16
    MemoryPlan.of(config, budget_tokens=24, block_size=8, dtype=dtype, **options)
    ModelShape.of(config.get_text_config(decoder=True))
    assert values(config) == before


def test_other_families_are_refused_before_their_weights_are_counted():
    with pytest.raises(UnsupportedModel, match="mamba"):
        MemoryPlan.of(AutoConfig.for_model("mamba", num_hidden_layers=1))


def test_of_a_model_of_text_and_images_the_text_model_is_planned():
    text = tiny_config("gemma3_text", dtype=torch.bfloat16)
    config = AutoConfig.for_model("gemma3", text_config=text.to_dict())
    model = tiny_model("gemma3_text", dtype=torch.bfloat16)
    headers = {
        f"language_model.{name}": Tensor("BF16", tuple(x.shape))
        for name, x in model.named_parameters()
    }
    headers["vision_tower.embeddings.weight"] = Tensor("F32", (1000,))
    plan = MemoryPlan.of(config, headers=headers)
    assert plan == MemoryPlan.of(text, headers=headers)
    assert (plan.weights, plan.weights_from) == (held_weights(model).nbytes, "safetensors headers")


@given(cap=st.integers(21_000, 3_000_000), policy=st.sampled_from(["keydiff", "h2o", "snapkv"]))
def test_a_byte_budget_takes_the_most_slots_that_fit(cap, policy):
    plan = MemoryPlan.of(CONFIG, policy=policy, kv_budget=cap, dtype=torch.float32)
    one_more = MemoryPlan.of(
        CONFIG,
        policy=policy,
        budget_tokens=plan.budget_tokens + 1,
        block_size=plan.block_size,
        dtype=torch.float32,
    )
    assert plan.cache_bytes <= cap < one_more.cache_bytes
    assert plan.block_size <= 128
    assert plan.budget_tokens >= 2 * plan.block_size


@pytest.mark.parametrize(
    ("device", "sizes", "block"),
    [
        ("cuda", {"budget_tokens": 1024}, 512),
        (torch.device("cuda", 1), {"budget_tokens": 4096}, 512),
        ("cuda", {"budget_tokens": 1023}, 128),
        ("cuda", {}, 128),
        ("cuda", {"budget_tokens": 2048, "block_size": 64}, 64),
        ("cuda", {"budget_tokens": 7681}, 128),  # so that nothing passes the trained length
        ("cuda", {"kv_budget": 1_000_000}, 512),
        ("cuda", {"kv_budget": 600_000}, 128),
        ("cuda", {"memory_cap": "8GiB"}, 512),
        ("cpu", {"budget_tokens": 4096}, 128),
        ("mps", {"budget_tokens": 4096}, 128),
        (None, {"memory_cap": "8GiB"}, 128),
    ],
)
def test_the_default_block_follows_device_and_budget(device, sizes, block):
    config = tiny_config("llama", max_position_embeddings=8192)
    plan = MemoryPlan.of(config, policy="keydiff", dtype=torch.float32, device=device, **sizes)
    assert plan.block_size == block
    assert ("on CUDA from 1,024 slots" in plan.block_why) == (block == 512)


COMPOSED = st.sampled_from(["keydiff", "h2o", "streaming_llm", "snapkv", "pyramidkv", "calidrop"])
PINNED = st.sampled_from([{}, {"sink_tokens": 5}, {"sink_tokens": 3, "recent_tokens": 40}])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    family=st.sampled_from([*FAMILIES]),
    policy=COMPOSED,
    pins=PINNED,
    block=st.sampled_from([None, 1, 16, 100]),
)
def test_the_least_budget_that_is_advised_works_and_a_byte_less_does_not(
    family: str, policy: str, pins: dict[str, int], block: int | None
) -> None:
    def of(**sizes: int) -> MemoryPlan:
        eviction = load_policy(policy, **pins)
        return MemoryPlan.of(tiny_config(family), policy=eviction, block_size=block, **sizes)

    with pytest.raises(PlanInfeasible, match="the least that works is") as caught:
        of(kv_budget=500)
    assert isinstance(caught.value, KvcapError)
    least = int(re.search(r"works is ([\d,]+)", str(caught.value))[1].replace(",", ""))
    assert caught.value.least == {"least_kv_budget": least}
    assert of(kv_budget=least).cache_bytes == least
    with pytest.raises(PlanInfeasible):
        of(kv_budget=least - 1)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(policy=COMPOSED, pins=PINNED, share=st.floats(0, 0.9), layers=st.integers(1, 5))
def test_the_least_slots_that_are_advised_work_and_one_less_does_not(
    policy: str, pins: dict[str, int], share: float, layers: int
) -> None:
    options = pins | ({"recent": share} if policy in ("keydiff", "h2o") else {})
    eviction = load_policy(policy, **options)
    least = eviction.least(layers, 2)
    eviction.check(least, layers, 2)
    with pytest.raises(PolicyError, match=f"{least} or"):
        eviction.check(least - 1, layers, 2)


def test_pins_that_no_budget_holds_are_refused() -> None:
    class Greedy(Policy):
        """Pins more than there is."""

        def recents_pinned(self, budget: int) -> int:
            return budget + 1

    with pytest.raises(PolicyError, match="at least 4"):
        MemoryPlan.of(CONFIG, budget_tokens=3, policy="streaming_llm")
    with pytest.raises(PolicyError, match="no budget holds"):
        MemoryPlan.of(CONFIG, policy=Eviction(Greedy()))


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("256KiB", 262144), ("1.5 MB", 1_500_000), ("2G", 2 * 10**9), ("1gib", 2**30)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "lots", "-1KiB", "1KiBi", "12 parsecs", "i", "9" * 400, 1.5, True, []], ids=repr
)
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
    message = (
        f"the plan needs {needed:,} bytes more than this process has, and {needed - 1:,} are free "
        "(the limit of cgroup box); the largest --memory-cap that there is memory for is about "
        f"{(needed + 999) >> 20}MiB"
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        warn_if_short(plan, short)
    with pytest.warns(UserWarning, match=r"the cap allows 9,000,000,000 bytes more"):
        warn_if_short(plan, FreeMemory(needed, "here"), 9_000_001_000)


def test_a_cap_of_all_that_is_free(monkeypatch):
    monkeypatch.setattr(plan_module, "process_bytes", lambda: 400 << 20)
    monkeypatch.setattr(plan_module, "free_memory", lambda: FreeMemory(80 << 20, "here"))
    config = tiny_config("llama", max_position_embeddings=100_000)
    planned, given = (
        MemoryPlan.of(config, dtype=torch.float32, memory_cap=cap) for cap in ("auto", 480 << 20)
    )
    assert planned == given
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_short(planned, FreeMemory(79 << 20, "here"), "auto")
    with pytest.raises(PlanInfeasible, match="is not a size"):
        MemoryPlan.of(config, memory_cap="all")


@pytest.mark.parametrize("free", [1 << 40, 20 << 20])
def test_a_policy_that_never_evicts_has_the_models_context(free, monkeypatch):
    """Where nobody gave a size, and as far as memory goes."""
    monkeypatch.setattr(plan_module, "free_memory", lambda: FreeMemory(free, "here"))
    config = tiny_config("llama", max_position_embeddings=100_000)
    plan = MemoryPlan.of(config, policy="full")
    more = MemoryPlan.of(config, policy="full", budget_tokens=plan.budget_tokens + 1)
    if free > 1 << 30:
        assert plan.budget_tokens == plan.trained_length == 100_000
    else:
        assert plan.run_bytes <= free < more.run_bytes
    assert MemoryPlan.of(config, policy="full", kv_budget="1MiB").cache_bytes <= 1 << 20
    assert MemoryPlan.of(config).budget_tokens == 256


def test_the_index_of_evicted_text_is_planned_beside_the_cache(monkeypatch):
    monkeypatch.setattr(plan_module, "process_bytes", lambda: 400 << 20)
    config, mib = tiny_config("llama", max_position_embeddings=100_000), 1 << 20

    def of(**options):
        return MemoryPlan.of(config, dtype=torch.float32, **options)

    without, having = of(), of(recall_store=2 * mib)
    assert (having.recall_store, having.cache_bytes) == (2 * mib, without.cache_bytes)
    vectors = vectors_bytes(config.hidden_size)
    assert having.run_bytes == without.run_bytes + 2 * mib + vectors
    cap = 480 * mib
    fewer = of(memory_cap=cap, recall_store=2 * mib)
    assert fewer.total_bytes <= cap
    assert fewer.budget_tokens < of(memory_cap=cap).budget_tokens
    with pytest.raises(PlanInfeasible, match=f"the index of recall {32 * mib:,}, "):
        of(memory_cap=cap, recall_store=32 * mib)
    least = of(rehearse=True, budget_tokens=8, block_size=4).least_memory_cap
    more = of(rehearse=True, budget_tokens=8, block_size=4, recall_store=32 * mib)
    assert more.least_memory_cap - least in (32 * mib, 33 * mib)  # caps are whole MiB


def test_an_uncapped_cache_is_what_transformers_holds():
    for family in ("llama", "gemma2"):
        config = tiny_config(family)
        plan = MemoryPlan.of(config, dtype=torch.float32)
        for tokens in (1, 20, 60):
            cache = DynamicCache(config=config)
            model = tiny_model(family, attention="eager")
            model(torch.zeros(1, tokens, dtype=torch.long), **as_cache(cache))
            held = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
            # transformers keeps a token less than the window, for the next one.
            assert 0 <= plan.uncapped_bytes(tokens) - held <= plan.sliding_token_bytes
