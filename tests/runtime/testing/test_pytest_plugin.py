"""The pytest plugin, run by pytest on planted tests."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from make import in_python

import kvcap
from kvcap import testing
from kvcap.runtime.testing import figures

ROOT = Path(__file__).parents[3]
pytest_plugins = ["pytester"]
INSTALLED = [e.name for e in entry_points(group="pytest11") if e.name == "kvcap"]
PLUGIN = INSTALLED[0] if INSTALLED else "kvcap.runtime.testing.pytest_plugin"
HEAD = "import pytest, torch\nMIB = 1024 * 1024\n\n"


@pytest.fixture(scope="module", autouse=True)
def everything_imported():
    """Pytester drops what a run imports, and parts of torch cannot be imported twice."""
    import kvcap.runtime.planning.plan  # noqa: F401
    from kvcap.testing import cpu_peak

    assert cpu_peak(lambda: None).peak_bytes == 0


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.delenv("CI", raising=False)  # with it, pytest repeats whole messages at the end
    pytester.syspathinsert(ROOT / "src")

    def runs(code: str, *arguments: str):
        pytester.makepyfile(HEAD + code)
        options = ("-p", PLUGIN, "-p", "no:xdist", "--strict-markers", *arguments)
        return pytester.runpytest_inprocess(*options)

    return runs


@pytest.mark.slow
def test_a_budget_that_is_kept_and_one_that_is_exceeded(run):
    done = run("""
@pytest.mark.memory_budget("8MiB")
def test_kept(): torch.zeros(4 * MIB, dtype=torch.uint8)

def work():
    return torch.zeros(9 * MIB, dtype=torch.uint8)  # gone at once, and seen

@pytest.mark.memory_budget("8MiB")
def test_exceeded():
    work()

def test_unmarked(): torch.zeros(9 * MIB, dtype=torch.uint8)
""")
    done.assert_outcomes(passed=2, failed=1)
    name = "test_a_budget_that_is_kept_and_one_that_is_exceeded.py"
    done.stdout.fnmatch_lines(
        [
            "memory budget exceeded: CPU tensors took 9.0 MiB (9,437,184 bytes), allowed are "
            "8.0 MiB (8,388,608): 1,048,576 bytes too many",
            f"  the budget: memory_budget('8MiB') at {name}:11",
            "    9.0 MiB (9,437,184 bytes)",
            f"      {name}:9 in work",
            f"      {name}:13 in test_exceeded",
            "* memory *",
            f"{name}::test_kept      body.cpu_peak  *4.0 MiB  8.0 MiB",
            f"{name}::test_exceeded  body.cpu_peak  *9.0 MiB exceeds  8.0 MiB",
        ]
    )
    assert "pluggy" not in done.stdout.str().partition("FAILURES")[2]


THREADS = """
import asyncio, threading, unittest
from concurrent.futures import ThreadPoolExecutor
pytestmark = pytest.mark.memory_budget("1KiB")

def work(): torch.zeros(4 * MIB, dtype=torch.uint8)

POOL = ThreadPoolExecutor(1)
POOL.submit(work).result()  # its thread runs before it is measured
"""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("body", "thread"),
    [
        ("t = threading.Thread(target=work, name='mine'); t.start(); t.join()", "mine"),
        ("POOL.submit(work).result()", "ThreadPoolExecutor*"),
        ("asyncio.run(asyncio.to_thread(work))", "asyncio_0"),
    ],
)
def test_what_other_threads_allocate_counts_and_says_where(run, body, thread):
    done = run(f"{THREADS}\ndef test_it(): {body}")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "*exceeded: CPU tensors took 4.0 MiB (4,194,304 bytes)*",
            "  the budget: memory_budget('1KiB') at *.py:14",
            f"    4.0 MiB (4,194,304 bytes), thread {thread}",
            "*.py:9 in work",
        ]
    )


def test_a_streamer_of_transformers_counts(run):
    done = run("""
import threading
import kvcap
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer
from kvcap import pocket

model = AutoModelForCausalLM.from_pretrained(pocket.path())
tokenizer = AutoTokenizer.from_pretrained(pocket.path())

