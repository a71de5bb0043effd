"""Describes one measured cell of a sweep: what was asked, what came out, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from kvcap.evals.quality.scores import UNITS, Unit
from kvcap.evals.reports import versions
from kvcap.runtime.cache.slot_format import KvDtype
from kvcap.runtime.files import SETTINGS, check_plain
from kvcap.runtime.types import Positions

CELLS = "cells.jsonl"  # a file in a sweep's folder

Options = tuple[tuple[str, Any], ...]
Question = Literal["aware", "after"]
# How the model is asked, in the words of tables and plots.
ASKED: dict[Question, str] = {"aware": "question-aware", "after": "context-only"}


@dataclass(frozen=True)
class Setting:
    """A setting that a cell's score depends on; two cells of one setting are the same cell."""

    model: str
    dtype: str
    task: str
    length: int  # tokens of a prompt, at most
    policy: str
    positions: Positions
    budget: int | None  # slots per KV head and layer; None: `full`, which is never capped
    samples: int
    seed: int
    block_size: int
    options: Options = ()  # given to the policy, sorted by name
    kv_dtype: KvDtype | None = None  # type of slots; None: `dtype`
    question: Question | None = "aware"
    """Says when the question is read: with the context, or after its eviction; None: none is."""
    depth: float | None = None
    """Says where in the text the answer stands, 0 (start) to 1; None: samples are spread out."""
    max_new_tokens: int | None = None  # an answer may take; None: as many as the task says
    data: str | None = None  # digest of the file that the task reads, if it reads one
    recall: int = 0  # tokens of evicted text that are read again before a question, at most

    @property
    def asked(self) -> str:
        """Say how the model is asked, for labels: 'question-aware', 'context-only', or ''."""
        return ASKED[self.question] if self.question else ""

    @property
    def slots(self) -> str:
        """Say what slots hold, for labels: 'int8 slots', or '' for the model's own numbers."""
        return f"{self.kv_dtype} slots" if self.kv_dtype else ""


@dataclass(frozen=True)
class Cell:
    """A setting with its result.

    What has a default is missing in cells of earlier versions.
    """

    setting: Setting
    score: float  # in units of `unit`
    ci_low: float  # 95 % interval of the score
    ci_high: float
    kv_bytes: int  # bytes of a cache for one sequence
    seconds: float
    device: str
    versions: dict[str, str]
    scoring_ms: dict[str, float] | None = None  # percentiles per block, all layers; None: no run
    extra_bytes: int | None = None  # the part of `kv_bytes` that only this policy needs
    scores: tuple[float, ...] | None = None  # every sample's in order; None: they were not kept
    unit: str = "share"  # a name in `UNITS`
    plain: bool = False  # asked in plain text, as the model has no chat template

    @property
    def of(self) -> Unit:
        """Return the unit of the score."""
        return UNITS[self.unit]

    def as_dict(self) -> dict[str, Any]:
        """Return the cell as one flat object, as in `cells.jsonl`."""
        row = asdict(self)
        return {**row.pop("setting"), **row}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Cell:
        """Make the cell of a row of `cells.jsonl`."""
        given = {f.name: row.pop(f.name) for f in fields(Setting) if f.name in row}
        given["options"] = as_options(dict(given.get("options", ())))
        if row.get("scores") is not None:
            row["scores"] = tuple(row["scores"])
        if row.get("unit", "share") not in UNITS:
            raise ValueError(f"unit {row['unit']!r} is not one of {', '.join(UNITS)}")
        return cls(Setting(**given), **row)


def label(s: Setting) -> str:
    """Name the policy, its options, slots of other numbers than the model's, and recall."""
    given = [*(f"{name}={value}" for name, value in s.options), *([s.slots] if s.slots else [])]
    given += [f"recall {s.recall}"] if s.recall else []
    return ", ".join([s.policy, *given])


def as_options(given: Mapping[str, Any]) -> Options:
    """Make a policy's options hashable, and the same after a trip through JSON.

    >>> as_options({"window": 16, "layers": [0, 1]})
    (('layers', (0, 1)), ('window', 16))
    """
    return tuple((name, _frozen(name, given[name])) for name in sorted(given))


def _frozen(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(name, part) for part in value)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"option {name}: {value!r} is not text, a number or a list of these")
    return value


def read_cells(path: Path) -> list[Cell]:
    """Read the cells of a `cells.jsonl`, none where there is no file.

    A last line that is being written, or was when its sweep was killed, is left out.

    Raises:
        ValueError: a line that is no cell.
    """
    lines = path.read_text(errors="replace").split("\n") if path.exists() else [""]
    if _unfinished(lines[-1]):
        lines.pop()
    return [_cell(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def cells_of(folders: Sequence[Path]) -> list[Cell]:
    """Read the cells in folders of sweeps; of one that was measured twice, keep the later.

    Raises:
        ValueError: no folder, one without cells, or a line that is no cell.
    """
    found: dict[Setting, Cell] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {str(folder)!r}; kvcap eval --out DIR makes one")
        cells = read_folder(folder)
        if not cells:
            raise ValueError(f"{str(folder)!r} holds no {CELLS} with cells; kvcap eval writes them")
        found |= {cell.setting: cell for cell in cells}
    return [*found.values()]


def read_folder(folder: Path) -> list[Cell]:
    """Read the cells of a sweep's folder, none where there is no file; of one setting, the last.

    Raises:
        ValueError: a line that is no cell, or a file that is too large.
    """
    path = folder / CELLS
    if not path.exists():
        return []
    check_plain(path, SETTINGS)
    return [*{cell.setting: cell for cell in read_cells(path)}.values()]


def mend(path: Path) -> bool:
    """End a file's last line, or cut it off where it is half a cell, as after a power cut.

    Only whoever writes the file may do so. Returns whether a part of a cell was cut off.
    """
    last = path.read_bytes().rpartition(b"\n")[2] if path.exists() else b""
    if not last:
        return False
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if unfinished := _unfinished(last.decode(errors="replace")):
            file.truncate(end - len(last))
        else:
            file.write(b"\n")
    return unfinished


def _unfinished(last: str) -> bool:
    """Return whether what follows the last newline is nothing, or no whole JSON."""
    try:
        json.loads(last)
    except ValueError:
        return True
    return False


def current_cells(path: Path) -> list[Cell]:
    """Read the cells of a file that were measured with this version of kvcap.

    Raises:
        ValueError: a line that is no cell.
    """
    current = versions()["kvcap"]
    return [cell for cell in read_cells(path) if cell.versions["kvcap"] == current]


def _cell(line: str, where: str) -> Cell:
    try:
        return Cell.from_dict(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{where} is no cell ({error}); remove it or give another --out"
        ) from error


def add_cell(path: Path, cell: Cell) -> None:
    """Append one line, so that an interrupted sweep keeps its finished cells."""
    with path.open("a") as file:
        file.write(json.dumps(cell.as_dict()) + "\n")
        file.flush()
        os.fsync(file.fileno())
