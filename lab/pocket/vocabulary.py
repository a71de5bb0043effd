"""Trains the built-in models' tokenizers: byte-level BPE with one token per digit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvcap.lab.pocket import corpus

BOS, PAD, END = "<|bos|>", "<|pad|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, PAD, END, SYSTEM, USER, ASSISTANT)  # their ids are 0 to 5, in this order
SIZE = 2560
# Every border is a special token and nothing is stripped, so that a longer chat always renders
# to an extension of the shorter one, in text and in tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def render(talk: list[corpus.Message]) -> str:
    """Return ``talk`` as the chat template writes it, without the cost of the template engine."""
    return BOS + "".join(f"<|{m['role']}|>{m['content']}{END}" for m in talk)


def _samples(conversations: int) -> Iterator[str]:
    rng = Random("tokenizer")
    for _ in range(conversations):
        for message in corpus.conversation(rng, rng.choice((100, 400, 1600))):
            yield message["content"]


def build(
    texts: Iterable[str] | None = None, size: int = SIZE, conversations: int = 12_000
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of ``size`` entries; the outcome depends on the arguments alone.

    ``texts`` are what it is trained on: by default, those of ``conversations`` of the corpus.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=5,
        show_progress=False,
    )
    raw.train_from_iterator(_samples(conversations) if texts is None else texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
