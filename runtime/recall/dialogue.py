"""Finds messages in the tokens of a conversation, by the marks that chat templates write.

A message begins behind a special token that names who says it (`<|user|>`, `[INST]`), or behind one
that its name follows (`<|im_start|>user`, `<|start_header_id|>user<|end_header_id|>`). Knows a
tokenizer and no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvcap.runtime.types import Span

NAMED = 4  # tokens of a name, at most
USER, ANSWERERS = "user", frozenset(("assistant", "model"))
ROLES = frozenset(("system", "developer", USER, "tool")) | ANSWERERS
MARKS = {"[INST]": USER, "[/INST]": "assistant"}  # special tokens that name by another word
COMPARED = 8192  # newest tokens among which replies are compared
REPEATED = 3  # times that a reply was given which counts as repeated


class Message(NamedTuple):
    """A message of a conversation, as places in its tokens."""

    mark: int  # of the special token in front of it
    start: int  # of its text
    stop: int  # behind its text, where the next special token stands
    role: str


class Dialogue:
    """A reader of the messages in tokens.

    Args:
        tokenizer: whose `backend_tokenizer` says which tokens are special.
        piece: gives the text of a token.
    """

    def __init__(self, tokenizer: Any, piece: Callable[[int], str]) -> None:
        known = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._piece = piece
        self._roles = {
            token: _role(added.content) for token, added in known.items() if added.special
        }

    def is_text(self, token: int) -> bool:
        """Return whether a token is known, and is no special one."""
        return token >= 0 and token not in self._roles

    def text_stop(self, ids: Sequence[int], start: int) -> int:
        """Return where the text that begins at `start` ends: at a special token, or at the end."""
        return next((i for i in range(start, len(ids)) if not self.is_text(ids[i])), len(ids))

    def opening(self, ids: Sequence[int], start: int) -> tuple[int, str]:
        """Return where the text behind a name begins, and the name; '' where none begins.

        Args:
            ids: tokens.
            start: the first one of some text; it is returned where no name stands.
        """
        if not start or self.is_text(ids[start - 1]):
            return start, ""
        name = ""
        for index in range(start, min(start + NAMED, len(ids))):
            if not self.is_text(ids[index]):
                break
            name += self._piece(ids[index])
            last = index + 1 == len(ids) or not self.is_text(ids[index + 1])
            if name.strip() in ROLES and (last or name.endswith("\n")):
                return index + 1, name.strip()
        return start, self._roles.get(ids[start - 1], "")

    def messages(self, ids: Sequence[int]) -> Iterator[Message]:
        """Yield the messages, the newest first."""
        for index in range(len(ids), 0, -1):
            start, role = self.opening(ids, index)
            if role:
                framed = index < start < len(ids) and not self.is_text(ids[start])
                if framed and not self._piece(ids[start - 1]).endswith("\n"):
                    start += 1  # the name has a special token on either side
                yield Message(index - 1, start, self.text_stop(ids, start), role)

    def repeated_replies(self, ids: Sequence[int]) -> list[Span]:
        """Return the spans of replies that were given at least 3 times in the same words.

        They say nothing of what was asked, and a small model goes on with them, whatever is asked.
        """
        newest, replies = list(ids[-COMPARED:]), defaultdict[tuple[int, ...], list[Span]](list)
        first, after = len(ids) - len(newest), len(newest)
        for one in self.messages(newest):
            if one.role in ANSWERERS and one.start < one.stop:
                replies[tuple(newest[one.start : after])].append((first + one.mark, first + after))
            after = one.mark
        return sorted(span for same in replies.values() if len(same) >= REPEATED for span in same)


def _role(mark: str) -> str:
    """Return the role that a special token names; '' if it names none.

    >>> [_role(mark) for mark in ("<|assistant|>", "<｜User｜>", "[INST]", "<|im_start|>")]
    ['assistant', 'user', 'user', '']
    """
    name = MARKS.get(mark, mark.strip("<|｜_>").lower())
    return name if name in ROLES else ""
