"""Tests logits of llama.cpp's engine against the library called directly, at every architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from llama_reference import (
    Follower,
    Plain,
    agree,
    loaded,
    loop_over,
    needs_library,
    runtime_of,
    text_ids,
)

from kvcap.lab.peers.write_gguf import FILE_TYPES, quantise
from kvcap.runtime.backends.llamacpp.library import find_library, load_library
from kvcap.runtime.backends.llamacpp.loop import LlamaLoop
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.types import Positions

pytestmark = needs_library

BUDGET, BLOCK = 48, 16
Files = Callable[..., Path]
SMALL: dict[str, dict[str, Any]] = {
    "streaming_llm": {},
    "keydiff-window": {},
    "lagkv": {"lag": 8},
    "knorm": {},
}
"""Holds the options of each policy under which it has something to evict at a small budget."""


QUANTISES = hasattr(load_library().calls, "llama_model_quantize") if find_library() else False
needs_quantiser = pytest.mark.skipif(not QUANTISES, reason="the library has no quantiser")
QUANTISED = [pytest.param(kind, marks=needs_quantiser) for kind in FILE_TYPES]


@pytest.mark.parametrize("kind", [None, *QUANTISED])
@pytest.mark.parametrize("architecture", tiny_gguf.ATTENDING)
def test_without_eviction_answers_are_the_librarys_own(
    gguf: Files, tmp_path: Path, architecture: str, kind: str | None
) -> None:
    file = gguf(architecture)
    if kind is not None:
        whole, file = file, tmp_path / "quantised.gguf"
        quantise(load_library(), whole, file, kind)
    session = runtime_of(file, budget_tokens=256, block_size=64).session(seed=0)
    session.set_generation(do_sample=False, max_new_tokens=40, eos_token_id=None)
    answer = "".join(session.send("Water boils at a hundred degrees. " * 3))
    assert answer
    assert session.turn is not None
    prompt, ids = session.turn.prompt_tokens, session.read_ids
    plain = Plain(loaded(file))
    assert ids[prompt:] == plain.greedy(ids[:prompt], len(ids) - prompt, 64)
    assert len(ids) - prompt == 39  # the last one drawn is not read
    plain.close()


def test_a_model_without_tokens_in_cells_is_refused_by_name(gguf: Files) -> None:
    with pytest.raises(UnsupportedModel, match="mamba keeps a state"):
        runtime_of(gguf("mamba"))


def test_quantised_keys_that_the_library_cannot_move_are_refused(gguf: Files) -> None:
    """It would end the process, as it does not rotate them by Hadamard's matrix."""
    file = gguf("stablelm")  # positions turn a part of each head
    with pytest.raises(UnsupportedModel, match="heads have 64 numbers, of which positions turn 32"):
        runtime_of(file, kv_dtype="q8_0")
    session = runtime_of(file, kv_dtype="q8_0", positions="true").session(seed=0)
    session.set_generation(max_new_tokens=40)
    assert "".join(session.send("a " * 60))
    assert session.cache.held < session.cache.seen


def follow(loop: LlamaLoop, follower: Follower, ids: list[int], sizes: list[int]) -> None:
    """Read blocks of these sizes, and compare all logits and positions with the follower's."""
    at = 0
    for size in sizes:
        block = ids[at : at + size]
        at += size
        agree(loop.read_every(np.array([block]))[0], follower.read(block))
        follower.keep(loop.cache.tokens.tolist())
        assert [*zip(loop.cache.tokens, loop.cache.cell_positions, strict=True)] == follower.held


@pytest.mark.parametrize(
    ("architecture", "policy", "positions", "kv_dtype"),
    [
        *((architecture, "streaming_llm", "compact", None) for architecture in tiny_gguf.MOVABLE),
        *((architecture, "lagkv", "compact", None) for architecture in ("qwen2", "gemma3")),
        *(("llama", policy, "compact", None) for policy in ("keydiff-window", "lagkv", "knorm")),
        *(("qwen3", policy, "true", None) for policy in SMALL),
        *(("llama", policy, "auto", None) for policy in SMALL),
        ("lfm2", "streaming_llm", "true", None),
        ("lfm2", "keydiff-window", "true", None),
        ("llama", "keydiff-window", "compact", "q8_0"),
        ("llama", "streaming_llm", "compact", "q4_0"),
    ],
)
def test_under_a_cap_logits_are_those_of_kept_tokens(
    gguf: Files, architecture: str, policy: str, positions: Positions, kv_dtype: str | None
) -> None:
    auto = positions == "auto"
    model = loaded(gguf(architecture, trained=100 if auto else tiny_gguf.TRAINED))
    loop = loop_over(
        model, policy, BUDGET, BLOCK, positions=positions, options=SMALL[policy], kv_dtype=kv_dtype
    )
    # Tokens that come back into a window are there only if nothing has taken their cells.
    whole = policy == "streaming_llm"
    plain = Plain(model, kv_dtype=kv_dtype, block=BLOCK, whole=whole)
    sizes = [16] * 8 + [1] * 5 + [7, 16, 3, 1, 1]
    limit = 2 * loop.cache.context.cells if kv_dtype == "q4_0" else 0
    follow(loop, Follower(plain, positions, limit), text_ids(1, sum(sizes)), sizes)
    assert loop.cache.held == BUDGET
    plain.close()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_rows_of_the_embedding_table_are_those_of_the_file(gguf: Files, architecture: str) -> None:
    runtime = runtime_of(gguf(architecture))
    table = tiny_gguf.tensors(architecture)["token_embd.weight"].astype(np.float32)
    assert runtime.meaning is not None
    assert np.array_equal(runtime.meaning._rows(range(3, 9)), table[3:9])
    assert runtime.meaning.likeness("the wine", ["a wine", "it is", "the rain"]).argmax() == 0
