"""Graphs that capture nothing: all passes are read by the code that graphs would capture."""

from __future__ import annotations

from kvcap.runtime.backends.pytorch.cuda_graphs import BlockGraphs
from kvcap.runtime.models.fused.decoder import Decoder, covers


class Uncaptured(BlockGraphs):
    """The graphs of a cache, read without one; kvcap's own decoder is taken untried."""

    def __init__(self, model, cache, several=True):
        super().__init__(model, cache, several)
        if self.refused is None and covers(model):
            self.decoder = Decoder(model)
            self.decoder.join()

    def read(self, ids, need_logits=True):
        """Replay nothing."""
        return
