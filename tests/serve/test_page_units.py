"""Functions of the chat page, run by the node that playwright brings: Markdown, words, searches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from make import ran

from kvcap.serve.page_routes import PAGE

PROGRAM = Path(__file__).with_name("page_units.mjs")


def units(*calls: tuple[Any, ...]) -> list[Any]:
    """Return what functions of the page give: each call is a function's name and its arguments."""
    driver = pytest.importorskip("playwright", reason="no playwright: pip install it")
    node = Path(driver.__file__).parent / "driver" / "node"
    request = json.dumps([[name, given] for name, *given in calls])
    done = ran([node, PROGRAM, PAGE], input=request, check=True)
    return list(json.loads(done.stdout))


def plain(drawn: str) -> str:
    """Return elements without what all of their kind have: a direction, a button to copy them."""
    return re.sub(r' dir="(auto|ltr)"|<button.*?</button>', "", drawn)


ELEMENTS = {"p", "a", "pre", "code", "div", "table", "thead", "tbody", "tr", "th", "td", "button"}
ATTRIBUTES = {"href", "title", "target", "rel", "class", "role", "scope", "tabindex", "aria-label",
              "dir", "type"}  # fmt: skip
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'
DRAWN = {
    "a\nb": "<p>a<br>b</p>",
    "# A #\ntext": "<h3>A</h3><p>text</p>",
    "**a *b* c** _d_ ~~e~~ `f *g*`": "<p><strong>a <em>b</em> c</strong> <em>d</em> "
    "<del>e</del> <code>f *g*</code></p>",
    "snake_case_name, 2 * 3 * 4, \\*a\\*, **": "<p>snake_case_name, 2 * 3 * 4, *a*, **</p>",
    "- a\n- b\n  1. c\n\n     d": "<ul><li>a</li><li>b<ol><li><p>c</p><p>d</p></li></ol></li></ul>",
    "- [x] a\n- [ ] *b*\n- [ ]\n- [a] c": '<ul><li class="task"><input type="checkbox" '
    'disabled="" checked="" aria-label="Done">a</li><li class="task"><input type="checkbox" '
    'disabled="" aria-label="To do"><em>b</em></li><li>[ ]</li><li>[a] c</li></ul>',
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "```py\n<b>\n\n*x*\n```\nc": '<div class="code"><pre tabindex="0" role="region" '
    'aria-label="Code in py"><code>&lt;b&gt;\n\n*x*</code></pre></div><p>c</p>',
    "a\n\n***\nb": "<p>a</p><hr><p>b</p>",
    "[a](https://b.example/c_(d)) https://e.example/f.": f'<p><a href="https://b.example/c_(d)"'
    f' title="https://b.example/c_(d)" {LINK}>a</a> <a href="https://e.example/f" '
    f'title="https://e.example/f" {LINK}>https://e.example/f</a>.</p>',
    "| a | b |\n|:--|--:|\n| 1 | 2 |\n": '<div class="wide" tabindex="0" role="region" '
    'aria-label="Table"><table><thead><tr><th scope="col">a</th><th class="right" scope="col">b'
    '</th></tr></thead><tbody><tr><td>1</td><td class="right">2</td></tr></tbody></table></div>',
    # Headings leave out no level, and are none within a list.
    "### A\n\n# B\n\n##### C\n\n- # D\n\n###### E\n\n# F": "<h3>A</h3><h3>B</h3><h4>C</h4>"
    "<ul><li><strong>D</strong></li></ul><h5>E</h5><h3>F</h3>",
    f"# A\n\n- b **c**\n- d\n\n```\ne\n```\n\n> f {'g ' * 20}\n\nh": "<h3>A</h3><ul><li>b <strong>c"
    '</strong></li><li>d</li></ul><div class="code"><pre tabindex="0" role="region" '
    f'aria-label="Code"><code>e</code></pre></div><blockquote><p>f {("g " * 20).strip()}</p>'
    "</blockquote><p>h</p>",
}


def test_answers_become_elements_also_as_they_grow():
    whole = units(*(("drawn", text) for text in DRAWN))
    grown = units(*(("drawn", text, [*range(len(text) + 1)]) for text in DRAWN))
    assert dict(zip(DRAWN, map(plain, whole), strict=True)) == DRAWN
    assert grown == whole


def test_no_text_becomes_markup_or_leads_elsewhere():
    hostile = [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](data:text/html,<script>)",
        "[a](/v1/models)",
        "![a](https://b.example/c.png)",
        '[a](https://b.example "onclick=x")',
        "<https://a.example>",
        "[a](https://b.example/\" onclick='x')",
        "```<b>\n</code><b>",
        "|<b>|\n|-|\n|<b>|",
    ]
    for made in units(*(("made", text) for text in hostile)):
        for name, attributes in made:
            assert name in ELEMENTS
            assert not set(attributes) - ATTRIBUTES
            assert attributes.get("href", "https://").startswith("https://")


