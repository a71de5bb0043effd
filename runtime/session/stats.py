"""The figures of a conversation: where it stands, and what its last answer took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "interrupted", "cap", "full", "error"]
"""`full`: the budget is used up and `on_full` is 'stop'; `cap`: more was refused; `error`: another
error ended it."""


@dataclass
class Turn:
    """What one answer read, wrote and took. Times in seconds, 0 where nothing was timed."""

    prompt_tokens: int = 0
    read_tokens: int = 0  # of them; fewer where reading was cut short
    completion_tokens: int = 0
    evicted_tokens: int = 0  # that this answer cost, those of its prompt included
    finish_reason: FinishReason | None = None  # None: it is still being written
    ttft_s: float = 0.0  # from the call to the first token
    decode_s: float = 0.0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens read per second."""
        return self.prompt_tokens / self.ttft_s if self.ttft_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens written per second after the first."""
        return max(0, self.completion_tokens - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, repr=False)
class Stats:
    """Where the conversation stands. Tokens per KV head and layer, bytes over all layers."""

    policy: str
    budget_tokens: int
    seen_tokens: int  # since the cache was last empty: read again, they count anew
    held_tokens: int
    evicted_tokens: int
    bytes: int  # of the slots in use, and of what is always held
    cap_bytes: int  # what was asked for, or what the plan needs
    peak_bytes: int  # the most storage the cache has ever had, used or not
    recomputed: list[float]  # per layer: share of steps that attended to evicted tokens anew
    execution: str  # how blocks run once the cache is full, where there is something to say
    turn: Turn | None  # the last answer; None where there was none yet

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return (
            f"<Stats: {self.policy} holds {self.held_tokens:,} of {self.budget_tokens:,} slots "
            f"({self.bytes:,} of {self.cap_bytes:,} bytes), {self.seen_tokens:,} tokens seen, "
            f"{self.evicted_tokens:,} evicted>"
        )
