"""Checks a decoder's graphs against PyTorch: both run the same blocks, side by side.

Three run the same blocks: the runtime (`BlockLoop` over a `BudgetCache`), the modules of decoder
and evictors eagerly, and their graphs in ONNX Runtime; the latter two over slots as the backend has
them (`ExportedDecoder`). The modules must agree with the runtime, keeping their own state, and the
graphs with the modules, given the modules' state. At the end the graphs run alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcap.dtypes import ONNX
from kvcap.export.decoder import manifest
from kvcap.export.decoder.depth import layers_of
from kvcap.export.decoder.evictor import EvictionGraph, evictors_of
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.graphs.ports import Port
from kvcap.export.weights import ROWS, Rounded, rounded_in
from kvcap.runtime.backends.onnxruntime.decoder import ExportedDecoder
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.backends.onnxruntime.slots import LayerSlots
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.errors import ToleranceError
from kvcap.runtime.models.checkpoint import Checkpoint, empty, fill, streaming

STEPS = 4  # single tokens after the blocks
ANSWER = 16  # tokens generated at the end
WINDOWS = 1024  # tokens; longer windows are not filled, as reading takes a large model minutes
BRIEF = 4  # tokens of a block in a brief check
BRIEF_ANSWER = 2  # tokens generated in one; all weights are read from their files for each


class Tolerance(NamedTuple):
    """A tolerance that says how far a type of weights may differ from float32."""

    values: float  # error of logits, relative to how far they lie from their mean
    worth: float  # relative to the largest score: slots nearer than that are ties
    overlap: float  # least share of equal kept slots, on average over layers and heads
    held: float  # error of what slots hold, relative to the largest


TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-5, 1.0, 1e-4),
    "fp16": Tolerance(3e-2, 1e-5, 0.9, 3e-2),
}
# The reference has weights rounded like the graph's. Products round activations, too, and of a
# real model these have outliers: its logits were off by 5 to 10 %, keys and values of its last
# layers by 14 % of the largest. A wrong key is off by 100 %.
INTEGERS = Tolerance(2e-1, 1e-5, 0.9, 3e-1)
# For slots in 8 bits, compared with the runtime's in floats and with the module's in 8 bits: there
# a number that lies between two may be rounded to the other one.
SLOTS, SLOT = Tolerance(1e-1, 2e-2, 0.8, 1e-1), Tolerance(3e-2, 1e-3, 0.95, 3e-2)
ROUNDED = {8: 0.05, 4: 0.5}  # error allowed of a rounded matrix, relative to its norm, by bits


@dataclass(frozen=True)
class CheckedRun:
    """A run of a block or a single token that was compared with the model's own."""

    who: str  # what is compared with what, such as 'module to runtime'
    tokens: int
    held: int  # slots in use before it
    error: float  # of logits, relative to how far they lie from their mean
    kept: float  # share of kept slots that are the same; ties count as the same
    ok: bool


@dataclass(frozen=True)
class DecoderReport:
    """A report that has every run of one decoder."""

    file: str
    runtime: str  # ONNX Runtime's version
    rows: list[CheckedRun]
    sample: dict[str, Any] = field(default_factory=dict)  # by which a runner can check itself
    agreed: int = 0  # tokens of the sample's answer that the graph alone generates too
    ties: bool = False  # says that the module kept another slot of equal score than the runtime

    @property
    def ok(self) -> bool:
        """Return whether all runs hold."""
        return all(row.ok for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "file": self.file,
            "onnxruntime": self.runtime,
            "ok": self.ok,
            "agreed": self.agreed,
            "ties": self.ties,
            "runs": [asdict(row) for row in self.rows],
        }

    def table(self) -> str:
        """Return a table for a terminal."""
        lines = [f"{self.file}  (ONNX Runtime {self.runtime}, CPU)"]
        lines.append(f"  {'checked':<22} {'tokens':>6} {'held':>6} {'error':>9} {'kept':>8}")
        for row in self.rows:
            verdict = "ok" if row.ok else "FAILED"
            lines.append(
                f"  {row.who:<22} {row.tokens:>6} {row.held:>6} {row.error:>9.1e} "
                f"{row.kept:>8.2%}  {verdict}"
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
                    f"{self.file}: {row.who} differs by {row.error:.1%} of the logits' spread and "
                    f"keeps {row.kept:.1%} of the same slots after {row.tokens} tokens beside "
                    f"{row.held} slots; export it with --dtype fp32 and without --kv-dtype, or run "
                    "it with the PyTorch backend (--backend torch)"
                )


