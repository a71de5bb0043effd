"""Long texts are made into tokens in pieces, and into the very tokens of the whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import LETTERS, MADE
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers import pre_tokenizers as splits
from tokenizers.processors import TemplateProcessing
from tools import ROOT

from kvcap.pocket.prose import filler
from kvcap.runtime.models.files import load_tokenizer
from kvcap.runtime.models.names import resolve
from kvcap.runtime.session import encoding
from kvcap.runtime.session.encoding import cuts, encode, encode_behind

# As in Llama 3 and, but for its digits, in Qwen.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(model: Any, split: Any = None, normalizer: Any = None, size: int = 600) -> Tokenizer:
    """Knows English, tokens that begin and end a text, and a token of three words."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.normalizer = split, normalizer
    bytes_ = splits.ByteLevel.alphabet()
    kinds = {"BPE": trainers.BpeTrainer, "WordLevel": trainers.WordLevelTrainer}
    more = {"initial_alphabet": bytes_} if isinstance(model, models.BPE) else {}
    trainer = kinds[type(model).__name__](
        vocab_size=size, special_tokens=["<s>", "<unk>"], show_progress=False, **more
    )
    sentences = filler(random.Random(0))
    tokenizer.train_from_iterator([next(sentences) for _ in range(400)], trainer)
    tokenizer.add_tokens([AddedToken("not one word")])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <unk>", special_tokens=[("<s>", 0), ("<unk>", 1)]
    )
    return tokenizer


def llama3() -> Tokenizer:
    words = splits.Split(Regex(WORDS), "isolated")
    return trained(models.BPE(), splits.Sequence([words, splits.ByteLevel(False, use_regex=False)]))


def gpt2() -> Tokenizer:
    return trained(models.BPE(), splits.ByteLevel(True), normalizers.NFC())


def metaspace() -> Tokenizer:
    return trained(models.BPE(unk_token="<unk>"), splits.Metaspace())


def gemma() -> Tokenizer:
    """Its words are not told apart, and tokens of several words are learned, too."""
    blank = normalizers.Replace(" ", "▁")
    return trained(models.BPE(unk_token="<unk>"), splits.Split(" ", "merged_with_previous"), blank)


def llama2() -> Tokenizer:
    blank = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(models.BPE(unk_token="<unk>"), None, blank)


def words() -> Tokenizer:
    return trained(models.WordLevel(unk_token="<unk>"), splits.WhitespaceSplit())


SPLIT, WHOLE = [llama3, gpt2, metaspace, words], [gemma, llama2]


def text_of(seed: int, length: int) -> str:
    """English with all else that people paste between, in any order."""
    draw, parts = random.Random(seed), list[str]()
    sentences = filler(random.Random(seed))
    others = [
        "  ",
        "\n",
        "\n\n",
        " \n ",
        "\t",
        " a",
        "I'll we've",
        "1234567",
        " 3.14",
        "…",
        "näch ste",
        "e\u0301 e",
        "Привет, мир",
        "你好 世界",
        "日本語",
        "🙂🙃",
        "<s>",
        "def f(x):\n    return x",
        "not one word",
        "is not one word or two",
        "don't",
        "\u00a0x",
        "नमस्ते दुनिया",
        "'s",
    ]
    while sum(map(len, parts)) < length:
        parts.append(next(sentences) if draw.random() < 0.4 else draw.choice(others))
        parts.append(draw.choice(["", " ", " ", "\n"]))
    return "".join(parts)


@pytest.mark.parametrize("make", SPLIT + WHOLE)
def test_the_tokens_of_pieces_are_those_of_the_text(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "PIECE", 150)
    tokenizer, count = make(), 0
    for seed in range(12):
        text = text_of(seed, 150 * seed)
        for special in (False, True):
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            assert encode(tokenizer, text, special=special) == expected
        count += len(cuts(tokenizer, text))
    assert count > 40 if make in SPLIT else count == 0


def test_a_text_is_cut_between_words_where_its_tokenizer_cuts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "PIECE", 100)
    tokenizer, word = llama3(), "these "
    assert [round(x / 100) for x in cuts(tokenizer, word * 100)] == [1, 2, 3, 4, 5]
    assert cuts(tokenizer, "these1" * 100) == []
    assert cuts(tokenizer, "not one word" * 100) == []  # one token, which holds spaces
    assert cuts(tokenizer, word * 20) == []  # too short


@pytest.mark.parametrize("special", [False, True])
def test_pocket_s_long_texts(special: bool) -> None:
    tokenizer = load_tokenizer(resolve("pocket"))
    text = (ROOT / "docs" / "benchmarks.md").read_text() * 4
    assert len(cuts(tokenizer.backend_tokenizer, text)) > 3
    expected = tokenizer(text, add_special_tokens=special)["input_ids"]
    assert encode(tokenizer.backend_tokenizer, text, special=special) == expected


@pytest.mark.parametrize("kind", MADE)
@given(data=st.data())
def test_a_text_behind_another_begins_with_no_space_of_the_tokenizers(kind, data):
    """Some put one before any text; of the others, nothing changes."""
    known = MADE[kind]()
    letters = "abc." if kind in ("word-pieces", "ends-of-words") else LETTERS + "  \n\n☃"
    before, text = (data.draw(st.text(letters, min_size=1)) for _ in range(2))
    tokens = encode_behind(known, text)
    if kind in ("llama", "metaspace"):
        assert (
            known.decode([*encode(known, before), *tokens])
            == before.removeprefix(" " * (kind == "metaspace")) + text
        )
    else:
        assert tokens == encode(known, text)


def test_a_long_text_behind_another():
    known = MADE["llama"]()
    text = "ab " * 20_000
    assert encode_behind(known, text) == encode(known, "x" + text)[2:]
    assert encode_behind(known, "</s> a") == encode(known, "</s> a")
