"""Defines the commands `kvcap android plan`, `host`, `report`, `serve`, `chat` and `adb`.

Imports of torch wait until a command runs. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
import os
import queue
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcap.android_bench.errors import NoNetwork, ServerMissing
from kvcap.android_bench.plan.presets import PRESETS, narrowed
from kvcap.export.graphs.formulations import FORMULATIONS
from kvcap.runtime.cli.declare import CommandGroup, argument, option
from kvcap.runtime.cli.options import checked_folder
from kvcap.runtime.errors import how_to_install

if TYPE_CHECKING:
    from kvcap.android_bench.server.landing import Landed
    from kvcap.android_bench.server.serving import PageServer

NOWHERE = "192.0.2.1"  # reserved for documentation; a socket to it shows this machine's address

android = CommandGroup("Time score graphs and decoders on phones.")

JSON: Any = option(False, "Print one JSON document.", panel="Output")
COUNTS: Any = option(
    None,
    "Compute with so many threads: numbers separated by commas, such as 1,2 (the plan's "
    "by default).",
    metavar="COUNTS",
    panel="Device",
)
CORES: Any = option(
    "auto",
    "Run on the fastest cores (auto), on any (none), or on these, such as 7 or 4-7.",
    metavar="CORES",
    panel="Device",
)
PROVIDER: Any = option(
    "cpu",
    "Compute on this execution provider of the runner's ONNX Runtime: cpu, xnnpack, "
    "nnapi, qnn. One that it lacks is refused.",
    metavar="NAME",
    panel="Device",
)
PROFILE: Any = option(
    False,
    "Add the time of each cell's operators, in runs of their own.",
    panel="Measure",
)
PLAN: Any = argument(..., "Measure the plan that kvcap android plan wrote here.", metavar="DIR")
RESULT: Any = option(..., "Write the result here.", "--out", "-o", metavar="FILE", panel="Output")
LAN: Any = option(False, "Let phones of this network in, by an address with a token.")
ADDRESS: Any = option(
    None, "Listen on this address, where the machine has several; needs --lan.", metavar="ADDRESS"
)
PORT: Any = option(8765, "Listen on this port; 0 takes a free one.", min=0, max=65535)


def _only(default: str | None, text: str) -> Any:
    return option(default, text, metavar="NAMES", panel="Measure")


def _count(default: int | None, text: str, panel: str = "Measure") -> Any:
    return option(default, text, min=1, panel=panel)


def _time(default: float | None, text: str, unit: str = "SECONDS") -> Any:
    return option(default, text, min=0, metavar=unit, panel="Measure")


@android.adds("plan")
def plan_command(
    out: Path = option(
        ...,
        "Write the plan into this new folder.",
        "--out",
        "-o",
        metavar="DIR",
        check=checked_folder,
        panel="Output",
    ),
    preset: str = option(
        "quick",
        f"Measure the cells of this preset: {', '.join(PRESETS)}.",
        metavar="NAME",
        panel="Measure",
    ),
    policies: str | None = _only(
        None, "Keep only cells of these policies, separated by commas (all by default)."
    ),
    formulations: str | None = _only(
        None,
        f"Keep only cells of these formulations, separated by commas: "
        f"{', '.join(FORMULATIONS)} (all by default).",
    ),
    dtypes: str | None = _only(
        None, "Keep only cells of these types, separated by commas: fp32, fp16 (all by default)."
    ),
    stages: str | None = _only(
        None, "Keep only cells of these stages, separated by commas: score, evict (all by default)."
    ),
    sizes: str | None = option(
        None,
        "Score so many slots, or keep so many in evict graphs; numbers separated by "
        "commas (the preset's by default).",
        metavar="SLOTS",
        panel="Measure",
    ),
    threads: str | None = option(
        None,
        "Compute with so many threads: numbers separated by commas, such as 1,2 (the "
        "preset's by default).",
        metavar="COUNTS",
        panel="Measure",
    ),
    min_runs: int | None = _count(
        None, "Run every cell at least N times (the preset's number by default)."
    ),
    min_seconds: float | None = _time(
        None, "Run every cell at least so long (as the preset says by default)."
    ),
    warmup_seconds: float | None = _time(
        None, "Warm every cell up so long before its samples (as the preset says by default)."
    ),
    rounds: int | None = _count(None, "Visit every cell N times (the preset's number by default)."),
    model: str | None = option(
        None,
        "Take sizes from the config of this model (by default from --decoder, or Llama-3.2-3B's).",
        metavar="MODEL",
        panel="Model",
    ),
    kv_heads: int | None = _count(None, "Use N KV heads (the model's by default).", "Model"),
    heads: int | None = _count(None, "Use N query heads (the model's by default).", "Model"),
    head_dim: int | None = _count(
        None, "Give every key N numbers (the model's by default).", "Model"
    ),
    block_size: int | None = _count(
        None, "Read N tokens at once (the decoder's number, or 128, by default).", "Model"
    ),
    decoder: Path | None = option(
        None,
        "Time the whole decoder that kvcap export decoder wrote here, too.",
        metavar="DIR",
        panel="Decoder",
    ),
    prompt_tokens: int = _count(
        128, "Read a prompt of N tokens before the first one is written.", "Decoder"
    ),
    answer_tokens: int = _count(64, "Write N tokens after the prompt.", "Decoder"),
    long_tokens: int | None = _count(
        None,
        "Read a long prompt of N tokens, too (four times the budget, and at least 8 blocks, "
        "by default).",
        "Decoder",
    ),
    sustained_minutes: float = option(
        2.0, "Keep on writing so long at the end.", min=0, metavar="MINUTES", panel="Decoder"
    ),
    json: bool = JSON,
) -> None:
    """Write a folder with plan.json, graphs, and the outputs that they must give."""
    from kvcap.android_bench.plan.decoder import DecoderWork, shape_of
    from kvcap.android_bench.plan.write import PlanRequest, write_plan
    from kvcap.export.graphs.shape import Shape, model_sizes

    rules: dict[str, Any] = {
        "min_runs": min_runs,
        "min_seconds": min_seconds,
        "rounds": rounds,
        "warmup_seconds": warmup_seconds,
    }
    chosen = narrowed(
        preset,
        _names(policies),
        _names(formulations),
        _names(dtypes),
        _names(stages),
        _numbers(sizes),
    )
    chosen = replace(
        chosen, rules=replace(chosen.rules, **{k: v for k, v in rules.items() if v is not None})
    )
    if threads:
        chosen = replace(chosen, threads=tuple(_numbers(threads)))
    sizes_given = {"kv_heads": kv_heads, "heads": heads, "head_dim": head_dim, "block": block_size}
    named_sizes = {name: value for name, value in sizes_given.items() if value is not None}
    name = model or ("Llama-3.2-3B" if not named_sizes else "sizes by hand")
    work = DecoderWork(prompt_tokens, answer_tokens, long_tokens, sustained_minutes)
    sizes_of = model_sizes(model) if model else {}
    if decoder is not None and not model and not named_sizes:  # scores have the decoder's own sizes
        sizes_of = shape_of(decoder)
        name = sizes_of.pop("name")
    shape = Shape(**{**sizes_of, **named_sizes})
    plan = write_plan(PlanRequest(preset, chosen, shape, name, decoder, work), out)
    whole = sum(entry["bytes"] for entry in plan["files"])
    if json:
        summary = {"plan": str(out), "id": plan["id"], "cells": len(plan["cells"]), "bytes": whole}
        print(jsonlib.dumps(summary))
    else:
        print(f"{out}: {len(plan['cells'])} cells, {whole / 1e6:.1f} MB, plan {plan['id']}")


@android.adds("host")
def host_command(
    folder: Path = PLAN,
    out: Path = RESULT,
    threads: str | None = COUNTS,
    cores: str = CORES,
    provider: str = PROVIDER,
    profile: bool = PROFILE,
    json: bool = JSON,
) -> None:
    """Measure a plan on this machine."""
    from kvcap.android_bench.devices.host import run_here
    from kvcap.android_bench.documents import parent_of, write_json
    from kvcap.android_bench.results.table import markdown
    from kvcap.android_bench.runner.measure import RunOptions

    parent_of(out)
    result = run_here(folder, RunOptions(cores, provider, profile, _numbers(threads)))
    write_json(result, out)
    print(jsonlib.dumps(result) if json else markdown([result]), end="\n" * json)


@android.adds("report")
def report_command(
    files: list[Path] = argument(..., "Show these results side by side."),
    out: Path | None = option(
        None, "Write the Markdown here, too.", "--out", "-o", metavar="FILE.md"
    ),
    plot: Path | None = option(None, "Draw a chart into this file.", metavar="FILE.png"),
    rows: Path | None = option(
        None, "Write every row, without its samples, here.", metavar="FILE.json"
    ),
    csv: Path | None = option(
        None, "Write a table of all cells here, a row per cell.", metavar="FILE.csv"
    ),
    baseline: Path | None = option(
        None, "Compare with this earlier result of the same device.", metavar="FILE"
    ),
    relative_to: str | None = option(
        None, "Give times relative to this cell (the plan's reference by default).", metavar="CELL"
    ),
    max_regress: str | None = option(
        None,
        "Let a median grow by so much over --baseline (10% by default), and exit with 1 beyond "
        "that.",
        metavar="PERCENT",
    ),
    json: bool = JSON,
) -> None:
    """Write tables and a chart of results; with a baseline, exit 1 if a cell became slower."""
    from kvcap.android_bench.documents import parent_of, read_result, write_json
    from kvcap.android_bench.errors import Regressed
    from kvcap.android_bench.results.judge import judged, relative, rows_of
    from kvcap.android_bench.results.regress import regressions
    from kvcap.android_bench.results.table import heading, markdown, slower
    from kvcap.android_bench.runner.statistics import COLUMNS, csv_text

    allowed = _share("10%" if max_regress is None else max_regress)
    if max_regress is not None and baseline is None:
        raise ValueError("--max-regress compares with an earlier result; give it as --baseline")
    for path in (out, plot, rows, csv):
        if path is not None:
            parent_of(path)
    results = [judged(relative(read_result(file), relative_to)) for file in files]
    worse: list[str] = []
    if baseline is not None:
        before = judged(read_result(baseline))
        worse = [line for result in results for line in regressions(result, before, allowed)]
    text = markdown(results)
    if json:
        document = {"title": heading(results), "results": results, "regressions": worse}
        print(jsonlib.dumps(document))
    else:
        print(text, end="")
        if baseline is not None:
            print(slower(worse) or f"- no cell is slower than before by more than {allowed:.0%}")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if plot is not None:
        from kvcap.android_bench.results.chart import draw

        draw(results, plot)
    if rows is not None:
        write_json({"title": heading(results), "results": list(map(rows_of, results))}, rows)
    if csv is not None:
        csv.write_text(csv_text(results, COLUMNS), encoding="utf-8")
    if worse:
        raise Regressed(f"{len(worse)} cells became slower by more than {allowed:.0%}: {worse[0]}")


@android.adds("adb")
def adb_command(
    folder: Path = PLAN,
    out: Path = RESULT,
    serial: str | None = option(
        None,
        "Measure on this device, where several are connected (ANDROID_SERIAL by default).",
        metavar="SERIAL",
        panel="Device",
    ),
    runner_dir: Path | None = option(
        None,
        "Find the C runner in this folder, where CMake built it.",
        metavar="DIR",
        panel="Measure",
    ),
    browser: bool = option(
        False, "Measure in the device's browser instead of by a runner.", panel="Measure"
    ),
    threads: str | None = COUNTS,
    cores: str = CORES,
    provider: str = PROVIDER,
    profile: bool = PROFILE,
    timeout: float = option(
        3600, "Give up when the run takes longer.", min=1, metavar="SECONDS", panel="Measure"
    ),
    device_dir: str = option(
        "/data/local/tmp",
        "Make a temporary folder in this one of the device.",
        metavar="DIR",
        panel="Device",
    ),
) -> None:
    """Measure a plan on a device over adb; nothing is installed or left there."""
    from kvcap.android_bench.devices.adb import chosen
    from kvcap.android_bench.devices.run import DeviceRunSettings, c_runner, run_on
    from kvcap.android_bench.documents import parent_of, read_plan, write_json
    from kvcap.android_bench.results.judge import judged
    from kvcap.android_bench.results.table import markdown

    read_plan(folder)
    parent_of(out)
    options = ["--cores", cores, "--provider", provider, *["--profile"] * profile]
    options += ["--threads", threads] if threads else []
    if browser and (provider != "cpu" or profile):
        raise ValueError(
            "--provider and --profile go with a runner, not with --browser: the page offers "
            "WebAssembly and WebGPU itself, and gets no profile from them"
        )
    device = chosen(serial or os.environ.get("ANDROID_SERIAL"))
    settings = DeviceRunSettings(device_dir.rstrip("/") or "/", options, timeout)
    if browser:
        from kvcap.android_bench.devices.browser import run_in_browser

        raw = run_in_browser(device, folder, settings)
    else:
        raw = run_on(device, folder, c_runner(runner_dir), settings)
    result = judged(raw)
    write_json(result, out)
    print(markdown([result]), end="")


@android.adds("serve")
def serve_command(
    folder: Path = PLAN,
    out: Path = option(
        ...,
        "Write the results into this folder.",
        "--out",
        "-o",
        metavar="DIR",
        check=checked_folder,
    ),
    lan: bool = LAN,
    address: str | None = ADDRESS,
    port: int = PORT,
    count: int | None = option(None, "End after N results.", min=1),
    json: bool = option(False, "Print one JSON document per line."),
) -> None:
    """Serve a page that measures a plan in the browser that opens it."""
    Serving = _server("Serving")
    reached = _reached(lan, address)
    with Serving(folder, out, port=port, lan=reached) as serving:
        _invite(serving, lan)
        arrived = 0
        while count is None or arrived < count:
            try:
                landed = serving.landed.get(timeout=0.5)  # so that Ctrl-C takes effect everywhere
            except queue.Empty:
                serving.check()
                continue
            arrived += 1
            _tell(landed, json)


@android.adds("chat")
def chat_command(
    folder: Path = argument(
        ..., "Chat with the decoder that kvcap export decoder wrote here.", metavar="DIR"
    ),
    lan: bool = LAN,
    address: str | None = ADDRESS,
    port: int = PORT,
) -> None:
    """Serve a page that chats with a decoder, all on the device that opens it."""
    ChatServer = _server("ChatServer")
    reached = _reached(lan, address)
    with ChatServer(folder, port=port, lan=reached) as serving:
        _invite(serving, lan, "chat with this model")
        while True:
            time.sleep(0.5)  # so that Ctrl-C takes effect everywhere
            serving.check()


def _server(name: str) -> Any:
    """Return the server's class of this name.

    Raises:
        ServerMissing: a package that it needs is not installed.
    """
    try:
        from kvcap.android_bench.server import serving
    except ImportError as error:
        raise ServerMissing(
            f"serving needs {error.name}, which is not installed; {how_to_install('android')}"
        ) from error
    return getattr(serving, name)


def _reached(lan: bool, address: str | None) -> str | None:
    """Return the address by which other machines reach the server; None if they may not.

    Raises:
        ValueError: an address is given without `lan`.
        NoNetwork: this machine has no address.
    """
    if address is not None and not lan:
        raise ValueError("--address goes with --lan; without it only this machine is let in")
    return (address or lan_address()) if lan else None


def lan_address() -> str:
    """Return the address from which this machine reaches other networks.

    Raises:
        NoNetwork: this machine has no such address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((NOWHERE, 9))
            address: str = probe.getsockname()[0]
        except OSError as error:
            raise NoNetwork(
                f"this machine is in no network ({error.strerror}); --address names one of its "
                "addresses, and kvcap android adb --browser needs none"
            ) from error
    return address


