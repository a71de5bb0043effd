"""`kvcap report`: one page without outside requests; what a folder holds stays text.

Opened in a real browser, headless, where there is one (scripts/install-browser).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import PATIENCE

from kvcap import cli
from kvcap.lab.quality.cells import Cell, Setting, add_cell
from kvcap.lab.report import page, regions

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
HOSTILE = "</script><img src=x onerror=alert(1)>"
PIECES = ["The", " door", "\n", " is", " blue", ".", HOSTILE, "", " é"]
HEADS = {  # by policy and budget: of each of 2 layers, how many of 2 KV heads hold each token
    ("keydiff", 4): [[2, 1, 0, 0, 2, 0, 1, 0, 2], [2, 0, 0, 0, 2, 2, 0, 0, 2]],
    ("keydiff", 6): [[2] * 6 + [0] * 3, [2] * 6 + [0] * 3],
    ("snapkv", 4): [[0] * 5 + [2] * 4, [0] * 5 + [2] * 4],
}
SOON = 1000 * PATIENCE  # milliseconds


def document(name: str, **figures: Any) -> dict[str, Any]:
    return {
        "analysis": name,
        "title": f"About {name}",
        "paper": "none",
        "read": f"How to read {name}. What it says.",
        "model": f"tiny {HOSTILE}",
        "device": "cpu",
        "tokens": [len(PIECES)],
        "policies": ["keydiff"],
        "budgets": [],
        "figures": figures,
    }


def strip(**changes: Any) -> dict[str, Any]:
    runs = [{"policy": p, "budget": b, "heads": heads} for (p, b), heads in HEADS.items()]
    figures = {
        "text": f"letter {HOSTILE}",
        "pieces": PIECES,
        "layers": [0, 3],
        "kv_heads": 2,
        "runs": runs,
    }
    return document("kept", **{**figures, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    for policy, score in (("keydiff", 0.25), ("keydiff", 0.5), (f"snapkv{HOSTILE}", 1.0)):
        setting = Setting("m", "float32", "niah_single", 64, policy, "true", 8, 10, 0, 16)
        add_cell(path / "cells.jsonl", Cell(setting, score, score / 2, score, 0, 0.0, "cpu", {}))
    (path / "kept.json").write_text(json.dumps(strip()))
    (path / "volume.json").write_text(json.dumps(document("volume")))
    (path / "notes.json").write_text("{}")  # somebody else's
    for name in ("kept", "volume", "results"):
        (path / f"{name}.png").write_bytes(PIXEL)
    return path


def test_a_page_has_tables_plots_analyses_and_tokens(folder):
    html = page(folder)
    assert "0.50 (0.25" in html
    assert "0.25 (0.12" not in html  # the later of two cells of one setting
    assert html.count("data:image/png;base64,") == 3
    assert "How to read volume. What it says." in html
    assert html.count("How to read kept") == 2  # as a caption, and for those who see no pictures


def test_what_a_folder_holds_stays_text(folder):
    html = page(folder)
    assert HOSTILE not in html
    assert "<img src=x" not in html
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    assert json.loads(data)["pieces"] == PIECES


def test_the_policy_of_the_page_names_its_own_style_and_script_alone(folder):
    html = page(folder)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        ((text,)) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    assert not re.search(r"url\(|@import|\sstyle=|\son\w+=\"", html)


def test_the_table_of_a_strip_is_counted_by_hand():
    rows = regions(strip()["figures"], recent=2)
    first, _, last = rows
    assert (first["policy"], first["budget"]) == ("keydiff", 4)
    assert first["first"] == (4 + 1 + 0 + 0) / 4 / 4
    assert first["between"] == (4 + 2 + 1) / 3 / 4
    assert first["newest"] == (0 + 4) / 2 / 4
    assert first["gone"] == 3 / 9
    assert last["newest"] == 1


def test_a_folder_without_a_strip_needs_no_script(folder):
    (folder / "kept.json").unlink()
    html = page(folder)
    assert "<script>" not in html
    assert html.count("data:image/png") == 3  # kept.png is a plot like others now


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("kept.json", "{", "cannot be read"),
        ("kept.json", json.dumps({"analysis": "kept"}), "is missing"),
        ("kept.json", json.dumps(strip(kv_heads=1)), "do not fit"),
        ("kept.json", json.dumps(strip(pieces=PIECES[1:])), "do not fit"),
        ("kept.json", json.dumps(strip(runs=[])), "do not fit"),
        ("kept.json", json.dumps(document("kept")), "kept.json is broken"),
        ("results.png", "<svg>", "is no PNG"),
        ("cells.jsonl", "{}\n", "is no cell"),
    ],
)
def test_broken_files_are_named(name, content, says, folder, capsys):
    (folder / name).write_text(content)
    assert cli.run(["report", str(folder)]) == 2
    err = capsys.readouterr().err
    assert name in err
    assert says in err
    assert not (folder / "report.html").exists()


def test_folders_that_cannot_be_reported(folder, tmp_path, kvcap):
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, says in (
        ([str(tmp_path / "none")], "there is no folder"),
        ([str(folder / "kept.json")], "there is no folder"),
        ([str(empty)], "neither cells.jsonl nor an analysis"),
        ([str(folder), "--out", str(empty)], "cannot write"),
        ([str(folder), "--out", str(tmp_path / "none" / "x.html")], "cannot write"),
    ):
        assert says in kvcap.refused("report", *words)


# In a browser


@pytest.fixture
def opened(browser: Any, folder: Path) -> Iterator[Any]:
    """Open the page, narrow, and note what it requests and complains of."""
    assert cli.run(["report", str(folder)]) == 0
    context = browser.new_context(viewport={"width": 360, "height": 740})
    page = context.new_page()
    page.set_default_timeout(SOON)
    page.requested, page.complaints = [], []
    page.on("request", lambda request: page.requested.append(request.url))
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("dialog", lambda dialog: page.complaints.append(dialog.message))
    page.goto((folder / "report.html").as_uri())
    page.locator("#strip:visible").wait_for()
    yield page
    context.close()


def test_the_page_asks_for_nothing_and_fits_a_phone(opened):
    urls = [url for url in opened.requested if not url.startswith("data:")]
    assert urls == [opened.url]
    assert opened.complaints == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    assert opened.locator("img").evaluate_all("all => all.every(x => x.naturalWidth > 0)")


def shares(page: Any) -> list[int]:
    """Return the step of colour of every token, 0 (held by none) to 5 (by all)."""
    texts: list[str] = page.locator("#strip > span").evaluate_all(
        "all => all.map(x => x.className)"
    )
    return [int(re.findall(r"\bs(\d)\b", name)[0]) for name in texts]


def test_tokens_are_coloured_by_who_holds_them(opened):
    texts = opened.locator("#strip > span").all_inner_texts()
    assert texts[:2] == ["The", " door"]
    assert texts[6] == HOSTILE
    assert shares(opened) == [5, 2, 0, 0, 5, 3, 2, 0, 5]
    assert "6 of 9 tokens" in opened.locator("#summary").inner_text()
    opened.get_by_role("combobox", name="Layer").select_option("layer 3")
    assert shares(opened) == [5, 0, 0, 0, 5, 5, 0, 0, 5]
    opened.get_by_role("combobox", name="Slots per KV head").select_option("6")
    assert shares(opened) == [5] * 6 + [0] * 3
    opened.get_by_role("combobox", name="Policy").select_option("snapkv")
    assert shares(opened) == [0] * 5 + [5] * 4
    assert "snapkv, 4 slots: 4 of 9" in opened.locator("#summary").inner_text()


def test_tokens_are_read_with_the_keyboard(opened):
    strip = opened.get_by_role("listbox", name="Tokens of the prompt")
    strip.focus()
    for key, index, says in (
        (None, 0, "“The”: held by 4 of 4 heads of all layers"),
        ("ArrowRight", 1, "“door”: held by 1 of 4"),
        ("ArrowRight", 2, "“new line”: held by 0 of 4"),
        ("End", 8, "Token 9 of 9, “é”: held by 4"),
        ("PageUp", 0, "Token 1 of 9"),
    ):
        if key:
            strip.press(key)
        assert strip.get_attribute("aria-activedescendant") == f"token-{index}"
        assert says in opened.locator("#said").inner_text()
    option = strip.get_by_role("option", selected=True)
    assert option.get_attribute("aria-label") == "The: 4 of 4"
    assert opened.locator("#layers li").all_inner_texts() == ["0: 2/2", "3: 2/2"]


def test_the_page_is_dark_where_the_system_is(opened):
    paper = "getComputedStyle(document.body).backgroundColor"
    opened.emulate_media(color_scheme="light")
    light = opened.evaluate(paper)
    opened.emulate_media(color_scheme="dark")
    assert opened.evaluate(paper) != light
