"""Writes a page of Markdown that ranks policies by the cells of one or several sweeps.

The page has a section per model and task, with a table per length and position mode: policies down,
the best mean first, and budgets across. A text that an author wrote between two marks stays.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kvcap.evals.reports import grid
from kvcap.lab.plots.groups import pooled
from kvcap.lab.quality.cells import Cell, Setting, cells_of
from kvcap.lab.quality.table import measured
from kvcap.lab.report.ranking import (
    RankingTable,
    check_same_samples,
    overview,
    tables,
    tied_with_best,
)
from kvcap.runtime.files import TEXT, read_plain

OPEN, CLOSE = "<!-- text -->", "<!-- /text -->"
PLACEHOLDER = (
    "*Nobody has written yet what these tables say. What stands between the two marks around this "
    "paragraph is kept when the page is written again.*"
)
INTRODUCTION = (
    "To see which policies keep most of a text in few slots, find your budget and read down its "
    "column."
)
LEGEND = """\
- **Rows** are policies, ranked by their mean. The first never evicts: it is the uncapped model, against which the others are read. A policy that lacks a budget has no mean and comes last.
- **Columns** are budgets, in slots per KV head. The *mean* is over all budgets, taken sample by sample.
- **±** is the margin of the 95 % interval, on the side where it reaches further from the score (Wilson's interval where every sample is right or wrong, otherwise a bootstrap over samples).
- **Bold** is the best policy of a column, and every other that cannot be told from it on the same samples: McNemar's exact test has p ≥ 0.05 or, where a sample is not just right or wrong, the bootstrap interval of the difference includes zero. Each policy is tested by itself, without a correction for how many there are.
- **Positions**: *compact* ones count the tokens that stay anew; *true* ones are those at which the tokens were read."""  # noqa: E501
Box = dict[str, tuple[Any, ...]]  # the values of each axis of a sweep
AXES = {
    "--budgets": "budget", "--positions": "positions", "--policies": "policy",
    "--lengths": "length", "--tasks": "task", "--question": "question", "--depths": "depth",
}  # fmt: skip
PROMPTS = ("--lengths", "--tasks", "--question", "--depths")
OUT = "out/leaderboard"


def write(folders: Sequence[Path], target: Path, plot: bool = False) -> list[Path]:
    """Write the page of all cells in `folders`, and with `plot` a picture of every section.

    Returns:
        The written files: pictures, in the folder `pictures` beside the page, and the page.

    Raises:
        ValueError: a folder has no cells, cells have different samples, matplotlib is missing, or
            the target cannot be written or is another page, without the marks.
    """
    from kvcap.lab.plots import leaderboard
    from kvcap.lab.plots.style import require_matplotlib

    if plot:
        require_matplotlib()
    cells = cells_of(folders)
    check_same_samples(cells)
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"cannot write {str(target)!r}: no such folder, or it is one")
    text = author_text(target)
    parts = sections(cells)
    pictures: dict[int, Path] = {}  # by the index of a section
    try:
        for number, (part, heading) in enumerate(zip(parts, headings(parts), strict=True)):
            if not plot or not any(cell.setting.budget for cell in part):
                continue
            picture = target.parent / "pictures" / f"{target.stem}-{_file_name(heading)}.png"
            if picture in pictures.values():
                picture = picture.with_stem(f"{picture.stem}-{number + 1}")
            picture.parent.mkdir(exist_ok=True)
            leaderboard.figure(tables(part), heading).savefig(picture)
            pictures[number] = picture
        links = {number: f"pictures/{picture.name}" for number, picture in pictures.items()}
        made = page(parts, text, links) + measured_by(cells, target, plot)
        target.write_text(made, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot write {error.filename or str(target)!r}: {error.strerror}"
        ) from error
    return [*pictures.values(), target]


def author_text(target: Path) -> str:
    """Return the text between the marks of a page; a placeholder if there is no page yet.

    Raises:
        ValueError: the page does not have each mark exactly once.
    """
    if not target.exists():
        return PLACEHOLDER
    try:
        page = read_plain(target, TEXT).decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {str(target)!r}: {error.strerror}") from error
    match = re.fullmatch(f".*{re.escape(OPEN)}(.*){re.escape(CLOSE)}.*", page, re.DOTALL)
    if match is None or page.count(OPEN) != 1 or page.count(CLOSE) != 1:
        raise ValueError(
            f"{str(target)!r} is there without {OPEN} and behind it {CLOSE}, once each, between "
            "which your text is kept; put them in, or give another --out"
        )
    return match[1].strip()


def sections(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Group cells by model, task and way of asking; pool those of several depths into one.

    Models come in the order of their first cells.
    """
    ordered = sorted(cells, key=lambda cell: cell.setting.depth or 0.0)  # the order of pooling
    models = [*dict.fromkeys(cell.setting.model for cell in ordered)]
    order = {model: number for number, model in enumerate(models)}
    grouped = sorted(
        pooled(ordered), key=lambda cell: (order[cell.setting.model], _section(cell.setting))
    )
    return [list(part) for _, part in groupby(grouped, key=lambda cell: _section(cell.setting))]


def _section(s: Setting) -> tuple[Any, ...]:
    question = s.question is not None, s.question or ""
    how = -s.samples, s.seed, s.block_size, s.max_new_tokens or 0  # the most samples first
    return s.model, s.task, s.data or "", *question, s.dtype, *how


def headings(parts: Sequence[Sequence[Cell]]) -> list[str]:
    """Return each section's heading: model, task and, if sections share both, their lengths."""
    of = [_heading(part[0].setting) for part in parts]
    return [
        name if of.count(name) == 1 else f"{name}, {_lengths(part)} tokens"
        for name, part in zip(of, parts, strict=True)
    ]


def _lengths(part: Sequence[Cell]) -> str:
    return " and ".join(f"{length:,}" for length in sorted({c.setting.length for c in part}))


def page(parts: Sequence[Sequence[Cell]], text: str, pictures: Mapping[int, str]) -> str:
    """Return the page, up to the commands that measure its cells.

    Args:
        parts: the cells of each section, from `sections`.
        text: the author's text, for between the marks.
        pictures: paths from the page to pictures, by the index of a section.
    """
    lines = ["# Leaderboard", "", INTRODUCTION, "", OPEN, "", text, "", CLOSE, "", LEGEND, ""]
    for number, (part, heading) in enumerate(zip(parts, headings(parts), strict=True)):
        lines += _section_lines(part, heading, pictures.get(number))
    return "\n".join([*lines, ""])


def _section_lines(part: Sequence[Cell], heading: str, picture: str | None) -> list[str]:
    ranked = tables(part)
    lines = [f"## {heading}", "", f"{measured(part)}.", ""]
    if picture is not None:
        lines += [f"![Scores over budgets, {heading}]({picture})", ""]
    if len(ranked) > 1:
        lines += ["### Means over budgets", "", *_overview(ranked), ""]
    for table in ranked:
        at = f", {table.positions} positions" if table.rows else ""
        upto = "Up to " if part[0].setting.from_rows else ""
        lines += [f"### {upto}{table.length:,} tokens{at}", "", *_table(table), ""]
    return lines


def _overview(ranked: Sequence[RankingTable]) -> list[str]:
    free = [dict(table.uncapped) for table in ranked]
    names = dict.fromkeys(name for cells in free for name in cells)
    top = [[_code(name), *(_score(cells.get(name)) for cells in free)] for name in names]
    rows = overview(ranked)
    columns = [_column([row.cells[i] for row in rows]) for i in range(len(ranked))]
    header = ["policy", *(f"{table.length:,} {table.positions}" for table in ranked)]
    lines = zip((_code(row.name) for row in rows), *columns, strict=True)
    return grid(header, [*top, *map(list, lines)])


def _table(table: RankingTable) -> list[str]:
    blank = [""] * len(table.budgets)
    top = [[_code(name), _score(cell), *blank] for name, cell in table.uncapped]
    whole = _column([row.mean if row.whole else None for row in table.rows])
    columns = [_column([row.cells[i] for row in table.rows]) for i in range(len(table.budgets))]
    lines = zip((_code(row.name) for row in table.rows), whole, *columns, strict=True)
    header = ["policy", "mean", *(f"{budget:,}" for budget in table.budgets)]
    return grid(header, [*top, *map(list, lines)])


def _column(cells: Sequence[Cell | None]) -> list[str]:
    """Return the scores of a column, with the best and those that tie with it in bold."""
    best = tied_with_best(cells)
    return [_score(cell, bold=index in best) for index, cell in enumerate(cells)]


def _score(cell: Cell | None, bold: bool = False) -> str:
    """Return a score, and how far its interval reaches, with a space that does not break."""
    if cell is None:
        return ""
    reach = max(cell.score - cell.ci_low, cell.ci_high - cell.score, 0.0)
    mark, margin = "**" if bold else "", _number(reach, 1)
    if cell.of.share:
        margin = margin.removeprefix("0")
    return f"{mark}{_number(cell.score, 100)}{mark}\u00a0±{margin}"


def _number(x: float, most: float) -> str:
    """Return a number with two decimals below `most`, and with fewer above it."""
    return f"{x:,.{2 if x < most else 1 if x < 1000 else 0}f}"


def _code(name: str) -> str:
    """Return text of a cells file as Markdown code, so that it is no markup."""
    return f"`{name.replace('`', '').replace('|', '')}`"


def _heading(s: Setting) -> str:
    return ", ".join(filter(None, (f"{_shown(s.model)}: {_shown_task(s.task)}", s.asking)))


def _shown(path: str) -> str:
    """Return a model or file for the page: only the last name of an absolute path."""
    return Path(path).name if Path(path).is_absolute() else path


def _shown_task(task: str) -> str:
    name, colon, path = task.partition(":")
    return f"{name}{colon}{_shown(path)}"


def _file_name(heading: str) -> str:
    return re.sub(r"[^\w.-]+", "-", heading.replace(",", ""))


def measured_by(cells: Sequence[Cell], target: Path, plot: bool) -> str:
    """Return the page's end: commands that measure its cells and write it, versions and devices."""
    used = dict.fromkeys(
        f"{', '.join(' '.join(pair) for pair in cell.versions.items())}; {cell.device}"
        for cell in cells
    )
    plots = " --plot" if plot else ""
    lines = [
        "## Measure it again",
        "",
        "```sh",
        *commands(cells),
        f"kvcap report {OUT} --leaderboard{plots} -o {shlex.quote(_shown(str(target)))}"
        "    # in a checkout",
        "```",
        "",
        "Measured with:",
        "",
        *(f"- {line}" for line in used),
        "",
    ]
    return "\n".join(lines)


def commands(cells: Iterable[Cell]) -> list[str]:
    """Return commands that measure exactly these cells; `_merged` keeps them few."""
    boxes: list[tuple[tuple[Any, ...], Box]] = []
    for cell in cells:
        s = cell.setting
        fixed = (
            s.model,
            s.samples,
            s.seed,
            s.block_size,
            s.dtype,
            cell.device.partition(",")[0],
            s.max_new_tokens,
            s.depth is None,
            s.options,
            s.kv_dtype,
        )
        box: Box = {axis: (getattr(s, name),) for axis, name in AXES.items()}
        if s.budget is None:
            box |= {"--budgets": (), "--positions": ()}
        boxes.append((fixed, box))
    for axis in AXES:
        boxes = _merged(boxes, axis)
    capped = [pair for pair in boxes if pair[1]["--budgets"]]
    for fixed, box in (pair for pair in boxes if not pair[1]["--budgets"]):
        for other, into in capped:  # uncapped policies have no options
            if other[:-2] == fixed[:-2] and all(into[axis] == box[axis] for axis in PROMPTS):
                into["--policies"] += box["--policies"]
                break
        else:
            capped.append((fixed, box))
    return [line for pair in capped for line in _command(*pair)]


def _merged(
    boxes: Sequence[tuple[tuple[Any, ...], Box]], axis: str
) -> list[tuple[tuple[Any, ...], Box]]:
    """Merge boxes that differ in one axis alone."""
    merged: dict[Any, set[Any]] = {}
    for fixed, box in boxes:
        rest = tuple((name, values) for name, values in box.items() if name != axis)
        merged.setdefault((fixed, rest), set()).update(box[axis])
    return [
        (fixed, {**dict(rest), axis: tuple(sorted(values))})
        for (fixed, rest), values in merged.items()
    ]


def _command(fixed: Sequence[Any], box: Box) -> list[str]:
    model, samples, seed, block_size, dtype, device, most, spread, options, kv_dtype = fixed
    shown = {**box, "--tasks": tuple(map(_shown_task, box["--tasks"]))}
    if box["--question"] == (None,):
        del shown["--question"]
    if spread:
        del shown["--depths"]
    words = [f"kvcap eval {shlex.quote(_shown(model))}"]
    given = {name: ",".join(map(str, values)) for name, values in shown.items() if values}
    given |= {"--samples": samples, "--seed": seed, "--block-size": block_size}
    given |= {"--dtype": dtype, "--device": device}
    given |= {"--max-new-tokens": most, "--kv-dtype": kv_dtype}
    words += [
        f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None
    ]
    words += [f"--policy-option {shlex.quote(f'{name}={value}')}" for name, value in options]
    return _wrapped([*words, f"--out {OUT}"])


def _wrapped(words: Sequence[str]) -> list[str]:
    """Return a command in lines of about a page's width."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < 100:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]
