"""One measured cell of a sweep: what was asked, what came out, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kvcap.evals.reports import versions
from kvcap.runtime.cache.slot_format import KvDtype
from kvcap.runtime.types import Positions

Options = tuple[tuple[str, Any], ...]
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
    options: Options = ()  # given to the policy, sorted by name
    kv_dtype: KvDtype | None = None  # of what slots hold; None: `dtype`

    @property
    def slots(self) -> str:
        """What slots hold, for labels: 'int8 slots', or '' for the model's own numbers."""
        return f"{self.kv_dtype} slots" if self.kv_dtype else ""


@dataclass(frozen=True)
class Cell:
    """A setting and its result. What has a default is missing in cells of earlier versions."""

    setting: Setting
    score: float  # share of right answers
    ci_low: float  # 95 % interval of the score
    ci_high: float
    kv_bytes: int  # all a cache for one sequence takes
    seconds: float
    device: str
    versions: dict[str, str]
    scoring_ms: dict[str, float] | None = None  # percentiles per block, all layers; None: no run
    extra_bytes: int | None = None  # of `kv_bytes`, what only this policy makes the cache hold

    def as_dict(self) -> dict[str, Any]:
        """One flat object, as in `cells.jsonl`."""
        row = asdict(self)
        return {**row.pop("setting"), **row}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Cell:
        """The cell of a row of `cells.jsonl`."""
        given = {f.name: row.pop(f.name) for f in fields(Setting) if f.name in row}
        given["options"] = as_options(dict(given.get("options", ())))
        return cls(Setting(**given), **row)


def as_options(given: Mapping[str, Any]) -> Options:
    """Options of a policy as part of a setting: hashable, and the same after a trip through JSON.

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


def current_cells(path: Path) -> list[Cell]:
    """Those measured with this version of kvcap.

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
