"""`kvcap export decoder`, for the command line to register. Torch waits until it runs."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from kvcap.runtime.cli.options import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvcap.export.decoder.verify import Report
    from kvcap.policies import Eviction

Exporter = Literal["kvcap", "optimum", "existing"]


def decoder_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A repository, a directory, or pocket; with --exporter existing, a directory "
            "that holds an ONNX decoder.",
        ),
    ],
    policy: Annotated[
        str | None, typer.Option(help="What is evicted (keydiff); see kvcap policies.")
    ] = None,
    policy_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of the policy; repeatable.")
    ] = None,
    kv_budget_tokens: Annotated[
        int,
        typer.Option(
            "--kv-budget-tokens",
            "--max-kv-size",
            min=1,
            metavar="N",
            help="Slots kept per KV head and layer.",
        ),
    ] = 256,
    block_size: Annotated[
        int,
        typer.Option(
            "--block-size",
            "--prefill-chunk-size",
            min=1,
            metavar="N",
            help="The most tokens of one run.",
        ),
    ] = 128,
    positions: Annotated[
        Literal["compact", "true"] | None,
        typer.Option(help="Renumber what is kept, or do not (by default compact)."),
    ] = None,
    sink_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="First tokens that are never evicted.")
    ] = 0,
    recent_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Newest tokens that are never evicted.")
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32 or float16 (fp32, fp16), or int8: weights in int8, a cache in float32."
        ),
    ] = "fp32",
    exporter: Annotated[
        Exporter,
        typer.Option(
            help="kvcap: one graph that evicts; optimum: its export with graphs beside it that "
            "evict; existing: those for an ONNX decoder that is there."
        ),
    ] = "kvcap",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Directory (MODEL-onnx, or in place)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an export of something else.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check one block past the budget only.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Export a model that evicts by itself as one ONNX graph, checked, or leave no directory."""
    from kvcap.policies import load_policy
    from kvcap.runtime.cli.commands import quiet_libraries
    from kvcap.runtime.cli.options import pairs

    quiet_libraries()
    started = time.perf_counter()
    pins = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    options = {**pins, **pairs(policy_option or [])}
    eviction = load_policy(policy or DEFAULT_POLICY, **options)
    sizes = Sizes(kv_budget_tokens, block_size, positions)
    report = None
    if exporter == "kvcap":
        where = out or Path(f"{Path(model).name}-onnx")
        said, report = _kvcap(model, eviction, sizes, dtype, where, quick, force)
    else:  # graphs for several policies, unless one is asked for
        where = out or Path(model if exporter == "existing" else f"{Path(model).name}-onnx")
        said = _others(exporter, model, [eviction] if policy else [], sizes, dtype, where)
    found = {**_summary(said, where), "seconds": round(time.perf_counter() - started, 1)}
    if json:
        print(jsonlib.dumps({**found, **(report.as_dict() if report else {})}))
        return
    if report is not None:
        print(report.table())
    for entry in said["files"]:
        print(f"  {entry['file']:<24} {entry['bytes']:>15,} bytes")
    print(f"{where}  in {found['seconds']} s; kvcap chat {where}")


class Sizes(NamedTuple):
    """What is kept, what is read at once, where tokens count."""

    budget_tokens: int
    block_size: int
    positions: Literal["compact", "true"] | None


def _kvcap(
    model: str,
    eviction: Eviction,
    sizes: Sizes,
    dtype: str,
    out: Path,
    quick: bool,
    force: bool,
) -> tuple[dict[str, Any], Report]:
    """One graph; what cannot be is refused before weights are read."""
    from kvcap.export.decoder.manifest import asked
    from kvcap.export.decoder.spec import check_dtype, layout_for, load
    from kvcap.export.decoder.write import check_out, write
    from kvcap.runtime.backends.onnxruntime.library import require
    from kvcap.runtime.models.files import load_config
    from kvcap.runtime.models.names import resolve

    require()
    dtype = check_dtype(dtype)
    check_out(out, None)
    layout = layout_for(load_config(resolve(model)), eviction, *sizes)
    check_out(out, None if force else asked(model, layout, dtype))
    return write(load(model, dtype), layout, dtype, out, quick, _note, force)


def _note(text: str) -> None:
    """Say on a terminal what takes its time."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def _others(
    exporter: str, model: str, policies: list[Eviction], sizes: Sizes, dtype: str, out: Path
) -> dict[str, Any]:
    """A decoder of another exporter, and graphs beside it that evict."""
    if exporter == "optimum":
        from kvcap.export.optimum import export_with_optimum

        return export_with_optimum(model, out, policies, dtype=dtype, **sizes._asdict())
    from kvcap.export.adopt import adopt

    return adopt(Path(model), None if out == Path(model) else out, policies, **sizes._asdict())


def _summary(said: dict[str, Any], out: Path) -> dict[str, Any]:
    """The manifest without what is long."""
    long = ("inputs", "outputs", "state", "rule", "verified", "sample")
    return {"directory": str(out), **{k: v for k, v in said.items() if k not in long}}
