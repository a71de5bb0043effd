"""Chat templates that take contents as lists of parts are given these, and none loses a text."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import PARTS, PLAIN, THINKING, TOOLS, with_template
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import ToyEngine, held, session_of
from transformers import AutoTokenizer

from kvcap import pocket
from kvcap.runtime.errors import ChatTemplateMissing
from kvcap.runtime.session import chat_template
from kvcap.runtime.session.messages import ChatWriter, render
from kvcap.runtime.session.template_forms import without_default
from kvcap.runtime.session.tools_as_text import with_tools_as_text

SLOTS = 400
TEMPLATES = PLAIN | PARTS | THINKING | TOOLS
TOKENIZER = AutoTokenizer.from_pretrained(pocket.path())
SYSTEM = {"role": "system", "content": "Be kind."}


def in_parts(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as somebody writes them for this template by hand."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if name in PARTS and not (name == "mixed" and m["role"] == "system")
        else m
        for m in messages
    ]


def reference(name: str, messages: list[dict[str, Any]]) -> str:
    text: str = with_template(TOKENIZER, TEMPLATES[name]).apply_chat_template(
        in_parts(name, messages), tokenize=False, add_generation_prompt=True
    )
    return text


texts = st.text(min_size=1, max_size=12).filter(lambda x: x.strip())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.none() | texts, st.lists(st.tuples(texts, texts), max_size=3), texts,
    st.sampled_from(sorted(TEMPLATES)),
)  # fmt: skip
def test_conversations_are_written_as_transformers_writes_them(system, turns, last, name):
    """The whole at once; and turn by turn, what follows an answer ends the whole."""
    tokenizer = with_template(TOKENIZER, TEMPLATES[name])
    first = [{"role": "system", "content": system}] if system else []
    middle = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    whole = [*first, *middle, {"role": "user", "content": last}]
    assert render(tokenizer, whole) == reference(name, whole)
    if turns:
        tail = ChatWriter(tokenizer).render_turn(system, whole[-1:])
        assert reference(name, whole).endswith(tail)
        assert last.strip() in tail


@pytest.mark.parametrize("name", sorted(PLAIN | PARTS))
def test_sessions_read_what_the_user_says(runtime, name):
    runtime.tokenizer = with_template(runtime.tokenizer, TEMPLATES[name])
    session = session_of(runtime)
    question = {"role": "user", "content": "Who are you?"}
    list(session.send([SYSTEM, question]))
    answer = session.messages[-1]["content"]
    read = reference(name, [SYSTEM, question])
    assert held(session).startswith(read)
    assert all(text in read for text in ("Be kind.", "Who are you?"))
    list(session.send("And now?"))
    following = [{"role": "user", "content": "And now?"}]
    tail = ChatWriter(runtime.tokenizer).render_turn("Be kind.", following)
    assert "And now?" in tail
    assert tail in held(session)
    assert session.messages[1] == {"role": "assistant", "content": answer}


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}Hello", "{% for m in messages %}x{% endfor %}"]
)
def test_a_template_that_leaves_out_what_the_user_says_is_refused(template):
    with pytest.raises(ChatTemplateMissing, match="leaves out what the user says"):
        render(with_template(TOKENIZER, template), [{"role": "user", "content": "Hi."}])


def test_a_form_is_found_out_once(monkeypatch):
    requests = []
    plain = chat_template._Renderer.ask

    def ask(self: Any, request: bytes) -> dict[str, str]:
        requests.append(request)
        return plain(self, request)

    monkeypatch.setattr(chat_template._Renderer, "ask", ask)
    for name, first in (("either", 2), ("walked", 3)):
        tokenizer = with_template(TOKENIZER, TEMPLATES[name] + "{# once #}")
        counts = []
        for text in ("Hi.", "Ho."):
            requests.clear()
            render(tokenizer, [{"role": "user", "content": text}])
            counts.append(len(requests))
        assert counts == [first, 1]


MOODY = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.content[0].text }}{% elif mood %}"
    "{{ m.content }}{% else %}{{ raise_exception('no mood') }}{% endif %}|{% endfor %}"
)


def test_what_fails_for_want_of_an_option_says_nothing_of_a_form():
    tokenizer = with_template(TOKENIZER, MOODY)
    messages = [SYSTEM, {"role": "user", "content": "Hi."}]
    with pytest.raises(ChatTemplateMissing, match="no mood"):
        render(tokenizer, messages)
    assert render(tokenizer, messages, options={"mood": "kind"}) == "Be kind.|Hi.|"
    by_list = MOODY.replace("{{ m.content }}", "{{ m.content[0]['text'] + '' }}")
    assert render(with_template(TOKENIZER, by_list), messages, options={"mood": "kind"}) == (
        "Be kind.|Hi.|"
    )


TOOL: Any = {"type": "function", "function": {"name": "add"}}
NAMED = {"default": PLAIN["text"], "tool_use": TOOLS["own turn"], "rag": PARTS["walked"]}


@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize(
    "names", [("default", "tool_use", "rag"), ("default", "rag"), ("default",)]
)
def test_a_named_template_is_taken_as_by_transformers(tools, names):
    tokenizer = with_template(TOKENIZER, {name: NAMED[name] for name in names})
    messages = [{"role": "user", "content": "Hi."}]
    read = messages if "tool_use" in names else with_tools_as_text(messages, tools, in_system=True)
    assert render(tokenizer, messages, tools) == tokenizer.apply_chat_template(
        read, tools=tools or None, tokenize=False, add_generation_prompt=True
    )


def test_of_templates_without_a_default_only_what_is_sure_is_taken():
    messages = [{"role": "user", "content": "Hi."}]
    tokenizer = with_template(TOKENIZER, {"tool_use": NAMED["tool_use"], "rag": NAMED["rag"]})
    assert "Tools: " in render(tokenizer, messages, [TOOL])
    with pytest.raises(ChatTemplateMissing, match=r"templates rag, tool_use, and none .*'default'"):
        render(tokenizer, messages)
    assert "requests with tools are answered" in (without_default(tokenizer.chat_template) or "")
    alone = with_template(TOKENIZER, {"tool_use": NAMED["tool_use"]})
    assert render(alone, messages) == render(with_template(TOKENIZER, NAMED["tool_use"]), messages)
    assert "'tool_use' is taken" in (without_default(alone.chat_template) or "")
    assert without_default(NAMED) is without_default(NAMED["rag"]) is without_default(None) is None


def test_a_session_with_tools_takes_the_template_for_these(tmp_path_factory):
    runtime: Any = ToyEngine(400)
    runtime.tokenizer = with_template(runtime.tokenizer, NAMED)
    for tools in ([TOOL], []):
        session = session_of(runtime)
        list(session.send("Hi.", tools=tools))
        assert ("Tools: " in held(session)) == bool(tools)
