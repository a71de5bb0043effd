"""Where tests find an ARM Linux, a compiler for it and adbd; and why they are skipped without."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = Path(os.environ.get("KVCAP_ANDROID_TOOLS", ROOT / ".android-tools")).resolve()
ARM_ROOT = TOOLS / "arm64"
CPU = "cortex-a76"  # has float16 arithmetic, as phones have since 2018

installed = pytest.mark.skipif(
    not (TOOLS / ".ready").is_file(), reason="scripts/install-android-test-tools was not run here"
)
compilers = pytest.mark.skipif(
    not all(shutil.which(name) for name in ("cmake", "gcc", "aarch64-linux-gnu-gcc")),
    reason="no cmake, no C compiler or none for aarch64",
)


def arm_command(program: Path | str, *arguments: Path | str) -> list[str]:
    """A command that runs an aarch64 program under qemu."""
    emulator = [TOOLS / "bin" / "qemu-aarch64", "-cpu", CPU, "-L", ARM_ROOT]
    return [str(part) for part in (*emulator, program, *arguments)]


def arm_python(*arguments: Path | str) -> list[str]:
    """A command that runs the aarch64 Python, which has numpy and onnxruntime."""
    return arm_command(ARM_ROOT / "usr" / "bin" / "python3.13", *arguments)


def arm_environment() -> dict[str, str]:
    """What that Python needs; one thread, as an emulator is slow enough."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONHOME": str(ARM_ROOT / "usr"),
        "PYTHONPATH": str(ARM_ROOT / "site"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "ORT_DISABLE_TELEMETRY": "1",
    }
