"""Tests conversations over llama.cpp's engine, from messages to files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import together
from llama_reference import agree, needs_library, runtime_of, text_ids
from make import DOOR
from region_checks import BUDGET, check_regions, check_thoughts_leave

from kvcap.runtime.backends.llamacpp.loop import LlamaCache
from kvcap.runtime.errors import (
    MemoryCapExceeded,
    PinsTooLarge,
    SessionFileCorrupt,
    SessionFileForeign,
)
from kvcap.runtime.session.engine import CacheCopy
from kvcap.runtime.session.session import Session

pytestmark = needs_library

Files = Callable[..., Path]


def test_answers_are_held_to_a_schema_and_an_expression(gguf: Files) -> None:
    pytest.importorskip("llguidance")
    session = runtime_of(gguf(), budget_tokens=128).session(seed=1)
    session.set_generation(json_schema=DOOR, max_new_tokens=200)
    parsed = json.loads("".join(session.send("Which door?")))
    assert parsed["door"] in ("blue", "red")
    assert isinstance(parsed["code"], int)
    assert session.turn is not None
    assert session.turn.finish_reason == "stop"
    session.set_generation(json_schema=None, regex="(the |é☃){3}[0-9]{4}")
    assert re.fullmatch("(the |é☃){3}[0-9]{4}", "".join(session.send("A number?")))


def short(session: Session, tokens: int = 8) -> Session:
    """Have a session answer greedily with so many tokens."""
    session.set_generation(do_sample=False, max_new_tokens=tokens, eos_token_id=None)
    return session


def answered(session: Session, text: str) -> str:
    """Return a session's answer."""
    return "".join(session.send(text))


def next_logits(session: Session, count: int = 3) -> list[Any]:
    """Return the logits behind blocks of further tokens, which evict others."""
    ids = text_ids(9, count * 8)
    return [session.loop.read(np.array([ids[i * 8 : i * 8 + 8]])) for i in range(count)]


def test_pins_and_the_system_prompt_stay(gguf: Files) -> None:
    session = short(runtime_of(gguf(), budget_tokens=96).session("Be kind.", seed=0))
    session.pin_system = True
    answered(session, "Hi")
    "".join(session.send("code 42", pin=True))
    for _ in range(4):
        answered(session, "the and a " * 6)
    assert session.cache.held < session.cache.seen
    spans = session.cache.pinned_spans
    assert len(spans) == 2
    kept = set(session.cache.tokens.tolist())
    text = session.encode("Be kind.")
    ids = session.read_ids
    for (start, stop), pinned in zip(spans, (text, session.encode("code 42")), strict=True):
        assert set(range(start, stop)) <= kept
        assert "".join(map(chr, pinned)) in "".join(map(chr, ids[start:stop]))
    with pytest.raises(PinsTooLarge):
        "".join(session.send("a long one " * 12, pin=True))


@pytest.mark.parametrize("policy", ["streaming_llm", "lagkv"])
def test_thoughts_and_results_leave_first_and_the_system_prompt_last(
    gguf: Files, policy: str
) -> None:
    check_regions(runtime_of(gguf(), policy=policy, budget_tokens=2 * BUDGET))


@pytest.mark.parametrize(
    ("family", "positions"),
    [("llama", "compact"), ("llama", "true"), ("gemma3", "compact"), ("lfm2", "true")],
)
def test_closed_thoughts_leave_as_the_template_leaves_them_out(
    gguf: Files, family: str, positions: str, tmp_path: Path
) -> None:
    runtime = runtime_of(gguf(family), budget_tokens=2 * BUDGET, positions=positions)

    def keys(cache: LlamaCache) -> Any:
        cache.settle_keys()
        return cache.context.layers(cache.sequence, cache.held)[0].keys()

    check_thoughts_leave(runtime, tmp_path / "s", keys)


