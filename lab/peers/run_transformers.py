"""Runs transformers with its defaults: SDPA, a growing cache, the prompt read at once, bfloat16.

`logits_to_keep=1` saves it the logits of the whole prompt, as a careful user would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .serve import serve


class Growing:
    """A model that reads into a `DynamicCache`."""

    packages: tuple[str, ...] = ("torch", "transformers")

    def __init__(self, settings: dict[str, Any]) -> None:
        import inspect

        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings["threads"])
        torch.set_grad_enabled(False)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.config = self.model.config
        known = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"  # transformers 5.24
        self.vocabulary = int(self.config.vocab_size)
        self.token = self.seen = 0
        self.cache: Any = None

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the keys and values that are held now."""
        held = [(layer.keys, layer.values) for layer in self.cache.layers]
        return sum(int(x.nbytes) for pair in held for x in pair)

    def fill(self, ids: list[int]) -> None:
        """Fill the cache with random keys and values, which take as long as real ones."""
        self._hold(len(ids))
        self.seen = len(ids)

    def _hold(self, tokens: int) -> None:
        config, torch = self.config, self.torch
        self._empty()
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, 1, heads, tokens, size).bfloat16()
            self.cache.update(keys, values, layer)

    def prefill(self, ids: list[int]) -> None:
        self._empty()
        self._read(ids)

    def _empty(self) -> None:
        from transformers import DynamicCache

        self.cache, self.seen = DynamicCache(config=self.config), 0

    def step(self) -> None:
        self._read([self.token])

    def _read(self, ids: list[int]) -> None:
        positions = self.torch.arange(self.seen, self.seen + len(ids))
        out = self.model(
            self.torch.tensor([ids]),
            position_ids=positions[None],
            **{self.cache_name: self.cache},
            use_cache=True,
            logits_to_keep=1,
        )
        self.seen += len(ids)
        self.token = int(out.logits[0, -1].argmax())

    def eviction_seconds(self, work: Callable[[], Any]) -> float | None:
        """Return None, as transformers evicts nothing."""
        return None


def main() -> None:
    """Serve until the input ends."""
    serve(Growing)
