"""How the chat looks: Markdown as it is written, lines that fit, colours that can be off."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcap.runtime.cli import markdown
from kvcap.runtime.cli.chat import Chat
from kvcap.runtime.cli.console import complain, dim
from kvcap.runtime.cli.live_meter import Meter, kv, progress, status, summary
from kvcap.runtime.cli.markdown import MarkdownMeter
from kvcap.runtime.cli.options import Output
from kvcap.runtime.session.stats import Stats, Turn

TEXT = """# A title

Some **bold** words, `code`, and
a second line.

1. first
2. second, which is so long that it takes more than a single line on a screen of forty columns
   - nested
3. third

```python
def f(x):

    return x
```

| a | b |
|---|---|
| one | two |
> quoted

<think>thought</think>
[1]: https://source.example
See [here](https://link.example) ![cat](cat.png)
Last line
---
1. again
"""
STATS = Stats(
    policy="keydiff",
    budget_tokens=123_456,
    seen_tokens=9_876_543,
    held_tokens=123_456,
    waiting_tokens=0,
    evicted_tokens=9_753_087,
    bytes=2**34,
    cap_bytes=2**34,
    peak_bytes=2**34,
    recomputed=[],
    execution="eager",
    turn=Turn(9_000, 9_000, 0, 512, 12_345, "length", ttft_s=1.0, decode_s=2.0),
)


class Screen(io.StringIO):
    """A terminal that is written to."""

    def isatty(self) -> bool:
        return True


def on_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Make stdout and stderr one terminal."""
    both = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "20")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    return both


def drawn(pieces: list[str], height: int = 20) -> str:
    """Return what of an answer stays on a screen of forty columns."""
    with pytest.MonkeyPatch.context() as patch:
        stream = io.StringIO()  # no terminal, so what is only drawn for a while is not in it
        patch.setenv("COLUMNS", "40")
        patch.setenv("LINES", str(height))
        patch.setattr(sys, "stdout", stream)
        patch.setattr(markdown, "PAUSE", 0)
        patch.setattr(markdown, "SHARE", 0)
        meter = MarkdownMeter(lambda: STATS, shown=False)
        for piece in pieces:
            meter.write(piece)
        meter.end()
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def test_markdown_is_drawn() -> None:
    text = drawn([TEXT])
    assert text.startswith("A title\n\nSome bold words, code, and\na second line.\n\n 1 first")
    assert "\n  def f(x):\n\n      return x\n\n" in text
    assert "\n\n\n" not in text
    assert text.endswith("\n 1 again\n")


@pytest.mark.parametrize(
    "words", ["<think>thought</think>", "[1]: https://source.example", "here (https://link.example)",
             "cat\n(cat.png)"]
)  # fmt: skip
def test_nothing_that_is_said_is_hidden(words: str) -> None:
    assert words in drawn([TEXT])


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 60), max_size=30), st.sampled_from([5, 9, 20]))
def test_pieces_make_no_difference(sizes: list[int], height: int) -> None:
    pieces, rest = [], TEXT
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert drawn([*pieces, rest], height) == drawn([TEXT])


def test_a_list_longer_than_the_screen_is_drawn_whole() -> None:
    lines = [f"- item {number}\n" for number in range(100)]
    assert drawn(lines, 10).split("\n") == [f" • item {number}" for number in range(100)] + [""]


def test_an_empty_answer_takes_no_line() -> None:
    assert drawn([]) == ""
    assert drawn(["\n", " "]) == ""


def test_escape_sequences_are_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    meter = MarkdownMeter(lambda: STATS)
    meter.write("a\x1b]52;c;evil\x07b")
    meter.end()
    dim("pinned \x1b[2Jtext")
    complain("no file \x1b[2J")
    assert "\x1b]52" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()
    assert "a\N{REPLACEMENT CHARACTER}]52;c;evil" in screen.getvalue()


def test_a_terminal_gets_markdown_and_a_file_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = on_screen(monkeypatch)
    chat = Chat(SimpleNamespace(messages=[]), Output())  # type: ignore[arg-type]
    assert chat._meter is MarkdownMeter
    chat.handle("/set markdown off")
    assert chat._meter is Meter
    assert "markdown = off" in screen.getvalue()
    chat.handle("/set markdown on")
    assert chat._meter is MarkdownMeter
    chat.handle("/set markdown perhaps")
    assert "markdown takes on or off; got 'perhaps'" in screen.getvalue()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert chat._meter is Meter
    chat.output = replace(chat.output, json=True)
    monkeypatch.setattr(sys, "stdout", screen)
    assert chat._meter is Meter


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    complain("mistake")
    assert "\x1b[31mkvcap:" in screen.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    screen.truncate(0)
    complain("mistake")
    MarkdownMeter(lambda: STATS).write("# A [link](x)")
    assert "\x1b[3" not in screen.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_lines_do_not_wrap(width: int) -> None:
    narrow = progress(1_000_000, 9_000_000, 12.5, STATS, width), status(STATS, width)
    assert all(len(line) <= max(width, 52) for line in narrow)
    last = summary(STATS, width=width)
    assert len(last) <= max(width, 60)
    assert "evicted 9,753,087 (+12,345 now)" in last  # no silent loss
    assert last.endswith("at max_new_tokens")


def test_a_wide_line_has_everything() -> None:
    line = (
        "KV 123,456/123,456 slots · 16.0/16.0 GiB · seen 9,876,543 · evicted 9,753,087 · 256 tok/s"
    )
    assert status(STATS) == line
    bar = "━" * 12 + "╌" * 12
    assert progress(50, 100, 10.0, STATS).startswith(f"reading {bar} 50/100 · 5 s left · 10 tok/s")


def test_slots_above_the_budget_are_said_to_wait() -> None:
    """Until the next eviction an answer uses more: no figure reads as a broken promise."""
    between = replace(STATS, waiting_tokens=63)
    assert status(between).startswith("KV 123,456/123,456 slots + 63 waiting · 16.0/16.0 GiB")
    assert kv(between).startswith("KV 123,456/123,456 slots + 63 waiting")
    assert "kept 123,456 + 63 waiting · evicted" in summary(between)
    assert "123,456 of 123,456 slots + 63 waiting for the next eviction" in repr(between)


def test_figures_before_any_answer() -> None:
    none = replace(STATS, turn=None)
    assert "tok/s" not in status(none)
    assert "tok/s" not in summary(none)


def test_a_prompt_that_is_read_for_long_shows_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    meter = Meter(lambda: STATS)
    assert "reading ..." in screen.getvalue()
    meter.reading(256, 1024)
    assert "256/1,024" in screen.getvalue()
    screen.truncate(0)
    meter.reading(1024, 1024)
    assert screen.getvalue() == ""
