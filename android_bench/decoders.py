"""Finds out whether an exported decoder can be timed or chatted with on a device.

What runs there knows one kind: kvcap's own export, whose past and present are one buffer.
"""

from __future__ import annotations

from pathlib import Path

from kvcap.runtime.backends.onnxruntime import manifest as manifests
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer
from kvcap.runtime.errors import ChatTemplateMissing, NotExportable
from kvcap.runtime.session.messages import messages_as_taken

PAGE_BYTES = 3 << 30  # the most weights and slots may take: WebAssembly addresses 4 GiB in all


def decoder_in(folder: Path) -> Manifest:
    """Return the manifest of a decoder that runs on a device.

    Raises:
        ModelNotFound, NotExportable, ManifestError, ModelFilesBroken, GraphBroken: it is none, or
            another exporter's.
    """
    found = manifests.read(folder)
    if not found.shared:
        raise NotExportable(
            f"{str(folder)!r} is a decoder of another exporter, which runs in Python only; phones "
            "and pages run kvcap's own: kvcap export decoder MODEL -o DIR"
        )
    if (kv_dtype := found.facts.get("kv_dtype")) is not None:
        raise NotExportable(
            f"{str(folder)!r} holds keys and values as {kv_dtype}, which runs in Python only; for "
            "phones and pages export the model without --kv-dtype"
        )
    return found


def decoder_for_a_page(folder: Path) -> Manifest:
    """Return the manifest of a decoder that a page can chat with.

    Raises:
        ModelFilesBroken: its tokenizer cannot be used.
        ChatTemplateMissing: it has no chat template, or one that takes lists of parts.
        NotExportable: it is too large, or as of `decoder_in`, as are all others.
    """
    found = decoder_in(folder)
    taken = int(found.model["weights_bytes"]) + int(found.facts["state_bytes"])
    if taken > PAGE_BYTES:
        raise NotExportable(
            f"weights and slots of {str(folder)!r} take {taken / 1e9:.1f} GB, and a page has "
            f"{PAGE_BYTES / 1e9:.1f} GB for them; export it with --dtype int4, or fewer slots"
        )
    tokenizer, said = Tokenizer(folder, found.listed), [{"role": "user", "content": "Hello!"}]
    if not tokenizer.chat_template:
        raise ChatTemplateMissing(
            f"the tokenizer in {str(folder)!r} has no chat template; export a model that was made "
            "for chat"
        )
    if messages_as_taken(tokenizer, said) != said:
        raise ChatTemplateMissing(
            f"the chat template in {str(folder)!r} takes lists of parts, and the page gives texts; "
            f"use kvcap chat {folder}"
        )
    return found