@pytest.mark.memory_budget("1KiB")
def test_it():
    streamer = TextIteratorStreamer(tokenizer)
    inputs = tokenizer("a word or two", return_tensors="pt")
    kwargs = dict(inputs, streamer=streamer, max_new_tokens=2)
    thread = threading.Thread(target=model.generate, kwargs=kwargs, name="writer")
    thread.start()
    assert "".join(streamer)
    thread.join()
""")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*exceeded: CPU tensors*", "*thread writer"])


@pytest.mark.slow
def test_methods_of_unittest_are_measured_without_their_set_up(run):
    done = run("""
import unittest

@pytest.mark.memory_budget("4MiB")
class TestIt(unittest.TestCase):
    def setUp(self): self.large = torch.zeros(8 * MIB, dtype=torch.uint8)
    def test_kept(self): torch.zeros(MIB, dtype=torch.uint8)
    def test_exceeded(self): torch.zeros(5 * MIB, dtype=torch.uint8)
    def test_wrong(self): self.assertEqual(torch.zeros(5 * MIB).sum(), 2)
    def test_skipped(self): self.skipTest("no reason")

@pytest.mark.memory_budget("4MiB")
class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self): self.large = torch.zeros(8 * MIB, dtype=torch.uint8)
    async def test_kept(self): torch.zeros(MIB, dtype=torch.uint8)
    async def test_exceeded(self): torch.zeros(5 * MIB, dtype=torch.uint8)
""")
    done.assert_outcomes(passed=2, failed=3, skipped=1)
    assert done.stdout.str().count("exceeded: CPU tensors took 5.0 MiB") == 2
    assert done.stdout.str().count("at test_methods_of_unittest_are_measured_without_their") == 2
    done.stdout.fnmatch_lines(["E*AssertionError: *0* != 2"])


def test_markers_of_classes_and_parameters_and_where_their_test_is(run):
    done = run("""
@pytest.mark.memory_budget("1MiB")
class TestIt:
    @pytest.mark.parametrize("n", [
        pytest.param(1),
        pytest.param(3),
        pytest.param(2, marks=pytest.mark.memory_budget(size="2MiB")),
    ])
    def test_it(self, n, large): torch.zeros(n * MIB, dtype=torch.uint8)

@pytest.fixture
def large(): return torch.zeros(8 * MIB, dtype=torch.uint8)  # not of the body
""")
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["  the budget: memory_budget('1MiB') at *.py:7"])


def test_of_two_markers_the_nearer_one_counts(run):
    """A parameter's rather than its function's, a function's rather than its class's."""
    done = run("""
@pytest.mark.memory_budget("1MiB")
class TestIt:
    @pytest.mark.memory_budget("3MiB")
    @pytest.mark.parametrize("n", [
        3,
        pytest.param(5, marks=pytest.mark.memory_budget("5MiB")),
        pytest.param(2, marks=[pytest.mark.skipif(False, reason=""),
                               pytest.mark.memory_budget("1536KiB")]),
        pytest.param(4),
    ])
    def test_it(self, n): torch.zeros(n * MIB, dtype=torch.uint8)
""")
    done.assert_outcomes(passed=2, failed=2)
    done.stdout.fnmatch_lines(
        [
            "  the budget: memory_budget('1536KiB') at *.py:7",
            "  the budget: memory_budget('3MiB') at *.py:7",
        ]
    )


@pytest.mark.slow
def test_memory_of_python_and_numpy_counts_on_request(run):
    done = run("""
import numpy, threading

@pytest.mark.memory_budget("1KiB", host="4MiB")
def test_kept(): numpy.ones(2 * MIB, dtype="uint8")

@pytest.mark.memory_budget("1KiB", host="4MiB")
def test_numpy():
    t = threading.Thread(target=numpy.ones, args=(5 * MIB, "uint8")); t.start(); t.join()

@pytest.mark.memory_budget("1KiB", host="4MiB")
def test_python(): bytearray(5 * MIB)

@pytest.mark.memory_budget("1KiB")
def test_not_asked(): bytearray(5 * MIB)

