"""Answers several requests as one: more prompts, or more answers to one, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields

from kvcap.runtime.session.stats import FinishReason
from kvcap.runtime.session.tool_calls import Parsed
from kvcap.serve.contract import Ask, Piece, Reply, Usage


class Series:
    """A `Reply` of several requests, each of which is submitted once the one before has ended.

    Args:
        submit: that of the conversations.
        asks: the requests; the first is submitted at once.
        each: so many that follow each other have one prompt, which counts once.
    """

    def __init__(self, submit: Callable[[Ask], Reply], asks: Sequence[Ask], each: int = 1) -> None:
        self._submit, self._each, self._left = submit, each, deque(asks)
        self.replies = [submit(self._left.popleft())]
        """Holds the replies so far; the last one is being read."""

    @property
    def session_id(self) -> str | None:
        """Return the id of the first conversation."""
        return self.replies[0].session_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """Say why the last answer ended; None before that."""
        return None if self._left else self.replies[-1].finish_reason

    @property
    def usage(self) -> Usage | None:
        """Return the summed usage of all answers; slots and the cap are the last answer's."""
        usages = [reply.usage for reply in self.replies]
        if self._left or any(usage is None for usage in usages):
            return None
        return _added([usage for usage in usages if usage is not None], self._each)

    @property
    def parsed(self) -> Parsed | None:
        """Return the calls of the last answer; `replies` has those of the others."""
        return self.replies[-1].parsed

    def __aiter__(self) -> Series:
        return self

    async def __anext__(self) -> Piece:
        while True:
            try:
                piece = await self.replies[-1].__anext__()
            except StopAsyncIteration:
                if not self._left:
                    raise
                self.replies.append(self._submit(self._left.popleft()))
                continue
            before = _added([x.usage for x in self.replies[:-1] if x.usage], self._each)
            shared = (len(self.replies) - 1) % self._each > 0
            return piece._replace(
                prompt_tokens=before.prompt_tokens + (0 if shared else piece.prompt_tokens),
                completion_tokens=before.completion_tokens + piece.completion_tokens,
            )

    async def aclose(self) -> None:
        """Stop the answer that is being written, and begin no other."""
        self._left.clear()
        await self.replies[-1].aclose()


def _added(usages: Sequence[Usage], each: int) -> Usage:
    """Return the summed usage of several answers, where every `each` answers share a prompt."""
    if not usages:
        return Usage(0, 0, 0, 0, 0, 0, 0)
    last, first_of_each = usages[-1], usages[::each]
    totals = {field.name: getattr(last, field.name) for field in fields(Usage)}
    for name in ("prompt_tokens", "reused_tokens", "recalled_tokens", "recalled_passages"):
        totals[name] = sum(getattr(usage, name) for usage in first_of_each)
    totals["completion_tokens"] = sum(usage.completion_tokens for usage in usages)
    return Usage(**totals)
