"""Model directories and manifests with odd values: they load and answer, or are refused by name."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_values import odd
from tools import tiny_decoder

import kvcap
from kvcap.runtime.backends.onnxruntime.manifest import check
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.errors import KvcapError, ManifestError

few = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
TEXTS = ["config.json", "generation_config.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory)


def answers(runtime: Any) -> None:
    session = runtime.session()
    session.set_generation(max_new_tokens=2)
    "".join(session.send("Hello!"))
    assert session.cache.seen > 0


def rewritten(path: Path, text: str, data: st.DataObject) -> None:
    """The text, or one that was cut or has a byte flipped."""
    content = bytearray(text.encode(errors="surrogatepass"))
    kind, at = data.draw(st.integers(0, 9)), data.draw(st.integers(0, len(content) - 1))
    if kind == 0:
        del content[at:]
    elif kind == 1:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)


@few
@given(data=st.data())
def test_what_a_manifest_says(data, folders, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(folders / "decoder", folder, dirs_exist_ok=True)
    manifest = data.draw(odd(json.loads((folder / "kvcap.json").read_text())))
    rewritten(folder / "kvcap.json", json.dumps(manifest), data)
    with contextlib.suppress(KvcapError):
        answers(OrtRuntime.from_directory(folder))


@few
@given(data=st.data())
def test_what_a_model_says(data, folders, tmp_path):
    """Its configs, and the header of its weights."""
    folder = tmp_path / "copy"
    shutil.copytree(folders / "model", folder, dirs_exist_ok=True)
    name = data.draw(st.sampled_from([*TEXTS, "model.safetensors"]))
    if name == "model.safetensors":
        content = (folder / name).read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.dumps(data.draw(odd(json.loads(content[8:end])))).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + content[end:])
    else:
        rewritten(
            folder / name, json.dumps(data.draw(odd(json.loads((folder / name).read_text())))), data
        )
    with contextlib.suppress(KvcapError):
        answers(kvcap.Runtime.from_pretrained(folder, budget_tokens=24, block_size=8))


def test_manifests_of_both_kinds_are_what_their_schema_says(folders):
    manifest = json.loads((folders / "decoder" / "kvcap.json").read_text())
    check(manifest)
    with pytest.raises(ManifestError, match="kind"):
        check({**manifest, "kind": ["fused"]})
