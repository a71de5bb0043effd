"""Defines the commands `kvcap export scorer`, `decoder` and `verify` with their options.

Imports of torch wait until a command runs. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvcap.export.graphs.formulations import FORMULATIONS, TRACED
from kvcap.runtime.cache.formats import CHOICES
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cli.declare import CommandGroup, argument, option
from kvcap.runtime.cli.options import checked_folder
from kvcap.runtime.types import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvcap.export.decoder.check import DecoderReport
    from kvcap.export.graphs.shape import Shape

export = CommandGroup("Write scores and decoders as ONNX graphs, and check them.")

JSON: Any = option(False, "Print one JSON document.", panel="Output")
POLICY_OPTION: Any = option(
    None, "Set an option of the policy; repeatable.", metavar="KEY=VALUE", panel="Memory"
)
SINK_TOKENS: Any = option(
    None,
    "Never evict the first N tokens, besides those that the policy keeps (4 by default, "
    "fewer where less than 32 slots would stay unpinned; 0 runs the policy as in its paper).",
    min=0,
    panel="Memory",
)
FORCE: Any = option(False, "Replace an export of something else.", panel="Output")
QUICK: Any = option(False, "Leave out the longest cases.", panel="Output")


def _size(default: int | None, text: str) -> Any:
    return option(default, text, min=1, panel="Model")


@export.adds("scorer")
def scorer_command(
    policy: str = argument(
        ..., "Export this policy: a name that kvcap policies lists, or A+B for a combination."
    ),
    stage: str = option(
        "score",
        "Export a graph that scores (score), that scores, selects and gathers (evict), "
        "or that updates cached state (update).",
        metavar="NAME",
    ),
    formulation: str | None = option(
        None,
        f"Write the scores as {TRACED}, or KeyDiff's as "
        f"{', '.join([*FORMULATIONS][1:])} (as suits the policy by default).",
        metavar="NAME",
    ),
    model: str | None = option(
        None,
        "Take sizes from the config of this model (Llama-3.2-3B's by default).",
        metavar="MODEL",
        panel="Model",
    ),
    kv_heads: int | None = _size(None, "Use N KV heads (the model's by default)."),
    heads: int | None = _size(None, "Use N query heads (the model's by default)."),
    head_dim: int | None = _size(None, "Give every key N numbers (the model's by default)."),
    batch: int = _size(1, "Score N sequences at once."),
    window: int | None = option(
        None,
        "Score by the last N queries, for policies with an observation window (the "
        "policy's own by default).",
        min=1,
        panel="Memory",
    ),
    block: int = option(128, "Read N tokens at once.", "--block-size", min=1, panel="Memory"),
    budget: int = option(
        512,
        "Keep N slots per KV head in a graph of --stage evict.",
        "--budget-tokens",
        min=1,
        panel="Memory",
    ),
    sink_tokens: int | None = SINK_TOKENS,
    static: int | None = option(
        None,
        "Fix the number of slots that are scored (left open by default).",
        min=1,
        panel="Memory",
    ),
    dtype: str = option(
        "fp32",
        "Take keys and values in float32 or float16, also written fp32, fp16.",
        metavar="NAME",
        panel="Model",
    ),
    policy_option: list[str] | None = POLICY_OPTION,
    out: Path = option(
        Path("."),
        "Write the files into this folder.",
        "--out",
        "-o",
        metavar="DIR",
        check=checked_folder,
        panel="Output",
    ),
    force: bool = FORCE,
    quick: bool = QUICK,
    json: bool = JSON,
) -> None:
    """Export a policy's graph with a manifest, check it in ONNX Runtime, or leave no file."""
    from kvcap.export.graphs.spec import Spec
    from kvcap.export.graphs.write import write
    from kvcap.policies import load_policy
    from kvcap.runtime.cli.commands import quiet_libraries
    from kvcap.runtime.cli.options import pairs

    quiet_libraries()
    options = pairs(policy_option or [])
    if sink_tokens is not None:
        options["sink_tokens"] = sink_tokens
    if window is not None:
        options["window"] = window
    sizes = {
        "kv_heads": kv_heads,
        "heads": heads,
        "head_dim": head_dim,
        "batch": batch,
        "block": block,
        "budget": budget,
        "slots": static,
    }
    shape = _shape(model, {name: value for name, value in sizes.items() if value is not None})
    spec = Spec(load_policy(policy, **options), shape, stage, formulation, dtype)
    file, report = write(spec, out, quick, force)
    summary: dict[str, Any] = {"graph": str(file), "bytes": file.stat().st_size, **report.as_dict()}
    summary["notes"] = spec.notes()
    if json:
        print(jsonlib.dumps(summary))
        return
    print(report.table())
    print(f"{file}  {file.stat().st_size:,} bytes, manifest and samples beside it")
    for note in summary["notes"]:
        print(f"note: {note}")


