"""pocket-plain and pocket-text, the built-in models that were trained without eviction."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvcap import cli, pocket
from kvcap.lab.pocket import evaluate, rows, running_text, vocabulary
from kvcap.runtime.types import BUILT_IN, POCKET

NAMES = [name for name in BUILT_IN if name != POCKET]
# Of a novel that pocket-text was not trained on.
AUSTEN = """It is a truth universally acknowledged, that a single man in possession of a good
fortune, must be in want of a wife. However little known the feelings or views of such a man may be
on his first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding
families, that he is considered the rightful property of some one or other of their daughters."""


def loaded(name: str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(pocket.path(name), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(pocket.path(name))


def loss(model: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(ids[None], labels=ids[None]).loss)


@pytest.mark.parametrize("name", NAMES)
def test_its_card_says_what_it_is(name):
    model, _ = loaded(name)
    config, millions = model.config, model.num_parameters() / 1e6
    card = (pocket.path(name) / "README.md").read_text()
    assert type(model) is LlamaForCausalLM
    assert card.startswith(f"# {name}\n")
    assert f"| {millions:.1f} million parameters, bfloat16," in card
    assert f"{config.num_hidden_layers} layers, width {config.hidden_size}, " in card
    assert f"| Trained length | {config.max_position_embeddings:,} tokens |" in card
    assert f"{config.vocab_size:,} entries" in card


def test_they_are_small_together():
    sizes = [(pocket.path(name) / "model.safetensors").stat().st_size for name in NAMES]
    assert sum(sizes) <= 20_000_000


def test_pocket_plain_recalls_what_it_is_told():
    model, tokenizer = loaded("pocket-plain")
    talk, scored = evaluate.stated(Random(0), 512)
    text = "".join(vocabulary.render(talk))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    with torch.no_grad():
        best = model(ids[None]).logits[0].argmax(-1)
    answer = "".join(tokenizer.decode(best[:-1]))
    assert all(talk[index]["content"].split(" is ")[-1] in answer for index in scored)


def test_pocket_text_predicts_a_novel_it_has_not_read():
    model, tokenizer = loaded("pocket-text")
    ids = tokenizer(AUSTEN.replace("\n", " "), return_tensors="pt").input_ids[0]
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    assert loss(model, ids) < 4.0 < 1.5 * loss(model, ids) < loss(model, shuffled)
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("name", NAMES)
def test_commands_know_it_by_its_name(name, capsys):
    given = ["generate", name, "--raw", "It was", "--max-new-tokens", "3", "--budget-tokens"]
    assert cli.run([*given, "64"]) == 0
    assert capsys.readouterr().out.strip()


# --- running text --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return Tokenizer.from_file(str(pocket.path("pocket-text") / "tokenizer.json"))


def test_a_folder_is_read_by_name(tmp_path):
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.png").write_bytes(b"\xff")
    assert running_text.read(tmp_path) == ["first", "second"]


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no file that ends in \.md or \.txt"):
        running_text.read(tmp_path)


def test_texts_follow_each_other(raw):
    ids = running_text.encode(raw, ["It is", "a truth"]).tolist()
    begin = raw.token_to_id(vocabulary.BOS)
    assert ids == [begin, *raw.encode("It is").ids, begin, *raw.encode("a truth").ids]


def test_rows_are_pieces_of_the_text():
    ids = np.arange(100, dtype=np.uint16)
    stages = [rows.Stage(64, (8, 16), (0.5, 0.5)), rows.Stage(32, (100,), (1.0,))]
    batches = list(running_text.Windows(ids, stages, 32, seed=0))
    assert len(batches) == 3
    assert all(batch.numel() == 32 for batch, _ in batches[:2])
    for batch, marks in batches:
        assert batch.diff(dim=1).eq(1).all()
        assert not marks.any()
        assert marks.shape == batch.shape
    again = list(running_text.Windows(ids, stages, 32, seed=0))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, again, strict=True))


def test_a_text_shorter_than_a_row_is_refused():
    with pytest.raises(ValueError, match="the text has 10 tokens, and rows have 16"):
        running_text.Windows(
            np.arange(10, dtype=np.uint16), [rows.Stage(16, (16,), (1.0,))], 16, seed=0
        )
