"""Bodies of every API get what they ask for; some fields ask for nothing, others are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from dialects import CHAT, CHATS, MESSAGES, OLLAMA, OTHERS, RESPONSES, assert_refused
from pydantic import ValidationError
from server_chats import BEGUN, HELLO, TOOL, assistant, user
from stand_in import Script

from kvcap.serve.app import Settings
from kvcap.serve.limits import RequestLimits
from kvcap.serve.openapi import BODIES
from kvcap.serve.schemas import Strict

SETTINGS = Settings("pocket", limits=RequestLimits(messages=6))
APIS = {api.path: api for api in (*CHATS, *OTHERS)}
CHAT_PATH, TEXTS, GENERATE = CHAT.path, "/v1/completions", "/api/generate"
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT: Any = {"type": "json_schema", "schema": CITY}
WEATHER: Any = {"name": "weather", "input_schema": CITY}
RUN: Any = {"type": "function", "name": "run", "description": "Runs.", "parameters": CITY}
OTHER_RUN: Any = {**RUN, "name": "other"}
NAMESPACE: Any = {"type": "namespace", "name": "multi_agent_v1", "description": "", "tools": [RUN]}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
SCHEMA: Any = {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}
LEAST: dict[str, Any] = {
    **{path: api.least for path, api in APIS.items()},
    MESSAGES.path: {"model": "pocket", "max_tokens": 9, "messages": HELLO, "tools": [WEATHER]},
    RESPONSES.path: {"model": "pocket", "input": HELLO, "tools": [RUN]},
}


def value_at(request: Any, path: str) -> Any:
    """Return a field of a request, a value within it, or by `*` the values within all items."""
    name, _, rest = path.partition(".")
    if not name:
        return request
    if name == "*":
        return [value_at(item, rest) for item in request]
    if isinstance(request, Mapping):
        return value_at(request.get(name), rest)
    return value_at(request[int(name)] if name.isdigit() else getattr(request, name), rest)


def short(value: Any) -> str:
    return str(value)[:60]


def body(path: str, more: dict[str, Any]) -> dict[str, Any]:
    return {**LEAST[path], **more}


def user_parts(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def strict(tool: Any) -> Any:
    return {**tool, "function": {**tool["function"], "strict": True}}


OTHER: Any = {"type": "function", "function": {"name": "now"}}
NAMED_CALL: Any = {"type": "function", "function": {"name": "add"}}
NOTHING: dict[str, Any] = {  # OpenAI's, of values that are those of who says nothing
    "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "store": True,
    "parallel_tool_calls": True, "tool_choice": "auto", "modalities": ["text"], "stop": None,
    "response_format": {"type": "text"}, "logprobs": False, "service_tier": "flex",
    "metadata": {"a": "b", "c": 1, "d": 0.5, "e": True}, "stream": False, "top_logprobs": 0,
    "max_tokens": -1, "max_completion_tokens": -1, "ignore_eos": False, "min_tokens": 0,
    "seed": -1, "prompt_cache_retention": "24h", "functions": None, "unheard_of": None,
}  # fmt: skip
CALL_BESIDE = {"id": None, "type": "function",
               "function": {"name": "add", "arguments": '{"a": 1}'}}  # fmt: skip
READ: list[tuple[Any, Any]] = [  # messages with more than a text, and how they are read
    ({"role": "assistant", "content": None}, assistant("")),
    ({**assistant("Hi"), "name": "a", "reasoning_content": "so", "reasoning": None, "refusal": None,
      "audio": None, "function_call": None}, assistant("Hi")),
    ({"role": "assistant", "tool_calls": [CALL_BESIDE], **CACHED},
     {**assistant(""), "tool_calls": [
         {**CALL_BESIDE, "id": "", "function": {"name": "add", "arguments": {"a": 1}}}]}),
    ({"role": "tool", "tool_call_id": "x", "content": None, "name": "add"},
     {"role": "tool", "tool_call_id": "x", "content": "", "name": "add"}),
    ({"role": "user", "content": [{"type": "text", "text": "x", **CACHED}], "pin": None,
      "name": "Ada", **CACHED}, {**user("x"), "name": "Ada"}),
]  # fmt: skip
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of other servers, and what they ask for
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["yes", "1 + 1 (or so)"]}},
     {"regex": r"yes|1 \+ 1 \(or so\)"}),
    ({"min_tokens": 5}, {"min_tokens": 5}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}), ({"seed": -2}, {"seed": -2}),
]  # fmt: skip
EFFORTS: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [  # options of the chat template
    ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}, 512),
    ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}, 0),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
     {"reasoning_effort": "high"}, 512),
    *(({"reasoning_effort": effort}, {"reasoning_effort": effort}, None)
      for effort in ("xhigh", "max")),
    ({"verbosity": "low"}, {"verbosity": "low"}, None),
    ({"reasoning_effort": "high", "max_tokens": 100}, {"reasoning_effort": "high"}, 50),
    ({"reasoning_effort": "high", "thinking_budget": 7}, {"reasoning_effort": "high"}, 7),
    ({"chat_template_kwargs": {"enable_thinking": False, "mood": "kind"}},
     {"enable_thinking": False, "mood": "kind"}, None),
]  # fmt: skip
RESULT: Any = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
SEARCH: Any = {"name": "ToolSearch", "input_schema": {"type": "object"}}
DEFERRED: Any = [SEARCH, *({**WEATHER, "name": name, "defer_loading": True} for name in "ab")]
SEARCHED: Any = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "ToolSearch",
                                       "input": {}}]},
    user_parts({**RESULT, "content": [{"type": "tool_reference", "tool_name": "b"}]})[0],
]  # fmt: skip
LATER = "<system-reminder>\nSkills: none.\n</system-reminder>"
RAN: Any = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "run", "arguments": "{}"}
PUT: Any = {"type": "function_call_output", "id": "fco_1", "call_id": "1", "output": "Set."}
GOAL: Any = {"type": "function_call_output", "name": "goal", "namespace": "agent", "output": "Run."}

REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # an address, a body, its request
    (CHAT_PATH, NOTHING, {"options": {"frequency_penalty": 0.0, "presence_penalty": 0.0}}),
    (CHAT_PATH, {"frequency_penalty": 1, "presence_penalty": -0.5},
     {"options": {"frequency_penalty": 1.0, "presence_penalty": -0.5}}),
    *((CHAT_PATH, {"stop": stop}, {"options.stop_strings": []}) for stop in ("", [], [""])),
    (CHAT_PATH, {"messages": [
        {"role": "developer", "content": "Be brief.", "pin": True},
        {**user_parts({"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"})[0],
         "name": None}]},
     {"messages": (system("Be brief."), user("Hello")), "pins": {0}}),
    *((path, {"recall": value}, {"recall": value})
      for path in (CHAT_PATH, TEXTS) for value in ("auto", "off", 0, 96, None)),
    *((CHAT_PATH, {"messages": [*HELLO, one, *HELLO], "tools": [{**TOOL, **CACHED}]},
       {"messages": (*HELLO, read, *HELLO), "tools": (TOOL,)}) for one, read in READ),
    *((path, form, {"options": options}) for form, options in FORMS for path in (CHAT_PATH, TEXTS)),
    *((CHAT_PATH, {"response_format": {"type": kind, "schema": SCHEMA}},
       {"options": {"json_schema": SCHEMA}}) for kind in ("json_object", "json_schema")),
    *((CHAT_PATH, fields, {"options.template_options": options, "options.thinking_budget": budget})
      for fields, options, budget in EFFORTS),
    *((CHAT_PATH, {"tools": [TOOL, OTHER], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [OTHER]}}},
       {"tools": (OTHER,), "must_call": mode == "required"}) for mode in ("auto", "required")),
    # A strict tool, as openai.pydantic_function_tool sends it, is offered without that word.
    (CHAT_PATH, {"tools": [strict(TOOL), OTHER]}, {
        "tools": (TOOL, OTHER),
        "options.call_schema.anyOf.0.properties.name": {"const": "add"},
        "options.call_schema.anyOf.0.properties.arguments":
            {"type": "object", **TOOL["function"]["parameters"]},
        "options.call_schema.anyOf.1.properties.arguments": {"type": "object"}}),
    *((CHAT_PATH, {"tools": tools, "tool_choice": choice}, {"options.call_schema": None})
      for tools, choice in (([TOOL], "auto"), ([strict(TOOL)], "none"),
                            ([strict(TOOL)], "required"))),
    (MESSAGES.path, {"system": "Be brief.", "stop_sequences": ["END"], "temperature": 0.5,
                     "top_k": 3},
     {"messages": (system("Be brief."), *HELLO),
      "options": {"max_new_tokens": 9, "stop_strings": ["END"], "temperature": 0.5, "top_k": 3,
                  "template_options": {"enable_thinking": False}}}),
    (MESSAGES.path, {"thinking": {"type": "enabled", "budget_tokens": 8}},
     {"options.template_options": {"enable_thinking": True}, "options.thinking_budget": 8}),
    (MESSAGES.path, {"tool_choice": {"type": "tool", "name": "weather"}},
     {"options.json_schema.anyOf.0.properties.name.const": "weather"}),
    (MESSAGES.path, {"tools": [{**WEATHER, "name": "x" * 128}]},
     {"tools.0.function.name": "x" * 128}),
    (MESSAGES.path, {"tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}},
     {"tools": (), "options.template_options": {"enable_thinking": False}}),
    (MESSAGES.path, {"messages": [*HELLO, assistant("Well,")]}, {"begin": "Well,"}),
    (MESSAGES.path, {"messages": [*HELLO, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "1", "name": "weather", "input": {}}]},
        *user_parts(RESULT, {"type": "text", "text": "And?"})]},
     {"messages.2": {"role": "tool", "tool_call_id": "1", "content": "2"},
      "messages.3": user("And?")}),
    (MESSAGES.path, {"output_config": {"effort": "max"}}, {"options.template_options":
        {"reasoning_effort": "max", "enable_thinking": False}}),
    (RESPONSES.path, {"reasoning": {"effort": "max"}},
     {"options.template_options": {"reasoning_effort": "max"}}),
    (MESSAGES.path, {"output_config": {"format": FORMAT}, "tools": []},
     {"options.json_schema": CITY}),
    (MESSAGES.path, {"output_format": FORMAT, "tools": []}, {"options.json_schema": CITY}),
    (MESSAGES.path, {"tools": [{**WEATHER, "description": "Tells.",
                                "input_examples": [{"city": "Paris"}]}]},
     {"tools.0.function.description": 'Tells.\nExample: {"city": "Paris"}'}),
    # A deferred tool is offered once a search for tools refers to it.
    (MESSAGES.path, {"tools": DEFERRED}, {"tools.*.function.name": ["ToolSearch"]}),
    (MESSAGES.path, {"tools": DEFERRED, "messages": SEARCHED},
     {"tools.*.function.name": ["ToolSearch", "b"],
      "messages.2.content": "The tool b is offered.\n"}),
    # What the system says later is part of the user's message.
    (MESSAGES.path, {"messages": [system("Skills: none."), *HELLO, assistant("Hi."),
                                  system("Skills: none."), *HELLO]},
     {"messages": (system("Skills: none."), *HELLO, assistant("Hi."), user(f"{LATER}\n\nHello!"))}),
    (RESPONSES.path, {"instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5},
     {"messages": (system("Be brief."), *HELLO),
      "options": {"max_new_tokens": 9, "temperature": 0.5}}),
    (RESPONSES.path, {"tools": [RUN, OTHER_RUN], "tool_choice": {
        "type": "allowed_tools", "mode": "required", "tools": [{"name": "other"}]}},
     {"tools.*.function.name": ["other"],
      "options.json_schema.anyOf.0.properties.name.const": "other"}),
    # Codex tells the model of a goal by an output behind that of the call that set it.
    (RESPONSES.path, {"input": [*HELLO, RAN, PUT, GOAL]},
     {"messages.2.role": "tool", "messages.3": user("goal: Run.")}),
    (OLLAMA.path, {"options": {"temperature": 0.5, "num_predict": 9, "stop": ["END"],
                               "num_ctx": 4096}},
     {"options": {"temperature": 0.5, "max_new_tokens": 9, "stop_strings": ["END"]}}),
    (OLLAMA.path, {"options": {"stop": []}}, {"options.stop_strings": []}),
    *((path, {"options": {"repeat_penalty": 1.3, "repeat_last_n": 0}},
       {"options.repetition_penalty": 1.0}) for path in (OLLAMA.path, GENERATE)),
    (OLLAMA.path, {"format": "json"}, {"options.json_schema": {"type": "object"}}),
    (GENERATE, {"system": "Be brief.", "think": False},
     {"messages": (system("Be brief."), *HELLO),
      "options.template_options": {"enable_thinking": False}}),
    (GENERATE, {"raw": True, "think": False, "options": {"num_predict": 9}},
     {"prompt": "Hello!", "messages": None, "options": {"max_new_tokens": 9}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "expected"), REQUESTS, ids=short)
def test_a_body_becomes_a_request(http, talk, path, more, expected):
    answer = http.post(path, json=body(path, more))
    assert answer.status_code == 200, answer.text
    assert {name: value_at(talk.request, name) for name in expected} == expected


ZEROS: dict[str, Any] = {"template": "", "system": "", "options": None, "suffix": "", "name": "",
    "images": [], "context": None, "raw": False, "format": None, "keep_alive": None, "think": None,
    "truncate": None, "shift": False, "logprobs": False, "top_logprobs": 0, "tools": None,
    "width": 0}  # fmt: skip
NEUTRAL: dict[str, Any] = {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1,
    "tfs_z": 1.0, "repeat_last_n": 64, "penalize_newline": True, "f16_kv": True, "num_ctx": 2048,
    "vocab_only": False}  # fmt: skip
OTHERS_NEUTRAL: dict[str, Any] = {"cache_prompt": True, "id_slot": -1, "include_reasoning": True,
    "include_stop_str_in_output": False, "length_penalty": 1.0, "mirostat": 0, "priority": 0,
    "return_token_ids": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "stop_token_ids": [], "timings_per_token": False, "typical_p": 1, "use_beam_search": False,
    "prompt_cache_options": {"mode": "implicit"}}  # fmt: skip
UNASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT_PATH, {**OTHERS_NEUTRAL, "prediction": {"type": "content", "content": "x"}}),
    (TEXTS, OTHERS_NEUTRAL), (RESPONSES.path, {"prompt_cache_options": {"mode": "implicit"}}),
    *((path, more) for path in (OLLAMA.path, GENERATE) for more in (
        ZEROS, {"truncate": True},
        *({"options": {**NEUTRAL, "num_predict": most}} for most in (-2, -1, 0)))),
    *((MESSAGES.path, more) for more in (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        CACHED, {"speed": "fast"}, {"mcp_servers": []}, {"output_config": {}},
        {"thinking": {"type": "disabled"}},
        {"tools": [{**WEATHER, "eager_input_streaming": True, "defer_loading": False,
                    "input_examples": [], "allowed_callers": ["direct"], **CACHED}]})),
    *((RESPONSES.path, more) for more in (
        {"client_metadata": {"a": "b"}}, {"max_tool_calls": 3},
        {"include": ["web_search_call.action.sources"]},
        {"tools": [], "input": [
            {"type": "additional_tools", "role": "developer", "tools": [RUN]}, *HELLO]},
        {"tools": [RUN, OTHER_RUN], "tool_choice": {
            "type": "allowed_tools", "mode": "auto",
            "tools": [{"type": "function", "name": "run"}]}},
        *({"tools": [RUN, tool]} for tool in (
            NAMESPACE, {"type": "web_search"}, {"type": "local_shell"},
            {"type": "custom", "name": "patch"})))),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), UNASKED, ids=short)
def test_what_clients_send_unasked_asks_for_nothing(http, talk, path, more):
    """The conversations are asked for the same as without it."""
    assert http.post(path, json=LEAST[path]).status_code == 200
    plain = talk.request
    answer = http.post(path, json=body(path, more))
    assert answer.status_code == 200, answer.text
    assert talk.request == plain


IMAGE: Any = {"type": "image_url", "image_url": "x"}
USED: Any = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
CALLED: Any = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
FORM: Any = {"regex": "a"}
OPENAIS: list[tuple[dict[str, Any], str | None]] = [  # of OpenAI's, and the parameter that is named
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"), ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"ignore_eos": 1}, "ignore_eos"),
    ({"temperature": 3}, "temperature"), ({"temperature": "0.5"}, "temperature"),
    ({"top_p": 1.5}, "top_p"), ({"top_k": -2}, "top_k"), ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**64}, "seed"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, None),
    ({"stop": ["x"] * 17}, "stop"), ({"stop": 5}, "stop"), ({"verbosity": "mute"}, "verbosity"),
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
    ({"structured_outputs": {**FORM, "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": "no schema"}}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": FORM, "tools": [TOOL]}, None),
    ({"structured_outputs": FORM, "response_format": {"type": "text"}}, None),
    ({"structured_outputs": FORM, "messages": [*HELLO, BEGUN]}, None),
    ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"min_tokens": -1}, "min_tokens"), ({"thinking_budget": -1}, "thinking_budget"),
    ({"thinking_budget": 9, "max_tokens": 9}, "thinking_budget"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 5, "structured_outputs": FORM}, None),
    ({"messages": "Hello"}, "messages"), ({"messages": HELLO * 7}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": user_parts(IMAGE)}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"messages": [{**assistant("x"), "pin": True}]}, "messages.0"),
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
    ({"prompt": "x", "best_of": 2}, "best_of"), ({"stop_token_ids": [1]}, "stop_token_ids"),
    ({"use_beam_search": True}, "use_beam_search"), ({"typical_p": 0.5}, "typical_p"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str | None]] = [  # an address, a body, what is named
    *((TEXTS if "prompt" in more else CHAT_PATH, more, param) for more, param in OPENAIS),
    *((MESSAGES.path, more, words) for more, words in (
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0"),
        ({"messages": user_parts({"type": "image", "source": {}})}, "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"max_tokens": 0}, "max_tokens"), ({"unheard_of": 1}, "unheard_of"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens is 9"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type is 'perhaps'"),
        ({"tool_choice": {"type": "auto", "more": 1}}, "tool_choice.more"),
        ({"tool_choice": {"type": "required"}}, "should be 'auto', 'any', 'tool' or 'none'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: type 'tool' goes with the name"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits.0.type is 'clear_tool_uses_20250919'"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code"]}]}, "allowed_callers"),
    )),
    # The system's message, and each result of a tool, are messages of their own in a chat.
    *((MESSAGES.path, {"system": "Be brief.", "messages": [
        *user_parts(RESULT, RESULT, {"type": "text", "text": "x"}),
        {"role": role, "content": [{"type": "text", "text": "x"}, wrong]}]},
       f"messages.1.content.1.{words}") for wrong, words, role in (
        ({**USED, "name": "a b"}, "name is 'a b'", "assistant"),
        ({**USED, "id": "x" * 300}, "id is", "assistant"),
        ({**USED, "input": [1]}, "input is no object", "assistant"),
        ({**RESULT, "tool_use_id": "x" * 300}, "tool_use_id is", "user"))),
    *((RESPONSES.path, more, words) for more, words in (
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"role": "king", "content": "x"}]}, "input"),
        ({"input": 5}, "input is 5: input should be a valid string or input should be a valid"),
        ({"input": [5]}, "input.0 is 5: input should be an object"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing"),
        ({"input": user_parts({"type": "input_image", "image_url": "x"})}, "input"),
        ({"tools": [{"type": "function", "name": "f", "odd": 1}]}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"conversation": "x"}, "conversation"), ({"unheard_of": 1}, "unheard_of"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "custom", "name": "patch"}]},
         "tool_choice"),
        ({"text": {"verbosity": "mute"}}, "text.verbosity is 'mute'"),
        ({"max_tool_calls": 0}, "max_tool_calls is 0"),
        ({"tools": [{**RUN, "name": "a b"}]}, "tools.0.name is 'a b'"),
        ({"input": [*HELLO, {"type": "additional_tools", "tools": [{}]}]},
         "input.1.tools.0 is no tool"),
        ({"input": [{"type": "additional_tools", "tools": 5}]}, "input.0"),
    )),
    # Instructions are a message of their own in a chat, and calls join that before them.
    *((RESPONSES.path, {"instructions": "Be brief.",
                        "input": [user("x"), CALLED, {**CALLED, **wrong}]}, f"input.2.{field}")
      for wrong, field in (
        ({"name": "a b"}, "name"), ({"arguments": 5}, "arguments"),
        ({"call_id": "x" * 300}, "call_id"),
        ({"type": "function_call_output", "output": "2", "call_id": "x" * 300}, "call_id"))),
    *((OLLAMA.path, more, words) for more, words in (
        ({"options": {"mirostat": 1}}, "'mirostat'"), ({"unheard_of": 1}, "unheard_of"),
        ({"messages": [{**user("x"), "images": ["x"]}]}, "images"),
        ({"top_logprobs": 3}, "top_logprobs needs"), ({"format": 5}, "format is 5"),
        *(({"options": {name: value}}, name) for name, value in (
            ("typical_p", 0.5), ("vocab_only", True), ("repeat_last_n", "x"),
            ("num_predict", -3))))),
    *((GENERATE, {"raw": True, **more}, "does not go with raw")
      for more in ({"system": "x"}, {"format": "json"}, {"think": True})),
    *((GENERATE, more, next(iter(more)))
      for more in ({"template": "x"}, {"suffix": "x"}, {"images": ["x"]}, {"context": [1]})),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "named"), REFUSED, ids=short)
def test_what_cannot_be_answered_is_refused_by_name(http, talk, path, more, named):
    before = len(talk.answers)
    answer = http.post(path, json=body(path, more))
    message = assert_refused(APIS[path], answer, 400)
    assert len(talk.answers) == before
    if path not in (CHAT_PATH, TEXTS):
        assert named in message
        return
    param = answer.json()["error"]["param"]
    if named is not None:
        assert (param, named in message) == (named, True)
    else:
        assert next(iter(more)) in (param or message)
        # A message of kvcap's own says behind the semicolon what would work.
        assert param or "; " in message


def faults(kind: type[Strict], body: dict[str, Any]) -> int:
    try:
        kind.model_validate_json(json.dumps(body))
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("path", BODIES)
def test_a_body_with_many_faults_has_few_errors(path):
    """Each error takes far more memory and time than the byte or two that cause it."""
    _, kind = BODIES[path]
    many: Any = {f"odd_{i}": [] for i in range(999)}
    for wrong in (many, [many], [[]] * 999):
        bodies = [{field.alias or name: wrong} for name, field in kind.model_fields.items()]
        assert max(faults(kind, one) for one in (many, *bodies)) < 20


# First requests of agents, recorded and shortened.
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
        NAMESPACE,
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


@pytest.mark.parametrize(("path", "recorded", "messages", "template", "last"), [
    (MESSAGES.path, CLAUDE_CODE, [
        ("system", "x-anthropic-billing-header: cc_version=2.1.197;You are an agent."),
        ("user", f"<system-reminder>\nA date.\n</system-reminder>\nHello!\n\n{LATER}"),
    ], {"reasoning_effort": "high", "enable_thinking": True}, "message_stop"),
    (RESPONSES.path, CODEX, [
        ("system", "You are an agent.\n\nSkills: none."), ("user", "A date.\n\nHello!"),
    ], {"reasoning_effort": "low", "verbosity": "low"}, "response.completed"),
], ids=["Claude Code", "Codex"])  # fmt: skip
def test_the_first_request_of_an_agent_is_answered(
    http, talk, path, recorded, messages, template, last
):
    answer = http.post(path, json=recorded)
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().rpartition("event: ")[2].startswith(last)
    assert [(one["role"], one["content"]) for one in talk.request.messages] == messages
    assert talk.request.options["template_options"] == template
    assert len(talk.request.tools) == 1


def test_a_thread_is_refused_by_the_code_that_makes_its_client_send_all_messages(http):
    refused = http.post(MESSAGES.path, json=body(MESSAGES.path, {"thread": {"type": "create"}}))
    message = assert_refused(MESSAGES, refused, 400)
    assert "leave thread out" in message
    assert refused.json()["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_tools_that_are_not_offered_are_named(http, talk, caplog):
    tools = [NAMESPACE, {"type": "code_interpreter", "container": {"type": "auto"}}]
    names = "namespace multi_agent_v1, code_interpreter"
    with caplog.at_level(logging.WARNING, "kvcap.serve"):
        request = {**LEAST[RESPONSES.path], "tools": [RUN, *tools], "metadata": {"a": "b"}}
        answer = [http.post(RESPONSES.path, json=request).json() for _ in range(2)][-1]
    assert [one.getMessage().partition(": ")[2] for one in caplog.records] == [names]
    assert answer["metadata"] == {"a": "b", "kvcap_tools_left_out": names}
    assert answer["tools"] == [RUN]


@pytest.mark.parametrize(("more", "kinds"), [
    ({}, ["text"]), ({"thinking": {"type": "disabled"}}, ["text"]),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, ["text"]),
    ({"thinking": {"type": "enabled", "budget_tokens": 8}}, ["thinking", "text"]),
], ids=str)  # fmt: skip
def test_thoughts_are_sent_only_if_thinking_is_enabled(http, talk, more, kinds):
    talk.script = Script(["<think>Hm", "</think>", "Yes"])
    least = {**LEAST[MESSAGES.path], **more}
    assert [one["type"] for one in http.post(MESSAGES.path, json=least).json()["content"]] == kinds
    stream = http.post(MESSAGES.path, json={**least, "stream": True}).text
    begun = [line for line in stream.splitlines() if '"content_block_start"' in line]
    blocks = [json.loads(line.removeprefix("data: ")) for line in begun]
    assert [(one["index"], one["content_block"]["type"]) for one in blocks] == [*enumerate(kinds)]
