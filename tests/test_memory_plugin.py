"""The pytest plugin, run by pytest on planted tests."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
INSTALLED = [e.name for e in entry_points(group="pytest11") if e.name == "kvcap"]
PLUGIN = INSTALLED[0] if INSTALLED else "kvcap.runtime.pytest_plugin"
HEAD = "import pytest, torch\nMIB = 1024 * 1024\n\n"


@pytest.fixture(scope="module", autouse=True)
def everything_imported():
    """Pytester drops what a run imports, and parts of torch cannot be imported twice."""
    import kvcap.runtime.plan  # noqa: F401
    from kvcap.testing import cpu_peak

    assert cpu_peak(lambda: None).peak_bytes == 0


@pytest.fixture
def run(pytester):
    pytester.syspathinsert(Path(__file__).parents[1] / "src")

    def runs(code: str, *arguments: str):
        pytester.makepyfile(HEAD + code)
        options = ("-p", PLUGIN, "-p", "no:xdist", "--strict-markers", *arguments)
        return pytester.runpytest_inprocess(*options)

    return runs


def test_a_budget_that_is_kept_and_one_that_is_passed(run):
    done = run("""
@pytest.mark.memory_budget("8MiB")
def test_kept(): torch.zeros(4 * MIB, dtype=torch.uint8)

@pytest.mark.memory_budget("8MiB")
def test_passed(): torch.zeros(9 * MIB, dtype=torch.uint8)  # gone at once, and seen

def test_unmarked(): torch.zeros(9 * MIB, dtype=torch.uint8)
""")
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines([
        "*memory budget passed: CPU tensors took 9.0 MiB (9,437,184 bytes), allowed are 8.0 MiB "
        "(8,388,608): 1,048,576 bytes too many"
    ])  # fmt: skip


def test_a_failing_test_fails_with_its_own_error(run):
    done = run("""
@pytest.mark.memory_budget("1MiB")
def test_wrong():
    torch.zeros(9 * MIB, dtype=torch.uint8)
    assert 1 == 2
""")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*assert 1 == 2*"])
    assert "memory budget" not in done.stdout.str().partition("short test summary")[2]


def test_a_fresh_process(run):
    done = run("""
@pytest.mark.memory_budget("100MiB", process=True)
def test_kept(): torch.zeros(10 * MIB, dtype=torch.uint8)

@pytest.mark.memory_budget("100MiB", process=True)
def test_passed(): torch.ones(200 * MIB, dtype=torch.uint8)

@pytest.mark.memory_budget("100MiB", process=True)
def test_wrong(): assert 1 == 2

@pytest.mark.memory_budget("100MiB", process=True)
def test_skipped(): pytest.skip("no reason")
""")
    done.assert_outcomes(passed=1, failed=2, skipped=1)
    done.stdout.fnmatch_lines(["*budget passed: the process took 2??.? MiB*", "*assert 1 == 2*"])


@pytest.mark.parametrize(
    "marker",
    ['"many"', "", "1.5", '"1MiB", 2', '"1MiB", proces=True', "True", "-1", '"1MiB", process=1'],
)
def test_bad_markers_are_usage_errors(run, marker):
    done = run(f"""
@pytest.mark.memory_budget({marker})
def test_never(): raise SystemError
""")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: *test_never: *"])


def test_the_fixture_measures_and_reports(run, pytester):
    done = run(
        """
def test_it(memory_meter):
    took = memory_meter.cpu_peak(lambda: torch.zeros(MIB, dtype=torch.uint8))
    assert (took.peak_bytes, took.held_bytes) == (MIB, MIB)

@pytest.mark.memory_budget("1MiB")
def test_marked(): torch.zeros(MIB, dtype=torch.uint8)
""",
        "--junitxml=report.xml",
    )
    done.assert_outcomes(passed=2)
    report = (pytester.path / "report.xml").read_text()
    assert '<property name="cpu_peak_bytes" value="1048576" />' in report
    assert '<property name="memory_bytes" value="1048576" />' in report
    assert '<property name="memory_budget_bytes" value="1048576" />' in report


def test_a_measurement_within_another_is_refused(run):
    done = run("""
@pytest.mark.memory_budget("1MiB")
def test_it(memory_meter): memory_meter.cpu_peak(lambda: None)
""")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*profiler is on already*"])


def test_loading_the_plugin_does_not_import_torch():
    code = "import sys, kvcap.runtime.pytest_plugin; sys.exit('torch' in sys.modules)"
    source = Path(__file__).parents[1] / "src"
    assert subprocess.run([sys.executable, "-c", code], cwd=source, check=False).returncode == 0