class Arg(NamedTuple):
    """An input or output, as ONNX Runtime describes it, with name, type and shape."""

    name: str
    type: str
    shape: list[Any]


class ModuleGraph(Graph):
    """A module in place of the graph that is traced from it: it reads and writes arrays."""

    def __init__(self, module: DecoderGraph | EvictionGraph) -> None:
        self.module, self.name, self.version, self.threads = module, "module", "", None
        self._bindings: dict[tuple[Any, ...], Any] = {}
        self.worth: Tensor | None = None  # an evictor's last scores [1, K, n]

    @property
    def inputs(self) -> dict[str, Any]:
        """Return every input by name."""
        return self._described(self.module.inputs)

    @property
    def outputs(self) -> dict[str, Any]:
        """Return every output by name."""
        return self._described(self.module.outputs)

    def _described(self, ports: list[Port]) -> dict[str, Any]:
        sizes, arguments = self.module.sizes, {}
        for port in ports:
            kind = str(getattr(torch, port.dtype, torch.float32)).removeprefix("torch.")
            shape = [sizes[axis] or axis for axis in port.axes]
            arguments[port.name] = Arg(port.name, ONNX[kind], shape)
        return arguments

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
        """Return the arrays themselves."""
        return inputs, outputs

    def run_bound(self, binding: Any) -> None:
        """Compute outputs from inputs, as a graph does."""
        inputs, outputs = binding
        tensors = [torch.from_numpy(inputs[port.name]) for port in self.module.inputs]
        with torch.inference_mode():
            if isinstance(self.module, EvictionGraph):
                computed, self.worth = self.module.run(*tensors)
            else:
                computed = self.module(*tensors)
        for port, tensor in zip(self.module.outputs, computed, strict=True):
            outputs[port.name][...] = tensor.numpy()


class Decided(NamedTuple):
    """A decision with the numbers by which a layer's slots were chosen."""

    worth: Tensor  # [1, K, n]
    positions: Tensor  # [1, K, n]


class Watched(ExportedDecoder):
    """A module that runs as its graph does, and keeps the scores that its evictions used."""

    def __init__(self, facts: Manifest, decoder: DecoderGraph, evict_every: int = 1) -> None:
        evictors: dict[int, Graph] = {}
        for evictor, layers in evictors_of(decoder):
            evictors |= dict.fromkeys(layers, ModuleGraph(evictor))
        graphs = [evictors[layer] for layer in sorted(evictors)]
        block = decoder.layout.block_size
        scales = scales_in(decoder)
        super().__init__(facts, ModuleGraph(decoder), graphs, block, evict_every, scales)
        self.decided: dict[int, Decided] = {}  # by their places among capped layers

    def _gone(self, layer: LayerSlots, evictor: Graph, *rest: Any) -> Any:
        positions = torch.from_numpy(layer.buffers["positions"][:, :, : layer.held].copy())
        evicted = super()._gone(layer, evictor, *rest)
        assert isinstance(evictor, ModuleGraph)
        assert evictor.worth is not None
        self.decided[self.capped.index(layer)] = Decided(evictor.worth, positions)
        return evicted


def opened(
    folder: Path,
    facts: Manifest,
    decoder: DecoderGraph,
    evict_every: int = 1,
    name: str = manifest.GRAPH,
) -> ExportedDecoder:
    """Open a directory's graphs in ONNX Runtime; `facts` are as it was exported.

    `name` is that of the decoder's file.

    Raises:
        GraphBroken, ShapeError: a file cannot be run, or is not this decoder's.
    """
    evictors, graph_of = evictors_of(decoder), dict[int, Graph]()
    for i, (_, layers) in enumerate(evictors):
        file = folder / manifest.evictor_name(i, len(evictors))
        graph_of |= dict.fromkeys(layers, Graph(file))
    graph, graphs = Graph(folder / name), [graph_of[layer] for layer in sorted(graph_of)]
    block = decoder.layout.block_size
    return ExportedDecoder(facts, graph, graphs, block, evict_every, scales_in(decoder))


def scales_in(decoder: DecoderGraph) -> Any:
    """Return the scales of a module's slots for `ExportedDecoder`; None where they are floats."""
    return None if decoder.slot_scales is None else decoder.slot_scales.unsqueeze(-2).numpy()


