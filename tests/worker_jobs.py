"""Defines a job for workers in tests, which records all that it does, and dies on demand.

It is a module of its own, as spawned processes import it, and needs neither torch nor a model.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Chores:
    """A job that turns words into capitals, and dies where files in `folder` say.

    The files are `die-at-load-N` (worker N, once), `die-at-WORD` (once) and `always-at-WORD`.
    """

    folder: Path

    def load(self, worker: int) -> None:
        """Record the process."""
        (self.folder / f"process-{os.getpid()}").write_text(str(worker))
        if _take(self.folder / f"die-at-load-{worker}"):
            _die()

    def run(self, message: str) -> str:
        """Do a word; 'wait' never ends, 'bad' raises an error, 'odd' one that has no pickle."""
        with (self.folder / "begun").open("a") as file:
            file.write(f"{message} {os.getpid()}\n")
        if (self.folder / f"always-at-{message}").exists() or _take(
            self.folder / f"die-at-{message}"
        ):
            _die()
        if message == "wait":
            time.sleep(3600)
        if message == "bad":
            raise FileNotFoundError(2, "no such thing")
        if message == "odd":
            raise type("Odd", (Exception,), {})("of a class that nobody else knows")
        return message.upper()

    def begun(self) -> list[str]:
        """Return the words that were begun, in order."""
        return [line.split()[0] for line in (self.folder / "begun").read_text().splitlines()]

    def processes(self) -> list[int]:
        """Return the ids of the processes that loaded the job, living or dead."""
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob("process-*")]


def _take(plant: Path) -> bool:
    planted = plant.exists()
    plant.unlink(missing_ok=True)
    return planted


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
