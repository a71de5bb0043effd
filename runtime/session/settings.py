"""Defines the settings of generation that a user may give, with their names and bounds.

Knows no library: they are attributes of transformers' `GenerationConfig` or of an object like it.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcap.runtime.session.penalties import PENALTIES, penalises
from kvcap.runtime.types import NEUTRAL, ModelKind


class Bounds(NamedTuple):
    """A range of the numbers that a setting takes, whole or not."""

    kind: type
    low: float
    high: float = math.inf
    above: bool = False  # `low` itself is refused

    def holds(self, value: Any) -> bool:
        """Return whether a value is of the kind and within the bounds."""
        kinds = (int,) if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        if self.kind is float and abs(value) > sys.float_info.max:  # infinite, or a longer integer
            return False
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        if self.high == math.inf:
            return f"{kind} above {self.low:g}" if self.above else f"{kind}, {self.low:g} or more"
        return f"{kind} from {self.low:g} to {self.high:g}"


NUMBERS = {
    "temperature": Bounds(float, 0),
    "top_k": Bounds(int, 0),
    "top_p": Bounds(float, 0, 1),
    "min_p": Bounds(float, 0, 1),
    "repetition_penalty": Bounds(float, 0, above=True),
    "presence_penalty": Bounds(float, -2, 2),
    "frequency_penalty": Bounds(float, -2, 2),
    "dry_multiplier": Bounds(float, 0, 10),
    "max_new_tokens": Bounds(int, 1),
    "min_tokens": Bounds(int, 0),
    "thinking_budget": Bounds(int, 0),
    "logprobs": Bounds(int, 0, 20),
    "prompt_logprobs": Bounds(int, 0, 20),
    "seed": Bounds(int, -(2**63), 2**64 - 1),
}
SHAPES = ("json_schema", "regex")
"""Names the settings that say what a whole answer is held to."""
FORMS = (*SHAPES, "call_schema")
"""Names these, and that of the calls that an answer may have; at most one of them is set."""
BIAS = 100
"""Bounds what `logit_bias` adds to a logit, as in OpenAI's API."""
LEAST = 1e-20
"""Says below which temperature or `top_p` only the likeliest token is left, as with 0."""
LARGEST = 1e18
"""Bounds the logits that are drawn from: divided by the least temperature they stay finite."""
OURS = (
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "only_read",
    "min_tokens",
    "thinking_budget",
    *PENALTIES,
    *FORMS,
    "template_options",
)
"""Names the settings that transformers does not have."""
NAMES = (
    *NUMBERS, "do_sample", "eos_token_id", "stop_strings", "logit_bias", "only_read", *FORMS,
    "template_options",
)  # fmt: skip
MILD: dict[str, dict[str, float]] = {
    "qwen2": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    "qwen3": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
    "gemma": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    "": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.05},
}
"""Holds by what chats draw where a model names no setting, by how its family's name begins.

The makers of Qwen and Gemma name these numbers for their models; '' is every other large one.
"""
SMALL = 1024
"""Bounds the hidden size of a small model, which has some 400 million weights at most."""
MILD_SMALL: dict[str, float] = {
    "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05, "dry_multiplier": 0.8,
}  # fmt: skip
"""Holds by what a small model of no such family draws.

Temperature and `top_p` are those that SmolLM2's makers name. Without a penalty its answers repeat
each other (`scripts/measure-repeats`); with one of 1.1 it missed more of what it had been told.
Without DRY, of which others take 0.8, one long answer in four circles on one sentence.
"""
DRAWN = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "dry_multiplier",
)  # fmt: skip
"""Names the settings any of which says that a model brings its own."""
GIVEN = ("messages", "tools", "add_generation_prompt")
"""Names what a chat template always gets, so that no option may be called so."""


def check(settings: Mapping[str, Any]) -> None:
    """Refuse settings that do not exist or cannot have their value; None stands for one not given.

    Raises:
        ValueError: naming the first, and what it may be.
    """
    for name, value in settings.items():
        if name not in NAMES:
            raise ValueError(f"no setting {name!r}; known: {', '.join(NAMES)}")
        if value is None:
            continue
        if name in NUMBERS:
            bounds = NUMBERS[name]
            allowed, fits = str(bounds), bounds.holds(value)
        elif name in ("do_sample", "only_read"):
            allowed, fits = "True or False", isinstance(value, bool)
        elif name == "eos_token_id":
            ids = value if isinstance(value, (list, tuple)) else [value]
            token = Bounds(int, 0)
            allowed, fits = "a token id or a list of them", all(map(token.holds, ids))
        elif name == "json_schema":
            allowed = "a dictionary, {'type': 'object'} for any JSON object, or True for any JSON"
            fits = isinstance(value, dict) or value is True
        elif name == "call_schema":
            allowed, fits = "the JSON schema of a call, a dictionary", isinstance(value, dict)
        elif name == "template_options":
            allowed = f"a dictionary of names and JSON values, without {', '.join(GIVEN)}"
            fits = _are_template_options(value)
        elif name == "logit_bias":
            allowed = f"a dictionary of token ids and numbers from -{BIAS} to {BIAS}"
            fits = _are_biases(value)
        elif name == "regex":
            allowed, fits = "a regular expression as a text", isinstance(value, str)
        else:
            texts = [value] if isinstance(value, str) else value
            fits = isinstance(texts, (list, tuple)) and all(isinstance(x, str) for x in texts)
            allowed = "a text or a list of them"
        if not fits:
            raise ValueError(f"{name}={value!r} will not work; use {allowed}")
    held = [name for name in FORMS if settings.get(name) is not None]
    if len(held) > 1:
        raise ValueError(f"an answer is held to {held[0]} or to {held[1]}; set one of them to None")
    if settings.get("min_tokens") and held and held[0] in SHAPES:
        raise ValueError(
            f"min_tokens does not go with {held[0]}, by which the answer ends; set one to None"
        )


