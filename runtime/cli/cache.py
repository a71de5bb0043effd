"""The commands `kvcap cache list` and `kvcap cache clear`, for what kvcap keeps on the disk.

Kept are exports for `--weights`, and tokenizers and weights that were made of GGUF files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvcap.runtime.cli.options import Json
from kvcap.runtime.files import KEPT_FROM, cache_home, read_json
from kvcap.runtime.types import BUILT_IN
from kvcap.runtime.units import format_bytes

cache = typer.Typer(
    no_args_is_help=True, help="List or clear the exports and GGUF files kept on the disk."
)
KINDS = ("exports", "gguf")


class Kept(NamedTuple):
    """A folder of the cache."""

    path: Path
    nbytes: int
    model: str  # of which it was made


def kept() -> Iterator[Kept]:
    """Return all that is kept, in the order of its names."""
    for kind in KINDS:
        for path in sorted((cache_home() / kind).glob("[!.]*")):
            nbytes = sum(x.stat().st_size for x in path.rglob("*") if x.is_file())
            yield Kept(path, nbytes, _model(path))


def _model(path: Path) -> str:
    """Return the model that a folder was made of; '' where it does not say so."""
    try:
        model: Any = read_json(path / KEPT_FROM)["model"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return _name(model) if isinstance(model, dict) else model


def _name(model: dict[str, Any]) -> str:
    """Return the name that a user gives for a model that was exported."""
    if (repository := model.get("repository")) is not None:  # models--OWNER--NAME
        return str(repository).removeprefix("models--").replace("--", "/", 1)
    from kvcap import pocket

    path = str(model.get("path"))
    return {str(pocket.path(name)): name for name in BUILT_IN}.get(path, path)


@cache.command("list")
def list_command(json_: Json = False) -> None:
    """List what is kept: its size, its folder, and the model that it was made of."""
    found = list(kept())
    if json_:
        print(json.dumps([{**x._asdict(), "path": str(x.path)} for x in found]))
        return
    for one in found:
        print(f"{format_bytes(one.nbytes):>10}  {one.path}  {one.model}".rstrip())
    print(f"{format_bytes(sum(x.nbytes for x in found)):>10}  in {cache_home()}")


@cache.command("clear")
def clear_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Remove only what was made of this model (everything by default).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Remove what is kept; it is made again when it is needed."""
    names = {model, str(Path(model).resolve())} if model is not None else None
    gone = [one for one in kept() if names is None or one.model in names]
    unfinished = cache_home().glob("*/.kvcap-*") if names is None else ()  # of who was killed
    for path in (*(one.path for one in gone), *unfinished):
        shutil.rmtree(path, ignore_errors=True)
    print(f"removed {len(gone)} folders, {format_bytes(sum(x.nbytes for x in gone))}")