@pytest.mark.memory_budget("1KiB", host="4MiB")
def test_both(): torch.zeros(2 * MIB, dtype=torch.uint8)
""")
    done.assert_outcomes(passed=2, failed=3)
    assert done.stdout.str().count("exceeded: Python and NumPy took 5.0 MiB") == 2
    assert done.stdout.str().count("exceeded: CPU tensors took 2.0 MiB") == 1


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


@pytest.mark.slow
def test_a_fresh_process(run, pytester):
    pytester.makepyfile(more_fixtures="import pytest\n@pytest.fixture\ndef given(): return 1")
    pytester.syspathinsert()
    done = run(
        """
@pytest.mark.memory_budget("100MiB", process=True)
def test_kept(memory_meter):
    memory_meter.cpu_peak(torch.zeros, 10 * MIB, dtype=torch.uint8, label="within")

@pytest.mark.memory_budget("100MiB", process=True)
def test_passed(): torch.ones(200 * MIB, dtype=torch.uint8)

@pytest.mark.memory_budget("100MiB", process=True)
def test_wrong(given): assert given == 2

@pytest.mark.memory_budget("100MiB", process=True)
def test_skipped(): pytest.skip("no reason")
""",
        "-p",
        "more_fixtures",
    )
    done.assert_outcomes(passed=1, failed=2, skipped=1)
    done.stdout.fnmatch_lines(["*budget exceeded: the process took 2??.? MiB*", "*assert 1 == 2*"])
    done.stdout.fnmatch_lines(["*::test_kept *within.cpu_peak *10.0 MiB*"])
    report = done.stdout.str().partition("short test summary")[0]
    assert report.count("E       assert 1 == 2") + report.count("E   assert 1 == 2") == 1


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('"many"', "'many' is not a size"),
        ("", "got 0 sizes"),
        ("1.5", "1.5 is no size"),
        ('"1MiB", 2', "got 2 sizes"),
        ('"1MiB", size=2', "got 2 sizes"),
        ('"1MiB", proces=True', "knows no proces"),
        ("True", "True is no size"),
        ("-1", "-1 is below zero"),
        ('"1MiB", process=1', "process=1 is neither True nor False"),
        ('"1MiB", host="x"', "'x' is not a size"),
        ('"1MiB", host=1, process=True', "counts host memory already"),
    ],
)
def test_a_bad_marker_fails_its_test_alone(run, marker, message):
    done = run(f"""
@pytest.mark.memory_budget({marker})
def test_never(): raise SystemError

def test_other(): pass
""")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines([f"memory_budget(*) at test_*.py:5: *{message}*"])
    assert "SystemError" not in done.stdout.str()
    assert "During handling" not in done.stdout.str()


@pytest.mark.slow
def test_the_fixture_measures_and_reports(run, pytester):
    done = run(
        """
def test_it(memory_meter):
    took = memory_meter.cpu_peak(lambda: torch.zeros(MIB, dtype=torch.uint8), label="prefill")
    assert (took.peak_bytes, took.held_bytes) == (MIB, MIB)
    for _ in range(2):
        with memory_meter.cpu_meter() as took:
            torch.zeros(2 * MIB, dtype=torch.uint8)
        assert (took.peak_bytes, took.held_bytes) == (2 * MIB, 0)
    assert memory_meter.host_peak(lambda: bytearray(MIB)).peak_bytes >= MIB
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="needs a CUDA device"), memory_meter.cuda_meter():
            pass

@pytest.mark.memory_budget("1MiB")
def test_marked(): torch.zeros(MIB, dtype=torch.uint8)
""",
        "--junitxml=report.xml",
    )
    done.assert_outcomes(passed=2)
    report = (pytester.path / "report.xml").read_text()
    assert '<property name="prefill.cpu_peak_bytes" value="1048576" />' in report
    assert '<property name="cpu_peak_bytes" value="2097152" />' in report
    assert '<property name="run-2.cpu_peak_bytes" value="2097152" />' in report
    assert '<property name="body.cpu_peak_bytes" value="1048576" />' in report
    assert '<property name="body.cpu_peak_allowed_bytes" value="1048576" />' in report


OWN = """
import os
from transformers import DynamicCache
MORE = int(os.environ.get("MORE", 0))

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.memory_budget("64MiB")
def test_work(n): torch.zeros((n + MORE) * MIB, dtype=torch.uint8)

