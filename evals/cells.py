"""One measured cell of a sweep: what was asked, what came out, and the file that keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kvcap.runtime.layout import Positions

Z = NormalDist().inv_cdf(0.975)  # two-sided 95 %


@dataclass(frozen=True)
class Setting:
    """What a cell's score depends on. Two cells with the same setting are the same cell."""

    model: str
    dtype: str
    task: str
    length: int  # tokens of a prompt
    policy: str
    positions: Positions
    budget: int | None  # slots per KV head and layer; None: `full`, which is never capped
    samples: int
    seed: int
    block_size: int


@dataclass(frozen=True)
class Cell:
    """A setting and its result."""

    setting: Setting
    score: float  # share of right answers
    ci_low: float  # 95 % interval of the score
    ci_high: float
    kv_bytes: int  # all a cache for one sequence takes
    seconds: float
    device: str
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """One flat object, as in `cells.jsonl`."""
        row = asdict(self)
        return {**row.pop("setting"), **row}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Cell:
        """The cell of a row of `cells.jsonl`."""
        setting = Setting(**{field.name: row.pop(field.name) for field in fields(Setting)})
        return cls(setting, **row)


def wilson(right: int, samples: int) -> tuple[float, float]:
    """The 95 % score interval of a share; sensible at 0 and 1 and for few samples.

    E. B. Wilson, 1927, https://doi.org/10.1080/01621459.1927.10502953.
    """
    share, square = right / samples, Z * Z / samples
    middle = share + square / 2
    half = (square * (share * (1 - share) + square / 4)) ** 0.5
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def read_cells(path: Path) -> list[Cell]:
    """The cells of a `cells.jsonl`, none where there is no file.

    Raises:
        ValueError: a line that is no cell.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    return [_cell(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


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
