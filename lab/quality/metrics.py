"""Scores a reply against the answers that a sample accepts, in [0, 1]; higher is better.

`METRICS` has the metrics by name. Their values equal those of the benchmarks' own scripts, so that
figures can be compared with published ones. If a script's result depends on an optional package,
the docstring says which result is meant. Packages that only some metrics need are imported when one
of these is loaded.

LongBench: Bai et al., 2024, https://arxiv.org/abs/2308.14508, https://github.com/THUDM/LongBench.
LongBench v2: Bai et al., 2025, https://arxiv.org/abs/2412.15204.
RULER: Hsieh et al., 2024, https://arxiv.org/abs/2404.06654, https://github.com/NVIDIA/RULER.
SQuAD: Rajpurkar et al., 2016, https://arxiv.org/abs/1606.05250.
MATH: Hendrycks et al., 2021, https://arxiv.org/abs/2103.03874, https://github.com/hendrycks/math.
"""

from __future__ import annotations

import difflib
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import fmean

from kvcap.runtime.errors import ExtraMissing, how_to_install

Answers = Sequence[str]
Metric = Callable[[str, Answers, Sequence[str]], float]
"""Stands for a function `metric(reply, answers, classes)` that scores a reply.

`answers` has the accepted answers, at least one. `classes` has all labels of a classification, and
is ignored by other metrics.
"""
Pair = Callable[[str, str], float]

NUMBER = re.compile(r"\d+")
# Chinese punctuation that LongBench removes, besides ASCII's: the list of the package zhon.
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗"
    "〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def contains(reply: str, answers: Answers, classes: Sequence[str] = ()) -> float:
    """Return 1 if the reply has any of the answers, in any case (RULER's `string_match_part`)."""
    return float(any(answer.lower() in reply.lower() for answer in answers))


def contains_all(reply: str, answers: Answers, classes: Sequence[str] = ()) -> float:
    """Return the share of the answers that the reply has (RULER's `string_match_all`)."""
    return fmean(float(answer.lower() in reply.lower()) for answer in answers)


def exact_match(reply: str, answer: str) -> float:
    """Return 1 if both are equal but for case, punctuation and articles (SQuAD)."""
    return float(normalized(reply) == normalized(answer))


def f1(reply: str, answer: str) -> float:
    """Return F1 of the common words of normalised texts (SQuAD; LongBench's `qa_f1_score`)."""
    return _f1(normalized(reply).split(), normalized(answer).split())


def f1_zh(reply: str, answer: str) -> float:
    """Return F1 of the common words of Chinese texts (LongBench's `qa_f1_zh_score`)."""
    return _f1(_chinese_words(reply), _chinese_words(answer))


def rouge_l(reply: str, answer: str) -> float:
    """Return ROUGE-L's F1 as LongBench does, by `rouge-score`'s longest common subsequences.

    LongBench uses the package `rouge`, whose ROUGE-L is of the whole summary: texts are cut into
    sentences at every full stop, and the words of the longest common subsequences of all pairs of
    sentences are joined. Every word counts once: recall is over the distinct words of the answer,
    precision over those of the reply. Case and punctuation count. `rouge-score`'s own `rougeLsum`
    lowers case, drops characters other than `a-z0-9`, cuts at line ends and counts repetitions, so
    its values differ, and are 0 for Chinese text. Among several longest subsequences, the one that
    `rouge` chooses counts. LongBench counts texts on which `rouge` reaches Python's recursion limit
    as 0; here they get their score.

    Lin, 2004, https://aclanthology.org/W04-1013.
    """
    from rouge_score.rouge_scorer import lcs_ind

    got, expected = _sentences(reply), _sentences(answer)
    common = {
        words[index]
        for reference in expected
        for words in got
        for index in lcs_ind(words, reference)
    }
    if not common:
        return 0.0
    precision = len(common) / len({word for words in got for word in words})
    recall = len(common) / len({word for words in expected for word in words})
    return 2 * (precision * recall / (precision + recall + 1e-8))  # with the epsilon of `rouge`


def rouge_l_zh(reply: str, answer: str) -> float:
    """Return ROUGE-L of Chinese texts, cut into words by jieba (LongBench's `rouge_zh_score`)."""
    return rouge_l(" ".join(_cut(reply)), " ".join(_cut(answer)))