@export.adds("decoder")
def decoder_command(
    model: str = argument(
        ..., "Export this model: a repository of the hub, a directory, or pocket."
    ),
    policy: str | None = option(
        None,
        f"Choose what is evicted by this policy ({DEFAULT_POLICY} by default). "
        "`kvcap policies` lists all.",
        metavar="NAME",
        panel="Memory",
    ),
    policy_option: list[str] | None = POLICY_OPTION,
    budget_tokens: int = option(
        256,
        "Keep N slots per KV head and layer.",
        min=1,
        panel="Memory",
    ),
    block_size: int = option(
        128,
        "Read at most N tokens at once.",
        min=1,
        panel="Memory",
    ),
    positions: Literal["compact", "true", "auto"] | None = option(
        None,
        "Renumber kept tokens from 0 (compact, the default), or leave their positions as "
        "they are (true).",
        metavar="[compact|true]",
        panel="Memory",
    ),
    sink_tokens: int | None = SINK_TOKENS,
    recent_tokens: int | None = option(
        None, "Never evict the newest N tokens.", min=0, panel="Memory"
    ),
    dtype: str = option(
        "fp32",
        "Compute in float32 or float16, also written fp32, fp16; or hold weights in "
        "blocks of integers (int8, int4) and the cache in float32.",
        metavar="NAME",
        panel="Model",
    ),
    calibrate: Path | None = option(
        None,
        "Round int4 by a text like those that the model will read (GPTQ): the export "
        "takes minutes, and loses less. With --kv-dtype int8, keys and values are measured "
        "by it.",
        metavar="FILE",
        panel="Model",
    ),
    kv_dtype: str | None = option(
        None,
        "Hold keys and values in 8 bits, so that the same bytes hold up to four times as "
        "many (in the type of the cache by default).",
        metavar="[int8]",
        choices=CHOICES,
        panel="Memory",
    ),
    out: Path | None = option(
        None,
        "Write into this directory (MODEL-onnx by default).",
        "--out",
        "-o",
        metavar="DIR",
        check=checked_folder,
        panel="Output",
    ),
    force: bool = FORCE,
    quick: bool = option(False, "Check only one block past the budget.", panel="Output"),
    foresee: bool = option(
        False,
        "Write nothing, and print what the manifest would say, as JSON; reads no weights.",
        panel="Output",
    ),
    json: bool = JSON,
) -> None:
    """Export a model and its eviction as ONNX graphs, checked, or leave no directory."""
    from kvcap.runtime.backends.onnxruntime.manifest import refuse_cache

    refuse_cache(positions, kv_dtype)
    from kvcap.policies import load_policy
    from kvcap.runtime.cli.commands import quiet_libraries
    from kvcap.runtime.cli.options import pairs

    quiet_libraries()
    started = time.perf_counter()
    pins = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    pinned = {name: count for name, count in pins.items() if count is not None}
    options = {**pinned, **pairs(policy_option or [])}
    settings = CacheSettings(
        budget_tokens,
        block_size,
        load_policy(policy or DEFAULT_POLICY, **options),
        positions,
        kv_dtype=kv_dtype,
    )
    where = out or Path(f"{Path(model).name}-onnx")
    text = _text(dtype, calibrate, kv_dtype)
    if foresee:
        from kvcap.export.decoder.foresee import foreseen

        print(jsonlib.dumps(foreseen(model, settings, dtype, text)))
        return
    manifest, report = _kvcap(model, settings, dtype, where, quick, force, text)
    summary = {**_summary(manifest, where), "seconds": round(time.perf_counter() - started, 1)}
    if json:
        print(jsonlib.dumps({**summary, **report.as_dict()}))
        return
    print(report.table())
    width = max(len(entry["file"]) for entry in manifest["files"])
    for entry in manifest["files"]:
        print(f"  {entry['file']:<{width}} {entry['bytes']:>15,} bytes")
    print(f"{where}  in {summary['seconds']} s; kvcap chat {where}")


