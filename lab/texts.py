"""Reads a text as a model does: its tokens, what layers see, and what policies keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor

from kvcap.lab.captured import capture
from kvcap.lab.pocket.corpus import conversation
from kvcap.lab.quality.sweep import options_of
from kvcap.pocket.prose import filler
from kvcap.policies import Observation, load_policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.models.files import encode
from kvcap.runtime.types import Positions

Kind = Literal["prose", "conversation"]
LEAST = 64  # least tokens of a text


class Text:
    """A text, with a model that reads it capped and uncapped.

    Args:
        model: loaded with `attn_implementation='kvcap'`.
        model_name: the model's name, for titles.
        name: the text's name, for titles.
        ids: the text's tokens.
        pieces: the text of each token.
        positions: positions of kept tokens; None: as the runtime would choose.
    """

    def __init__(
        self,
        model: Any,
        model_name: str,
        name: str,
        ids: Sequence[int],
        pieces: Sequence[str],
        positions: Positions | None = None,
    ) -> None:
        self.model, self.model_name, self.name = model, model_name, name
        self.ids = torch.tensor([[*ids]], device=model.device)  # [1, n]
        self.pieces = list(pieces)
        self.positions = positions
        """Says how kept tokens are numbered; the runtime chooses it when first read."""
        self.projections = True
        """Says whether `layers` have output projections."""
        self._kept: dict[tuple[Any, ...], list[Tensor]] = {}

    @classmethod
    def of(
        cls, runtime: Runtime, name: str, text: str, tokens: int, positions: Positions | None = None
    ) -> Text:
        """Tokenize a text, and take its first `tokens`, at most the model's trained length.

        Raises:
            ValueError: the text has fewer than `LEAST` tokens.
        """
        opening, ids = encode(runtime.tokenizer, text)
        ids = ids[: min(tokens, runtime.trained_length) - len(opening)]
        length = len(opening) + len(ids)
        if length < LEAST:
            raise ValueError(
                f"{name}: {length} tokens would be read of it, and at least {LEAST} are needed; "
                "give a longer text, or more --tokens"
            )
        words = [*runtime.tokenizer.convert_ids_to_tokens(opening)]
        words += pieces(runtime.tokenizer, text)[: len(ids)]
        return cls(runtime.model, runtime.name, name, [*opening, *ids], words, positions)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.ids.shape[1]

    @cached_property
    def layers(self) -> list[Observation]:
        """Return keys, values and queries of every capped layer, with nothing evicted."""
        return capture(self.model, self.ids, self.projections)

    @cached_property
    def numbers(self) -> list[int]:
        """Return the numbers of these layers in the model."""
        cache = BudgetCache(self.model.config, len(self), len(self), "full")
        return list(cache.layout.shape.capped)

    def kept(
        self,
        policy: str,
        budget: int,
        block: int,
        options: Mapping[str, Any] | None = None,
        tokens: int | None = None,
    ) -> list[Tensor]:
        """Return the tokens that a cache holds at the end, as bool [K, n] for each layer.

        Args:
            policy: a name, or a combination.
            budget: slots per KV head.
            block: tokens read at once; with the whole text, eviction runs once, after it.
            options: options of policies; those that the policy does not have are ignored.
            tokens: read only so many first tokens; None: all.

        Raises:
            ValueError: nothing would be evicted.
            PolicyError: there is no such policy, or its pins do not fit the budget.
        """
        ids = self.ids[:, :tokens]
        length = ids.shape[1]
        block = min(block, length)
        key = policy, budget, block, length
        if key not in self._kept:
            self._kept[key] = self._read(policy, budget, block, dict(options or {}), ids)
        return self._kept[key]

    def _read(
        self, policy: str, budget: int, block: int, options: dict[str, Any], ids: Tensor
    ) -> list[Tensor]:
        eviction = load_policy(policy)
        if not eviction.policy.evicts:
            raise ValueError(f"{policy} never evicts, so there is nothing to see; leave it out")
        length = ids.shape[1]
        if budget >= length:
            raise ValueError(
                f"a budget of {budget:,} slots holds all of {self.name}, of which {length:,} "
                "tokens are read, so that nothing is evicted; give a smaller budget or more tokens"
            )
        known = options_of(policy)
        own = {name: value for name, value in options.items() if name in known}
        eviction = load_policy(policy, **own).plain()
        cache = BudgetCache(self.model.config, budget, block, eviction, positions=self.positions)
        self.positions = cache.layout.positions
        BlockLoop(self.model, cache, graphs=False).prefill(ids)
        held = []
        for layer in cache.capped_layers:
            heads = layer.segments[0].layer_heads
            kept = torch.zeros(heads, length, dtype=torch.bool)
            for s in layer.segments:
                positions = s.positions[0].long().cpu()
                kept[s.head : s.head + s.heads].scatter_(1, positions, True)
            held.append(kept)
        return held


def pieces(tokenizer: Any, text: str) -> list[str]:
    """Return the text of each token, spaces included; joined, they are the whole text.

    A character of several tokens belongs to the first of them; the others are ''.
    """
    given = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    texts, last = [], 0
    for _, stop in given["offset_mapping"]:
        texts.append(text[last : max(last, stop)])
        last = max(last, stop)
    return texts


def generated(
    runtime: Runtime, kind: Kind, seed: int, tokens: int, positions: Positions | None = None
) -> Text:
    """Make a text of pocket's corpus, with `tokens` tokens."""
    rng, tokens = Random(f"analyze/{kind}/{seed}"), min(tokens, runtime.trained_length)
    sentences, text = filler(rng), ""
    while len(runtime.tokenizer(text, add_special_tokens=False)["input_ids"]) < tokens:
        if kind == "prose":
            text += " ".join(islice(sentences, 1 + tokens // 16)) + " "
        else:
            talk = conversation(rng, tokens)
            text += "".join(f"{turn['role']}: {turn['content']}\n" for turn in talk)
    return Text.of(runtime, f"{kind} {seed}", text, tokens, positions)


def texts(
    runtime: Runtime,
    files: Mapping[str, str],
    kind: Kind,
    count: int,
    tokens: int,
    seed: int,
    positions: Positions | None,
) -> list[Callable[[], Text]]:
    """Return functions that make each text: those of files, or else `count` generated ones."""
    if files:
        return [
            partial(Text.of, runtime, name, text, tokens, positions) for name, text in files.items()
        ]
    return [partial(generated, runtime, kind, seed + i, tokens, positions) for i in range(count)]
