"""Splits a model's thoughts from its answer, also while it is streamed."""

from __future__ import annotations

from kvcap.runtime.session.template_forms import THOUGHTS


class ThoughtGate:
    r"""Splits a streamed answer into thoughts, which a mark opens at its begin, and content.

    >>> gate = ThoughtGate()
    >>> gate.put("<th"), gate.put("ink>\nTwo and two"), gate.put(" is</think>\n"), gate.put("\n4.")
    (('', ''), ('Two and two', ''), (' is', ''), ('', '4.'))
    """

    def __init__(self) -> None:
        self._held = ""
        self._closing: str | None = None  # the mark that ends the thoughts; None: none are open
        self._begun = self._strip = False
        self._before = self._first = self._certain = 0  # tokens: of pieces, and before thoughts

    @property
    def tokens(self) -> int:
        """Return how many tokens the thoughts have, without those of the marks around them."""
        return self._certain - self._first

    def put(self, text: str, opened: str = "", tokens: int = 0) -> tuple[str, str]:
        """Take more text; return the parts that are certainly thoughts and certainly content.

        Args:
            text: of the answer.
            opened: the mark by which the prompt has opened thoughts; "": it has not.
            tokens: of the answer up to here.
        """
        self._held += text
        before, self._before = self._before, tokens
        if not self._begun:
            if not self._begin(opened):
                return "", ""
            if not opened and self._closing is not None:
                self._first = self._certain = before if self._held.strip() else tokens
        if self._closing is None:
            return "", self._given(len(self._held))
        thoughts, tag, rest = self._held.partition(self._closing)
        if not tag:
            sizes = range(min(len(self._closing), len(self._held)), 0, -1)
            kept = next((n for n in sizes if self._closing.startswith(self._held[-n:])), 0)
            certain = self._held[: len(self._held) - kept].rstrip()
            self._certain = self._certain if kept else tokens
            return self._given(len(certain)), ""
        self._certain = tokens if thoughts.strip() else self._certain
        thoughts = self._stripped(thoughts.rstrip())
        self._closing, self._held, self._strip = None, rest, True
        return thoughts, self._given(len(rest))

    def end(self) -> tuple[str, str]:
        """Return the text held back, since no more follows."""
        if self._closing is not None:
            self._certain = self._before
        text = self._given(len(self._held))
        return ("", text) if self._closing is None else (text.rstrip(), "")

    def _begin(self, opened: str) -> bool:
        """Find out whether thoughts are open; return whether that is certain."""
        begins = self._held.lstrip()
        if opened:
            self._closing = THOUGHTS[opened]
        elif mark := next((mark for mark in THOUGHTS if begins.startswith(mark)), None):
            self._closing, self._held = THOUGHTS[mark], begins.removeprefix(mark)
        elif any(mark.startswith(begins) for mark in THOUGHTS):
            return False
        self._begun, self._strip = True, self._closing is not None
        return True

    def _given(self, count: int) -> str:
        """Return the first letters that were held back, and hold them back no longer."""
        text, self._held = self._held[:count], self._held[count:]
        return self._stripped(text)

    def _stripped(self, text: str) -> str:
        """Return text without the space behind a mark."""
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return text


def without_thoughts(text: str) -> str:
    r"""Return an answer without its thoughts, whoever opened them.

    >>> without_thoughts("Two and two is\n</think>\n\n4."), without_thoughts("<think>\nTwo")
    ('4.', '')
    """
    for opening, closing in THOUGHTS.items():
        before, tag, after = text.partition(closing)
        if tag:
            return after.lstrip()
        if before.lstrip().startswith(opening):
            return ""
    return text
