"""Computes a cell's expected outputs by the eager policy, for inputs made by rules.

Rules such as `runner.filled` let every runner make the same inputs. Cached state, which has no
rule, and expected outputs are written to files. Cells of both types share them, as the inputs are
exact in float16 and graphs compute in float32 whatever the cache's type.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcap.android_bench.errors import PlanBroken
from kvcap.android_bench.runner.inputs import filled
from kvcap.export.files import file_entry
from kvcap.export.graphs.compare import RTOL, Reference
from kvcap.export.graphs.stages import Evict, StageGraph

SEEDS = {"keys": 1, "values": 2, "queries": 3, "output_norm": 4}
TRIES = 64
MULTIPLIERS = (10007, 10009)  # primes p: if p does not divide n, i -> i * p mod n is a permutation
MUST, MAY = 2, 1  # marks of slots that must stay, and of slots that may
Port = dict[str, Any]


@dataclass
class Folder:
    """A plan's folder while it is written, with a list of its files."""

    path: Path
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # entries by sha256

    def add(self, name: str, content: bytes) -> str:
        """Write a file, unless one of the same content was written; return its name."""
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self.files:
            self.files[digest] = {"file": name, "bytes": len(content), "sha256": digest}
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return str(self.files[digest]["file"])

    def copy(self, name: str, source: Path) -> str:
        """Copy the file `source` into the plan as `name`; return that name."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        entry = {**file_entry(path), "file": name}
        # Never merged with a file of the same content, as the manifest refers to it by its name.
        self.files[f"{name} {entry['sha256']}"] = entry
        return name

    def numbers(self, name: str, tensor: Tensor) -> str:
        """Write a tensor as little-endian float32; return the file's name."""
        return self.add(f"{name}.f32", tensor.float().contiguous().numpy().astype("<f4").tobytes())