@export.adds("verify")
def verify_command(
    path: Path = argument(
        ..., "Check this .onnx file with its manifest, a folder of some, or a decoder's folder."
    ),
    model: str | None = option(
        None,
        "Compare a decoder with this model (by default the one it was made from).",
        metavar="MODEL",
    ),
    quick: bool = QUICK,
    json: bool = JSON,
) -> None:
    """Run exported graphs and compare with eager; exit 1 if one differs or cannot be run."""
    from kvcap.export.verify import verify
    from kvcap.runtime.backends.onnxruntime.library import require
    from kvcap.runtime.cli.commands import quiet_libraries

    require()
    quiet_libraries()
    reports = verify(path, model, quick)
    if json:
        print(jsonlib.dumps([report.as_dict() for report in reports]))
    else:
        print("\n".join(report.table() for report in reports))
    for report in reports:
        report.require()


def _shape(model: str | None, sizes: dict[str, int]) -> Shape:
    """Return the sizes of options, else of the model's config, else the defaults.

    If only KV heads are given, the model or the defaults decide how many query heads share one.
    """
    from kvcap.export.graphs.shape import Shape, model_sizes

    defaults: dict[str, Any] = {f.name: f.default for f in fields(Shape)}
    defaults |= model_sizes(model) if model is not None else {}
    if "kv_heads" in sizes and "heads" not in sizes:
        sizes = {**sizes, "heads": defaults["heads"] // defaults["kv_heads"] * sizes["kv_heads"]}
    return Shape(**{**defaults, **sizes})


def _kvcap(
    model: str,
    settings: CacheSettings,
    dtype: str,
    out: Path,
    quick: bool,
    force: bool,
    text: str | None,
) -> tuple[dict[str, Any], DecoderReport]:
    """Export one decoder's graph; refuse impossible settings before weights are read."""
    from kvcap.export.decoder.spec import check_dtype, layout_for, open_model
    from kvcap.runtime.models.files import load_config
    from kvcap.runtime.models.names import resolve

    dtype, kv_dtype = check_dtype(dtype), settings.kv_dtype
    layout = layout_for(load_config(resolve(model)), settings)
    # Imported only now, as it takes seconds and refusals need not wait for it.
    from kvcap.export.decoder.manifest import settings_of
    from kvcap.export.decoder.write import check_out, write
    from kvcap.runtime.backends.onnxruntime.library import require

    require()
    check_out(out, None)
    check_out(out, None if force else settings_of(model, layout, dtype, text, kv_dtype))
    source = open_model(model, dtype)
    return write(source, layout, dtype, out, quick, _note, force, text, kv_dtype)


def _text(dtype: str, file: Path | None, kv_dtype: str | None) -> str | None:
    """Return the text to calibrate on, None without a file.

    Raises:
        NotExportable: neither weights of this type nor the slots are calibrated.
        ValueError: the file cannot be read.
    """
    if file is None:
        return None
    from kvcap.export.decoder.calibrate import refuse_text  # takes seconds to import
    from kvcap.export.decoder.spec import check_dtype
    from kvcap.runtime.files import read_text

    text = read_text(file)
    refuse_text(text, check_dtype(dtype), kv_dtype)
    return text


def _note(text: str) -> None:
    """Print on a terminal which slow step begins."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def _summary(manifest: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the manifest without its long parts."""
    long = ("inputs", "outputs", "state", "rule", "verified", "sample")
    return {"directory": str(out), **{k: v for k, v in manifest.items() if k not in long}}
