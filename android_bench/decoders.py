"""Checks whether an exported decoder can be timed or chatted with on a device."""

from __future__ import annotations

from pathlib import Path

from kvcap.runtime.backends.onnxruntime import manifest as manifests
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer
from kvcap.runtime.errors import ChatTemplateMissing, NotExportable
from kvcap.runtime.session.messages import ChatWriter

PAGE_BYTES = 3 << 30  # most bytes of weights and slots; WebAssembly addresses 4 GiB in all


def decoder_in(folder: Path) -> Manifest:
    """Return the manifest of a decoder that runs on a device.

    Raises:
        ModelNotFound, ManifestError, ModelFilesBroken, GraphBroken: the folder holds no whole
            decoder.
        NotExportable: the decoder holds slots in 8 bits.
    """
    manifest = manifests.read(folder)
    if (kv_dtype := manifest.facts.get("kv_dtype")) is not None:
        raise NotExportable(
            f"{str(folder)!r} holds keys and values as {kv_dtype}, which runs in Python only; for "
            "phones and pages export the model without --kv-dtype"
        )
    return manifest


def decoder_for_a_page(folder: Path) -> Manifest:
    """Return the manifest of a decoder that a page can chat with.

    Raises:
        ModelFilesBroken: the tokenizer cannot be used.
        ChatTemplateMissing: there is no chat template, or it takes lists of parts.
        NotExportable: the decoder is too large for a page.

    Errors of `decoder_in` are raised, too.
    """
    manifest = decoder_in(folder)
    taken = int(manifest.model["weights_bytes"]) + int(manifest.facts["state_bytes"])
    if taken > PAGE_BYTES:
        raise NotExportable(
            f"weights and slots of {str(folder)!r} take {taken / 1e9:.1f} GB, and a page has "
            f"{PAGE_BYTES / 1e9:.1f} GB for them; export it with --dtype int4, or fewer slots"
        )
    tokenizer = Tokenizer(folder, manifest.listed)
    messages = [{"role": "user", "content": "Hello!"}]
    if not tokenizer.chat_template:
        raise ChatTemplateMissing(
            f"the tokenizer in {str(folder)!r} has no chat template; export a model that was made "
            "for chat"
        )
    if ChatWriter(tokenizer).taken(messages) != messages:
        raise ChatTemplateMissing(
            f"the chat template in {str(folder)!r} takes lists of parts, and the page gives texts; "
            f"use kvcap chat {folder}"
        )
    return manifest
