"""Runs kvpress: reads the whole prompt with full attention, then prunes each layer by KeyDiff.

Decoded tokens are never evicted, as kvpress only prunes prompts.
"""

from __future__ import annotations

from typing import Any

from .run_transformers import Growing
from .serve import serve


class Pressed(Growing):
    """A model of transformers whose cache is pruned once, after the prompt."""

    packages: tuple[str, ...] = ("kvpress", "torch", "transformers")

    def __init__(self, settings: dict[str, Any]) -> None:
        from kvpress import KeyDiffPress

        super().__init__(settings)
        self.press, self.budget = KeyDiffPress, settings["budget"]

    def fill(self, ids: list[int]) -> None:
        """Fill the cache with as many random keys and values as would stay of the prompt."""
        self._hold(min(len(ids), self.budget))
        self.seen = len(ids)

    def prefill(self, ids: list[int]) -> None:
        gone = max(0.0, 1 - self.budget / len(ids))
        with self.press(compression_ratio=gone)(self.model):
            super().prefill(ids)


def main() -> None:
    """Serve until the input ends."""
    serve(Pressed)
