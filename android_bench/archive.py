"""The Python runner as one file that any Python with numpy and onnxruntime runs."""

from __future__ import annotations

import tempfile
import zipapp
from pathlib import Path
from shutil import copytree, ignore_patterns

RUNNER_FILE = "runner.pyz"  # beside plan.json
RUNNER = Path(__file__).parent / "runner"

# zipapp's own start drops the exit code.
START = "import sys\n\nfrom runner.cli import main\n\nsys.exit(main())\n"


def write_runner(path: Path) -> Path:
    """Write the runner to `path`, which should end in .pyz; returns it."""
    with tempfile.TemporaryDirectory() as name:
        copytree(RUNNER, Path(name) / "runner", ignore=ignore_patterns("__pycache__"))
        (Path(name) / "__main__.py").write_text(START, encoding="utf-8")
        zipapp.create_archive(name, path)
    return path
