"""CUDA graphs without a GPU: capturing a pass does its work, and every graph serves once."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch

from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.cache import step


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
