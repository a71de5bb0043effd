"""Checks a decoder's graph against PyTorch: both run the same blocks, side by side.

Three run the same blocks: the runtime (`BlockLoop` over a `BudgetCache`), the decoder's module
eagerly, and its graph in ONNX Runtime. The module must agree with the runtime, keeping its own
state, and the graph with the module, given the module's state. At the end the graph runs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.export.decoder import manifest
from kvcap.export.decoder.checkpoint import streaming
from kvcap.export.decoder.depth import layers_of
from kvcap.export.decoder.graph import Decoder
from kvcap.export.decoder.layer import LayerPass
from kvcap.export.weights import Rounded, rounded_in
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.errors import ShapeError, ToleranceError, first_line

STEPS = 4  # single tokens after the blocks
ANSWER = 16  # tokens generated at the end
BRIEF = 4  # tokens of a block, and of the text generated, where a check is brief


class Tolerance(NamedTuple):
    """What a type of weights may differ by from float32."""

    values: float  # of the largest
    worth: float  # of the largest: slots nearer than that are ties
    overlap: float  # of kept slots, in every layer and head on average


TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-5, 1.0),
    "fp16": Tolerance(3e-2, 1e-5, 0.9),
    "int8": Tolerance(1e-1, 1e-5, 0.9),  # of weights that are rounded like the graph's
    "int4": Tolerance(1e-1, 1e-5, 0.9),
}
ROUNDED = {8: 0.05, 4: 0.5}  # by how much of its norm a matrix may be rounded, by bits


@dataclass(frozen=True)
class Row:
    """How one run, of a block or a single token, compares."""

    who: str  # module or graph, or the graph alone
    tokens: int
    held: int  # slots before it
    error: float  # of logits, relative to the largest
    kept: float  # share of kept slots that are the same, ties aside
    ok: bool


@dataclass(frozen=True)
class Report:
    """Every run of one decoder."""

    file: str
    runtime: str  # ONNX Runtime's version
    rows: list[Row]
    sample: dict[str, Any] = field(default_factory=dict)  # for any runner to check itself with
    agreed: int = 0  # tokens of the sample's answer that the graph alone generates too
    ties: bool = False  # equal scores let the module keep another slot than the runtime

    @property
    def ok(self) -> bool:
        """Whether all runs hold."""
        return all(row.ok for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "file": self.file, "onnxruntime": self.runtime, "ok": self.ok, "agreed": self.agreed,
            "ties": self.ties, "runs": [asdict(row) for row in self.rows],
        }  # fmt: skip

    def table(self) -> str:
        """A table for a terminal."""
        lines = [f"{self.file}  (ONNX Runtime {self.runtime}, CPU)"]
        lines.append(f"  {'checked':<22} {'tokens':>6} {'held':>6} {'error':>9} {'kept':>8}")
        for row in self.rows:
            said = "ok" if row.ok else "FAILED"
            lines.append(
                f"  {row.who:<22} {row.tokens:>6} {row.held:>6} {row.error:>9.1e} "
                f"{row.kept:>8.2%}  {said}"
            )
        answer = len(self.sample.get("greedy", ()))
        lines.append(f"  greedy text, graph alone: {self.agreed} of {answer} tokens as PyTorch")
        if self.ties:
            lines.append("  scores tie, so that the module may keep other slots than the runtime")
        return "\n".join(lines)

    def require(self) -> None:
        """Refuse a decoder that failed.

        Raises:
            ToleranceError: naming the first run that does not hold.
        """
        for row in self.rows:
            if not row.ok:
                raise ToleranceError(
                    f"{self.file}: {row.who} differs by {row.error:.2g} of the largest logit and "
                    f"keeps {row.kept:.1%} of the same slots after {row.tokens} tokens beside "
                    f"{row.held} slots"
                )


class Ort:
    """The graph in ONNX Runtime, on tensors."""

    def __init__(self, file: Path, decoder: Decoder) -> None:
        self.graph, self.decoder = Graph(file), decoder
        names = {port.name for port in decoder.inputs}, {port.name for port in decoder.outputs}
        self.graph.require(*names)
        self.types = {name: port.type for name, port in self.graph.inputs.items()}

    def run(self, *tensors: Tensor) -> list[Tensor]:
        """Outputs for inputs, both in order and in float32 where they are float16.

        Raises:
            ShapeError: the graph does not take tensors of these sizes.
        """
        given = {}
        for port, tensor in zip(self.decoder.inputs, tensors, strict=True):
            half = self.types[port.name] == "tensor(float16)"
            given[port.name] = (tensor.half() if half else tensor).contiguous().numpy()
        names = [port.name for port in self.decoder.outputs]
        try:
            found = map(torch.from_numpy, self.graph.session.run(names, given))
        except Exception as error:  # its own classes, which have no common base
            told = first_line(error)
            raise ShapeError(f"{self.graph.name} refuses what the decoder takes: {told}") from error
        return [x.float() if x.is_floating_point() else x for x in found]


def check(
    folder: Path,
    decoder: Decoder,
    dtype: str,
    quick: bool = False,
    brief: bool = False,
    graph: str = manifest.GRAPH,
) -> Report:
    """Run a directory's graph beside its module and the runtime.

    The model is turned into float32: that is what every type of weights is held to.

    Args:
        folder: of the graph.
        decoder: the module.
        dtype: of the graph's weights.
        quick: over one block past the budget only.
        brief: over a few tokens only, none of which is evicted.
        graph: the name of its file.

    Raises:
        GraphBroken, ShapeError: the file cannot be run, or is not this decoder's.
    """
    decoder.model.float()
    ort = Ort(folder / graph, decoder)
    layout, model = decoder.layout, decoder.model
    cache = BudgetCache(model.config, layout.budget_tokens, layout.block_size, layout.eviction,
                        positions=layout.positions)  # fmt: skip
    loop = BlockLoop(model, cache, graphs=False)
    rows: list[Row] = []
    held, tied, ids = decoder.empty(), False, []
    with torch.inference_mode():
        for block in _blocks(decoder, quick, brief):
            before = cache.held
            given = (block, torch.tensor(cache.seen, dtype=torch.int32), no_pins(), *held)
            wanted = loop.read(block)
            logits, layers = decoder.run(*given)
            held = [layers[s.layer].kept[s.name] for s in decoder.state]
            got = ort.run(*given)
            ids.append(block)
            kept = [layer.kept["positions"] for layer in layers]
            if not tied:
                stored = [_positions(layer) for layer in cache.capped_layers]
                row, ties = _row("module to runtime", block, before, "fp32", logits, wanted,
                                 kept, stored, layers)  # fmt: skip
                rows.append(row)
                tied = tied or ties
            said = dict(zip([port.name for port in decoder.outputs], got, strict=True))
            found = [said[f"kept_positions.{i}"] for i in range(len(layers))]
            row, ties = _row("graph to module", block, before, dtype, said["logits"], logits,
                             found, kept, layers)  # fmt: skip
            rows.append(_with_state(row, decoder, said, held, dtype) if not ties else row)
        answer = _answer(loop, wanted, BRIEF if brief else ANSWER)
        alone = _alone(ort, decoder, ids, len(answer))
    both = zip(answer, alone, strict=True)
    agreed = next((i for i, (a, b) in enumerate(both) if a != b), len(answer))
    sample = {
        "prompt": torch.cat(ids, 1)[0].tolist(),
        "runs": [block.shape[1] for block in ids],
        "greedy": answer,
    }
    runtime = library("onnxruntime").__version__
    return Report(folder.name, runtime, rows, sample, agreed, tied)


def check_streaming(
    folder: Path, decoder: Decoder, dtype: str, weights: Mapping[str, Tensor]
) -> Report:
    """Run a directory's graph over a few tokens beside a module that has no weights.

    Args:
        folder: of the graph.
        decoder: its module, whose parameters are on the meta device.
        dtype: of the graph's weights.
        weights: of the module, by their names in it; no more than a layer's are held at once.
    """
    found = layers_of(decoder.model)
    assert found is not None
    given = _Rounded(weights, _of_tied(decoder, rounded_in(folder / manifest.GRAPH)))
    decoder.float()
    with streaming(decoder, found[1], given):
        return check(folder, decoder, dtype, brief=True)


@contextmanager
def as_rounded(decoder: Decoder, rounded: Mapping[str, Rounded]) -> Iterator[None]:
    """Give a module the weights that its graph has in blocks, while they are compared.

    Raises:
        ToleranceError: a matrix is not the module's.
    """
    parameters = dict(decoder.named_parameters())
    rounded = _of_tied(decoder, rounded)
    weights = _Rounded({name: x.data for name, x in parameters.items()}, rounded)
    before = {name: parameters[name].data for name in rounded if name in parameters}
    try:
        for name in before:
            parameters[name].data = weights[name].to(before[name].dtype)
        yield
    finally:
        for name, data in before.items():
            parameters[name].data = data


def _of_tied(decoder: Decoder, rounded: Mapping[str, Rounded]) -> dict[str, Rounded]:
    """Matrices in blocks by all names that their parameters have in the module."""
    names = defaultdict[int, list[str]](list)
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {
        name: rounded[known]
        for tied in names.values()
        for known in tied
        if known in rounded
        for name in tied
    }


class _Rounded(Mapping[str, Tensor]):
    """Weights, of which those that a graph has in blocks are what it has of them."""

    def __init__(self, weights: Mapping[str, Tensor], rounded: Mapping[str, Rounded]) -> None:
        self.weights, self.rounded = weights, rounded
        self._held: set[str] = set()  # to be near the weights

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.rounded:
            return self.weights[name]
        found = self.rounded[name].read()
        if name not in self._held:
            wanted, most = self.weights[name].float(), ROUNDED[self.rounded[name].rounding.bits]
            far = float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))
            if found.shape != wanted.shape or not far <= most:
                raise ToleranceError(f"the graph has {name} rounded by {far:.0%} of its norm")
            self._held.add(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def no_pins() -> Tensor:
    """The input `pinned` that pins nothing: one empty span, [1, 2]."""
    return torch.zeros(1, 2, dtype=torch.int32)


def _blocks(decoder: Decoder, quick: bool, brief: bool) -> Iterator[Tensor]:
    """Blocks until some are evicted, an odd one, a full one, single tokens; ids differ."""
    layout = decoder.layout
    size, budget = layout.block_size, max(layout.budgets)
    full = -(-budget // size) + (1 if quick else 2)
    lengths = [size] * full + [-(-size // 3), size] + [1] * STEPS
    if brief:
        lengths = [min(size, BRIEF), 1]
    generator = torch.Generator().manual_seed(0)
    words, left = [], sum(lengths)
    while left > 0:  # equal tokens may have equal scores
        words.append(torch.randperm(layout.shape.vocabulary, generator=generator)[:left])
        left -= len(words[-1])
    yield from torch.cat(words)[None].split(lengths, 1)


def _row(
    who: str, block: Tensor, held: int, dtype: str, got: Tensor, wanted: Tensor,
    kept: list[Tensor], others: list[Tensor], layers: list[LayerPass],
) -> tuple[Row, bool]:  # fmt: skip
    """Logits and kept slots of one run against another's, and whether some are tied."""
    tolerance = TOLERANCES[dtype]
    error = _relative(got, wanted)
    shares, tied = [], False
    for mine, theirs, layer in zip(kept, others, layers, strict=True):
        same, ties = _same(mine, theirs, layer, tolerance.worth)
        shares.append(same)
        tied = tied or ties
    share = sum(shares) / len(shares)
    ok = error <= tolerance.values and share >= tolerance.overlap
    return Row(who, block.shape[1], held, error, share, ok), tied


