"""Draws the next token from logits, by transformers' own logits processors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

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
from kvcap.runtime.types import NEUTRAL

UNSUPPORTED = {"num_beams": 1, "penalty_alpha": None, "num_return_sequences": 1,
               "constraints": None, "force_words_ids": None, "guidance_scale": None}  # fmt: skip

# Settings by which transformers would choose another token, and which are not read here. 0, None or
# the value beside a name changes nothing.
NOT_READ = {"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None,
            "encoder_repetition_penalty": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
            "eta_cutoff": 0.0, "top_h": None, "min_length": 0, "min_new_tokens": None,
            "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None,
            "forced_bos_token_id": None, "forced_eos_token_id": None, "max_time": None,
            "exponential_decay_length_penalty": None, "watermarking_config": None}  # fmt: skip


class Sampler:
    """Draws the next token by the settings of a `GenerationConfig`.

    Args:
        config: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, do_sample.
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
        found = {name: getattr(config, name, None) for name in NOT_READ}
        if ignored := [f"{k}={v}" for k, v in found.items() if v and v != NOT_READ[k]]:
            warnings.warn(
                f"these settings of generation are not read: {', '.join(ignored)}; answers are "
                "drawn as if they were not set",
                stacklevel=2,
            )
        self.greedy = not config.do_sample or config.temperature == 0
        self.generator = generator
        self.processors = _processors(config, self.greedy)
        self.presence, self.frequency = settings.penalties(config)

    @property
    def likeliest(self) -> bool:
        """Whether the likeliest token is drawn, whatever came before."""
        return self.greedy and not (self.processors or self.presence or self.frequency)

    def next(
        self,
        logits: Tensor,
        history: Tensor,
        allowed: NDArray[np.bool_] | None = None,
        said: Sequence[int] = (),
    ) -> Tensor:
        """Token ids [B] from logits [B, V]; a repetition penalty looks at `history` [B, T].

        Args:
            logits: of the next token.
            history: the tokens so far.
            allowed: of the first tokens of the vocabulary, those that may be drawn, and no others;
                None: any.
            said: the tokens of the answer, of which penalties of presence and frequency are.
        """
        if allowed is not None:
            gone = torch.ones(logits.shape[-1], dtype=torch.bool)
            known = min(len(allowed), len(gone))
            gone[:known] = torch.from_numpy(~allowed[:known])
            logits = logits.masked_fill(gone.to(logits.device), float("-inf"))
        if self.likeliest:
            return logits.argmax(-1)
        scores: Tensor = logits.float()
        if said and (self.presence or self.frequency):
            tokens, times = torch.tensor(said, device=logits.device).unique(return_counts=True)
            less = self.presence + self.frequency * times.float()
            scores = scores.index_add(-1, tokens, -less.expand(len(scores), -1))
        scores = self.processors(history, scores)
        if self.greedy:
            return scores.argmax(-1)
        weights = scores.softmax(-1).cpu()
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0].to(logits.device)

    def logprobs(self, logits: Tensor, token: int, top: int) -> list[tuple[int, float]]:
        """The `token` and the `top` likeliest ones, each with its log probability.

        By the model's own distribution, whatever the settings; of logits [1, V].
        """
        shares = logits[0].float().log_softmax(-1)
        likeliest = shares.topk(min(top, len(shares)))
        own = shares[token].item()
        return [
            (token, own),
            *zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True),
        ]


def _processors(config: GenerationConfig, greedy: bool) -> LogitsProcessorList:
    def given(name: str) -> bool:
        return getattr(config, name, None) not in (None, NEUTRAL[name])

    chosen = LogitsProcessorList()
    if given("repetition_penalty"):
        chosen.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
    if greedy:
        return chosen
    if given("temperature"):
        chosen.append(TemperatureLogitsWarper(float(config.temperature)))
    if given("top_k"):
        chosen.append(TopKLogitsWarper(config.top_k))
    if given("top_p"):
        chosen.append(TopPLogitsWarper(float(config.top_p)))
    if given("min_p"):
        chosen.append(MinPLogitsWarper(float(config.min_p)))
    return chosen
