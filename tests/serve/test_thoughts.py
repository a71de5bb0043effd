"""Thoughts of a model: apart from its answer, streamed and whole, and from a conversation's key."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
from server_chats import ask, said, user
from stand_in import Script, StandIn

from kvcap.serve.contract import Piece
from kvcap.serve.conversations import keys_of
from kvcap.serve.server import Server
from kvcap.serve.thoughts import ThoughtGate, without_thoughts

TOOL: Any = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def answered(served: tuple[StandIn, Server], pieces: list[Any], **body: Any) -> dict[str, Any]:
    """The message of an answer, which is the same where it is streamed."""
    talk, url = served[0], f"{served[1].url}/v1/chat/completions"
    talk.script = Script(pieces)
    asked = {"messages": [user("Hello!")], **body}
    message = httpx.post(url, json=asked).json()["choices"][0]["message"]
    parts: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: list[Any] = []
    for line in httpx.post(url, json={**asked, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for name in parts:
                parts[name] += delta.get(name) or ""
            calls += delta.get("tool_calls") or []
    assert parts["content"] == (message["content"] or "")
    assert parts["reasoning_content"] == message.get("reasoning_content", "")
    assert len(calls) == len(message.get("tool_calls", []))
    return dict(message)


def test_thoughts_are_apart_from_the_answer(served):
    message = answered(served, ["<think>", "\nTwo", " and two.\n", "</think>\n\n", "Four", "."])
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    message = answered(served, [Piece("Two.", opened="<think>"), Piece("</think>4")])
    assert (message["reasoning_content"], message["content"]) == ("Two.", "4")
    message = answered(served, ["<think>\n\n</think>\n\n4"])
    assert ("reasoning_content" in message, message["content"]) == (False, "4")


def test_an_answer_that_is_cut_short_in_its_thoughts_has_no_content(served):
    message = answered(served, ["<think>Two and", " two"])
    assert (message["reasoning_content"], message["content"]) == ("Two and two", "")


def test_text_that_only_looks_like_thoughts_is_content(served):
    for pieces in (["<", "b>"], [" <thin", "g>"], ["a <think>b</think>"], ["<think"]):
        message = answered(served, pieces)
        assert message["content"] == "".join(pieces)
        assert "reasoning_content" not in message


def test_calls_behind_thoughts_are_calls(served):
    message = answered(served, ["<think>Add.</think>\n\nWait.\n", CALL], tools=[TOOL])
    assert message["reasoning_content"] == "Add."
    assert message["content"] == "Wait."
    assert message["tool_calls"][0]["function"]["name"] == "add"


def test_wherever_a_stream_is_cut_it_is_split_alike():
    text = "<think>\nOne </thin two\n</think>\n\n<b>Three</b>\n"
    for cuts in itertools.combinations(range(1, len(text)), 2):
        gate, found = ThoughtGate(), ["", ""]
        ends = [0, *cuts, len(text)]
        parts = [gate.put(text[a:b]) for a, b in itertools.pairwise(ends)]
        for thoughts, content in [*parts, gate.end()]:
            found[0] += thoughts
            found[1] += content
        assert found == ["One </thin two", "<b>Three</b>\n"]


def test_a_conversation_is_known_by_answers_without_their_thoughts():
    thought = "<think>\nTwo and two.\n</think>\n\nFour."
    assert without_thoughts(thought) == "Four."
    with_them, without = (
        keys_of(ask(user("2+2?"), said(text), user("Sure?")), "") for text in (thought, "Four.")
    )
    assert with_them == without
