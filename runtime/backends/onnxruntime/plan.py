"""Plans what a run of an exported decoder holds in memory, from its manifest alone.

The buffers' figures are exact: what is allocated equals them to the byte. A block's workspace is an
estimate, as it depends on how ONNX Runtime orders and fuses the graph.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvcap.runtime.backends.onnxruntime.decoder import (
    buffers_of,
    turns_of,
)
from kvcap.runtime.backends.onnxruntime.manifest import Manifest, windows_in
from kvcap.runtime.errors import NotExportable, PlanInfeasible
from kvcap.runtime.memory.free_memory import process_bytes
from kvcap.runtime.planning.plan import RUNNING, MemoryPlan, Sizes, parse_cap
from kvcap.runtime.recall.settings import vectors_bytes
from kvcap.runtime.units import parse_bytes, with_margin

if TYPE_CHECKING:  # PyTorch stands behind it
    from kvcap.runtime.models.weights import WeightsSource

LOADING = 40 << 20  # ONNX Runtime itself, a tokenizer, buffers of the first block


def plan_of(
    manifest: Manifest,
    sizes: Sizes,
    *,
    loaded: bool = False,
    recall_store: int = 0,
) -> MemoryPlan:
    """Plan a run of an exported decoder.

    Args:
        manifest: of the export.
        sizes: as requested; the export has the others.
        loaded: the weights are in this process already.
        recall_store: bytes of the index by which a conversation finds its evicted text.

    Raises:
        NotExportable: a budget or a block that the graph does not have.
        PlanInfeasible: nothing fits, naming what would.
    """
    baseline, cap = 0, None
    if sizes.memory_cap is not None:
        cap, weights = parse_cap(sizes.memory_cap), manifest.model["weights_bytes"]
        baseline = process_bytes() + (RUNNING - weights if loaded else LOADING)
    of_block = partial(_of_block, manifest, baseline, recall_store)
    facts, requested = manifest.facts, sizes.cache
    tokens, block = facts["budget_tokens"], requested.block_size or facts["block_size"]
    again = "export it again with another --budget-tokens"
    if requested.budget_tokens not in (None, tokens):
        raise NotExportable(
            f"this decoder was exported with --budget-tokens {tokens:,}, which is in its graph; "
            f"leave {requested.budget_tokens:,} out, or {again}"
        )
    if block > facts["block_size"]:
        raise NotExportable(
            f"this decoder was exported for blocks of up to {facts['block_size']:,} tokens; use "
            f"--block-size {facts['block_size']} or less"
        )
    plan = of_block(block)
    if requested.kv_budget is not None and plan.cache_bytes > parse_bytes(requested.kv_budget):
        raise PlanInfeasible(
            f"the cache takes {plan.cache_bytes:,} bytes for its {tokens:,} slots, more than "
            f"{parse_bytes(requested.kv_budget):,}; raise the budget to that, or {again}",
            least_kv_budget=plan.cache_bytes,
        )
    while cap is not None and requested.block_size is None and plan.total_bytes > cap and block > 1:
        block = -(-block // 2)  # a smaller block takes a smaller workspace
        plan = of_block(block)
    if cap is not None and plan.total_bytes > cap:
        raise PlanInfeasible(
            f"the process takes {plan.total_bytes:,} bytes with blocks of {block:,} tokens, more "
            f"than the cap of {cap:,}: {baseline:,} of its own, {plan.weights:,} of "
            f"weights, {plan.recall_store:,} of the index of recall, {plan.cache_bytes:,} for "
            f"{tokens:,} slots; raise it to "
            f"{with_margin(plan.total_bytes) >> 20}MiB, or {again}",
            least_memory_cap=with_margin(plan.total_bytes),
        )
    least = plan if requested.block_size else of_block(1)
    own = process_bytes() + LOADING if cap is None else baseline
    return replace(
        plan,
        least_kv_budget=least.cache_bytes,
        least_memory_cap=with_margin(own + least.run_bytes),
    )


def _of_block(manifest: Manifest, baseline: int, recall_store: int, block: int) -> MemoryPlan:
    parts = {"keys": 0, "values": 0, "positions": 0, "queries": 0, "state": 0, "sliding": 0}
    windows = windows_in(manifest.facts)
    also = {"arrived": "keys", "shifts": "positions"}  # kept for float16 and int8 keys that turn
    cache, slots, kv_dtype = "float32", 1, manifest.facts.get("kv_dtype")
    numbers = {"sliding": 0, "capped": 0}  # of keys and values of one token
    for spec in buffers_of(manifest, block):
        if spec.name in ("keys", "values"):
            kind = "capped" if windows[spec.layer] is None else "sliding"
            numbers[kind] += spec.shape[1] * spec.shape[3]
        name = also.get(spec.name, spec.name)
        if windows[spec.layer] is not None:
            name = "sliding"
        parts[name if name in parts else "state"] += spec.nbytes
        if spec.name == "keys":
            slots = max(slots, spec.shape[2])
            cache = cache if kv_dtype else str(spec.dtype)
    turns = turns_of(manifest, block)
    return MemoryPlan(
        policy=manifest.facts["policy"]["name"],
        positions=manifest.facts["positions"],
        budget_tokens=manifest.facts["budget_tokens"],
        block_size=block,
        dtype=cache,
        kv_dtype=kv_dtype,
        keys_values=parts["keys"] + parts["values"] + _scales(manifest),
        slot_positions=parts["positions"],
        policy_state=parts["state"],
        evicted_store=0,
        query_window=parts["queries"],
        rotation_table=0 if turns is None else turns.nbytes,
        sliding_layers=parts["sliding"],
        state_layers=0,
        workspace=_workspace(manifest, slots, block) + _query_bytes(manifest, block),
        logits=4 * manifest.model["vocabulary"],
        weights=manifest.model["weights_bytes"],
        weights_from=_source(manifest),
        baseline=baseline,
        recall_store=recall_store,
        word_vectors=_word_vectors(manifest),
        token_bytes=numbers["capped"] * np.dtype(cache).itemsize,
        sliding_token_bytes=numbers["sliding"] * np.dtype(cache).itemsize,
        sliding_window=max((window or 0 for window in windows), default=0),
        trained_length=manifest.model["trained_length"],
    )


def _source(manifest: Manifest) -> WeightsSource:
    """Return where the bytes of the weights are from: an export that is not made has no files."""
    return "the manifest" if "files" in manifest.facts else "config, estimated"


def _word_vectors(manifest: Manifest) -> int:
    """Return the most bytes by which texts are compared: none in exports without the graph."""
    graphs = manifest.facts.get("graphs", {"embeddings"})
    return vectors_bytes(manifest.model["hidden_size"]) if "embeddings" in graphs else 0


def _scales(manifest: Manifest) -> int:
    """Return the bytes of the scales of int8 slots, one per channel of keys and of values."""
    if manifest.facts.get("kv_dtype") is None:
        return 0
    model = manifest.model
    return 8 * int(model["layers"] * model["kv_heads"] * model["head_dim"])


def _query_bytes(manifest: Manifest, block: int) -> int:
    """Return the bytes of the queries that a block's evictions may look at, in float32."""
    model = manifest.model
    if manifest.facts["queries_observed"] == 0:
        return 0
    return 4 * block * int(model["layers"] * model["heads"] * model["head_dim"])


def _workspace(manifest: Manifest, slots: int, block: int) -> int:
    """Return the bytes that a block takes in float32."""
    model = manifest.model
    hidden = block * (4 * model["hidden_size"] + 3 * model["mlp_size"])
    attention = 3 * model["heads"] * block * slots  # scores, their mask, their weights
    spread = 2 * model["heads"] * slots * model["head_dim"]  # keys, values of every query head
    numbers = model["kv_heads"] * slots * model["head_dim"]  # a layer's keys
    eviction = 3 * numbers
    # Slots in int8 as floats: scored ones; attended ones, without the block and with it.
    floats = 6 * numbers if manifest.facts.get("kv_dtype") else 0
    nbytes: int = 4 * (hidden + attention + spread + eviction + floats)
    return nbytes