def _are_template_options(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return not set(value) & set(GIVEN)


def _are_biases(value: Any) -> bool:
    """Return whether a value has a number for each of some token ids, which JSON has as texts."""
    token, bias = Bounds(int, 0), Bounds(float, -BIAS, BIAS)
    return isinstance(value, dict) and all(
        (token.holds(key) or (isinstance(key, str) and key.isdecimal())) and bias.holds(number)
        for key, number in value.items()
    )


def seeded(seed: int | None) -> int | None:
    """Return a seed of 64 bits without a sign; None, as for -1: draws are not repeated.

    >>> seeded(7), seeded(-1), seeded(-2) == 2**64 - 2
    (7, None, True)
    """
    check({"seed": seed})
    return None if seed in (None, -1) else seed % 2**64


def copied(config: Any) -> Any:
    """Return a copy of settings that can take kvcap's own, too."""
    settings = copy.deepcopy(config)
    for name in OURS:
        if not hasattr(settings, name):  # transformers' have others only
            setattr(settings, name, None)
    return settings


def as_dict(config: Any) -> dict[str, Any]:
    """Return all settings but the seed, as `config` has them."""
    return {name: getattr(config, name, None) for name in NAMES if name != "seed"}


def shapes(config: Any) -> dict[str, Any]:
    """Return the forms that answers are held to, by the setting's name; empty if there is none."""
    return {name: value for name, value in forms(config).items() if name in SHAPES}


def forms(config: Any) -> dict[str, Any]:
    """Return the constraints on the form of answers and calls, by the setting's name."""
    values = {name: getattr(config, name, None) for name in FORMS}
    return {name: value for name, value in values.items() if value is not None}


def mild_for(kind: ModelKind) -> dict[str, Any]:
    """Return the settings by which chats draw with a model of this kind that names none.

    >>> [mild_for(ModelKind(*kind))["temperature"] for kind in (("llama", 576), ("llama", 4096))]
    [0.2, 0.7]
    """
    family = next(start for start in MILD if kind.family.lower().startswith(start))
    settings = MILD[family] if family or kind.hidden_size >= SMALL else MILD_SMALL
    return {"do_sample": True, **settings}


def names_drawing(config: Any) -> bool:
    """Return whether settings of generation say how tokens are drawn.

    Those of transformers 4.57 always do, which fills in that the likeliest is taken.
    """
    return any(getattr(config, name, None) is not None for name in DRAWN)


def drawn(config: Any) -> dict[str, Any]:
    """Return the settings that say how tokens are drawn, for people; only `temperature` if 0."""
    if greedy(config):
        return {"temperature": 0}
    values = {name: getattr(config, name, None) for name in DRAWN[1:]}
    return {name: value for name, value in values.items() if value is not None}


def greedy(config: Any) -> bool:
    """Return whether only the likeliest token can be drawn."""
    values = (config.temperature, config.top_p)
    return not config.do_sample or any(value is not None and value < LEAST for value in values)


def template_options(config: Any) -> dict[str, Any]:
    """Return the names that the chat template gets beside messages and tools.

    An answer that is held to a form is not to be held within its thoughts: `enable_thinking` is
    False then, unless it was given.
    """
    options = getattr(config, "template_options", None) or {}
    return {"enable_thinking": False, **options} if shapes(config) else dict(options)


def biases(config: Any) -> dict[int, float]:
    """Return the numbers added to logits, by token id."""
    bias = getattr(config, "logit_bias", None) or {}
    return {int(token): float(number) for token, number in bias.items()}


def recipe(config: Any) -> tuple[float, ...] | None:
    """Return the settings that draw a token by its logits alone; see `TokenSampler.recipe`."""
    repetition = getattr(config, "repetition_penalty", None)
    if penalises(config) or biases(config) or repetition not in (None, 1.0):
        return None
    names = () if greedy(config) else ("temperature", "top_k", "top_p", "min_p")
    given = {name: getattr(config, name, None) for name in names}
    return tuple(float(NEUTRAL[k] if value is None else value) for k, value in given.items())


def end_tokens(config: Any) -> frozenset[int]:
    """Return the tokens that end an answer; none, one or several may be set."""
    ids = config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])


def stop_strings(config: Any) -> list[str]:
    """Return the texts that end an answer; none, one or several may be set."""
    texts = config.stop_strings
    return [texts] if isinstance(texts, str) else list(texts or ())
