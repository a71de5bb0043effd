"""Tries on a few tokens whether a decoder that counts positions by its slots can evict.

The decoder runs as it will in use: past and present are bound to one buffer, and the free slots
hold numbers that must not matter. (A graph that depends on its past's length gets separate arrays.)
Such a graph ignores a mask, so a run over masked slots cannot be the reference. Instead every slot
is held twice: softmax over each key and value twice gives the same result, provided that keys are
rotated to the positions of their new slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcap.export.adopted.grouped import OTHER, Nodes
from kvcap.export.adopted.signature import DecoderPorts
from kvcap.runtime.backends.onnxruntime.graph import TYPES
from kvcap.runtime.backends.onnxruntime.grouped import IDS, KEPT, MASK, PLACES
from kvcap.runtime.errors import ShapeError, UnsupportedModel, first_line
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import moved_by

Array = NDArray[Any]
TOKENS, FIRST = 12, 8
CAPACITY = 2 * (TOKENS + 1) + 3
FREE = 7.5  # the number that free slots are filled with
SAME = {"float32": 1e-3, "float16": 3e-2}  # error allowed, relative to the largest logit
ROUNDED = 0.1  # error allowed if activations are rounded to integers, by one scale for a block


@dataclass(frozen=True)
class TrialCache:
    """A decoder's cache before or after a run."""

    slots: dict[str, Array]  # [1, K, n, D], by port without its prefix: 'N.key', 'N.value'
    states: dict[str, Array]  # recurrent states, by input

    @property
    def length(self) -> int:
        """Return how many slots of each head are in use."""
        return int(next(iter(self.slots.values())).shape[2])


class GroupedTrial:
    """A trial that runs a grouped decoder on random tokens."""

    def __init__(self, decoder: DecoderPorts, nodes: Nodes, vocabulary: int) -> None:
        self.decoder, self.nodes, self.vocabulary = decoder, nodes, vocabulary
        self.ids = np.random.default_rng(0).integers(0, vocabulary, (1, TOKENS + 1))
        slots = np.zeros((1, decoder.kv_heads, 0, decoder.head_dim), decoder.cache)
        self.ports = [f"{i}.{kind}" for i in nodes.layers for kind in ("key", "value")]
        self.empty = TrialCache(
            dict.fromkeys(self.ports, slots),
            {state.name: np.zeros(state.shape, state.dtype) for state in nodes.states},
        )

    def run(self, ids: Array, held: TrialCache, in_place: bool = True) -> tuple[Array, TrialCache]:
        """Run the decoder; return its logits [T or 1, V], and the cache afterwards.

        Args:
            ids: tokens [1, T].
            held: the cache before the run.
            in_place: bind past and present to one buffer, if the graph allows it.

        Raises:
            UnsupportedModel: the graph cannot read these tokens after that cache.
        """
        past, length = held.length, ids.shape[1]
        whole = past + length
        inputs: dict[str, Array] = {IDS: ids, MASK: np.ones((1, whole), np.int64)}
        more = {PLACES: np.arange(past, whole)[None], KEPT: np.array(1, np.int64)}
        inputs |= {name: x for name, x in more.items() if name in self.decoder.graph.inputs}
        inputs |= held.states
        names = {state.name: state.present for state in self.nodes.states}
        try:
            shared = in_place and self.nodes.one_buffer
            outputs = (self._in_place if shared else self._separate)(inputs, held, whole)
        except UnsupportedModel:
            raise
        except Exception as error:  # ONNX Runtime's classes have no common base
            raise UnsupportedModel(
                f"{self.decoder.file.name} cannot read {length} tokens after {past}: "
                f"{first_line(error)[:200]}"
            ) from error
        states = {name: outputs[present] for name, present in names.items()}
        slots = {port: outputs[f"present.{port}"] for port in self.ports}
        return outputs["logits"][0].astype(np.float64), TrialCache(slots, states)

    def _separate(self, inputs: dict[str, Array], held: TrialCache, whole: int) -> dict[str, Array]:
        inputs |= {f"past_key_values.{port}": x for port, x in held.slots.items()}
        session = self.decoder.graph.session
        names = list(self.decoder.graph.outputs)
        return dict(zip(names, session.run(names, inputs), strict=True))

    def _in_place(self, inputs: dict[str, Array], held: TrialCache, whole: int) -> dict[str, Array]:
        graph, decoder = self.decoder.graph, self.decoder
        shape = (1, decoder.kv_heads, CAPACITY, decoder.head_dim)
        buffers = {port: np.full(shape, FREE, decoder.cache) for port in self.ports}
        for port, x in held.slots.items():
            buffers[port][:, :, : held.length] = x
        length = inputs[IDS].shape[1]
        rows = 1 if KEPT in inputs or self.nodes.last_only else length
        kind = TYPES[graph.outputs["logits"].type]
        made = {state.present: np.zeros(state.shape, state.dtype) for state in self.nodes.states}
        made["logits"] = np.zeros((1, rows, self.vocabulary), kind)
        inputs |= {f"past_key_values.{port}": x for port, x in buffers.items()}
        outputs = {**made, **{f"present.{port}": x for port, x in buffers.items()}}
        given = {name: x if x.flags.c_contiguous else x.copy() for name, x in inputs.items()}
        try:
            graph.run_bound(graph.bind(given, outputs))
        except ShapeError as error:
            raise UnsupportedModel(
                f"{decoder.file.name} cannot write behind the slots in use ({error}); {OTHER}"
            ) from error
        return {**made, **{f"present.{port}": x[:, :, :whole] for port, x in buffers.items()}}

    def same(self, one: Array, other: Array) -> bool:
        """Return whether two runs' logits of the last token agree."""
        share = ROUNDED if self.nodes.rounds else SAME[str(self.decoder.cache)]
        return bool(np.abs(one[-1] - other[-1]).max() <= share * np.abs(one[-1]).max())


