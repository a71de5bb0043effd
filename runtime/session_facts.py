"""What a session's file says beside its tensors: whether it can be so. Knows no backend."""

from __future__ import annotations

import json
from typing import Any

from kvcap.runtime.schema import SESSION, fault
from kvcap.runtime.session_file import SessionFile

# Of the settings of generation, those that a session goes by.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")
SETTINGS = (*FLOATS, "do_sample", "top_k", "max_new_tokens", "eos_token_id", "stop_strings")


def checked_facts(file: SessionFile) -> dict[str, Any]:
    """What the file says, once it is known to be of the kinds and sizes that it must be.

    Raises:
        SessionFileCorrupt: naming the first place where it is not.
    """
    wrong = fault(file.facts, SESSION)
    if wrong is not None:
        raise file.corrupt(f"what it says cannot be ({wrong})")
    return file.facts


def check_conversation(file: SessionFile, vocabulary: int) -> None:
    """Hold the parts of a conversation to each other, and to the model's `vocabulary`.

    Raises:
        SessionFileCorrupt: they do not belong together.
    """
    said = file.facts["conversation"]
    messages = said["messages"]
    if any(n >= len(messages) or messages[n]["role"] != "user" for n in said["pinned"]):
        raise file.corrupt("a message is pinned that the user did not send")
    if any(token >= vocabulary for token in said["unread"]):
        raise file.corrupt(f"a token is unread that is none of the model's {vocabulary:,}")
    if any(start >= stop for start, stop in file.facts["pinned_spans"]):
        raise file.corrupt("pinned tokens end before they begin")
    try:
        json.dumps([messages, said["system"]], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise file.corrupt("what was said is no Unicode text") from error


def generation_of(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that a session takes, as numbers and lists of the types that samplers want."""
    found = {name: given.get(name) for name in SETTINGS}
    for name in FLOATS:
        if (value := found[name]) is not None:
            found[name] = float(value)
    if isinstance(found["stop_strings"], str):
        found["stop_strings"] = [found["stop_strings"]]
    return found
