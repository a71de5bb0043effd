"""Repeats the layers of a traced graph: a few are traced, and the rest are like one of them.

Tracing takes seconds a layer. Where layers of one kind differ by their weights and their held state
alone, one traced layer shows what each of its kind is: nodes, and what it reads of the layer
before. The second and the last traced layer are of one kind and must agree node by node, or nothing
is done. Knows ONNX graphs and how their inputs are numbered; no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple


class Numbered(NamedTuple):
    """A pattern that finds a layer's number in the names of its inputs and outputs."""

    pattern: re.Pattern[str]  # the number is its first group

    def of(self, name: str) -> int | None:
        """Return the number of the layer that a name belongs to; None: of no layer."""
        match = self.pattern.search(name)
        return None if match is None else int(match[1])

    def at(self, name: str, layer: int) -> str:
        """Return the name with this number in it instead."""
        match = self.pattern.search(name)
        assert match is not None
        return f"{name[: match.start(1)]}{layer}{name[match.end(1) :]}"


Naming = tuple[Literal["own", "numbered", "shared", "before"], str]  # whose output, which name


class _Step(NamedTuple):
    """A node of a layer, with the names that its inputs have in another layer."""

    node: Any
    inputs: list[Naming]


class _Example(NamedTuple):
    """A traced layer, by which all of its kind are made.

    What a layer hands to the next are a few tensors, in the order in which the next reads them.
    """

    layer: int
    steps: list[_Step]
    reads: list[str]  # names of the layer before
    gives: list[str]  # names that the next layer reads

    @property
    def outputs(self) -> list[str]:
        """Return the names of all outputs of its nodes."""
        return [name for step in self.steps for name in step.node.output if name]


def repeat(model: Any, numbered: Numbered, traced: int, kinds: Sequence[int]) -> bool:
    """Make an onnx.ModelProto of the first layers one of all, in place.

    Args:
        model: the trace.
        numbered: of its inputs, and of its outputs.
        traced: how many layers it has, from `depth.enough`.
        kinds: of all layers that are wanted, a number each; lengths of what is held are equal
            within a kind.

    Returns:
        Whether it could be done; else nothing of the model has changed its meaning.
    """
    graph = model.graph
    _share_lengths(graph, numbered, kinds)
    levels = _levels(graph, numbered, traced)
    *groups, rest = (
        [node for node, level in zip(graph.node, levels, strict=True) if level == layer]
        for layer in range(traced + 1)
    )
    examples = _examples(graph, groups, rest, numbered, kinds)
    if examples is None:
        return False
    before, nodes = examples[kinds[1]].gives, list[Any]()
    for layer in range(traced, len(kinds)):
        example = examples[kinds[layer]]
        own = {name: _named(name, layer, numbered) for name in example.outputs}
        handed = dict(zip(example.reads, before, strict=True))
        nodes += [_made(step, layer, numbered, own, handed) for step in example.steps]
        before = [own[name] for name in example.gives]
    last = dict(zip(examples[kinds[1]].gives, before, strict=True))
    for node in rest:
        node.input[:] = [last.get(name, name) for name in node.input]
    moved = {id(node) for node in rest}
    _set(graph.node, [*(node for node in graph.node if id(node) not in moved), *nodes, *rest])
    more = [(layer, examples[kinds[layer]].layer) for layer in range(traced, len(kinds))]
    for values in (graph.input, graph.output):
        _set(values, [*values, *_values(values, numbered, more)])
    return True


def _share_lengths(graph: Any, numbered: Numbered, kinds: Sequence[int]) -> None:
    """Read a kind's held lengths from its first layer alone, since all its layers have the same."""
    for node in graph.node:
        layer = numbered.of(node.input[0]) if node.op_type == "Shape" else None
        if layer is not None:
            node.input[0] = numbered.at(node.input[0], kinds.index(kinds[layer]))


def _levels(graph: Any, numbered: Numbered, traced: int) -> list[int]:
    """Return the layer of each node: -1 where all share it, `traced` behind the last.

    That is the last one it depends on; but what reads no input of a layer, such as the sum behind
    one or the mean before the next, belongs to the first layer that reads it.
    """
    number = {value.name: numbered.of(value.name) for value in graph.input}
    of = {name: -1 if layer is None else layer for name, layer in number.items()}
    held = {x.name for x in graph.output if numbered.of(x.name) is not None}
    ends = {x.name for x in graph.output}.difference(held)
    for node in graph.node:
        lengths = node.op_type == "Shape" and node.input[0] in number
        level = -1 if lengths else max((of.get(name, -1) for name in node.input), default=-1)
        of |= dict.fromkeys(filter(None, node.output), level)  # "" is an output that is left out
        if node.op_type == "Transpose":  # a weight, as products read it
            number[node.output[0]] = number.get(node.input[0])
    reader = dict.fromkeys(ends, traced)
    levels = []
    for node in reversed(graph.node):
        level = of[node.output[0]]
        own = any(number.get(name) is not None for name in node.input)
        if level >= 0 and not own and not held & set(node.output):
            readers = [reader[name] for name in node.output if name in reader]
            level = max(level, min(readers, default=level))
        for name in filter(None, node.input):
            reader[name] = min(level, reader.get(name, traced))
        levels.append(level)
    return levels[::-1]


