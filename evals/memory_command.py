"""`kvcap memory check` and `kvcap memory update`, for the command line to register.

Imports of torch wait until a command runs. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvcap.evals.memory import Baseline, Matrix

memory = typer.Typer(add_completion=False, help="Memory figures that must not grow.")

File = Annotated[Path, typer.Option("--baseline", metavar="FILE", help="The figures to keep to.")]
Model = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Default: the baseline's, else pocket.")
]
Policies = Annotated[str | None, typer.Option(metavar="NAMES", help="With commas.")]
Budgets = Annotated[
    str | None, typer.Option(metavar="SLOTS", help="Per KV head, with commas, such as 64,256.")
]
Lengths = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="Of prompts, with commas, such as 1024,2048.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DEFAULT = Path("memory-baseline.json")


@memory.command("check")
def check_command(
    baseline: File = DEFAULT,
    model: Model = None,
    policies: Policies = None,
    budgets: Budgets = None,
    lengths: Lengths = None,
    tolerance: Annotated[
        float, typer.Option(min=0, metavar="PERCENT", help="By which a peak may grow.")
    ] = 2.0,
    json: Json = False,
) -> None:
    """Measure what reading a prompt takes and compare with the baseline; exit 1 where it grew.

    Without options, everything that the baseline holds.
    """
    from kvcap.evals.memory import Baseline, regressions, table

    before = Baseline.read(baseline)
    now = _measured(_matrix(before.matrix, model, policies, budgets, lengths))
    grown, unlike = regressions(now, before, tolerance / 100)
    if json:
        document = {**now.as_dict(), "regressions": grown, "peaks_not_compared": unlike or None}
        print(jsonlib.dumps(document))
    else:
        print(table(now.cells, before))
        print("\n".join(grown) or f"nothing grew in {len(now.cells)} cells")
    if unlike:
        _note(f"peaks were not compared: {unlike}")
    if grown:
        _note(f"{len(grown)} figures grew; where that is meant, run kvcap memory update")
        raise typer.Exit(1)


@memory.command("update")
def update_command(
    baseline: File = DEFAULT,
    model: Model = None,
    policies: Policies = None,
    budgets: Budgets = None,
    lengths: Lengths = None,
    json: Json = False,
) -> None:
    """Measure and write the baseline anew; an earlier one is replaced whole or not at all.

    Without options, what the earlier one held.
    """
    from kvcap.evals.memory import Baseline, BaselineUnusable, Matrix, table

    try:
        known = Baseline.read(baseline).matrix
    except BaselineUnusable:
        known = Matrix()
    now = _measured(_matrix(known, model, policies, budgets, lengths))
    now.write(baseline)
    print(jsonlib.dumps(now.as_dict()) if json else table(now.cells))
    _note(f"wrote {baseline}")


def _matrix(
    known: Matrix,
    model: str | None,
    policies: str | None,
    budgets: str | None,
    lengths: str | None,
) -> Matrix:
    """What was asked for, and the rest as it is known."""
    from kvcap.evals.commands import _names, _numbers

    given: dict[str, Any] = {
        "model": model,
        "policies": policies and _names(policies),
        "budgets": budgets and _numbers("budgets", budgets),
        "lengths": lengths and _numbers("lengths", lengths),
    }
    return replace(known, **{name: value for name, value in given.items() if value})


def _measured(matrix: Matrix) -> Baseline:
    from kvcap.evals.memory import measure
    from kvcap.runtime.cli.commands import quiet_libraries

    quiet_libraries()
    return measure(matrix, lambda cell: _note(str(cell)))


def _note(text: str) -> None:
    print(f"kvcap: {text}", file=sys.stderr, flush=True)
