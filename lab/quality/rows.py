"""Defines tasks whose samples are rows of a file: one JSON object per line, all checked first.

Finds and reads files, draws rows, and keeps prompts to a length. Each kind of file has a module for
the content of its rows (`tasks/file.py`, `longbench.py`, `ruler.py`, `math.py`).
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.lab.quality.metrics import PARTIAL, load_metric
from kvcap.runtime.files import check_plain, parse_json

MOST = 1 << 30  # most bytes of a file


@dataclass(frozen=True)
class Row:
    """A line of a file: its JSON object, and its place for messages.

    Args:
        where: file and line, for messages.
        given: the JSON object.
    """

    where: str
    given: dict[str, Any]

    def text(self, name: str) -> str:
        """Return the text of a field.

        Raises:
            ValueError: the field is missing, or no text.
        """
        value = self._field(name)
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {name!r} is {_kind(value)}; give a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of a field, at least one; whole numbers count as texts.

        Raises:
            ValueError: the field is missing, or has something else.
        """
        value = self._field(name)
        values = value if isinstance(value, list) else [value]
        if wrong := [part for part in values if type(part) not in (str, int)]:
            raise ValueError(f"{self.where}: {name!r} holds {_kind(wrong[0])}; give texts")
        if not values:
            raise ValueError(f"{self.where}: {name!r} holds no text; give at least one")
        return tuple(map(str, values))

    def _field(self, name: str) -> Any:
        if name not in self.given:
            has = ", ".join(map(repr, self.given)) or "nothing"
            raise ValueError(f"{self.where} has no {name!r}; it has {has}")
        return self.given[name]


@dataclass(frozen=True)
class RowSample(Sample):
    """A sample made of a row, with the metric that scores it."""

    metric: str = "contains"  # a name in `metrics.METRICS`
    classes: tuple[str, ...] = ()  # all possible labels, if the answer is one of them
    where: str = ""  # file and line, for messages


Fit = Callable[[RowSample, Any, int], RowSample]
"""Stands for a function `fit(sample, tokenizer, length)` that fits a prompt into a length."""


def refuse_longer(sample: RowSample, tokenizer: Any, length: int) -> RowSample:
    """Return the sample unchanged, if its prompt fits.

    Raises:
        ValueError: its prompt has more than `length` tokens.
    """
    size = len(prompt_ids(tokenizer, sample))
    if size > length:
        raise ValueError(
            f"{sample.where}: the prompt has {size:,} tokens, more than --lengths {length:,}; give "
            f"{size:,} or more, or make the text shorter"
        )
    return sample


@dataclass(frozen=True)
class RowsTask:
    """A task that asks about the rows of a file.

    Args:
        MAX_NEW_TOKENS: most tokens of an answer.
        samples: samples of all rows, in the file's order.
        where: the file, for messages.
        digest: digest of the file's content; cells measured on other content are other cells.
        fit: shortens a sample's prompt to a length, or refuses it.
        read: returns the part of a reply that is scored.
    """

    MAX_NEW_TOKENS: int
    samples: tuple[RowSample, ...]
    where: str
    digest: str
    fit: Fit = refuse_longer
    read: Callable[[str], str] = str
    PLACED: ClassVar[bool] = False

    @property
    def UNIT(self) -> str:  # written as in a task's file
        """Return the unit of the metric if all rows have the same one, else 'score'."""
        units = {PARTIAL.get(sample.metric, "share") for sample in self.samples}
        return units.pop() if len(units) == 1 else "score"

    def make(self, rng: Random, tokenizer: Any, length: int, depth: float) -> RowSample:
        """Return a random row; `depth` is not used."""
        return self.fit(rng.choice(self.samples), tokenizer, length)

    def draw(self, tokenizer: Any, length: int, count: int, seed: int) -> list[RowSample]:
        """Return `count` different rows, the first ones of an order that the seed decides.

        Raises:
            ValueError: the file has fewer rows, or a prompt is longer than `length`.
        """
        if count > len(self.samples):
            raise ValueError(
                f"{self.where} has {len(self.samples)} rows, and --samples asks for {count}; give "
                f"--samples {len(self.samples)} or fewer"
            )
        order = Random(f"rows/{seed}").sample(range(len(self.samples)), len(self.samples))
        return [self.fit(self.samples[i], tokenizer, length) for i in order[:count]]

    def score(self, sample: RowSample, reply: str) -> float:
        """Score the reply by the row's metric."""
        metric = load_metric(sample.metric)
        return metric(self.read(reply), sample.answers, sample.classes)


def rows_task(
    path: Path,
    write: Callable[[Row], RowSample],
    max_new_tokens: int,
    member: str | None = None,
    **options: Any,
) -> RowsTask:
    """Return the task of a file, and check every row.

    Args:
        path: the file.
        write: makes a row's sample.
        max_new_tokens: most tokens of an answer.
        member: the file in `path`, if that is a zip archive.
        options: `fit` and `read` of the task.

    Raises:
        ValueError: there is no such file, it is empty, or a row has no valid sample.
        ExtraMissing: a package that a metric needs is not installed.
    """
    data, name = _read(path, member)
    samples = tuple(write(row) for row in _rows(data, name))
    if not samples:
        raise ValueError(f"{name} is empty; give one JSON object a line")
    for metric in {sample.metric for sample in samples}:
        load_metric(metric)
    return RowsTask(max_new_tokens, samples, name, hashlib.sha256(data).hexdigest()[:16], **options)


def find(path: str, *names: str) -> Path:
    """Return `path` if it is a file, or the first of `names` that the folder `path` has.

    Raises:
        ValueError: there is no such file; the message lists the names.
    """
    given = Path(path).expanduser()
    if not given.is_dir():
        return given
    for name in names:
        if (given / name).is_file():
            return given / name
    raise ValueError(
        f"{path} has none of {', '.join(names)}"
        if names
        else f"{path} is a folder; give a file of one JSON object a line"
    )


def _read(path: Path, member: str | None) -> tuple[bytes, str]:
    """Return a file's bytes, and its name for messages."""
    try:
        check_plain(path, MOST)
        if path.suffix != ".zip":
            return path.read_bytes(), str(path)
        with zipfile.ZipFile(path) as archive:
            if member not in archive.namelist():
                raise ValueError(f"{path} has no {member}")
            if archive.getinfo(member).file_size > MOST:
                raise ValueError(f"{member} of {path} has more than {MOST:,} bytes")
            return archive.read(member), f"{path}/{member}"
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is no zip archive, or a broken one ({error})") from error


def _rows(data: bytes, name: str) -> Iterator[Row]:
    for number, line in enumerate(io.BytesIO(data), 1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        try:
            given = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where} is no JSON ({error})") from error
        if not isinstance(given, dict):
            raise ValueError(f"{where} is {_kind(given)}; give a JSON object")
        yield Row(where, given)


def _kind(value: Any) -> str:
    """Return the kind of a JSON value, in words."""
    names: Sequence[tuple[Any, str]] = (
        (type(None), "null"), (bool, "true or false"), (str, "a text"), ((int, float), "a number"),
        (list, "a list"),
    )  # fmt: skip
    return next((word for kind, word in names if isinstance(value, kind)), "an object")
