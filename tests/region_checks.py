"""Checks in any engine that regions of a conversation leave the cache in their order."""

from __future__ import annotations

from typing import Any

from chat_templates import THINKING, with_template

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
    for said in ("Hello!", [{"role": "tool", "content": "blue and red"}], *[words] * 9):
        before = tokens(session, *EARLY)
        for one in every:
            batch.add(one, one.send(said))
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
