"""Further names for the chat template: thinking is switched off, and no form is written within."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import NO_THOUGHTS, PARTS, PLAIN, THINKING, with_template
from toy_engine import held, session_of, tiny
from transformers import AutoTokenizer

import kvcap
from kvcap import pocket
from kvcap.runtime.errors import ChatTemplateMissing, MessagesInvalid

SLOTS = 400
TOKENIZER = AutoTokenizer.from_pretrained(pocket.path())
OFF = {"enable_thinking": False}
FORM = "4821"


def session_with(runtime: Any, name: str) -> Any:
    runtime.tokenizer = with_template(runtime.tokenizer, THINKING[name])
    return session_of(runtime)


def reference(name: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    text: str = with_template(TOKENIZER, THINKING[name]).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    return text


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("options", [OFF, {"enable_thinking": True, "mood": "kind"}, {"x": [1]}])
def test_options_are_passed_on_as_by_transformers(runtime, name, options):
    session = session_with(runtime, name)
    session.set_generation(template_options=options)
    question = {"role": "user", "content": "Hello!"}
    list(session.send([question]))
    assert held(session).startswith(reference(name, [question], options))
    session.cache.reset()
    list(session.regenerate())
    assert held(session).startswith(reference(name, [question], options))
    session.set_generation(template_options=None)
    session.clear()
    list(session.send([question]))
    assert held(session).startswith(reference(name, [question], {}))


@pytest.mark.parametrize("name", THINKING)
def test_thinking_is_switched_off_within_a_conversation(runtime, name):
    """What is held is gone on with, unless another beginning would have been written."""
    session = session_with(runtime, name)
    list(session.send("Hello!"))
    before = held(session)
    session.set_generation(template_options=OFF)
    list(session.send("And now?"))
    whole = reference(name, session.messages[:-1], OFF)
    assert held(session).startswith(whole if name == "system" else before)
    assert whole[whole.index("<|user|>And now?") :] in held(session)
    assert (session.turn.reused_tokens > 0) == (name != "system")
    list(session.send("And then?"))
    assert session.turn.reused_tokens > 0


@pytest.mark.parametrize("name", THINKING)
def test_a_form_is_written_behind_thoughts(runtime, name):
    pytest.importorskip("llguidance")
    session = session_with(runtime, name)
    session.set_generation(regex=FORM)
    for text in ("Hello!", "What does <think> mean? <think>"):
        assert "".join(session.send(text)) == FORM
        (prompt,) = [reference(name, [{"role": "user", "content": text}], OFF)]
        if name in ("opens", "forgets"):
            prompt = prompt.rstrip() + NO_THOUGHTS.removeprefix("<think>")
        tail = prompt[prompt.index("<|user|>") :]
        assert f"{tail}{FORM[0]}" in held(session)
        opened = held(session).rpartition("<|user|>")[2].replace(text, "").count("<think>")
        assert opened == (0 if name == "system" else 1)
    session.set_generation(regex=None)
    list(session.send("And now?"))
    assert session.turn.reused_tokens == 0 or name != "system"
    tail = reference(name, [{"role": "user", "content": "And now?"}], {})
    assert tail[tail.index("<|user|>") :] in held(session)


def test_thoughts_that_were_asked_for_are_not_switched_off(runtime):
    pytest.importorskip("llguidance")
    session = session_with(runtime, "switch")
    session.set_generation(regex=FORM, template_options={"enable_thinking": True})
    list(session.send("Hello!"))
    assert f"<|assistant|>{FORM[0]}" in held(session)


def test_a_form_that_is_set_before_the_first_text_counts(runtime):
    """The prompt was made by `send`, and is made again."""
    pytest.importorskip("llguidance")
    session = session_with(runtime, "opens")
    answer = session.send("Hello!")
    session.set_generation(regex=FORM)
    assert "".join(answer) == FORM
    assert "</think>" in held(session)


def test_options_are_saved(tmp_path, chat_model):
    runtime = tiny(chat_model).with_budget(400)
    session = session_with(runtime, "system")
    session.set_generation(template_options=OFF)
    list(session.send("Hello!"))
    session.set_generation(template_options={"mood": "kind"})  # of the next message
    session.save(tmp_path / "talk")
    loaded = kvcap.Session.load(runtime, tmp_path / "talk")
    assert loaded.generation.template_options == {"mood": "kind"}
    list(loaded.send("And now?"))
    assert loaded.turn.reused_tokens == 0  # another beginning
    list(loaded.send("And then?"))
    assert loaded.turn.reused_tokens > 0


@pytest.mark.parametrize(
    "options", [3, [1], {"messages": []}, {"tools": None}, {"add_generation_prompt": False}, {1: 2},
                {"x": float("nan")}, {"x": {1, 2}}],
)  # fmt: skip
def test_what_are_no_options_is_refused(runtime, options):
    session = session_of(runtime)
    with pytest.raises(ValueError, match=r"template_options=.* will not work; use a dictionary"):
        session.set_generation(template_options=options)


def test_a_template_is_named_by_an_option(runtime):
    named = {"default": PLAIN["text"], "rag": PARTS["walked"] + "."}
    runtime.tokenizer = with_template(runtime.tokenizer, named)
    session = session_of(runtime)
    session.set_generation(template_options={"chat_template": "rag"})
    list(session.send("Hello!"))
    assert "<|user|>Hello!<|end|><|assistant|>." in held(session)
    for name in ("{{ 1 }}", ["rag"]):
        session.set_generation(template_options={"chat_template": name})
        with pytest.raises(ChatTemplateMissing, match=r"no chat template .*; there is: default"):
            session.send("And now?")


def test_a_text_that_was_continued_is_not_forgotten_for_other_options(runtime):
    session = session_with(runtime, "system")
    list(session.complete("Once upon a time"))
    session.set_generation(template_options=OFF)
    with pytest.raises(MessagesInvalid, match="text that was continued would be forgotten"):
        session.send("Hello!")
    session.set_generation(template_options=None)
    list(session.send("Hello!"))
    assert held(session).startswith("Once upon a time")


def test_a_cleared_conversation_forgets_the_options_it_was_read_with(runtime):
    session = session_with(runtime, "system")
    session.set_generation(template_options=OFF)
    list(session.send("Hello!"))
    session.set_generation(template_options=None)
    session.clear()
    assert session.conversation["template_options"] == {}
    list(session.complete("Once upon a time"))
    list(session.send("Hello!"))
    assert held(session).startswith("Once upon a time")
