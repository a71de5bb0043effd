"""Saves a conversation of the llama.cpp backend in a session's file, and restores it.

The file is that of `session/file.py`. Its cells are as the library writes them, so it goes on under
the same model, type of cells and version of the library, whatever the policy and the budget.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap import __version__
from kvcap.runtime.backends.llamacpp.context import for_streams
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.backends.numpy_sampler import Generation
from kvcap.runtime.cache.pinned_slots import merged
from kvcap.runtime.errors import KvcapError, SessionFileForeign
from kvcap.runtime.session import file as session_file
from kvcap.runtime.session.engine import CacheCopy
from kvcap.runtime.session.file import SessionFile, check_conversation, checked_facts, generation_of
from kvcap.runtime.session.session import Session

BACKEND = "llamacpp"
TENSORS = ("state", "tokens", "places")


def save(session: Session, identity: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the cells in use and everything else; `identity` is that of `identity_of`.

    Raises:
        SessionNotSaved: an earlier file is as it was.
    """
    cache, copy = session.cache, session.loop.copied()
    tensors = dict(copy.tensors)
    if cache.seen:
        tensors["state"] = for_streams(tensors["state"], 1, cache.context.model)
    facts = {
        "kvcap": __version__,
        "model": f"{session.runtime.name} (llama.cpp)",
        "revision": None,
        **identity,
        "dtype": "float16",
        "positions": cache.positions,
        "policy": cache.ranking.name,
        "budget_tokens": cache.budget,
        "seen": cache.seen,
        "compact": bool(copy.facts.get("compact")),
        "pinned_spans": session.recall.lasting(cache.pinned_spans),
        "conversation": session.conversation,
        "generation": asdict(session.generation),
        "draws": session.rng.bit_generator.state,
    }
    session_file.write(path, {name: [array] for name, array in tensors.items()}, facts)


def restore(
    session: Session, identity: dict[str, Any], vocabulary: int, path: str | os.PathLike[str]
) -> None:
    """Turn `session` into the saved one; its runtime has that identity and vocabulary.

    Raises:
        SessionFileForeign: it was saved by another backend, model or library, or holds more tokens
            than there are cells.
        SessionFileCorrupt: no session can be so. Nothing is changed by either.
        PinsTooLarge: the pinned tokens do not fit.
    """
    with SessionFile(path, "np") as file:
        facts = checked_facts(file)
        _check_identity(facts, identity, str(path))
        check_conversation(file, vocabulary)
        conversation, seen = facts["conversation"], facts["seen"]
        cache = session.cache
        try:
            generation = Generation.of(generation_of(facts["generation"]))
            rng = session.runtime.rng(conversation["seed"])
            rng.bit_generator.state = facts["draws"]
            copy = _copy(file, facts, seen)
        except KvcapError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise file.corrupt(f"what it says cannot be ({error!r})") from error
        held = len(copy.tensors["tokens"]) if seen else 0
        if held > cache.context.cells:
            raise SessionFileForeign(
                f"{str(path)!r} holds {held:,} tokens, and there are {cache.context.cells:,} "
                f"cells; load it with a budget of {facts['budget_tokens']:,} slots"
            )
        before, kept = session.loop.copied(), list(cache.pinned_spans)
        cache.set_pins(merged((a, b) for a, b in facts["pinned_spans"]))  # may refuse
        try:
            session.loop.go_on_from(_for(copy, session))
        except KvcapError as error:
            session.loop.go_on_from(before)
            cache.set_pins(kept)
            raise file.corrupt("llama.cpp does not take its cells") from error
        cache.evict()
        session.generation = generation
        session.take_over(conversation, rng)


def _copy(file: SessionFile, facts: Mapping[str, Any], seen: int) -> CacheCopy:
    """Return the saved cells, checked against each other."""
    if not seen:
        return CacheCopy({"seen": 0}, {})
    found: dict[str, NDArray[Any]] = {}
    for name in TENSORS:
        if name not in file.names:
            raise ValueError(f"{name} is missing")
        found[name] = file.tensor(name)
    tokens, places = found["tokens"], found["places"]
    for array in (tokens, places):
        if array.dtype != np.int64 or array.ndim != 1 or (np.diff(array) <= 0).any():
            raise ValueError("tokens are in no order")
    if not len(tokens) or len(tokens) != len(places) or tokens[0] < 0 or tokens[-1] >= seen:
        raise ValueError("tokens are none that were read")
    if places[0] < 0 or found["state"].dtype != np.uint8:
        raise ValueError("cells are none that can be")
    return CacheCopy({"seen": seen, "compact": bool(facts.get("compact"))}, found)


def _for(copy: CacheCopy, session: Session) -> CacheCopy:
    """Return a saved copy as the context of a session takes it."""
    context = session.cache.context
    if not copy.tensors:
        return copy
    state = for_streams(copy.tensors["state"], context.sequences, context.model)
    return CacheCopy(copy.facts, {**copy.tensors, "state": state})


def identity_of(model: LlamaModel, kv_dtype: str | None) -> dict[str, Any]:
    """Return all that must agree for saved cells to be usable."""
    return {
        "backend": BACKEND,
        "fingerprint": f"{model.description}, {model.nbytes} bytes, {model.vocabulary} tokens",
        "library": ".".join(model.library.version.split(".")[:2]),
        "kv_dtype": kv_dtype,
    }


def _check_identity(facts: dict[str, Any], mine: dict[str, Any], path: str) -> None:
    if facts.get("backend") != BACKEND:
        raise SessionFileForeign(
            f"{path!r} was saved by another backend (model {facts.get('model')!r}), and this is "
            "llama.cpp; load it with --backend torch or onnxruntime and that model"
        )
    if facts.get("fingerprint") != mine["fingerprint"]:
        raise SessionFileForeign(
            f"{path!r} was saved by another model, {facts.get('model')!r}; load it with that one"
        )
    for name, value in mine.items():
        if facts.get(name) != value:
            raise SessionFileForeign(
                f"{path!r} was saved with {name} {facts.get(name)!r}, this is {value!r}; start "
                "with the saved one"
            )