def code_similarity(reply: str, answer: str) -> float:
    """Return the edit similarity of the reply's first line of code (LongBench's `code_sim_score`).

    It is `2 * common / (length of both)`, rounded to hundredths, where `common` is the length of
    the longest common subsequence of characters. LongBench calls fuzzywuzzy's `ratio`; this is its
    result with python-Levenshtein installed, as LongBench requires. Without that package fuzzywuzzy
    uses difflib's matching blocks, whose values are equal or lower.
    """
    from rapidfuzz.fuzz import ratio

    lines = reply.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(m in line for m in ("`", "#", "//"))), "")
    return round(float(ratio(code, answer))) / 100


def classification(reply: str, answers: Answers, classes: Sequence[str] = ()) -> float:
    """Return 1 / n if the reply names n of the classes, with the right one (LongBench), else 0.

    A class whose name is part of the right one's does not count. The official script removes such
    classes from the list that it iterates over, and so skips the name after each; so does this.
    """
    return max(_classification(reply, answer, classes) for answer in answers)


def _classification(reply: str, answer: str, classes: Sequence[str]) -> float:
    named, index = [name for name in classes if name in reply], 0
    while index < len(named):
        if named[index] in answer and named[index] != answer:
            named.remove(named[index])
        index += 1
    return 1 / len(named) if answer in named else 0.0


def count(reply: str, answer: str) -> float:
    """Return the share of the reply's numbers that equal the answer (LongBench's `count_score`)."""
    numbers = NUMBER.findall(reply)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(reply: str, answer: str) -> float:
    """Score by `count` the number of an answer 'Paragraph 7' (LongBench's `retrieval_score`)."""
    return count(reply, _paragraph(answer, r"Paragraph (\d+)"))


def retrieval_zh(reply: str, answer: str) -> float:
    """Score by `count` the number of an answer '段落7' (LongBench's `retrieval_zh_score`)."""
    return count(reply, _paragraph(answer, r"段落(\d+)"))


def accuracy(reply: str, answer: str) -> float:
    """Return 1 if 'The correct answer is (B)' has the answer's letter (LongBench v2)."""
    plain = reply.replace("*", "")
    match = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(
        r"The correct answer is ([A-D])", plain
    )
    return float(match is not None and match[1] == answer)


def math(reply: str, answer: str) -> float:
    r"""Return 1 if the reply's last `\boxed{}` is the answer, normalised (MATH's `is_equiv`)."""
    got = last_boxed(reply)
    if got is None:
        return 0.0
    expected = last_boxed(answer) or answer
    try:
        return float(_plain_math(got) == _plain_math(expected))
    except (ValueError, IndexError):  # the formula is cut off, such as at '\sqrt'
        return float(got == expected)


def last_boxed(text: str) -> str | None:
    r"""Return the content of a text's last `\boxed{}`; None if none is closed.

    >>> last_boxed(r"So \boxed{1}, no, \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, command, rest = text.rpartition("\\boxed")
    if not command or not rest.startswith("{"):
        return None
    depth = 0
    for index, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:index]
    return None


def normalized(text: str) -> str:
    """Return a text without case, ASCII punctuation, English articles and repeated spaces (SQuAD).

    >>> normalized("The  Answer: an owl!")
    'answer owl'
    """
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def _f1(got: list[str], expected: list[str]) -> float:
    common = sum((Counter(got) & Counter(expected)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(got), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def _sentences(text: str) -> list[list[str]]:
    """Return the words of every sentence as `rouge` does; an empty sentence has one empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _cut(text: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jieba uses syntax that newer Pythons warn of
        import jieba

        jieba.setLogLevel("WARNING")  # without its messages on loading the dictionary
        words: list[str] = jieba.lcut(text)
    return words


def _chinese_words(text: str) -> list[str]:
    """Return the words of a Chinese text without case, punctuation and spaces (LongBench)."""
    drop = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)
    words = ("".join(word.lower().translate(drop).split()) for word in _cut(text))
    return [word for word in words if word]