def _with_state(
    row: Row, decoder: Decoder, said: dict[str, Tensor], held: list[Tensor], dtype: str
) -> Row:
    """The row, failed where kept state differs though the same slots were kept."""
    if row.kept < 1:
        return row
    allowed = TOLERANCES[dtype].values
    pairs = [(said[s.kept.name], x) for s, x in zip(decoder.state, held, strict=True)]
    fine = all(a.shape == b.shape and _relative(a, b) <= allowed for a, b in pairs)
    return row if fine else Row(**{**asdict(row), "ok": False})


def _same(mine: Tensor, theirs: Tensor, layer: LayerPass, near: float) -> tuple[float, bool]:
    """Share of one layer's slots that are kept by both, ties counted in; whether there are some."""
    worth, positions = layer.worth, layer.slots["positions"]
    finite = worth[worth.isfinite()]
    near *= float(finite.abs().amax()) if len(finite) else 0.0
    missed, tied = 0, False
    for head in range(mine.shape[1]):
        a, b = set(mine[0, head].tolist()), set(theirs[0, head].tolist())
        if a == b:
            continue
        of = dict(zip(positions[0, head].tolist(), worth[0, head].tolist(), strict=True))
        odd = [of[place] for place in a ^ b if place in of]
        if len(odd) == len(a ^ b) and max(odd) - min(odd) <= near:
            tied = True
        else:
            missed += len(a - b)
    return 1 - missed / mine.numel(), tied


