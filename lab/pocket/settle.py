"""The last training run: answers from an evicted cache. ``python -m kvcap.lab.pocket.settle DIR``.

Each step learns from two batches: ordinary rows, as before, so that nothing is forgotten, and
conversations read block by block through a cache of few slots, graded on their last questions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer

from kvcap.lab.pocket import vocabulary
from kvcap.lab.pocket.corpus import facts
from kvcap.lab.pocket.evicted import read_evicted
from kvcap.lab.pocket.rows import Ids, encode, marked_row, row, weights
from kvcap.lab.pocket.survival import BLOCK
from kvcap.lab.pocket.tasks import chat_about, paste_about
from kvcap.lab.pocket.train import SETTLE, Trainer, begin, save, weighted_loss
from kvcap.lab.pocket.vocabulary import render

GRADED = 3 * BLOCK  # tokens at the end of a row: its questions and answers
SHAPES = (  # of quiz rows: tokens, and slots of the cache they are read with
    (1024, 128), (2048, 128), (2048, 256), (4096, 256), (4096, 512), (2048, 512), (4096, 1024),
)  # fmt: skip
SMALL = ((512, 128),)  # where a step has few tokens, as in tests


def quiz_row(tokenizer: Tokenizer, rng: Random, length: int) -> Ids:
    """Make a row that ends with the questions of a conversation, whatever stands before it."""
    make, share = rng.choice((chat_about, chat_about, paste_about)), 0.98
    while True:
        known = facts(rng, rng.randint(1, 16 if length >= 2048 else 6))
        ids = tokenizer.encode(render(make(rng, int(length * share), known))).ids
        if len(ids) <= length:
            break
        share *= 0.9
    while len(ids) < length:
        ids = encode(tokenizer, rng, 300) + ids
    return np.array(ids[-length:], dtype=np.int32)


Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


class TrainingSteps(IterableDataset[Step]):
    """A dataset that yields, for every step, ids, marks, quiz ids, and the slots for the quiz.

    A step has ``tokens`` ordinary tokens and twice as many of quizzes.
    """

    def __init__(self, tokenizer: str, tokens: int, seed: int) -> None:
        self.tokenizer, self.tokens, self.seed = tokenizer, tokens, seed

    def __iter__(self) -> Iterator[Step]:
        tokenizer = Tokenizer.from_file(self.tokenizer)
        worker = get_worker_info()
        i, step = (worker.id, worker.num_workers) if worker else (0, 1)
        small = self.tokens < 8192
        while True:
            rng = Random(f"settle/{self.seed}/{i}")
            size = 512 if small else rng.choice((1024, 4096, 8192))
            make = marked_row if i % 2 else plain_row
            pairs = [make(tokenizer, rng, size) for _ in range(self.tokens // size)]
            ids, marks = (torch.from_numpy(np.stack(x)) for x in zip(*pairs, strict=True))
            length, slots = rng.choice(SMALL if small else SHAPES)
            quiz = [quiz_row(tokenizer, rng, length) for _ in range(2 * self.tokens // length)]
            yield ids, marks, torch.from_numpy(np.stack(quiz)), slots
            i += step


def plain_row(tokenizer: Tokenizer, rng: Random, length: int) -> tuple[Ids, Ids]:
    """Make an ordinary row, without marks."""
    ids = row(tokenizer, rng, length)
    return ids, np.zeros_like(ids)


def settle(
    start: Path,
    out: Path,
    *,
    seconds: float,
    rate: float,
    workers: int,
    seed: int,
    tokens: int = 32_768,
    device: str = "cuda",
) -> list[float]:
    """Go on from the model in ``start`` for so many seconds, a step at least.

    Return the answers' losses, means of 50 steps.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(start)
    trainer = Trainer(
        begin(SETTLE, tokenizer, seed, start), SETTLE, tokenizer.backend_tokenizer, 1, device
    )
    rows = TrainingSteps(str(start / "tokenizer.json"), tokens, seed)
    prefetch = 8 if workers else None
    loader = DataLoader(rows, batch_size=None, num_workers=workers, prefetch_factor=prefetch)
    began, logged, recent = time.perf_counter(), list[float](), list[torch.Tensor]()
    for i, (ids, marks, quiz, slots) in enumerate(loader):
        spent = (time.perf_counter() - began) / seconds
        if i and spent >= 1:
            break
        for group in trainer.optimizer.param_groups:  # warm up, stay, come down
            group["lr"] = rate * min(1.0, (i + 1) / 30, max(0.01, (1 - spent) / 0.6))
        evicted, answers = learn_quiz(trainer, quiz.to(device, torch.long), int(slots))
        plain, _, survival = trainer.step(ids, marks)
        recent.append(torch.stack([answers, evicted, plain, survival]))
        if len(recent) == 50:
            logged.append(log(i + 1, time.perf_counter() - began, recent))
            recent = []
    if recent:
        logged.append(log(i, time.perf_counter() - began, recent))
    save(trainer.model, tokenizer, out)
    return logged


def log(step: int, seconds: float, recent: list[torch.Tensor]) -> float:
    """Print the means of steps' losses (4,); return that of the answers."""
    figures: list[float] = torch.stack(recent).mean(0).tolist()
    shown = "  ".join(f"{x:.4f}" for x in figures)
    print(f"step {step:5}  {seconds:4.0f} s  {shown}", flush=True)
    return figures[0]


def learn_quiz(
    trainer: Trainer, quiz: torch.Tensor, slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradients of rows (B, T) read with so many slots; return their two losses."""
    weight = weights(quiz, len(vocabulary.SPECIAL), trainer.assistant, trainer.digits)
    with trainer.amp:
        hidden = read_evicted(trainer.model, quiz, slots, GRADED)
        head, ids = trainer.model.lm_head.weight, quiz[:, -GRADED:]
        loss, answers = weighted_loss(hidden, head, ids, weight[:, 1 - GRADED :])
    torch.autograd.backward(loss)
    return loss.detach(), answers


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", type=Path, help="a model that `train` has made")
    parser.add_argument("--out", type=Path, default=Path("pocket-settled"))
    parser.add_argument("--seconds", type=float, default=320)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("               losses: answers, quizzes, ordinary rows, survival")
    settle(
        args.start,
        args.out,
        seconds=args.seconds,
        rate=args.rate,
        workers=args.workers,
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
