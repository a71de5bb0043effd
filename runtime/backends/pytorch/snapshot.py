"""Gathers everything a saved session needs from a live one, and puts it back.

A layer's slots are saved row by row in the order in which they lie in memory, so that under the
same settings a restored session computes exactly what the saved one would have. All is checked
before anything is changed.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvcap import __version__
from kvcap.policies import Eviction
from kvcap.policies.base import Component
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.restore import Refill, SavedLayers, held_by
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.errors import SessionBroken, SessionFileForeign
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.session.file import (
    SETTINGS,
    SessionFile,
    check_conversation,
    checked_facts,
    generation_of,
)
from kvcap.runtime.session.session import Session
from kvcap.runtime.types import NEUTRAL


def gather(
    session: Session, identity: dict[str, Any]
) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """Return the tensors of a session, as views where possible, and all its other facts.

    `identity` is what `identity_of` returns.

    Raises:
        SessionBroken: layers have read different tokens.
    """
    cache = session.cache
    if not cache.consistent:
        raise SessionBroken(
            "a forward pass failed half-way, so the session is no state to save; reset it (in "
            "chat: /clear) and go on"
        )
    tensors, held = held_by(cache)
    if cache.seen and (short := cast(BlockLoop, session.loop).read_short):
        tensors["short"] = [torch.cat(short, 1).cpu()]
    facts = {
        "kvcap": __version__,
        **identity,
        "policy": cache.eviction.name,
        "parts": parts(cache.eviction),
        "budget_tokens": cache.layout.budget_tokens,
        "block_size": cache.block_size,
        "allotments": cache.layout.allotments,
        **held,
        "pinned_spans": session.recall.lasting(cache.pinned_spans),
        "conversation": session.conversation,
        "generation": settings(session.generation),
    }
    return {"draws": [session.rng.get_state()], **tensors}, facts


def settings(generation: GenerationConfig) -> dict[str, Any]:
    """Return the settings of generation that a session saves, for any version of transformers."""
    given = {name: getattr(generation, name, None) for name in SETTINGS}
    return {**NEUTRAL, **{name: value for name, value in given.items() if value is not None}}


def restore(session: Session, identity: dict[str, Any], vocabulary: int, file: SessionFile) -> None:
    """Make `session` the saved one; its runtime has that identity and vocabulary.

    Raises:
        SessionFileForeign: another model, dtype or position mode, or a policy that cannot go on.
        SessionFileCorrupt: no session can be so. Nothing is changed by either.
        PinsTooLarge: the pinned tokens do not fit the budget.
    """
    facts = checked_facts(file)
    _check_identity(facts, identity, file.path)
    check_conversation(file, vocabulary)
    runtime: Any = session.runtime
    generation, conversation = copy.deepcopy(runtime.generation), facts["conversation"]
    for name, value in generation_of(facts["generation"]).items():
        setattr(generation, name, value)
    with file.corrupt_if_wrong():
        rng = runtime.rng(conversation["seed"])
        rng.set_state(file.taken("draws", tuple(rng.get_state().shape), torch.uint8))
        as_saved = with_saved_sinks(facts, session.cache, runtime.settings.eviction)
    own = as_saved == session.cache.eviction
    loop = cast(BlockLoop, session.loop if own else runtime.loop_for(as_saved))
    with file.corrupt_if_wrong():
        exact = continues(facts, loop.cache, file.path)
        refill = Refill(SavedLayers(loop.cache, file, exact).checked())
        short = _read_short(file, vocabulary, loop)
    session.read_by(loop)
    refill.run()
    loop.read_short = short
    session.generation = generation
    session.take_over(conversation, rng)


def _read_short(file: SessionFile, vocabulary: int, loop: BlockLoop) -> list[Tensor]:
    """Return the tokens that a saved session has read by the short factors of longrope, if any."""
    if "short" not in file.names:
        return []
    ids = file.taken("short", (1, file.facts["seen"]), torch.int64)
    if loop.short is None or not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise file.corrupt("the tokens that were read by other factors of longrope cannot be so")
    return [ids.to(loop.model.device)]


def with_saved_sinks(facts: Any, cache: BudgetCache, requested: Eviction) -> Eviction:
    """Return the eviction under which a saved session goes on, in a cache of this one's sizes.

    It pins as many first tokens as it was saved with, unless a number was `asked` for: more pins
    would not bring evicted tokens back. It pins fewer if a smaller budget does not hold them, and
    the usual number under another policy.
    """
    if requested.sink_tokens is not None:
        return requested
    layout = cache.layout
    sizes = layout.budget_tokens, len(layout.shape.capped), layout.shape.kv_heads
    count = facts["parts"].get("pins", [0])[0]
    if type(count) is not int:
        raise ValueError(f"first tokens that are pinned: {count!r}")
    wanted = requested.with_sinks(*sizes)
    as_saved = replace(wanted, sink_tokens=count)
    if parts(as_saved) == _with_defaults(facts["parts"], as_saved):
        numbers = range(min(count, sizes[0]), -1, -1)
        fewer = (replace(as_saved, sink_tokens=n, sinks_yield=n > 0) for n in numbers)
        wanted = next((one for one in fewer if one.holds(*sizes)), wanted)
    return wanted


def continues(facts: Any, cache: BudgetCache, path: str) -> bool:
    """Return whether the cache goes on exactly as the saved one; else its policy takes it over.

    A policy can take over a cache if the file has all that it needs of the past: the state of equal
    parts, and as many queries as its window holds.

    Raises:
        SessionFileForeign: it cannot.
    """
    mine, layout = parts(cache.eviction), cache.layout
    saved = _with_defaults(facts["parts"], cache.eviction)
    if mine == saved and facts["allotments"] == layout.allotments:
        return bool(facts["block_size"] == cache.block_size)
    if not facts["seen"]:
        return False
    name = cache.eviction.name
    refused = f"{path!r} was saved under policy {facts['policy']!r}, which {name!r} cannot take up"
    stateful = [slot for slot, c in _components(cache.eviction).items() if c.state]
    for slot in [*stateful, *(["saliency"] if stateful else [])]:
        if mine.get(slot) != saved.get(slot):
            raise SessionFileForeign(
                f"{refused}: it needs its own figures of every token; use {facts['policy']!r} "
                "with the options it had, or a policy without state, such as keydiff"
            )
    if layout.window_length > facts["layers"][0]["ring"]:
        raise SessionFileForeign(
            f"{refused}: it observes the last {layout.window_length} queries and the file has "
            f"{facts['layers'][0]['ring']}; use {facts['policy']!r} or a smaller window"
        )
    if not cache.eviction.policy.evicts:
        held = max(max(layer["held"]) for layer in facts["layers"])
        if held > layout.budget_tokens:
            raise SessionFileForeign(
                f"{refused}: it never evicts and {held} tokens are held; use a budget of {held}"
            )
    return False


def parts(eviction: Eviction) -> dict[str, Any]:
    """Return the parts of an eviction with their options, as JSON keeps them.

    Options that only say where memory lies are left out.
    """
    facts: dict[str, Any] = {
        slot: [f"{type(c).__module__}.{type(c).__qualname__}", _placeless(c, c.options())]
        for slot, c in _components(eviction).items()
    }
    facts["pins"] = [eviction.sink_tokens, eviction.recent_tokens]
    kept: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return kept


def _with_defaults(saved: dict[str, Any], eviction: Eviction) -> dict[str, Any]:
    """Return saved parts, with defaults for options that the file's version did not have."""
    completed = dict(saved)
    for slot, part in _components(eviction).items():
        kind, options = saved.get(slot) or (None, dict[str, Any]())
        if kind == parts(eviction)[slot][0]:
            defaults = {f.name: f.default for f in fields(part) if f.name not in options}
            completed[slot] = [kind, _placeless(part, {**options, **defaults})]
    return completed


