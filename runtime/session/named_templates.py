"""Gives a model another chat template: a common one by its name, or one from a file.

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


def check_given(name: str) -> None:
    """Refuse a name that is neither a common template's nor a file's.

    Raises:
        ValueError: naming what would work.
    """
    if name not in names() and not Path(name).is_file():
        raise ValueError(
            f"--chat-template {name!r} is neither a file nor one of {', '.join(names())}"
        )


def use_template(tokenizer: Any, name: str) -> None:
    """Have a tokenizer write chats by another template; warn where no answer ends by itself.

    Args:
        tokenizer: whose `chat_template` is replaced.
        name: the name of a usual template, or a file with one in Jinja.

    Raises:
        ValueError: there is no such template or file, or it is no text.
        ChatTemplateMissing: the template fails.
    """
    check_given(name)
    if name in names():
        opens = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True).ids
        plain = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids
        text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer.chat_template = (OPENING if opens[: len(plain)] != plain else "") + text
    else:
        tokenizer.chat_template = read_text(name)
    render(tokenizer, [{"role": "user", "content": "Hello!"}])  # refuses one that fails
    closing = closing_text(tokenizer).split()[:1]
    if closing and not closing_tokens(tokenizer):
        warnings.warn(
            f"the chat template {name} closes an answer by {closing[0]!r}, which is no token of "
            f"this model; where answers do not end, give --stop '{closing[0]}'",
            stacklevel=2,
        )