@dataclass(frozen=True)
class SizedGraph:
    """A graph at one size, which describes its inputs and expected outputs."""

    graph: StageGraph
    manifest: Mapping[str, Any]  # the graph's manifest
    label: str  # policy, options and stage; names of files begin with it
    slots: int  # slots in use while scoring
    queries: int  # queries that the policy observes; 0: none

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of every axis."""
        kept = min(self.graph.form.shape.budget, self.slots)
        open_ones = {"slots": self.slots, "queries": self.queries, "kept": kept}
        return {k: v for k, v in {**self.graph.sizes, **open_ones}.items() if v is not None}

    def shape_of(self, axes: list[str]) -> list[int]:
        """Return the sizes of these axes."""
        return [self.sizes[axis] for axis in axes]

    def describe(self, folder: Folder) -> tuple[list[Port], list[Port]]:
        """Describe the inputs with rules that fill them, and the outputs with their checks.

        Raises:
            PlanBroken: with every seed slots tie for the last place, in a graph that returns a sum
                over the kept slots.
        """
        read = [port["name"] for port in self.manifest["inputs"]]
        for attempt in range(TRIES):
            ports = {name: self.port(name, self.fill(name, attempt)) for name in self.names()}
            tensors = {name: tensor(port, folder.path) for name, port in ports.items()}
            state = self.graph.form.cached(tensors)
            for name in set(state) & set(read):
                file = folder.numbers(f"state/{name}.n{self.slots}.s{attempt}", state[name])
                ports[name] = self.port(name, {"kind": "file", "file": file})
            tensors |= state
            expected = Expected(self, tensors, f"expected/{self.label}.n{self.slots}.s{attempt}")
            if expected.decided:
                types = {port["name"]: port["dtype"] for port in self.manifest["inputs"]}
                inputs = [{**ports[name], "dtype": types[name]} for name in read]
                return inputs, expected.outputs(folder)
        raise PlanBroken(f"{self.label}, {self.slots} slots: {TRIES} seeds, each with ties")

    def names(self) -> list[str]:
        """Return the names of inputs that have a rule: all but state that is computed from keys."""
        names = ["keys", *(port.name for port in self.graph.inputs)]
        return [name for name in dict.fromkeys(names) if name not in ("inverse_norms", "anchor")]

    def fill(self, name: str, attempt: int) -> dict[str, Any]:
        """Return the rule of an input's numbers."""
        if name in SEEDS:
            seed = SEEDS[name] + len(SEEDS) * attempt
            scale, offset = (2**-7, 0.5) if name == "output_norm" else (2**-9, -2.0)
            return {"kind": "hash", "seed": seed, "scale": scale, "offset": offset}
        if name == "positions":
            first = max(0, self.slots - self.graph.form.shape.block)  # a block's slots are in order
            multiplier = next((prime for prime in MULTIPLIERS if first % prime), 1)
            return {"kind": "permutation", "multiplier": multiplier, "first": first}
        constants = {"seen": self.slots, "budget": max(1, self.slots // 2)}
        # Nothing is pinned, and state is that of new slots: both are 0.
        return {"kind": "constant", "value": constants.get(name, 0)}

    def port(self, name: str, fill: dict[str, Any]) -> Port:
        """Describe an input, in float32 if it has the cache's type."""
        port = self.graph.form.ports[name]
        shape = self.shape_of(list(port.axes))
        return {"name": name, "dtype": port.type_in("float32"), "shape": shape, "fill": fill}


class Expected:
    """Outputs of eager code for one set of inputs, and the differences that a runner may have."""

    def __init__(self, case: SizedGraph, inputs: dict[str, Tensor], name: str) -> None:
        self.case, self.inputs, self.name = case, inputs, name
        if case.queries:
            self.name += f".q{case.queries}"
        # An evict graph returns state of the kept slots alone.
        kept = "kept_" if isinstance(case.graph, Evict) else ""
        self.wanted = Reference(
            *(
                {name if name == "worth" else kept + name: x for name, x in outputs.items()}
                for outputs in Reference.of(case.graph, inputs)
            )
        )
        self.eager = self.wanted.eager

    def allowed(self, name: str) -> float:
        """Return the largest difference from eager that passes, as in `kvcap export verify`."""
        low, high, near = self.wanted.range(name)
        return near + float((high - low).abs().amax())

    def marks(self) -> Tensor:
        """Return marks of the slots [B, K, n] uint8: 2 must stay, 1 may stay, 0 must go."""
        low, high, near = self.wanted.range("worth")
        kept = self.case.sizes["kept"]
        least = self.eager["worth"].topk(kept, dim=-1).values[..., -1:]
        return (high >= least - near).to(torch.uint8) + (low > least + near).to(torch.uint8)

    @property
    def decided(self) -> bool:
        """Return whether the kept slots are certain, or no output is computed from all of them."""
        graph = self.case.graph
        if not isinstance(graph, Evict) or not graph.form.kept_state({}, self.inputs["keys"]):
            return True
        stay = (self.marks() > 0).sum(-1)
        return bool((stay == self.case.sizes["kept"]).all())

    def outputs(self, folder: Folder) -> list[Port]:
        """Return every output of the graph with its check."""
        ports = []
        for port in self.case.manifest["outputs"]:
            shape = self.case.shape_of([axis["name"] for axis in port["axes"]])
            check = self.check(port["name"], folder)
            ports.append(
                {"name": port["name"], "dtype": port["dtype"], "shape": shape, "check": check}
            )
        return ports

    def check(self, name: str, folder: Folder) -> dict[str, Any]:
        """Describe how an output is checked, and write the file of its expected values."""
        source = name.removeprefix("kept_")
        if name == "kept_slot":
            marks = self.marks().numpy().tobytes()
            return {"kind": "slots", "file": folder.add(f"{self.name}.u8", marks)}
        if name in self.eager:
            file = folder.numbers(f"{self.name}.{name}", self.eager[name])
            kind = "by_slot" if name.startswith("kept_") else "values"
            return {"kind": kind, "file": file, "allowed": self.allowed(name)}
        if source in self.inputs and source != "anchor":
            return {"kind": "rows", "of": source}
        (total,) = (
            value
            for port, value in self.case.graph.form.kept_state({}, self.kept_keys())
            if port.name == name
        )
        file = folder.numbers(f"{self.name}.{name}", total)
        return {"kind": "values", "file": file, "allowed": RTOL * float(total.abs().amax())}

    def kept_keys(self) -> Tensor:
        """Return the keys of the slots that stay, [B, K, N, D]; needs `decided`."""
        keys, stays = self.inputs["keys"], self.marks() > 0
        index = stays.nonzero(as_tuple=True)[-1].view(*stays.shape[:2], -1, 1)
        return keys.gather(2, index.expand(*index.shape[:3], keys.shape[-1]))


def tensor(port: Port, folder: Path) -> Tensor:
    """Return an input of a cell as a tensor."""
    return torch.from_numpy(filled(port, folder).copy())
