"""Repeats a layer of a traced graph: three layers are traced, and the rest are like the third.

Tracing takes seconds a layer. Where layers differ by their weights and their held state alone, the
second and the third of three traced layers show what a layer is: nodes that are the same but for
numbered names, and what one layer hands to the next. Both must agree node by node, or nothing is
done. Knows ONNX graphs and how their inputs are numbered; no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal, NamedTuple

TRACED = 3  # layers: the first, which computes what all share, and two that are compared


class Numbered(NamedTuple):
    """A pattern that finds a layer's number in the names of its inputs and outputs."""

    pattern: re.Pattern[str]  # the number is its first group

    def of(self, name: str) -> int | None:
        """Return the number of the layer that a name belongs to; None: of no layer."""
        found = self.pattern.search(name)
        return None if found is None else int(found[1])

    def at(self, name: str, layer: int) -> str:
        """Return the name with this number in it instead."""
        found = self.pattern.search(name)
        assert found is not None
        return f"{name[: found.start(1)]}{layer}{name[found.end(1) :]}"


Naming = tuple[Literal["own", "numbered", "shared", "before"], str]  # whose output, which name


class _Step(NamedTuple):
    """A node of a layer, with the names that its inputs have in another layer."""

    node: Any
    inputs: list[Naming]


def repeat(model: Any, numbered: Numbered, layers: int) -> bool:
    """Make an onnx.ModelProto of `TRACED` layers one of `layers`, in place.

    Args:
        model: traced; the lengths of what its layers hold are equal.
        numbered: of its inputs, and of its outputs.
        layers: as many as are wanted, at least `TRACED`.

    Returns:
        Whether it could be done; else nothing of the model has changed its meaning.
    """
    graph = model.graph
    _share_lengths(graph, numbered)
    levels = _levels(graph, numbered)
    second = [node for node, level in zip(graph.node, levels, strict=True) if level == 1]
    after = [node for node, level in zip(graph.node, levels, strict=True) if level == TRACED - 1]
    third, rest = after[: len(second)], after[len(second) :]
    pairs = dict[str, str]()  # outputs of the second layer: the third layer's
    steps = _compare(graph, second, third, numbered, pairs)
    if (
        steps is None
        or any(
            name in pairs
            for node in rest
            for name in node.input  # nodes behind the last layer
        )
        or any(numbered.of(name) is not None for node in rest for name in node.output)
    ):
        return False
    before, nodes = pairs, list[Any]()
    for layer in range(TRACED, layers):
        own = {name: _named(name, layer, numbered) for name in pairs}
        nodes += [_made(step, layer, numbered, own, before) for step in steps]
        before = own
    last = {pairs[name]: before[name] for name in pairs}
    for node in rest:
        node.input[:] = [last.get(name, name) for name in node.input]
    moved = {id(node) for node in rest}
    _set(graph.node, [*(node for node in graph.node if id(node) not in moved), *nodes, *rest])
    for values in (graph.input, graph.output):
        _set(values, list(_values(values, numbered, layers)))
    return True


def _share_lengths(graph: Any, numbered: Numbered) -> None:
    """Take the lengths of what is held from the first layer, as they are equal in all."""
    for node in graph.node:
        if node.op_type == "Shape" and numbered.of(node.input[0]) is not None:
            node.input[0] = numbered.at(node.input[0], 0)


def _levels(graph: Any, numbered: Numbered) -> list[int]:
    """Return for each node the layer that it belongs to; -1 where all layers share it.

    That is the last one it depends on; but what reads no input of a layer, such as the sum behind
    one or the mean before the next, belongs to the first layer that reads it.
    """
    number = {value.name: numbered.of(value.name) for value in graph.input}
    of = {name: -1 if layer is None else layer for name, layer in number.items()}
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        lengths = node.op_type == "Shape" and node.input[0] in number
        level = -1 if lengths else max((of.get(name, -1) for name in node.input), default=-1)
        of |= dict.fromkeys(filter(None, node.output), level)  # "" is an output that is left out
        if node.op_type == "Transpose":  # a weight, as products read it
            number[node.output[0]] = number.get(node.input[0])
    reader: dict[str, int] = {}
    found = []
    for node in reversed(graph.node):
        level = of[node.output[0]]
        own = any(number.get(name) is not None for name in node.input)
        if level >= 0 and not own and not outputs & set(node.output):
            level = max(level, min(reader.get(name, level) for name in node.output))
        for name in filter(None, node.input):
            reader[name] = min(level, reader.get(name, level))
        found.append(level)
    return found[::-1]


def _compare(
    graph: Any, second: list[Any], third: list[Any], numbered: Numbered, pairs: dict[str, str]
) -> list[_Step] | None:
    """Return the steps of a layer, if two have the same; `pairs` gets the outputs of both."""
    if not second or len(second) != len(third):
        return None
    constants = {tensor.name: _content(tensor) for tensor in graph.initializer}
    inputs = {value.name for value in graph.input}
    mine = {name for node in second for name in node.output if name}
    steps = []
    for one, other in zip(second, third, strict=True):
        if _kind(one) != _kind(other):
            return None
        found = list[Naming]()
        for x, y in zip(one.input, other.input, strict=True):
            if x in pairs and pairs[x] == y:
                found.append(("own", x))
            elif x in inputs and numbered.of(x) == 1 and y == numbered.at(x, 2):
                found.append(("numbered", x))
            elif x == y or (x in constants and constants[x] == constants.get(y)):
                found.append(("shared", x))
            elif y in mine and not {x} & (mine | inputs | constants.keys()):
                found.append(("before", y))
            else:
                return None
        pairs |= {x: y for x, y in zip(one.output, other.output, strict=True) if x}
        steps.append(_Step(one, found))
    return steps


def _kind(node: Any) -> tuple[Any, ...]:
    """Return all that must be equal of two nodes but names."""
    attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
    return node.op_type, node.domain, len(node.input), len(node.output), attributes


def _content(tensor: Any) -> bytes:
    """Return a constant without its name."""
    copy = type(tensor).FromString(tensor.SerializeToString())
    copy.name = ""
    return bytes(copy.SerializeToString(deterministic=True))


def _named(name: str, layer: int, numbered: Numbered) -> str:
    """Return the name that an output of the second layer has in another layer."""
    return f"{name}.{layer}" if numbered.of(name) is None else numbered.at(name, layer)


def _made(
    step: _Step, layer: int, numbered: Numbered, own: dict[str, str], before: dict[str, str]
) -> Any:
    """Make a node of another layer; `before` are the outputs of the layer before it."""
    names = {"own": own, "before": before}
    node = type(step.node).FromString(step.node.SerializeToString())
    node.input[:] = [
        numbered.at(name, layer) if kind == "numbered" else names.get(kind, {}).get(name, name)
        for kind, name in step.inputs
    ]
    node.output[:] = [own.get(name, name) for name in node.output]
    return node


def _values(values: Any, numbered: Numbered, layers: int) -> Iterator[Any]:
    """Yield inputs or outputs, with those of more layers behind the third's."""
    for number, group in groupby(values, lambda value: numbered.of(value.name)):
        found = list(group)
        yield from found
        for layer in range(TRACED, layers if number == TRACED - 1 else 0):
            for value in found:
                copy = type(value).FromString(value.SerializeToString())
                copy.name = numbered.at(value.name, layer)
                yield copy


def _set(field: Any, values: list[Any]) -> None:
    """Replace what a repeated field holds."""
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)
