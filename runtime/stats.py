"""The figures of a conversation: where it stands, and what its last answer took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "interrupted", "cap", "full"]
"""`full`: the budget is used up and `on_full` is 'stop'; `cap`: more was refused."""


@dataclass
class Turn:
    """What one answer read, wrote and took. Times in seconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: FinishReason = "interrupted"
    ttft_s: float = 0.0  # from the call to the first token
    decode_s: float = 0.0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens read per second."""
        return self.prompt_tokens / self.ttft_s if self.ttft_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens written per second after the first."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class Stats:
    """Where the conversation stands. Tokens per KV head and layer, bytes over all layers."""

    policy: str
    budget_tokens: int
    seen_tokens: int
    held_tokens: int
    evicted_tokens: int
    bytes: int  # of the slots in use, and of what is always held
    cap_bytes: int  # what was asked for, or what the plan needs
    peak_bytes: int  # the most storage the cache has ever had, used or not
    recomputed: list[float]  # per layer: share of steps that attended to evicted tokens anew
    execution: str  # of blocks once the cache is full, see `BlockLoop.execution`
    turn: Turn  # the last answer

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)
