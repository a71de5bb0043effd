"""Thoughts of a model: apart from its answer, streamed and whole, and from a conversation's key."""

from __future__ import annotations

import itertools

from server_chats import ask, assistant, user

from kvcap.serve.conversations import keys_of
from kvcap.serve.thoughts import ThoughtGate, without_thoughts


def test_wherever_a_stream_is_cut_it_is_split_alike():
    text = "<think>\nOne </thin two\n</think>\n\n<b>Three</b>\n"
    for cuts in itertools.combinations(range(1, len(text)), 2):
        gate, joined = ThoughtGate(), ["", ""]
        ends = [0, *cuts, len(text)]
        parts = [gate.put(text[a:b]) for a, b in itertools.pairwise(ends)]
        for thoughts, content in [*parts, gate.end()]:
            joined[0] += thoughts
            joined[1] += content
        assert joined == ["One </thin two", "<b>Three</b>\n"]


def test_a_conversation_is_known_by_answers_without_their_thoughts():
    thought = "<think>\nTwo and two.\n</think>\n\nFour."
    assert without_thoughts(thought) == "Four."
    with_them, without = (
        keys_of(ask(user("2+2?"), assistant(text), user("Sure?")), "")
        for text in (thought, "Four.")
    )
    assert with_them == without
