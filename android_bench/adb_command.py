"""`kvcap android adb`: a plan on a connected device. Results go to stdout, the rest to stderr."""

from __future__ import annotations

import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


class Program(str, Enum):
    """What measures on the device."""

    c = "c"
    python = "python"


def adb_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Of kvcap android plan.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the result goes.")],
    serial: Annotated[
        str | None, typer.Option(metavar="S", help="Which device, where there are several.")
    ] = None,
    runner: Annotated[
        Program, typer.Option(help="c, built by CMake; or python, the device's own.")
    ] = Program.c,
    runner_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where CMake built the C runner.")
    ] = None,
    python: Annotated[
        str, typer.Option(metavar="PATH", help="The device's Python, with onnxruntime.")
    ] = "python3",
    browser: Annotated[
        bool, typer.Option("--browser", help="Open the page on the device instead of a runner.")
    ] = False,
    threads: Annotated[
        str | None, typer.Option(metavar="COUNTS", help="Such as 1,2; the plan's otherwise.")
    ] = None,
    cores: Annotated[
        str, typer.Option(help="auto (the fastest), none, or cores such as 7 or 4-7.")
    ] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the run may take.")] = 3600,
    device_dir: Annotated[
        str, typer.Option(metavar="DIR", help="Of the device, for a folder that is removed again.")
    ] = "/data/local/tmp",
) -> None:
    """Measure a plan on a device over adb; nothing is installed or left there."""
    from kvcap.android_bench.adb import Settings
    from kvcap.android_bench.devices import chosen
    from kvcap.android_bench.errors import ResultBroken
    from kvcap.android_bench.judge import judged
    from kvcap.android_bench.schema import read_plan, write_json
    from kvcap.android_bench.table import markdown

    read_plan(folder)
    if not out.parent.is_dir():
        raise ResultBroken(f"no folder {str(out.parent)!r} for the result")
    options = ["--cores", cores, *(["--threads", threads] if threads else [])]
    device = chosen(serial or os.environ.get("ANDROID_SERIAL"))
    settings = Settings(device_dir.rstrip("/") or "/", options, timeout)
    if browser:
        from kvcap.android_bench.adb_browser import run_in_browser

        found = run_in_browser(device, folder, settings)
    else:
        found = _run(device, folder, runner, runner_dir, python, settings)
    result = judged(found)
    write_json(result, out)
    print(markdown([result]), end="")


def _run(
    device: Any, folder: Path, program: Program, built: Path | None, python: str, settings: Any
) -> dict[str, Any]:
    from kvcap.android_bench.adb import c_runner, python_runner, run_on

    if program is Program.c:
        return run_on(device, folder, c_runner(built), settings)
    with tempfile.TemporaryDirectory(prefix="kvcap-") as scratch:
        return run_on(device, folder, python_runner(device, python, Path(scratch)), settings)
