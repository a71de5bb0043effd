"""A job for workers of tests, which writes down everything that it does and dies where it is told.

It stands in a module of its own, as processes that are started afresh import it, and needs neither
torch nor a model.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Chores:
    """Turns words into capitals; plants in `folder` say where a worker dies.

    Plants are files: `die-at-load-N` (worker N, once), `die-at-WORD` (once), `always-at-WORD`.
    """

    folder: Path

    def load(self, worker: int) -> None:
        """Write the process down."""
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
        """The words that were begun, in order."""
        return [line.split()[0] for line in (self.folder / "begun").read_text().splitlines()]

    def processes(self) -> list[int]:
        """The processes that were made ready, living or dead."""
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob("process-*")]


def _take(plant: Path) -> bool:
    found = plant.exists()
    plant.unlink(missing_ok=True)
    return found


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
