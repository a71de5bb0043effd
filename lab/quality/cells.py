"""Describes one measured cell of a sweep, its setting and its result, and the file of cells."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvcap.evals.quality.prompts import Question
from kvcap.evals.quality.scores import UNITS, Unit
from kvcap.evals.reports import versions
from kvcap.runtime.files import SETTINGS, check_plain
from kvcap.runtime.types import Positions

CELLS = "cells.jsonl"  # a file in a sweep's folder

Options = tuple[tuple[str, Any], ...]
# Names of the ways of asking, for tables and plots.
LABELS: dict[Question, str] = {"aware": "question-aware", "after": "context-only"}


@dataclass(frozen=True)
class Setting:
    """Everything that a cell's score depends on; two cells with one setting are the same cell."""

    model: str
    dtype: str
    task: str
    length: int  # most tokens of a prompt
    policy: str
    positions: Positions
    budget: int | None  # slots per KV head and layer; None: `full`, which is never capped
    samples: int
    seed: int
    block_size: int
    options: Options = ()  # options of the policy, sorted by name
    kv_dtype: str | None = None  # type of slots; None: `dtype`
    question: Question | None = "aware"
    """Says when the question is read, with the context or after its eviction; None: no question."""
    depth: float | None = None
    """Says where in the text the answer is, 0 (start) to 1; None: samples are spread out."""
    max_new_tokens: int | None = None  # most tokens of an answer; None: by the task
    data: str | None = None  # digest of the file that the task reads, if it reads one
    recall: int = 0  # most tokens of evicted text that are read again before a question

    @property
    def asking(self) -> str:
        """Return a label of how the question is put: 'question-aware', 'context-only', or ''."""
        return LABELS[self.question] if self.question else ""

    @property
    def tokens(self) -> str:
        """Return a label of the prompts' length, such as '4,096 tokens'."""
        return f"{'up to ' if self.from_rows else ''}{self.length:,} tokens"

    @property
    def from_rows(self) -> bool:
        """Return whether prompts are rows of a file, which may be shorter than `length`."""
        return bool(self.data and self.question)

    @property
    def slots(self) -> str:
        """Return a label of the slots' type, such as 'int8 slots'; '' for the model's own."""
        return f"{self.kv_dtype} slots" if self.kv_dtype else ""


@dataclass(frozen=True)
class Cell:
    """A setting with its result.

    Fields with a default are missing in cells of earlier versions.
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
    scores: tuple[float, ...] | None = None  # scores of all samples in order; None: not kept
    unit: str = "share"  # a name in `UNITS`
    plain: bool = False  # whether the model was asked in plain text, without a chat template
    prompt_tokens: tuple[int, int] | None = None  # fewest and most tokens of a prompt

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
        for name in ("scores", "prompt_tokens"):
            if row.get(name) is not None:
                row[name] = tuple(row[name])
        if row.get("unit", "share") not in UNITS:
            raise ValueError(f"unit {row['unit']!r} is not one of {', '.join(UNITS)}")
        return cls(Setting(**given), **row)


def label(s: Setting) -> str:
    """Return a label with the policy, its options, the type of slots, and recall."""
    given = [*(f"{name}={value}" for name, value in s.options), *([s.slots] if s.slots else [])]
    given += [f"recall {s.recall}"] if s.recall else []
    return ", ".join([s.policy, *given])


def as_options(given: Mapping[str, Any]) -> Options:
    """Return a policy's options as a hashable value that stays equal when read from JSON.

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
    """Read the cells of a `cells.jsonl`; [] if there is no file.

    An unfinished last line is left out: a sweep is writing it, or was killed then.

    Raises:
        ValueError: a line is no cell.
    """
    lines = path.read_text(errors="replace").split("\n") if path.exists() else [""]
    if _unfinished(lines[-1]):
        lines.pop()
    return [_cell(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def cells_of(folders: Sequence[Path]) -> list[Cell]:
    """Read the cells in folders of sweeps; of cells with one setting, keep the last.

    Raises:
        ValueError: there is no folder, a folder has no cells, or a line is no cell.
    """
    by_setting: dict[Setting, Cell] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {str(folder)!r}; kvcap eval --out DIR makes one")
        cells = read_folder(folder)
        if not cells:
            raise ValueError(f"{str(folder)!r} holds no {CELLS} with cells; kvcap eval writes them")
        by_setting |= {cell.setting: cell for cell in cells}
    return [*by_setting.values()]


def read_folder(folder: Path) -> list[Cell]:
    """Read the cells of a sweep's folder, the last of each setting; [] if there is no file.

    Raises:
        ValueError: a line is no cell, or the file is too large.
    """
    path = folder / CELLS
    if not path.exists():
        return []
    check_plain(path, SETTINGS)
    return [*{cell.setting: cell for cell in read_cells(path)}.values()]


def mend(path: Path) -> bool:
    """End a file's last line, or cut it off if it is half a cell, as after a power cut.

    Only the sweep that writes the file may do so. Return whether half a cell was cut off.
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
    """Return whether the text after the last newline is empty, or no whole JSON."""
    try:
        json.loads(last)
    except ValueError:
        return True
    return False


def current_cells(path: Path) -> list[Cell]:
    """Read the cells of a file that were measured with this version of kvcap.

    Raises:
        ValueError: a line is no cell.
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
    """Append a cell as one line, so that an interrupted sweep keeps its finished cells."""
    with path.open("a") as file:
        file.write(json.dumps(cell.as_dict()) + "\n")
        file.flush()
        os.fsync(file.fileno())
