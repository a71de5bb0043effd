"""CUDA graphs without a GPU: capturing a pass does its work, and every graph serves once."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch

from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.cache import step
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.models.arguments import cache_argument


class Graph:
    """What it captures has been done."""

    def pool(self):
        return None

    def replay(self):
        pass


class Stream:
    """A stream whose work is done when it is asked for; notes when it waits for another."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, _):
        self.log.append(f"{self.name} waits")

    wait_event = wait_stream

    def record_event(self):
        return "event"


class Noted(list):
    """Notes when one stream waited for another, and what of passes that were captured."""

    def __init__(self):
        super().__init__()
        self.kinds = []
        """Kinds of passes."""
        self.at_once = []
        """For each, whether nothing was waited for, and no memory freed before."""


def pretend(monkeypatch):
    """Have graphs captured so; returns what is noted meanwhile."""
    noted, read = Noted(), cuda_graphs.BlockGraphs.read
    main, side = Stream("main", noted), Stream("side", noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    monkeypatch.setattr(step, "_streams", lambda _: [side] * step.LAYERS)
    monkeypatch.setattr(step, "_urgent", lambda _: Stream("urgent", noted))

    @contextmanager
    def capturing(graph, pool, device, at_once):
        noted.at_once.append(at_once)
        yield

    def once(self, ids, need_logits=True):
        found = read(self, ids, need_logits)
        noted.kinds.extend(self.captured)
        self.captured.clear()
        return found

    monkeypatch.setattr(cuda_graphs, "_capturing", capturing)
    monkeypatch.setattr(cuda_graphs.BlockGraphs, "read", once)
    return noted


class RowGraph:
    """A graph of unequal rows that serves again: the pass is run by what the device knows."""

    pool = None

    def __init__(self, model, cache, ids, kind, pool=None, at_once=False):
        self.model, self.cache, self.kind = model, cache, kind
        cache.advance(kind.length, kept=False)

    def replay(self, ids, seen):
        """Whatever the host counts is as it was, and may be behind what is read."""
        cache, kind, new = self.cache, self.kind, ids.shape[1]
        counters, token_counter = cache.counters, torch.tensor(seen)
        for layer, (_, held) in zip(cache.capped_layers, counters, strict=True):
            layer.restore_counters(seen, held)
        with cache.passing(ForwardContext(seen)) as current:
            current.bind_token_counter(token_counter, cache.block_size, filling=False)
            count = torch.tensor(new, dtype=torch.int32) if kind.length > 1 else None
            rows = cache.row_pass(cache._table, kind.longest, count, always=True)
            current.rows = rows
            places = torch.arange(kind.length)
            out = self.model(
                input_ids=torch.nn.functional.pad(ids, (0, kind.length - new), value=5),
                position_ids=(rows.first(token_counter) + places).expand(kind.batch, -1),
                **cache_argument(self.model, cache),
                use_cache=True,
                logits_to_keep=torch.full((int(kind.need_logits),), new - 1),
            )
            cache.evict_together()
        for layer, mine in zip(cache.capped_layers, counters, strict=True):
            layer.restore_counters(*mine)
        return out.logits.flatten(0, 1)
