"""Draws the next token in NumPy, by the settings of generation.

The rules and their order are those of transformers' logits processors, so greedy answers and the
probabilities of all others equal the PyTorch backend's. The random numbers are another generator's,
so one seed gives different answers in the two backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.session import settings
from kvcap.runtime.session.penalties import penalties

Floats = NDArray[np.float32]

LIKELIEST = 256, 2048  # tokens whose share is tried before all are sorted


@dataclass
class Generation:
    """A set of settings that say how tokens are drawn, named as in transformers; None: not set."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    max_new_tokens: int | None = None
    min_tokens: int | None = None
    thinking_budget: int | None = None
    eos_token_id: int | list[int] | None = None
    stop_strings: str | list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[Any, float] | None = None
    only_read: bool | None = None
    json_schema: dict[str, Any] | bool | None = None
    call_schema: dict[str, Any] | None = None
    regex: str | None = None
    template_options: dict[str, Any] | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Generation:
        """Return the settings that a dictionary holds, among other things.

        Raises:
            ValueError: a setting cannot have its value.
        """
        names = {field.name for field in fields(cls)}
        known = {name: value for name, value in given.items() if name in names}
        settings.check(known)
        return cls(**known)

    def update(self, **changes: Any) -> None:
        """Change settings.

        Raises:
            ValueError: no such setting, or a value that it cannot have; nothing is changed.
        """
        settings.check(changes)
        for name, value in changes.items():
            setattr(self, name, value)


class NumpySampler:
    """A sampler that draws tokens by the settings of a `Generation`, on arrays of NumPy."""

    def __init__(self, config: Generation, rng: np.random.Generator) -> None:
        self.config, self.rng = config, rng
        self.greedy = settings.greedy(config)
        self.biases = settings.biases(config)
        self.recipe = settings.recipe(config)

    def next(
        self,
        logits: Floats,
        history: NDArray[np.int64],
        allowed: NDArray[np.bool_] | None = None,
        answer: Sequence[int] = (),
    ) -> NDArray[np.int64]:
        """Draw token ids [1] from logits [1, V]; a repetition penalty looks at `history` [1, T].

        Args:
            logits: of the next token.
            history: the tokens so far.
            allowed: a mask over the vocabulary's first tokens; only those are drawn. None: any.
            answer: its tokens so far, to which `penalties` apply.
        """
        adjusted = logits[0].astype(np.float32)
        if allowed is not None:
            known = min(len(allowed), len(adjusted))
            adjusted[:known][~allowed[:known]] = -np.inf
            adjusted[known:] = -np.inf
        for token, bias in self.biases.items():
            adjusted[token] += bias
        for token, penalty in penalties(self.config, answer).items():
            adjusted[token] -= penalty
        self.penalise(adjusted, history[0])
        if self.greedy:
            return np.array([int(adjusted.argmax())])
        tokens, scores = self.candidates(adjusted)
        mass = _softmax(scores).astype(np.float64).cumsum()
        index = np.searchsorted(mass, self.rng.random() * mass[-1], side="right")
        index = min(int(index), len(mass) - 1)
        return np.array([index if tokens is None else tokens[index]])

    def logprobs(self, logits: Floats, token: int, top: int) -> list[tuple[int, float]]:
        """Return the `token` and the `top` likeliest ones, each with its log probability.

        They are of the model's own distribution, whatever the settings; from logits [1, V].
        """
        row = logits[0].astype(np.float32)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        likeliest = np.argsort(-row, kind="stable")[:top]
        return [(int(number), float(row[number])) for number in (token, *likeliest)]

    def penalise(self, scores: Floats, history: NDArray[np.int64]) -> None:
        """Apply the repetition penalty for tokens of `history` [T] to scores [V], in place."""
        if self.config.repetition_penalty not in (None, 1.0):
            read = np.array(list(set(history.tolist())))
            penalty = np.float32(self.config.repetition_penalty)
            scores[read] = np.where(
                scores[read] < 0, scores[read] * penalty, scores[read] / penalty
            )

    def candidates(self, scores: Floats) -> tuple[NDArray[np.int64] | None, Floats]:
        """Return the tokens [n] that may be drawn, in the vocabulary's order, and their scores [n].

        They are chosen by scores [V], which penalties have changed; -inf is never drawn. Tokens are
        None where they are the whole vocabulary. With `top_k` others are left out before anything
        else is done.
        """
        config = self.config
        tokens: NDArray[np.int64] | None = None
        scores = np.minimum(scores, np.float32(settings.LARGEST))
        if config.temperature not in (None, 1.0):
            with np.errstate(over="ignore"):  # a graph may write the least number for -inf
                scores = scores / np.float32(config.temperature)
        if config.top_k and config.top_k < len(scores):
            lowest = np.partition(scores, -config.top_k)[-config.top_k]
            tokens = np.flatnonzero(scores >= lowest)
            scores = scores[tokens]
        if config.top_p not in (None, 1.0):
            scores = _within(scores, config.top_p)
        if config.min_p:
            shares = _softmax(scores)
            scores = _without(scores, shares < config.min_p * shares.max())
        return tokens, scores


def _within(scores: Floats, mass: float) -> Floats:
    """Return the scores of the likeliest tokens, at least one, that together have `mass`."""
    shares = _softmax(scores)
    for count in LIKELIEST:
        if count < len(scores):
            some = np.argpartition(scores, -count)[-count:]
            some = some[np.argsort(-scores[some], kind="stable")]
            before = shares[some].cumsum() - shares[some]
            if before[-1] >= mass:
                masked, kept = np.full_like(scores, -np.inf), some[before < mass]
                masked[kept] = scores[kept]
                return masked
    order = np.argsort(scores, kind="stable")  # least likely first
    gone = shares[order].cumsum() <= 1 - mass
    gone[-1] = False
    return _without(scores, gone[np.argsort(order)])


def _without(scores: Floats, gone: NDArray[np.bool_]) -> Floats:
    return np.where(gone, np.float32(-np.inf), scores)


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max())
    shares: Floats = powers / powers.sum()
    return shares