def test_nothing_is_evicted_where_that_is_forbidden(gguf: Files) -> None:
    session = short(runtime_of(gguf()).session(seed=0), 100)
    session.on_full = "stop"
    assert answered(session, "Hi")
    assert session.turn is not None
    assert session.turn.finish_reason == "full"
    assert session.cache.held == session.cache.seen == session.cache.budget
    with pytest.raises(MemoryCapExceeded, match="raise the budget to"):
        answered(session, "Hi")
    session.clear()
    session.on_full = "error"
    with pytest.raises(MemoryCapExceeded):
        answered(session, "Hi")
    full = short(runtime_of(gguf(), policy="full", budget_tokens=128).session(seed=0))
    with pytest.raises(MemoryCapExceeded, match="never evicts"):
        answered(full, "a " * 200)


def test_logits_of_prompts_are_refused_before_anything_is_read(gguf: Files) -> None:
    session = short(runtime_of(gguf()).session(seed=0))
    session.set_generation(prompt_logprobs=2)
    with pytest.raises(ValueError, match="use --backend torch"):
        session.send("Hi")
    session.set_generation(prompt_logprobs=None, logprobs=2)
    assert answered(session, "Hi")
    assert len(session.logprobs) == 8


def test_evicted_text_is_read_again(gguf: Files) -> None:
    runtime = runtime_of(gguf(trained=4096), budget_tokens=512, block_size=64, recall_store="1MiB")
    session = short(runtime.session(seed=0))
    fact = "The password of Wilhelmina is xylophone."
    answered(session, fact)
    for i in range(12):
        answered(session, f"Number {i} of the other things that are said here at some length.")
    assert session.cache.tokens[5] > 60  # the fact has gone
    session.recall.limit = 250
    answered(session, "Which password has Wilhelmina?")
    assert session.turn is not None
    assert session.turn.recalled_tokens
    kept = session.cache.tokens.tolist()
    text = runtime.tokenizer.backend_tokenizer.decode([session.read_ids[i] for i in kept])
    assert "xylophone" in text


@pytest.mark.parametrize(
    ("architecture", "policy", "positions", "kv_dtype"),
    [
        ("llama", "streaming_llm", "compact", None),
        ("qwen3", "keydiff-window", "compact", "q8_0"),
        ("llama", "knorm", "auto", None),
        ("gemma3", "streaming_llm", "compact", None),
        ("lfm2", "streaming_llm", "true", None),
    ],
)
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_saved_conversation_goes_on_with_the_same_logits(
    gguf: Files,
    architecture: str,
    policy: str,
    positions: str,
    kv_dtype: str | None,
    sequences: int,
    tmp_path: Path,
) -> None:
    how = {"policy": policy, "positions": positions, "kv_dtype": kv_dtype, "evict_every": 16}
    file = gguf(architecture)
    session = short(runtime_of(file, **how).session(seed=0), 20)
    answered(session, "the sea and the land are " * 3)
    assert session.cache.budget < session.cache.held < session.cache.seen  # some wait
    session.save(tmp_path / "s")
    runtime = runtime_of(file, **how)
    runtime.reserve(sequences)
    beside = [short(runtime.session(seed=1)) for _ in range(sequences - 1)]
    for other in beside:
        answered(other, "others")
    loaded = Session.load(runtime, tmp_path / "s")
    assert loaded.messages == session.messages
    assert loaded.cache.tokens.tolist() == session.cache.tokens.tolist()
    assert loaded.cache.cell_positions.tolist() == session.cache.cell_positions.tolist()
    for logits, expected in zip(next_logits(loaded), next_logits(session), strict=True):
        assert logits.tobytes() == expected.tobytes()  # cells are in the same order, too


def test_a_saved_conversation_goes_on_in_another_budget(gguf: Files, tmp_path: Path) -> None:
    file = gguf()
    session = short(runtime_of(file, budget_tokens=100, positions="true").session(seed=0), 30)
    answered(session, "the sea and the land are " * 6)
    session.save(tmp_path / "s")
    larger = Session.load(runtime_of(file, budget_tokens=200, positions="true"), tmp_path / "s")
    assert larger.cache.tokens.tolist() == session.cache.tokens.tolist()
    agree(next_logits(larger, 1)[0], next_logits(session, 1)[0])
    smaller = Session.load(runtime_of(file, positions="compact"), tmp_path / "s")
    assert smaller.cache.held == 48
    assert smaller.cache.cell_positions.tolist() == [*range(48)]
    assert smaller.cache.tokens[:4].tolist() == [0, 1, 2, 3]