def test_cache(memory_meter):
    cache, some = DynamicCache(), torch.zeros(1, 2, 100 + MORE, 4)
    cache.update(some, some, 0)
    memory_meter.kv_bytes(cache, label="chat")
"""
XDIST = ["-p", "xdist", "-n", "2"]


ORDER = """
import sys, types
SIZE = 1000

@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    "A module that takes 3 MB, and a library that keeps 600 KB of its first use."
    (tmp_path / "heavy.py").write_text("kept = bytearray(3_000_000)")
    monkeypatch.syspath_prepend(tmp_path)

def work(size, cache=[]):
    import heavy
    if not cache:
        cache.append(bytearray(600_000))
    return bytearray(size)

@pytest.mark.parametrize("n", range(2))
def test_meter(memory_meter, n): memory_meter.host_peak(work, SIZE)

@pytest.mark.memory_budget("1MiB", host="1MiB")
def test_marker(): work(SIZE)
"""


def test_host_figures_do_not_depend_on_what_ran_before(run, pytester):
    """What the first test alone imports and builds is no growth, whichever is the first."""
    run(ORDER, "--memory-update").assert_outcomes(passed=3)
    path = pytester.path / "memory-figures.json"
    (test,) = {name.partition("::")[0] for name in json.loads(path.read_text())["figures"]}
    compare = ("--memory-baseline", str(path))
    for name in ("test_meter[1]", "test_marker"):
        alone = (f"{test}::{name}", *compare)
        sys.modules.pop("heavy", None)
        run(ORDER, *alone).assert_outcomes(passed=1)
    for size, more in ((2_000_000, ()), (300_000, ("--memory-tolerance", "10%"))):
        grown = run(ORDER.replace("SIZE = 1000", f"SIZE = {size}"), *compare, *more)
        grown.stdout.fnmatch_lines(["memory grew: host_peak_bytes is *"])
        assert grown.ret == 1


def test_a_figure_that_grew_says_who_held_memory(run, pytester):
    """As a breach of a budget does; but beside a meter of the host, which would count the notes."""
    code = """
def work(n): return torch.zeros(n * MIB, dtype=torch.uint8)

def test_meter(memory_meter): memory_meter.cpu_peak(work, N)

@pytest.mark.memory_budget("9MiB")
def test_marker(): work(N)

def test_beside(memory_meter):
    with memory_meter.cpu_meter(), memory_meter.host_meter() as host:
        for _ in range(2_000):
            len(work(N))
    assert host.peak_bytes < 50_000
"""
    run(code.replace("N)", "2)"), "--memory-update").assert_outcomes(passed=3)
    path = str(pytester.path / "memory-figures.json")
    done = run(code.replace("N)", "5)"), "--memory-baseline", path)
    done.assert_outcomes(failed=3)
    file = "test_a_figure_that_grew_says_who_held_memory.py"
    held = [
        "  what was held at the peak, the largest first:",
        "    5.0 MiB (5,242,880 bytes)",
        f"      {file}:5 in work",
    ]
    done.stdout.fnmatch_lines(
        [
            "memory grew: cpu_peak_bytes is 5.0 MiB*",
            *held,
            f"      {file}:7 in test_meter",
            "memory grew: body.cpu_peak_bytes is 5.0 MiB*",
            *held,
            f"      {file}:10 in test_marker",
            "memory grew: cpu_peak_bytes is 5.0 MiB*",
            "  (stacks are not noted beside host=*",
        ]
    )


def test_meters_of_the_fixture_take_arguments_and_refuse_what_is_no_function(run):
    run("""
