"""Settings of generation and the draw of the next token, in NumPy.

The same rules, in the same order, as transformers' logits processors: greedy answers equal the
PyTorch backend's, and so do the probabilities of drawn ones. Draws themselves come from another
generator of random numbers, so that one seed gives other answers in the two backends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass
class Generation:
    """How an answer is drawn, under transformers' names; None is not set."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_id: list[int] | None = None
    stop_strings: list[str] | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Generation:
        """From a dictionary that may say more.

        Raises:
            ValueError: a value that cannot be.
        """
        names = {field.name for field in fields(cls)}
        known = {name: value for name, value in given.items() if name in names}
        if isinstance(ends := known.get("eos_token_id"), int):
            known["eos_token_id"] = [ends]
        found = cls(**known)
        found.check()
        return found

    def update(self, **changes: Any) -> None:
        """Change settings.

        Raises:
            ValueError: no such setting, or a value that cannot be; nothing is changed.
        """
        known = asdict(self)
        for name in changes:
            if name not in known:
                raise ValueError(f"no setting {name!r}; known: {', '.join(known)}")
        Generation(**{**known, **changes}).check()
        for name, value in changes.items():
            setattr(self, name, value)

    def check(self) -> None:
        """Refuse values that cannot be.

        Raises:
            ValueError: naming the first.
        """
        bounds = {
            "temperature": (0, float("inf")), "top_k": (0, float("inf")), "top_p": (0, 1),
            "min_p": (0, 1), "max_new_tokens": (1, float("inf")),
            "repetition_penalty": (1e-9, float("inf")),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and low <= value <= high
            if value is not None and not number:
                raise ValueError(f"{name}={value!r} will not work; use {low} to {high}")
        ends = self.eos_token_id
        if ends is not None and not all(isinstance(token, int) for token in ends):
            raise ValueError(f"eos_token_id={ends!r} will not work; use a list of token ids")


class Sampler:
    """Draws tokens as `Generation` says; `draws` is where the random numbers come from."""

    def __init__(self, config: Generation, draws: np.random.Generator) -> None:
        self.config, self.draws = config, draws
        self.greedy = not config.do_sample or config.temperature == 0

    def next(self, logits: Floats, history: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids [1] from logits [1, V]; `history` [1, T] are the tokens that count as said."""
        scores = self.scores(logits[0].astype(np.float32), history[0])
        if self.greedy:
            return np.array([int(scores.argmax())])
        mass = _softmax(scores).astype(np.float64).cumsum()
        place = np.searchsorted(mass, self.draws.random() * mass[-1], side="right")
        return np.array([min(int(place), len(mass) - 1)])

    def scores(self, logits: Floats, history: NDArray[np.int64]) -> Floats:
        """What the next token is chosen by, [V]; -inf is never drawn."""
        config, scores = self.config, logits
        if config.repetition_penalty not in (None, 1.0):
            said, penalty = np.unique(history), np.float32(config.repetition_penalty)
            scores[said] = np.where(
                scores[said] < 0, scores[said] * penalty, scores[said] / penalty
            )
        if self.greedy:
            return scores
        if config.temperature not in (None, 1.0):
            scores = scores / np.float32(config.temperature)
        if config.top_k:
            lowest = np.partition(scores, -min(config.top_k, len(scores)))
            scores = _without(scores, scores < lowest[-min(config.top_k, len(scores))])
        if config.top_p not in (None, 1.0):
            scores = _within(scores, config.top_p)
        if config.min_p:
            shares = _softmax(scores)
            scores = _without(scores, shares < config.min_p * shares.max())
        return scores


def _within(scores: Floats, mass: float) -> Floats:
    """Scores of the likeliest tokens that together have `mass`; at least one."""
    order = np.argsort(scores, kind="stable")  # least likely first
    gone = _softmax(scores)[order].cumsum() <= 1 - mass
    gone[-1] = False
    return _without(scores, gone[np.argsort(order)])


def _without(scores: Floats, gone: NDArray[np.bool_]) -> Floats:
    return np.where(gone, np.float32(-np.inf), scores)


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max())
    shares: Floats = powers / powers.sum()
    return shares
