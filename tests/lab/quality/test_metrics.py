"""Metrics on fixtures worked out by hand from the official scripts' formulas.

LongBench's, SQuAD's, RULER's and MATH's own scripts gave the same values on these rows.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from kvcap.evals.quality.scores import UNITS
from kvcap.lab.quality import metrics
from kvcap.lab.quality.metrics import METRICS, last_boxed, load_metric
from kvcap.runtime.errors import ExtraMissing

CLASSES = ["Food", "Food and drink", "Date", "City"]
ROUGE = 1e-8  # what `rouge` adds to the sum of precision and recall, in LongBench's F1


def f_of(precision: float, recall: float, extra: float = 0.0) -> float:
    return 2 * (precision * recall / (precision + recall + extra))


@pytest.mark.parametrize(
    ("name", "reply", "answers", "score"),
    [
        ("contains", "It was PARIS.", ["London", "paris"], 1),
        ("contains", "It was Rome.", ["London", "Paris"], 0),
        ("contains_all", "12 and 34", ["12", "34", "56", "7"], 0.5),
        ("exact_match", "The  answer: an Owl!", ["owl", "answer owl"], 1),
        ("exact_match", "an owl or two", ["owl"], 0),
        # said: big dog ran; expected: dog ran home fast
        ("f1", "The big dog, ran.", ["A dog ran home fast", "cat"], f_of(2 / 3, 2 / 4)),
        ("f1", "dog dog dog", ["dog dog"], f_of(2 / 3, 1)),  # a word counts as often as in both
        ("f1", "", ["dog"], 0),
        ("f1", "the", ["a"], 0),  # nothing is left of either
        ("count", "There are 12, no, 7 of 7.", ["7"], 2 / 3),
        ("count", "seven", ["7"], 0),
        ("count", "17", ["7"], 0),
        ("retrieval", "Paragraph 3, not 4", ["Paragraph 3"], 1 / 2),
        ("retrieval_zh", "段落12", ["段落12"], 1),
        ("accuracy", "**The correct answer is (B)**", ["B"], 1),
        ("accuracy", "The correct answer is B", ["B"], 1),
        ("accuracy", "The correct answer is (C), not (B)", ["B"], 0),
        ("accuracy", "B", ["B"], 0),
    ],
)  # fmt: skip
def test_text_metrics(name, reply, answers, score):
    assert load_metric(name)(reply, answers, ()) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("It is Food.", "Food", 1),
        ("Food or Date", "Food", 1 / 2),
        ("Food and drink", "Food and drink", 1),  # Food is part of it, and not counted
        ("Food and drink", "Food", 1 / 2),
        ("nothing of these", "Food", 0),
        ("Date", "Food", 0),
    ],
)
def test_classification_shares_among_the_named_classes(reply, answer, score):
    assert load_metric("classification")(reply, [answer], CLASSES) == score


def test_classification_spares_the_class_after_a_removed_one_as_the_official_script_does():
    classes = ["sat", "cat", "sat cat"]  # 'cat' follows the removed 'sat', and stays
    assert load_metric("classification")("sat cat", ["sat cat"], classes) == 1 / 2


@pytest.mark.parametrize(
    ("reply", "answer", "precision", "recall"),
    [
        # two longest subsequences of the same length: the one of `rouge` is B D or A C
        ("A B C D", "B D A C", 2 / 4, 2 / 4),
        # sentences: {the cat sat} of the first and the first, {the} of the first and the second
        ("the cat sat. a dog ran.", "the cat sat on. the mat", 3 / 6, 3 / 5),
        ("one two three. four five", "two one. five four three", 3 / 5, 3 / 5),
        ("a b a b", "a b", 1, 1),  # every word counts once
        ("x. .", "x. .", 1, 1),  # a sentence of spaces is a word without letters
    ],
)
def test_rouge_l_is_that_of_longbench(reply, answer, precision, recall):
    pytest.importorskip("rouge_score")
    score = load_metric("rouge_l")(reply, [answer], ())
    assert score == pytest.approx(f_of(precision, recall, ROUGE), abs=1e-12)


@pytest.mark.parametrize("reply", ["", ".", "...", "The Report"])
def test_rouge_l_of_nothing_in_common_is_0(reply):
    pytest.importorskip("rouge_score")
    assert load_metric("rouge_l")(reply, ["the report"], ()) == 0


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("```python\n# a\n    return self.x\n", "    return self.y", 0.94),  # 16 of 17 letters
        ("\n\nreturn a // b\nreturn b", "return b", 1),  # the first line without a remark
        ("kitten", "sitting", 0.62),  # 'ittn': 2 · 4 / 13
        ("# only", "x", 0),
        ("", "x", 0),
    ],
)
def test_code_similarity(reply, answer, score):
    pytest.importorskip("rapidfuzz")
    assert load_metric("code_similarity")(reply, [answer], ()) == score


def test_chinese_words_are_compared_without_punctuation(monkeypatch):
    cut = {
        "北京是首都。上海": ["北京", "是", "首都", "。", "上海"],
        "首都是北京": ["首都", "是", "北京"],
    }
    jieba = SimpleNamespace(lcut=cut.__getitem__, setLogLevel=lambda level: None)
    monkeypatch.setitem(sys.modules, "jieba", jieba)
    reply, expected = cut
    assert metrics.f1_zh(reply, expected) == pytest.approx(f_of(3 / 4, 1))
    if find_spec("rouge_score"):
        assert metrics.rouge_l_zh(reply, expected) == pytest.approx(f_of(1 / 5, 1 / 3), abs=1e-7)


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        (r"so \boxed{\dfrac12}", r"\frac{1}{2}", 1),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{ .5}", r"\frac{1}{2}", 1),
        (r"\boxed{x = 3\sqrt2}", r"3 \sqrt{2}", 1),
        (r"\boxed{12\text{ cm}}", "12", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1),
        (r"\boxed{1,\!000}", "1,000", 1),
        (r"\boxed{\frac{a}{b}}", r"\boxed{\frac ab}", 1),
        (r"\boxed{1} or \boxed{2}", "1", 0),  # the last one counts
        (r"\boxed{1} or \boxed{2", "1", 0),
        (r"\boxed{\sqrt}", r"\sqrt", 1),  # cut off: compared as it stands
        (r"\boxed{2.0}", "2", 0),
        ("the answer is 2", "2", 0),
    ],
)
def test_math_compares_the_last_boxed_answer(reply, answer, score):
    assert load_metric("math")(reply, [answer], ()) == score


def test_braces_of_a_boxed_answer_are_counted():
    assert last_boxed(r"\boxed{\frac{1}{x^{2}}} \text{done}") == r"\frac{1}{x^{2}}"
    assert last_boxed(r"\boxed") is None


def test_every_metric_has_a_unit():
    assert set(metrics.PARTIAL) < set(METRICS)
    assert set(metrics.PARTIAL.values()) < set(UNITS)
    assert set(metrics.NEEDS) < set(METRICS)


def test_unknown_metrics_and_missing_packages_are_named(monkeypatch):
    with pytest.raises(ValueError, match="no metric is called 'rogue_l'; did you mean 'rouge_l'"):
        load_metric("rogue_l")
    with pytest.raises(ValueError, match="known: contains, contains_all, exact_match"):
        load_metric("?")
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match=r"needs rapidfuzz; run.*'\.\[quality\]'"):
        load_metric("code_similarity")
    with pytest.raises(ExtraMissing, match=r"needs jieba; run.*'\.\[quality-zh\]'"):
        load_metric("f1_zh")


def test_an_answer_that_names_no_paragraph_is_refused():
    with pytest.raises(ValueError, match="'page 3' names no paragraph"):
        METRICS["retrieval"]("3", ["page 3"], ())
