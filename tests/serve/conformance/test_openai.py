"""OpenAI's chats and texts: what its bodies ask for, by OpenAI's own client and over plain HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from server_chats import BEGUN, CALL, HELLO, TOOL, post
from stand_in import Script

from kvcap.runtime import errors
from kvcap.runtime.session.logprobs import Logprob
from kvcap.serve.app import Settings
from kvcap.serve.contract import Piece
from kvcap.serve.limits import RequestLimits

SETTINGS = Settings("pocket", limits=RequestLimits(messages=3))


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
    asked = talk.asked
    assert asked.messages == ({"role": "system", "content": "Be brief."}, *HELLO)
    assert asked.session_id == "mine"
    assert asked.options == {
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
    assert talk.asked.prompt == "Once"
    assert talk.asked.messages is None
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


def test_texts_in_parts_developers_and_pins_are_understood(url, talk):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    said = post(
        url,
        messages=[
            {"role": "developer", "content": "Be brief.", "pin": True},
            {"role": "user", "content": parts, "name": None},
        ],
    )
    assert said.status_code == 200, said.text
    assert talk.asked.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    )
    assert talk.asked.pins == {0}


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"), ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"ignore_eos": 1}, "ignore_eos"),
    ({"temperature": 3}, "temperature"), ({"temperature": "0.5"}, "temperature"),
    ({"top_p": 1.5}, "top_p"), ({"top_k": -2}, "top_k"), ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**64}, "seed"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, None),
    ({"stop": ["x"] * 17}, "stop"), ({"stop": 5}, "stop.0"), ({"verbosity": "mute"}, "verbosity"),
    ({"reasoning_effort": "some"}, "reasoning_effort"), ({"functions": []}, "functions"),
    ({"unheard_of": 1}, "unheard_of"), ({"stream_options": {"include_usage": True}}, None),
    ({"tool_choice": "sometimes"}, "tool_choice"), ({"tool_choice": "required"}, None),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "custom", "custom": {"name": "no"}}]}}}, "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "sql"}}]}, "tools.0.type"),
    ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, None),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"), ({"modalities": ["audio"]}, None),
    ({"response_format": {"type": "json_schema"}}, "response_format"), ({"audio": {}}, "audio"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
     "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": "no schema"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a"}, "tools": [TOOL]}, None),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, None),
    ({"structured_outputs": {"regex": "a"}, "messages": [*HELLO, BEGUN]}, None),
    ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"min_tokens": -1}, "min_tokens"), ({"thinking_budget": -1}, "thinking_budget"),
    ({"thinking_budget": 9, "max_tokens": 9}, "thinking_budget"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 5, "structured_outputs": {"regex": "a"}}, None),
    ({"messages": "Hello"}, "messages"), ({"messages": HELLO * 4}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
     "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"messages": [{"role": "assistant", "content": "x", "pin": True}]}, "messages.0"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}]}]},
     "messages.0"),
    ({"recall": "some"}, "recall"), ({"recall": -1}, "recall"), ({"recall": True}, "recall"),
    ({"recall": 2**30}, "recall"), ({"recall": "64"}, "recall"), ({"recall": []}, "recall"),
    ({"prompt": "x", "recall": 1.5}, "recall"),
    ({"prompt": []}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, None), ({"prompt": "x", "max_tokens": -2}, "max_tokens"),
    ({"prompt": "x", "echo": True, "logprobs": 1, "recall": 5}, None),
    ({"continue_final_message": True}, None), ({"add_generation_prompt": False}, None),
    ({"continue_final_message": False, "messages": [*HELLO, BEGUN]}, None),
    ({"response_format": {"type": "json_object"}, "messages": [*HELLO, BEGUN]}, None),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, None),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda x: json.dumps(x)[:60])
def test_what_is_not_supported_is_refused_by_name(url, talk, body, param):
    before = len(talk.answers)
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    said = post(url, path, **body)
    error = said.json()["error"]
    assert (said.status_code, error["type"]) == (400, "invalid_request_error"), said.text
    name = next(iter(body))
    if param is None:
        assert name in (error["param"] or error["message"])
        # A message of kvcap's own says behind the semicolon what would work.
        assert error["param"] or "; " in error["message"]
    else:
        assert (error["param"], param in error["message"]) == (param, True)
    assert len(talk.answers) == before


@pytest.mark.parametrize("bad", [rb"\ud83d", rb"\ude42 ", b"\xe9", b"\xed\xa0\xbd"])
def test_what_is_no_letter_is_refused_by_name(url, talk, bad):
    """Half of a pair, as a program that cuts texts sends it, and bytes that are no UTF-8."""
    before = len(talk.answers)
    for path, body in (
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a %s"}]}'),
        ("/v1/completions", b'{"prompt": "%s"}'),
    ):
        said = httpx.post(
            url + path, content=body % bad, headers={"Content-Type": "application/json"}
        )
        assert said.status_code == 400, said.text
        assert "give UTF-8, and whole letters" in said.json()["error"]["message"]
    assert len(talk.answers) == before


@pytest.mark.parametrize("said", ["auto", "off", 0, 96, None])
def test_a_request_says_how_much_it_recalls(client, talk, said):
    client.chat.completions.create(model="pocket", messages=HELLO, extra_body={"recall": said})
    assert talk.asked.recall == said
    client.completions.create(model="pocket", prompt="Once", extra_body={"recall": said})
    assert talk.asked.recall == said


def test_values_that_ask_for_nothing_are_taken(url, talk):
    nothing: dict[str, Any] = {
        "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "store": False,
        "parallel_tool_calls": True, "tool_choice": "auto", "modalities": ["text"], "stop": None,
        "response_format": {"type": "text"}, "logprobs": False, "service_tier": "auto",
        "metadata": {"a": "b", "c": 1, "d": 0.5, "e": True}, "stream": False, "top_logprobs": 0,
        "max_tokens": -1, "max_completion_tokens": -1, "ignore_eos": False, "min_tokens": 0,
    }  # fmt: skip
    nothing |= {
        "store": True,
        "seed": -1,
        "service_tier": "flex",
        "prompt_cache_retention": "24h",
        "functions": None,
        "unheard_of": None,
    }
    said = post(url, **nothing)
    assert said.status_code == 200, said.text
    assert talk.asked.options == {"frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert post(url, frequency_penalty=1, presence_penalty=-0.5).status_code == 200
    assert talk.asked.options == {"frequency_penalty": 1.0, "presence_penalty": -0.5}
    for stop in ("", [], [""]):
        assert post(url, stop=stop).status_code == 200
        assert not talk.asked.options.get("stop_strings")


def test_messages_are_understood_with_what_clients_put_beside_their_text(url, talk):
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"id": None, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    for one, read in (
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {
                "role": "assistant",
                "content": "Hi",
                "name": "a",
                "reasoning_content": "so",
                "reasoning": None,
                "refusal": None,
                "audio": None,
                "function_call": None,
            },
            {"role": "assistant", "content": "Hi"},
        ),
        (
            {"role": "assistant", "tool_calls": [call], **cached},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "",
                        "type": "function",
                        "function": {"name": "add", "arguments": {"a": 1}},
                    }
                ],
            },
        ),
        (
            {"role": "tool", "tool_call_id": "x", "content": None, "name": "add"},
            {"role": "tool", "tool_call_id": "x", "content": "", "name": "add"},
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "x", **cached}],
                "pin": None,
                "name": "Ada",
                **cached,
            },
            {"role": "user", "content": "x", "name": "Ada"},
        ),
    ):
        said = post(url, messages=[*HELLO, one, *HELLO], tools=[{**TOOL, **cached}])
        assert said.status_code == 200, said.text
        assert talk.asked.messages == (*HELLO, read, *HELLO)
        assert talk.asked.tools == (TOOL,)


@pytest.mark.parametrize(
    ("said", "options", "budget"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}, 512),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}, 0),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
         {"reasoning_effort": "high"}, 512),
        ({"reasoning_effort": "xhigh"}, {"reasoning_effort": "xhigh"}, None),
        ({"verbosity": "low"}, {"verbosity": "low"}, None),
        ({"reasoning_effort": "high", "max_tokens": 100}, {"reasoning_effort": "high"}, 50),
        ({"reasoning_effort": "high", "thinking_budget": 7}, {"reasoning_effort": "high"}, 7),
    ],
)  # fmt: skip
def test_the_chat_template_is_given_the_effort_and_thoughts_a_budget(
    url, talk, said, options, budget
):
    assert post(url, **said).status_code == 200
    assert talk.asked.options["template_options"] == options
    assert talk.asked.options.get("thinking_budget") == budget


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.Busy("four wait already", 2.5), 429, "busy"),
        (errors.MessagesInvalid("the last message is of the system"), 400, "messages_invalid"),
        (errors.TokenUnknown("the text has '<extra>'"), 400, "token_unknown"),
        (errors.PinsTooLarge("pinned tokens need more slots"), 400, "pins_too_large"),
        (errors.MemoryCapExceeded("the cap would be passed"), 503, "memory_cap_exceeded"),
        (errors.SessionBroken("layers disagree"), 500, "session_broken"),
        (ValueError("temperature=-1 will not work"), 400, None),
        (ZeroDivisionError("/a/path"), 500, None),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_error_before_the_answer_has_its_status(url, talk, error, status, code):
    talk.script = Script(early=error)
    said = post(url)
    found = said.json()["error"]
    assert (said.status_code, found["code"]) == (status, code)
    assert (str(error) in found["message"]) == (not isinstance(error, ZeroDivisionError))


def test_calls_of_tools_are_told_from_text_and_returned_as_they_were(client, talk):
    written = f"I add.\n{CALL}"
    talk.script = Script([written[i : i + 5] for i in range(0, len(written), 5)])
    whole = client.chat.completions.create(model="pocket", messages=HELLO, tools=[TOOL])
    (choice,) = whole.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert talk.asked.tools == (TOOL,)

    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    messages = [*HELLO, choice.message, result]
    client.chat.completions.create(model="pocket", messages=messages, tools=[TOOL])
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    told: Any = talk.answers[-2].parsed
    assert talk.asked.messages[1] == told.as_message()
    assert talk.asked.messages[2] == result

    parts = list(
        client.chat.completions.create(model="pocket", messages=HELLO, tools=[TOOL], stream=True)
    )
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    ((call,),) = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert (call.index, call.function.name) == (0, "add")
    assert parts[-1].choices[0].finish_reason == "tool_calls"


OTHER: Any = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_an_answer_that_must_call_a_tool_is_held_to_a_call(client, talk, choice):
    """Both are offered; what the answer is held to has those that it may call."""
    talk.script = Script(['{"name": "add", "argu', 'ments": {"a": 1}}'])
    said = client.chat.completions.create(
        model="pocket", messages=HELLO, tools=[TOOL, OTHER], tool_choice=choice
    )
    ((call,), content) = said.choices[0].message.tool_calls, said.choices[0].message.content
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert (content, said.choices[0].finish_reason) == (None, "tool_calls")
    assert talk.asked.tools == (TOOL, OTHER)
    names = [
        one["properties"]["name"]["const"] for one in talk.asked.options["json_schema"]["anyOf"]
    ]
    assert names == (["add", "now"] if choice == "required" else ["add"])


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(client, talk, mode):
    listed = [{"type": "function", "function": {"name": "now"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
    client.chat.completions.create(
        model="pocket", messages=HELLO, tools=[TOOL, OTHER], tool_choice=choice
    )
    assert talk.asked.tools == (OTHER,)
    assert talk.asked.must_call == (mode == "required")


def test_a_strict_tool_is_offered_without_that_word(client, talk):
    """A tool is taken as openai.pydantic_function_tool and its users send it, with `strict`."""
    client.chat.completions.create(
        model="pocket",
        messages=HELLO,
        tools=[{**TOOL, "function": {**TOOL["function"], "strict": True}}, OTHER],
    )
    assert talk.asked.tools == (TOOL, OTHER)
    held, free = talk.asked.options["call_schema"]["anyOf"]
    assert held["properties"]["name"] == {"const": "add"}
    assert held["properties"]["arguments"] == {"type": "object", **TOOL["function"]["parameters"]}
    assert free["properties"]["arguments"] == {"type": "object"}


def test_calls_are_held_to_a_schema_only_where_a_tool_is_strict(client, talk):
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    for tools, choice in (([TOOL], "auto"), ([strict], "none"), ([strict], "required")):
        talk.script = Script([CALL])
        client.chat.completions.create(
            model="pocket", messages=HELLO, tools=tools, tool_choice=choice
        )
        assert talk.asked.options.get("call_schema") is None, (tools, choice)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "most"), [(True, 2), (None, 2), (False, 1)])
def test_an_answer_has_one_call_where_several_are_not_wanted(url, talk, parallel, most, stream):
    talk.script = Script([f"{CALL}\n{CALL}"])
    said = post(url, tools=[TOOL], parallel_tool_calls=parallel, stream=stream)
    assert said.status_code == 200, said.text
    assert said.text.count('"arguments"') == most
    assert '"finish_reason":"tool_calls"' in said.text


def test_no_choice_of_tools_offers_none(client, talk):
    talk.script = Script([CALL])
    said = client.chat.completions.create(
        model="pocket", messages=HELLO, tools=[TOOL], tool_choice="none"
    )
    assert said.choices[0].message.content == CALL
    assert talk.asked.tools == ()


SCHEMA: Any = {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}


@pytest.mark.parametrize(("said", "options"), [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["yes", "1 + 1 (or so)"]}},
     {"regex": r"yes|1 \+ 1 \(or so\)"}),
    ({"min_tokens": 5}, {"min_tokens": 5}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}), ({"seed": -2}, {"seed": -2}),
], ids=lambda x: json.dumps(x)[:60])  # fmt: skip
def test_forms_of_other_servers_are_understood(url, talk, said, options):
    assert post(url, **said).status_code == 200
    assert talk.asked.options == options
    if "response_format" not in said:
        assert post(url, "/v1/completions", prompt="x", **said).status_code == 200
        assert talk.asked.options == options


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
    call, answer = talk.asked.options["json_schema"]["anyOf"]
    assert call["properties"]["name"] == {"const": "add"}
    assert answer["properties"]["b"] == {"$ref": "#/anyOf/1/$defs/b"}
    assert "call_schema" not in talk.asked.options
    post(url, tools=[TOOL], response_format=shape, tool_choice="none")
    assert (talk.asked.options["json_schema"], talk.asked.tools) == (SCHEMA, ())


def test_answers_to_one_request_have_calls_of_different_ids(url, talk):
    talk.script = Script([CALL])
    said = post(url, tools=[TOOL], n=3).json()["choices"]
    assert len({one["message"]["tool_calls"][0]["id"] for one in said}) == 3
    assert [answer.ask.number for answer in talk.answers[-3:]] == [0, 1, 2]


def test_thoughts_of_all_answers_are_counted(url, talk):
    talk.script = Script(["<think>", "Hm", "so", "</think>", "Yes"])
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        said = post(url, n=2, stream=stream, **options).text
        assert '"completion_tokens_details":{"reasoning_tokens":4}' in said


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
    said = post(url, "/v1/completions", prompt="Ho", echo=True, logprobs=0, stream=stream)
    parts = [x.removeprefix("data: ") for x in said.text.split("\n\n") if "text_offset" in x]
    columns = [json.loads(part)["choices"][0]["logprobs"] for part in parts]
    joined = {key: [x for one in columns for x in one[key]] for key in ("text_offset", "tokens")}
    assert joined["text_offset"] == [0, 0, 2, 3, 3, 3, 3, 4, 5]
    assert joined["tokens"][:3] == ["<bos>", "Ho", " "]
