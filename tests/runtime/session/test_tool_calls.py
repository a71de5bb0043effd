"""Tools: told to the model by its chat template, and found again in what it answers."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
from chat_templates import PARTS, PLAIN, THINKING, TOOLS, with_template
from toy_engine import held, session_of, tiny

from kvcap import pocket
from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer
from kvcap.runtime.errors import MessagesInvalid
from kvcap.runtime.session.messages import ChatWriter
from kvcap.runtime.session.template_abilities import Abilities
from kvcap.runtime.session.tool_calls import (
    Parsed,
    ToolCall,
    parsed_by_template,
    parsed_text,
    schema_of_call,
)

SLOTS = 400
POCKET_TOOLS = Path(__file__).parents[3] / "scripts/pocket-tools.jinja"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
TEMPLATE = TOOLS["own turn"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLED = ToolCall("add", {"a": 1})


def test_tools_are_read_once_and_their_results_behind_the_answer(runtime):
    session = session_of(runtime)
    list(session.send("What is 1 and 1?", tools=[ADD]))
    tool = json.dumps(ADD)
    assert held(session).startswith(f"<|bos|><|system|>Tools: {tool}<|end|><|user|>What")
    assert session.tools == (ADD,)
    answer = session.messages[-1]["content"]
    result = {"role": "tool", "content": "2", "tool_call_id": "x1", "name": "add"}
    list(session.send([result]))
    assert session.messages[2] == result
    text = held(session)
    assert text.count(tool) == 1
    before, _, after = text.partition("<|end|><|user|><tool_response>2</tool_response><|end|>")
    assert f"<|assistant|>{answer}" in before  # whose last letter may have been cut
    assert after.startswith("<|assistant|>")
    list(session.send("Thank you.", tools=[ADD]))  # the same
    session.cache.reset()
    list(session.regenerate())
    assert held(session).count(tool) == 1
    assert held(session).count("<tool_response>") == 1
    session.undo()
    assert session.undo() == "What is 1 and 1?"  # a tool's result goes with its question


def test_calls_of_earlier_answers_are_read(runtime):
    session = session_of(runtime)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}, "id": "x1"}
    question = {"role": "user", "content": "What is 1 and 1?"}
    answered = {"role": "assistant", "content": None, "tool_calls": [call]}
    list(session.send([question, answered, {"role": "tool", "content": "2"}], tools=[ADD]))
    written = '<|assistant|><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'
    assert written in held(session)
    call["function"]["arguments"] = "changed later"
    assert session.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert session.messages[1]["content"] == ""


def test_other_tools_than_those_that_were_read_are_refused(runtime):
    session = session_of(runtime)
    list(session.send("Hello!"))
    with pytest.raises(MessagesInvalid, match=r"other tools .* set session\.tools"):
        session.send("What is 1 and 1?", tools=[ADD])
    session.cache.reset()
    list(session.send("What is 1 and 1?", tools=[ADD, TIME]))
    with pytest.raises(MessagesInvalid, match="other tools"):
        session.send("And now?", tools=[])
    list(session.send("And now?"))
    assert session.tools == (ADD, TIME)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([3], "tool 0 is none"),
        ([ADD, {"type": "function"}], "tool 1 is none"),
        ([ADD, {"function": {"name": 3}}], "tool 1 is none"),
        (ADD, "tool 0 is none"),
        ([{"function": {"name": "x", "parameters": {1, 2}}}], "the tools are no JSON"),
    ],
)
def test_what_is_no_tool_is_refused(runtime, tools, says):
    with pytest.raises(MessagesInvalid, match=says):
        session_of(runtime).send("Hello!", tools=tools)


@pytest.mark.parametrize(
    "calls",
    [3, [3], [{"function": {"name": "add"}}], [{"function": {"name": "add", "arguments": "{"}}],
     [{"function": {"arguments": {}}}], [{"function": {"name": "add", "arguments": [1]}}]],
)  # fmt: skip
def test_calls_that_cannot_be_read_are_refused(runtime, calls):
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "And?"}]
    with pytest.raises(MessagesInvalid, match="message 0 has tool_calls that cannot be read"):
        session_of(runtime).send(messages)


WITHOUT_TOOLS = {
    "system": PLAIN["text"],
    "no system": PLAIN["text"].replace("<|{{ m.role }}|>", "{% if m.role in ('system', 'tool') %}"
    "{{ raise_exception('no such role') }}{% endif %}<|{{ m.role }}|>"),
    "turns that alternate": PLAIN["trimmed"].replace("<|{{ m.role }}|>", "{% if (m.role == 'user') "
    "== (messages[loop.index0 - 1].role == 'user') and loop.index0 %}{{ raise_exception('turns') }}"
    "{% endif %}<|{{ m.role }}|>"),
    "parts": PARTS["walked"],
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
@pytest.mark.parametrize("system", [None, "Be kind."])
def test_a_model_is_told_of_tools_that_its_template_does_not_write(runtime, name, system):
    """Calls and their results are texts, and the conversation goes on without being read again."""
    pytest.importorskip("llguidance")
    runtime.tokenizer.chat_template = WITHOUT_TOOLS[name]
    assert ChatWriter(runtime.tokenizer, [ADD]).calls_are_marked
    if name == "no system" and system:
        pytest.skip("this template takes none")
    session = session_of(runtime, system)
    session.set_generation(json_schema=schema_of_call([ADD]), max_new_tokens=60)
    list(session.send("What is 1 and 1?", tools=[ADD]))
    session.set_generation(json_schema=None, max_new_tokens=6)
    text = held(session)
    assert f"<tools>\n{json.dumps(ADD)}\n</tools>" in text
    assert text.index(system or "<|bos|>") < text.index("# Tools") < text.index("What is 1")
    (call,) = session.messages[-1]["tool_calls"]
    assert call["function"]["name"] == "add"
    results = [{"role": "tool", "content": text, "tool_call_id": call["id"]} for text in "23"]
    list(session.send(results))
    assert session.turn.reused_tokens > 0
    one, other = (f"<tool_response>\n{text}\n</tool_response>" for text in "23")
    assert f"<|user|>{one}\n\n{other}<|end|>" in held(session)
    list(session.send("Thank you."))
    session.cache.reset()
    list(session.send("And now?"))
    text = held(session)
    function = json.dumps(call["function"])
    assert text.count("# Tools") == text.count(f"<tool_call>\n{function}\n</tool_call>") == 1
    assert text.count(f"{one}\n\n{other}") == 1


@pytest.mark.parametrize(("name", "writes"), [
    ("own turn", Abilities(True, True, True, False, False)),
    ("ids", Abilities(True, True, True, False, False)),
    ("named", Abilities(True, True, True, False, False)),
    ("one turn", Abilities(True, True, True, False, False)),
    ("text", Abilities(False, False, True, False, False)),
    ("walked", Abilities(False, False, True, False, False)),
    ("switch", Abilities(False, False, True, True, False)),
    ("opens", Abilities(False, False, True, True, False)),
    ("forgets", Abilities(False, False, True, True, True)),
])  # fmt: skip
def test_what_a_template_writes_is_found_out(runtime, name, writes):
    runtime.tokenizer.chat_template = {**TOOLS, **PLAIN, **PARTS, **THINKING}[name]
    assert ChatWriter(runtime.tokenizer).abilities == writes


def test_what_an_answer_calls_is_parsed(runtime):
    pytest.importorskip("llguidance")
    session = session_of(runtime)
    assert session.parsed == Parsed("")
    regex = r'Well\. <tool_call>\{"name": "add", "arguments": \{"a": [12]\}\}</tool_call>'
    session.set_generation(regex=regex, max_new_tokens=90)
    text = "".join(session.send("What is 1 and 1?", tools=[ADD]))
    value = int(text.split('"a": ')[1][0])
    parsed = session.parsed
    assert parsed == Parsed("Well.", (ToolCall("add", {"a": value}),)).with_ids((1, session.number))
    assert re.fullmatch("[A-Za-z0-9]{9}", parsed.tool_calls[0].id)
    assert session.messages[-1] == parsed.as_message()
    session.set_generation(regex=r'\{"name": "(add|sub)", "parameters": \{"a": 1\}\}')
    bare = "".join(session.send("And now?"))
    known = "add" in bare
    assert session.parsed == (Parsed("", (CALLED,)) if known else Parsed(bare)).with_ids(
        (3, session.number)
    )


FORMS = {
    "hermes": (CALL, CALL, Parsed("", (CALLED,))),
    "several": (f"I add.\n{CALL}\n{CALL}", None, Parsed("I add.", (CALLED, CALLED))),
    "cut short": (CALL.partition("\n</")[0], None, Parsed("", (CALLED,))),
    "cut within": (CALL[:30], None, Parsed(CALL[:30])),
    "one is broken": (
        f"{CALL}<tool_call>{{no}}</tool_call>", None,
        Parsed("<tool_call>{no}</tool_call>", (CALLED,)),
    ),
    "llama": (
        '{"name": "add", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>',
        Parsed("", (CALLED,)),
    ),
    "llama, several": (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "x", "parameters": {}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "x", "parameters": {}}',
        Parsed("", (CALLED, ToolCall("x", {}))),
    ),
    "llama, bare": ('{"name": "add", "parameters": {"a": 1}}', None, Parsed("", (CALLED,))),
    "JSON that calls none": (
        '{"name": "Ada", "parameters": {"a": 1}}', None,
        Parsed('{"name": "Ada", "parameters": {"a": 1}}'),
    ),
    "llama's own tools": ('search.call(query="x")', '<|python_tag|>search.call(query="x")',
                          Parsed('search.call(query="x")')),
    "mistral": (
        '[{"name": "add", "arguments": {"a": 1}}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
        Parsed("", (CALLED,)),
    ),
    "mistral, new": (
        'Well. add{"a": 1}time{}',
        'Well. [TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}[TOOL_CALLS]time[ARGS]{}',
        Parsed("Well.", (CALLED, ToolCall("time", {}))),
    ),
    "mistral, broken": ("add{", "[TOOL_CALLS]add[ARGS]{", Parsed("add{")),
    "arguments in a text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', None,
        Parsed("", (CALLED,)),
    ),
    "plain": ("Hello!", None, Parsed("Hello!")),
    "a number": ("[1, 2]", None, Parsed("[1, 2]")),
    "deep": ("[" * 100_000, None, Parsed("[" * 100_000)),
    "empty": ("", None, Parsed("")),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_common_forms_are_read_and_others_stay_text(form):
    text, raw, expected = FORMS[form]
    assert parsed_text(text, raw or text, [ADD]) == expected


def test_a_call_is_a_message_again():
    parsed = Parsed("I add.", (CALLED._replace(id="x1"),))
    assert Parsed.of_message(parsed.as_message()) == parsed
    assert parsed.as_message()["tool_calls"][0] == {
        "type": "function",
        "id": "x1",
        "function": {"name": "add", "arguments": {"a": 1}},
    }


def test_the_template_of_a_tokenizer_is_preferred(chat_model):
    """`response_template` of transformers 5: here with marks that no other model has."""
    session = session_of(tiny(chat_model))
    tokenizer = copy.deepcopy(session.runtime.tokenizer)
    if not hasattr(tokenizer, "parse_response"):
        pytest.skip("transformers 4.57 knows no response_template")
    assert parsed_by_template(tokenizer, "x", "", []) is None
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {
                "open": "<<",
                "close": ">>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|end|>", "content": "text"},
        },
    }
    raw = 'I add. <<{"name": "add", "arguments": {"a": 1}}>>'
    parsed = parsed_by_template(tokenizer, raw, "<|user|>Hi.<|end|><|assistant|>", [ADD])
    assert parsed is not None
    assert (parsed.content.strip(), parsed.tool_calls) == ("I add.", (CALLED,))
    broken = parsed_by_template(tokenizer, "<<{no>>", "", [ADD])
    assert broken is None or broken.tool_calls == ()
    assert parsed_by_template(tokenizer, "Hello!", "", []) == Parsed("Hello!")


def test_an_answer_that_must_call_is_in_no_form_of_the_tokenizer(runtime):
    """It is held to JSON, which the `response_template` of the tokenizer takes for text."""
    pytest.importorskip("llguidance")
    runtime.tokenizer.response_template = {"fields": {}}
    runtime.tokenizer.parse_response = lambda raw, **_: {"content": raw}
    session = session_of(runtime)
    now = {"type": "function", "function": {"name": "now"}}
    session.set_generation(json_schema=schema_of_call([now]), max_new_tokens=90)
    list(session.send("What is 1 and 1?", tools=[ADD, now]))
    (call,) = session.parsed.tool_calls
    assert (call.name, session.messages[-1]["content"]) == ("now", "")


def test_an_answer_that_is_held_to_a_call_is_one(runtime):
    """Of a tool whose schema refers to itself, and of one without parameters."""
    pytest.importorskip("llguidance")
    pair = {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/side"}, "kind": {"enum": [{"$ref": "#"}, 1]}},
        "required": ["left", "kind"],
        "additionalProperties": False,
        "$defs": {"side": {"enum": ["a", "b"]}},
    }
    tools = [
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "pair", "parameters": pair}},
    ]
    for offered in (tools, tools[1:]):
        session = session_of(runtime)
        session.set_generation(json_schema=schema_of_call(offered), max_new_tokens=400)
        for seed in range(4):
            session.clear()
            session.set_generation(do_sample=True, temperature=1.0, seed=seed)
            written = "".join(session.send("Call one."))
            ((name, arguments, *_),) = parsed_text(written, written, offered).tool_calls
            assert name in [one["function"]["name"] for one in offered]
            if name == "now":
                assert arguments == {}
            else:
                jsonschema.validate(arguments, pair)


@pytest.mark.parametrize(
    ("template", "is_marked"),
    [
        (TOOLS["own turn"], True),
        (TOOLS["ids"], False),  # an id follows the JSON
        (POCKET_TOOLS.read_text(), True),
        ("{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", True),  # no tools
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),  # they are told
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_the_form_in_which_a_template_writes_calls_is_known(template: str, is_marked: bool) -> None:
    tokenizer = with_template(Tokenizer(pocket.path()), template)
    tool = {"type": "function", "function": {"name": "add"}}
    assert ChatWriter(tokenizer, [tool]).calls_are_marked == is_marked
