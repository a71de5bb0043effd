"""What tools return is read as transformers writes it, whatever the template needs for that."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chat_templates import TOOLS, with_template
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import held, session_of, tiny
from transformers import AutoTokenizer

import kvcap
from kvcap import pocket
from kvcap.runtime.errors import ChatTemplateMissing
from kvcap.runtime.session.messages import ChatWriter, render
from kvcap.runtime.session.tool_calls import Parsed, ToolCall

SLOTS = 600
TOKENIZER = AutoTokenizer.from_pretrained(pocket.path())
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "What is 1 and 1?"}
WITHIN_A_TURN = ("own turn", "ids")
LEFT_OUT = TOOLS["own turn"].replace("{{ m.content }}</tool_response>", "</tool_response>")


def reference(template: str, messages: list[dict[str, Any]]) -> str:
    text: str = with_template(TOKENIZER, template).apply_chat_template(
        messages, tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    return text


texts = st.text(max_size=8)
words = st.text('abc 12."\\\n\u2028{}', min_size=1, max_size=8)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.sampled_from(sorted(TOOLS)), st.none() | words,
    st.lists(st.tuples(words, words), max_size=2),
    st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
)  # fmt: skip
def test_calls_and_results_are_written_as_transformers_writes_them(name, system, turns, calls):
    """The whole at once; and where the turn suffices, its text is the end of the whole."""
    tokenizer = with_template(TOKENIZER, TOOLS[name])
    questions = [{"role": "user", "content": word} for turn in turns for word in turn]
    answer = Parsed("", tuple(ToolCall("add", {"a": a}) for a, _ in calls)).with_ids(len(questions))
    results = [
        {"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name}
        for call, (_, text) in zip(answer.tool_calls, calls, strict=True)
    ]
    first = [{"role": "system", "content": system}] if system else []
    whole = [*first, *questions, QUESTION, answer.as_message(), *results]
    expected = reference(TOOLS[name], whole)
    writer = ChatWriter(tokenizer, [ADD])
    writer.check_written(first, whole[len(first) :])
    assert render(tokenizer, whole, [ADD]) == expected
    within = writer.turn_has_results(system, [answer.as_message()], results)
    assert within == (name in WITHIN_A_TURN)
    if within:
        assert expected.endswith(writer.render_turn(system, results))


def called(runtime: Any, template: str) -> Any:
    """A session whose answer calls the tool."""
    pytest.importorskip("llguidance")
    runtime.tokenizer = with_template(runtime.tokenizer, template)
    session = session_of(runtime)
    regex = r'I add\. <tool_call>\{"name": "add", "arguments": \{"a": [12]\}\}</tool_call>'
    session.set_generation(regex=regex, max_new_tokens=90)
    list(session.send([QUESTION], tools=[ADD]))
    session.set_generation(regex=None, max_new_tokens=6)
    assert session.messages[-1]["tool_calls"][0]["function"]["name"] == "add"
    return session


def result(session: Any, content: str) -> dict[str, Any]:
    (call,) = session.parsed.tool_calls
    return {"role": "tool", "content": content, "tool_call_id": call.id, "name": call.name}


@pytest.mark.parametrize("name", TOOLS)
def test_a_result_is_read_as_transformers_writes_it(runtime, name, tmp_path):
    """Behind the answer where that is the same, else with the whole conversation."""
    session = called(runtime, TOOLS[name])
    before = held(session)
    list(session.send([result(session, 'two "2"')]))
    whole = reference(TOOLS[name], session.messages[:-1])
    assert "two" in whole
    if name in WITHIN_A_TURN:
        assert held(session).startswith(before)
        (tail,) = [whole[whole.index("</tool_call>") + len("</tool_call>") :]]
        assert tail in held(session)
    else:
        assert held(session).startswith(whole)
    assert (session.turn.reused_tokens > 0) == (name in WITHIN_A_TURN)

    list(session.send("Thank you."))  # what follows needs no call
    assert session.turn.reused_tokens > 0
    assert held(session).count("two") == 1
    session.cache.reset()
    list(session.regenerate())
    assert held(session).startswith(reference(TOOLS[name], session.messages[:-1]))


@pytest.mark.parametrize("name", TOOLS)
def test_an_answer_with_a_call_is_saved_and_its_result_read_later(name, tmp_path, chat_model):
    runtime = tiny(chat_model).with_budget(600)
    session = called(runtime, TOOLS[name])
    session.save(tmp_path / "talk")
    loaded = kvcap.Session.load(runtime, tmp_path / "talk")
    assert (loaded.parsed, loaded.tools) == (session.parsed, session.tools)
    results = [result(session, "2")]
    assert "".join(loaded.send(results)) == "".join(session.send(results))
    assert loaded.messages == session.messages


ONE_CALL = TOOLS["own turn"].replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}",
)
CALL = r'\{"name": "add", "parameters": \{"a": [12]\}\}'


def test_an_answer_of_more_calls_than_the_template_takes_is_kept_as_its_text(runtime):
    """As Llama 3's, which refuses two calls: the conversation goes on, and can be read again."""
    pytest.importorskip("llguidance")
    runtime.tokenizer = with_template(runtime.tokenizer, ONE_CALL)
    session = session_of(runtime)
    session.set_generation(regex=rf"<\|python_tag\|>{CALL}; {CALL}", max_new_tokens=90)
    answer = "".join(session.send([QUESTION], tools=[ADD]))
    session.set_generation(regex=None, max_new_tokens=6)
    assert len(session.parsed.tool_calls) == 2
    assert session.messages[-1] == {"role": "assistant", "content": answer}
    results = [
        {"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name}
        for text, call in zip(("one", "two"), session.parsed.tool_calls, strict=True)
    ]
    before = held(session)
    list(session.send(results))
    assert held(session).startswith(before)
    assert "<tool_response>two</tool_response>" in held(session)
    list(session.regenerate())
    assert held(session).startswith(reference(ONE_CALL, session.messages[:-1]))


def test_results_follow_an_answer_that_the_template_refuses_to_write():
    """As in conversations that were saved with both of its calls."""
    calls = tuple(ToolCall("add", {"a": a}, f"abcdefgh{a}") for a in (1, 2))
    results = [{"role": "tool", "content": call.id, "tool_call_id": call.id} for call in calls]
    answer = [Parsed("", calls).as_message()]
    tokenizer = with_template(TOKENIZER, ONE_CALL)
    assert ChatWriter(tokenizer, [ADD]).turn_has_results(None, answer, results)
    tokenizer = with_template(TOKENIZER, LEFT_OUT)
    assert not ChatWriter(tokenizer, [ADD]).turn_has_results(None, answer, results)


def test_a_result_that_is_not_written_is_refused(runtime):
    session = called(runtime, LEFT_OUT)
    results, before = [result(session, "2")], list(session.messages)
    with pytest.raises(ChatTemplateMissing, match="leaves out what a tool returned, '2'; give"):
        session.send(results)
    assert session.messages == before
    with pytest.raises(ChatTemplateMissing, match="leaves out what a tool returned"):
        session_of(runtime).send([*before, *results], tools=[ADD])
    list(session.send("Never mind."))


@pytest.mark.parametrize("name", ["named", "one turn"])
def test_a_result_without_its_call_is_refused_where_the_template_needs_that(runtime, name):
    runtime.tokenizer = with_template(runtime.tokenizer, TOOLS[name])
    session = session_of(runtime)
    list(session.send([QUESTION], tools=[ADD]))
    assert "tool_calls" not in session.messages[-1]
    with pytest.raises(ChatTemplateMissing, match=r"without a call|give the assistant's"):
        session.send([{"role": "tool", "content": "2", "tool_call_id": "abcdefghi"}])
    assert len(session.messages) == 2


def test_a_stop_before_the_answer_to_a_result_changes_nothing(runtime):
    """The conversation is read again from its beginning, and takes the result the next time."""
    session = called(runtime, TOOLS["one turn"])
    before = list(session.messages)
    results = [result(session, "two")]

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    session.on_block = stop
    with pytest.raises(KeyboardInterrupt):
        list(session.send(results))
    session.on_block = None
    assert session.messages == before
    list(session.send(results))
    assert held(session).startswith(reference(TOOLS["one turn"], session.messages[:-1]))


@pytest.mark.parametrize(
    "ids",
    [
        ("call_0123456789abcdef", "call_x"),
        ("123456789", "call_x"),
        (None, None),
        ("a-b-c-d-e-f", "a b"),
    ],
)
def test_ids_of_other_forms_are_replaced_where_the_template_refuses_them(ids, runtime):
    """In calls and results alike, so that they still belong together."""
    runtime.tokenizer = with_template(runtime.tokenizer, TOOLS["ids"])
    session = session_of(runtime)
    calls = [
        {"function": {"name": name, "arguments": {}}, "type": "function"}
        | ({"id": id} if id else {})
        for name, id in zip("fg", ids, strict=True)
    ]
    results = [
        {"role": "tool", "content": name} | ({"tool_call_id": id} if id else {})
        for name, id in zip("fg", ids, strict=True)
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    list(session.send([QUESTION, answer, *results], tools=[ADD]))
    read = held(session)
    ids_read = re.findall(r'"(?:name": "|name":")(f|g)".*?\[(.{9})\]</tool_call>', read)
    came = re.findall(r'<\|user\|>\[([A-Za-z0-9]{9})\]\{"content": "(f|g)"', read)
    assert ids_read == [(name, id) for id, name in came]
    assert len(ids_read) == 2
    assert ids[0] != "123456789" or ids_read[0][1] == ids[0]
    assert session.messages[1]["tool_calls"][0].get("id") == ids[0]


@pytest.mark.parametrize("name", [name for name in TOOLS if name != "ids"])
def test_ids_that_a_template_takes_stay(name):
    tokenizer = with_template(
        TOKENIZER, TOOLS[name].replace("tool_call>", "tool_call>{{ call.id }}")
    )
    call = {"id": "call_x", "type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call_x"},
    ]
    assert render(tokenizer, messages, [ADD]) == reference(tokenizer.chat_template, messages)


def test_a_template_that_fails_with_any_ids_says_why_it_does():
    tokenizer = with_template(TOKENIZER, TOOLS["named"])
    messages = [QUESTION, {"role": "tool", "content": "2", "tool_call_id": "call_x"}]
    with pytest.raises(ChatTemplateMissing, match="a result without a call"):
        render(tokenizer, messages, [ADD])


IF_FIRST = "{% if m.role == 'assistant' and messages[loop.index0 - 1].role == 'user' %}"
AGAIN = {
    **{name: TOOLS[name] for name in WITHIN_A_TURN},
    # As in Qwen 3.5 and GLM: an answer is opened by a mark of thoughts, and written without it.
    "opens": TOOLS["own turn"].replace(
        "<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}"
    ),
    # As in Qwen 3 and Kimi: an earlier answer gets closed thoughts only behind the last question.
    "closed": TOOLS["own turn"].replace(
        "<|{{ m.role }}|>", "<|{{ m.role }}|>" + IF_FIRST + "<think></think>{% endif %}"
    ),
}


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize("saved", [False, True])
def test_a_result_is_answered_again_behind_the_same_tokens(tmp_path, chat_model, name, saved):
    runtime = tiny(chat_model).with_budget(600)
    session = called(runtime, AGAIN[name])
    answer = "".join(session.send([result(session, "2")], pin=True))
    count = session.turn.reused_tokens + session.turn.prompt_tokens
    read, pins = session.read_ids[:count], list(session.cache.pinned_spans)
    if saved:
        session.save(tmp_path / "talk")
        session = kvcap.Session.load(session.runtime, tmp_path / "talk")
        session.set_generation(max_new_tokens=6, temperature=0.0)
    for _ in range(2):
        assert "".join(session.regenerate()) == answer
        assert (session.turn.prompt_tokens, session.read_ids[:count]) == (count, read)
        assert session.cache.pinned_spans == pins
    session.set_generation(template_options={"mood": "another"})  # all is written anew
    list(session.regenerate())
    assert session.read_ids[:count] != read
