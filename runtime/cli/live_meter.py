"""The live meter: one line below the text while a prompt is read and an answer is written.

It is drawn on stderr and taken away again; the answer itself is written to stdout, untouched. Knows
nothing of how text is made.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.cells import cell_len

from kvcap.runtime.cli.console import columns, fitted, styled, visible
from kvcap.runtime.session.stats import Stats, Turn
from kvcap.runtime.units import format_bytes

BAR = 24  # columns
# Make room below (which scrolls at the bottom), remember the place, write, and return to it.
BELOW = "\x1bD\x1b[A\x1b7\r\n\x1b[2K\x1b[2m{}\x1b[0m\x1b8"
CLEAR = "\x1b[J"


class Meter:
    """Writes text to stdout and, on a terminal, keeps one line of figures below it.

    Args:
        stats: asked for the figures whenever the line is drawn.
        shown: whether to draw at all; otherwise text is only passed on.
    """

    def __init__(self, stats: Callable[[], Stats], *, shown: bool = True) -> None:
        self._stats, self._shown = stats, shown and styled()
        self._drawn = False
        self._column = 0  # where stdout's line stands, if that is the same terminal
        self._terminal = sys.stdout.isatty()
        self._start = time.perf_counter()
        if self._shown:
            self._draw("reading ...")  # the first block of a prompt may take long

    def reading(self, done: int, total: int) -> None:
        """Show how far a prompt of more than one block has been read."""
        if self._shown and done < total:
            rate = done / (time.perf_counter() - self._start)
            self._draw(progress(done, total, rate, self._stats(), self._width))

    def write(self, text: str) -> None:
        """Pass `text` on to stdout."""
        self.clear()
        if self._terminal:
            text = visible(text)
            self._column = cell_len(text.rpartition("\n")[2]) + (
                0 if "\n" in text else self._column
            )
        sys.stdout.write(text)
        sys.stdout.flush()
        if self._shown:
            self._draw(status(self._stats(), self._width))

    def clear(self) -> None:
        """Take the line away."""
        if self._drawn:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()
            self._drawn = False

    def end(self) -> None:
        """End the answer's last line."""
        self.clear()
        sys.stdout.write("\n")
        sys.stdout.flush()

    @property
    def _width(self) -> int:
        """Columns that a line may take: one less than the terminal has, so that none wraps."""
        return (columns() or 80) - 1

    def _draw(self, line: str) -> None:
        if self._column and self._column % (self._width + 1) == 0:
            return  # the next character wraps; moving the cursor would make it overwrite the last
        sys.stderr.write(BELOW.format(line[: self._width]))
        sys.stderr.flush()
        self._drawn = True


def progress(done: int, total: int, rate: float, stats: Stats, width: int | None = None) -> str:
    """How far a prompt has been read, at `rate` tokens per second; no wider than `width`."""
    filled = BAR * done // total
    return fitted(
        [
            f"reading {'━' * filled}{'╌' * (BAR - filled)} {done:,}/{total:,}",
            f"{(total - done) / rate:,.0f} s left",
            f"{rate:,.0f} tok/s",
            *_kv(stats),
        ],
        drop=[4, 3, 2, 1],
        width=width,
    )


def status(stats: Stats, width: int | None = None) -> str:
    """The line below an answer that is being written, no wider than `width`."""
    parts = [*_kv(stats), *_tokens(stats), _speed(stats)]
    return fitted(parts, drop=[2, 1, 4, 3], width=width)


def figures(stats: Stats) -> str:
    """Slots, bytes, and what became of everything that was read."""
    return " · ".join([*_kv(stats), *_tokens(stats)])


def kv(stats: Stats) -> str:
    """Slots and bytes, of how many."""
    return " · ".join(_kv(stats))


ENDINGS = {
    "length": "at max_new_tokens",
    "interrupted": "stopped",
    "cap": "at the cap",
    "full": "the cache is full",
    "error": "failed",
}


def summary(stats: Stats, *, empty: bool = False, width: int | None = None) -> str:
    """The line after an answer, no wider than `width` if that can be.

    Args:
        stats: where the conversation stands.
        empty: the answer has no text.
        width: in columns.
    """
    turn = stats.turn or Turn()
    ending = ENDINGS.get(turn.finish_reason or "", "")
    return fitted(
        [
            f"seen {stats.seen_tokens:,}",
            f"kept {stats.held_tokens:,}",
            f"evicted {stats.evicted_tokens:,} (+{turn.evicted_tokens:,} now)",
            f"KV {format_bytes(stats.bytes, of=stats.cap_bytes)}",
            _speed(stats),
            "the answer is empty" if empty and not ending else ending,
        ],
        drop=[3, 4, 0, 1],
        width=width,
    )


def _kv(stats: Stats) -> list[str]:
    slots = f"KV {stats.held_tokens:,}/{stats.budget_tokens:,} slots"
    return [slots, format_bytes(stats.bytes, of=stats.cap_bytes)]


def _tokens(stats: Stats) -> list[str]:
    return [f"seen {stats.seen_tokens:,}", f"evicted {stats.evicted_tokens:,}"]


def _speed(stats: Stats) -> str:
    rate = stats.turn.decode_tok_s if stats.turn else 0.0
    return f"{rate:,.0f} tok/s" if rate else ""
