"""Runs kvcap for benchmarks: a model in PyTorch, or an exported decoder, under its cap."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .serve import serve


class Capped:
    """kvcap's model, with a loop that reads into a cache of fixed size."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.runtime, self.packages = _runtime(settings)
        self.loop = self.runtime.loop()
        self.cache = self.loop.cache
        known = getattr(self.runtime, "vocabulary", None)
        self.vocabulary = int(known or self.runtime.manifest.model["vocabulary"])
        self.kv_bytes = int(self.cache.nbytes)
        # So many tokens fill every slot, after which times do not depend on more tokens.
        self.enough = settings["budget"] + 2 * settings["block_size"]
        self.token = 0

    def fill(self, ids: list[int]) -> None:
        """Read as much of the prompt as fills the cache, unless the cache is full already."""
        if len(ids) < self.enough or self.cache.seen < self.enough:
            self.prefill(ids[: self.enough] or [0])

    def prefill(self, ids: list[int]) -> None:
        self.cache.reset()
        self._choose(self.loop.prefill(self.runtime.token_ids(ids)))

    def step(self) -> None:
        self._choose(self.loop.read(self.runtime.token_ids([self.token])))

    def _choose(self, logits: Any) -> None:
        self.token = int(logits[0].argmax())

    def eviction_seconds(self, work: Callable[[], Any]) -> float | None:
        """Return the seconds that layers spend after attention; None for a decoder's graph."""
        layers = getattr(self.cache, "capped_layers", None)
        if layers is None:
            return None
        spent: list[float] = []
        for layer in layers:
            layer.engine.evict = _timed(layer.engine.evict, spent)
        work()
        for layer in layers:
            del layer.engine.evict
        return sum(spent)


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        spent.append(time.perf_counter() - start)
        return result

    return timed


def _runtime(settings: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Return the runtime, and the names of packages whose versions are reported."""
    sizes = {"budget_tokens": settings["budget"], "block_size": settings["block_size"]}
    if settings["backend"] == "onnxruntime":
        from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime

        runtime = OrtRuntime.from_directory(settings["model"], threads=settings["threads"], **sizes)
        return runtime, ("kvcap", "onnxruntime")
    if settings["backend"] == "llamacpp":
        from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime

        given = {"policy": settings["policy"], "threads": settings["threads"]}
        return LlamaRuntime.from_file(settings["model"], **given, **sizes), ("kvcap",)
    import torch

    from kvcap.runtime.backends.pytorch.runtime import Runtime

    torch.set_num_threads(settings["threads"])
    dtype, policy = settings["weights"], settings["policy"]
    more = {"dtype": dtype, "device": "cpu", "policy": policy, "weights": settings["packed"]}
    return Runtime.from_pretrained(settings["model"], **more, **sizes), (
        "kvcap",
        "torch",
        "transformers",
    )


def main() -> None:
    """Serve until the input ends."""
    serve(Capped)
