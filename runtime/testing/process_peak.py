"""Measures the peak resident set of a fresh process: all its memory, libraries included.

Only a fresh process will do, as a warm one reuses pages that it already has. Nothing heavy is
imported here, since the child imports this before its baseline is taken.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORT = "KVCAP_MEMORY_REPORT"  # in a test's own process, names the file for its figures
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class ProcessPeak:
    """A record that has a process's resident bytes."""

    peak_bytes: int  # the most it held
    baseline_bytes: int  # what it held when the imports were done

    @property
    def grown_bytes(self) -> int:
        """Return the peak beyond the imports."""
        return self.peak_bytes - self.baseline_bytes


class NotMeasured(RuntimeError):
    """An error that says that a process ended well but measured nothing, as a skipped test."""


class TestFailed(RuntimeError):
    """An error that says that a test failed in its own process, with pytest's report of it."""

    __test__ = False  # pytest must not collect it by its name


def process_peak(target: str | Path, *args: Any, timeout: float | None = None) -> ProcessPeak:
    """Run `target` in a fresh Python process; return the peak of that process.

    Args:
        target: 'module:function', or the path of a script. Importing the module is the baseline;
            a script imports as it runs, so that its baseline is the bare interpreter.
        args: of the function, as JSON can hold them; or of the script's command line.
        timeout: seconds until the process is ended.

    Raises:
        ValueError: the target is neither.
        RuntimeError: it failed; the message ends with its output.
        subprocess.TimeoutExpired: it took longer.
    """
    script = Path(target).suffix == ".py"
    module, _, function = str(target).partition(":")
    if (script and not Path(target).is_file()) or (not script and not (module and function)):
        raise ValueError(f"{str(target)!r}: give 'module:function' or the path of a script")
    request = [str(target), script, list(args)]
    return ProcessPeak(**in_fresh_process("run", request, timeout=timeout))


def in_fresh_process(
    entry: str, request: list[Any], *, cwd: Path | None = None, timeout: float | None = None
) -> dict[str, Any]:
    """Call `entry` of this module in a fresh process; return the figures that it writes."""
    path = list(filter(None, sys.path))  # '' would let folders here shadow packages
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "peak.json")
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            "from kvcap.runtime.testing import process_peak as p; "
            f"p.{entry}({str(report)!r}, *{request!r})"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            timeout=timeout,
            check=False,
        )
        output = (done.stdout + done.stderr).strip()[-4000:]
        if done.returncode:
            raise RuntimeError(f"the process ended with code {done.returncode}:\n{output}")
        if not report.exists():
            raise NotMeasured(output)
        report_facts: dict[str, Any] = json.loads(report.read_text())
        if "failed" in report_facts:
            raise TestFailed(report_facts["failed"])
        if "skipped" in report_facts:
            raise NotMeasured(report_facts["skipped"])
        return report_facts


def run(report: str, target: str, script: bool, args: list[Any]) -> None:
    """Run a function or a script in the child process, measured."""
    if script:
        sys.argv = [target, *map(str, args)]
        baseline = start()
        runpy.run_path(target, run_name="__main__")
    else:
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        baseline = start()
        function(*args)
    write(report, baseline)


def run_test(report: str, arguments: list[str]) -> None:
    """Run one test in the child process; the pytest plugin measures its body."""
    os.environ[REPORT] = report
    import pytest

    outcome = Outcome()
    code = pytest.main(arguments, plugins=[outcome])
    if outcome.result:
        Path(report).write_text(json.dumps(outcome.result))
        code = pytest.ExitCode.OK
    sys.exit(code)


class Outcome:
    """Keeps pytest's report of a test that did not pass."""

    def __init__(self) -> None:
        self.result: dict[str, str] = {}

    def pytest_collectreport(self, report: Any) -> None:
        """Note that a module cannot be imported."""
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure or skip in set-up, body or tear-down."""
        if report.failed:
            parts = [self.result.get("failed", ""), report.longreprtext]
            parts += [f"---- {title} ----\n{text}" for title, text in report.sections]
            self.result = {"failed": "\n".join(filter(None, parts))}
        elif report.skipped and not self.result:
            why = report.longrepr
            self.result = {"skipped": str(why[2] if isinstance(why, tuple) else why)}


def start() -> int:
    """Reset the system's record of the peak, if possible; return the bytes held."""
    # Where it fails (not Linux, not allowed) the baseline is the peak of the imports.
    with suppress(OSError):
        CLEAR.write_text("5")  # VmHWM becomes VmRSS
    return peak()


def write(report: str, baseline: int, **more: Any) -> None:
    """Write this process's peak, its baseline and more to the file `report`."""
    Path(report).write_text(json.dumps({"peak_bytes": peak(), "baseline_bytes": baseline, **more}))


def peak() -> int:
    """Return the most resident bytes of this process so far.

    On Linux that is not `ru_maxrss`, which a child inherits from its parent there.
    """
    if STATUS.exists():
        (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
