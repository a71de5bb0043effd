"""Names the page's JavaScript libraries, which the wheel contains, and checks that they are there.

`lab/vendor.py` fetches them when a checkout is set up, or before a wheel is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcap.android_bench.errors import VendorError


class Package(NamedTuple):
    """A published package of npm, and the files of it that the page loads."""

    name: str
    version: str
    sha512: str  # SHA-512 of its tarball, in base64
    files: Mapping[str, str]  # paths in the package, and their names in the page's folder


PAGE = Path(__file__).parents[1] / "page"
COMMAND = "python -m kvcap.lab.vendor"

# The CPU build, and the larger one with WebGPU; each is a loader, JavaScript glue and a binary.
SCRIPTS = (
    "ort.wasm.min.mjs",
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
)
BINARIES = ("ort-wasm-simd-threaded.wasm", "ort-wasm-simd-threaded.asyncify.wasm")
ORT = Package(
    "onnxruntime-web",
    "1.30.0",
    "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    {f"dist/{name}": name for name in (*SCRIPTS, *BINARIES)},
)
TEXT = (
    Package(
        "@huggingface/tokenizers", "0.2.0",
        "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        {"dist/tokenizers.min.mjs": "tokenizers.js", "LICENSE": "LICENSE.tokenizers"},
    ),
    Package(
        "@huggingface/jinja", "0.5.11",
        "YzEzwM5oQf4r0vs7ifWQ+yuVR1YkAHrjERQ+a8WRsStHHp4NRBg+NesjiFc+X2AFUpRvvrIeHDS1xFy9jY/IjQ==",
        {"dist/index.js": "jinja.js", "LICENSE": "LICENSE.jinja"},
    ),
)  # fmt: skip
VERSION = ORT.version
FOLDERS: dict[Path, tuple[Package, ...]] = {PAGE / "ort": (ORT,), PAGE / "text": TEXT}
FOLDER, TEXT_FOLDER = FOLDERS


def marker(packages: Sequence[Package]) -> str:
    """Return the content of the file VERSION in a folder that holds these packages."""
    return ", ".join(package.version for package in packages)


def require(folders: Mapping[Path, Sequence[Package]] = FOLDERS) -> None:
    """Check that the page has its libraries.

    Raises:
        VendorError: a library is missing, or has another version.
    """
    for folder, packages in folders.items():
        path = folder / "VERSION"
        version = path.read_text().strip() if path.is_file() else None
        if version != marker(packages):
            names = " and ".join(f"{package.name} {package.version}" for package in packages)
            raise VendorError(
                f"the page needs {names} in {folder}, where there is {version or 'none'}; run: "
                f"{COMMAND}"
            )
