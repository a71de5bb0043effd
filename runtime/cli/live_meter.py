"""Draws the live meter: a line of figures below the text while a prompt is read or answered.

It is drawn on stderr and taken away again; the answer itself goes to stdout, untouched. Knows
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
# Make room below (which scrolls at the bottom), save the cursor's place, write, and return to it.
BELOW = "\x1bD\x1b[A\x1b7\r\n\x1b[2K\x1b[2m{}\x1b[0m\x1b8"
CLEAR = "\x1b[J"
ENDINGS = {
    "length": "at max_new_tokens",
    "interrupted": "stopped",
    "cap": "at the cap",
    "full": "the cache is full",
    "error": "failed",
}


class Meter:
    """A meter that writes text to stdout and, on a terminal, keeps a line of figures below it.

    Args:
        stats: gives the figures whenever the line is drawn.
        shown: whether to draw the line; otherwise text is only passed on.
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
        """Show how far a prompt of several blocks has been read."""
        if self._shown and done < total:
            rate = done / (time.perf_counter() - self._start)
            self._draw(progress(done, total, rate, self._stats(), self._width))

    def write(self, text: str) -> None:
        """Write `text` to stdout, and draw the line anew."""
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
        """Erase the line of figures."""
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
        """Return the columns a line may take: one fewer than the terminal has, so that it fits."""
        return (columns() or 80) - 1

    def _draw(self, line: str) -> None:
        if self._column and self._column % (self._width + 1) == 0:
            return  # the next character wraps; moving the cursor first would overwrite the last one
        sys.stderr.write(BELOW.format(line[: self._width]))
        sys.stderr.flush()
        self._drawn = True


def progress(done: int, total: int, rate: float, stats: Stats, width: int | None = None) -> str:
    """Return a bar of how far a prompt has been read, at `rate` tokens/s, within `width`."""
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
    """Return the line below an answer that is being written, within `width` columns."""
    parts = [*_kv(stats), *_tokens(stats), _speed(stats)]
    return fitted(parts, drop=[2, 1, 4, 3], width=width)


def figures(stats: Stats) -> str:
    """Return slots and bytes in use, and tokens seen and evicted."""
    return " · ".join([*_kv(stats), *_tokens(stats)])


def kv(stats: Stats) -> str:
    """Return slots and bytes in use, of how many."""
    return " · ".join(_kv(stats))


def summary(stats: Stats, *, empty: bool = False, width: int | None = None) -> str:
    """Return the line after an answer, within `width` columns if possible.

    Args:
        stats: of the conversation.
        empty: the answer has no text.
        width: in columns.
    """
    turn = stats.turn or Turn()
    ending = ENDINGS.get(turn.finish_reason or "", "")
    return fitted(
        [
            f"seen {stats.seen_tokens:,}",
            f"kept {stats.held_tokens:,}{_waiting(stats)}",
            f"evicted {stats.evicted_tokens:,} (+{turn.evicted_tokens:,} now)",
            f"KV {format_bytes(stats.bytes, of=stats.cap_bytes)}",
            _speed(stats),
            "the answer is empty" if empty and not ending else ending,
        ],
        drop=[3, 4, 0, 1],
        width=width,
    )


def _kv(stats: Stats) -> list[str]:
    slots = f"KV {stats.held_tokens:,}/{stats.budget_tokens:,} slots{_waiting(stats)}"
    return [slots, format_bytes(stats.bytes, of=stats.cap_bytes)]


def _waiting(stats: Stats) -> str:
    """Return the slots above the budget, which wait for the next eviction."""
    return f" + {stats.waiting_tokens:,} waiting" if stats.waiting_tokens else ""


def _tokens(stats: Stats) -> list[str]:
    return [f"seen {stats.seen_tokens:,}", f"evicted {stats.evicted_tokens:,}"]


def _speed(stats: Stats) -> str:
    rate = stats.turn.decode_tok_s if stats.turn else 0.0
    return f"{rate:,.0f} tok/s" if rate else ""
