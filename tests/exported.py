"""Makes exported decoders' modules over slots, and holds them beside the runtime."""

from __future__ import annotations

from typing import Any

import torch
from conftest import small_policy
from families import model_of

from kvcap.export.decoder.check import Watched, facts_of
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.decoder.spec import layout_for
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.settings import CacheSettings

BUDGET, BLOCK = 20, 8
LENGTHS = [8, 8, 8, 5, 8, 1, 1, 1, 3, 8, 1]  # beyond the budget, odd blocks, steps
STEPS = [8, 8, 8, 5, *[1] * 9, 3, *[1] * 6, 8, 1, 1]


def decoder(
    family: str = "llama",
    policy: Any = "keydiff",
    positions: Any = "compact",
    budget: int = BUDGET,
    **changes: Any,
) -> DecoderGraph:
    """Return the graph of a small random model."""
    model = model_of(family, **changes)
    eviction = small_policy(policy, model.config) if isinstance(policy, str) else policy
    settings = CacheSettings(budget, BLOCK, eviction, positions)
    return DecoderGraph(model, layout_for(model.config, settings))


def ids_of(count: int) -> torch.Tensor:
    """Return tokens of which no two are equal, since equal keys would tie."""
    return 3 + torch.randperm(94, generator=torch.Generator().manual_seed(1))[None, :count]


def beside_the_runtime(
    made: DecoderGraph, lengths: list[int] = LENGTHS, pins: Any = (), evict_every: int = 1
) -> Watched:
    """Return the modules over slots as the backend has them, which keep what the runtime keeps."""
    layout, model = made.layout, made.model
    cache = BudgetCache(
        model.config,
        layout.budget_tokens,
        layout.block_size,
        layout.eviction,
        positions=layout.positions,
        evict_every=evict_every,
    )
    loop, seen = BlockLoop(model, cache), 0
    decoder = Watched(facts_of(made, "fp32"), made, evict_every)
    cache.allocate(1, torch.float32, "cpu")
    cache.pin(pins)
    for block in ids_of(sum(lengths)).split(lengths, 1):
        assert decoder.room == cache.room
        for part in block.split(cache.room, 1):  # less than a block while some wait to be evicted
            wanted = loop.read(part)
            logits = decoder.run(part[0].tolist(), seen, pins)
            seen += part.shape[1]
            torch.testing.assert_close(torch.from_numpy(logits), wanted, rtol=1e-4, atol=1e-4)
            for mine, theirs in zip(decoder.positions(seen), cache.capped_layers, strict=True):
                stored = theirs.segments[0].positions[0].sort(-1).values
                assert torch.equal(torch.from_numpy(mine), stored)
    return decoder


def graph_of(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: Any = ()) -> Any:
    """Return an ONNX model of these nodes alone."""
    from onnx import helper

    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
