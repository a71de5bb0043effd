"""Adds `@pytest.mark.memory_budget("64MiB")` and the fixture `memory_meter` to pytest.

Every pytest of an environment with kvcap loads this plugin, so neither torch nor transformers is
imported before a test asks for a measurement.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import TestCase

import pytest

from kvcap.runtime.testing import process_peak as processes
from kvcap.runtime.testing.figures import (
    Compared,
    Figure,
    FiguresFile,
    FiguresUnusable,
    made_on,
    share,
)
from kvcap.runtime.testing.process_peak import REPORT
from kvcap.runtime.units import format_bytes

if TYPE_CHECKING:
    from kvcap.runtime.testing.memory_meter import Allocations, Peak
    from kvcap.runtime.testing.process_peak import ProcessPeak

MARKER = "memory_budget"
USAGE = (
    'write @pytest.mark.memory_budget("64MiB"), memory_budget("64MiB", host="8MiB") or '
    'memory_budget("2GiB", process=True)'
)
DEFAULT = "memory-figures.json"
BASELINE = "kvcap-memory-baseline"  # the plugin's name
FIGURES = pytest.StashKey[list[Figure]]()
LARGEST = pytest.StashKey[dict[str, Callable[[], list["Allocations"]]]]()
"""Holds functions that return the stacks with memory at the peak, by a figure's name."""
SHOWN = 5  # allocations that the message of a failure shows
FRAMES = 4  # frames of each, in the user's own files
WHAT = {
    "cpu_peak": "CPU tensors", "cuda_peak": "tensors on the GPU", "kv": "the cache",
    "host_peak": "Python and NumPy", "process_peak": "the process",
}  # fmt: skip


class MemoryMeter:
    """A set of meters that measure memory within a test, for its report and the baseline.

    A `label` names one of several figures of a test, as in `cpu_peak(f, label="prefill")`.

    Args:
        item: the test.
        stacks: note who allocates, which is reported where a figure is more than its baseline.
    """

    def __init__(self, item: pytest.Item, *, stacks: bool) -> None:
        self._item, self._stacks = item, stacks

    def cpu_peak(
        self, function: Callable[..., Any], *args: Any, label: str = "", **kwargs: Any
    ) -> Peak:
        """See `kvcap.testing.cpu_peak`."""
        return _called(self.cpu_meter(label=label), function, *args, **kwargs)

    def cpu_meter(self, *, label: str = "") -> AbstractContextManager[Peak]:
        """See `kvcap.testing.cpu_meter`."""
        from kvcap.runtime.testing.memory_meter import cpu_meter

        return self._noted("cpu_peak", label, cpu_meter(stacks=self._stacks))

    def host_peak(
        self, function: Callable[..., Any], *args: Any, label: str = "", **kwargs: Any
    ) -> Peak:
        """See `kvcap.testing.host_peak`."""
        return _called(self.host_meter(label=label), function, *args, **kwargs)

    def host_meter(self, *, label: str = "") -> AbstractContextManager[Peak]:
        """See `kvcap.testing.host_meter`."""
        from kvcap.runtime.testing.memory_meter import host_meter

        return self._noted("host_peak", label, host_meter())

    def cuda_peak(
        self, function: Callable[[], Any], device: Any = "cuda", *, label: str = ""
    ) -> Peak:
        """See `kvcap.testing.cuda_peak`."""
        return _called(self.cuda_meter(device, label=label), function)

    def cuda_meter(self, device: Any = "cuda", *, label: str = "") -> AbstractContextManager[Peak]:
        """See `kvcap.testing.cuda_meter`."""
        from kvcap.runtime.testing.memory_meter import cuda_meter

        return self._noted("cuda_peak", label, cuda_meter(device))

    def process_peak(self, target: str | Path, *args: Any, label: str = "") -> ProcessPeak:
        """See `kvcap.testing.process_peak`."""
        peak = processes.process_peak(target, *args)
        self._note("process_peak", label, peak.peak_bytes)
        return peak

    def kv_bytes(self, cache: Any, *, label: str = "") -> int:
        """See `kvcap.testing.kv_bytes`."""
        from kvcap.runtime.testing.memory_meter import kv_bytes

        nbytes = kv_bytes(cache)
        self._note("kv", label, nbytes)
        return nbytes

    @contextmanager
    def _noted(self, kind: str, label: str, meter: AbstractContextManager[Peak]) -> Iterator[Peak]:
        with meter as peak:
            yield peak
        self._note(kind, label, peak.peak_bytes, peak)

    def _note(self, kind: str, label: str, nbytes: int, peak: Peak | None = None) -> None:
        _add(self._item, Figure(kind, nbytes, label), peak)


