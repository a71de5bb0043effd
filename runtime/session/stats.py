"""Records the figures of a conversation: of its cache, and of its last answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvcap.runtime.types import SlotUse

FinishReason = Literal["stop", "length", "interrupted", "cap", "full", "error"]
"""Says why an answer ended.

`full`: the budget is used up and `on_full` is 'stop'; `cap`: reading on was refused; `error`:
another error.
"""


@dataclass
class Turn:
    """A record that counts what one answer read and wrote, with times in seconds; 0: not timed."""

    prompt_tokens: int = 0
    read_tokens: int = 0  # of the prompt; fewer where reading was cut short
    reused_tokens: int = 0  # before the prompt, which were read for earlier answers
    completion_tokens: int = 0
    evicted_tokens: int = 0  # while the prompt was read and the answer written
    finish_reason: FinishReason | None = None  # None: it is still being written
    stop_string: str | None = None  # the text of `stop_strings` that ended it
    ttft_s: float = 0.0  # from the call to the first token
    decode_s: float = 0.0
    recalled_tokens: int = 0  # of the prompt: evicted text that was read again
    copied_tokens: int = 0  # of those read: their slots were copied from another conversation

    def count_token(self, seconds: float) -> None:
        """Count a token that was drawn `seconds` after the call."""
        self.completion_tokens += 1
        if self.completion_tokens == 1:
            self.ttft_s = seconds
        self.decode_s = seconds - self.ttft_s

    @property
    def prefill_tok_s(self) -> float:
        """Return the prompt tokens read per second."""
        return self.prompt_tokens / self.ttft_s if self.ttft_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Return the tokens written per second after the first."""
        return max(0, self.completion_tokens - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, repr=False)
class Stats:
    """A record of the slots, bytes and tokens of a cache.

    Tokens are per KV head and layer, bytes of all layers together.
    """

    policy: str
    budget_tokens: int
    seen_tokens: int  # read since the cache was last empty
    held_tokens: int  # at most the budget
    waiting_tokens: int  # above it in an answer, until the next eviction
    evicted_tokens: int
    bytes: int  # of the slots in use, and of buffers that are always held
    cap_bytes: int  # of the cache: as asked for, or as planned
    peak_bytes: int  # the most storage the cache has had, used or not
    recomputed: list[float]  # by layer: the share of steps that attended to evicted tokens again
    execution: str  # how blocks are run, where there is something to say
    turn: Turn | None  # the last answer; None before the first

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)

    @property
    def slots(self) -> SlotUse:
        """Return the numbers of slots in use, of tokens waiting for eviction, and of the budget."""
        return SlotUse(self.held_tokens, self.waiting_tokens, self.budget_tokens)

    def __repr__(self) -> str:
        return (
            f"<Stats: {self.policy} holds {self.slots} "
            f"({self.bytes:,} of {self.cap_bytes:,} bytes), {self.seen_tokens:,} tokens seen, "
            f"{self.evicted_tokens:,} evicted>"
        )
