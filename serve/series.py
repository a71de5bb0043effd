"""Answers several requests as one: more prompts, or more answers to one, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from kvcap.serve.contract import Ask, Piece, Reply, Usage


class Series(Reply):
    """A reply that answers several requests, submitting each once the one before has ended.

    Args:
        submit: that of the conversations.
        asks: the requests; the first is submitted at once.
        each: so many that follow each other have one prompt, which counts once.
    """

    def __init__(self, submit: Callable[[Ask], Reply], asks: Sequence[Ask], each: int = 1) -> None:
        self._submit, self._each, self._left = submit, each, deque(asks)
        self.replies = [submit(self._left.popleft())]
        """Holds the replies so far; the last one is being read."""

    async def __anext__(self) -> Piece:
        while True:
            try:
                piece = await self.replies[-1].__anext__()
            except StopAsyncIteration:
                if not self._left:
                    self._take_end()
                    raise
                following = replace(self._left.popleft(), admitted=True)
                self.replies.append(self._submit(following))
                continue
            self.session_id = self.replies[0].session_id
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
        self._take_end()

    def _take_end(self) -> None:
        """Sum up all answers; slots, the cap, the end and the calls are the last one's."""
        last, usages = self.replies[-1], [x.usage for x in self.replies if x.usage is not None]
        self.session_id = self.replies[0].session_id
        self.finish_reason, self.parsed = last.finish_reason, last.parsed
        if len(usages) == len(self.replies):
            self.usage = _added(usages, self._each)


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
