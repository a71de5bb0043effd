"""Saves a conversation of the ONNX Runtime backend in a session's file, and restores it.

The file is that of `session/file.py`. Its slots are as the graph has them, so it only goes on under
the same decoder, positions, policy and budget. All is checked before anything is changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvcap import __version__
from kvcap.runtime.backends.numpy_sampler import Generation
from kvcap.runtime.backends.onnxruntime.decoder import slots_in_use
from kvcap.runtime.cache.pinned_slots import merged
from kvcap.runtime.errors import KvcapError, SessionFileForeign
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.session import file as session_file
from kvcap.runtime.session.file import SessionFile, check_conversation, checked_facts, generation_of
from kvcap.runtime.session.session import Session

BACKEND = "onnxruntime"


def save(session: Session, identity: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the slots in use and everything else; `identity` is that of `identity_of`.

    Raises:
        SessionNotSaved: an earlier file is as it was.
    """
    cache = session.cache
    held = list(cache.decoder.held)
    state = cache.decoder.state(cache.seen, held) if cache.seen else {}
    facts = {
        "kvcap": __version__,
        "model": f"{session.runtime.name} (ONNX Runtime)",
        "revision": None,
        **identity,
        "seen": cache.seen,
        "held": held,
        "pinned_spans": session.recall.lasting(cache.pinned_spans),
        "conversation": session.conversation,
        "generation": asdict(session.generation),
        "draws": session.rng.bit_generator.state,
    }
    tensors = {f"state.{name}": [array] for name, array in state.items()}
    session_file.write(path, tensors, facts)


def restore(
    session: Session, identity: dict[str, Any], vocabulary: int, path: str | os.PathLike[str]
) -> None:
    """Turn `session` into the saved one; its runtime has that identity and vocabulary.

    Raises:
        SessionFileForeign: it was saved by another backend or decoder, or under other settings.
        SessionFileCorrupt: no session can be so. Nothing is changed by either.
        PinsTooLarge: the pinned tokens do not fit.
    """
    with SessionFile(path, "np") as file:
        facts = checked_facts(file)
        _check_identity(facts, identity, str(path))
        check_conversation(file, vocabulary)
        conversation, seen = facts["conversation"], facts["seen"]
        try:
            generation = Generation.of(generation_of(facts["generation"]))
            rng = session.runtime.rng(conversation["seed"])
            rng.bit_generator.state = facts["draws"]
            held = _held(session, facts, seen)
            slots = _slots(session, file, seen, held)
        except KvcapError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise file.corrupt(f"what it says cannot be ({error!r})") from error
        cache = session.cache
        cache.set_pins(merged((a, b) for a, b in facts["pinned_spans"]))  # may refuse
        cache.seen, cache.decoder.held = seen, held
        for name, array in (cache.decoder.state(seen, held) if seen else {}).items():
            array[...] = slots[name]
        session.generation = generation
        session.take_over(conversation, rng)


def _held(session: Session, facts: Mapping[str, Any], seen: int) -> list[int]:
    """Return the slots in use by layer; older files lack them, and evict after every token."""
    budgets = session.cache.decoder.budgets
    held = facts.get("held") or [slots_in_use(budget, seen) for budget in budgets]
    numbers = all(type(slots) is int for slots in held) and len(held) == len(budgets)
    if not numbers or (not seen and any(held)):
        raise ValueError(f"held: {str(held)[:100]}")
    return list(held)


def _slots(session: Session, file: SessionFile, seen: int, held: Sequence[int]) -> dict[str, Any]:
    """Return the saved slots, checked against the decoder's shapes after so many tokens."""
    decoder = session.cache.decoder
    expected = decoder.state(seen, held) if seen else {}
    found = {
        name: file.taken(f"state.{name}", array.shape, array.dtype)
        for name, array in expected.items()
    }
    for name, array in found.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} holds numbers that are none")
        if (
            name.startswith("shifts")
            and not ((array >= 0) & (array < len(decoder.turns.table))).all()
        ):
            raise ValueError(f"{name} are none that keys can have")
        if name.startswith("positions"):
            rows = array.reshape(-1, array.shape[-1])
            inside = (rows >= 0).all() and (rows < seen).all()
            if not inside or not (np.diff(np.sort(rows, axis=1), axis=1) > 0).all():
                raise ValueError(f"{name} are none that slots can have")
    return found


def identity_of(entry: Mapping[str, Any], fingerprint: str, plan: MemoryPlan) -> dict[str, Any]:
    """Return all that must agree for saved slots to be usable; `entry` is the manifest's."""
    policy = {"name": entry["policy"]["name"], "parameters": entry["policy"]["parameters"]}
    return {
        "backend": BACKEND,
        "fingerprint": fingerprint,
        "dtype": plan.dtype,
        "positions": plan.positions,
        "policy": policy["name"],
        "parts": policy,
        "budget_tokens": plan.budget_tokens,
    }


def _check_identity(facts: dict[str, Any], mine: dict[str, Any], path: str) -> None:
    if facts.get("backend") != BACKEND:
        raise SessionFileForeign(
            f"{path!r} was saved by the PyTorch backend (model {facts.get('model')!r}), and this "
            "is the ONNX Runtime backend; load it with --backend torch and that model"
        )
    if facts.get("fingerprint") != mine["fingerprint"]:
        raise SessionFileForeign(
            f"{path!r} was saved by another decoder, {facts.get('model')!r}; load it with that one"
        )
    for name, value in mine.items():
        if facts.get(name) != value:
            raise SessionFileForeign(
                f"{path!r} was saved with {name} {facts.get(name)!r}, this is {value!r}; start "
                "with the saved one"
            )
