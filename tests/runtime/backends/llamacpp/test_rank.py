"""Tests which tokens llama.cpp's engine keeps, by scores of what its cells hold."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import torch
from llama_reference import loaded, loop_over, needs_library, text_ids
from numpy.typing import NDArray

from kvcap.policies import Observation, load_policy
from kvcap.runtime.backends.llamacpp.library import Q4_0, Q8_0, load_library
from kvcap.runtime.backends.llamacpp.rank import PolicyRanking, Ranking, ranking_of

pytestmark = needs_library

BUDGET, BLOCK, EXTRA = 48, 16, 16
Files = Callable[..., Path]
Floats = NDArray[np.float32]


def numbers(raw: bytes, kind: int) -> list[float]:
    """Return the numbers of bytes of a type of cells, by ggml's description of it."""
    scores = list[float]()
    if kind == Q8_0:
        for scale, *eighths in struct.iter_unpack("<e32b", raw):
            scores += [scale * n for n in eighths]
    elif kind == Q4_0:
        for scale, *pairs in struct.iter_unpack("<e16B", raw):
            scores += [scale * ((n & 15) - 8) for n in pairs]
            scores += [scale * ((n >> 4) - 8) for n in pairs]
    else:
        scores = [n for (n,) in struct.iter_unpack("<e", raw)]
    return scores


def read_state(raw: bytes, gap: int) -> tuple[list[int], list[list[Floats]]]:
    """Return the positions of a state's cells, and the rows of each layer's keys, then values.

    Written for one conversation of a model whose layers all keep every token.
    """
    offset = 8

    def taken(code: str) -> tuple[Any, ...]:
        nonlocal offset
        offset += struct.calcsize(code)
        return struct.unpack_from(code, raw, offset - struct.calcsize(code))

    streams, held = taken("<II")
    assert streams == 1
    positions = [taken("<iII")[0] for _ in range(held)]
    transposed, layers = taken("<II")
    assert not transposed
    offset += gap
    both = list[list[Floats]]()
    for _ in range(2):
        both.append([])
        for _ in range(layers):
            kind, size = taken("<iQ")
            rows = [numbers(raw[offset + i * size :][:size], kind) for i in range(held)]
            both[-1].append(np.array(rows, np.float32))
            offset += held * size
    assert offset == len(raw)
    return positions, both


@pytest.mark.parametrize(
    ("policy", "options", "kv_dtype"),
    [
        ("keydiff", {}, None),
        ("keydiff-window", {"recent_tokens": 9}, None),
        ("lagkv", {"lag": 8}, None),
        ("knorm", {}, None),
        ("keydiff", {}, "q8_0"),
        ("keydiff", {}, "q4_0"),
    ],
)
def test_kept_tokens_have_the_highest_mean_score(
    gguf: Files, policy: str, options: dict[str, Any], kv_dtype: str | None
) -> None:
    model = loaded(gguf())
    loop = loop_over(model, policy, BUDGET, BLOCK, options=options, kv_dtype=kv_dtype)
    cache, ids = loop.cache, text_ids(3, 4 * BLOCK + BUDGET)
    for at in range(0, len(ids), BLOCK):
        evict = cache.evict
        cache.evict = lambda: None  # type: ignore[method-assign]
        loop.read(np.array([ids[at : at + BLOCK]]))
        cache.evict = evict  # type: ignore[method-assign]
        held = cache.tokens
        if len(held) <= BUDGET:
            continue
        cache.settle_keys()
        raw = cache.context.state(cache.sequence).tobytes()
        positions, (keys, values) = read_state(raw, model.library.layout.gap)
        expected = plainly_kept(held.tolist(), positions, keys, values, cache.seen, policy, options)
        cache.evict()
        assert set(cache.tokens.tolist()) == expected


