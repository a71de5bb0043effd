"""Times tokenizing a text, beside the tokenizer's own call, which uses one core.

Both get the same text in alternation; `same` says whether their tokens are equal. `ratio` is the
tokenizer's time divided by kvcap's, the median over rounds; `ratio_least` and `ratio_most` are the
least and the largest. The gain depends on the tokenizer and on the cores. Reads `lengths`,
`repeats` (times ten rounds), `model`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from statistics import median
from typing import Any

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles, seconds
from kvcap.pocket.prose import filler
from kvcap.runtime.cores import usable_cores
from kvcap.runtime.models.files import load_tokenizer
from kvcap.runtime.models.names import resolve
from kvcap.runtime.session.encoding import encode

DEFAULTS = {"lengths": (1024, 8192, 32768, 131_072), "model": "pocket"}
COLUMNS = ("tokens", "letters", "same", "ms", "tokenizer_ms", "ratio", "ratio_least", "ratio_most")


def run(options: BenchmarkOptions) -> Result:
    """Return a row per length."""
    tokenizer = load_tokenizer(resolve(options.model))
    rows = [_row(tokenizer, length, 10 * options.repeats) for length in options.lengths]
    derived = {"model": options.model, "cores": len(usable_cores())}
    return Result("encoding", COLUMNS, rows, derived)


def _row(tokenizer: Any, length: int, rounds: int) -> dict[str, Any]:
    text = "".join(_text(tokenizer, length))

    def its() -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def ours() -> list[int]:
        return encode(tokenizer.backend_tokenizer, text)

    expected, got = its(), ours()
    times = [(1000 * seconds(ours), 1000 * seconds(its)) for _ in range(rounds)]
    ratios = [theirs / mine for mine, theirs in times]
    return {
        "tokens": len(expected),
        "letters": len(text),
        "same": got == expected,
        "ms": percentiles([mine for mine, _ in times]),
        "tokenizer_ms": percentiles([theirs for _, theirs in times]),
        "ratio": median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "turns": rounds,
    }


def _text(tokenizer: Any, length: int) -> Iterator[str]:
    """Yield sentences of the corpus, with about `length` tokens in all."""
    sentences, tokens = filler(Random("encoding")), 0
    while tokens < length:
        sentence = next(sentences) + " "
        tokens += len(tokenizer(sentence, add_special_tokens=False)["input_ids"])
        yield sentence