def _placeless(part: Component, options: dict[str, Any]) -> dict[str, Any]:
    """Return options without those that say where memory lies."""
    return {name: value for name, value in options.items() if name not in part.placing}


def _components(eviction: Eviction) -> dict[str, Component]:
    slots = {f.name: getattr(eviction, f.name) for f in fields(eviction)}
    return {name: part for name, part in slots.items() if isinstance(part, Component)}


def identity_of(
    model: Any,
    name: str,
    positions: str,
    kv_dtype: str | None = None,
    weights: str | None = None,
) -> dict[str, Any]:
    """Return all facts that must agree for a saved session's keys and values to be usable."""
    return {
        "model": name,
        "revision": getattr(model.config, "_commit_hash", None),
        "fingerprint": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "positions": positions,
        "kv_dtype": kv_dtype,
        "weights": weights,
    }


def _named(identity: dict[str, Any]) -> str:
    """Return a model's name for people, with its revision where it has one."""
    revision = identity.get("revision")
    return f"{identity['model']!r}" + (f" (revision {revision})" if revision else "")


def _check_identity(facts: dict[str, Any], mine: dict[str, Any], path: str) -> None:
    if facts.get("backend", "torch") != "torch":
        raise SessionFileForeign(
            f"{path!r} was saved by another backend, as {facts['model']!r}, and this is the "
            f"PyTorch backend; load it with --backend {facts['backend']} and that model"
        )
    _check_option(facts, mine, path, "weights", " --backend torch")
    # Fingerprints depend on the dtype of weights; in another dtype models are compared by name.
    same_dtype, same_name = (facts[name] == mine[name] for name in ("dtype", "model"))
    if facts["fingerprint"] != mine["fingerprint"] and (same_dtype or not same_name):
        saved, this = _named(facts), _named(mine)
        also = "" if same_dtype else f" and --dtype {facts['dtype']}"
        if saved == this:
            raise SessionFileForeign(
                f"{path!r} was saved by model {saved} when it had other weights, or other factors "
                "of its rotary embedding; load it with the files that it had, and if those are "
                f"unchanged with its budget of {facts['budget_tokens']:,} slots and blocks of "
                f"{facts['block_size']:,}, by which RoPE of type longrope chooses its factors"
            )
        raise SessionFileForeign(
            f"{path!r} was saved by model {saved}, and this is {this}; load it with that one{also}"
        )
    for name in ("dtype", "positions", "kv_dtype"):
        _check_option(facts, mine, path, name)


