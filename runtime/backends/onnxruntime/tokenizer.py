"""Loads a tokenizer from its files, as a conversation needs it, without transformers.

Knows no model, and does not render its chat template: it only hands on the text of it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers

from kvcap.runtime.errors import ModelFilesBroken, first_line
from kvcap.runtime.files import TEMPLATE, VOCABULARY, check_plain, read_json, read_plain

NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
TOKENIZER, CHAT_TEMPLATE = "tokenizer.json", "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
CONFIG, OLD_CONFIG = "tokenizer_config.json", "special_tokens_map.json"


class Tokenizer:
    """A tokenizer that encodes text, and holds special tokens and the template of a chat.

    Args:
        folder: with tokenizer.json, and perhaps tokenizer_config.json and a chat template.
        names: of the files that may be read; all by default.

    Raises:
        ModelFilesBroken: a file is missing or broken, or the vocabulary has no letters.
    """

    def __init__(self, folder: Path, names: Collection[str] | None = None) -> None:
        def listed_file(name: str) -> Path | None:
            listed = (folder / name).exists() if names is None else name in names
            return folder / name if listed else None

        try:
            if (vocabulary := listed_file(TOKENIZER)) is None:
                raise ValueError(f"there is no {TOKENIZER}")
            check_plain(vocabulary, VOCABULARY)
            self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(vocabulary))
            self.backend_tokenizer.no_truncation()
            self.backend_tokenizer.no_padding()
            config, older = _json(listed_file(CONFIG)), _json(listed_file(OLD_CONFIG))
            self.special_tokens_map = _special({**older, **config})
            files = {"default": listed_file(CHAT_TEMPLATE)}
            for path in sorted(folder.glob(f"{NAMED_TEMPLATES}/*.jinja")):
                files[path.stem] = listed_file(f"{NAMED_TEMPLATES}/{path.name}")
            self.chat_template = _templates(files, config)
            if not self("Hello", add_special_tokens=False)["input_ids"]:
                raise ValueError("its vocabulary has no letters")
        except Exception as error:  # the library's own are plain exceptions
            raise ModelFilesBroken(
                f"the tokenizer in {str(folder)!r} cannot be used: {first_line(error)}; get the "
                "files again, or export the model again"
            ) from error

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the token ids of `text`, as `input_ids`."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids}


def _json(path: Path | None) -> dict[str, Any]:
    """Return the settings in a JSON file; an empty dictionary where there is no file."""
    if path is None:
        return {}
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path.name} holds no settings")
    return settings


def _special(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; a config gives each as a text or as a dictionary."""
    named = {f"{name}_token": config.get(f"{name}_token") for name in NAMED}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _templates(
    files: dict[str, Path | None], config: dict[str, Any]
) -> str | dict[str, str] | None:
    """Return the chat template, or several by name, of files or else of the config."""
    texts = {
        name: read_plain(path, TEMPLATE).decode()
        for name, path in files.items()
        if path is not None
    }
    template = texts or config.get("chat_template")
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}
    if isinstance(template, dict):
        return template["default"] if template.keys() == {"default"} else template
    return template if isinstance(template, str) else None
