"""The strip of a conversation: the tokens that were read, and which layers hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_chat
import torch
from conftest import tiny_model
from made_tokenizers import Wrapped, gemma_like
from make import engine
from toy_engine import ToyEngine, session_of

from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.session.detokenizer import Detokenizer
from kvcap.runtime.session.session import Session
from kvcap.runtime.types import KeptTokens
from kvcap.serve.strip import GROUPS, Strip, grouped, pieces, strip_of

LONG = "Seven kinds of mosses survive the cold near Porto – “naïve”, she said. 🐝 " * 4


@pytest.fixture(scope="module", params=["torch", "numpy"])
def runtime(request, chat_model):
    return engine(request.param, chat_model)


def rows_of(session: Any) -> list[list[set[int]]]:
    """Return the tokens that each head of each layer holds, read from the slots themselves."""
    cache = session.cache
    if isinstance(session.runtime, ToyEngine):
        return [[set(head.tolist()) for head in layer] for layer in cache.positions]
    return [
        [set(head.tolist()) for s in layer.segments for head in s.positions[0]]
        for layer in cache.capped_layers
    ]


def sound(session: Any) -> Strip:
    strip = strip_of(session, "ada")
    ids = session.read[: session.cache.seen]
    decode = session.runtime.tokenizer.backend_tokenizer.decode
    assert "".join(strip.tokens) == decode(ids, skip_special_tokens=False)
    layers = [layer for group in strip.groups for layer in group.layers]
    rows = rows_of(session)
    assert layers == list(range(len(rows)))
    for group in strip.groups:
        heads = [head for layer in group.layers for head in rows[layer]]
        assert group.heads == len(heads)
        assert group.held == [sum(i in head for head in heads) for i in range(len(ids))]
    assert strip.held + strip.waiting + strip.evicted == len(strip.tokens) == len(ids)
    assert strip.held <= strip.budget_tokens
    return strip


def test_bytes_that_are_no_letter():
    """Also where a letter was begun, and where it is not known what was."""
    known = gemma_like()
    ids = [known.token_to_id(f"<0x{byte:02X}>") for byte in b"\xc3\xa9\xe2h\xe2"]
    texts = pieces(Wrapped(known), [*ids[:4], -1, *ids])
    assert texts == ["", "é", "", "\ufffdh", None, "", "é", "", "\ufffdh", ""]


def test_every_token_and_who_holds_it(runtime):
    session = session_of(runtime, "Be kind.")
    assert strip_of(session, "ada").tokens == []
    for text in ("Hi, I am Ada.", LONG, "🐝" * 9):
        list(session.send(text))
        strip = sound(session)
    assert strip.evicted > 64
    assert any(0 in group.held for group in strip.groups)
    assert Strip.model_validate_json(strip.model_dump_json()) == strip
    session.clear()
    assert sound(session).tokens == []


def test_recalled_text_is_told_from_pins_while_its_answer_is_written_and_afterwards(tmp_path):
    folder = tiny_chat.save(tmp_path)
    runtime = Runtime.from_pretrained(
        folder, "streaming_llm", budget_tokens=128, block_size=16, device="cpu"
    )
    session = session_of(runtime)
    list(session.send("The secret code of the vault is 7421. Remember it."))
    for _ in range(2):
        list(session.send(LONG))
    assert sound(session).recalled == []
    strips = [sound(session) for _ in session.send("What is the secret code?", pin=True)]
    for strip in (*strips, sound(session)):
        ((start, stop),) = strip.recalled
        assert "vault is 7421" in "".join(strip.tokens[start:stop])
        assert strip.tokens[start].startswith("(")
        assert strip.pinned  # the question, around what is recalled
        assert all(b <= start or stop <= a for a, b in strip.pinned)
    assert strips
    begun = session.send("And the code of the vault?")
    session.recall.spans.append((10**6, 10**6 + 9))  # as where reading was cut short
    assert sound(session).recalled == strips[0].recalled
    begun.close()


def test_a_loaded_conversation_knows_its_tokens(runtime, tmp_path):
    session = session_of(runtime)
    list(session.send(LONG))
    if isinstance(runtime, ToyEngine):  # it has no files
        return
    session.save(tmp_path / "ada")
    loaded = Session.load(runtime, tmp_path / "ada")
    assert strip_of(loaded, "ada") == strip_of(session, "ada")


def test_tokens_that_nobody_noted_are_unknown(runtime):
    """As those of a file that an earlier kvcap saved."""
    session = session_of(runtime)
    list(session.send(LONG))
    seen, conversation = session.cache.seen, session.conversation
    del conversation["read_ids"]
    session.take_over(conversation, session.rng)
    assert strip_of(session, "ada").tokens == [None] * seen
    list(session.send("And now?"))
    texts = strip_of(session, "ada").tokens
    assert texts[:seen] == [None] * seen
    assert "And now?" in "".join(texts[seen:])


def test_many_layers_become_few_groups_and_windows_one_of_their_own():
    row = [np.arange(3), np.arange(1, 4)]
    kept = [KeptTokens(i, i % 3 > 0, row) for i in range(30)]
    groups = grouped(kept, 5)
    assert [x.layers for x in groups][-1] == list(range(0, 30, 3))
    assert [x.capped for x in groups] == [True] * GROUPS + [False]
    assert sorted(n for x in groups for n in x.layers) == list(range(30))
    assert {len(x.layers) for x in groups[:-1]} <= {2, 3}
    assert groups[-1].held == [10, 20, 20, 10, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy"), [("gemma2", "keydiff"), ("llama", "adakv")])
def test_windows_of_the_models_own_and_heads_that_hold_unequally_many(family, policy):
    model = tiny_model(family)
    cache = BudgetCache(model.config, 32, 16, policy)
    BlockLoop(model, cache).prefill(torch.arange(100)[None] % 90)
    layers = cache.kept_tokens()
    assert [one.layer for one in layers] == list(range(model.config.num_hidden_layers))
    held = sum(s.held * s.heads for layer in cache.capped_layers for s in layer.segments)
    assert sum(len(head) for one in layers if one.capped for head in one.heads) == held
    for one in layers:
        rows = [sorted(head.tolist()) for head in one.heads]
        assert all(len(set(row)) == len(row) for row in rows)
        assert len(rows) == model.config.num_key_value_heads
        if not one.capped:
            assert all(row == list(range(100 - len(row), 100)) for row in rows)
            assert len(rows[0]) == model.config.sliding_window - 1
    assert any(not one.capped for one in layers) == (family == "gemma2")


def test_a_run_of_unknown_tokens_costs_no_decoder_for_each(monkeypatch):
    made = []

    def detokenizer(*given: Any, **options: Any) -> Detokenizer:
        made.append(given)
        return Detokenizer(*given, **options)

    monkeypatch.setattr("kvcap.serve.strip.Detokenizer", detokenizer)
    known = gemma_like()
    (a,) = known.encode("a").ids
    assert pieces(Wrapped(known), [*[-1] * 99, a, -1, -1]) == [*[None] * 99, "a", None, None]
    assert len(made) == 1
