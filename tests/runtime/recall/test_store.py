"""The index of passages: words of every script, operators of FTS5, a bound in bytes."""

from __future__ import annotations

import random

import pytest
from make import SENTENCES

from kvcap.runtime.recall.settings import PAGE
from kvcap.runtime.recall.store import PassageStore


def filled(*texts, limit=1 << 20):
    store = PassageStore(limit)
    for index, text in enumerate([*SENTENCES, *texts]):
        store.add((100 * index, 100 * index + 90), text)
    return store


def spans(store, words):
    return [one.span[0] // 100 for one in store.search(words)]


def test_the_passage_with_the_rarest_words_comes_first():
    store = filled("The key of the harbour was lost.")
    assert spans(store, "Where is the stone of the harbour master?")[0] == 0
    assert spans(store, "markets") == spans(store, "MARKET") == [1]  # one stem
    scores = [one.score for one in store.search("the harbour key stone")]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0
    assert len(store.search("the harbour market", count=2)) == 2
    assert not store.search("the")


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("我的狗叫小白，它住在花园里。", "小白是谁？"),
        ("パスワードは桜三月です。", "桜三月とは何ですか"),
        ("비밀번호는 무지개입니다.", "무지개가 뭐예요?"),
        ("รหัสลับคือดอกไม้สีแดง", "ดอกไม้สีอะไร"),
        ("गुप्त शब्द कमल है।", "कमल क्या है?"),
        ("Das Paßwort lautet Größenänderung.", "GRÖSSENÄNDERUNG größenänderung"),
        ("Пароль: берёза.", "берёза?"),
    ],
)
def test_words_of_every_script_are_found(text, question):
    assert spans(filled(text), question)[:1] == [len(SENTENCES)]


@pytest.mark.parametrize(
    "words",
    [
        '"', "'", '"unclosed', "NEAR(", "stone NOT key", "AND", "OR OR", "words:stone", "start:0",
        "^stone", "sto*", "{stone}", "-stone", "stone + key", "(", ")", "\\", "%_", "\x00",
        "; DROP TABLE passages; --",
        "a" * 100_000, "stone " * 10_000, "",  " ", "!?", "😀", "_",
    ],
)  # fmt: skip
def test_operators_and_quotes_are_words_like_others(words):
    store = filled()
    store.search(words)
    store.add((900, 990), words)
    assert spans(store, "harbour stone")[:1] in ([0], [9])
    assert 0 in spans(store, "harbour")


def test_its_bytes_stay_within_the_limit_and_the_oldest_are_dropped():
    rng = random.Random(0)
    limit = 512 << 10
    store = PassageStore(limit)
    for number in range(4000):
        words = " ".join(f"word{rng.randrange(5000)}" for _ in range(70))
        store.add((number * 48, number * 48 + 96), f"{words} unique{number}")
        assert store.nbytes <= limit
    assert 0 < store.dropped < 4000
    assert not store.search("unique0")
    assert [one.span[0] for one in store.search("unique3999")] == [3999 * 48]
    kept = sum(bool(store.search(f"unique{number}")) for number in range(4000))
    assert kept == 4000 - store.dropped


def test_clearing_gives_its_memory_back():
    store = filled()
    assert store.nbytes >= PAGE
    store.clear()
    assert (store.nbytes, store.search("stone"), store.dropped) == (0, [], 0)
    store.add((0, 90), SENTENCES[0])
    store.add((90, 180), SENTENCES[1])
    assert len(store.search("harbour stone")) == 1