def _called(
    meter: AbstractContextManager[Peak], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Peak:
    from kvcap.runtime.testing.memory_meter import called

    with meter as peak:
        return called(peak, function, *args, **kwargs)


def _add(item: pytest.Item, figure: Figure, peak: Peak | None) -> None:
    """Keep a figure under a name that no other figure of the test has."""
    figures = item.stash.setdefault(FIGURES, [])
    names, number = {noted.name for noted in figures}, 2
    label = figure.label
    while figure.name in names:
        changed = f"{label or 'run'}-{number}"
        figure = Figure(figure.kind, figure.nbytes, changed, figure.allowed)
        number += 1
    figures.append(figure)
    if peak is not None:
        item.stash.setdefault(LARGEST, {})[figure.name] = peak.largest


@pytest.fixture
def memory_meter(request: pytest.FixtureRequest) -> MemoryMeter:
    """Return meters of memory: cpu_peak, host_peak, cuda_peak, process_peak, kv_bytes."""
    if REPORT in os.environ:  # what the meters import is no part of the process's growth
        import kvcap.runtime.testing.memory_meter  # noqa: F401
    baseline = request.config.pluginmanager.get_plugin(BASELINE)
    return MemoryMeter(request.node, stacks=baseline is not None and not baseline.update)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the baseline."""
    group = parser.getgroup("memory", "memory figures (kvcap)")
    group.addoption(
        "--memory-baseline",
        metavar="FILE",
        help="fail a test whose memory figures grew beyond those of FILE",
    )
    group.addoption(
        "--memory-update",
        action="store_true",
        help=f"write the figures of tests that pass to the baseline (default: {DEFAULT})",
    )
    group.addoption(
        "--memory-tolerance",
        metavar="PERCENT",
        help="by which a peak may grow; default: 2%% for tensors, 10%% for Python and processes",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and read the baseline if one is given."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(size, host=None, process=False): fail where the CPU tensors of the test's body "
        "take more than `size` at once, or its Python objects and NumPy arrays more than `host`; "
        "process=True: where a fresh process for the test grows by more than `size`",
    )
    file, update = config.getoption("memory_baseline"), config.getoption("memory_update")
    try:
        tolerance_text = config.getoption("memory_tolerance")
        tolerance = None if tolerance_text is None else share(tolerance_text)
        if file is not None or update:
            # Absolute, for processes of pytest-xdist that start elsewhere.
            path = Path(config.invocation_params.dir, DEFAULT if file is None else file)
            config.option.memory_baseline = str(path)
            if update and not path.parent.is_dir():
                raise FiguresUnusable(f"there is no directory {path.parent} to write figures to")
            figures = FiguresFile.read(path) if path.exists() or not update else FiguresFile(path)
            config.pluginmanager.register(
                FigureComparison(config, figures, update, tolerance), BASELINE
            )
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(Summary(config), "kvcap-memory-summary")


@dataclass(frozen=True)
class AllowedBytes:
    """An amount of memory, in bytes, that a marker allows its test."""

    size: int
    host: int | None
    process: bool

    @classmethod
    def of(cls, mark: pytest.Mark) -> AllowedBytes:
        """Read the bytes that a marker's arguments allow.

        Raises:
            ValueError: they give none; the message says what would.
        """
        unknown = sorted(set(mark.kwargs) - {"size", "host", "process"})
        if unknown:
            raise ValueError(f"memory_budget knows no {', '.join(unknown)}; {USAGE}")
        sizes = [*mark.args, *([mark.kwargs["size"]] if "size" in mark.kwargs else [])]
        if len(sizes) != 1:
            raise ValueError(f"memory_budget got {len(sizes)} sizes; {USAGE}")
        host, process = mark.kwargs.get("host"), mark.kwargs.get("process", False)
        if not isinstance(process, bool):
            raise ValueError(f"process={process!r} is neither True nor False; {USAGE}")
        if process and host is not None:
            raise ValueError(f"a process's figure counts host memory already; {USAGE}")
        return cls(_bytes(sizes[0]), None if host is None else _bytes(host), process)


def _bytes(size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"{size!r} is no size; {USAGE}")
    from kvcap.runtime.units import parse_bytes

    nbytes = parse_bytes(size)
    if nbytes < 0:
        raise ValueError(f"{size} is below zero; {USAGE}")
    return nbytes


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure the body of a marked test, without its set-up and tear-down."""
    mark = _nearest(item)
    if mark is None:
        return (yield)
    budget, wrong = None, ""
    try:
        budget = AllowedBytes.of(mark)
    except ValueError as error:
        wrong = str(error)
    if budget is None:  # outside `except`, so that it is reported once
        pytest.fail(f"{_where(item)}: {wrong}", pytrace=False)
    if budget.process and REPORT not in os.environ:
        return (yield from _elsewhere(item, budget))
    if budget.process:
        baseline = processes.start()
        result = yield
        figures = [asdict(figure) for figure in item.stash.get(FIGURES, [])]  # of memory_meter
        processes.write(os.environ[REPORT], baseline, figures=figures)
        return result
    peaks = Peaks(budget)
    if _wrap_method(item, peaks):
        result = yield
    else:
        with peaks.measured():
            result = yield
    if getattr(item, "_excinfo", None):  # of a unittest: it failed or was skipped
        return result
    if peaks.tensors is None:
        pytest.fail(f"{_where(item)}: the body of this test was not measured", pytrace=False)
    _judge(item, Figure("cpu_peak", peaks.tensors.peak_bytes, "body", budget.size), peaks.tensors)
    if peaks.host is not None:
        _judge(item, Figure("host_peak", peaks.host.peak_bytes, "body", budget.host), peaks.host)
    return result


def _nearest(item: pytest.Item) -> pytest.Mark | None:
    """Return the marker that counts.

    That of the test's own parameters, which pytest lists behind its function's; else that of its
    function, class or module.
    """
    callspec = getattr(item, "callspec", None)
    own = [mark for mark in getattr(callspec, "marks", ()) if mark.name == MARKER]
    return own[0] if own else item.get_closest_marker(MARKER)


@dataclass
class Peaks:
    """A set of meters that measure one marked test."""

    budget: AllowedBytes
    tensors: Peak | None = field(default=None, init=False)
    host: Peak | None = field(default=None, init=False)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the body of the `with` block."""
        from kvcap.runtime.testing.memory_meter import cpu_meter, host_meter

        with ExitStack() as stack:
            # Notes of calls are Python objects: they would be among the host's memory.
            self.tensors = stack.enter_context(cpu_meter(stacks=self.budget.host is None))
            if self.budget.host is not None:
                self.host = stack.enter_context(host_meter())
            yield


def _wrap_method(item: pytest.Item, peaks: Peaks) -> bool:
    """Measure the method of a `unittest.TestCase` alone, without its setUp and tearDown."""
    case = getattr(item, "instance", None)
    if not isinstance(case, TestCase) or not isinstance(item, pytest.Function):
        return False
    method = item.obj
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with peaks.measured():
                return await method(*args, **kwargs)

        item.obj = awaited
    else:

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            with peaks.measured():
                return method(*args, **kwargs)

        item.obj = called
    setattr(case, item.name, item.obj)
    return True


def _elsewhere(item: pytest.Item, budget: AllowedBytes) -> Generator[None, object, object]:
    """Run a test in a fresh process instead of here."""
    took: dict[str, Any] = {}

    def run() -> None:
        skipped, failed = "", ""
        try:
            took.update(
                processes.in_fresh_process("run_test", _command(item), cwd=item.config.rootpath)
            )
        except processes.NotMeasured as error:
            skipped = f"in its own process: {error}"
        except processes.TestFailed as error:
            failed = f"in its own process:\n{error}"
        except RuntimeError as error:
            failed = f"no figure from its own process: {error}"
        if skipped:  # outside `except`, so that it is reported once
            pytest.skip(skipped)
        if failed:
            pytest.fail(failed, pytrace=False)

    item.runtest = run  # type: ignore[method-assign]
    try:
        result = yield
    finally:
        del item.runtest
    for figure in took.pop("figures"):
        _add(item, Figure(**figure), None)
    grown = processes.ProcessPeak(**took).grown_bytes
    _judge(item, Figure("process_peak", grown, "body", budget.size), None)
    return result


def _judge(item: pytest.Item, figure: Figure, peak: Peak | None) -> None:
    """Report a figure, and fail the test if it exceeds its budget."""
    _add(item, figure, peak)
    allowed, took = figure.allowed, figure.nbytes
    if allowed is None or took <= allowed:
        return
    lines = [
        f"memory budget exceeded: {WHAT[figure.kind]} took {format_bytes(took)} ({took:,} bytes), "
        f"allowed are {format_bytes(allowed)} ({allowed:,}): {took - allowed:,} bytes too many",
        f"  the budget: {_where(item)}",
    ]
    pytest.fail("\n".join([*lines, *_holders(item, figure)]), pytrace=False)


def _holders(item: pytest.Item, figure: Figure) -> list[str]:
    """Return lines that show who held memory at the peak of a figure that is too large."""
    largest = item.stash.get(LARGEST, {}).get(figure.name, list)()
    if not largest and figure.kind == "cpu_peak":
        return ["  (stacks are not noted beside host=, process=True or another profiler)"]
    if not largest:
        return []
    lines = ["  what was held at the peak, the largest first:"]
    for each in largest[:SHOWN]:
        lines += _described(each, item.config.rootpath)
    if len(largest) > SHOWN:
        rest = sum(each.nbytes for each in largest[SHOWN:])
        lines.append(f"    {format_bytes(rest)} from {len(largest) - SHOWN} other places")
    return lines


def _described(each: Allocations, root: Path) -> list[str]:
    """Return lines that show an allocation and its stack, the user's own files first."""
    times = f" in {each.count} allocations" if each.count > 1 else ""
    thread = "" if each.thread == "MainThread" else f", thread {each.thread}"
    lines = [f"    {format_bytes(each.nbytes)} ({each.nbytes:,} bytes){times}{thread}"]
    # Below the test are pytest and whatever started it; a meter stands between test and function.
    above = takewhile(lambda frame: not _is_pytest(frame.file), each.stack)
    stack = [frame for frame in above if Path(frame.file).parent != Path(__file__).parent]
    own = [frame for frame in stack if _is_own(frame.file, root)]
    for frame in own[:FRAMES] or stack[:FRAMES]:
        near = "" if frame.exact else " (an operator near this line)"
        lines.append(f"      {_shown(frame.file, root)}:{frame.line} in {frame.function}{near}")
    if own and stack[0] not in own:
        inner = stack[0]
        lines.append(f"      by {_shown(inner.file, root)}:{inner.line} in {inner.function}")
    if not stack:
        lines.append("      its stack is not known")
    return lines


def _libraries() -> list[str]:
    """Return the folders whose files are not the user's."""
    paths = sysconfig.get_paths()
    return [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def _is_own(file: str, root: Path) -> bool:
    path = Path(file)
    if file.startswith("<") or "site-packages" in path.parts:
        return False
    return path.is_relative_to(root) or not any(path.is_relative_to(x) for x in _libraries())


def _is_pytest(file: str) -> bool:
    return not {"_pytest", "pluggy"}.isdisjoint(Path(file).parts)


def _shown(file: str, root: Path) -> str:
    """Return a path in the shortest form that is still clear."""
    for folder in (str(root), *_libraries()[::-1]):
        if Path(file).is_relative_to(folder):
            return str(Path(file).relative_to(folder))
    return file


def _where(item: pytest.Item) -> str:
    """Return the marker as it is written, with file and line of its test."""
    marked = _nearest(item)
    arguments = [] if marked is None else [repr(x) for x in marked.args]
    arguments += [] if marked is None else [f"{k}={v!r}" for k, v in marked.kwargs.items()]
    file, line, _ = item.location
    return f"memory_budget({', '.join(arguments)}) at {file}:{(line or 0) + 1}"


def _command(item: pytest.Item) -> list[Any]:
    """Return pytest's arguments for the test's own process: that test, and this run's plugins."""
    config = item.config
    name = config.pluginmanager.get_name(sys.modules[__name__])
    plugins = [*config.getoption("plugins"), str(name), "no:cacheprovider", "no:xdist"]
    arguments = [item.nodeid, "-q", *(x for plugin in plugins for x in ("-p", plugin))]
    arguments += ["--rootdir", str(config.rootpath), "-o", "addopts=", "--runxfail"]
    arguments += [f"--import-mode={config.getoption('importmode')}"]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    return [arguments]


class FigureComparison:
    """A plugin that compares every figure with its earlier value, and writes new ones.

    Where tests run in several processes, only pytest's main process writes them.
    """

    def __init__(
        self, config: pytest.Config, figures: FiguresFile, update: bool, tolerance: float | None
    ) -> None:
        self.figures, self.update = figures, update
        self._tolerance = tolerance
        self.measured: dict[str, list[Figure]] = {}
        self.here: dict[str, str] = {}
        self.outcome = "wrote nothing, as no test with figures passed"
        self._writes = update and not hasattr(config, "workerinput")

    def compared(self, test: str, figures: Sequence[Figure]) -> list[Compared]:
        """Compare figures with the file's; nothing fails while the file is rewritten."""
        here = made_on()
        comparisons = [self.figures.compare(test, each, self._tolerance, here) for each in figures]
        return [Compared(c.figure, c.before) for c in comparisons] if self.update else comparisons

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test whose figures grew, after its body and outside all meters."""
        result = yield
        if not getattr(item, "_excinfo", None):
            figures: list[Figure] = item.stash.get(FIGURES, [])
            grew = [c for c in self.compared(item.nodeid, figures) if c.grew]
            if grew:
                lines = [x for c in grew for x in (_growth(c), *_holders(item, c.figure))]
                pytest.fail("\n".join(lines), pytrace=False)
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file once, in the process where all reports arrive."""
        if not (self._writes and self.measured):
            return
        path = self.figures.path
        try:
            if path.exists():  # another run may have written it since this one began
                self.figures = FiguresFile.read(path)
            unlike, others = (
                self.figures.unlike(self.here),
                self.figures.tests.keys() - self.measured,
            )
            self.figures.update(self.measured, self.here)
            self.figures.write()
        except (OSError, FiguresUnusable) as error:
            self.outcome = f"cannot write {path}: {getattr(error, 'strerror', error)}"
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        else:
            self.outcome = f"wrote {len(self.measured)} tests to {path}"
            if unlike and others:
                self.outcome += (
                    f"; {len(others)} others keep figures of another environment and will be "
                    f"compared as if of this one ({unlike}): measure them, too"
                )


def _growth(grown: Compared) -> str:
    figure, before = grown.figure, grown.before or 0
    return (
        f"memory grew: {figure.name} is {format_bytes(figure.nbytes)} ({figure.nbytes:,} bytes), "
        f"the baseline {format_bytes(before)} ({before:,}), at most {grown.limit or 0:,} "
        f"({grown.change}); where that is meant, run pytest --memory-update"
    )


class Summary:
    """A plugin that collects the figures of every process of the run and prints them as a table."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: list[tuple[str, Compared]] = []

    def _baseline(self) -> FigureComparison | None:
        baseline: FigureComparison | None = self._config.pluginmanager.get_plugin(BASELINE)
        return baseline

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the figures of a test to its report, as plain numbers."""
        if call.when == "call" and (figures := item.stash.get(FIGURES, [])):
            item.user_properties += _properties(figures, item.nodeid, self._baseline())
        report = yield
        if call.when == "call" and figures:
            vars(report)["kvcap_memory"] = {
                "figures": [asdict(f) for f in figures],
                "made_on": made_on(),
            }
            item.stash[FIGURES], item.stash[LARGEST] = [], {}  # a plugin may run the test again
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the figures of all processes in the main one."""
        sent = getattr(report, "kvcap_memory", None)
        if sent is None or hasattr(self._config, "workerinput"):
            return
        figures = [Figure(**each) for each in sent["figures"]]
        baseline = self._baseline()
        for figure in figures:
            row = Compared(figure)
            if baseline is not None:
                row = baseline.figures.compare(
                    report.nodeid, figure, baseline._tolerance, sent["made_on"]
                )
            self._rows.append((report.nodeid, row))
        if baseline is not None and report.passed:
            baseline.measured[report.nodeid] = figures
        if baseline is not None:
            baseline.here = sent["made_on"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table."""
        out, baseline = terminalreporter, self._baseline()
        if self._rows and self._config.get_verbosity() >= 0:
            self._table(out)
        if self._rows and baseline is not None:
            self._notes(out, baseline)

    def _table(self, out: Any) -> None:
        out.section("memory")
        header = ["test", "figure", "measured", "allowed", "baseline", "change"]
        rows = [_row(*row) for row in self._rows]
        kept = [i for i, name in enumerate(header) if i < 3 or any(row[i] for row in rows)]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in kept]
        for row in [header, *rows]:
            cells = [row[i] for i in kept]
            out.write_line(
                "  ".join(
                    cell.ljust(w) if i < 2 else cell.rjust(w)
                    for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
                ).rstrip()
            )

    def _notes(self, out: Any, baseline: FigureComparison) -> None:
        if baseline.update:
            out.write_line(baseline.outcome)
            return
        missing = [row for _, row in self._rows if row.before is None]
        if missing:
            out.write_line(
                f"{len(missing)} figures are not in the baseline and were compared with nothing; "
                "pytest --memory-update adds them"
            )
        if unlike := baseline.figures.unlike(baseline.here):
            out.write_line(
                f"only bytes of caches were compared, no peaks: {unlike}; "
                "make a baseline for this environment with pytest --memory-update"
            )


def _properties(
    figures: Sequence[Figure], test: str, baseline: FigureComparison | None
) -> list[tuple[str, object]]:
    """Return the properties for JUnit: each figure, its budget and its baseline."""
    properties: list[tuple[str, object]] = []
    for figure in figures:
        properties.append((figure.name, figure.nbytes))
        stem = figure.name.removesuffix("_bytes")
        if figure.allowed is not None:
            properties.append((f"{stem}_allowed_bytes", figure.allowed))
        before = baseline and baseline.compared(test, [figure])[0].before
        if before is not None:
            properties.append((f"{stem}_baseline_bytes", before))
    return properties


def _row(test: str, row: Compared) -> list[str]:
    figure = row.figure
    over = figure.allowed is not None and figure.nbytes > figure.allowed
    return [
        test,
        figure.name.removesuffix("_bytes"),
        format_bytes(figure.nbytes) + (" exceeds" if over else ""),
        "" if figure.allowed is None else format_bytes(figure.allowed),
        "" if row.before is None else format_bytes(row.before),
        row.change + (" grew" if row.grew else ""),
    ]
