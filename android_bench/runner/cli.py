"""Defines the runner's command line, and writes the result."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvcap.android_bench.runner.device import Refused, cores_for
from kvcap.android_bench.runner.inputs import Cell, hash11
from kvcap.android_bench.runner.measure import PlanRun

PLAN = "kvcap.android_plan/1"


def load_plan(path: Path) -> Cell:
    """Load the plan, which kvcap checked against its schema when it wrote it.

    Raises:
        Refused: the plan cannot be read, has another schema, or makes inputs by other rules.
    """
    try:
        plan: Cell = json.loads(path.read_text(encoding="utf-8"))
        if plan["schema"] != PLAN:
            raise Refused(f"{path.name} has schema {plan['schema']!r}; this runner reads {PLAN!r}")
        check = plan["generator"]["check"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{str(path)!r} is no plan: {error!r}") from error
    if hash11(1, len(check)).tolist() != check:
        raise Refused(f"{path.name}: inputs would not be those of the plan's generator")
    return plan


def main(arguments: list[str] | None = None) -> int:
    """Run a plan; return an exit code.

    It is 0 if done, 1 if no cell could run, 2 for wrong input, 130 if interrupted.
    """
    parser = argparse.ArgumentParser(description="Measure a plan of kvcap android plan.")
    parser.add_argument("plan", type=Path, help="plan.json, its files beside it")
    parser.add_argument("-o", "--out", type=Path, required=True, help="where the result goes")
    parser.add_argument("--threads", type=_counts, help="such as 1,2; the plan's otherwise")
    parser.add_argument("--cores", default="auto", help="auto (the fastest), none, 7 or 4-7")
    parser.add_argument(
        "--provider",
        default="cpu",
        help="cpu, xnnpack, nnapi, qnn or another execution provider of this ONNX Runtime",
    )
    parser.add_argument("--profile", action="store_true", help="add each cell's operators")
    options = parser.parse_args(arguments)
    try:
        cores_for(options.cores, 1)
        run = PlanRun(load_plan(options.plan), options.plan.parent, options)
        if not options.out.parent.is_dir():
            raise Refused(f"no folder {str(options.out.parent)!r} for {options.out.name}")
        result = run.document()
    except Refused as error:
        print(f"runner: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _write(options.out, json.dumps(result, allow_nan=False) + "\n")
    return 0 if any(row["status"] == "ok" for row in run.rows) else 1


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1 or len(set(counts)) < len(counts):
        raise ValueError
    return counts