def _relative(got: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value; infinite where one is not finite."""
    if got.shape != wanted.shape or not bool(got.isfinite().all()):
        return float("inf")
    if not got.numel():
        return 0.0
    error = (got.double() - wanted.double()).abs().amax()
    return float(error / wanted.double().abs().amax().clamp_min(1e-12))


def _positions(layer: Any) -> Tensor:
    """The runtime's slots of one layer, in time order."""
    found: Tensor = layer.segments[0].positions.sort(-1).values
    return found


def _answer(loop: BlockLoop, logits: Tensor, length: int) -> list[int]:
    """The runtime's greedy tokens after `logits`."""
    found = [int(logits.argmax(-1))]
    while len(found) < length:
        found.append(int(loop.read(torch.tensor([found[-1:]])).argmax(-1)))
    return found


def _alone(ort: Ort, decoder: Decoder, blocks: list[Tensor], length: int) -> list[int]:
    """The graph's greedy tokens after the blocks, fed its own state."""
    held, seen, found = decoder.empty(), 0, list[int]()
    pending = list(blocks)
    while len(found) < length:
        block = pending.pop(0) if pending else torch.tensor([[found[-1]]])
        logits, *held = ort.run(block, torch.tensor(seen, dtype=torch.int32), no_pins(), *held)
        seen += block.shape[1]
        if not pending:
            found.append(int(logits.argmax(-1)))
    return found
