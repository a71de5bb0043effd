"""Names and types that every room uses: what they are called is decided here, once."""

from __future__ import annotations

from typing import Literal

ATTENTION = "kvcap"
"""The attention function's name for transformers, `attn_implementation="kvcap"`."""
MANIFEST = "kvcap.json"
"""The file that makes a directory an exported decoder."""
POCKET = "pocket"
"""The name of the built-in model."""
PINS = ("sink_tokens", "recent_tokens")
"""Options that every policy has."""
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What each setting of sampling is where it changes nothing; None, too, is read so."""

Message = dict[str, str]
"""A chat message: `role`, `content`."""
Span = tuple[int, int]
"""Tokens [start, stop), in tokens read."""
OnFull = Literal["evict", "stop", "error"]
"""What happens when the budget is used up; see `Session.on_full`."""
Positions = Literal["compact", "true"]
"""Whether survivors count as the tokens 0, 1, ... or keep the positions they were read at."""
