"""Bodies that clients send unasked, recorded and shortened: each is taken, or refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from stand_in import Script

HELLO: Any = [{"role": "user", "content": "Hello!"}]
PLACE: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT: Any = {"type": "json_schema", "schema": PLACE}
WEATHER: Any = {"name": "weather", "input_schema": PLACE}
RUN: Any = {"type": "function", "name": "run", "description": "Runs.", "parameters": PLACE}
EXAMPLE = 'Example: {"city": "Paris"}'
LATER = "<system-reminder>\nSkills: none.\n</system-reminder>"

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PLAIN: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "pocket", "max_tokens": 9, "messages": HELLO, "tools": [WEATHER]},
    RESPONSES: {"model": "pocket", "input": HELLO, "tools": [RUN]},
}

CACHED: Any = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: Any = {  # 2.1.197
    "model": "pocket",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nA date.\n</system-reminder>\n"},
                {"type": "text", "text": "Hello!", **CACHED},
            ],
        },
        {"role": "system", "content": "Skills: none."},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197;"},
        {"type": "text", "text": "You are an agent.", **CACHED},
    ],
    "tools": [{**WEATHER, "description": "Tells.", "eager_input_streaming": True, **CACHED}],
    "metadata": {"user_id": '{"device_id": "0", "account_uuid": ""}'},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
NAMED: Any = {"type": "namespace", "name": "multi_agent_v1", "description": "More.", "tools": [RUN]}
CODEX: Any = {  # 0.171.0
    "model": "pocket",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": f"msg_{number}",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }
        for number, (role, text) in enumerate(
            [
                ("developer", "You are an agent."),
                ("developer", "Skills: none."),
                ("user", "A date."),
                ("user", "Hello!"),
            ]
        )
    ],
    "tools": [
        {**RUN, "strict": False},
        NAMED,
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto", "context": "all_turns"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "client_metadata": {"session_id": "0", "x-codex-window-id": "0:0"},
}


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body)


@pytest.mark.parametrize(("path", "body", "messages", "template", "last"), [
    (MESSAGES, CLAUDE_CODE, [
        ("system", "x-anthropic-billing-header: cc_version=2.1.197;You are an agent."),
        ("user", f"<system-reminder>\nA date.\n</system-reminder>\nHello!\n\n{LATER}"),
    ], {"reasoning_effort": "high", "enable_thinking": True}, "message_stop"),
    (RESPONSES, CODEX, [
        ("system", "You are an agent.\n\nSkills: none."), ("user", "A date.\n\nHello!"),
    ], {"reasoning_effort": "low", "verbosity": "low"}, "response.completed"),
], ids=["Claude Code", "Codex"])  # fmt: skip
def test_the_first_request_of_an_agent_is_answered(url, talk, path, body, messages, template, last):
    said = post(url, path, body)
    assert said.status_code == 200, said.text
    assert said.text.rstrip().rpartition("event: ")[2].startswith(last)
    assert [(one["role"], one["content"]) for one in talk.asked.messages] == messages
    assert talk.asked.options["template_options"] == template
    assert len(talk.asked.tools) == 1


@pytest.mark.parametrize(("path", "more"), [
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}),
    (MESSAGES, CACHED), (MESSAGES, {"speed": "fast"}), (MESSAGES, {"mcp_servers": []}),
    (MESSAGES, {"output_config": {}}), (MESSAGES, {"thinking": {"type": "disabled"}}),
    (MESSAGES, {"tools": [{**WEATHER, "eager_input_streaming": True, "defer_loading": False,
                           "input_examples": [], "allowed_callers": ["direct"], **CACHED}]}),
    (RESPONSES, {"client_metadata": {"a": "b"}}), (RESPONSES, {"max_tool_calls": 3}),
    (RESPONSES, {"include": ["web_search_call.action.sources"]}),
    (RESPONSES, {"tools": [], "input": [
        {"type": "additional_tools", "role": "developer", "tools": [RUN]}, *HELLO]}),
    (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "run"}]}, "tools": [RUN, {**RUN, "name": "other"}]}),
    *((RESPONSES, {"tools": [RUN, tool]}) for tool in (
        NAMED, {"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "patch"},
    )),
], ids=str)  # fmt: skip
def test_what_asks_for_nothing_is_taken(url, talk, path, more):
    """The conversations are asked for the same as without it."""
    assert post(url, path, PLAIN[path]).status_code == 200
    plain = talk.asked
    said = post(url, path, {**PLAIN[path], **more})
    assert said.status_code == 200, said.text
    assert talk.asked == plain


@pytest.mark.parametrize(("more", "name", "value"), [
    ({"output_config": {"effort": "max"}}, "template_options",
     {"reasoning_effort": "xhigh", "enable_thinking": False}),
    ({"output_config": {"format": FORMAT}, "tools": []}, "json_schema", PLACE),
    ({"output_format": FORMAT, "tools": []}, "json_schema", PLACE),
], ids=str)  # fmt: skip
def test_settings_of_the_output_are_those_of_the_answer(url, talk, more, name, value):
    said = post(url, MESSAGES, {**PLAIN[MESSAGES], **more})
    assert said.status_code == 200, said.text
    assert talk.asked.options[name] == value


def test_examples_and_allowed_tools_are_offered(url, talk):
    tool = {**WEATHER, "description": "Tells.", "input_examples": [{"city": "Paris"}]}
    post(url, MESSAGES, {**PLAIN[MESSAGES], "tools": [tool]})
    assert talk.asked.tools[0]["function"]["description"] == f"Tells.\n{EXAMPLE}"
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "other"}]}
    tools = [RUN, {**RUN, "name": "other"}]
    post(url, RESPONSES, {**PLAIN[RESPONSES], "tools": tools, "tool_choice": chosen})
    assert [one["function"]["name"] for one in talk.asked.tools] == ["other"]
    assert "other" in json.dumps(talk.asked.options["json_schema"])


def test_a_deferred_tool_is_offered_once_a_search_for_tools_refers_to_it(url, talk):
    deferred = [{**WEATHER, "name": name, "defer_loading": True} for name in "ab"]
    tools = [{"name": "ToolSearch", "input_schema": {"type": "object"}}, *deferred]
    call = {"type": "tool_use", "id": "1", "name": "ToolSearch", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "b"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    later: Any = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    for messages, names in ((HELLO, ["ToolSearch"]), ([*HELLO, *later], ["ToolSearch", "b"])):
        said = post(url, MESSAGES, {**PLAIN[MESSAGES], "messages": messages, "tools": tools})
        assert said.status_code == 200, said.text
        assert [one["function"]["name"] for one in talk.asked.tools] == names
    assert talk.asked.messages[-1]["role"] == "tool"
    assert "The tool b is offered." in talk.asked.messages[-1]["content"]


def test_what_the_system_says_later_is_part_of_the_users_message(url, talk):
    system: Any = {"role": "system", "content": "Skills: none."}
    answer: Any = {"role": "assistant", "content": "Hi."}
    post(url, MESSAGES, {**PLAIN[MESSAGES], "messages": [system, *HELLO, answer, system, *HELLO]})
    assert [(one["role"], one["content"]) for one in talk.asked.messages] == [
        ("system", "Skills: none."),
        ("user", "Hello!"),
        ("assistant", "Hi."),
        ("user", f"{LATER}\n\nHello!"),
    ]


def test_an_output_that_answers_no_call_is_the_users(url, talk):
    """Codex tells the model of a goal so, behind the result of the call that set it."""
    call = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "run", "arguments": "{}"}
    result = {"type": "function_call_output", "id": "fco_1", "call_id": "1", "output": "Set."}
    goal = {"type": "function_call_output", "name": "goal", "namespace": "agent", "output": "Run."}
    said = post(url, RESPONSES, {**PLAIN[RESPONSES], "input": [*HELLO, call, result, goal]})
    assert said.status_code == 200, said.text
    assert [one["role"] for one in talk.asked.messages] == ["user", "assistant", "tool", "user"]
    assert talk.asked.messages[-1]["content"] == "goal: Run."


def test_tools_that_are_not_offered_are_named(url, talk, caplog):
    tools = [NAMED, {"type": "code_interpreter", "container": {"type": "auto"}}]
    names = "namespace multi_agent_v1, code_interpreter"
    with caplog.at_level(logging.WARNING, "kvcap.serve"):
        asked = {**PLAIN[RESPONSES], "tools": [RUN, *tools], "metadata": {"a": "b"}}
        said = [post(url, RESPONSES, asked).json() for _ in range(2)][-1]
    assert [one.getMessage().partition(": ")[2] for one in caplog.records] == [names]
    assert said["metadata"] == {"a": "b", "kvcap_tools_left_out": names}
    assert said["tools"] == [RUN]


@pytest.mark.parametrize(("path", "more", "words"), [
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
     "context_management.edits.0.type is 'clear_tool_uses_20250919'"),
    (MESSAGES, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    (MESSAGES, {"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
    (MESSAGES, {"output_config": {"task_budget": {}}}, "output_config.task_budget"),
    (MESSAGES, {"thinking": {"type": "perhaps"}}, "thinking.type is 'perhaps'"),
    (MESSAGES, {"tools": [{**WEATHER, "allowed_callers": ["code"]}]}, "allowed_callers"),
    (RESPONSES, {"text": {"verbosity": "mute"}}, "text.verbosity is 'mute'"),
    (RESPONSES, {"max_tool_calls": 0}, "max_tool_calls is 0"),
    (RESPONSES, {"tools": [{**RUN, "name": "a b"}]}, "tools.0.name is 'a b'"),
    (RESPONSES, {"input": [*HELLO, {"type": "additional_tools", "tools": [{}]}]},
     "input.1.tools.0 is no tool"),
    (RESPONSES, {"input": [{"type": "additional_tools", "tools": 5}]}, "input.0"),
], ids=str)  # fmt: skip
def test_what_would_be_disobeyed_is_refused_by_name(url, talk, path, more, words):
    said = post(url, path, {**PLAIN[path], **more})
    assert said.status_code == 400, said.text
    assert words in said.json()["error"]["message"]


@pytest.mark.parametrize(("more", "kinds"), [
    ({}, ["text"]), ({"thinking": {"type": "disabled"}}, ["text"]),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, ["text"]),
    ({"thinking": {"type": "enabled", "budget_tokens": 8}}, ["thinking", "text"]),
], ids=str)  # fmt: skip
def test_thoughts_are_sent_only_if_thinking_is_enabled(url, talk, more, kinds):
    talk.script = Script(["<think>Hm", "</think>", "Yes"])
    asked = {**PLAIN[MESSAGES], **more}
    assert [one["type"] for one in post(url, MESSAGES, asked).json()["content"]] == kinds
    stream = post(url, MESSAGES, {**asked, "stream": True}).text
    begun = [line for line in stream.splitlines() if '"content_block_start"' in line]
    found = [json.loads(line.removeprefix("data: ")) for line in begun]
    assert [(one["index"], one["content_block"]["type"]) for one in found] == [*enumerate(kinds)]
