"""Times recall of evicted text: indexing a history, searching it, and a turn with recall.

`index_us` is the time per token of the history, `search_ms` that of a question of a few words. A
turn reads a message of `message` tokens and a question in a conversation that has read the history,
and writes one token, alternately without and with recall. `turn` is the time with recall divided by
that without, the median of the pairs; `turn_least` and `turn_most` are the least and the largest.
The history is the corpus, which has few different words; other texts are searched faster. Reads
`lengths`, `repeats`, `model`, `budgets` (the first).
"""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import median
from typing import Any

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles, seconds
from kvcap.pocket.prose import filler
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.recall.recall import Recall
from kvcap.runtime.session.session import Session

DEFAULTS = {"lengths": (2048, 100_000), "model": "pocket", "budgets": (512,)}
COLUMNS = (
    "tokens", "index_us", "index_bytes", "search_ms", "message", "recalled", "turn", "turn_least",
    "turn_most",
)  # fmt: skip
MESSAGE = 2000  # tokens of a turn's message
QUESTION = "In which year did Emma Owens show that a glacier affects the life of many plants?"


def run(options: BenchmarkOptions) -> Result:
    """Return a row per length of the history."""
    budget = options.budgets[0]
    runtime = Runtime.from_pretrained(options.model, "streaming_llm", budget_tokens=budget)
    rows = [_row(runtime, length, options.repeats) for length in options.lengths]
    return Result("recall", COLUMNS, rows, {"model": options.model, "budget": budget})


def _row(runtime: Runtime, length: int, repeats: int) -> dict[str, Any]:
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=1)
    history = _text(session, length)
    ids = session.encode(history)[:length]
    recall = Recall(runtime.tokenizer, session.encode, runtime.plan.budget_tokens)
    indexing = seconds(lambda: recall.index(ids))
    searches = [1000 * seconds(lambda: recall.find(QUESTION, ids)) for _ in range(10 * repeats)]
    "".join(session.send(history))
    message = f"{_text(session, MESSAGE)}\n\n{QUESTION}"
    usual, pairs, recalled = session.recall.limit, list[float](), 0
    for _ in range(repeats):
        took = []
        for limit in (0, usual):
            session.recall.limit = limit
            took.append(seconds(lambda: "".join(session.send(message))))
        assert session.turn is not None
        recalled = session.turn.recalled_tokens
        pairs.append(took[1] / took[0])
    return {
        "tokens": len(ids),
        "index_us": round(1e6 * indexing / len(ids), 2),
        "index_bytes": recall.store.nbytes,
        "search_ms": percentiles(searches),
        "message": MESSAGE,
        "recalled": recalled,
        "turn": median(pairs),
        "turn_least": min(pairs),
        "turn_most": max(pairs),
    }


def _text(session: Session, tokens: int) -> str:
    """Return sentences of the corpus, with at least `tokens` tokens or a few more."""
    sentences = filler(Random(f"recall/{tokens}"))
    some = " ".join(islice(sentences, 100))
    each = len(session.encode(some)) / 100
    return " ".join([some, *islice(sentences, max(0, int(tokens / each) - 95))])