def test_it(memory_meter):
    def f(n, *, of=1): return torch.zeros(n * of, dtype=torch.uint8)
    took = memory_meter.cpu_peak(f, 4, label="some", of=MIB)
    assert (took.peak_bytes, len(took.result)) == (4 * MIB, 4 * MIB)
    assert memory_meter.host_peak(bytes, MIB).peak_bytes >= MIB
    for meter in (memory_meter.cpu_peak, memory_meter.host_peak):
        with pytest.raises(TypeError, match="cpu_peak.f, 4."):
            meter(f(4))
    with pytest.raises(TypeError, match="no device; give arguments of the function by a lambda"):
        memory_meter.cuda_peak(f, f(4))
""").assert_outcomes(passed=1)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("how", [[], XDIST], ids=["one process", "xdist"])
def test_figures_are_held_against_a_baseline(run, pytester, monkeypatch, how):
    done = run(OWN, "--memory-update", *how)
    done.assert_outcomes(passed=3)
    path = pytester.path / "memory-figures.json"
    done.stdout.fnmatch_lines([f"wrote 3 tests to {path}"])
    document = json.loads(path.read_text())
    figures = {k.partition("::")[2]: v for k, v in document["figures"].items()}
    assert figures == {
        "test_work[1]": {"body.cpu_peak_bytes": 1048576},
        "test_work[2]": {"body.cpu_peak_bytes": 2097152},
        "test_cache": {"chat.kv_bytes": 6400},
    }
    assert document["made_on"]["torch"] == str(torch.__version__)
    assert list(document["figures"]) == sorted(document["figures"])
    compare = ("--memory-baseline", str(path), *how)
    monkeypatch.setenv("MORE", "1")
    done = run(OWN, *compare, "--junitxml=report.xml")
    done.assert_outcomes(failed=3)
    done.stdout.fnmatch_lines_random(
        [
            "memory grew: body.cpu_peak_bytes is 2.0 MiB (2,097,152 bytes), the baseline 1.0 MiB "
            "(1,048,576), at most 1,069,547 (+100.0 %)*",
            "memory grew: chat.kv_bytes is *(6,464 bytes), *(6,400), at most 6,400 (+1.0 %)*",
            "*::test_work?2? *body.cpu_peak *3.0 MiB *64.0 MiB *2.0 MiB *+50.0 % grew",
        ]
    )
    report = (pytester.path / "report.xml").read_text()
    assert '<property name="chat.kv_baseline_bytes" value="6400" />' in report
    if how:
        return
    # Peaks may grow by what is asked; bytes of a cache are exact.
    run(OWN, *compare, "--memory-tolerance", "100%").assert_outcomes(passed=2, failed=1)


@pytest.mark.slow
def test_other_versions_and_new_figures_are_said_and_an_update_keeps_the_rest(
    run, pytester, monkeypatch
):
    path = pytester.path / "figures.json"
    run(OWN, "--memory-update", "--memory-baseline", str(path)).assert_outcomes(passed=3)
    document = json.loads(path.read_text())
    (test,) = (name for name in document["figures"] if "test_cache" in name)
    document["figures"][test]["chat.kv_bytes"] = {"bytes": 6400, "tolerance": "5%"}
    (gone,) = (name for name in document["figures"] if "[2]" in name)
    del document["figures"][gone]
    document["made_on"]["torch"] = "1.0"
    path.write_text(json.dumps(document))
    monkeypatch.setenv("MORE", "1")
    done = run(OWN, "-q", "--memory-baseline", str(path))
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(
        [
            "1 figures are not in the baseline*",
            "only bytes of caches were compared, no peaks: torch 1.0 there, *",
        ]
    )
    done = run(OWN, "--memory-update", "--memory-baseline", str(path), "-k", "cache")
    done.assert_outcomes(passed=1, deselected=2)
    done.stdout.fnmatch_lines(
        ["wrote 1 tests*; 1 others keep figures of another *torch 1.0 there*"]
    )
    now = json.loads(path.read_text())["figures"]
    assert now[test] == {"chat.kv_bytes": {"bytes": 6464, "tolerance": "5%"}}
    assert {name for name in now if "[1]" in name}  # measured earlier


def test_figures_that_another_run_wrote_meanwhile_stay(run, pytester):
    done = run(
        """
