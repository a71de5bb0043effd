"""Draws the next token from logits, by transformers' own logits processors.

What is drawn is the first token up to which the shares of all, in the vocabulary's order, exceed a
random number: one number a token, whatever the size of the vocabulary, and no token's share leaves
the device.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.session import settings
from kvcap.runtime.session.penalties import penalties
from kvcap.runtime.types import NEUTRAL

UNSUPPORTED = {
    "num_beams": 1,
    "penalty_alpha": None,
    "num_return_sequences": 1,
    "constraints": None,
    "force_words_ids": None,
    "guidance_scale": None,
}

# Settings by which transformers would choose another token, and which are not read here. 0, None or
# the value beside a name changes nothing.
NOT_READ = {"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None,
            "encoder_repetition_penalty": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
            "eta_cutoff": 0.0, "top_h": None, "min_length": 0, "min_new_tokens": None,
            "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None,
            "forced_bos_token_id": None, "forced_eos_token_id": None, "max_time": None,
            "exponential_decay_length_penalty": None, "watermarking_config": None}  # fmt: skip


AT_ONCE = 16  # rows of logits that a GPU sorts and adds up in one go; a CPU takes each by itself

LIKELIEST = 256, 2048  # tokens whose share a CPU tries before it sorts all

TIES = 64  # of the tokens that are as likely as the last of `top_k`, all of which stay, at most


class Sampler:
    """Draws the next token by the settings of a `GenerationConfig`.

    Args:
        config: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, dry_multiplier, logit_bias, do_sample.
        generator: random numbers on the CPU: one seed gives the same on any device.

    Settings that are not read, and would change what is drawn, are warned of by name.

    Raises:
        UnsupportedModel: for beams and other modes that reorder the cache.
    """

    def __init__(self, config: GenerationConfig, generator: torch.Generator) -> None:
        for name, neutral in UNSUPPORTED.items():
            value = getattr(config, name, neutral)
            if value not in (neutral, None):
                raise UnsupportedModel(
                    f"{name}={value} needs a cache that can be reordered or run twice; evicted "
                    f"tokens cannot come back. Use {name}={neutral}"
                )
        given = {name: getattr(config, name, None) for name in NOT_READ}
        if ignored := [f"{k}={v}" for k, v in given.items() if v and v != NOT_READ[k]]:
            warnings.warn(
                f"these settings of generation are not read: {', '.join(ignored)}; answers are "
                "drawn as if they were not set",
                stacklevel=2,
            )
        self.greedy = settings.greedy(config)
        self.config, self.generator = config, generator
        self.repetition, self.warpers = _processors(config, self.greedy)
        self.shortlist = _shortlist(config)
        """Says from how many of the likeliest tokens one is drawn; None: from all.

        No other token can be drawn by `top_k`."""
        biases = settings.biases(config)
        self.biases = (torch.tensor([*biases]), torch.tensor([*biases.values()])) if biases else ()
        """Holds tokens and what is added to their logits."""
        self.recipe = settings.recipe(config)
        """Holds the settings that draw a token by its logits alone; see `TokenSampler.recipe`."""

    def next(
        self,
        logits: Tensor,
        history: Tensor,
        allowed: NDArray[np.bool_] | None = None,
        answer: Sequence[int] = (),
    ) -> Tensor:
        """Draw the next token ids [B] from logits [B, V].

        Args:
            logits: [B, V], those of the next token.
            history: [B, T], the tokens so far, for a repetition penalty.
            allowed: which of the vocabulary's first tokens may be drawn; others may not. None: any
                token may.
            answer: its tokens so far, to which `penalties` apply.
        """
        if allowed is not None:
            gone = torch.ones(logits.shape[-1], dtype=torch.bool)
            known = min(len(allowed), len(gone))
            gone[:known] = torch.from_numpy(~allowed[:known])
            logits = logits.masked_fill(_sent(gone, logits.device), float("-inf"))
        if self.recipe == ():
            return logits.argmax(-1)
        scores: Tensor = logits.float()
        if self.biases:
            tokens, more = (_sent(x, logits.device) for x in self.biases)
            scores = scores.index_add(-1, tokens, more.expand(len(scores), -1))
        if penalty_of := penalties(self.config, answer):
            both = torch.tensor([*penalty_of]), torch.tensor([*penalty_of.values()])
            tokens, less = (_sent(x, logits.device) for x in both)
            scores = scores.index_add(-1, tokens, -less.expand(len(scores), -1))
        scores = self.repetition(history, scores)
        if self.greedy:
            return scores.argmax(-1)
        return self.draw(scores, self.numbers(len(scores)))

    def draw(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """Draw token ids [B] from scores [B, V] by random numbers [B]; penalties were applied."""
        scores = scores.clamp(max=settings.LARGEST)
        if self.shortlist is None or self.shortlist >= scores.shape[-1]:
            return drawn(self.warpers(None, scores), numbers)
        some, ids = scores.topk(self.shortlist)
        ids, order = ids.sort(-1)  # in the vocabulary's order, in which shares are added up
        place = drawn(self.warpers(None, some.gather(-1, order)), numbers)
        return ids.gather(-1, place[:, None])[:, 0]

    def numbers(self, count: int = 1) -> Tensor:
        """Return the generator's next random numbers [count], from 0 to below 1."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64)

    def logprobs(self, logits: Tensor, token: int, top: int) -> list[tuple[int, float]]:
        """Return the `token` and the `top` likeliest ones, each with its log probability.

        It is that of the model's own distribution, logits [1, V], whatever the settings.
        """
        shares = logits[0].float().log_softmax(-1)
        likeliest = shares.topk(min(top, len(shares)))
        own = shares[token].item()
        return [
            (token, own),
            *zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True),
        ]


