"""Fetches onnxruntime-web for the page, once with npm, and checks it against a digest.

Run as `python -m kvcap.android_bench.server.vendor` when a checkout is set up or before a wheel is
built; the wheel carries what it leaves. Nothing is fetched when the page is served.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvcap.android_bench.errors import VendorError

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
FOLDER = Path(__file__).parents[1] / "page" / "ort"
COMMAND = "python -m kvcap.android_bench.server.vendor"

# The CPU build, and the larger one that also knows WebGPU; each is a loader, glue and a binary.
SCRIPTS = (
    "ort.wasm.min.mjs",
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
)
BINARIES = ("ort-wasm-simd-threaded.wasm", "ort-wasm-simd-threaded.asyncify.wasm")
NOTICES = ("LICENSE", "ThirdPartyNotices.txt")  # of ONNX Runtime; the npm package has none


def require(folder: Path = FOLDER) -> None:
    """Make sure that the page has its onnxruntime-web.

    Raises:
        VendorError: it is not there, or is another version.
    """
    marker = folder / "VERSION"
    found = marker.read_text().strip() if marker.is_file() else None
    if found != VERSION:
        raise VendorError(
            f"the page needs {PACKAGE} {VERSION} in {folder}, where there is "
            f"{found or 'none'}; run: {COMMAND}"
        )


def vendor(folder: Path = FOLDER, tarball: Path | None = None) -> None:
    """Put onnxruntime-web and its licence into `folder`, all of it or nothing.

    Args:
        folder: replaced where it exists.
        tarball: the npm package, where npm cannot be asked.

    Raises:
        VendorError: no npm, no network, or another content than the digest says.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".ort-") as place:
        work = Path(place)
        data = (tarball or _download(work)).read_bytes()
        if base64.b64encode(hashlib.sha512(data).digest()).decode() != SHA512:
            raise VendorError(f"{tarball or PACKAGE} is not {PACKAGE} {VERSION} as published")
        made = work / "ort"
        made.mkdir()
        package = work / "package.tgz"
        package.write_bytes(data)
        _unpack(package, made)
        _notices(made)
        (made / "VERSION").write_text(VERSION + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)


def _download(work: Path) -> Path:
    """The package as npm's client gets it, from the registry that npm is set to."""
    npm = shutil.which("npm")
    if npm is None:
        raise VendorError(
            f"npm is not installed; install it (Debian: apt install npm), or give the file of "
            f"{PACKAGE}@{VERSION}: {COMMAND} --tarball FILE"
        )
    done = subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(work), f"{PACKAGE}@{VERSION}"],
        capture_output=True, text=True, check=False, cwd=work, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    files = list(work.glob("*.tgz"))
    if done.returncode or len(files) != 1:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise VendorError(f"npm could not get {PACKAGE}@{VERSION}: {said}")
    return files[0]


def _unpack(package: Path, made: Path) -> None:
    """The files that the page loads. Binaries stay compressed: a quarter of the bytes on Wi-Fi."""
    with tarfile.open(package) as archive:
        for name in (*SCRIPTS, *BINARIES):
            member = archive.extractfile(f"package/dist/{name}")
            assert member is not None, name  # the digest says which files there are
            content = member.read()
            if name in BINARIES:
                (made / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
            else:
                (made / name).write_bytes(content)


def _notices(made: Path) -> None:
    """The licence, from the Python package of ONNX Runtime: the same sources, the same licence."""
    try:
        files = importlib.metadata.files("onnxruntime") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for name in NOTICES:
        found = next((file for file in files if str(file) == f"onnxruntime/{name}"), None)
        if found is None:
            raise VendorError(
                "the licence of ONNX Runtime comes from its Python package, which is not "
                "installed; run: pip install kvcap[android]"
            )
        shutil.copyfile(str(found.locate()), made / name)


def main(
    tarball: Annotated[
        Path | None, typer.Option(help="The npm package as a file, in place of asking npm.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Even where it is there.")] = False,
) -> None:
    """Put onnxruntime-web beside the page of kvcap android serve."""
    try:
        require()
        if not force:
            return
    except VendorError:
        pass
    try:
        vendor(tarball=tarball)
    except (VendorError, OSError) as error:
        print(f"kvcap: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{PACKAGE} {VERSION} is in {FOLDER}")


if __name__ == "__main__":
    typer.run(main)
