"""Runs a plan on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcap.android_bench.documents import read_plan, read_result
from kvcap.android_bench.errors import RunFailed
from kvcap.android_bench.results.judge import judged
from kvcap.android_bench.runner.measure import RunOptions

INTERRUPTED = 130


def run_here(folder: Path, options: RunOptions) -> dict[str, Any]:
    """Measure the plan in `folder` in a process of its own; its progress goes to stderr.

    Args:
        folder: the folder of the plan.
        options: cores, provider and more.

    Returns:
        The judged result.

    Raises:
        PlanBroken: the folder has no plan, or its files were changed.
        RunFailed: the runner ended without a result.
    """
    read_plan(folder)
    with tempfile.TemporaryDirectory(prefix="kvcap-") as name:
        out = Path(name) / "result.json"
        runner = [sys.executable, "-m", "kvcap.android_bench.runner"]
        text = json.dumps(asdict(options))
        done = subprocess.run([*runner, folder, out, text], check=False)
        if done.returncode == INTERRUPTED:
            raise KeyboardInterrupt
        if not out.is_file():
            raise RunFailed(f"the runner ended with exit code {done.returncode} and no result")
        return judged(read_result(out))
