"""Finds the versions of a library of llama.cpp, and of the package that it came with."""

from __future__ import annotations

import json
from pathlib import Path

from kvcap.runtime.backends.llamacpp.library import MODULE


def described(file: Path) -> dict[str, str]:
    """Return the version of the library's package, and llama.cpp's own if it is known."""
    for folder in file.parents[:3]:
        about = folder / "package.json"
        if about.exists():
            package = json.loads(about.read_text())
            versions = {str(package["name"]): str(package["version"])}
            built = file.parent / "_nlcBuildMetadata.json"
            if built.exists():
                release = json.loads(built.read_text())["buildOptions"]["llamaCpp"]["release"]
                versions["llama.cpp"] = str(release)
            return versions
    from importlib.metadata import PackageNotFoundError, version

    package_name = "xllamacpp" if MODULE.fullmatch(file.name) else "llama-cpp-python"
    try:
        return {package_name: version(package_name)}
    except PackageNotFoundError:
        return {"llama.cpp": str(file)}
