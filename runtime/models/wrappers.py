"""Finds the text model inside a wrapper: a model that reads images, video or sound beside text.

What a wrapper does with text alone is done by a decoder of its own, which is a causal language
model by itself. kvcap runs that model and loads nothing else, so that a vision tower takes no
memory. Knows configs and names of weights; loads nothing.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from kvcap.runtime.errors import UnsupportedModel

M_ROPE = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Maps text models that transformers has as no causal language model to the family that each is.

They differ from it by M-RoPE, which rotates by three positions a token: those of text are equal.
"""
PREFIX = ("paligemma",)
"""Lists the wrappers that were trained to read a prompt in both directions."""
NAMES = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""Maps patterns of the names that the text model's weights have in a wrapper's files to its own."""
KEPT = ("modules_to_not_convert", "ignore")
"""Names the settings of quantised weights that list modules by their names."""
_MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")  # the last is not in 4.57


def is_wrapper(config: Any) -> bool:
    """Return whether a config is of a model that reads more than text, around a text model."""
    text = config.get_text_config(decoder=True)
    return text is not config and text.model_type != config.model_type


def text_config(config: Any) -> Any:
    """Return the config of a model's text model, as a causal language model by itself.

    Args:
        config: of a wrapper, whose type of numbers and quantised weights are the text model's too;
            any other is returned as it is.

    Raises:
        UnsupportedModel: transformers maps the wrapper to no model that writes text, or its text
            model cannot run by itself.
    """
    if not is_wrapper(config):
        return _without_m_rope(config) if config.model_type in M_ROPE else config
    kind, text = config.model_type, copy.deepcopy(config.get_text_config(decoder=True))
    inner = text.model_type
    mapped = [_names(kind_of_model) for kind_of_model in _MAPPINGS]
    if not any(kind in names for names in mapped):
        raise UnsupportedModel(
            f"model type {kind!r} wraps the text model {inner!r}, but transformers maps it to no "
            f"model that writes text; give a model of {inner!r} by itself"
        )
    if kind in PREFIX:
        raise UnsupportedModel(
            f"model type {kind!r} reads a prompt in both directions, and evicting after every "
            f"block needs one that reads forwards; give a model of its text model, {inner!r}"
        )
    if inner in M_ROPE:
        text = _without_m_rope(text)
    elif inner not in mapped[0]:
        raise UnsupportedModel(
            f"model type {kind!r} wraps the text model {inner!r}, which is no causal language "
            f"model of transformers by itself; of its kind {', '.join(M_ROPE)} run, and wrappers "
            "of text models that do by themselves"
        )
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(config, "dtype", None)
    if transformers.__version__ >= "5" and hasattr(config, "tie_word_embeddings"):
        text.tie_word_embeddings = config.tie_word_embeddings  # the head belongs to the wrapper
    method = getattr(config, "quantization_config", None)
    if isinstance(method, dict):
        text.quantization_config = {
            key: [_own(name) for name in value or []] if key in KEPT else value
            for key, value in method.items()
        }
    text._commit_hash = getattr(config, "_commit_hash", None)
    return text


def text_name(name: str) -> str:
    """Return a tensor's name in the text model of a wrapper; other names stay."""
    for pattern, own in NAMES.items():
        name = re.sub(pattern, own, name)
    return name


def _own(module: str) -> str:
    """Return the name of a module that settings name by a path or, as `re:...`, by a pattern."""
    return module if module.startswith("re:") else text_name(f"{module}.").removesuffix(".")


def _names(kind: str) -> Any:
    return getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})


def _without_m_rope(text: Any) -> Any:
    """Return the config of the family that a text model becomes with one position per token."""
    values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
    for name in ("rope_parameters", "rope_scaling"):  # the latter is 4.57's
        parameters = {
            k: v for k, v in (values.get(name) or {}).items() if not k.startswith("mrope_")
        }
        for key in ("rope_type", "type"):
            if parameters.get(key) == "mrope":
                parameters[key] = "default"
        if name in values:
            values[name] = parameters or None
    return AutoConfig.for_model(M_ROPE[text.model_type], **values)
