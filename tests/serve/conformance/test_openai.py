"""OpenAI's chats and texts: what only they have, by OpenAI's own client and over plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_chats import CALL, HELLO, TOOL, post
from stand_in import Script

from kvcap.runtime.session.logprobs import Logprob
from kvcap.serve.contract import Piece


def test_a_chat_is_answered_with_its_usage(client, talk):
    answer = client.chat.completions.create(
        model="pocket",
        messages=[{"role": "system", "content": "Be brief."}, *HELLO],
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop="END",
        max_completion_tokens=5,
        n=1,
        user="somebody",
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1},
        extra_headers={"X-Session-Id": "mine"},
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hello there", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (11, 14)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.usage.kv == {
        "held": 9,
        "waiting": 2,
        "evicted": 6,
        "cap_bytes": 4096,
        "reused": 4,
    }
    assert (answer.usage.recalled, answer.usage.recalled_passages) == (5, 1)
    request = talk.request
    assert request.messages == ({"role": "system", "content": "Be brief."}, *HELLO)
    assert request.session_id == "mine"
    assert request.options == {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop_strings": ["END"],
        "max_new_tokens": 5,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    assert talk.answers[-1].closed


def test_a_chat_is_streamed(client, talk):
    stream = client.chat.completions.create(
        model="pocket", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert stream.response.headers["X-Session-Id"] == "made-up"
    assert [c.delta.content for p in parts for c in p.choices] == ["", "Hel", "lo", " there", None]
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-2].choices[0].finish_reason == "stop"
    assert (parts[-1].choices, parts[-1].usage.kv["held"]) == ([], 9)
    assert parts[-1].usage.recalled == 5
    assert len({part.id for part in parts}) == 1


def test_a_text_is_continued_streamed_and_whole(client, talk):
    whole = client.completions.create(model="pocket", prompt="Once", max_tokens=3)
    assert (whole.choices[0].text, whole.usage.completion_tokens) == ("Hello there", 3)
    assert talk.request.prompt == "Once"
    assert talk.request.messages is None
    parts = list(client.completions.create(model="pocket", prompt=["Once"], stream=True))
    assert "".join(part.choices[0].text for part in parts) == "Hello there"
    assert parts[-1].choices[0].finish_reason == "stop"


def test_the_one_model_is_named(client, talk):
    assert [model.id for model in client.models.list()] == ["pocket"]
    assert client.models.retrieve("pocket").owned_by == "kvcap"
    with pytest.raises(openai.NotFoundError, match="use 'pocket'"):
        client.models.retrieve("gpt/5")
    with pytest.raises(openai.NotFoundError, match="use 'pocket'") as refused:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert refused.value.code == "model_not_found"


OTHER: Any = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_an_answer_that_must_call_a_tool_is_held_to_a_call(client, talk, choice):
    """Both are offered; what the answer is held to has those that it may call."""
    talk.script = Script(['{"name": "add", "argu', 'ments": {"a": 1}}'])
    completion = client.chat.completions.create(
        model="pocket", messages=HELLO, tools=[TOOL, OTHER], tool_choice=choice
    )
    ((call,), content) = (
        completion.choices[0].message.tool_calls,
        completion.choices[0].message.content,
    )
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert (content, completion.choices[0].finish_reason) == (None, "tool_calls")
    assert talk.request.tools == (TOOL, OTHER)
    names = [
        one["properties"]["name"]["const"] for one in talk.request.options["json_schema"]["anyOf"]
    ]
    assert names == (["add", "now"] if choice == "required" else ["add"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "most"), [(True, 2), (None, 2), (False, 1)])
def test_an_answer_has_one_call_where_several_are_not_wanted(url, talk, parallel, most, stream):
    talk.script = Script([f"{CALL}\n{CALL}"])
    response = post(url, tools=[TOOL], parallel_tool_calls=parallel, stream=stream)
    assert response.status_code == 200, response.text
    assert response.text.count('"arguments"') == most
    assert '"finish_reason":"tool_calls"' in response.text


def test_no_choice_of_tools_offers_none(client, talk):
    talk.script = Script([CALL])
    completion = client.chat.completions.create(
        model="pocket", messages=HELLO, tools=[TOOL], tool_choice="none"
    )
    assert completion.choices[0].message.content == CALL
    assert talk.request.tools == ()


SCHEMA: Any = {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}


@pytest.mark.parametrize(("written", "calls"), [
    ('{"name": "add", "arguments": {"a": 1}}', 1), ('{"b": 1}', 0),
    ('{"name": "Ada", "arguments": {}}', 0),
])  # fmt: skip
def test_with_tools_and_a_schema_an_answer_is_held_to_either(url, talk, written, calls):
    talk.script = Script([written])
    shape = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    (choice,) = post(url, tools=[strict], response_format=shape).json()["choices"]
    assert len(choice["message"].get("tool_calls", ())) == calls
    assert choice["message"]["content"] == (None if calls else written)
    call, answer = talk.request.options["json_schema"]["anyOf"]
    assert call["properties"]["name"] == {"const": "add"}
    assert answer["properties"]["b"] == {"$ref": "#/anyOf/1/$defs/b"}
    assert "call_schema" not in talk.request.options
    post(url, tools=[TOOL], response_format=shape, tool_choice="none")
    assert (talk.request.options["json_schema"], talk.request.tools) == (SCHEMA, ())


def test_answers_to_one_request_have_calls_of_different_ids(url, talk):
    talk.script = Script([CALL])
    choices = post(url, tools=[TOOL], n=3).json()["choices"]
    assert len({one["message"]["tool_calls"][0]["id"] for one in choices}) == 3
    assert [answer.ask.number for answer in talk.answers[-3:]] == [0, 1, 2]


def test_thoughts_of_all_answers_are_counted(url, talk):
    talk.script = Script(["<think>", "Hm", "so", "</think>", "Yes"])
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        text = post(url, n=2, stream=stream, **options).text
        assert '"completion_tokens_details":{"reasoning_tokens":4}' in text


@pytest.mark.parametrize("stream", [False, True])
def test_the_places_of_tokens_are_those_of_the_text(url, talk, stream):
    """Of letters in several tokens, and of an opening token that the text has not."""

    def noted(*parts: bytes) -> tuple[Logprob, ...]:
        return tuple(Logprob(7, x.decode(errors="replace"), x, -0.5) for x in parts)

    talk.script = Script(
        [
            Piece("Ho", noted(b"<bos>", b"Ho")),
            Piece(" \U0001f642", noted(b" ", *(bytes([x]) for x in "\U0001f642".encode()))),
            Piece("!x", noted(b"!", b"x")),
        ]
    )
    response = post(url, "/v1/completions", prompt="Ho", echo=True, logprobs=0, stream=stream)
    parts = [x.removeprefix("data: ") for x in response.text.split("\n\n") if "text_offset" in x]
    columns = [json.loads(part)["choices"][0]["logprobs"] for part in parts]
    joined = {key: [x for one in columns for x in one[key]] for key in ("text_offset", "tokens")}
    assert joined["text_offset"] == [0, 0, 2, 3, 3, 3, 3, 4, 5]
    assert joined["tokens"][:3] == ["<bos>", "Ho", " "]
