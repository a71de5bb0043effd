"""Defines names and types that every room of the runtime shares, each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

ATTENTION = "kvcap"
"""Names kvcap's attention function in transformers: `attn_implementation="kvcap"`."""
MANIFEST = "kvcap.json"
"""Names the file that makes a directory an exported decoder."""
POCKET = "pocket"
"""Names the built-in model that commands run where none is named."""
BUILT_IN = (POCKET, "pocket-plain", "pocket-text")
"""Lists the names of all built-in models."""
SMOLLM2 = "smollm2"
"""Names the chat model that is downloaded once, as a GGUF file of 98 MB."""
DEFAULT_POLICY = "lagkv"
"""Names the policy used where nobody names one; docs/quality.md has the measurements."""
FULL = "full"
"""Names the policy that never evicts."""
EVICT_EVERY = 64
"""Says after how many tokens of an answer a CPU evicts, all at once, by default."""
SINKS = "sink_tokens"
"""Names the option for how many first tokens are never evicted; 4 by default (`kvcap.sinks`)."""
PINS = (SINKS, "recent_tokens")
"""Names the options that every policy has: first and newest tokens that are never evicted."""
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Holds for each setting of sampling the value that changes nothing; None means it, too."""

Message = dict[str, Any]
"""Holds a chat message: its `role` and `content`, and an assistant's `tool_calls`."""
Tool = Mapping[str, Any]
"""Describes a tool that a model may call, as OpenAI's API and chat templates do."""
Span = tuple[int, int]
"""Holds the tokens [start, stop) of a conversation, counted in tokens read."""
OnFull = Literal["evict", "stop", "error"]
"""Says what happens when the budget is used up; see `Session.on_full`."""
Positions = Literal["compact", "true", "auto"]
"""Says whether kept tokens are renumbered 0, 1, ... or keep the positions they were read at.

`auto`: they keep these until a token beyond the length that the model was trained on would come,
and are renumbered from then on.
"""
DEFAULT_POSITIONS: Positions = "compact"
"""Says how positions are kept where nobody says how, if keys can be moved exactly."""


class ModelKind(NamedTuple):
    """A model's family and size, by which chats draw where it names no settings of its own."""

    family: str  # '' where it is not known
    hidden_size: int  # numbers of a token's row in the embedding table


class SlotUse(NamedTuple):
    """A count of the slots of a KV head in use, which is an average over heads and layers.

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
        """Split so many slots in use into those that the policy keeps and those that wait."""
        return cls(min(used, budget), max(0, used - budget), budget)

    def __str__(self) -> str:
        """Return how many are in use, of how many, and why there are more."""
        waits = f" + {self.waiting:,} waiting for the next eviction" if self.waiting else ""
        return f"{self.held:,} of {self.budget:,} slots{waits}"


class KeptTokens(NamedTuple):
    """A list of the tokens of a conversation that a layer still holds."""

    layer: int  # its number in the model
    capped: bool  # by kvcap; False: it keeps a sliding window of its own
    heads: Sequence[Any]  # of each KV head: tokens as their places in the conversation, [held]
