"""Compares the figures that tests measure with a baseline, a JSON file of earlier ones.

The file holds `made_on` (versions and machine), and under `figures`, by test, the bytes of each
figure. A figure may be `{"bytes": 1048576, "tolerance": "5%"}`, and an update keeps its tolerance.
Nothing heavy is imported here, as every pytest of an environment with kvcap imports it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FORMAT = 1
# By how much a figure may grow: some are exact everywhere, some on equal versions, some never.
TOLERANCES = {"kv": 0.0, "cpu_peak": 0.02, "cuda_peak": 0.02, "host_peak": 0.1, "process_peak": 0.1}
# Bytes that a figure may grow by in any case: what the first use of a library builds and keeps.
NOISE = {"host_peak": 1 << 20}
ANYWHERE = {"kv"}  # compared whatever the versions and the machine are


class FiguresUnusable(ValueError):
    """An error that says that the file of figures is missing or malformed."""


@dataclass(frozen=True)
class Figure:
    """A number of bytes that a test measured."""

    kind: str  # a key of TOLERANCES
    nbytes: int
    label: str = ""
    allowed: int | None = None  # bytes, by the test's marker

    @property
    def name(self) -> str:
        """Return the figure's name in the file and in JUnit's properties."""
        return ".".join(filter(None, (self.label, f"{self.kind}_bytes")))


@dataclass(frozen=True)
class Compared:
    """A figure that stands beside its earlier value."""

    figure: Figure
    before: int | None = None
    limit: int | None = None  # the most bytes that the earlier value allows; None: not compared

    @property
    def grew(self) -> bool:
        """Return whether it grew beyond the tolerance."""
        return self.limit is not None and self.figure.nbytes > self.limit

    @property
    def change(self) -> str:
        """Return the change as people read it, such as +2.0 %."""
        if self.before is None:
            return ""
        if self.before == 0:
            return f"{self.figure.nbytes:+,} B" if self.figure.nbytes else "+0.0 %"
        return f"{self.figure.nbytes / self.before - 1:+.1%}".replace("%", " %")


def made_on() -> dict[str, str]:
    """Return the versions and machine that figures depend on; of torch only if it is imported."""
    facts = {"platform": f"{platform.system()} {platform.machine()}"}
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["cpu"] = torch.backends.cpu.get_cpu_capability()
        facts["threads"] = str(torch.get_num_threads())
        if torch.cuda.is_initialized():
            facts["gpu"] = torch.cuda.get_device_name()
    return facts


class FiguresFile:
    """A file that keeps the figures of every test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made_on: dict[str, str] = {}
        self.tests: dict[str, dict[str, Any]] = {}

    @classmethod
    def read(cls, path: Path) -> FiguresFile:
        """Read a file that `write` wrote, and people may have edited.

        Raises:
            FiguresUnusable: it is missing or malformed.
        """
        figures_file = cls(path)
        make = "`pytest --memory-update --memory-baseline FILE` writes one"
        try:
            document = json.loads(path.read_text())
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r} rather than {FORMAT}")
            figures_file.made_on = {str(k): str(v) for k, v in dict(document["made_on"]).items()}
            figures_file.tests = {str(k): dict(v) for k, v in dict(document["figures"]).items()}
            for figures in figures_file.tests.values():
                for value in figures.values():
                    _bytes_and_tolerance(value)
        except FileNotFoundError as error:
            raise FiguresUnusable(f"there is no file of figures {path}; {make}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FiguresUnusable(f"{path} is no file of figures ({error!r}); {make}") from error
        return figures_file

    def unlike(self, here: Mapping[str, str]) -> str:
        """Say how this machine differs from the one where the file was made; '' if it does not."""
        return ", ".join(
            f"{name} {self.made_on[name]} there, {here[name]} here"
            for name in sorted(self.made_on.keys() & here.keys())
            if self.made_on[name] != here[name]
        )

    def compare(
        self, test: str, figure: Figure, tolerance: float | None, here: Mapping[str, str]
    ) -> Compared:
        """Compare a figure with its earlier value; `tolerance` replaces its kind's own.

        Where neither the file has a tolerance for the figure nor one is given, growth below `NOISE`
        is ignored.
        """
        value = self.tests.get(test, {}).get(figure.name)
        if value is None:
            return Compared(figure)
        before, own = _bytes_and_tolerance(value)
        if figure.kind not in ANYWHERE and self.unlike(here):
            return Compared(figure, before)
        noise = 0
        if own is None:
            if tolerance is not None and figure.kind not in ANYWHERE:
                own = tolerance
            else:
                own, noise = TOLERANCES[figure.kind], NOISE.get(figure.kind, 0)
        return Compared(figure, before, max(math.floor(before * (1 + own)), before + noise))

    def update(self, measured: Mapping[str, list[Figure]], here: Mapping[str, str]) -> None:
        """Replace the figures of measured tests; other tests' figures stay."""
        for test, figures in measured.items():
            stored, now = self.tests.get(test, {}), dict[str, Any]()
            for figure in figures:
                value = stored.get(figure.name)
                now[figure.name] = (
                    {**value, "bytes": figure.nbytes} if isinstance(value, dict) else figure.nbytes
                )
            self.tests[test] = now
        self.made_on |= here  # what a run does not know, as without torch, stays

    def write(self) -> None:
        """Replace the file, whole or not at all."""
        document = {"format": FORMAT, "made_on": self.made_on, "figures": self.tests}
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)


def share(text: str) -> float:
    """Return 0.02 for '2%' or '2'.

    Raises:
        ValueError: not a percentage of zero or more.
    """
    try:
        fraction = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < math.inf:
        raise ValueError(f"{text!r} is no percentage; write 2% or 0.5%")
    return fraction


def _bytes_and_tolerance(value: Any) -> tuple[int, float | None]:
    tolerance = None
    if isinstance(value, dict):
        tolerance = share(value["tolerance"]) if "tolerance" in value else None
        value = value["bytes"]
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of bytes")
    return value, tolerance
