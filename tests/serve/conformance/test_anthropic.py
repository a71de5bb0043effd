"""Anthropic's API: what its bodies ask for, its blocks and events, over plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from stand_in import Script

from kvcap.runtime import errors
from kvcap.serve.app import Settings

SETTINGS = Settings("pocket", keys=["secret"])
ASKED: Any = {"model": "pocket", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/messages", json={**ASKED, **body}, headers={"x-api-key": "secret"})


def events(url: str, **body: Any) -> list[dict[str, Any]]:
    lines = post(url, stream=True, **body).text.split("\n\n")
    found = []
    for kind, data in (line.split("\n") for line in lines if line.startswith("event: ")):
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def test_a_message_is_answered_with_its_usage(url, talk):
    said = post(url, system="Be brief.", stop_sequences=["END"], temperature=0.5, top_k=3).json()
    assert (said["type"], said["role"], said["model"]) == ("message", "assistant", "pocket")
    assert said["content"] == [{"type": "text", "text": "Hello there"}]
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)
    assert said["usage"] == {"input_tokens": 7, "cache_read_input_tokens": 4, "output_tokens": 3}
    assert talk.asked.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )
    assert talk.asked.options == {
        "max_new_tokens": 9,
        "stop_strings": ["END"],
        "temperature": 0.5,
        "top_k": 3,
        "template_options": {"enable_thinking": False},
    }


def test_a_stream_has_the_events_of_its_blocks(url, talk):
    talk.script = Script(["<think>Hm", "</think>", "Hel", "lo\n", CALL])
    found = events(url, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 8})
    assert talk.asked.options["template_options"] == {"enable_thinking": True}
    assert talk.asked.options["thinking_budget"] == 8
    assert [one["type"] for one in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    starts = [one for one in found if one["type"] == "content_block_start"]
    assert [one["content_block"]["type"] for one in starts] == ["thinking", "text", "tool_use"]
    assert [one["index"] for one in starts] == [0, 1, 2]
    texts = [one["delta"].get("text", "") for one in found if one["type"] == "content_block_delta"]
    assert "".join(texts) == "Hello"
    assert json.loads(found[9]["delta"]["partial_json"]) == {"a": 1}
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["output_tokens"] == 5


def test_calls_and_their_results_are_those_of_a_chat(url, talk):
    talk.script = Script([CALL])
    said = post(url, tools=[TOOL]).json()
    (block,) = said["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "add", {"a": 1})
    assert said["stop_reason"] == "tool_use"
    result = {
        "type": "tool_result",
        "tool_use_id": block["id"],
        "content": [{"type": "text", "text": "2"}],
    }
    thought = {"type": "thinking", "thinking": "Hm", "signature": ""}
    post(
        url,
        tools=[TOOL],
        messages=[
            *ASKED["messages"],
            {"role": "assistant", "content": [thought, block]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
    )
    _, called, returned, asked = talk.asked.messages
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert returned == {"role": "tool", "tool_call_id": block["id"], "content": "2"}
    assert asked == {"role": "user", "content": "And?"}
    assert talk.asked.tools[0]["function"]["parameters"] == {"type": "object"}


def test_a_choice_of_tools_and_thinking_are_translated(url, talk):
    post(url, tools=[TOOL], tool_choice={"type": "tool", "name": "add"})
    assert talk.asked.options["json_schema"]["anyOf"][0]["properties"]["name"]["const"] == "add"
    post(url, tools=[TOOL], tool_choice={"type": "none"}, thinking={"type": "disabled"})
    assert talk.asked.tools == ()
    assert talk.asked.options["template_options"] == {"enable_thinking": False}


def test_the_last_message_of_the_assistant_begins_the_answer(url, talk):
    post(url, messages=[*ASKED["messages"], {"role": "assistant", "content": "Well,"}])
    assert talk.asked.begin == "Well,"


@pytest.mark.parametrize(("body", "words"), [
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"max_tokens": 0}, "max_tokens"), ({"unheard_of": 1}, "unheard_of"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens is 9"),
    ({"tool_choice": {"type": "auto", "more": 1}}, "'more'"),
])  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_its_form(url, talk, body, words):
    said = post(url, **body)
    assert said.status_code == 400
    assert said.json()["type"] == "error"
    assert said.json()["error"]["type"] == "invalid_request_error"
    assert words in said.json()["error"]["message"]


def test_what_is_wrong_is_named_where_it_stands_in_the_body(url, talk):
    """The system's message, and each result of a tool, are messages of their own in a chat."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
    first = {"role": "user", "content": [result, result, {"type": "text", "text": "x"}]}
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    for wrong, place, role in (
        ({**call, "name": "a b"}, "name is 'a b'", "assistant"),
        ({**call, "id": "x" * 300}, "id is", "assistant"),
        ({**call, "input": [1]}, "input is no object", "assistant"),
        ({**result, "tool_use_id": "x" * 300}, "tool_use_id is", "user"),
    ):
        last = {"role": role, "content": [{"type": "text", "text": "x"}, wrong]}
        said = post(url, system="Be brief.", messages=[first, last])
        assert said.status_code == 400
        assert said.json()["error"]["message"].startswith(f"messages.1.content.1.{place}")


def test_an_error_within_a_stream_ends_it_in_its_form(url, talk):
    talk.script = Script(late=errors.SessionBroken("broken"))
    assert events(url)[-1] == {"type": "error", "error": {"type": "api_error", "message": "broken"}}
