"""Holds answers of several sessions at once to those of sessions alone."""

from __future__ import annotations

from collections.abc import Sequence

from tools import differing

from kvcap.runtime.session.batch import Batch
from kvcap.runtime.session.session import Session

NEVER = 1_000_000  # a token that is not drawn


def together(batch: Batch, sessions: Sequence[Session], messages: Sequence[str]) -> list[str]:
    """Return what each session answers to its text, all of them at once."""
    answers = {id(session): "" for session in sessions}
    for session, text in zip(sessions, messages, strict=False):
        batch.add(session, session.send(text))
    for session, text in batch:
        answers[id(session)] += text
    return [*answers.values()]


def as_alone(
    batch: Batch,
    alone: Sequence[Session],
    sessions: Sequence[Session],
    messages: Sequence[str] = ("Go on.",) * 3,
    share: float = 0,
    then: str = "And once more?",
) -> None:
    """Answer both groups, and hold what a batch says and keeps to what each says alone.

    At most a `share` of the tokens that are kept differs. They go on alone with `then`.
    """
    expected = ["".join(s.send(text)) for s, text in zip(alone, messages, strict=False)]
    assert together(batch, sessions, messages) == expected
    assert differing(sessions, alone) <= share
    for one, other in zip(sessions, alone, strict=True):
        assert one.messages == other.messages
        assert one.stats.seen_tokens == other.stats.seen_tokens
        assert one.stats.held_tokens == other.stats.held_tokens
        assert one.turn.finish_reason == other.turn.finish_reason
    again = [["".join(s.send(then)) for s in group] for group in (sessions, alone)]
    assert again[0] == again[1]
