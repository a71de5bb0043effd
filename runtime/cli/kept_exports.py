"""Exports a model once into a cache folder, for `--weights`, and finds it there the next time.

An export is named by all that is fixed in it: the model's files, the type of weights, the policy
and its options, sizes, positions, and the versions that made it. It is made by `kvcap export
decoder` in a process of its own, whose memory is given back, and appears only when all of it is
there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click.exceptions import Exit

from kvcap.runtime.backends.onnxruntime.manifest import SCHEMA, Manifest, read, refuse_cache
from kvcap.runtime.cli.console import dim
from kvcap.runtime.cli.options import Budget, pairs
from kvcap.runtime.errors import NotExportable, first_line
from kvcap.runtime.files import KEPT_FROM, cache_home, locked, read_json, read_text
from kvcap.runtime.models.hub import CONFIG
from kvcap.runtime.models.names import is_export, locate, resolve
from kvcap.runtime.types import BUILT_IN, DEFAULT_POLICY, MANIFEST
from kvcap.runtime.units import format_bytes

LEFT = 64 << 20  # bytes beside the weights that must be free on the disk
SHARED = 1 << 20  # bytes of a file from which exports that have the same one share it
SNAPSHOTS = "snapshots"  # the hub's cache has a folder for every revision in it


def cache_folder() -> Path:
    """Return where exports are kept: `kvcap/exports` in XDG_CACHE_HOME, by default ~/.cache."""
    return cache_home() / "exports"


def kept_export(
    model: str,
    weights: str,
    budget: Budget,
    quiet: bool = False,
    calibrate: Path | None = None,
) -> Path:
    """Return the directory of a model's export with these weights and sizes; make it if missing.

    Args:
        model: a directory, a GGUF file, a repository, or pocket.
        weights: int8 or int4.
        budget: the policy, its options and the sizes, which the graph has inside.
        quiet: say nothing on stderr but what the export says itself.
        calibrate: a text by which int4 is rounded, and slots in int8 are measured; it is known by
            what it says.

    Raises:
        ValueError: the text cannot be read.
        ModelNotFound: there is no such model.
        NotExportable: it is an export already; there is no room for an export; positions would
            change; the budget is in bytes, which is no number of slots yet; slots would be of a
            type that exports do not have; or a text is for nothing.
        Exit: the export failed, which has said why.
    """
    facts, folder = _requested_export(model, weights, budget, calibrate)
    out = folder / "decoder"
    if _is_whole(out):
        return out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotExportable(
            f"no export can be kept in {str(folder)!r} ({error.strerror}); set XDG_CACHE_HOME to a "
            "directory that can be written to"
        ) from error
    waiting = f"another process exports {model}; waiting for it"
    with locked(folder / "lock", lambda: None if quiet else dim(waiting)):
        if not _is_whole(out):
            _make(model, weights, facts, folder, quiet, calibrate)
    return out


def foreseen_export(
    model: str, weights: str, budget: Budget, calibrate: Path | None = None
) -> Manifest:
    """Return the manifest of a model's export, or the one that an export not made yet would have.

    Takes and raises the same as `kept_export`. No weights are read, and nothing is written.
    """
    facts, folder = _requested_export(model, weights, budget, calibrate)
    out = folder / "decoder"
    if _is_whole(out):
        return read(out)
    command = [*_command(model, weights, facts, calibrate), "--foresee"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise Exit(done.returncode if done.returncode > 0 else 1)
    return Manifest(out, json.loads(done.stdout))


def _requested_export(
    model: str, weights: str, budget: Budget, calibrate: Path | None
) -> tuple[dict[str, Any], Path]:
    """Return the settings that an export fixes, and its folder; refuse what has no export."""
    path = None if model in BUILT_IN else locate(model)
    if path is not None and is_export(path):
        raise NotExportable(
            f"{model!r} is an exported decoder already, whose weights are as they are; leave "
            "--weights out, or give the model that it was made from"
        )
    refuse_cache(budget.positions, budget.kv_dtype)
    if budget.kv_budget is not None:
        raise NotExportable(
            "--kv-budget is in bytes, and with --weights the number of slots is part of the "
            "graph; give --budget-tokens instead"
        )
    if calibrate is not None and weights != "int4" and budget.kv_dtype is None:
        raise NotExportable(
            "--calibrate is for --weights int4, or for --kv-dtype int8; add one, or leave it out"
        )
    text = None if calibrate is None else read_text(calibrate)
    facts = identity(model, weights, budget, text)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return facts, cache_folder() / f"{Path(model).name or 'model'}-{weights}-{digest}"


def identity(
    model: str,
    weights: str,
    budget: Budget,
    text: str | None = None,
) -> dict[str, Any]:
    """Return all that is fixed in an export, as JSON has it; of a text its checksum."""
    read = {} if text is None else {"text": hashlib.sha256(text.encode()).hexdigest()}
    return {
        **read,
        "model": _model(model),
        "weights": weights,
        "options": _options(budget),
        "versions": {name: _version(name) for name in ("kvcap", "onnxruntime")},
    }


def _model(model: str) -> dict[str, Any]:
    """Return a repository and its revision; else a path, with sizes and times of its files."""
    where = Path(resolve(model))
    if not where.exists():
        from huggingface_hub import hf_hub_download

        where = Path(hf_hub_download(str(where), CONFIG)).parent
    if where.parent.name == SNAPSHOTS:
        return {"repository": where.parent.parent.name, "revision": where.name}
    files = [where] if where.is_file() else sorted(p for p in where.iterdir() if p.is_file())
    stats = {path.name: path.stat() for path in files}
    return {
        "path": str(where.resolve()),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # here, as it takes a while

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _options(budget: Budget) -> list[str]:
    """Return the options of `kvcap export decoder`, without model, type and folder."""
    pairs(budget.policy_option or [])  # refuses what is no KEY=VALUE
    tokens, block = budget.settings().sizes
    given: dict[str, Any] = {
        "--policy": budget.policy or DEFAULT_POLICY,
        "--budget-tokens": tokens,
        "--block-size": block,
        **{f"--{name.replace('_', '-')}": value for name, value in budget.pins.items()},
    }
    for name in ("positions", "kv_dtype"):
        if (value := getattr(budget, name)) is not None:
            given[f"--{name.replace('_', '-')}"] = value
    words = [str(word) for item in given.items() for word in item]
    for option in sorted(budget.policy_option or []):
        words += ["--policy-option", option]
    return words


def _is_whole(out: Path) -> bool:
    """Return whether all files of an export are there, none cut short; loading it reads them."""
    try:
        manifest = read_json(out / MANIFEST)
        sizes = {entry["file"]: entry["bytes"] for entry in manifest["files"]}
        there = all((out / name).stat().st_size == size for name, size in sizes.items())
        return bool(manifest["schema"] == SCHEMA and sizes and there)
    except (OSError, ValueError, LookupError, TypeError):  # it was cut short: made again
        return False


def _make(
    model: str,
    weights: str,
    facts: dict[str, Any],
    folder: Path,
    quiet: bool,
    calibrate: Path | None,
) -> None:
    """Export into `folder`, whose lock this process holds."""
    for left in _left_over(folder):
        shutil.rmtree(left, ignore_errors=True)
    _require_room(facts["model"], model, folder)
    if not quiet:
        takes = "a minute" if calibrate is None else "several minutes"
        dim(f"exporting {model} with {weights} weights, once; this can take {takes}")
    command = _command(model, weights, facts, calibrate)
    command += ["--quick", "--force", "-o", str(folder / "decoder")]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise Exit(code if code > 0 else 1)
    _share(folder / "decoder")
    (folder / KEPT_FROM).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if not quiet:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        dim(f"kept in {folder} ({format_bytes(size)}); kvcap cache clear frees the space")


def _command(model: str, weights: str, facts: dict[str, Any], calibrate: Path | None) -> list[str]:
    """Return the command that exports a model, without the option for its folder."""
    safe = ["-P"] if getattr(sys.flags, "safe_path", False) else []
    program = [sys.executable, *safe, "-m", "kvcap", "export", "decoder", model]
    text = [] if calibrate is None else ["--calibrate", str(calibrate)]
    return [*program, "--dtype", weights, *facts["options"], *text]


def _share(out: Path) -> None:
    """Give an export the large files of earlier ones that have the same, as hard links.

    Exports of one model with other budgets and policies have the same weights.
    """
    sums = {path.parent: _sums(path.parent) for path in cache_folder().glob(f"*/*/{MANIFEST}")}
    for name, digest in sums.pop(out, {}).items():
        for other in (folder / name for folder, known in sums.items() if known.get(name) == digest):
            linked = out.parent / f".kvcap-{name}"
            try:
                os.link(other, linked)
                os.replace(linked, out / name)
                break
            except OSError:  # it is gone, or the disk has no hard links: the export has its own
                continue


def _sums(out: Path) -> dict[str, str]:
    """Return the checksums of an export's large files, by name."""
    try:
        files = read_json(out / MANIFEST)["files"]
        return {x["file"]: x["sha256"] for x in files if x["bytes"] >= SHARED}
    except (OSError, ValueError, LookupError, TypeError):  # no export, or one that was cut short
        return {}


def _left_over(folder: Path) -> Iterator[Path]:
    """Yield unfinished folders of exports that were killed."""
    yield from folder.glob(".kvcap-*")


def _require_room(described: dict[str, Any], model: str, folder: Path) -> None:
    """Refuse an export if the disk has less free than the model's own files take.

    Raises:
        NotExportable: naming both.
    """
    weights = sum(
        size for name, (size, _) in described.get("files", {}).items() if not name.endswith(".json")
    )
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise NotExportable(f"{str(folder)!r} cannot be used: {first_line(error)}") from error
    if free < weights + LEFT:
        raise NotExportable(
            f"exporting {model} takes up to {format_bytes(weights + LEFT)}, and "
            f"{format_bytes(free)} are free in {str(folder)!r}; free some, or set XDG_CACHE_HOME "
            "to a directory on another disk"
        )