def _examples(
    graph: Any, groups: list[list[Any]], rest: list[Any], numbered: Numbered, kinds: Sequence[int]
) -> dict[int, _Example] | None:
    """Return a traced layer of every kind; None where layers are not alike, or read others.

    Args:
        graph: of all nodes.
        groups: nodes of each traced layer.
        rest: nodes behind them.
        numbered: of inputs and outputs.
        kinds: of layers.
    """
    outputs = [{name for node in group for name in node.output if name} for group in groups]
    last = len(groups) - 1
    # The second layer stands for no kind: what it reads of the first may be shared by all layers.
    like = {kinds[layer]: layer for layer in range(2, len(groups))}
    constants = {tensor.name: _content(tensor) for tensor in graph.initializer}
    if any({*node.input} & own for node in rest for own in outputs[:-1]):
        return None
    examples = dict[int, _Example]()
    for kind, layer in like.items():
        theirs = set[str]().union(*outputs[1 : layer - 1])  # of layers before the one before
        steps, before = list[_Step](), outputs[layer - 1]
        for node in groups[layer]:
            names = list[Naming]()
            for name in node.input:
                number = numbered.of(name)
                if name in theirs or number not in (None, layer):
                    return None
                if name in outputs[layer]:
                    names.append(("own", name))
                elif name in before:
                    names.append(("before", name))
                else:
                    names.append(("shared" if number is None else "numbered", name))
            steps.append(_Step(node, names))
        after = rest if layer == last else groups[layer + 1]
        reads, gives = _read(groups[layer], before), _read(after, outputs[layer])
        examples[kind] = _Example(layer, steps, reads, gives)
    if (
        not examples
        or len({len(x) for each in examples.values() for x in (each.reads, each.gives)}) > 1
    ):
        return None
    handed, later = _read(groups[2], outputs[1]), set[str]().union(*outputs[1:])
    first = {name for node in graph.node for name in node.output}.difference(later)
    example = examples[kinds[1]]
    alike = len(groups[1]) == len(example.steps) and _agree(
        example, groups[1], first, handed, numbered, constants
    )
    return examples if alike else None


def _read(nodes: list[Any], names: set[str]) -> list[str]:
    """Return the `names` that nodes read, each once, in the order of reading."""
    return list(dict.fromkeys(name for node in nodes for name in node.input if name in names))


def _agree(
    example: _Example,
    nodes: list[Any],
    first: set[str],
    handed: list[str],
    numbered: Numbered,
    constants: dict[str, bytes],
) -> bool:
    """Return whether the second layer's nodes are the example's.

    Nodes must be the same but for names, and names must be those of the same tensors. What the
    second layer reads of the one before are outputs of the `first` or of what all share, such as
    embeddings; it hands on those that are `handed`.
    """
    own = dict[str, str]()
    for step, node in zip(example.steps, nodes, strict=True):
        if _kind(step.node) != _kind(node):
            return False
        for (whose, theirs), mine in zip(step.inputs, node.input, strict=True):
            matches = {
                "own": own.get(theirs) == mine,
                "numbered": whose == "numbered" and numbered.at(theirs, 1) == mine,
                "shared": theirs == mine or _equal(constants, theirs, mine),
                "before": mine in first,
            }
            if not matches[whose]:
                return False
        own |= {x: y for x, y in zip(step.node.output, node.output, strict=True) if x}
    return [own[name] for name in example.gives] == handed


def _equal(constants: dict[str, bytes], one: str, other: str) -> bool:
    """Return whether two names belong to constants of the same value."""
    return one in constants and constants[one] == constants.get(other)


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


def _values(values: Any, numbered: Numbered, more: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """Yield inputs or outputs of further layers, each like those of a layer that has them."""
    for layer, like in more:
        for value in values:
            if numbered.of(value.name) == like:
                copy = type(value).FromString(value.SerializeToString())
                copy.name = numbered.at(value.name, layer)
                yield copy


def _set(field: Any, values: list[Any]) -> None:
    """Replace the elements of a repeated field."""
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)
