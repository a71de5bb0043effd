"""Measures how weights and slots of fewer bits change pocket's predictions and recall.

Every type of weights reads the same texts token by token, without evictions, for perplexity and for
the difference of predictions from float32's. Then it answers questions about facts in texts longer
than the budget. Integers are run by ONNX Runtime, from the cache folder of `--weights`, or by
PyTorch, as the row's name says. Calibration uses a text that is not among those measured. Reads
`lengths`, `budgets`, `repeats`.
"""

from __future__ import annotations

import math
import tempfile
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.lab.quality.agreement import compare
from kvcap.lab.quality.tasks import load_task, make_samples
from kvcap.pocket.facts import facts
from kvcap.pocket.prose import filler
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cli.kept_exports import kept_export
from kvcap.runtime.cli.options import Budget
from kvcap.runtime.session.engine import Engine

DEFAULTS = {"lengths": (2048,), "budgets": (256,), "repeats": 20}
COLUMNS = ("n", "budget", "weights", "bytes", "perplexity", "kl", "same_token", "recall")
TASK = "niah_single"
TEXTS = 6
SENTENCES = 1600  # sentences of the text to calibrate on; a fact follows every eighth
CLEAR = 0.1  # least lead in probability of a clear first choice


class Kind(NamedTuple):
    """A type of weights."""

    name: str
    dtype: str | None = None  # PyTorch's type; None: the weights run in ONNX Runtime
    weights: str | None = None  # the value of `--weights`
    calibrated: bool = False
    kv_dtype: Literal["int8"] | None = None  # type of slots in ONNX Runtime; None: float


KINDS = (
    Kind("float32", dtype="float32"),
    Kind("bfloat16", dtype="bfloat16"),
    Kind("int8", weights="int8"),
    Kind("int8, int8 slots", weights="int8", kv_dtype="int8"),
    Kind("int4", weights="int4"),
    Kind("int4, calibrated", weights="int4", calibrated=True),
    Kind("int8, PyTorch", dtype="bfloat16", weights="int8"),
    Kind("int4, PyTorch", dtype="bfloat16", weights="int4"),
)


def run(options: BenchmarkOptions) -> Result:
    """Return perplexity and recall, and KL divergence (nats) and equal choices beside float32.

    Only first choices that lead by `CLEAR` are compared. `recall` is the share of right answers.
    """
    rows = list[dict[str, Any]]()
    for budget in options.budgets:
        truth: list[Tensor] = []
        for kind in KINDS:
            engine, nbytes = _engine(kind, budget)
            texts = _texts(engine, budget)
            logits = [_log_probabilities(engine, ids) for ids in texts]
            truth = truth or logits
            row = {"weights": kind.name, "bytes": nbytes, **_beside(logits, truth, texts)}
            for length in options.lengths:
                right = _right_answers(engine, length, options.repeats)
                recall = right / options.repeats
                rows.append({"n": length, "budget": budget, **row, "recall": recall})
    derived = {"model": "pocket", "task": TASK, "samples": options.repeats, "texts": TEXTS}
    return Result("weights", COLUMNS, rows, derived)


def _engine(kind: Kind, budget: int) -> tuple[Engine, int]:
    """Return an engine that runs these weights, and the bytes of the weights."""
    if kind.dtype is not None:
        engine = Runtime.from_pretrained(
            budget_tokens=budget, dtype=kind.dtype, device="cpu", weights=kind.weights
        )
        return engine, engine.plan.weights
    assert kind.weights is not None
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text.txt"
        text.write_text(_calibration(), encoding="utf-8")
        sizes = Budget(budget_tokens=budget, kv_dtype=kind.kv_dtype)
        folder = kept_export(
            "pocket",
            kind.weights,
            sizes,
            True,
            text if kind.calibrated else None,
        )
    made = OrtRuntime.from_directory(folder)
    return made, made.plan.weights


def _calibration() -> str:
    """Return a text with facts that is not among the measured texts."""
    rng, sentences = Random("weights/calibration"), list[str]()
    stated = iter(facts(rng, SENTENCES // 8))
    for i, sentence in enumerate(islice(filler(rng), SENTENCES), 1):
        sentences += [sentence] if i % 8 else [sentence, next(stated).statement]
    return " ".join(sentences)


def _texts(engine: Engine, budget: int) -> list[list[int]]:
    """Return token ids of texts that fit the budget."""
    texts = []
    for seed in range(TEXTS):
        text = " ".join(islice(filler(Random(f"weights/{seed}")), budget // 4))
        texts.append(engine.tokenizer(text)["input_ids"][:budget])
    return texts


def _log_probabilities(engine: Engine, ids: list[int]) -> Tensor:
    """Return the log probability of every token after each but the last, [T - 1, V]."""
    loop, rows = engine.loop(), []
    with torch.inference_mode():
        for token in ids[:-1]:
            logits = torch.as_tensor(loop.read(engine.token_ids([token])))
            rows.append(logits[0].float().log_softmax(-1))
    return torch.stack(rows)


def _beside(logits: list[Tensor], truth: list[Tensor], texts: list[list[int]]) -> dict[str, float]:
    """Return how well texts are predicted, and how far predictions are from float32's."""
    mine, theirs = torch.cat(logits), torch.cat(truth)
    after = torch.tensor([token for ids in texts for token in ids[1:]])
    first, second = theirs.exp().topk(2, -1).values.T
    clear = first - second >= CLEAR
    divergence, same = compare(mine, theirs)
    return {
        "perplexity": math.exp(-float(mine.gather(1, after[:, None]).mean())),
        "kl": float(divergence.mean()),
        "same_token": float(same[clear].float().mean()),
    }


def _right_answers(engine: Engine, length: int, count: int) -> int:
    """Return how many of `count` questions about a fact in a text are answered rightly."""
    task, right = load_task(TASK), 0.0
    for sample in make_samples(TASK, engine.tokenizer, length, count, seed=0):
        session = engine.session()
        session.set_generation(temperature=0.0, max_new_tokens=task.MAX_NEW_TOKENS)
        reply = "".join(session.send(sample.messages[0]["content"]))
        right += task.score(sample, reply)
    return round(right)
