"""`kvcap export`: `scorer`, `decoder` and `verify`, for the command line to register.

Imports of torch wait until a command runs. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcap.export.decoder.command import decoder_command
from kvcap.export.formulations import FORMULATIONS, TRACED

if TYPE_CHECKING:
    from kvcap.export.shape import Shape

export = typer.Typer(
    add_completion=False, help="Scores and whole decoders as ONNX graphs, checked against eager."
)
export.command("decoder")(decoder_command)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an export of something else.")]
Quick = Annotated[bool, typer.Option("--quick", help="Leave the longest cases out.")]


def _size(text: str) -> Any:
    return typer.Option(min=1, help=text)


@export.command("scorer")
def scorer_command(
    policy: Annotated[str, typer.Argument(help="A name that kvcap policies lists, or A+B.")],
    stage: Annotated[
        str, typer.Option(help="score; evict (score, select, gather); update (of cached state).")
    ] = "score",
    formulation: Annotated[
        str | None,
        typer.Option(help=f"{TRACED}, or of KeyDiff {', '.join([*FORMULATIONS][1:])}."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Sizes from a model's config.")
    ] = None,
    kv_heads: Annotated[int | None, _size("By hand, in place of --model: KV heads.")] = None,
    heads: Annotated[int | None, _size("Query heads.")] = None,
    head_dim: Annotated[int | None, _size("Numbers of a key.")] = None,
    batch: Annotated[int, _size("Sequences.")] = 1,
    window: Annotated[int | None, _size("Queries the policy looks at, where it has some.")] = None,
    block: Annotated[
        int, typer.Option("--block", "--block-size", min=1, help="Tokens that arrive at once.")
    ] = 128,
    budget: Annotated[
        int,
        typer.Option(
            "--budget",
            "--kv-budget-tokens",
            min=1,
            help="Slots per KV head that an evict graph keeps.",
        ),
    ] = 512,
    static: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Slots held; left open otherwise.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of keys and values: float32 or float16 (fp32, fp16).")
    ] = "fp32",
    policy_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of the policy; repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")] = Path("."),
    ort: Annotated[bool, typer.Option("--ort", help="In ONNX Runtime's own format too.")] = False,
    mobile_report: Annotated[
        bool, typer.Option("--mobile-report", help="What mobile execution providers take of it.")
    ] = False,
    qnn: Annotated[
        str | None,
        typer.Option(metavar="CHIP", help="Compile for Qualcomm's NPU too: SM8650, v75, ..."),
    ] = None,
    force: Force = False,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Export a policy's graph with a manifest, check it in ONNX Runtime, or leave no file."""
    from kvcap.export import mobile
    from kvcap.export import qnn as npu
    from kvcap.export.spec import Spec
    from kvcap.export.write import write
    from kvcap.policies import load_policy
    from kvcap.runtime.cli.commands import quiet_libraries
    from kvcap.runtime.cli.options import pairs

    quiet_libraries()
    options = pairs(policy_option or [])
    if window is not None:
        options["window"] = window
    sizes = {"kv_heads": kv_heads, "heads": heads, "head_dim": head_dim, "batch": batch,
             "block": block, "budget": budget, "slots": static}  # fmt: skip
    shape = _shape(model, {name: value for name, value in sizes.items() if value is not None})
    spec = Spec(load_policy(policy, **options), shape, stage, formulation, dtype)
    target = npu.target_of(qnn, spec) if qnn is not None else None
    file, report = write(spec, out, quick, force)
    found: dict[str, Any] = {"graph": str(file), "bytes": file.stat().st_size, **report.as_dict()}
    found["notes"] = spec.notes()
    if ort:
        found["ort"] = str(mobile.to_ort(file))
    if mobile_report:
        found["mobile"] = mobile.report(file)
    if target is not None:
        compiled, simulated = npu.write(file, target, quick)
        found["qnn"] = {"graph": str(compiled), **simulated.as_dict()}
    if json:
        print(jsonlib.dumps(found))
        return
    print(report.table())
    print(f"{file}  {file.stat().st_size:,} bytes, manifest and samples beside it")
    for note in found["notes"]:
        print(f"note: {note}")
    for name in ("ort", "mobile"):
        if name in found:
            print(found[name])
    if target is not None:
        print(simulated.table())
        print(f"{compiled}  for {target.chip}, Hexagon v{target.hexagon}, manifest beside it")


@export.command("verify")
def verify_command(
    path: Annotated[
        Path,
        typer.Argument(help="A .onnx with its manifest, a folder of some, or a decoder's folder."),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A decoder's model, if not where it was."),
    ] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Run exported graphs and compare with eager; exit 1 where one differs, or cannot be run."""
    from kvcap.export.decoder.recheck import is_decoder, recheck
    from kvcap.export.verify import Unchecked, verify
    from kvcap.runtime.backends.onnxruntime.library import require
    from kvcap.runtime.cli.commands import quiet_libraries

    require()
    quiet_libraries()
    reports: list[Any]
    reports = [recheck(path, model, quick)] if is_decoder(path) else [*verify(path, quick)]
    if json:
        print(jsonlib.dumps([report.as_dict() for report in reports]))
    else:
        print("\n".join(report.table() for report in reports))
    for report in sorted(reports, key=lambda report: isinstance(report, Unchecked)):
        report.require()  # a fault is told before what is not known


def _shape(model: str | None, given: dict[str, int]) -> Shape:
    """The sizes by hand, over those of the model, over the defaults.

    Query heads that are not given are as many per KV head as there would be.
    """
    from kvcap.export.shape import Shape, model_sizes

    known: dict[str, Any] = {f.name: f.default for f in fields(Shape)}
    known |= model_sizes(model) if model is not None else {}
    if "kv_heads" in given and "heads" not in given:
        given = {**given, "heads": known["heads"] // known["kv_heads"] * given["kv_heads"]}
    return Shape(**{**known, **given})
