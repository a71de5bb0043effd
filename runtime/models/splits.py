"""Splits text into pieces, within which a tokenizer merges, as a GGUF file names it.

Such a file does not hold the rules of its byte-level tokenizer. In their place it has a name, in
`tokenizer.ggml.pre`, that llama.cpp's converter found by the tokens of a test text. These are the
regular expressions for the names, each applied to what those before it left as one piece. Files of
sentencepiece's tokenizers need none. Knows tokenizers and a file's header.
"""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import Regex, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.gguf import header

BYTE_LEVEL = "gpt2"  # the kind of tokenizer whose text is split, in `tokenizer.ggml.model`
SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACE}"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = rf"{SHORT}|{WORDS}|\p{{N}}{{1,3}}|{SIGNS}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FRONT, SLASHES = r"[^\r\n\p{L}\p{N}]?", rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACE}"
CASES = rf"{FRONT}{UPPER}*{LOWER}+%s|{FRONT}{UPPER}+{LOWER}*%s"  # a word ends before a capital
HAN = r"[一-龥぀-ゟ゠-ヿ]+"
SENTENCE = r" ?[^(\s|.,!?…。，、।۔،)]+"
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        (LLAMA3,),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", (LLAMA3,)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        (rf"{SHORT}|{WORDS}|\p{{N}}|{SIGNS}",),
    ),
    (
        "qwen35",
        (
            rf"{SHORT}|{FRONT}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
            rf"|{SPACE}",
        ),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
        "exaone4 mpt olmo jais trillion granite-docling",
        (GPT2,),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        (r"\p{N}", GPT2),
    ),
    ("falcon", (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")),
    ("default", (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("tekken", (rf"{CASES % ('', '')}|\p{{N}}|{SLASHES}",)),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        (rf"{CASES % (SHORT + '?', SHORT + '?')}|\p{{N}}{{1,3}}|{SLASHES}",),
    ),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        (
            r"\p{N}{1,3}",
            HAN,
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACE,
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        (rf"{SHORT}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    ("seed-coder", (rf"{SHORT}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACE}",)),
    ("minicpm5", (r"\p{N}{1,3}", rf"{SHORT}|{WORDS}|\p{{N}}+|{SIGNS}")),
    ("poro-chat bloom gpt3-finnish", (SENTENCE,)),
    ("viking", (SENTENCE, r"\p{N}")),
)
"""Holds names, and the regular expressions for them, whose matches become pieces.

Those of tekken and gpt-4o are the models' own; llama.cpp's take marks above letters for signs.
"""
SPLITS = {name: expressions for names, expressions in KINDS for name in names.split()}
OPENED = {*KINDS[0][0].split(), "tekken"}
"""Lists tokenizers that set a token before a text, unless the file says that they do not."""
WHOLE = {*OPENED, "minicpm5"}
"""Lists tokenizers by which a piece that is a token stays one, however merges go."""
FEW, TRIED = 32, 256  # words of a vocabulary that say nothing; that are tried


def split_as_named(where: str, tokenizer: Any) -> Any:
    """Have a GGUF file's tokenizer split text as the file says.

    Args:
        where: the file.
        tokenizer: as transformers makes it, which reads few of the names.

    Raises:
        UnsupportedModel: the file has a name that is not known, or none, so that tokens would
            differ from those that the model was trained on.
    """
    gguf = header(where)
    if gguf.value("tokenizer.ggml.model") != BYTE_LEVEL:
        return tokenizer
    name = gguf.value("tokenizer.ggml.pre")
    if name not in SPLITS:
        fault = "does not say how text is split" if name is None else f"splits text as {name!r}"
        raise UnsupportedModel(
            f"the tokenizer of {where!r} {fault} (tokenizer.ggml.pre), and by another rule its "
            f"tokens would be others; known: {', '.join(SPLITS)}. Give the repository or directory "
            "that it was made from, with safetensors, or convert that by a newer llama.cpp"
        )
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = splitter(name)
    backend.model.ignore_merges = name in WHOLE
    first = tokenizer.bos_token
    if first and not gguf.value("tokenizer.ggml.add_bos_token", name in OPENED):
        first = None  # older transformers write it before the text of any model
    opening = f"{first} " if first else ""
    backend.post_processor = TemplateProcessing(
        single=f"{opening}$A",
        pair=f"{opening}$A {opening and f'{first}:1 '}$B:1",
        special_tokens=[(first, tokenizer.bos_token_id)] if first else [],
    )
    return tokenizer


def check_words(where: str, tokenizer: Any) -> None:
    """Refuse a tokenizer that cuts up the words of its own vocabulary.

    Transformers' own of some versions lose the merges of a file (5.17 those of Gemma 3): the model
    then reads pieces that it was not trained on, and answers worse without a sign of it.

    Raises:
        UnsupportedModel: most of these words become several tokens.
    """
    words = [
        (token, piece[1:])
        for piece, token in sorted(tokenizer.get_vocab().items())
        if len(piece) > 3 and piece[0] in "▁Ġ" and piece[1:].isascii() and piece[1:].isalpha()
    ]
    tried = words[:: -(-len(words) // TRIED) or 1]
    cut = [
        word
        for token, word in tried
        if tokenizer(f"I {word}", add_special_tokens=False).input_ids[-1] != token
    ]
    if len(words) >= FEW and len(cut) > len(tried) / 2:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} cuts up words that are tokens of {where!r}, "
            f"such as {cut[0]!r}, so that the model would read others than it was trained on; run "
            "the file by llama.cpp (--backend llamacpp), or update transformers"
        )


def splitter(name: str) -> Any:
    """Return the pre-tokenizer of a name in `SPLITS`."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, whole])
