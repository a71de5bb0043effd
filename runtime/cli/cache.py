"""The commands `kvcap cache list` and `kvcap cache clear`, for what kvcap keeps on the disk.

Kept are exports for `--weights`, and models that were downloaded by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from kvcap.runtime.cli.declare import CommandGroup, argument
from kvcap.runtime.cli.options import JSON
from kvcap.runtime.files import KEPT_FROM, cache_home, read_json
from kvcap.runtime.types import BUILT_IN
from kvcap.runtime.units import format_bytes

cache = CommandGroup("List or clear the exports and models kept on the disk.")


class Kept(NamedTuple):
    """A folder of the cache."""

    path: Path
    nbytes: int  # those of files that others share, too
    model: str  # of which it was made
    settings: dict[str, str]  # of an export: weights, policy, budget_tokens and others
    age_s: int  # seconds since it was made

    def __str__(self) -> str:
        """Return a line with the size, folder, model, settings and age."""
        parts = [x for x in (self.settings.get("weights"), self.settings.get("policy")) if x]
        if (tokens := self.settings.get("budget_tokens")) is not None:
            parts += [f"{tokens} slots", f"blocks of {self.settings.get('block_size', '?')}"]
        known = ("weights", "policy", "budget_tokens", "block_size")
        parts += [f"{name} {value}" for name, value in self.settings.items() if name not in known]
        details = ", ".join([*parts, _ago(self.age_s)])
        return f"{format_bytes(self.nbytes):>10}  {self.path}  {self.model or '?'}: {details}"


def kept() -> Iterator[Kept]:
    """Return all that is kept, in the order of its names."""
    for path in sorted(cache_home().glob("*/[!.]*")):  # earlier versions kept GGUF files, too
        age = max(0, int(time() - path.stat().st_mtime))
        yield Kept(path, _bytes([path]), *_made_of(path), age)


def _bytes(folders: Iterable[Path]) -> int:
    """Return the bytes of all files; of one that several folders share, once."""
    files = (x.stat() for folder in folders for x in folder.rglob("*") if x.is_file())
    return sum({(x.st_dev, x.st_ino): x.st_size for x in files}.values())


def _ago(seconds: int) -> str:
    for unit, count in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * count:
            return f"made {seconds // count} {unit} ago"
    return "made just now"


def _made_of(path: Path) -> tuple[str, dict[str, str]]:
    """Return the model that a folder was made of, and how; nothing where it does not say so."""
    try:
        record: Any = read_json(path / KEPT_FROM)
        model, options = record["model"], list(record.get("options", []))
        settings = {"weights": record["weights"]} if "weights" in record else {}
    except (OSError, ValueError, LookupError, TypeError):
        return "", {}
    while options:
        name = str(options.pop(0)).removeprefix("--").replace("-", "_")
        value = str(options.pop(0)) if options and not str(options[0]).startswith("--") else "yes"
        settings[name] = ", ".join(filter(None, (settings.get(name), value)))
    return _name(model) if isinstance(model, dict) else model, settings


def _name(model: dict[str, Any]) -> str:
    """Return the name that a user gives for a model that was exported."""
    if (repository := model.get("repository")) is not None:  # models--OWNER--NAME
        return str(repository).removeprefix("models--").replace("--", "/", 1)
    from kvcap import pocket

    path = str(model.get("path"))
    return {str(pocket.path(name)): name for name in BUILT_IN}.get(path, path)


@cache.adds("list")
def list_command(json_: bool = JSON) -> None:
    """List what is kept: its size, folder, model, settings and age.

    Exports of one model share their weights on the disk; the sum at the end counts them once.
    """
    entries = list(kept())
    if json_:
        print(json.dumps([{**x._asdict(), "path": str(x.path)} for x in entries]))
        return
    for one in entries:
        print(one)
    print(f"{format_bytes(_bytes(x.path for x in entries)):>10}  in {cache_home()}")


@cache.adds("clear")
def clear_command(
    model: str | None = argument(
        None,
        "Remove only this model and what was made of it (everything by default).",
        metavar="[MODEL]",
        show=False,
    ),
) -> None:
    """Remove what is kept; it is made or downloaded again when it is needed."""
    names = {model, str(Path(model).resolve())} if model is not None else None
    there = [*kept()]
    gone = [one for one in there if names is None or one.model in names]
    stays = _bytes(one.path for one in there if one not in gone)
    freed = _bytes(one.path for one in there) - stays  # files that others share stay
    unfinished = cache_home().glob("*/.kvcap-*") if names is None else ()  # of who was killed
    for path in (*(one.path for one in gone), *unfinished):
        shutil.rmtree(path, ignore_errors=True)
    print(f"removed {len(gone)} folders, {format_bytes(freed)}")
