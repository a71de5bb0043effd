"""Thoughts: where they are closed, and which tokens they are."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_chat
from chat_templates import THINKING, with_template
from region_checks import BUDGET, check_regions, check_thoughts_leave
from toy_engine import ToyEngine, session_of

from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.session.batch import Batch
from kvcap.runtime.session.encoding import encode_with
from kvcap.runtime.session.thoughts import Thoughts

TEMPLATE = THINKING["opens"]
CLOSING = "\n</think>\n\n"


def runtime_in(folder: Any, policy: str, **more: Any) -> Runtime:
    settings = {"budget_tokens": BUDGET, "block_size": 16, "device": "cpu", **more}
    return Runtime.from_pretrained(tiny_chat.save(folder), policy, **settings)


def answer_tokens(session: Any) -> list[int]:
    return session.read_ids[session.turn.prompt_tokens + session.turn.reused_tokens :]


@pytest.mark.parametrize("budget", [0, 5])
def test_thoughts_are_closed_at_their_budget_and_the_answer_begins(runtime, budget):
    """Alone and in a batch, and alike with and without a bound up to there."""
    free, held = session_of(runtime), session_of(runtime)
    free.set_generation(max_new_tokens=40, eos_token_id=[])
    list(free.send("Two and two?"))
    held.set_generation(max_new_tokens=40, thinking_budget=budget, eos_token_id=[])
    text = "".join(held.send("Two and two?"))
    closing = encode_with(runtime.tokenizer, CLOSING, follows=True)
    ids = answer_tokens(held)
    assert ids[:budget] == answer_tokens(free)[:budget]
    assert ids[budget : budget + len(closing)] == closing
    assert len(ids) >= 39
    assert CLOSING in text
    batch, others = Batch(runtime, 2), [session_of(runtime) for _ in range(2)]
    for session in others:
        session.set_generation(max_new_tokens=40, thinking_budget=budget, eos_token_id=[])
        batch.add(session, session.send("Two and two?"))
    list(batch)
    assert [answer_tokens(session) for session in others] == [ids] * 2


def test_a_budget_must_leave_room_for_the_answer(runtime):
    session = session_of(runtime)
    session.set_generation(thinking_budget=6)
    with pytest.raises(ValueError, match=r"thinking_budget=6 leaves no token .* at most 6"):
        session.send("Hi")
    with pytest.raises(ValueError, match="thinking_budget=-1 will not work; use a whole number, 0"):
        session.set_generation(thinking_budget=-1)
    session.set_generation(max_new_tokens=None, thinking_budget=600)
    next(session.send("Hi"))  # by default an answer is longer by its thoughts


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("", "<think>\nTwo", (1, None)),
        ("", "<think>a b</think>c", (1, "a b</think>")),
        ("<think>\n", "a b</think>c", (1, "a b</think>")),
        ("", " <b>c", (0, None)),
        ("", "a<think>b</think>", (0, None)),
    ],
)
def test_thoughts_are_found_at_the_begin_of_an_answer(prompt, answer, expected):
    tokenizer = ToyEngine(64).tokenizer
    opened, closed = [], []
    before = encode_with(tokenizer, prompt, follows=True)
    thoughts = Thoughts(tokenizer, before, None, opened.append, closed.append)
    ids = encode_with(tokenizer, answer, follows=True)
    for token in ids:
        thoughts.token(token, None)
    spans = zip(opened, closed, strict=False)
    texts = [tokenizer.backend_tokenizer.decode(ids[a:b]) for a, b in spans]
    assert (len(opened), texts[0] if texts else None) == expected
    thoughts.finish()
    assert len(closed) == len(opened)


@pytest.mark.parametrize(("policy", "sessions"), [("streaming_llm", 1), ("lagkv", 1), ("lagkv", 2)])
def test_thoughts_and_results_leave_first_and_the_system_prompt_last(tmp_path, policy, sessions):
    """Regions order evictions in PyTorch; ONNX Runtime and llama.cpp test it beside their own."""
    runtime = runtime_in(tmp_path, policy)
    check_regions(runtime, sessions)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_dtype": "int8"}, {"positions": "true"}, {"positions": "auto"}],
    ids=["compact", "int8", "true", "auto"],
)
def test_closed_thoughts_leave_as_the_template_leaves_them_out(tmp_path, settings):
    """ONNX Runtime and llama.cpp test it beside their own."""
    runtime = runtime_in(tmp_path, "streaming_llm", **settings)

    def keys(cache: Any) -> Any:
        engine = cache.capped_layers[0].engine
        order = engine.segments[0].positions.argsort(-1)
        copy = engine.read_keys(engine.segments[0])
        return copy.take_along_dim(order[..., None], 2)[0].float().numpy()

    check_thoughts_leave(runtime, tmp_path / "s", keys)


def test_a_message_fits_that_has_the_slots_of_thoughts(tmp_path):
    """A policy that never evicts counts the slots of closed thoughts as free."""
    runtime = runtime_in(tmp_path, "full", budget_tokens=64)
    runtime.tokenizer = with_template(runtime.tokenizer, THINKING["forgets"])
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=40, thinking_budget=20, eos_token_id=[])
    list(session.send("Hi"))
    session.set_generation(max_new_tokens=1, thinking_budget=0, only_read=True)
    free = 64 - session.cache.held
    text = "sea " * (free // 2 + 4)
    assert len(session.encode(text)) > free
    list(session.send(text))
    assert session.cache.regions.dropped
    with pytest.raises(MemoryCapExceeded):
        session.send(text)


def test_a_reply_said_three_times_leaves_first(tmp_path):
    """Its marks leave with it, and every other message stays while a slot is free."""
    runtime = runtime_in(tmp_path, "keydiff")
    session = runtime.session()
    session.set_generation(max_new_tokens=1)
    turn = [
        {"role": "user", "content": "Tell. " * BUDGET},
        {"role": "assistant", "content": "I see."},
    ]
    list(session.send([*turn * 3, {"role": "user", "content": "Who?"}]))
    spans = session.cache.regions.facts["repeated replies"]
    ids, decode = session.read_ids, runtime.tokenizer.backend_tokenizer.decode
    texts = [decode(ids[a:b]) for a, b in spans]
    assert len(texts) == 3
    assert all("I see." in text and "Tell" not in text for text in texts)
    # Of more than are weighed at once the older ones leave, too, as the prompt is read on.
    session.clear()
    short = [{**turn[0], "content": "Tell. " * 9}, turn[1]]
    list(session.send([*short * 40, turn[0]]))
    replies = session.cache.regions.facts["repeated replies"]
    assert len(replies) == 40
    inside = {i for span in replies for i in range(*span)}
    assert not any(inside & set(row.tolist()) for row in session.cache.kept_tokens()[0].heads)
    session.clear()
    list(session.send([*turn * 2, {"role": "user", "content": "Who?"}]))
    assert "repeated replies" not in session.cache.regions.facts
