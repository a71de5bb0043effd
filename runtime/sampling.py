"""From logits to the next token, through transformers' own logits processors."""

from __future__ import annotations

import torch
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

UNSUPPORTED = {"num_beams": 1, "penalty_alpha": None, "num_return_sequences": 1,
               "constraints": None, "force_words_ids": None, "guidance_scale": None}  # fmt: skip
# What each setting is where it changes nothing; so is None, which versions of transformers read
# differently.
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class Sampler:
    """Draws the next token as a `GenerationConfig` says.

    Args:
        config: temperature, top_k, top_p, min_p, repetition_penalty, do_sample.
        generator: of the draws, on the CPU: one seed gives the same on any device.

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
        self.greedy = not config.do_sample or config.temperature == 0
        self.generator = generator
        self.processors = _processors(config, self.greedy)

    def next(self, logits: Tensor, history: Tensor) -> Tensor:
        """Token ids [B] from logits [B, V]; `history` [B, T] are the tokens that count as said."""
        scores: Tensor = self.processors(history, logits.float())
        if self.greedy:
            return scores.argmax(-1)
        weights = scores.softmax(-1).cpu()
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0].to(logits.device)


def _processors(config: GenerationConfig, greedy: bool) -> LogitsProcessorList:
    def given(name: str) -> bool:
        return getattr(config, name, None) not in (None, NEUTRAL[name])

    chosen = LogitsProcessorList()
    if given("repetition_penalty"):
        chosen.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if greedy:
        return chosen
    if given("temperature"):
        chosen.append(TemperatureLogitsWarper(float(config.temperature)))
    if given("top_k"):
        chosen.append(TopKLogitsWarper(config.top_k))
    if given("top_p"):
        chosen.append(TopPLogitsWarper(config.top_p))
    if given("min_p"):
        chosen.append(MinPLogitsWarper(config.min_p))
    return chosen
