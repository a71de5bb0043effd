"""Writes one HTML page of a folder that `kvcap eval` and `kvcap analyze` filled.

The page is a single file that requests nothing else: pictures are data URLs, and a content security
policy lets only the page's own style and script run, by their hashes. The folder's content is data,
never markup: the template escapes it, tables come from cells, and the token strip reads JSON.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from kvcap.lab.quality.cells import CELLS, Cell, read_folder
from kvcap.lab.quality.table import results
from kvcap.runtime.files import read_json, read_plain

PICTURE = 16 << 20  # most bytes of a picture
PNG = b"\x89PNG\r\n\x1a\n"
STRIP = "kept"
NEEDED = {
    "analysis",
    "title",
    "paper",
    "read",
    "model",
    "device",
    "tokens",
    "policies",
    "budgets",
    "figures",
}


def write(folder: Path, target: Path) -> None:
    """Write the page of `folder` to the file `target`.

    Raises:
        ValueError: there is no folder, it has nothing to report or a broken file, or the target
            cannot be written.
    """
    html = page(folder)
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"cannot write {str(target)!r}: no such folder, or it is one")
    try:
        target.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {str(target)!r}: {error.strerror}") from error


def page(folder: Path) -> str:
    """Return the page of a folder, as HTML.

    Raises:
        ValueError: there is no folder, or it has nothing to report or a broken file.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; kvcap eval --out DIR makes one")
    cells = read_folder(folder)
    analyses = _analyses(folder)
    known = {document["analysis"] for document in analyses}
    plots = [path for path in sorted(folder.glob("*.png")) if path.stem not in known]
    if not cells and not analyses:
        raise ValueError(
            f"{str(folder)!r} holds neither {CELLS} nor an analysis; kvcap eval and kvcap analyze "
            "write them, with --out"
        )
    loader = Environment(
        loader=PackageLoader("kvcap.lab.report", "."), autoescape=True, undefined=StrictUndefined
    )
    style, script = (_source(loader, name) for name in ("style.css", "strip.js"))
    kept = next((d for d in analyses if d["analysis"] == STRIP), None)
    _check_strip(kept)
    return loader.get_template("page.html").render(
        title=_title(folder, cells, analyses),
        folder=folder.resolve().name,
        models=sorted({c.setting.model for c in cells} | {str(d["model"]) for d in analyses}),
        tables=_tables(cells),
        cells=len(cells),
        plots=[{"name": path.stem, "data": _picture(path)} for path in plots],
        analyses=[
            {**document, "data": _picture(folder / f"{document['analysis']}.png")}
            for document in analyses
        ],
        kept=kept,
        regions=[] if kept is None else regions(kept["figures"]),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def regions(figures: dict[str, Any], recent: int = 32) -> list[dict[str, Any]]:
    """Return a row for each run: the mean share of heads that hold a token, by part of the text.

    The parts are the first 4 tokens, the newest `recent` and the tokens between. `gone` is the
    share of all tokens that no head of any layer holds.
    """
    heads = figures["kv_heads"] * len(figures["layers"])
    rows = []
    for run in figures["runs"]:
        held = [sum(column) / heads for column in zip(*run["heads"], strict=True)]
        newest = max(4, len(held) - recent)
        parts = {"first": held[:4], "between": held[4:newest], "newest": held[newest:]}
        means = {name: sum(x) / len(x) if x else None for name, x in parts.items()}
        gone = sum(x == 0 for x in held) / len(held)
        rows.append({"policy": run["policy"], "budget": run["budget"], "gone": gone, **means})
    return rows


def _analyses(folder: Path) -> list[dict[str, Any]]:
    """Return the documents of `kvcap analyze` in a folder, and ignore other JSON files."""
    documents = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = read_json(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}); remove or repair it") from error
        if not isinstance(document, dict) or document.get("analysis") != path.stem:
            continue
        if missing := NEEDED - document.keys():
            raise ValueError(
                f"{path} is no whole analysis: {', '.join(sorted(missing))} is missing; run kvcap "
                "analyze again"
            )
        documents.append(document)
    return documents


def _check_strip(document: dict[str, Any] | None) -> None:
    """Refuse a strip whose rows have other lengths than its tokens.

    Raises:
        ValueError: the document does not fit.
    """
    if document is None:
        return
    try:
        figures = document["figures"]
        tokens, layers = len(figures["pieces"]), len(figures["layers"])
        good = tokens > 0 and all(isinstance(piece, str) for piece in figures["pieces"])
        for run in figures["runs"]:
            good &= [len(row) for row in run["heads"]] == [tokens] * layers
            good &= all(0 <= n <= figures["kv_heads"] for row in run["heads"] for n in row)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{STRIP}.json is broken ({error!r}); run kvcap analyze again") from error
    if not good or not figures["runs"]:
        raise ValueError(
            f"{STRIP}.json is broken: its rows do not fit its tokens; run kvcap analyze again"
        )


def _tables(cells: list[Cell]) -> Markup:
    """Return the tables of `results.md` as HTML, in which the content of cells stays text."""
    if not cells:
        return Markup()
    body = results(cells).split("\n", 1)[1]  # without its heading
    html = MarkdownIt("js-default").render(body)
    scrolls = '<div class="wide" role="region" aria-label="Table of results" tabindex="0"><table>'
    html = html.replace("<h2>", "<h3>").replace("</h2>", "</h3>")
    html = html.replace("<table>", scrolls).replace("</table>", "</table></div>")
    return Markup(html)  # js-default escapes markup


def _picture(path: Path) -> str:
    """Return a PNG as a data URL, '' if there is no file.

    Raises:
        ValueError: the file is no PNG, or too large.
    """
    if not path.exists():
        return ""
    try:
        data = read_plain(path, PICTURE)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if not data.startswith(PNG):
        raise ValueError(f"{path} is no PNG; remove it or make it again")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _title(folder: Path, cells: list[Cell], analyses: list[dict[str, Any]]) -> str:
    models = {c.setting.model for c in cells} | {str(d["model"]) for d in analyses}
    named = ", ".join(sorted(Path(model).name for model in models))
    return f"kvcap: {named}"


def _source(loader: Environment, name: str) -> Markup:
    """Return kvcap's own style or script, which the page contains unescaped."""
    assert loader.loader is not None
    return Markup(loader.loader.get_source(loader, name)[0].strip())


def _hash(text: str) -> str:
    """Return the hash of a style or script, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