def test_what_repeats_without_end_is_read():
    """The time to read a text grows with its length, not with its square."""
    letters = ("*", "_", "`", "[", "![", "> ", "- ", "<", "\\", "*a_", "[a](", "|", "#", "~~a")
    texts = [x for one in letters for x in (one * (30_000 // len(one)), f"{one}\n" * 3000)]
    assert all("end" in made for made in units(*(("drawn", f"{text}\n\nend") for text in texts)))


CODE = {
    "py": ("def f(): # four\n    return 'a' < 4\n", {"kwd": "def", "str": "'a'", "num": "4"}),
    "Python": ("return None", {"kwd": "return", "bool": "None"}),
    "sh": ("echo $A # <b>", {"cmnt": "# <b>"}),
    "html": ("<p>a</p><script>let b = 1;</script>", {"kwd": "let", "num": "1"}),
    "no-such": ("let b = 1;", {}),
    "": ("let b = 1;", {}),
}


def test_code_has_colours():
    results = units(*(("coloured", code, name) for name, (code, _) in CODE.items()))
    for (name, (code, expected)), (text, pieces) in zip(CODE.items(), results, strict=True):
        assert text == code, name
        for kind, piece in expected.items():
            assert [f"code-{kind}", piece] in pieces
        assert any(kind for kind, _ in pieces) == bool(expected)


THOUGHTS = {  # what an answer says, and what was thought and said of it
    "<think>\nSo it is.\n</think>\n\nYes.": ("So it is.", "Yes."),
    "So it is.\n</think>\n\nYes.": ("So it is.", "Yes."),
    "<think>\n\n</think>\n\nYes.": ("", "Yes."),
    "<think>So it": ("So it", ""),
    "`</think>` ends thoughts.": ("", "`</think>` ends thoughts."),
}


def test_thoughts_are_told_from_what_is_said():
    given = {"content": "Yes.", "reasoning_content": " So it is. "}
    results = units(*(("parted", {"content": text}) for text in THOUGHTS), ("parted", given))
    texts = [(one["thoughts"], one["text"]) for one in results]
    assert texts == [*THOUGHTS.values(), ("So it is.", "Yes.")]


def chat(*texts: str, title: str = "") -> dict[str, Any]:
    return {"title": title, "messages": [{"content": text} for text in texts]}


def test_conversations_are_found_by_their_words_and_have_a_title():
    chats = [chat(f"Trees of the {side}?", "Larch and fir.") for side in ("north", "south")]
    searches = {"": 2, "LARCH tree": 2, "larch north": 1, "palm": 0}
    results = units(*(("holding", chats, words) for words in searches))
    assert [*map(len, results)] == [*searches.values()]
    long = "a  b\n" + "c" * 100
    titles = [chat("x", title="Doors"), chat(), chat(" \n"), chat(long), chat("🐝" * 61)]
    expected = [
        "Doors",
        "New conversation",
        "New conversation",
        f"a b {'c' * 55}…",
        "🐝" * 59 + "…",
    ]
    assert units(*(("titled", one) for one in titles)) == expected


NOTES: list[tuple[dict[str, Any], str | None]] = [
    ({"tokens": 1200, "speed": 119.9}, "1,200 tokens, 120 a second"),
    ({"tokens": 1}, "1 token"), ({}, None),
    ({"recalled": 40, "passages": 1}, "recalled 1 passage, 40 tokens"),
    ({"recalled": 1400, "passages": 2}, "recalled 2 passages, 1,400 tokens"),
]  # fmt: skip


def test_figures_are_told_in_words():
    words = ("duration", "bytes", "number")
    values = ((18_000, 89_999, 120_000), (2_500_000, 12_000_000, 3_250_000_000), (1_020_013,))
    calls = [(name, value) for name, few in zip(words, values, strict=True) for value in few]
    assert units(*calls) == ["18 s", "90 s", "2 minutes", "2.5 MB", "12 MB", "3.25 GB", "1,020,013"]
    drawn = units(*(("said", {"role": "assistant", "content": "", "took": x}) for x, _ in NOTES))
    for texts, (_, note) in zip(drawn, NOTES, strict=True):
        assert note is None or note in texts
        assert any("token" in text for text in texts) == bool(note)


def test_a_long_message_is_folded_between_letters():
    texts = ["a" * 600, "a" * 601, "🐝" * 999, "line\n" * 9, "line\n" * 13]
    drawn = units(*(("said", {"role": "user", "content": text}) for text in texts))
    folds = [
        [text for text in results if re.fullmatch("Show all .* letters", text)] for results in drawn
    ]
    assert [*map(len, folds)] == [0, 1, 1, 0, 1]
    assert folds[2] == ["Show all 1,998 letters"]
    assert "🐝" * 200 + " …" in drawn[2]
