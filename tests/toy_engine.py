"""Makes small sessions of both backends for tests: over a random model, and over toy arrays.

Both record the tokens that their cache has read, so that a test can compare the conversation that a
model would see.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from kvcap import pocket
from kvcap.runtime.backends.numpy_sampler import Generation, NumpySampler
from kvcap.runtime.backends.onnxruntime.loop import OrtCache, OrtLoop
from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.backends.pytorch.sampler import Sampler
from kvcap.runtime.cache.layout import PARTS
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.session import settings
from kvcap.runtime.session.batch import Batch
from kvcap.runtime.session.session import Session

BLOCK = 16
BACKENDS = ("torch", "numpy")


@dataclass
class ToyDecoder:
    """A stand-in for an exported decoder; its logits follow from the last token and its place."""

    budget: int
    vocabulary: int
    block_size: int = BLOCK
    version: str = "0"
    sinks: int = 0
    nbytes: int = 4096
    read: list[int] = field(default_factory=list)  # all tokens that the cache has read, in order
    held: list[int] = field(default_factory=lambda: [0])
    windows: dict[int, Any] = field(default_factory=dict)  # sliding layers, of which it has none

    @property
    def budgets(self) -> list[int]:
        return [self.budget]

    @property
    def recents(self) -> list[int]:
        return [0]

    @property
    def room(self) -> int:
        return self.block_size

    def used_bytes(self, seen: int) -> int:
        return min(seen, self.budget) * 8

    def run(self, ids: Any, seen: int, spans: Any) -> Any:
        assert len(ids) <= self.block_size
        self.read[seen:] = ids
        self.held = [min(seen + len(ids), self.budget)]
        draws = np.random.default_rng([ids[-1], seen])
        return draws.standard_normal((1, self.vocabulary)).astype(np.float32)

    def positions(self, seen: int) -> Any:
        return [np.arange(max(0, seen - self.budget), seen)[None]]

    def state(self, seen: int, held: Any) -> Any:
        return {}


@dataclass(repr=False)
class ToyEngine:
    """An engine like the ONNX Runtime backend's, around a `ToyDecoder`."""

    budget: int
    name: str = "toy"
    device_label: str = "nowhere"
    trained_length: int = 10**6
    cap_bytes: int = 4096
    tokenizer: Any = field(default_factory=lambda: Tokenizer(Path(pocket.path())))
    generation: Generation = field(default_factory=Generation)
    memory_cap: int | None = None
    meaning = None

    @property
    def plan(self) -> MemoryPlan:
        sizes = dict.fromkeys((*PARTS, "workspace", "logits", "weights"), 0)
        return MemoryPlan(
            "toy", "compact", self.budget, BLOCK, "float32", **sizes | {"keys_values": 4096}
        )

    @property
    def vocabulary(self) -> int:
        size: int = self.tokenizer.backend_tokenizer.get_vocab_size()
        return size

    def loop(self) -> OrtLoop:
        return OrtLoop(OrtCache(ToyDecoder(self.budget, self.vocabulary), "toy"))

    def session(self, system: str | None = None, seed: int | None = None) -> Session:
        return Session(self, system, seed)

    def batch(self, size: int) -> Batch:
        return Batch(self, size)

    def shared_rows(self, size: int) -> tuple[None, str]:
        return None, "a stand-in reads one conversation"

    def with_budget(self, tokens: int) -> ToyEngine:
        return replace(self, budget=tokens)

    def rng(self, seed: int | None) -> Any:
        return np.random.Generator(np.random.PCG64(seed))

    def sampler(self, generation: Any, rng: Any) -> NumpySampler:
        return NumpySampler(generation, rng)

    def token_ids(self, tokens: list[int]) -> Any:
        return np.array([tokens])

    def append_token(self, history: Any, token: Any) -> Any:
        return np.concatenate((history, token[:, None]), axis=1)


@functools.cache
def tiny(model: str) -> Runtime:
    """Return a runtime of a folder that `tiny_chat` saved, which is loaded once."""
    return Runtime.from_pretrained(model, budget_tokens=64, block_size=BLOCK, device="cpu")


def session_of(runtime: Any, system: str | None = None, budget: int | None = None) -> Session:
    """Return a session of short answers, which records the tokens it reads in `session.read`."""
    if budget is not None:
        runtime = runtime.with_budget(budget)
    session: Any = runtime.session(system, seed=0)
    session.set_generation(max_new_tokens=6, temperature=0.0)
    if isinstance(runtime, ToyEngine):
        session.read = session.cache.decoder.read
        return session
    loop, session.read = session.loop, []
    plain = loop.read

    def read(ids: Any, need_logits: bool = True) -> Any:
        session.read[loop.cache.seen :] = ids[0].tolist()
        return plain(ids, need_logits)

    loop.read = read
    return session


def held(session: Any) -> str:
    """Return the text that the cache has read since it was empty, with special tokens."""
    ids = session.read[: session.cache.seen]
    return session.runtime.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def sound(session: Session, runtime: Any) -> None:
    """Assert what is true of any session in which no answer is being written."""
    cache, stats = session.cache, session.stats
    roles = [message["role"] for message in session.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert getattr(cache, "consistent", True)
    assert cache.seen or cache.unread is None
    assert stats.bytes <= stats.peak_bytes == cache.nbytes <= stats.cap_bytes == runtime.cap_bytes
    assert stats.held_tokens <= runtime.plan.budget_tokens
    assert stats.held_tokens + stats.waiting_tokens + stats.evicted_tokens == stats.seen_tokens
    json.dumps(session.conversation)
    json.dumps(stats.as_dict())
    pinned = {i for start, stop in cache.pinned_spans for i in range(start, min(stop, cache.seen))}
    for layer in cache.kept_tokens():
        for head in layer.heads:
            assert len({*head.tolist()}) == len(head)
            assert {*head.tolist()} <= {*range(cache.seen)}
            assert isinstance(runtime, ToyEngine) or pinned <= {*head.tolist()}


def samplers(seed: int = 0, **options: Any) -> tuple[Sampler, NumpySampler]:
    """Return a sampler of either backend, PyTorch's first, under the same settings."""
    config = settings.copied(GenerationConfig(top_k=0))
    config.update(**options)
    return (
        Sampler(config, torch.Generator().manual_seed(seed)),
        NumpySampler(Generation(**options), np.random.default_rng(seed)),
    )


def drawn(both: tuple[Sampler, NumpySampler], row: Any, history: Any, *more: Any) -> list[int]:
    """Return the tokens that samplers of both backends draw by logits [1, V]."""
    one, other = both
    theirs = one.next(torch.from_numpy(row), torch.from_numpy(history), *more)
    return [int(theirs.item()), int(other.next(row.copy(), history, *more).item())]


def numpy_scores(sampler: NumpySampler, logits: Any, history: Any) -> Any:
    """Return the scores [V] that a NumPy sampler makes of logits [V]; -inf is never drawn."""
    scores = logits.copy()
    sampler.penalise(scores, history)
    if sampler.greedy:
        return scores
    tokens, kept = sampler.candidates(scores)
    if tokens is None:
        return kept
    whole = np.full_like(scores, -np.inf)
    whole[tokens] = kept
    return whole
