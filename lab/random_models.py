"""Makes models of random weights in known shapes, in a folder or in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcap.runtime.models.names import resolve

SHAPES: dict[str, dict[str, Any]] = {
    "random-3b": {  # the shape of Llama-3.2-3B
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192,
        "vocab_size": 128256, "max_position_embeddings": 262144, "rope_theta": 500000.0,
    },
    "random-360m": {  # the shape of SmolLM2-360M
        "hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "head_dim": 64, "intermediate_size": 2560,
        "vocab_size": 49152, "max_position_embeddings": 131072,
    },
    "random-tiny": {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 256,
        "vocab_size": 512, "max_position_embeddings": 131072,
    },
}  # fmt: skip


def directory(name: str, files: Path) -> str:
    """Return the directory of a model; a random model is written below `files`, once.

    Raises:
        ValueError: `name` is neither a directory nor a name of `SHAPES`.
    """
    if name not in SHAPES:
        where = resolve(name)
        if not Path(where).is_dir():
            raise ValueError(
                f"{name!r} is no directory of a model, which other processes read too; give one, "
                f"pocket, or one of random weights: {', '.join(SHAPES)}"
            )
        return where
    folder = Path(files, name)
    if not (folder / "tokenizer.json").exists():  # the file that is written last
        _make(name, folder)
    return str(folder)


def random_model(name: str, device: str) -> Any:
    """Make a Llama in a shape of `SHAPES`, with random bfloat16 weights and tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[name], tie_word_embeddings=True)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval()


def _make(name: str, folder: Path) -> None:
    """Write the files of a random model, and a tokenizer whose tokens are words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    model = random_model(name, "cuda" if torch.cuda.is_available() else "cpu")
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # leaves the memory to processes that load the model
    words = {f"t{token}": token for token in range(SHAPES[name]["vocab_size"])}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