import json, pathlib
def test_it(memory_meter, pytestconfig):
    memory_meter.cpu_peak(lambda: None)
    other = {"format": 1, "made_on": {}, "figures": {"another": {"kv_bytes": 5}}}
    pathlib.Path(pytestconfig.getoption("memory_baseline")).write_text(json.dumps(other))
""",
        "--memory-update",
    )
    done.assert_outcomes(passed=1)
    written = json.loads((pytester.path / "memory-figures.json").read_text())["figures"]
    assert len(written) == 2
    assert written["another"] == {"kv_bytes": 5}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc, which takes no file")
def test_figures_that_cannot_be_written_leave_the_report(run):
    body = "def test_it(memory_meter): memory_meter.cpu_peak(lambda: None)"
    done = run(body, "--memory-update", "--memory-baseline", "/proc/figures.json")
    done.stdout.fnmatch_lines(["*::test_it *0 B", "cannot write /proc/figures.json: No such file*"])
    done.assert_outcomes(passed=1)
    assert done.ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file of figures"),
        ("", "is no file of figures"),
        ("[]", "is no file of figures"),
        ('{"format": 2}', "format 2 rather than 1"),
        ('{"format": 1, "made_on": {}, "figures": {"a": {"kv_bytes": -1}}}', "-1 is no number"),
        ('{"format": 1, "made_on": {}, "figures": {"a": {"kv_bytes": "1"}}}', "no number of bytes"),
        ('{"format": 1, "made_on": {}, "figures": {"a": 1}}', "is no file of figures"),
    ],
)
def test_a_baseline_that_is_none_is_a_usage_error(run, pytester, text, message):
    path = pytester.path / "figures.json"
    if text is not None:
        path.write_text(text)
    done = run("def test_it(): pass", "--memory-baseline", str(path))
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"ERROR: *{message}*"])


@pytest.mark.parametrize(("given", "message"), [
    # A shell gives an empty name for a variable that is not set, and nothing would be compared.
    *(((*more, "--memory-baseline="), "*is no file of figures*")
      for more in ((), ("--memory-update",))),
    *((("--memory-update", f"--memory-tolerance={x}"), f"'{x}' is no percentage*")
      for x in ("x", "-1", "nan", "inf%")),
])  # fmt: skip
def test_options_that_say_nothing_are_a_usage_error(run, given, message):
    done = run("def test_it(): pass", *given)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_a_measurement_within_another_is_refused(run):
    done = run("""
@pytest.mark.memory_budget("1MiB")
def test_it(memory_meter): memory_meter.cpu_peak(lambda: None)
""")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*profiler is on already*"])


def test_loading_the_plugin_does_not_import_torch():
    code = "import sys, kvcap.runtime.testing.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert in_python(code).returncode == 0


@pytest.mark.slow
def test_the_page_on_memory(pytester, run):
    """Its tests pass, its commands for figures do what they say, and its table names every kind."""
    page = (ROOT / "docs" / "memory.md").read_text()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL)):
        pytester.makepyfile(**{f"test_example{number}": code})
    commands = re.findall(r"^(pytest --memory\S*[^#\n]*)", page, re.MULTILINE)
    assert len(commands) == 3
    # What a model needs cannot be imported twice either.
    runtime = kvcap.Runtime.from_pretrained("pocket", budget_tokens=64, device="cpu")
    "".join(runtime.session().send("Hello!"))
    done = run("", *commands[0].split()[1:])
    done.assert_outcomes(passed=3)
    assert "wrote 3 tests to" in done.stdout.str()
    done = run("", *commands[2].split()[1:])  # the second's options and one more
    done.assert_outcomes(passed=3)
    assert re.search(r"short\.cpu_peak .* \+0\.0 %", done.stdout.str())
    assert "grew" not in done.stdout.str()
    for kind in figures.TOLERANCES:
        assert re.search(rf"^\| `{kind}(_bytes)?`", page, re.MULTILINE), kind
    names = {*testing.__all__} - {"Peak", "Place", "ProcessPeak", "Allocations"}
    for name in names - {"ThreadsNotCounted"}:
        assert name in page
