"""Messages are found in the tokens of every common chat template, and replies that repeat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from kvcap.runtime.recall.dialogue import Dialogue

SPECIAL = r"<[|｜]?\w+[|｜]?>|\[/?INST\]"
TEMPLATES = {  # of what the user says, and of what is replied
    "ChatML": ("<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"),
    "Gemma": ("<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n{}<end_of_turn>\n"),
    "Llama 3": tuple(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{{}}<|eot_id|>"
        for role in ("user", "assistant")
    ),
    "Phi": ("<|user|>\n{}<|end|>\n", "<|assistant|>\n{}<|end|>\n"),
    "DeepSeek": ("<｜User｜>{}", "<｜Assistant｜>{}<｜end｜>"),
    "Mistral": ("[INST] {}", "[/INST] {}</s>"),
}
REPLY = "I see, thank you."


class Words:
    """A tokenizer of special tokens, words and single signs."""

    def __init__(self, text: str) -> None:
        parts = re.findall(rf"{SPECIAL}|</s>| ?\w+|.|\n", text)
        self.words = sorted(set(parts))
        self.ids = [self.words.index(part) for part in parts]
        self.backend_tokenizer = self

    def get_added_tokens_decoder(self) -> dict[int, SimpleNamespace]:
        marks = ((i, one) for i, one in enumerate(self.words) if len(one) > 1 and one[0] in "<[")
        return {i: SimpleNamespace(content=one, special=True) for i, one in marks}

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.words[one] for one in ids)


def read(template: str, replies: Sequence[str]) -> tuple[Words, Dialogue]:
    """Return the tokens of a conversation that ends as a reply is asked for."""
    user, assistant = TEMPLATES[template]
    turns = (user.format(f"Fact {i}.") + assistant.format(text) for i, text in enumerate(replies))
    words = Words("".join(turns) + user.format("And?") + assistant.partition("{")[0])
    return words, Dialogue(words, words.words.__getitem__)


@pytest.mark.parametrize("template", TEMPLATES)
def test_messages_are_found_the_newest_first(template):
    words, dialogue = read(template, ["Yes.", "No."])
    texts = [
        (one.role in ("assistant", "model"), words.text(words.ids[one.start : one.stop]).strip())
        for one in dialogue.messages(words.ids)
    ]
    expected = [
        (False, "And?"),
        (True, "No."),
        (False, "Fact 1."),
        (True, "Yes."),
        (False, "Fact 0."),
    ]
    assert [one for one in texts if one[1]] == expected  # the reply that begins is still empty


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_reply_given_three_times_is_found_with_its_marks(template):
    words, dialogue = read(template, [REPLY, "No.", REPLY, "No.", REPLY])
    spans = dialogue.repeated_replies(words.ids)
    written = words.text(words.ids)
    whole = TEMPLATES[template][1].format(REPLY)
    assert [words.text(words.ids[a:b]) for a, b in spans] == [whole] * 3
    kept = [one for i, one in enumerate(words.ids) if not any(a <= i < b for a, b in spans)]
    assert words.text(kept) == written.replace(whole, "")
