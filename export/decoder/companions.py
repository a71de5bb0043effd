"""Checks that a tokenizer's files alone give what transformers makes of them."""

from __future__ import annotations

from pathlib import Path

from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.files import load_tokenizer
from kvcap.runtime.session.messages import ChatWriter
from kvcap.runtime.session.template_forms import without_default

TEXT = "Hello! Zwölf Boxkämpfer, 42 <b>ships</b>\n and 你好."


def check_tokenizer(folder: Path) -> None:
    """Check that the tokenizer's files alone give what transformers makes of them.

    Raises:
        UnsupportedModel: they do not.
    """
    theirs, mine = load_tokenizer(str(folder)), Tokenizer(folder)
    for special in (True, False):
        if (
            theirs(TEXT, add_special_tokens=special)["input_ids"]
            != (mine(TEXT, add_special_tokens=special)["input_ids"])
        ):
            raise UnsupportedModel(
                f"tokenizer.json in {str(folder)!r} gives other tokens than transformers do; save "
                "it once with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
    turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."}]
    if not theirs.chat_template or without_default(theirs.chat_template):
        return
    writer = ChatWriter(mine)
    text = writer.render(turns)  # within bounds, which transformers has none of
    turns = writer.taken(turns)
    if text != theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True):
        raise UnsupportedModel(f"the chat template in {str(folder)!r} needs more than jinja2 gives")
