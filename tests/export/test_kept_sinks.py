"""Graphs and decoders keep the first 4 tokens under a policy that would evict these first.

The first tokens of each text are all alike, which KeyDiff evicts before all others: with no sinks
pinned they go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import decoder
from tools import pocket_decoder

from kvcap.android_bench.plan.presets import PRESETS
from kvcap.android_bench.plan.write import _spec
from kvcap.export.decoder.check import Watched, facts_of
from kvcap.export.graphs.check import session
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import Spec
from kvcap.export.graphs.write import write
from kvcap.policies import load_policy
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime, PolicyRequest

ALIKE = 20  # tokens of the beginning
SHAPE = Shape(kv_heads=2, heads=4, head_dim=8, block=8, budget=64)


def text(tokens: int, vocabulary: int) -> Any:
    """Return a text [1, tokens] whose beginning is one token again and again."""
    ids = np.random.default_rng(0).permutation(np.arange(6, vocabulary))[None, :tokens]
    ids[:, :ALIKE] = 5
    return ids


def keep(rows: Any, count: int) -> bool:
    """Return whether every head of every layer, [N] each, holds the first `count` tokens."""
    return all(set(range(count)) <= set(np.asarray(head).tolist()) for row in rows for head in row)


def kept_by(file: Path, shape: Shape) -> Any:
    """Return the tokens [B, K, N] that a graph keeps of a full cache."""
    slots = shape.budget + shape.block
    size = (shape.batch, shape.kv_heads, slots)
    keys = np.random.default_rng(0).standard_normal((*size, shape.head_dim)).astype(np.float32)
    keys[:, :, :ALIKE] = 1.0
    given = {
        "keys": keys,
        "values": keys,
        "seen": np.array(slots, np.int32),
        "positions": np.broadcast_to(np.arange(slots, dtype=np.int32), size).copy(),
        "pinned": np.zeros(size, bool),
    }
    graph = session(file)
    names = [one.name for one in graph.get_inputs()]
    return graph.run(["kept_positions"], {name: given[name] for name in names})[0]


@pytest.mark.parametrize(("sinks", "kept"), [(None, 4), (0, 0), (6, 6)])
def test_a_graph_that_evicts_keeps_them(sinks, kept, tmp_path):
    options = {} if sinks is None else {"sink_tokens": sinks}
    spec = Spec(load_policy("keydiff", **options), SHAPE, "evict")
    rows = kept_by(write(spec, tmp_path, quick=True)[0], SHAPE)
    assert keep(rows, kept)
    assert not keep(rows, kept + 1)


@pytest.mark.parametrize("preset", ["quick", "full"])
def test_the_graphs_of_a_phone_s_preset_keep_them(preset, tmp_path):
    """Their numbers of slots are made small here; the policy is as the preset has it."""
    sinks = [
        _spec(SHAPE, variant, group.stage, "fp32", SHAPE.budget)
        for group in PRESETS[preset]().groups
        if group.stage == "evict"
        for variant in group.variants
        if variant.policy == "keydiff" and variant.formulation == "stateless"
    ]
    assert sinks
    assert all(keep(kept_by(write(x, tmp_path, quick=True)[0], SHAPE), 4) for x in sinks)


@pytest.mark.parametrize(("sinks", "kept"), [(None, 4), (0, 0)])
def test_a_whole_decoder_keeps_them(sinks, kept):
    options = {} if sinks is None else {"sink_tokens": sinks}
    made = decoder(policy=load_policy("keydiff", **options), budget=32)
    watched, seen = Watched(facts_of(made, "fp32"), made, 1), 0
    for block in torch.from_numpy(text(70, made.model.config.vocab_size)).split(8, 1):
        watched.run(block[0].tolist(), seen, [])
        seen += block.shape[1]
    assert keep(watched.positions(seen), 4) == bool(kept)


def held(folder: Path, sinks: int | None, budget: int | None = None) -> Any:
    """Return the tokens of every layer [K, N] after a text and single tokens."""
    runtime = OrtRuntime.from_directory(
        folder, PolicyRequest("keydiff", sink_tokens=sinks), budget_tokens=budget
    )
    loop = runtime.loop()
    ids = text(3 * runtime.plan.budget_tokens, runtime.manifest.model["vocabulary"])
    loop.prefill(ids)
    for token in ids[:, -9:].T:
        loop.read(token[None])
    return loop.cache.positions


def test_kvcap_s_own_decoder_keeps_them_in_onnx_runtime(tmp_path_factory):
    """Its graph has them, so that the phone's page, which runs the same graph, has them too."""
    rows = held(pocket_decoder(tmp_path_factory), None)
    assert keep(rows, 4)
    assert not keep(rows, ALIKE)