def plainly_kept(
    held: list[int],
    positions: list[int],
    keys: list[Floats],
    values: list[Floats],
    seen: int,
    policy: str,
    options: dict[str, Any],
) -> set[int]:
    """Return the tokens that stay: pinned ones, then those of the highest mean score."""
    eviction = load_policy(policy, **options)
    order = sorted(range(len(held)), key=lambda i: positions[i])
    total = [0.0] * len(held)
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        heads = k.shape[1] // tiny_gguf.HEAD
        own, other = (
            torch.tensor(x[order]).view(len(held), heads, -1).swapaxes(0, 1) for x in (k, v)
        )
        scores = eviction.score(
            Observation(
                keys=own[None],
                values=other[None],
                positions=torch.tensor(held).expand(1, heads, -1),
                num_tokens=seen,
                budget=BUDGET,
                layer=layer,
            )
        )
        for head, token in itertools.product(range(heads), range(len(held))):
            total[token] += float(scores[0, head, token]) / heads
    newest = max(1, eviction.recents(BUDGET))
    pinned = {t for t in held if t < 4 or t >= seen - newest}
    others = [(total[i], t) for i, t in enumerate(held) if t not in pinned]
    best = sorted(others, reverse=True)[: BUDGET - len(pinned)]
    return pinned | {t for _, t in best}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_keys_of_the_first_layer_are_those_of_its_weights(gguf: Files, architecture: str) -> None:
    """Heads, order and positions of keys read from cells are those of a formula in NumPy."""
    file = gguf(architecture)
    loop = loop_over(loaded(file), "streaming_llm", BUDGET, BLOCK)
    ids = text_ids(5, 3 * BLOCK)
    for at in range(0, len(ids), BLOCK):
        loop.read(np.array([ids[at : at + BLOCK]]))
    keys = loop.cache.context.layers(loop.cache.sequence, loop.cache.held)[0].keys()
    weights = tiny_gguf.tensors(architecture)
    x = weights["token_embd.weight"].astype(np.float32)[ids]
    x /= np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    x = x * weights["blk.0.attn_norm.weight"]
    k = x @ weights["blk.0.attn_k.weight"].astype(np.float32).T
    k += weights.get("blk.0.attn_k.bias", 0)
    k = k.reshape(len(ids), tiny_gguf.KV_HEADS, tiny_gguf.HEAD)
    half = tiny_gguf.HEAD // 2
    turns = np.arange(len(ids))[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(turns)[:, None], np.sin(turns)[:, None]
    if architecture == "llama":  # neighbours are turned together
        a, b = k[..., 0::2], k[..., 1::2]
        turned = np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(k.shape)
    else:
        a, b = k[..., :half], k[..., half:]
        turned = np.concatenate((a * cos - b * sin, a * sin + b * cos), -1)
    np.testing.assert_allclose(keys.swapaxes(0, 1), turned, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [Q8_0, Q4_0])
def test_quantised_rows_are_read_as_ggml_writes_them(kind: int) -> None:
    rng = np.random.default_rng(0)
    unit = {Q8_0: 34, Q4_0: 18}[kind]
    rows = rng.integers(0, 256, (5, 4 * unit), np.uint8)
    rows.reshape(5, 4, unit)[..., :2] = np.array([0.25, -3], "<f2").view(np.uint8)[:2]
    read_numbers = load_library().floats(rows, kind)
    assert read_numbers.tolist() == [numbers(row.tobytes(), kind) for row in rows]


@pytest.mark.parametrize(
    "options", [{}, {"sink_tokens": 9}, {"sink_tokens": 0}, {"recent_tokens": 30}]
)
@pytest.mark.parametrize("spans", [[], [(10, 13)], [(2, 6), (50, 51), (90, 99)]])
def test_the_ranking_without_pytorch_keeps_the_same(
    options: dict[str, int], spans: list[tuple[int, int]]
) -> None:
    plain = ranking_of("streaming_llm", options)
    assert type(plain) is Ranking
    scored = PolicyRanking("streaming_llm", options, load_policy("streaming_llm", **options))
    rng = np.random.default_rng(7)
    for budget in (50, 51, 63, 64):
        assert plain.pins(budget, spans) == scored.pins(budget, spans)
        for seen in (budget + 1, 97, 128):
            gone = rng.random(seen) < 0.1
            for start, stop in [(0, 9), (seen - 30, seen), *spans]:
                gone[start:stop] = False
            tokens = np.flatnonzero(~gone)
            if len(tokens) <= budget:
                continue
            masks = [r.kept(tokens, seen, budget, spans, list) for r in (plain, scored)]
            assert masks[0].tolist() == masks[1].tolist()
            assert masks[0].sum() == budget
