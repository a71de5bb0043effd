"""Fetches the JavaScript libraries of pages for phones, once with npm; checks them by digests.

`python -m kvcap.lab.vendor` runs when a checkout is set up, or before a wheel is built. Nothing is
fetched when a page is served.
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
from collections.abc import Sequence
from pathlib import Path

from kvcap.android_bench.errors import VendorError
from kvcap.android_bench.server.vendor import (
    BINARIES,
    COMMAND,
    FOLDERS,
    ORT,
    Package,
    marker,
    require,
)
from kvcap.runtime.cli.declare import command, option
from kvcap.runtime.errors import how_to_install

NOTICES = ("LICENSE", "ThirdPartyNotices.txt")  # ONNX Runtime's; the npm package lacks them


def vendor(folder: Path, packages: Sequence[Package], tarballs: Sequence[Path] = ()) -> None:
    """Put packages and their licences into `folder`, all of them or none.

    Args:
        folder: the folder, which is replaced if it exists.
        packages: the packages to put there.
        tarballs: npm's files of all packages, in any order, to use in place of npm.

    Raises:
        VendorError: npm or the network is missing, or a package has another digest.
    """
    paths = {_digest(path.read_bytes()): path for path in tarballs}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        work = Path(temporary)
        target = work / folder.name
        target.mkdir()
        for package in packages:
            file = paths.get(package.sha512)
            if file is None and tarballs:
                names = ", ".join(path.name for path in tarballs)
                raise VendorError(f"{names}: none is {package.name} {package.version} as published")
            file = file or _download(work, package)
            if _digest(file.read_bytes()) != package.sha512:
                raise VendorError(
                    f"{package.name} is not {package.name} {package.version} as published"
                )
            _unpack(file, package, target)
        if ORT in packages:
            _notices(target)
        (target / "VERSION").write_text(marker(packages) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        target.rename(folder)


def _digest(data: bytes) -> str:
    return base64.b64encode(hashlib.sha512(data).digest()).decode()


def _download(work: Path, package: Package) -> Path:
    """Download the package with npm's client, from the registry that npm is configured for."""
    name = f"{package.name}@{package.version}"
    npm = shutil.which("npm")
    if npm is None:
        raise VendorError(
            f"npm is not installed; install it (Debian: apt install npm), or give the file of "
            f"{name}: {COMMAND} --tarball FILE"
        )
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        done = subprocess.run(
            [npm, "pack", "--silent", "--pack-destination", temporary, name],
            capture_output=True,
            text=True,
            check=False,
            cwd=work,
            stdin=subprocess.DEVNULL,
        )
        files = list(Path(temporary).glob("*.tgz"))
        if done.returncode or len(files) != 1:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise VendorError(f"npm could not get {name}: {reason}")
        return files[0].rename(work / files[0].name)


def _unpack(file: Path, package: Package, target: Path) -> None:
    """Unpack the files that the page loads; binaries stay compressed, at a quarter of the size."""
    with tarfile.open(file) as archive:
        for path, name in package.files.items():
            member = archive.extractfile(f"package/{path}")
            assert member is not None, path  # the digest fixes which files there are
            content = member.read()
            if name in BINARIES:
                (target / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
            else:
                (target / name).write_bytes(content)


def _notices(target: Path) -> None:
    """Copy the licence from ONNX Runtime's Python package, which has the same sources."""
    try:
        files = importlib.metadata.files("onnxruntime") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for name in NOTICES:
        notice = next((file for file in files if str(file) == f"onnxruntime/{name}"), None)
        if notice is None:
            raise VendorError(
                "the licence of ONNX Runtime comes from its Python package, which is not "
                f"installed; {how_to_install('android')}"
            )
        shutil.copyfile(str(notice.locate()), target / name)


def main(
    tarball: list[Path] | None = option(
        None, "Take packages of npm from files, in place of asking npm; all of a folder's."
    ),
    force: bool = option(False, "Fetch what is there, too."),
) -> None:
    """Put the JavaScript libraries of kvcap android serve and chat beside their pages."""
    for folder, packages in FOLDERS.items():
        try:
            require({folder: packages})
            if not force:
                continue
        except VendorError:
            pass
        try:
            vendor(folder, packages, tarball or ())
        except (VendorError, OSError) as error:
            print(f"kvcap: {error}", file=sys.stderr)
            sys.exit(1)
        for package in packages:
            print(f"{package.name} {package.version} is in {folder}")


if __name__ == "__main__":
    command(main)()
