"""Names and types that every room of the runtime shares, each defined once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

ATTENTION = "kvcap"
"""The name of kvcap's attention function in transformers: `attn_implementation="kvcap"`."""
MANIFEST = "kvcap.json"
"""The file that makes a directory an exported decoder."""
POCKET = "pocket"
"""The name of the built-in model that commands run where none is named."""
BUILT_IN = (POCKET, "pocket-plain", "pocket-text")
"""The names of all built-in models."""
DEFAULT_POLICY = "lagkv"
"""The policy where nobody names one; docs/quality.md says by which measurements."""
EVICT_EVERY = 64
"""Tokens of an answer after which a CPU evicts, all at once, unless told otherwise."""
SINKS = "sink_tokens"
"""The option that says how many first tokens are never evicted; 4 by default (`kvcap.sinks`)."""
PINS = (SINKS, "recent_tokens")
"""The options that every policy has: first and newest tokens that are never evicted."""
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""For each setting of sampling, the value that changes nothing; None means it, too."""

Message = dict[str, Any]
"""A chat message: its `role` and `content`; of an assistant that calls tools, `tool_calls`."""
Tool = Mapping[str, Any]
"""A tool that a model may call, as OpenAI's API and chat templates describe it."""
Span = tuple[int, int]
"""The tokens [start, stop) of a conversation, counted in tokens read."""
OnFull = Literal["evict", "stop", "error"]
"""What happens when the budget is used up; see `Session.on_full`."""
Positions = Literal["compact", "true", "auto"]
"""Whether kept tokens are renumbered 0, 1, ... or keep the positions they were read at. `auto`:
these stay until a token beyond the length that the model was trained on would come, and
are renumbered from then on."""
DEFAULT_POSITIONS: Positions = "compact"
"""How positions are kept where nobody says how, if keys can be moved exactly."""


class SlotUse(NamedTuple):
    """The slots of a KV head that are in use, on average over heads and layers.

    In an answer that evicts every few tokens, those above the budget wait for the next eviction, in
    slots of a block: the cache's bytes stay.

    >>> str(SlotUse.of(259, 256)), str(SlotUse.of(12, 256))
    ('256 of 256 slots + 3 waiting for the next eviction', '12 of 256 slots')
    """

    held: int  # at most the budget
    waiting: int  # above it
    budget: int

    @classmethod
    def of(cls, used: int, budget: int) -> SlotUse:
        """Tell apart what the policy keeps and what waits, of so many slots in use."""
        return cls(min(used, budget), max(0, used - budget), budget)

    def __str__(self) -> str:
        """How many are in use, of how many, and why there are more."""
        waits = f" + {self.waiting:,} waiting for the next eviction" if self.waiting else ""
        return f"{self.held:,} of {self.budget:,} slots{waits}"


class KeptTokens(NamedTuple):
    """Which tokens of a conversation a layer still holds."""

    layer: int  # its number in the model
    capped: bool  # by kvcap; False: it keeps a sliding window of its own
    heads: Sequence[Any]  # of each KV head: tokens as their places in the conversation, [held]