@torch.inference_mode()
def draw_each(logits: Tensor, samplers: Mapping[int, Sampler]) -> Tensor:
    """Draw token ids [B] from logits [B, V], each by its row's sampler; arbitrary without one.

    All samplers must have recipes, and those of one recipe draw in one go.
    """
    tokens, groups = logits.argmax(-1), defaultdict[tuple[float, ...], list[int]](list)
    at_once = AT_ONCE if logits.is_cuda else 1
    for row, sampler in samplers.items():
        assert sampler.recipe is not None
        if sampler.recipe:
            groups[sampler.recipe].append(row)
    for rows in groups.values():
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            at = _sent(torch.tensor(some), logits.device)
            numbers = torch.cat([samplers[row].numbers() for row in some])
            tokens[at] = samplers[some[0]].draw(logits[at].float(), numbers)
    return tokens


def drawn(scores: Tensor, numbers: Tensor) -> Tensor:
    """Draw token ids [B], each as often as the softmax of its scores [B, V] says.

    Args:
        scores: [B, V]; a token of -inf is never drawn.
        numbers: [B], random numbers from 0 to below 1.
    """
    wide = torch.float32 if scores.device.type == "mps" else torch.float64
    shares = scores.softmax(-1)
    mass = shares.cumsum(-1, dtype=wide)
    bounds = _sent(numbers.to(wide), scores.device)[:, None] * mass[:, -1:]
    index = torch.searchsorted(mass, bounds, right=True).clamp_(max=scores.shape[-1] - 1)
    # A sum of many parts may grow by a rounding where there is no share.
    there = shares.gather(-1, index) > 0
    return torch.where(there, index, shares.argmax(-1, keepdim=True))[:, 0]


class Nucleus(TopPLogitsWarper):  # type: ignore[misc]
    """A `TopPLogitsWarper` that sorts the whole vocabulary on a CPU only if it must."""

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Return scores [B, V], -inf but for the likeliest tokens with the share `top_p` in all."""
        if scores.device.type == "cpu":
            total = scores.logsumexp(-1, keepdim=True)
            for count in LIKELIEST:
                some, at = scores.topk(min(count, scores.shape[-1]))
                shares = (some - total).exp()
                mass = shares.cumsum(-1)
                if bool((mass[:, -1] >= self.top_p).all()):
                    within = mass - shares < self.top_p
                    kept = some.masked_fill(~within, self.filter_value)
                    return torch.full_like(scores, self.filter_value).scatter_(-1, at, kept)
        changed: Tensor = super().__call__(input_ids, scores)
        return changed


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, without waiting for a GPU.

    The GPU may still compute the logits. If the host waited for them here, the kernels that draw
    from them would be launched one by one, and the GPU would idle in between.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _given(config: GenerationConfig, name: str) -> bool:
    """Return whether a setting would change which token is drawn."""
    return getattr(config, name, None) not in (None, NEUTRAL[name])


def _shortlist(config: GenerationConfig) -> int | None:
    if not _given(config, "top_k") or config.top_k + TIES > LIKELIEST[-1]:
        return None
    return int(config.top_k) + TIES


def _processors(
    config: GenerationConfig, greedy: bool
) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """Return the processors that look at the tokens so far, and those that look at scores alone."""
    given = partial(_given, config)
    repetition, warpers = LogitsProcessorList(), LogitsProcessorList()
    if given("repetition_penalty"):
        repetition.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
    if greedy:
        return repetition, warpers
    if given("temperature"):
        warpers.append(TemperatureLogitsWarper(float(config.temperature)))
    if given("top_k"):
        warpers.append(TopKLogitsWarper(config.top_k))
    if given("top_p"):
        warpers.append(Nucleus(float(config.top_p)))
    if given("min_p"):
        warpers.append(MinPLogitsWarper(float(config.min_p)))
    return repetition, warpers
