"""Runs random conversations, two in a context, beside a plain context that reads all they read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from llama_reference import Floats, Follower, Plain, agree, needs_library, runtime_of

from kvcap.runtime.session.session import Session
from kvcap.runtime.types import Positions

pytestmark = needs_library

BUDGET, BLOCK, PROGRAMS, EACH = 48, 16, 200, 10
POSITIONS: tuple[Positions, ...] = ("compact", "true", "auto")
POLICIES = ("streaming_llm", "keydiff-window", "knorm", "lagkv")
WORDS = ("the", "and", "a", "wander", "in", "42", "é☃")
DEEDS = ("send", "send", "send", "clear", "undo", "again", "save", "load", "both")
LOOSE = 0.05  # sums of float16 round otherwise, and keys are turned again and again


class Watched:
    """Two conversations in one context, whose every token is read by followers too."""

    def __init__(self, file: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        policy, positions = rng.choice(POLICIES), rng.choice(POSITIONS)
        options = {"lag": 8} if policy == "lagkv" else {}
        self.runtime = runtime_of(
            file,
            policy=policy,
            policy_options=options,
            positions=positions,
            evict_every=rng.choice((1, 3, BLOCK)),
            budget_tokens=BUDGET,
            block_size=BLOCK,
        )
        self.runtime.reserve(2)
        self.sessions = [self.runtime.session("Be." if i else None, seed=seed) for i in (0, 1)]
        self.caches = {session.cache.sequence: session.cache for session in self.sessions}
        self.followers = {
            sequence: Follower(Plain(self.runtime.gguf, block=BLOCK), positions)
            for sequence in self.caches
        }
        self.read = self.sessions[0].cache.context.read
        self.sessions[0].cache.context.read = self.check
        for session in self.sessions:
            self.watch(session)
        self.saved: dict[Path, list[tuple[list[int], list[int]]]] = {}
        self.settling = False

    def watch(self, session: Session) -> None:
        """Have a conversation's follower forget what it forgets, and pass over turning keys."""
        cache = session.cache
        reset, settle = cache.reset, cache.settle_keys

        def forgotten() -> None:
            reset()
            self.followers[cache.sequence].reset()

        def settle_keys() -> None:
            self.settling = True
            settle()
            self.settling = False

        cache.reset, cache.settle_keys = forgotten, settle_keys

    def check(self, tokens: Sequence[tuple[int, int, int]], outputs: Sequence[int]) -> Floats:
        """Read tokens, and compare logits and positions with those of the followers."""
        logits: Floats = self.read(tokens, outputs)
        if self.settling:
            return logits
        for sequence in dict.fromkeys(one for one, _, _ in tokens):
            follower, cache = self.followers[sequence], self.caches[sequence]
            follower.keep(cache.tokens.tolist())
            indices = [i for i, token in enumerate(tokens) if token[0] == sequence]
            expected = follower.read([tokens[i][1] for i in indices])
            assert [p for _, p in follower.held[-len(indices) :]] == [tokens[i][2] for i in indices]
            for row, output in enumerate(outputs):
                if output in indices:
                    agree(logits[row], expected[indices.index(output)], LOOSE)
        return logits

    def step(self, folder: Path) -> None:
        """Do something to a conversation."""
        rng, session = self.rng, self.rng.choice(self.sessions)
        session.set_generation(max_new_tokens=rng.randint(1, 20), eos_token_id=None)
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))
        follower = self.followers[session.cache.sequence]
        doing = rng.choice(DEEDS)
        if doing == "clear":
            session.clear()
        elif doing == "undo" and session.messages:
            session.undo()
        elif doing == "again" and session.messages:
            "".join(session.regenerate())
        elif doing == "save":
            file = folder / str(len(self.saved))
            session.save(file)
            self.saved[file] = [*follower.steps]
        elif doing == "load" and self.saved:
            file = rng.choice([*self.saved])
            session.restore(file)
            follower.replay(self.saved[file])
            follower.keep(session.cache.tokens.tolist())
            assert [p for _, p in follower.held] == session.cache.cell_positions.tolist()
        elif doing == "both":
            batch = self.runtime.batch(2)
            for one in self.sessions:
                batch.add(one, one.send(text))
            assert all(isinstance(piece, str) for _, piece in batch)
        else:
            "".join(session.send(text))
        assert all(cache.held < BUDGET + BLOCK for cache in self.caches.values())

    def close(self) -> None:
        """Free the followers' contexts."""
        for follower in self.followers.values():
            follower.plain.close()


@pytest.mark.filterwarnings("ignore:position .* is beyond")
@pytest.mark.slow(keep=1, ci=3)
@pytest.mark.parametrize("first", range(0, PROGRAMS, EACH))
def test_random_programs_read_what_a_plain_context_reads(
    gguf: Callable[..., Path], tmp_path: Path, first: int
) -> None:
    for seed in range(first, first + EACH):
        folder = tmp_path / str(seed)
        folder.mkdir()
        trained = 128 if seed % 2 else 512
        watched = Watched(gguf("llama" if seed % 3 else "qwen3", trained=trained), seed)
        for _ in range(8):
            watched.step(folder)
        watched.close()
