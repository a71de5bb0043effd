"""Replaces CUDA graphs by the code that they would capture, for tests of that code."""

from __future__ import annotations

from kvcap.runtime.backends.pytorch.cuda_graphs import BlockGraphs
from kvcap.runtime.models.fused.decoder import Decoder, covers


class Uncaptured(BlockGraphs):
    """A cache's graphs that capture nothing; kvcap's own decoder is used without a trial."""

    def __init__(self, model, cache, several=True):
        super().__init__(model, cache, several)
        if self.refused is None and covers(model):
            self.decoder = Decoder(model)
            self.decoder.join()

    def read(self, ids, need_logits=True):
        """Read tokens by the code that a graph would capture."""
        return
