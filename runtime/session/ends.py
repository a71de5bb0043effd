"""Finds the tokens that end an answer: by a model's settings, its tokenizer and its chat template.

Files disagree: settings of generation may lack the token by which the template closes a message of
the assistant, and then no answer would ever stop. Knows no library that runs models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcap.runtime.errors import ChatTemplateMissing
from kvcap.runtime.session.messages import MARK, NO_OPTIONS, render
from kvcap.runtime.types import Message

MOST = 1 << 31  # tokens of a vocabulary: ids are numbers of 32 bits


class End(NamedTuple):
    """A token that ends an answer."""

    id: int
    text: str | None  # None: there is no tokenizer that has it

    def __str__(self) -> str:
        return f"token {self.id}" if self.text is None else f"{self.text} ({self.id})"


def end_ids(tokenizer: Any, generation: Any = None, config: Any = None) -> list[int]:
    """Return the ids of all tokens that end an answer, in the order in which they are named.

    They are those of the settings of generation, of the config, of the tokenizer, and those by
    which its chat templates close an assistant's message. A config's own must be a special token,
    since transformers fills in a number where config.json has none.

    Args:
        tokenizer: with `backend_tokenizer`; None: there is none.
        generation: settings of generation with an `eos_token_id`; where that is an empty list,
            the model says that no token ends an answer.
        config: of the model, likewise.
    """
    first = getattr(generation, "eos_token_id", None)
    if isinstance(first, (list, tuple)) and not first:
        return []
    ends, others = _listed(first), _listed(getattr(config, "eos_token_id", None))
    if tokenizer is None:
        return list(dict.fromkeys(ends or others))
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    ends += [token for token in others if token in added and added[token].special]
    text = tokenizer.special_tokens_map.get("eos_token")
    own = None if text is None else backend.token_to_id(str(text))
    return list(dict.fromkeys([*ends, *_listed(own), *closing_tokens(tokenizer)]))


def ends_of(tokenizer: Any, generation: Any = None, config: Any = None) -> list[End]:
    """Return the tokens of `end_ids`, each with its text."""
    ids = end_ids(tokenizer, generation, config)
    text_of = (lambda _: None) if tokenizer is None else tokenizer.backend_tokenizer.id_to_token
    return [End(token, text_of(token)) for token in ids]


def with_ends(tokenizer: Any, generation: Any, config: Any = None) -> Any:
    """Set `eos_token_id` of settings of generation to all tokens that end an answer."""
    ids = end_ids(tokenizer, generation, config)
    generation.eos_token_id = ids[0] if len(ids) == 1 else ids or None
    return generation


def closing_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens by which chat templates close an assistant's message, mostly one.

    It is the added token right behind the message's text, spaces left out. Where nothing is written
    behind the last message of a conversation, what comes between it and the user's next counts:
    some models close their turn by opening the user's. Of several templates by name each counts, as
    any may be asked for.
    """
    templates = getattr(tokenizer, "chat_template", None)
    if not templates:
        return []
    backend, closing = tokenizer.backend_tokenizer, dict[int, None]()
    added = backend.get_added_tokens_decoder()
    for name in [None] if isinstance(templates, str) else templates:
        tail = closing_text(tokenizer, {} if name is None else {"chat_template": name})
        ids: list[int] = backend.encode(tail, add_special_tokens=False).ids if tail else []
        token = added.get(ids[0]) if ids else None
        if token is not None and tail.startswith(token.content):
            closing[ids[0]] = None
    return list(closing)


def closing_text(tokenizer: Any, options: Mapping[str, Any] = NO_OPTIONS) -> str:
    """Return the text that the chat template writes behind an assistant's message."""
    user: Message = {"role": "user", "content": "."}
    answered: list[Message] = [user, {"role": "assistant", "content": MARK}]
    for messages in (answered, [*answered, user]):
        try:
            whole = render(tokenizer, messages, options=options, prompt=False)
        except ChatTemplateMissing:  # it may not write such a conversation; a message is refused
            continue
        if tail := whole.partition(MARK)[2].lstrip():
            return tail
    return ""


def _listed(ids: Any) -> list[int]:
    """Return the token ids that a file names, without invalid ones: some write -1 for no token."""
    listed = ids if isinstance(ids, (list, tuple)) else [ids]
    numbers = [x for x in listed if isinstance(x, int) and not isinstance(x, bool)]
    return [x for x in numbers if 0 <= x < MOST]
