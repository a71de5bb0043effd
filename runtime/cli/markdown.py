"""Draws an answer as Markdown on a terminal while it is being written.

Finished blocks are printed for good; the last one is drawn anew as it grows, with the meter below.
Nothing that the model says is hidden: HTML, images and links show as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import dropwhile

from markdown_it import MarkdownIt
from rich import markdown
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from kvcap.runtime.cli.console import visible
from kvcap.runtime.cli.live_meter import Meter, status
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.session.stats import Stats

WIDEST = 100  # columns; longer lines are hard to read
BELOW = 3  # lines kept free for the meter, the cursor and the space between
PAUSE = 0.05  # seconds between two drawings, at least
SHARE = 4  # the pause is also at least so many times as long as the last drawing took

THEME = Theme(
    {  # on dark and on light terminals
        "markdown.code": "bold",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.item.number": "none",
    }
)
PARSER = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["table", "strikethrough"])
    .disable(["image", "reference"])
)


class Heading(markdown.Heading):
    """A heading that is aligned with the text."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class CodeBlock(markdown.CodeBlock):
    """A block of code that is drawn in the terminal's own colours, indented by two columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme="ansi_dark",
            background_color="default",
            word_wrap=True,
            padding=(0, 2),
        )


class Markdown(markdown.Markdown):
    """A Markdown text as people write it in a chat, where a new line starts a new line."""

    elements = {  # noqa: RUF012  # rich's own declaration
        **markdown.Markdown.elements,
        "heading_open": Heading,
        "fence": CodeBlock,
        "code_block": CodeBlock,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class MarkdownMeter(Meter):
    """A meter that draws Markdown, where stdout and stderr are the same terminal."""

    def __init__(self, stats: Callable[[], Stats], *, shown: bool = True) -> None:
        self._console = Console(highlight=False, theme=THEME)
        self._live: Live | None = None
        self._text = ""  # of blocks that may still change
        self._printed = 0  # lines of theirs that are on the screen for good
        self._gap = False  # whether an empty line goes before them
        self._next = 0.0  # when to draw again
        super().__init__(stats, shown=shown)

    def write(self, text: str) -> None:
        """Draw the answer with `text` at its end."""
        self._text += visible(text)
        if time.perf_counter() >= self._next:
            self._draw(status(self._stats(), self._width) if self._shown else "")

    def clear(self) -> None:
        """Erase the lines that are not final."""
        if self._live is not None:
            with interrupts_deferred():
                self._live.stop()
                self._live = None

    def end(self) -> None:
        """Print the rest of the answer as final."""
        self.clear()
        self._settle(blocks(self._text))
        self._text = ""

    def _draw(self, line: str) -> None:
        start = time.perf_counter()
        with interrupts_deferred():  # a drawing that stops half-way would stay on the screen
            # An unfinished line may yet turn out to continue the block above it.
            head, newline, tail = self._text.rpartition("\n")
            if finished := blocks(head)[:-1]:
                self._settle(finished)
                self._text = head[sum(map(len, finished)) :] + newline + tail
            lines, room = self._rendered(self._text), max(2, self._console.height - BELOW)
            if len(lines) - self._printed > room and self._growing:
                self._print(lines[self._printed : -room])
                self._printed = len(lines) - room
            below = [Text(line, style="dim", no_wrap=True, overflow="crop")] if line else []
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    transient=True,
                    auto_refresh=False,
                    vertical_overflow="visible",
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            gap: list[list[Segment]] = [[]] if self._gap and lines and not self._printed else []
            self._live.update(
                Group(joined([*gap, *lines[self._printed :][-room:]]), *below), refresh=True
            )
        now = time.perf_counter()
        self._next = now + max(PAUSE, SHARE * (now - start))

    def _settle(self, finished: list[str]) -> None:
        """Print finished blocks as final."""
        for block in finished:
            if lines := self._rendered(block):
                if rest := lines[self._printed :]:
                    self._print(rest)
                self._gap, self._printed = True, 0

    @property
    def _growing(self) -> bool:
        """Return whether more text only adds at the end: one block, no table or numbered list."""
        wider = ("table_open", "ordered_list_open")
        moving = any(token.type in wider for token in PARSER.parse(self._text))
        return not moving and len(blocks(self._text)) == 1

    def _rendered(self, text: str) -> list[list[Segment]]:
        """Return the lines that `text` takes on the screen, with an empty one between blocks."""
        options = self._console.options.update(width=min(self._console.width, WIDEST))
        rendered: list[list[Segment]] = []
        for block in blocks(text):
            lines = self._console.render_lines(Markdown(block), options, pad=False)
            while lines and blank(lines[-1]):
                lines.pop()
            if lines := list(dropwhile(blank, lines)):
                rendered += [[], *lines] if rendered else lines
        return rendered

    def _print(self, lines: list[list[Segment]]) -> None:
        gap: list[list[Segment]] = [[]] if self._gap and not self._printed else []
        self._console.print(joined([*gap, *lines]), end="")


def blocks(text: str) -> list[str]:
    r"""Cut `text` into paragraphs, lists, tables and so on; more text changes only the last one.

    >>> blocks("One\ntwo.\n\n- a\n- b\n")
    ['One\ntwo.\n\n', '- a\n- b\n']
    """
    lines = text.split("\n")
    starts = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map]
    ends = [*starts[1:], len(lines)]
    spans = zip([0, *starts[1:]], ends, strict=True)
    cut = ["\n".join([*lines[start:end], ""]) for start, end in spans]
    return [*cut[:-1], cut[-1].removesuffix("\n")]


def blank(line: list[Segment]) -> bool:
    """Return whether a line shows nothing."""
    return not any(segment.text.strip() for segment in line)


def joined(lines: list[list[Segment]]) -> Segments:
    """Return lines as one object to print."""
    return Segments([segment for line in lines for segment in (*line, Segment.line())])
