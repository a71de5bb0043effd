"""Starts the programs of this folder, each in an interpreter of its own, and has them measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvcap.lab.peers.serve import peak
from kvcap.runtime.cores import usable_cores
from kvcap.runtime.errors import ExtraMissing, PeerFailed
from kvcap.runtime.models import formats

# By name of a program, the file that runs it, and the package that its interpreter needs.
PROGRAMS = {
    "kvcap": ("run_kvcap", ""),
    "llama.cpp": ("run_llama_cpp", "xllamacpp"),
    "transformers": ("run_transformers", "torch transformers"),
    "kvpress": ("run_kvpress", "torch kvpress"),
}
STARTERS = ("kvcap", "llama.cpp")  # programs whose starts can be timed
PEERS = tuple(name for name in PROGRAMS if name != "kvcap")
FOLDER = Path(__file__).parent
START = (
    "import importlib, sys; sys.path[:0] = {path!r}; "
    "module = importlib.import_module('{package}.{module}'); module.{function}()"
)
PINNED = "import os; hasattr(os, 'sched_setaffinity') and os.sched_setaffinity(0, {cpus!r}); "
MAIN = "from kvcap.cli import main; main()"  # kvcap's command line
WAIT = "GOMP_SPINCOUNT"  # the variable by which kvcap's commands let OpenMP's threads sleep
PIECES = 8  # tokens that a started command writes, so that it still runs after the first one


class Process:
    """A process of a program that has loaded its model.

    Args:
        name: a program of `PROGRAMS`.
        python: the interpreter; by default the one that runs this.
        settings: settings of the program, and `threads`.

    Raises:
        ExtraMissing: the interpreter lacks a package, or the program a library.
        PeerFailed: there is no such interpreter, or the program ended.
    """

    def __init__(self, name: str, python: str | None, settings: Mapping[str, Any]) -> None:
        self.name, self.python = name, python or sys.executable
        packages = PROGRAMS[name][1]
        threads = settings["threads"]
        environment, code = _environment(name, python, threads), _code(name, python, "main")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # until the program is closed
        try:
            self._child = subprocess.Popen(
                [self.python, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                text=True,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerFailed(
                f"{name} cannot be run by {self.python!r}: {error.strerror}; give the Python of "
                f"its environment, --peer-python {name}=PATH"
            ) from error
        try:
            answer = self._exchange({**settings, "cpus": cores(int(threads))})
            if (missing := answer.get("missing")) is not None:
                raise ExtraMissing(
                    f"{name} needs the package {missing}, which {self.python} lacks; run: "
                    f"{self.python} -m pip install {packages}; or give another interpreter, "
                    f"--peer-python {name}=PATH"
                )
            if (why := answer.get("unusable")) is not None:
                raise ExtraMissing(f"{name} cannot be run: {why}")
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = answer["versions"]

    def measure(self, work: str, n: int, tokens: int, seed: int, **more: Any) -> dict[str, Any]:
        """Have the program measure once; return its figures, see `measure` in `serve.py`.

        Raises:
            PeerFailed: the program ended.
        """
        return self._exchange({"work": work, "n": n, "tokens": tokens, "seed": seed, **more})

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the program; return its reply."""
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise _ended(self.name, self.python, child, self._stderr)
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def close(self) -> None:
        """End the program."""
        self._child.kill()
        self._child.communicate()
        self._stderr.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def same_imports() -> str:
    """Return code that has a new process of this interpreter import what this process can."""
    path = [folder for folder in sys.path if folder]  # '' would let files beside it come first
    return f"import sys; sys.path[:] = {path!r}; "


def first_piece(name: str, python: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Start a program of `STARTERS`, and end it once it has printed the first piece of its answer.

    kvcap runs as the command `kvcap generate`, with tokenizing and printing.

    Args:
        name: a program of `STARTERS`.
        python: the interpreter; by default the one that runs this.
        settings: settings of a `Process`, and the prompt: `text`, and its tokens `ids` if the model
            has no tokenizer.

    Returns:
        The seconds from the start to the piece, those of processor time, and the peak of resident
        bytes until then.

    Raises:
        PeerFailed: the program ended before that.
    """
    threads = settings["threads"]
    if name == "kvcap":
        code, arguments = same_imports() + MAIN, _generate(settings)
    else:
        code, arguments = _code(name, python, "start"), [json.dumps(settings)]
    command = [python or sys.executable, "-c", PINNED.format(cpus=cores(threads)) + code]
    with tempfile.TemporaryFile() as stderr:
        began = time.perf_counter()
        with subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(name, python, threads),
        ) as child:
            assert child.stdout is not None
            try:
                if not child.stdout.read(1):
                    raise _ended(name, command[0], child, stderr)
                took = time.perf_counter() - began
                spent, peak_bytes = processor_seconds(child.pid), peak(child.pid)
            finally:
                child.kill()
    return {
        "seconds": [took],
        "processor_seconds": spent,
        "peak_bytes": peak_bytes,
        "kv_bytes": None,
    }


def processor_seconds(pid: int) -> float | None:
    """Return the processor time of a process and of those that it began; None: not on Linux."""
    begun = Path(f"/proc/{pid}/task/{pid}/children")
    if not begun.exists():
        return None
    clock = (~pid << 3) | 2  # the system's number of a process's clock
    others = (processor_seconds(int(one)) for one in begun.read_text().split())
    return time.clock_gettime(clock) + sum(one or 0 for one in others)


def _generate(settings: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `kvcap generate` that load the same model as `run_kvcap`."""
    given = {
        "--budget-tokens": settings["budget"],
        "--block-size": settings["block_size"],
        "--threads": settings["threads"],
        "--max-new-tokens": PIECES,
        "--temperature": 0,
    }
    if settings["backend"] == "llamacpp":
        given |= {"--policy": settings["policy"], "--backend": "llamacpp"}
    if settings["backend"] == "pytorch":
        given |= {"--policy": settings["policy"], "--dtype": settings["weights"]}
        if settings["packed"] in formats.NAMES:
            given |= {"--weights": settings["packed"], "--backend": "torch"}
    words = [str(word) for pair in given.items() for word in pair]
    return ["generate", settings["model"], settings["text"], "--raw", "--quiet", *words]


def _environment(name: str, python: str | None, threads: int) -> dict[str, str]:
    """Return the environment of a program; another interpreter only finds its own packages."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}
    if name != "kvcap":
        environment.pop(WAIT, None)  # kvcap's commands set it; others wait as their users have it
    if python is not None:
        environment.pop("PYTHONPATH", None)
    return environment


def _code(name: str, python: str | None, function: str) -> str:
    """Return the code that runs a function of a program's module."""
    # The same interpreter can import what this process can; another one only its own packages.
    path = [str(FOLDER.parent), *(folder for folder in sys.path if folder and python is None)]
    module = PROGRAMS[name][0]
    return START.format(path=path, package=FOLDER.name, module=module, function=function)


def _ended(name: str, python: str, child: subprocess.Popen[Any], stderr: Any) -> PeerFailed:
    """Return the error of a program that ended before it answered."""
    code = child.wait()
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    last = lines[-1].strip() if lines else "it said nothing"
    return PeerFailed(f"{name}, run by {python}, ended with code {code}: {last}")


def cores(threads: int) -> list[int]:
    """Return the cores for so many threads.

    Raises:
        ValueError: this process may not use as many.
    """
    usable = usable_cores()
    if not 1 <= threads <= len(usable):
        raise ValueError(f"{threads} threads, but this process may use 1 to {len(usable)} cores")
    return usable[:threads]
