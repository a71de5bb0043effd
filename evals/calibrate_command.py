"""`kvcap policies calibrate`, for the command line to register.

Imports of torch wait until the command runs. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvcap.runtime.cli.console import styled
from kvcap.runtime.cli.options import Model

if TYPE_CHECKING:
    from kvcap.evals.calibrate import Calibration


def calibrate_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as headkv or duoattention.")],
    model: Model = "pocket",
    *,
    file: Annotated[
        str, typer.Option("--file", "-f", metavar="TEXT", help="The text to read; - is stdin.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where the table goes.")
    ] = Path("heads.json"),
    tokens: Annotated[
        int, typer.Option(min=32, metavar="N", help="The most tokens of the text to read, twice.")
    ] = 1024,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="float32, bfloat16 or float16.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda or mps; the best there is.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only where the table is.")
    ] = False,
) -> None:
    """Measure how much every head of a model retrieves: the table of headkv and duoattention.

    The model reads a text twice, uncapped; a head that retrieves looks, in the second copy, at what
    followed in the first. Best is a text of names and numbers, which nobody can guess.
    """
    from kvcap.runtime.cli.commands import quiet_libraries, read_input

    quiet_libraries()
    from kvcap.evals.calibrate import calibrate
    from kvcap.policies import companions

    names = [other for other, cls in companions().items() if "table" in cls.__dataclass_fields__]
    if name not in names:
        raise ValueError(f"{name!r} takes no table of heads; only {' and '.join(names)} do")
    text = read_input(file)
    if not text.strip():
        raise ValueError("the text is empty; give one of at least 32 tokens")
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"cannot write {str(out)!r}: no such folder, or it is one")
    with _meter(quiet) as report:
        found = calibrate(model, text, tokens=tokens, dtype=dtype, device=device, report=report)
    document = jsonlib.dumps(found.as_dict())
    try:
        out.write_text(document + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {str(out)!r}: {error.strerror}") from error
    if json:
        print(document)
        return
    print(f"{out} written; use it with --policy {name} --policy-option table={out}")
    if not quiet:
        print(_summary(found))


@contextmanager
def _meter(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A live line on stderr that is gone when the text is read."""
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total} tokens"))
    console = Console(stderr=True, highlight=False)
    off = quiet or not styled()
    with Progress(*columns, console=console, transient=True, disable=off) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _summary(found: Calibration) -> str:
    scores = [score for row in found.scores for score in row]
    figures = [("least", min(scores)), ("mean", sum(scores) / len(scores)), ("most", max(scores))]
    heads = [(f"layer {i} head {h}", score) for score, i, h in found.strongest(5)]
    return "\n".join(f"{label:<18}{score:.4f}" for label, score in [*figures, *heads])
