"""The pytest plugin: `@pytest.mark.memory_budget("64MiB")` and the fixture `memory_meter`.

Loaded by every pytest of an environment that has kvcap, so neither torch nor transformers is
imported before a test asks for a measurement.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcap.runtime import process_peak as processes
from kvcap.runtime.process_peak import REPORT
from kvcap.runtime.screen import size

if TYPE_CHECKING:
    from kvcap.runtime.memory_meter import Peak
    from kvcap.runtime.process_peak import ProcessPeak

MARKER = "memory_budget"
USAGE = 'write @pytest.mark.memory_budget("64MiB") or memory_budget("2GiB", process=True)'
BUDGET = pytest.StashKey[int]()


class MemoryMeter:
    """Measures within a test; every figure also goes to the test's report (JUnit XML)."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def cpu_peak(self, function: Callable[[], Any]) -> Peak:
        """See `kvcap.testing.cpu_peak`."""
        from kvcap.runtime.memory_meter import cpu_peak

        return self._told("cpu_peak_bytes", cpu_peak(function))

    def cuda_peak(self, function: Callable[[], Any]) -> Peak:
        """See `kvcap.testing.cuda_peak`."""
        from kvcap.runtime.memory_meter import cuda_peak

        return self._told("cuda_peak_bytes", cuda_peak(function))

    def process_peak(self, target: str | Path, *args: Any) -> ProcessPeak:
        """See `kvcap.testing.process_peak`."""
        found = processes.process_peak(target, *args)
        self._record("process_peak_bytes", found.peak_bytes)
        return found

    def kv_bytes(self, cache: Any) -> int:
        """See `kvcap.testing.kv_bytes`."""
        from kvcap.runtime.memory_meter import kv_bytes

        found = kv_bytes(cache)
        self._record("kv_bytes", found)
        return found

    def _told(self, name: str, peak: Peak) -> Peak:
        self._record(name, peak.peak_bytes)
        return peak


@pytest.fixture
def memory_meter(request: pytest.FixtureRequest) -> MemoryMeter:
    """Meters of memory: cpu_peak, cuda_peak, process_peak, kv_bytes."""
    # Not `record_property`, which warns under JUnit's newer schema, where it works as well.
    properties = request.node.user_properties
    return MemoryMeter(lambda name, value: properties.append((name, value)))


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(size, process=False): fail where the CPU tensors of the test's body take more "
        "than `size` at once; process=True: where a fresh process for the test grows by more",
    )
    config.pluginmanager.register(Body(), "kvcap-memory-body")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse bad markers before anything runs."""
    for item in items:
        if mark := item.get_closest_marker(MARKER):
            item.stash[BUDGET] = _allowed(mark, item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test elsewhere where its marker says so, instead of here."""
    allowed = pyfuncitem.stash.get(BUDGET, None)
    if allowed is None or not _own_process(pyfuncitem) or REPORT in os.environ:
        return None
    try:
        took = processes.in_fresh_process(
            "run_test", _command(pyfuncitem), cwd=pyfuncitem.config.rootpath
        )
    except processes.NotMeasured as error:
        pytest.skip(f"skipped in its process: {error}")
    except RuntimeError as error:
        pytest.fail(f"the test failed in its process: {error}", pytrace=False)
    _judge(pyfuncitem, "the process", took.grown_bytes, allowed)
    return True


class Body:
    """Measures the body of a marked test that runs in this process."""

    @staticmethod
    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(
        pyfuncitem: pytest.Function,
    ) -> Generator[None, object, object]:
        """Around the body alone: fixtures are ready by then."""
        allowed, elsewhere = pyfuncitem.stash.get(BUDGET, None), _own_process(pyfuncitem)
        if allowed is None or (elsewhere and REPORT not in os.environ):
            return (yield)
        if elsewhere:
            baseline = processes.start()
            result = yield
            processes.write(os.environ[REPORT], baseline)
            return result
        from kvcap.runtime.memory_meter import cpu_meter

        with cpu_meter() as peak:
            result = yield
        _judge(pyfuncitem, "CPU tensors", peak.peak_bytes, allowed)
        return result


def _own_process(item: pytest.Item) -> bool:
    mark = item.get_closest_marker(MARKER)
    return mark is not None and bool(mark.kwargs.get("process"))


def _allowed(mark: pytest.Mark, item: pytest.Item) -> int:
    """The marker's size in bytes; a usage error where it is none."""
    process = mark.kwargs.get("process", False)
    fits = len(mark.args) == 1 and set(mark.kwargs) <= {"process"} and isinstance(process, bool)
    given = mark.args[0] if fits else None
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise pytest.UsageError(f"{item.nodeid}: {USAGE}")
    from kvcap.runtime.plan import parse_bytes

    try:
        found = parse_bytes(given)
    except ValueError as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}") from error
    if found < 0:
        raise pytest.UsageError(f"{item.nodeid}: {given} is below zero; {USAGE}")
    return found


def _judge(item: pytest.Item, what: str, measured: int, allowed: int) -> None:
    """Report the figures, and fail the test that took more than it may."""
    item.user_properties += [("memory_bytes", measured), ("memory_budget_bytes", allowed)]
    if measured > allowed:
        pytest.fail(
            f"memory budget passed: {what} took {size(measured)} ({measured:,} bytes), allowed "
            f"are {size(allowed)} ({allowed:,}): {measured - allowed:,} bytes too many",
            pytrace=False,
        )


def _command(item: pytest.Item) -> list[Any]:
    """What pytest is told in the test's own process: that test, and nothing of `addopts`."""
    config = item.config
    name = config.pluginmanager.get_name(sys.modules[__name__])
    arguments = [item.nodeid, "-q", "-p", str(name), "-p", "no:cacheprovider", "-p", "no:xdist"]
    arguments += ["--rootdir", str(config.rootpath), "-o", "addopts="]
    arguments += [f"--import-mode={config.getoption('importmode')}"]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    return [arguments]
