"""kvcap: run a language model's chat inside a fixed amount of KV memory.

Everything is imported when first used, so that `import kvcap` is instant and `kvcap --help` loads
neither torch nor transformers. Importing kvcap also makes `attn_implementation="kvcap"` known to
transformers, whenever transformers is imported, and the model "kvcap" to lm-eval likewise.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcap.import_hooks import after_import

if TYPE_CHECKING:
    from kvcap.policies import Eviction, Observation, Policy, PolicyError, load_policy
    from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
    from kvcap.runtime.backends.pytorch.cap import cap
    from kvcap.runtime.backends.pytorch.runtime import Runtime
    from kvcap.runtime.cache.cache import BudgetCache
    from kvcap.runtime.cache.settings import CacheSettings
    from kvcap.runtime.errors import KvcapError
    from kvcap.runtime.planning.plan import MemoryPlan
    from kvcap.runtime.session.session import Session

__version__ = "0.2.0"

_HOMES = {
    "BudgetCache": "runtime.cache.cache",
    "CacheSettings": "runtime.cache.settings",
    "Eviction": "policies",
    "KvcapError": "runtime.errors",
    "LlamaRuntime": "runtime.backends.llamacpp.runtime",
    "MemoryPlan": "runtime.planning.plan",
    "Observation": "policies",
    "Policy": "policies",
    "PolicyError": "policies",
    "Runtime": "runtime.backends.pytorch.runtime",
    "Session": "runtime.session.session",
    "cap": "runtime.backends.pytorch.cap",
    "load_policy": "policies",
}
__all__ = [
    "BudgetCache",
    "CacheSettings",
    "Eviction",
    "KvcapError",
    "LlamaRuntime",
    "MemoryPlan",
    "Observation",
    "Policy",
    "PolicyError",
    "Runtime",
    "Session",
    "cap",
    "load_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(_: Any) -> None:
    from kvcap.runtime.attention.functions import register

    register()


def _register_lm_eval(_: Any) -> None:
    from lm_eval.api.registry import model_registry

    model_registry.register("kvcap", target="kvcap.evals.lm_eval:KvcapLM")  # imported when asked


after_import("transformers.modeling_utils", _register)
after_import("lm_eval.models", _register_lm_eval)
