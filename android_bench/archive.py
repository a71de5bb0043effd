"""Packs the Python runner into one file that any Python with numpy and onnxruntime runs.

The file also has kvcap's own loop over a decoder's graphs, so that a phone times the same code as
`kvcap chat` runs.
"""

from __future__ import annotations

import tempfile
import zipapp
from pathlib import Path
from shutil import copyfile, copytree, ignore_patterns

import kvcap

RUNNER_FILE = "runner.pyz"  # lies beside plan.json
RUNNER = Path(__file__).parent / "runner"
SOURCE = Path(kvcap.__file__).parent
ONNX = "runtime/backends/onnxruntime"
LOOP = (  # kvcap's files that run a decoder; none needs more than numpy
    "dtypes.py", "schema.py", "runtime/__init__.py", "runtime/errors.py", "runtime/files.py",
    "runtime/types.py", "runtime/units.py", "runtime/backends/__init__.py",
    *(f"{ONNX}/{name}.py" for name in ("__init__", "decoder", "graph", "library", "manifest",
                                       "slots")),
)  # fmt: skip

# zipapp's own entry point drops the exit code.
START = "import sys\n\nfrom runner.cli import main\n\nsys.exit(main())\n"


def write_runner(path: Path) -> Path:
    """Write the runner to `path`, which should end in .pyz; return `path`."""
    with tempfile.TemporaryDirectory() as name:
        copytree(RUNNER, Path(name) / "runner", ignore=ignore_patterns("__pycache__"))
        for part in LOOP:
            target = Path(name) / "kvcap" / part
            target.parent.mkdir(parents=True, exist_ok=True)
            copyfile(SOURCE / part, target)
        (Path(name) / "kvcap" / "__init__.py").write_text('"""What a decoder needs."""\n')
        (Path(name) / "__main__.py").write_text(START, encoding="utf-8")
        zipapp.create_archive(name, path)
    return path
