"""What a run of an exported decoder holds in memory, from its manifest and the sizes of its files.

The buffers' figures are exact: what is allocated equals them to the byte. The workspace of a block
is an estimate: what ONNX Runtime takes for it depends on how it orders and fuses the graph.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvcap.runtime.backends.onnxruntime import paired
from kvcap.runtime.backends.onnxruntime.fused import state_of
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.memory.free_memory import process_bytes
from kvcap.runtime.planning.plan import (
    RUNNING,
    MemoryPlan,
    fitting,
    largest,
    parse_cap,
    smallest,
    within,
)
from kvcap.runtime.units import parse_bytes, roomy

LOADING = 40 << 20  # ONNX Runtime itself, a tokenizer, buffers of the first block
ROTATION = 2 * 4  # bytes of a cosine and a sine


class Sizes(NamedTuple):
    """What was asked for; None is for the plan, or the export, to say."""

    kv_budget_tokens: int | None = None
    kv_budget: str | int | None = None
    memory_cap: str | int | None = None
    block_size: int | None = None
    positions: str | None = None


def plan_of(
    manifest: Manifest, policy: str, sizes: Sizes, *, pinned: int = 0, loaded: bool = False
) -> MemoryPlan:
    """Plan a run of an exported decoder.

    Args:
        manifest: of the export.
        policy: what the plan says of it.
        sizes: what was asked for.
        pinned: slots that the policy pins: the least budget.
        loaded: the weights are in this process already.

    Raises:
        PlanInfeasible: nothing fits, naming what would.
    """
    baseline = cap = None
    if sizes.memory_cap is not None:
        cap = parse_cap(sizes.memory_cap)
        weights = manifest.model["weights_bytes"]
        baseline = process_bytes() + (RUNNING - weights if loaded else LOADING)
    if sizes.kv_budget_tokens is not None and sizes.kv_budget is not None:
        raise PlanInfeasible("give kv_budget_tokens or kv_budget (bytes), not both")
    by_kind = _of_fused if manifest.fused else _of_paired
    return by_kind(manifest, policy, sizes, pinned, cap, baseline or 0)


def _of_fused(
    manifest: Manifest, policy: str, sizes: Sizes, _: int, cap: int | None, baseline: int
) -> MemoryPlan:
    """The budget is the graph's own."""
    facts = manifest.facts
    tokens, block = facts["budget_tokens"], sizes.block_size or facts["block_size"]
    again = "export it again with another --kv-budget-tokens"
    if sizes.kv_budget_tokens not in (None, tokens):
        raise PlanInfeasible(
            f"this decoder was exported with --kv-budget-tokens {tokens:,}, which is in its graph; "
            f"leave {sizes.kv_budget_tokens:,} out, or {again}"
        )
    if block > facts["block_size"]:
        raise PlanInfeasible(
            f"this decoder was exported for blocks of up to {facts['block_size']:,} tokens; use "
            f"--block-size {facts['block_size']} or less"
        )
    found = _fused(manifest, policy, baseline, block)
    if sizes.kv_budget is not None and found.cache_bytes > parse_bytes(sizes.kv_budget):
        raise PlanInfeasible(
            f"the cache takes {found.cache_bytes:,} bytes for its {tokens:,} slots, more than "
            f"{parse_bytes(sizes.kv_budget):,}; raise the budget to that, or {again}",
            least_kv_budget=found.cache_bytes,
        )
    while cap is not None and sizes.block_size is None and found.total_bytes > cap and block > 1:
        block = -(-block // 2)  # a smaller block takes a smaller workspace
        found = _fused(manifest, policy, baseline, block)
    if cap is not None and found.total_bytes > cap:
        raise PlanInfeasible(
            f"the process takes {found.total_bytes:,} bytes with blocks of {block:,} tokens, more "
            f"than the cap of {cap:,}: {baseline:,} of its own, {found.weights:,} of weights, "
            f"{found.cache_bytes:,} for {tokens:,} slots; raise it to "
            f"{roomy(found.total_bytes) >> 20}MiB, or {again}",
            least_memory_cap=roomy(found.total_bytes),
        )
    least = found if sizes.block_size else _fused(manifest, policy, baseline, 1)
    return _with_least(found, least, sizes)


def _of_paired(
    manifest: Manifest, policy: str, sizes: Sizes, pinned: int, cap: int | None, baseline: int
) -> MemoryPlan:
    """The budget is free: the graph that evicts takes it as an input."""
    facts, model = manifest.facts, manifest.model
    positions = sizes.positions or facts["positions"]
    plan = partial(_paired, manifest, policy, positions, baseline)
    if sizes.kv_budget is not None:
        found = largest(plan, parse_bytes(sizes.kv_budget), sizes.block_size, pinned)
    elif cap is not None and sizes.kv_budget_tokens is None:
        most = model["trained_length"]
        found = within(plan, lambda found: found, cap, sizes.block_size, pinned, most)
    else:
        tokens = sizes.kv_budget_tokens or facts["budget_tokens"]
        found = plan(tokens, sizes.block_size or facts["block_size"])
    if found.budget_tokens < pinned:
        raise PlanInfeasible(
            f"policy {policy} pins {pinned} tokens, more than the budget of "
            f"{found.budget_tokens} slots; use a budget of at least {pinned}"
        )
    window = model.get("window")  # all layers slide, so that nothing may be out of their reach
    if window is not None and found.budget_tokens + found.block_size > window:
        raise UnsupportedModel(
            f"every layer of this model slides over {window} tokens; use a budget and a block of "
            f"at most {window} slots together"
        )
    least = smallest(plan, sizes.block_size, pinned)
    return _with_least(found if cap is None else fitting(found, cap), least, sizes)


def _with_least(found: MemoryPlan, least: MemoryPlan, sizes: Sizes) -> MemoryPlan:
    """The plan, and the least budget and cap that would work."""
    own = least.baseline if sizes.memory_cap is not None else process_bytes() + LOADING
    return replace(
        found,
        least_kv_budget=least.cache_bytes,
        least_memory_cap=roomy(own + least.run_bytes),
    )


def _fused(manifest: Manifest, policy: str, baseline: int, block: int) -> MemoryPlan:
    parts = {"keys": 0, "values": 0, "positions": 0, "queries": 0, "state": 0}
    cache, slots = "float32", 1
    for tensor in state_of(manifest):
        parts[tensor.name if tensor.name in parts else "state"] += 2 * tensor.nbytes
        if tensor.name == "keys":
            cache, slots = str(tensor.dtype), max(slots, tensor.full[tensor.axis])
    return MemoryPlan(
        policy=policy,
        positions=manifest.facts["positions"],
        budget_tokens=manifest.facts["budget_tokens"],
        block_size=block,
        dtype=cache,
        keys_values=parts["keys"] + parts["values"],
        slot_positions=parts["positions"],
        policy_state=parts["state"],
        evicted_store=0,
        query_window=parts["queries"],
        rotation_table=0,  # a part of the weights
        sliding_layers=0,
        workspace=_workspace(manifest, slots + block, block, 1),
        logits=4 * manifest.model["vocabulary"],
        weights=manifest.model["weights_bytes"],
        weights_from="the manifest",
        baseline=baseline,
        **_uncapped(manifest, cache),
    )


def _paired(
    manifest: Manifest, policy: str, positions: Any, baseline: int, tokens: int, block: int
) -> MemoryPlan:
    model, cache = manifest.model, np.dtype(manifest.facts["cache_dtype"])
    compact = positions == "compact"
    kinds = paired.sizes(model, tokens, block, cache, compact)
    nbytes = {name: prod(shape) * np.dtype(kind).itemsize for name, (shape, kind) in kinds.items()}
    vectors = sum(n for name, n in nbytes.items() if len(kinds[name][0]) == 4)
    return MemoryPlan(
        policy=policy,
        positions=positions,
        budget_tokens=tokens,
        block_size=block,
        dtype=str(cache),
        keys_values=vectors,
        slot_positions=sum(nbytes.values()) - vectors,
        policy_state=0,
        evicted_store=0,
        query_window=0,
        rotation_table=(tokens + block) * ROTATION * model["rotated_pairs"] if compact else 0,
        sliding_layers=0,
        workspace=_workspace(manifest, tokens + block, block, model["layers"]),
        logits=4 * block * model["vocabulary"],  # such graphs give those of every token
        weights=model["weights_bytes"],
        weights_from="the manifest",
        baseline=baseline,
        **_uncapped(manifest, cache),
    )


def _uncapped(manifest: Manifest, cache: Any) -> dict[str, Any]:
    """What a token takes where nothing caps the cache, under `MemoryPlan`'s names."""
    model = manifest.model
    token = model["layers"] * 2 * model["kv_heads"] * model["head_dim"] * np.dtype(cache).itemsize
    window = model.get("window") or 0
    kind = "sliding_token_bytes" if window else "token_bytes"
    return {kind: token, "sliding_window": window, "trained_length": model["trained_length"]}


def _workspace(manifest: Manifest, slots: int, block: int, scored: int) -> int:
    """Bytes that a block takes in float32 while `scored` layers of `slots` are scored at once."""
    model = manifest.model
    hidden = block * (4 * model["hidden_size"] + 3 * model["mlp_size"])
    attention = 3 * model["heads"] * block * slots  # scores, their mask, their weights
    spread = 2 * model["heads"] * slots * model["head_dim"]  # keys, values of every query head
    eviction = 3 * scored * model["kv_heads"] * slots * model["head_dim"]
    found: int = 4 * (hidden + attention + spread + eviction)
    return found