def check(
    folder: Path,
    decoder: DecoderGraph,
    dtype: str,
    quick: bool = False,
    brief: bool = False,
    graph: str = manifest.GRAPH,
) -> DecoderReport:
    """Run a directory's graphs beside their modules and the runtime.

    The model is turned into float32: that is what every type of weights is held to.

    Args:
        folder: of the graph.
        decoder: the module.
        dtype: of the graph's weights.
        quick: over one block past the budget only.
        brief: over a few tokens only, none of which is evicted.
        graph: the name of its file.

    Raises:
        GraphBroken, ShapeError: a file cannot be run, or is not this decoder's.
    """
    facts = facts_of(decoder, dtype)  # before its weights are replaced by rounded ones
    to_runtime, to_module = TOLERANCES["fp32"], TOLERANCES.get(dtype, INTEGERS)
    if decoder.slot_scales is not None:
        to_runtime, to_module = _looser(to_runtime, SLOTS), _looser(to_module, SLOT)
    ort = opened(folder, facts, decoder, name=graph)
    alone = ExportedDecoder(
        facts, ort.graph, ort.evictors, decoder.layout.block_size, scales=scales_in(decoder)
    )
    decoder.model.float()
    module = Watched(facts_of(decoder, "fp32"), decoder)
    layout, model = decoder.layout, decoder.model
    cache = BudgetCache(
        model.config,
        layout.budget_tokens,
        layout.block_size,
        layout.eviction,
        positions=layout.positions,
    )
    loop = BlockLoop(model, cache, graphs=False)
    rows: list[CheckedRun] = []
    tied, seen, runs = False, 0, list[list[int]]()
    for block in _blocks(decoder, quick, brief):
        ids, before = block[0].tolist(), cache.held
        expected = loop.read(block)
        if seen:
            put(module, ort, seen)
        module.decided.clear()
        logits = torch.from_numpy(module.run(ids, seen, []).copy())
        computed = torch.from_numpy(ort.run(ids, seen, []))
        runs.append(ids)
        seen += len(ids)
        kept = [torch.from_numpy(x[None]) for x in module.positions(seen)]
        if not tied:
            stored = [_positions(layer) for layer in cache.capped_layers]
            row, ties = _row(
                "module to runtime",
                block,
                before,
                to_runtime,
                logits,
                expected,
                kept,
                stored,
                module.decided,
            )
            rows.append(row)
            tied = tied or ties
        positions = [torch.from_numpy(x[None]) for x in ort.positions(seen)]
        row, ties = _row(
            "graph to module",
            block,
            before,
            to_module,
            computed,
            logits,
            positions,
            kept,
            module.decided,
        )
        rows.append(_with_state(row, module, ort, seen, to_module) if not ties else row)
    answer = _answer(loop, expected, BRIEF_ANSWER if brief else ANSWER)
    answer_alone = _alone(alone, runs, len(answer))
    both = zip(answer, answer_alone, strict=True)
    agreed = next((i for i, (a, b) in enumerate(both) if a != b), len(answer))
    sample = {
        "prompt": [token for ids in runs for token in ids],
        "runs": [len(ids) for ids in runs],
        "greedy": answer,
    }
    runtime = library("onnxruntime").__version__
    return DecoderReport(folder.name, runtime, rows, sample, agreed, tied)


def check_streaming(
    folder: Path, decoder: DecoderGraph, dtype: str, weights: Mapping[str, Tensor]
) -> DecoderReport:
    """Run a directory's graphs over a few tokens beside a module that has no weights.

    Args:
        folder: of the graphs.
        decoder: the module, whose parameters are on the meta device.
        dtype: of the graph's weights.
        weights: of the module, by their names in it; no more than a layer's are held at once.
    """
    named_layers = layers_of(decoder.model)
    assert named_layers is not None
    with streaming(decoder, named_layers[1], _as_in(folder / manifest.GRAPH, decoder, weights)):
        return check(folder, decoder, dtype, brief=True)


def check_filled(
    folder: Path,
    decoder: DecoderGraph,
    dtype: str,
    weights: Mapping[str, Tensor],
    quick: bool,
    graph: str,
) -> DecoderReport:
    """Run the graph of a few layers at length, beside a module that has no weights of its own.

    Args:
        folder: of the graphs.
        decoder: the module of these layers, whose parameters are on the meta device.
        dtype: of the graph's weights.
        weights: of the module, by their names in it.
        quick: as `check`.
        graph: the name of its file.
    """
    filled = fill(decoder, _as_in(folder / graph, decoder, weights))
    try:
        return check(folder, decoder, dtype, quick, graph=graph)
    finally:
        empty(filled)