def checked(decoder: DecoderPorts, nodes: Nodes, shape: ModelShape) -> Nodes:
    """Try a decoder; return its nodes' facts, with `last_only` set.

    Raises:
        UnsupportedModel: the decoder cannot run over slots in place, or is wrong once tokens are
            evicted; the message names the run that differs.
    """
    name = decoder.file.name
    trial = GroupedTrial(decoder, nodes, shape.vocabulary)
    ids, last = trial.ids[:, :TOKENS], trial.ids[:, TOKENS:]
    rows, past = trial.run(ids, trial.empty, in_place=False)
    if len(rows) not in (1, TOKENS) or rows.shape[1] != shape.vocabulary:
        raise UnsupportedModel(
            f"{name} gives logits {list(rows.shape)} for {TOKENS} tokens, and config.json says a "
            f"vocabulary of {shape.vocabulary}; they are not of one model"
        )
    trial.nodes = nodes = replace(nodes, last_only=len(rows) == 1)
    wanted, after = trial.run(last, past, in_place=False)
    if not np.isfinite(wanted).all():
        raise UnsupportedModel(f"{name} gives logits that are no numbers")

    def must(agrees: bool, what: str) -> None:
        if not agrees:
            raise UnsupportedModel(f"{name} computes something else {what}; {OTHER}")

    _, written = trial.run(ids, trial.empty)
    got, _ = trial.run(last, written)
    must(trial.same(wanted, got), "where past and present are one buffer")
    _, half = trial.run(ids[:, :FIRST], trial.empty)
    _, halves = trial.run(ids[:, FIRST:], half)
    got, _ = trial.run(last, halves)
    must(trial.same(wanted, got), "when a prompt is read in blocks")
    got, _ = trial.run(last, _shuffled(past))
    must(trial.same(wanted, got), "when slots lie in another order: it goes by where they lie")
    turned = _twice(past, after, shape, turn=True)
    got, _ = trial.run(last, turned)
    must(
        trial.same(wanted, got),
        "when keys are moved: it rotates by other angles than config.json says, or does not count "
        "positions by the slots in use",
    )
    if any(shape.layers[i].rope for i in nodes.layers):
        got, _ = trial.run(last, _twice(past, after, shape, turn=False))
        must(not trial.same(wanted, got), "nowhere when keys are not moved: it has no positions")
    return nodes


def _shuffled(held: TrialCache) -> TrialCache:
    """Return the slots of every head in another order, keys and values alike."""
    draws, moved = np.random.default_rng(1), dict[str, Array]()
    for port, x in held.slots.items():
        if port.endswith("key"):
            order = draws.permuted(np.tile(np.arange(held.length), (x.shape[1], 1)), axis=1)
        moved[port] = np.take_along_axis(x, order[None, :, :, None], axis=2)
    return replace(held, slots=moved)


def _twice(past: TrialCache, after: TrialCache, shape: ModelShape, turn: bool) -> TrialCache:
    """Return a cache that holds each slot of `past` twice, and that of the last token once.

    Once that token is read again, its slot is there twice as well, and its logits are the same as
    after `past`.

    Args:
        past: the cache before the last token; its recurrent states are kept.
        after: the cache after it.
        shape: the model's shape, with the angles that keys are rotated by.
        turn: rotate keys on by as many positions as the token is read later.
    """
    moved = {}
    for port, x in after.slots.items():
        layer, _, kind = port.partition(".")
        rope = shape.layers[int(layer)].rope
        if kind == "key" and turn and rope is not None:
            x = moved_by(rope, torch.from_numpy(x), past.length + 1).numpy()
        moved[port] = np.concatenate((x, x[:, :, : past.length]), axis=2)
    return replace(past, slots=moved)
