"""Describes the model of a server and its abilities, for APIs that list models."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvcap.runtime.errors import ChatTemplateMissing
from kvcap.runtime.session.messages import ChatWriter

LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "fp32": "F32", "fp16": "F16"}
"""Holds ollama's words for types of weights; others are their names in capitals."""


@dataclass(frozen=True)
class ModelFacts:
    """A record of a model's family, size and types, and of its chat template's abilities."""

    architecture: str = "kvcap"  # as transformers and GGUF files call it
    context_length: int = 0  # tokens that it was trained on
    parameters: int = 0  # numbers of its weights; 0: not known
    level: str = ""  # the type of most of its weights
    tools: bool = False  # its chat template writes them; others are told of them in texts
    thinking: bool = False

    @classmethod
    def of(cls, runtime: Any) -> ModelFacts:
        """Return the facts of a runtime's model, of any backend."""
        try:
            can = ChatWriter(runtime.tokenizer).abilities
            tools, thinking = can.tools, can.thinking
        except ChatTemplateMissing:
            tools = thinking = False
        model, length = getattr(runtime, "model", None), runtime.trained_length
        if (gguf := getattr(runtime, "gguf", None)) is not None:
            level = gguf.weights_type
            return cls(gguf.architecture, length, gguf.parameters, level, tools, thinking)
        if model is None:
            manifest = getattr(runtime, "manifest", None)
            family = manifest.model.get("family", "") if manifest is not None else ""
            level = _level(manifest.facts["dtype"] if manifest is not None else runtime.plan.dtype)
            return cls(family or "kvcap", length, 0, level, tools, thinking)
        from kvcap.runtime.models.packed_matrix import PackedMatrix

        sizes, held = Counter[str](), set[int]()
        for module in model.modules():
            if isinstance(module, PackedMatrix):
                held |= {id(parameter) for parameter in module.parameters()}
                sizes[str(runtime.plan.weights_dtype)] += module.rows * module.columns
        for parameter in model.parameters():
            if id(parameter) not in held:
                sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        config = model.config.get_text_config(decoder=True)
        level = _level(sizes.most_common(1)[0][0])
        return cls(config.model_type, length, sizes.total(), level, tools, thinking)

    @property
    def size(self) -> str:
        """Return the number of its weights as ollama writes it.

        >>> ModelFacts(parameters=134_515_008).size, ModelFacts(parameters=8_030_261_248).size
        ('134.52M', '8.0B')
        """
        millions = self.parameters / 1e6
        if not millions:
            return ""
        return f"{millions / 1e3:.1f}B" if millions >= 1e3 else f"{millions:.2f}M"


def _level(name: str) -> str:
    return LEVELS.get(name, name.upper())
