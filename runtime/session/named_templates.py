"""Gives a model another chat template: one of the usual ones by its name, or that of a file.

The texts in `templates/` are kvcap's own, in the form that models of that name were trained on.
They write no opening token; that comes first where the tokenizer opens every text with it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from kvcap.runtime.files import read_text
from kvcap.runtime.session.ends import closing_text, closing_tokens
from kvcap.runtime.session.messages import render

FOLDER = Path(__file__).with_name("templates")
OPENING = "{{ bos_token }}"


def names() -> list[str]:
    """Return the names of the usual chat templates.

    >>> "chatml" in names()
    True
    """
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def check_given(given: str) -> None:
    """Refuse what is neither the name of a usual template nor a file.

    Raises:
        ValueError: naming what would work.
    """
    if given not in names() and not Path(given).is_file():
        raise ValueError(
            f"--chat-template {given!r} is neither a file nor one of {', '.join(names())}"
        )


def use_template(tokenizer: Any, given: str) -> None:
    """Have a tokenizer write chats by another template; warn where no answer ends by itself.

    Args:
        tokenizer: whose `chat_template` is replaced.
        given: the name of a usual template, or a file with one in Jinja.

    Raises:
        ValueError: there is no such template or file, or it is no text.
        ChatTemplateMissing: the template fails.
    """
    check_given(given)
    if given in names():
        opens = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True).ids
        plain = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids
        text = (FOLDER / f"{given}.jinja").read_text(encoding="utf-8")
        tokenizer.chat_template = (OPENING if opens[: len(plain)] != plain else "") + text
    else:
        tokenizer.chat_template = read_text(given)
    render(tokenizer, [{"role": "user", "content": "Hello!"}])  # refuses one that fails
    closing = closing_text(tokenizer).split()[:1]
    if closing and not closing_tokens(tokenizer):
        warnings.warn(
            f"the chat template {given} closes an answer by {closing[0]!r}, which is no token of "
            f"this model; where answers do not end, give --stop '{closing[0]}'",
            stacklevel=2,
        )
