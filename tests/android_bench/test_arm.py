"""Exported graphs on ARM: its kernels compute float16 as such, where x86 computes in float32.

An emulated Cortex-A76 runs every graph on the inputs of `kvcap export verify`; outputs are held to
eager as there: values and kept slots. Proves function, says nothing of speed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from make import ran
from tools import PATIENCE, arm_environment, arm_python, installed

from kvcap.export.graphs import compare
from kvcap.export.graphs.cases import Case, cases, inputs
from kvcap.export.graphs.check import SEED
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import Spec
from kvcap.export.graphs.write import write
from kvcap.policies import load_policy

pytestmark = installed

SHAPE = Shape(kv_heads=2, heads=6, head_dim=32, block=10, budget=40)
FORMS = ("naive", "stateless", "inverse_norms", "running_anchor")
KEYDIFF = [
    *(("keydiff", "score", form, "fp16") for form in FORMS),
    *(("keydiff", "evict", form, "fp16") for form in FORMS[1:3]),
    ("keydiff", "score", "stateless", "fp32"),
]
OTHERS = [
    *((name, "score", None, "fp16") for name in ("snapkv", "tova", "h2o", "criticalkv", "andpro")),
    *((name, "evict", None, "fp16") for name in ("tova", "snapkv")),
    ("h2o", "evict", None, "fp32"),
]
PROGRAM = """
import json, platform, sys
from pathlib import Path
import numpy as np
import onnxruntime

assert platform.machine() == "aarch64"
folder = Path(sys.argv[1])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
for graph, cases in json.loads((folder / "jobs.json").read_text()).items():
    run = onnxruntime.InferenceSession(graph, options, ["CPUExecutionProvider"])
    names = [port.name for port in run.get_outputs()]
    for case in cases:
        given = np.load(folder / f"{case}.in.npz")
        got = run.run(names, {port.name: given[port.name] for port in run.get_inputs()})
        np.savez(folder / f"{case}.out.npz", **dict(zip(names, got)))
print("done", onnxruntime.__version__)
"""


def on_arm(folder: Path, jobs: dict[str, list[str]]) -> None:
    """Run graphs on the inputs that lie in `folder`, and leave what they gave there."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "program.py").write_text(PROGRAM)
    done = ran(
        arm_python(folder / "program.py", folder),
        env=arm_environment(),
        cwd=folder,
        timeout=PATIENCE,
    )
    assert done.stdout.startswith("done"), done.stderr


def tried(graph) -> list[Case]:
    """Return the cases of a quick verification but one of its sizes."""
    return [case for case in cases(graph, quick=True) if case.slots != 2]


def on_arm_and_eager(folder: Path, keys, altered=None) -> dict[str, compare.Difference]:
    """Export graphs, run them on ARM, compare with eager: differences by graph and case.

    `altered` may change a file after it was verified.
    """
    jobs: dict[str, list[str]] = {}
    wanted = []
    for name, stage, form, dtype in keys:
        spec = Spec(load_policy(name), SHAPE, stage, form, dtype)
        graph, (file, _) = spec.graph(), write(spec, folder, quick=True)
        if altered:
            altered(file)
        for case in tried(graph):
            given = inputs(graph, case, spec.torch_dtype, SEED)
            label = f"{file.stem}.{case.kind}.{case.slots}"
            np.savez(folder / f"{label}.in.npz", **{k: v.numpy() for k, v in given.items()})
            jobs.setdefault(str(file), []).append(label)
            wanted.append((label, graph, given))
    on_arm(folder, jobs)
    by_key = {}
    for label, graph, given in wanted:
        with np.load(folder / f"{label}.out.npz") as arrays:
            got = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        with torch.inference_mode():
            by_key[label] = compare.compared(graph, given, got)
    return by_key


@pytest.mark.slow
@pytest.mark.parametrize("keys", [KEYDIFF, OTHERS], ids=["keydiff", "others"])
def test_graphs_give_on_arm_what_eager_gives(keys, tmp_path):
    pairs = on_arm_and_eager(tmp_path, keys)
    assert len(pairs) >= 6 * len(keys)
    assert {label: row for label, row in pairs.items() if not row.ok} == {}


@pytest.mark.slow
def test_a_wrong_graph_is_seen_on_arm_too(tmp_path):
    def spoil(file: Path) -> None:
        model = onnx.load(file)
        (mean,) = (node for node in model.graph.node if node.op_type == "ReduceMean")
        mean.op_type = "ReduceMax"
        onnx.save(model, file)

    pairs = on_arm_and_eager(tmp_path, [("keydiff", "score", "stateless", "fp16")], spoil)
    wrong = [label for label, row in pairs.items() if not row.ok]
    assert any("random" in label for label in wrong)
    assert any("outliers" in label for label in wrong)