def _as_in(file: Path, decoder: DecoderGraph, weights: Mapping[str, Tensor]) -> _Rounded:
    """Return a module's weights, rounded as its graph has them."""
    return _Rounded(weights, _of_tied(decoder, rounded_in(file)))


@contextmanager
def as_rounded(decoder: DecoderGraph, rounded: Mapping[str, Rounded]) -> Iterator[None]:
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


def _of_tied(decoder: DecoderGraph, rounded: Mapping[str, Rounded]) -> dict[str, Rounded]:
    """Return matrices in blocks by all names that their parameters have in the module."""
    names = defaultdict[int, list[str]](list)
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {
        name: rounded[tied_name]
        for tied in names.values()
        for tied_name in tied
        if tied_name in rounded
        for name in tied
    }


class _Rounded(Mapping[str, Tensor]):
    """A mapping of weights in which rounded ones are read back from the graph's blocks."""

    def __init__(self, weights: Mapping[str, Tensor], rounded: Mapping[str, Rounded]) -> None:
        self.weights, self.rounded = weights, rounded
        self._held: set[str] = set()  # names whose rounded weights were found near enough

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.rounded:
            return self.weights[name]
        matrix = self.rounded[name].read()
        if name not in self._held:
            far, most = self._far(name, matrix), ROUNDED[self.rounded[name].rounding.bits]
            if not far <= most:
                raise ToleranceError(f"the graph has {name} rounded by {far:.0%} of its norm")
            self._held.add(name)
        return matrix

    def _far(self, name: str, matrix: Tensor) -> float:
        """Return how far a matrix is from the model's, relative to its norm; a part at a time."""
        step = max(1, ROWS // matrix[0].numel())
        off = norm = torch.zeros((), dtype=torch.float64)
        start = 0
        for part in matrix.split(step):
            original = self._rows(name, start, start + len(part)).float()
            if original.shape != part.shape:
                return float("inf")
            off = off + (part - original).square().sum(dtype=torch.float64)
            norm = norm + original.square().sum(dtype=torch.float64)
            start += len(part)
        if len(self._rows(name, start, start + 1)):  # the model's has more rows
            return float("inf")
        return float((off / norm.clamp_min(1e-24)).sqrt())

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of the model's own matrix; no others are read from a file."""
        if isinstance(self.weights, Checkpoint):
            return self.weights.rows(name, start, stop)
        return self.weights[name][start:stop]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def facts_of(decoder: DecoderGraph, dtype: str) -> Manifest:
    """Return the manifest of a decoder, for `ExportedDecoder`."""
    return Manifest(Path(), manifest.describe("", decoder, dtype))


def put(source: ExportedDecoder, target: ExportedDecoder, seen: int) -> None:
    """Copy into a decoder everything that another one holds after `seen` tokens."""
    held = list(source.held)
    target.held = held
    mine = target.state(seen, held)
    for name, array in source.state(seen, held).items():
        mine[name][...] = array


def _blocks(decoder: DecoderGraph, quick: bool, brief: bool) -> Iterator[Tensor]:
    """Yield blocks until some are evicted, an odd one, a full one, single tokens; ids differ."""
    layout = decoder.layout
    size, budget = layout.block_size, max(layout.budgets)
    if not quick:
        held = [layer.budget for layer in decoder.layers]
        budget = max([budget, *(n for n in held if n < WINDOWS)])
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
    who: str,
    block: Tensor,
    held: int,
    tolerance: Tolerance,
    logits: Tensor,
    expected: Tensor,
    kept: list[Tensor],
    others: list[Tensor],
    decided: Mapping[int, Decided],
) -> tuple[CheckedRun, bool]:
    """Compare logits and kept slots of one run with another's; say whether some are tied."""
    error = _distance(logits, expected)
    shares, tied = [], False
    for layer, (mine, theirs) in enumerate(zip(kept, others, strict=True)):
        same, ties = _same(mine, theirs, decided.get(layer), tolerance.worth)
        shares.append(same)
        tied = tied or ties
    share = sum(shares) / len(shares)
    ok = error <= tolerance.values and share >= tolerance.overlap
    return CheckedRun(who, block.shape[1], held, error, share, ok), tied


