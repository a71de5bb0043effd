"""Starts a program in an interpreter of its own, and asks it for turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvcap.runtime.errors import ExtraMissing, PeerFailed

# A peer's name, the file that runs it, and what its interpreter must have.
PROGRAMS = {
    "kvcap": ("run_kvcap", ""),
    "llama.cpp": ("run_llama_cpp", "llama-cpp-python gguf"),
    "transformers": ("run_transformers", "torch transformers"),
    "kvpress": ("run_kvpress", "torch kvpress"),
}
PEERS = tuple(name for name in PROGRAMS if name != "kvcap")
FOLDER = Path(__file__).parent
START = (
    "import importlib, sys; sys.path[:0] = {path!r}; "
    "module = importlib.import_module('{package}.{module}'); module.main()"
)


class Process:
    """A program that has loaded its model.

    Args:
        name: of a program in `PROGRAMS`.
        python: the interpreter; by default the one that runs this.
        settings: what the program is to load; with `threads`.

    Raises:
        ExtraMissing: its interpreter lacks a package.
        PeerFailed: there is no such interpreter, or the program ended.
    """

    def __init__(self, name: str, python: str | None, settings: Mapping[str, Any]) -> None:
        self.name, self.python = name, python or sys.executable
        module, packages = PROGRAMS[name]
        mine = python is None
        # Ours has what this process can import; of a peer's, only its own packages are wanted.
        path = [str(FOLDER.parent), *(place for place in sys.path if place and mine)]
        threads = str(settings["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONSAFEPATH": "1"}
        if not mine:
            environment.pop("PYTHONPATH", None)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # until the program is closed
        code = START.format(path=path, package=FOLDER.name, module=module)
        try:
            self._child = subprocess.Popen(
                [self.python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._said, env=environment, text=True,
            )  # fmt: skip
        except OSError as error:
            self._said.close()
            raise PeerFailed(
                f"{name} cannot be run by {self.python!r}: {error.strerror}; give the Python of "
                f"its environment, --peer-python {name}=PATH"
            ) from error
        try:
            found = self._asked({**settings, "cpus": cores(int(threads))})
            if (missing := found.get("missing")) is not None:
                raise ExtraMissing(
                    f"{name} needs the package {missing}, which {self.python} lacks; run: "
                    f"{self.python} -m pip install {packages}; or give another interpreter, "
                    f"--peer-python {name}=PATH"
                )
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = found["versions"]

    def turn(self, work: str, n: int, tokens: int, seed: int, **more: Any) -> dict[str, Any]:
        """Have the program do a turn, and return what it gives: see `turn` in `serve.py`.

        Raises:
            PeerFailed: the program ended.
        """
        return self._asked({"work": work, "n": n, "tokens": tokens, "seed": seed, **more})

    def _asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
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
            code = child.wait()
            self._said.seek(0)
            told = self._said.read().decode(errors="replace").strip().splitlines()
            raise PeerFailed(
                f"{self.name}, run by {self.python}, ended with code {code}: "
                f"{told[-1].strip() if told else 'it said nothing'}"
            )
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the program."""
        self._child.kill()
        self._child.communicate()
        self._said.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def free_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores(threads: int) -> list[int]:
    """Return the cores that so many threads use.

    Raises:
        ValueError: this process may not use as many.
    """
    free = free_cores()
    if not 1 <= threads <= len(free):
        raise ValueError(f"{threads} threads, but this process may use 1 to {len(free)} cores")
    return free[:threads]
