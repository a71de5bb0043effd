"""Chat templates that are given by name or file: what they write, where answers end."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_chat import save
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from kvcap.runtime.cli.options import CHAT_TEMPLATE
from kvcap.runtime.errors import ChatTemplateMissing
from kvcap.runtime.session.ends import closing_tokens
from kvcap.runtime.session.messages import render
from kvcap.runtime.session.named_templates import names, use_template

MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
]
WRITTEN = {
    "alpaca": "Be brief.\n\n### Instruction:\nOne?\n\n### Response:\n1</s>\n\n"
    "### Instruction:\nTwo?\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>\n<start_of_turn>model\n1"
    "<end_of_turn>\n<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n",
    "llama-2": "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nOne? [/INST] 1 </s><s>[INST] Two? [/INST]",
    "llama-3": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n1<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[INST] Be brief.\n\nOne? [/INST] 1</s>[INST] Two? [/INST]",
    "phi-3": "<|system|>\nBe brief.<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\n1<|end|>\n"
    "<|user|>\nTwo?<|end|>\n<|assistant|>\n",
    "vicuna": "Be brief. USER: One? ASSISTANT: 1</s>USER: Two? ASSISTANT:",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nOne?</s>\n<|assistant|>\n1</s>\n"
    "<|user|>\nTwo?</s>\n<|assistant|>\n",
}


def tokenizer(*, opens: bool, marks: tuple[str, ...] = ("<|im_end|>", "</s>")) -> Any:
    """A tokenizer of words, that opens texts with <s> or does not."""
    backend = Tokenizer(models.WordLevel({"<s>": 0, "?": 1, "a": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(mark) for mark in marks])
    if opens:
        backend.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 0)]
        )
    return SimpleNamespace(
        backend_tokenizer=backend,
        special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=None,
    )


def test_every_name_is_tested_and_in_the_help():
    assert names() == sorted(WRITTEN)
    text = CHAT_TEMPLATE.metadata["declared"].help
    assert all(name in text for name in names())


@pytest.mark.filterwarnings("ignore:the chat template")
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_named_template_writes_as_its_models_were_trained(name, opens):
    some = tokenizer(opens=opens)
    use_template(some, name)
    assert render(some, MESSAGES) == ("<s>" if opens else "") + WRITTEN[name]


def test_answers_end_where_the_template_closes_them_or_a_warning_says_so():
    some = tokenizer(opens=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_template(some, "chatml")
    assert closing_tokens(some) == [some.backend_tokenizer.token_to_id("<|im_end|>")]
    with pytest.warns(UserWarning, match=r"'<\|im_end\|>', which is no token .* --stop"):
        use_template(tokenizer(opens=False, marks=()), "chatml")


def test_a_file_is_a_template_and_what_fails_is_refused_at_once(tmp_path):
    some, file = tokenizer(opens=True), tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}>")
    use_template(some, str(file))
    assert render(some, MESSAGES[1:2]) == "One?</s>>"
    file.write_text("{% for m in messages %}")
    with pytest.raises(ChatTemplateMissing, match="--chat-template"):
        use_template(some, str(file))
    with pytest.raises(ValueError, match="neither a file nor one of alpaca, chatml"):
        use_template(some, str(tmp_path / "none"))


def test_the_command_line_takes_a_template_for_a_model_without(tmp_path, kvcap):
    model = save(tmp_path / "model", template=False)
    command = ["generate", model, "Hello!", "--max-new-tokens", "2", "--quiet"]
    assert "--chat-template" in kvcap.refused(*command)
    with pytest.warns(UserWarning, match="no token of this model"):
        assert kvcap(*command, "--chat-template", "chatml")[0] == 0
    for given, says in (
        (["--chat-template", "no-such"], "neither a file nor one of"),
        (["--raw", "--chat-template", "chatml"], "leave --raw out"),
    ):
        assert says in kvcap.refused(*command, *given)


@pytest.mark.filterwarnings("ignore:the chat template")
def test_chatml_writes_tools_calls_and_results_as_hermes_does():
    some, tool = tokenizer(opens=False), {"type": "function", "function": {"name": "add"}}
    use_template(some, "chatml")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: Any = [
        MESSAGES[0], MESSAGES[1], {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]  # fmt: skip
    text = render(some, messages, [tool])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>\n\n' in text
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.count("Be brief.") == 1