def _invite(serving: PageServer, lan: bool, purpose: str = "measure here") -> None:
    """Print the page's address; for phones in the network also as a QR code, on a terminal."""
    screen = sys.stderr
    if lan:
        import segno

        if screen.isatty():
            segno.make(serving.url, error="m").terminal(screen, compact=True)
        print(f"Whoever has this address may {purpose}, until this command ends:", file=screen)
    print(serving.url, file=screen)
    print("Ctrl-C ends.", file=screen, flush=True)


def _tell(landed: Landed, json: bool) -> None:
    result = landed.result
    if json:
        device, validity = result["device"], result["validity"]
        line = {
            "file": str(landed.path),
            "device": device["model"],
            "source": device["source"],
            "complete": result["run"]["complete"],
            "valid": validity["ok"],
        }
        print(jsonlib.dumps(line), flush=True)
        return
    from kvcap.android_bench.results.source import title

    print(f"a result: {title(result)}", file=sys.stderr, flush=True)
    print(landed.path, flush=True)


def _names(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _numbers(text: str | None) -> list[int]:
    """Return the whole numbers of a text such as '1,2'; [] for None.

    Raises:
        ValueError: a part is no whole number above 0, or stands there twice.
    """
    try:
        numbers = [int(part) for part in _names(text)]
    except ValueError:
        numbers = [0]
    if any(n < 1 for n in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f"{text!r} will not work; use whole numbers above 0, such as 1,2")
    return numbers


def _share(text: str) -> float:
    """Return the share that a text such as '10%' means, here 0.1.

    Raises:
        ValueError: the text is no percentage of at least 0.
    """
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise ValueError(f"--max-regress {text!r} will not work; use a percentage such as 10%")
    return share
