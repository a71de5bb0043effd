"""The tokens that end an answer, found in files that disagree."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import tiny_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from kvcap import Runtime
from kvcap.runtime.session.ends import End, closing_tokens, end_ids, ends_of

WORDS = ["<unk>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|return|>"]
PLAIN = ["a", "b", "c", ".", "\n"]
LOOP = "{% for m in messages %}"
CHATML = LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
TEMPLATES = {
    "closed by a newline after it": (CHATML, "<|end|>"),
    "behind a space": (LOOP + "[{{ m.role }}] {{ m.content }} {{ eos_token }}{% endfor %}", "</s>"),
    "the conversation is closed too": (CHATML + "{{ eos_token }}", "<|end|>"),
    "by the user's turn": (LOOP + "<|{{ m.role }}|>{{ m.content }}{% endfor %}", "<|user|>"),
    "another token last": (
        LOOP + "<|{{ m.role }}|>{{ m.content }}{% if loop.last %}<|return|>{% else %}<|end|>"
        "{% endif %}{% endfor %}", "<|return|>"),
    "in words": (LOOP + "{{ m.role }}: {{ m.content }}\na{% endfor %}", None),
    "text is written twice": (LOOP + "{{ m.content | upper }}<|end|>{% endfor %}", None),
    "it fails": ("{{ raise_exception('no') }}", None),
    "there is none": (None, None),
}  # fmt: skip


def tokenizer_of(template: str | None, eos: str | None = "</s>") -> Any:
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS + PLAIN)}, "<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def saved(folder: Path, generation: Any, config: Any = None, template: str = CHATML) -> str:
    model = tiny_model("llama", vocab_size=len(WORDS + PLAIN), eos_token_id=config)
    model.generation_config = GenerationConfig(eos_token_id=generation)
    model.save_pretrained(folder)
    tokenizer_of(template).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_closes_an_answer_by_one_token(case):
    template, closing = TEMPLATES[case]
    expected = [] if closing is None else [WORDS.index(closing)]
    assert closing_tokens(tokenizer_of(template)) == expected


def test_each_of_several_named_templates_closes_an_answer():
    """Any of them may be asked for, and one that fails closes none."""
    names = [name for name, (_, closing) in TEMPLATES.items() if closing is not None]
    tokenizer = tokenizer_of(None)
    tokenizer.chat_template = {name: TEMPLATES[name][0] for name in [*names, "it fails"]}
    expected = dict.fromkeys(WORDS.index(TEMPLATES[name][1]) for name in names)
    assert len(expected) > 1
    assert closing_tokens(tokenizer) == list(expected)


@pytest.mark.parametrize(("generation", "config", "expected"), [
    (None, None, [2, 3]), (7, None, [7, 2, 3]), ([3, 7], 2, [3, 7, 2]), (2, 7, [2, 7, 3]),
    (7, 9, [7, 2, 3]),  # a word: transformers' own default, where config.json says nothing
    (9, None, [9, 2, 3]),  # which a model's own settings are taken at
    ([], 7, []),
])  # fmt: skip
def test_what_files_say_is_united(generation, config, expected):
    configs = SimpleNamespace(eos_token_id=generation), SimpleNamespace(eos_token_id=config)
    assert end_ids(tokenizer_of(CHATML), *configs) == expected
    assert [end.id for end in ends_of(tokenizer_of(CHATML), *configs)] == expected


def test_without_a_tokenizer_settings_are_all_that_is_known():
    assert ends_of(None, SimpleNamespace(eos_token_id=3), None) == [End(3, None)]
    assert ends_of(None, None, SimpleNamespace(eos_token_id=[4])) == [End(4, None)]
    assert ends_of(None) == []
    assert ends_of(tokenizer_of(None, eos=None)) == []


@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_ends_at_the_token_that_no_settings_name(raw, tmp_path, monkeypatch):
    runtime = Runtime.from_pretrained(
        saved(tmp_path, 7), budget_tokens=32, block_size=8, device="cpu"
    )
    assert runtime.generation.eos_token_id == [7, 2, 3]
    drawn = iter([8, 9, 3, 8])
    monkeypatch.setattr(
        "kvcap.runtime.backends.pytorch.sampler.Sampler.next",
        lambda self, logits, *_: logits.new_full((1,), next(drawn)).long(),
    )
    session = runtime.session()
    text = "".join(session.complete("a b c") if raw else session.send("a b c"))
    assert (session.turn.finish_reason, session.turn.completion_tokens) == ("stop", 3)
    assert text.split() == ["a", "b"]


def test_the_plan_says_where_answers_end(tmp_path, kvcap):
    where = saved(tmp_path, 7)
    ends = [{"id": i, "text": WORDS[i]} for i in (7, 2, 3)]
    assert kvcap.document("plan", where)["end_tokens"] == ends
    assert "answers end at <|return|> (7), </s> (2), <|end|> (3)\n" in kvcap("plan", where)[1]
    for file in ("tokenizer.json", "generation_config.json"):
        (tmp_path / file).unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    assert "answers end at token 5\n" in kvcap("plan", where)[1]