def test_files_that_cannot_be_taken_change_nothing(
    gguf: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime = runtime_of(gguf())
    session = short(runtime.session(seed=0))
    answered(session, "Hi")
    session.save(tmp_path / "s")
    before = session.messages, session.cache.tokens.tolist()
    with pytest.raises(SessionFileForeign, match="another model"):
        short(runtime_of(gguf("qwen2")).session()).restore(tmp_path / "s")
    with pytest.raises(SessionFileForeign, match="kv_dtype"):
        runtime_of(gguf(), kv_dtype="q8_0").session().restore(tmp_path / "s")
    monkeypatch.setattr(runtime.gguf.library, "version", "0.4.1")
    session.save(tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(SessionFileForeign, match=r"library '0\.4'"):
        session.restore(tmp_path / "old")
    other = Session.load(runtime, tmp_path / "s")
    copied = other.loop.copied

    def spoilt(name: str, change: Callable[[Any], Any]) -> CacheCopy:
        made = copied()
        return CacheCopy(made.facts, {**made.tensors, name: change(made.tensors[name])})

    changes: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("tokens", lambda x: x[::-1].copy()),
        ("tokens", lambda x: x + 1000),
        ("places", lambda x: x[1:]),
        ("places", lambda x: x - 5),
    )
    for name, change in changes:
        monkeypatch.setattr(other.loop, "copied", partial(spoilt, name, change))
        other.save(tmp_path / "bad")
        monkeypatch.undo()
        other.restore(tmp_path / "s")
        with pytest.raises(SessionFileCorrupt):
            session.restore(tmp_path / "bad")
        assert (session.messages, session.cache.tokens.tolist()) == before
    raw = (tmp_path / "s").read_bytes()
    (tmp_path / "cut").write_bytes(raw[:-100])
    with pytest.raises(SessionFileCorrupt):
        session.restore(tmp_path / "cut")
    assert answered(session, "More")


@pytest.mark.parametrize(
    ("architecture", "policy"),
    [("llama", None), ("gemma3", None), ("lfm2", None), ("llama", "knorm"), ("lfm2", "keydiff")],
)
def test_several_conversations_answer_together_as_alone(
    gguf: Files, architecture: str, policy: str | None
) -> None:
    questions = ["the sea " * 12, "Hi", "one and two and three and " * 5]
    how: dict[str, Any] = {"policy": policy, "evict_every": 4}
    runtime = runtime_of(gguf(architecture), **how)
    runtime.reserve(3)
    sessions = [short(runtime.session(seed=0), 30) for _ in questions]
    answers = together(runtime.batch(3), sessions, questions)
    assert len({id(session.cache.context) for session in sessions}) == 1
    for session, text, answer in zip(sessions, questions, answers, strict=True):
        alone = short(runtime_of(gguf(architecture), **how).session(seed=0), 30)
        assert answered(alone, text) == answer
        assert alone.read_ids == session.read_ids
        assert alone.cache.tokens.tolist() == session.cache.tokens.tolist()


def test_a_conversation_is_saved_while_another_answers(gguf: Files, tmp_path: Path) -> None:
    """Calls of the library for one context wait for each other, whatever thread they come from."""
    runtime = runtime_of(gguf(), budget_tokens=64, block_size=32)
    runtime.reserve(2)
    saved, answering = runtime.session(seed=0), runtime.session(seed=0)
    for session in (saved, answering):
        session.set_generation(max_new_tokens=48, temperature=0.0)
    list(saved.send("one two three four five six seven eight nine ten " * 6))
    with ThreadPoolExecutor(1) as pool:
        writes = [pool.submit(saved.save, tmp_path / f"{i}") for i in range(8)]
        list(answering.send("ten nine eight seven six five four three two one " * 6))
        for write in writes:
            write.result()
    again = runtime_of(gguf(), budget_tokens=64, block_size=32).session()
    again.restore(tmp_path / "7")
    assert again.read_ids == saved.read_ids
