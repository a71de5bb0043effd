"""Runs Qualcomm's library: compiles a graph for a Hexagon NPU, or simulates a compiled one.

Runs as a process of its own, `python -m kvcap.export.qnn.worker FOLDER`, because the library prints
on stdout and may end its process. Reads `job.json` in that folder and writes its results there.
Knows no policies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from kvcap.runtime.backends.onnxruntime.library import library

PROVIDER = "QNNExecutionProvider"


def main(folder: Path) -> None:
    """Run the job in `folder`: compile `graph` to `context`, and run cases CASE.in to CASE.out."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    runtime, plugin = library("onnxruntime"), library("onnxruntime_qnn")
    runtime.register_execution_provider_library(PROVIDER, plugin.get_library_path())
    options = _options(runtime, {"backend_path": plugin.get_qnn_htp_path(), **job["options"]})
    if job["compile"]:
        compiler = runtime.ModelCompiler(options, job["graph"], embed_compiled_data_into_model=True)
        compiler.compile_to_file(job["context"])
    if job["cases"]:
        _simulate(runtime, options, job, folder)
    facts = {
        "onnxruntime": runtime.__version__,
        "onnxruntime-qnn": plugin.__version__,
        "qairt": plugin.build_and_package_info.qnn_version,
    }
    (folder / "done.json").write_text(json.dumps(facts), encoding="utf-8")


def _options(runtime: Any, options: dict[str, str]) -> Any:
    """Return a session's options with QNN as its one provider besides the CPU."""
    made = runtime.SessionOptions()
    made.log_severity_level = 4
    devices = [device for device in runtime.get_ep_devices() if device.ep_name == PROVIDER]
    if not devices:
        raise RuntimeError(f"ONNX Runtime {runtime.__version__} finds no device of {PROVIDER}")
    made.add_provider_for_devices(devices[:1], options)
    return made


def _simulate(runtime: Any, options: Any, job: dict[str, Any], folder: Path) -> None:
    run = runtime.InferenceSession(job["context"], options, enable_fallback=0)
    if run.get_providers()[0] != PROVIDER:  # it would compute on the CPU and only print a line
        raise RuntimeError(f"ONNX Runtime took {run.get_providers()[0]} in place of {PROVIDER}")
    names = [port.name for port in run.get_outputs()]
    for case in job["cases"]:
        feeds = load_file(folder / f"{case}.in")
        outputs = run.run(names, {port.name: feeds[port.name] for port in run.get_inputs()})
        save_file(dict(zip(names, outputs, strict=True)), folder / f"{case}.out")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # the classes of ONNX Runtime have no common base
        (Path(sys.argv[1]) / "failed.txt").write_text(str(error), encoding="utf-8")
        sys.exit(1)