def _paragraph(answer: str, pattern: str) -> str:
    match = re.search(pattern, answer)
    if match is None:
        raise ValueError(f"the answer {answer!r} names no paragraph; write it as {pattern!r} says")
    return match[1]


def _plain_math(text: str) -> str:
    r"""Return a formula in a normal form, by the rules of MATH's `_strip_string` in their order.

    Raises:
        ValueError, IndexError: there are two units, or a root or fraction is cut off.
    """
    for old, new in (
        ("\n", ""),
        (r"\!", ""),
        (r"\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        (r"\left", ""),
        (r"\right", ""),
        (r"^{\circ}", ""),
        (r"^\circ", ""),
        (r"\$", ""),
    ):
        text = text.replace(old, new)
    if r"\text{ " in text:  # the beginning of a unit
        text, _ = text.split(r"\text{ ")
    for old, new in ((r"\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(old, new)
    if text.startswith("."):
        text = f"0{text}"
    name, is_equal, value = text.partition("=")
    if is_equal and "=" not in value and len(name) <= 2:  # such as 'x = 3'
        text = value
    text = _with_braces(text, r"\sqrt", 1).replace(" ", "")
    text = _with_braces(text, r"\frac", 2)
    if text == "0.5":
        text = r"\frac{1}{2}"
    whole = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return rf"\frac{{{whole[1]}}}{{{whole[2]}}}" if whole else text


def _with_braces(text: str, command: str, arguments: int) -> str:
    r"""Return a formula with braces around a command's arguments, such as in `\sqrt3`, `\frac12`.

    Raises:
        IndexError: nothing follows the command.
    """
    head, *parts = text.split(command)
    written = [head]
    for part in parts:
        if part[0] == "{":
            written.append(part)
        elif len(part) < arguments:
            return text
        elif arguments == 2 and part[1] != "{":
            written.append(f"{{{part[0]}}}{{{part[1]}}}{part[2:]}")
        else:
            written.append(f"{{{part[0]}}}{part[1:]}")
    return command.join(written)


def _best(pair: Pair) -> Metric:
    """Return a metric that takes the best score over all answers, as the scripts do."""

    def metric(reply: str, answers: Answers, classes: Sequence[str] = ()) -> float:
        return max(pair(reply, answer) for answer in answers)

    return metric


METRICS: dict[str, Metric] = {
    "contains": contains,
    "contains_all": contains_all,
    "exact_match": _best(exact_match),
    "f1": _best(f1),
    "f1_zh": _best(f1_zh),
    "rouge_l": _best(rouge_l),
    "rouge_l_zh": _best(rouge_l_zh),
    "code_similarity": _best(code_similarity),
    "classification": classification,
    "count": _best(count),
    "retrieval": _best(retrieval),
    "retrieval_zh": _best(retrieval_zh),
    "accuracy": _best(accuracy),
    "math": _best(math),
}
# Units (`scores.UNITS`) of metrics whose scores are not just right or wrong.
PARTIAL = {
    "contains_all": "score", "classification": "score", "count": "score", "retrieval": "score",
    "retrieval_zh": "score", "f1": "f1", "f1_zh": "f1", "rouge_l": "rouge_l",
    "rouge_l_zh": "rouge_l", "code_similarity": "similarity",
}  # fmt: skip
NEEDS = {  # packages that a metric imports
    "f1_zh": ("jieba",),
    "rouge_l": ("rouge_score",),
    "rouge_l_zh": ("rouge_score", "jieba"),
    "code_similarity": ("rapidfuzz",),
}
EXTRAS = {"rouge_score": "quality", "rapidfuzz": "quality", "jieba": "quality-zh"}


def load_metric(name: str) -> Metric:
    """Return the metric of that name.

    Raises:
        ValueError: there is no such metric; the message names the nearest one.
        ExtraMissing: a package that it needs is not installed.
    """
    if name not in METRICS:
        close = difflib.get_close_matches(name, METRICS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(METRICS)}"
        raise ValueError(f"no metric is called {name!r}; {hint}")
    for package in NEEDS.get(name, ()):
        if find_spec(package) is None:
            raise ExtraMissing(
                f"the metric {name} needs {package}; {how_to_install(EXTRAS[package])}"
            )
    return METRICS[name]