def _looser(a: Tolerance, b: Tolerance) -> Tolerance:
    """Return a tolerance as loose as the looser of two."""
    worth, overlap = max(a.worth, b.worth), min(a.overlap, b.overlap)
    return Tolerance(max(a.values, b.values), worth, overlap, max(a.held, b.held))


def _with_state(
    row: CheckedRun, module: ExportedDecoder, ort: ExportedDecoder, seen: int, tolerance: Tolerance
) -> CheckedRun:
    """Return the row, failed if held tensors differ although the same slots were kept."""
    if row.kept < 1:
        return row
    allowed = tolerance.held
    pairs = zip(_in_time(ort, seen), _in_time(module, seen), strict=True)
    fine = all(a.shape == b.shape and _relative(a, b) <= allowed for a, b in pairs)
    return row if fine else CheckedRun(**{**asdict(row), "ok": False})


def _in_time(decoder: ExportedDecoder, seen: int) -> list[Tensor]:
    """Return everything that is held, slots in time order."""
    held, arrays = decoder.state(seen, decoder.held), []
    for name, array in held.items():
        kind, layer = name.split(".")
        if f"positions.{layer}" in held and kind != "queries":
            order = held[f"positions.{layer}"].argsort(axis=2)
            order = order.reshape(*order.shape, *(1,) * (array.ndim - 3))
            array = np.take_along_axis(array, order, axis=2)
        arrays.append(torch.from_numpy(array.copy()))
    return arrays


def _same(mine: Tensor, theirs: Tensor, decided: Decided | None, near: float) -> tuple[float, bool]:
    """Return the share of a layer's slots that both keep, and whether there are ties.

    Ties count as kept by both.
    """
    if decided is None:  # nothing was evicted
        return float(torch.equal(mine, theirs)), False
    worth, positions = decided
    finite = worth[worth.isfinite()]
    near *= float(finite.abs().amax()) if len(finite) else 0.0
    missed, tied = 0, False
    for head in range(mine.shape[1]):
        a, b = set(mine[0, head].tolist()), set(theirs[0, head].tolist())
        if a == b:
            continue
        of = dict(zip(positions[0, head].tolist(), worth[0, head].tolist(), strict=True))
        odd = [of[slot] for slot in a ^ b if slot in of]
        if len(odd) == len(a ^ b) and max(odd) - min(odd) <= near:
            tied = True
        else:
            missed += len(a - b)
    return 1 - missed / mine.numel(), tied


def _distance(logits: Tensor, expected: Tensor) -> float:
    """Return how far logits [..., vocabulary] are off, relative to their spread around the mean.

    The greatest of 262,144 differences is a matter of chance; the root of their mean square is not.
    Both are taken from their means, since what is added to all logits changes no probability.
    """
    if logits.shape != expected.shape or not bool(logits.isfinite().all()):
        return float("inf")
    exact = expected.double()
    off, spread = (
        (x - x.mean(-1, keepdim=True)).norm(dim=-1) for x in (logits.double() - exact, exact)
    )
    return float((off / spread.clamp_min(1e-12)).max())


def _relative(computed: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value; infinite where one is not finite."""
    if computed.shape != expected.shape or not bool(computed.isfinite().all()):
        return float("inf")
    if not computed.numel():
        return 0.0
    error = (computed.double() - expected.double()).abs().amax()
    return float(error / expected.double().abs().amax().clamp_min(1e-12))


def _positions(layer: Any) -> Tensor:
    """Return the runtime's slots of one layer, in time order."""
    positions: Tensor = layer.segments[0].positions.sort(-1).values
    return positions


def _answer(loop: BlockLoop, logits: Tensor, length: int) -> list[int]:
    """Return the runtime's greedy tokens after `logits`."""
    tokens = [int(logits.argmax(-1))]
    while len(tokens) < length:
        tokens.append(int(loop.read(torch.tensor([tokens[-1:]])).argmax(-1)))
    return tokens


def _alone(ort: ExportedDecoder, blocks: list[list[int]], length: int) -> list[int]:
    """Return the graphs' greedy tokens after the blocks."""
    seen, tokens = 0, list[int]()
    pending = list(blocks)
    while len(tokens) < length:
        ids = pending.pop(0) if pending else [tokens[-1]]
        logits = ort.run(ids, seen, [])
        seen += len(ids)
        if not pending:
            tokens.append(int(logits.argmax(-1)[0]))
    return tokens
