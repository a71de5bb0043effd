"""Checks in any engine that regions of a conversation leave the cache in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from chat_templates import THINKING, with_template

from kvcap.runtime.cache.regions import within
from kvcap.runtime.session.messages import render

BUDGET = 128
EARLY = ("thoughts", "tool results")


def evicted(session: Any) -> list[set[int]]:
    """Return the tokens that each KV head of each capped layer has evicted."""
    cache = session.cache
    everything = set(range(cache.seen))
    return [
        everything - {int(token) for token in head}
        for layer in cache.kept_tokens()
        if layer.capped
        for head in layer.heads
    ]


def tokens(session: Any, *kinds: str) -> set[int]:
    facts = session.cache.regions.facts
    return {i for kind in kinds for span in facts.get(kind, ()) for i in range(*span)}


def check_thoughts_leave(
    runtime: Any, path: Path, keys: Callable[[Any], Any], long: str = "the sea " * BUDGET
) -> None:
    """Hold a session to one that never had the thoughts, as the template writes earlier answers.

    The session is saved, goes on, and answers again.

    Args:
        runtime: whose policy keeps first and newest tokens if the long text does not fit.
        path: of a file to write.
        keys: gives the keys [K, n, D] of a cache's first layer, which know no token but their own.
        long: a text that is read last.
    """
    runtime.tokenizer = with_template(runtime.tokenizer, THINKING["forgets"])
    session, loop = runtime.session(seed=0), runtime.loop()
    session.set_generation(do_sample=True, max_new_tokens=24, thinking_budget=3)
    session.generation.eos_token_id = None
    regions, backend = session.cache.regions, runtime.tokenizer.backend_tokenizer
    # As a tool's result follows, the template may still write what was thought before.
    for messages, count in (("Hi", 0), ([{"role": "tool", "content": "5"}], 0), ("And?", 2)):
        list(session.send(messages))
        assert len(regions.dropped) == count
        assert not any(within(span, regions.dropped) for span in regions.thoughts[-1:])
    evicted = session.stats.evicted_tokens
    session.recall.limit = 0
    session.set_generation(only_read=True)
    list(session.send(long))
    gone = {i for span in regions.dropped for i in range(*span)}
    assert len(regions.dropped) == 3
    assert 0 < evicted < len(gone)
    index = {i: at for at, i in enumerate(i for i in range(session.cache.seen) if i not in gone)}
    ids = [session.read_ids[i] for i in index]
    written = session.encode(render(runtime.tokenizer, session.messages[:-1]))
    texts = ["".join(backend.decode(some).split()) for some in (ids, written)]
    assert texts[0] == texts[1]
    kind = "system prompt and tools"
    loop.cache.regions.add({kind: regions.facts.get(kind, [])})
    for some in (ids[:-2], ids[-2:]):  # a single token would wait for its eviction
        loop.prefill(runtime.token_ids(some))
    for mine, its in zip(session.cache.kept_tokens(), loop.cache.kept_tokens(), strict=True):
        for head, other in zip(mine.heads, its.heads, strict=True):
            assert sorted(index[int(i)] for i in head) == sorted(map(int, other))
    if runtime.plan.positions == "compact":
        np.testing.assert_allclose(keys(session.cache), keys(loop.cache), rtol=0, atol=0.1)
    assert session.cache.used_bytes == loop.cache.used_bytes
    stats = session.stats
    assert stats.held_tokens + stats.waiting_tokens + stats.evicted_tokens == stats.seen_tokens
    session.save(path)
    again = type(session).load(runtime, path)
    assert again.stats == replace(stats, turn=None)
    for one in (session, again):
        list(one.regenerate())
        assert one.read_ids == ids
        assert one.undo() == long
        list(one.send("So?"))
        assert not one.cache.regions.dropped


def check_regions(runtime: Any, sessions: int = 1) -> None:
    """Hold conversations in which everything is evicted in turn, in more slots than a turn has.

    Several are answered in a batch; the first one is checked.
    """
    runtime.tokenizer = with_template(runtime.tokenizer, THINKING["opens"])
    every = [runtime.session("Be kind.", seed=seed) for seed in range(sessions)]
    for one in every:
        # Drawn, as an answer that is given three times leaves first.
        one.set_generation(do_sample=True, max_new_tokens=30, thinking_budget=12)
        one.generation.eos_token_id = None
    session, batch = every[0], runtime.batch(sessions)
    words, early_alone = "the sea and the land", False
    for messages in ("Hello!", [{"role": "tool", "content": "blue and red"}], *[words] * 9):
        before = tokens(session, *EARLY)
        for one in every:
            batch.add(one, one.send(messages))
        list(batch)
        system = tokens(session, "system prompt and tools")
        ours = tokens(session, *EARLY) | tokens(session, "new tool results", "open thoughts")
        assert system
        for gone in evicted(session):
            assert not gone & system
            assert not gone - ours or before <= gone, "other text left before what leaves first"
            early_alone |= bool(gone) and gone <= before
    assert early_alone
    assert tokens(session, "tool results")
    assert all(gone - ours for gone in evicted(session))
    session.clear()
    list(session.send("Hi"))
    assert not tokens(session, "tool results")
