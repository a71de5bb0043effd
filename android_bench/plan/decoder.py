"""Puts a whole decoder into a plan: its files, the work that is timed, and the expected logits.

A decoder runs over random tokens, as its speed does not depend on the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from kvcap.android_bench.decoders import decoder_in
from kvcap.android_bench.errors import PlanBroken
from kvcap.android_bench.plan.expected import Folder
from kvcap.runtime.backends.onnxruntime.decoder import ExportedDecoder, evictors_of
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.manifest import Manifest, windows_in
from kvcap.runtime.types import EVICT_EVERY, MANIFEST

FOLDER = "decoder"
SEED = 11  # seed of the text
EXACT, ROUNDED = 1e-3, 0.05  # error allowed of a runner's logits, relative to the largest


@dataclass(frozen=True)
class DecoderWork:
    """The work of a decoder that is timed: prompts, answers, and a sustained run."""

    prompt: int = 128  # tokens of the prompt
    answer: int = 64  # tokens written in every round
    long: int | None = None  # tokens of the long prompt; None: max(8 blocks, 4 * budget)
    minutes: float = 2.0  # minutes of the sustained run at the end
    every: float = 30.0  # seconds of each window in which its tokens are counted

    def __post_init__(self) -> None:
        """Refuse an answer too short to be timed.

        Raises:
            PlanBroken: the answer has fewer than two tokens.
        """
        if self.answer < 2:
            raise PlanBroken(f"--answer-tokens {self.answer} give no time between two; use 2")


def shape_of(folder: Path) -> dict[str, Any]:
    """Return the sizes of a decoder's layers as fields of a plan's shape, with the model's name."""
    manifest = decoder_in(folder)
    sizes = {name: manifest.model[name] for name in ("kv_heads", "heads", "head_dim")}
    return {**sizes, "block": manifest.facts["block_size"], "name": str(manifest.model["name"])}


def decoder_entry(source: Path, work: DecoderWork, folder: Folder) -> dict[str, Any]:
    """Describe the decoder in `source` for a plan, and copy its files into `folder`."""
    manifest = decoder_in(source)
    facts, model = manifest.facts, manifest.model
    for name in (MANIFEST, *sorted(manifest.listed)):
        folder.copy(f"{FOLDER}/{name}", source / name)
    budget, block = int(facts["budget_tokens"]), int(facts["block_size"])
    stem = str(model["name"]).rstrip("/").rsplit("/", 1)[-1][:40]
    letters = "".join(c if c.isascii() and (c.isalnum() or c in "._+-") else "-" for c in stem)
    policy = str(facts["policy"]["name"])
    return {
        "id": f"decoder.{letters}.{policy}.{facts['dtype']}.n{budget}",
        "model": str(model["name"])[-200:],
        "policy": policy,
        "positions": facts["positions"],
        "dtype": facts["dtype"],
        "budget": budget,
        "block": block,
        "evict_every": min(EVICT_EVERY, block),
        "manifest": f"{FOLDER}/{MANIFEST}",
        "weights_bytes": model["weights_bytes"],
        "state_bytes": facts["state_bytes"],
        "vocabulary": model["vocabulary"],
        "seed": SEED,
        "prompt_tokens": work.prompt,
        "answer_tokens": work.answer,
        "long_tokens": work.long or max(8 * block, 4 * budget),
        "sustained_seconds": work.minutes * 60,
        "window_seconds": work.every,
        "check": _check(manifest, folder),
    }


def _check(manifest: Manifest, folder: Folder) -> dict[str, Any]:
    """Return the tokens of a check, and the last one's logits in ONNX Runtime on this machine.

    In float32 the tokens pass the budget many times. If products are rounded, another processor's
    logits differ by more, and it may keep other slots: then all tokens fit the budget.
    """
    facts = manifest.facts
    prompt, runs = facts["sample"]["prompt"], facts["sample"]["runs"]
    exact = facts["dtype"] == "fp32"
    if not exact:
        pairs = zip(facts["budgets"], windows_in(manifest.facts), strict=True)
        least = min(budget for budget, window in pairs if window is None)
        runs = [n for n, whole in zip(runs, accumulate(runs), strict=True) if whole <= least]
        runs = runs or [min(int(facts["sample"]["runs"][0]), least)]
    block = int(facts["block_size"])
    graph, evictors = Graph(manifest.decoder, 1), evictors_of(manifest, 1)
    decoder = ExportedDecoder(manifest, graph, evictors, block, min(EVICT_EVERY, block))
    seen, logits = 0, None
    for length in runs:
        logits = decoder.run(prompt[seen : seen + length], seen, [])
        seen += length
    tensor = torch.from_numpy(logits[0].copy())  # type: ignore[index]
    allowed = (EXACT if exact else ROUNDED) * float(tensor.abs().amax())
    file = folder.numbers("expected/decoder.logits", tensor)
    return {"prompt": prompt[:seen], "runs": runs, "file": file, "allowed": allowed}