def _check_option(
    facts: dict[str, Any], mine: dict[str, Any], path: str, name: str, more: str = ""
) -> None:
    """Refuse a file that was saved with another value of an option, and say how to start."""
    option, saved, own = "--" + name.replace("_", "-"), facts.get(name), mine[name]
    if saved != own:
        how, this = (
            f"without {option}" if x is None else f"with {option} {x}{more}" for x in (saved, own)
        )
        raise SessionFileForeign(f"{path!r} was saved {how}, and this one runs {this}; start {how}")


def fingerprint(model: Any) -> str:
    """Return a digest of a model's shape, its positions and a few values of every weight.

    The config is not part of it, as its fields differ between versions of transformers.
    """
    shape = ModelShape.of(model.config.get_text_config(decoder=True))
    total = hashlib.sha256()
    for layer in shape.layers:
        rope = layer.rope
        window = layer.window if layer.kind == "sliding" else None
        turns = [] if rope is None or rope.inv_freq is None else rope.inv_freq.tolist()
        facts = (window, rope and rope.kind, [f"{x:.6g}" for x in turns])
        total.update(repr(facts).encode())
    total.update(repr(replace(shape, layers=())).encode())
    for name, weight in model.named_parameters():
        some = weight.detach()
        while some.dim() > 1:
            some = some[0]
        if type(some) is not Tensor:  # torchao's rows have no views
            some = some.dequantize()
        total.update(
            f"{name} {tuple(weight.shape)} {some.reshape(-1)[:4].float().tolist()}".encode()
        )
    return total.hexdigest()
