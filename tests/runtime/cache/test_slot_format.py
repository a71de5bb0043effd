"""Slots of 8 and 4 bits: what they hold, what attention reads of it, what they take and refuse.

The truth here is written without kvcap: bytes are turned into numbers one by one, keys rotated and
attended in float64. Every key and value that arrives is remembered, and what a slot holds of it
many evictions later may be off by half a step of its own scale, and no more.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small_policy, tiny_config, tiny_model
from families import OLD, STATES, config_of, model_of
from tools import runtime_of
from torch import Tensor

import kvcap
from kvcap.policies import load_policy, policies
from kvcap.runtime.backends.pytorch.cuda_graphs import why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache import pool
from kvcap.runtime.cache.formats import numbers_of
from kvcap.runtime.cache.layer import BudgetLayer
from kvcap.runtime.cache.pool import SHIFT, Segment
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cache.slot_format import SlotFormat
from kvcap.runtime.cache.slots import EagerSlots
from kvcap.runtime.cache.slots.quantised import read_values, weigh_values
from kvcap.runtime.errors import PlanInfeasible, SessionFileForeign, UnsupportedModel
from kvcap.runtime.planning.dry_run import rehearse_block
from kvcap.runtime.session.session import Session

KINDS = ["int8", "int8-int4", "int4"]
GROUPS = {16: 16, 20: 20, 24: 24, 32: 32, 64: 32, 80: 20, 96: 32, 128: 32}  # of a head's numbers


# A vector, number by number ---------------------------------------------------------------------


def numbers(bits: int, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One vector's numbers from its bytes, and the most that each may be off, [D] float64."""
    q, scale = parts[""].tolist(), parts["scale"].double()
    if bits == 8:
        step = float(scale)
        return torch.tensor([x * step for x in q]).double(), torch.full((len(q),), 0.57 * step)
    half = len(q)
    values, off = [], []
    for i in range(2 * half):
        four = q[i] & 15 if i < half else q[i - half] >> 4
        group = i // GROUPS[2 * half]
        step, low = float(scale[group]), float(parts["low"][group])
        values.append(low + four * step)
        off.append(0.51 * step + abs(low) / 1000)
    return torch.tensor(values).double(), torch.tensor(off).double()


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_as_by_the_formula(bits, size):
    kind = numbers_of(f"int{bits}")
    x = torch.randn(2, 3, 5, size) * torch.logspace(-3, 3, 5)[:, None]
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2] = 0.0, 3.25, torch.arange(size)
    parts = kind.quantise(x)
    out = torch.full(x.shape, float("nan"))
    kind.dequantise(parts, out, None)
    plus, added = torch.randn(2, 3, size), torch.full(x.shape, float("nan"))
    kind.dequantise(parts, added, plus)
    torch.testing.assert_close(added, out + plus[:, :, None])
    weights = torch.rand(2, 3, 4, 5)
    torch.testing.assert_close(kind.weigh(parts, weights), weights @ out, rtol=1e-5, atol=1e-3)
    for name, (shape, dtype) in kind.shapes(size).items():
        assert (tuple(parts[name].shape), parts[name].dtype) == ((2, 3, 5, *shape), dtype)
    for index in [(b, k, n) for b in range(2) for k in range(3) for n in range(5)]:
        values, off = numbers(bits, {name: part[index] for name, part in parts.items()})
        torch.testing.assert_close(out[index].double(), values, rtol=1e-6, atol=1e-7)
        assert ((values - x[index].double()).abs() <= off + 1e-6).all()
    levels = parts[""].unique().numel()
    assert levels > (200 if bits == 8 and size > 24 else 15)  # all of the range is used
    nothing = {name: part[0, 0, 0] for name, part in parts.items()}
    assert numbers(bits, nothing)[0].eq(0).all()


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("far", [0.0, 1000.0, -60.0])
def test_scales_reach_from_the_least_number_as_it_is_stored(far, size):
    """Far from zero float16 moves the least number, and the last step must end at the most."""
    x = far + torch.randn(7, size)
    parts = numbers_of("int4").quantise(x)
    for vector, low, scale in zip(x.numpy(), parts["low"], parts["scale"], strict=True):
        groups = vector.reshape(-1, GROUPS[size])
        least = groups.min(-1).astype(np.float16)
        reach = (groups.max(-1) - least.astype(np.float32)) / np.float32(15)
        assert low.tolist() == least.tolist()
        assert scale.tolist() == reach.astype(np.float16).tolist()


def test_bytes_of_a_slot():
    """With its position and shift, of a head of 128: the figures of the documentation."""
    for name, nbytes in {None: 512, "int8": 260, "int8-int4": 210, "int4": 160}.items():
        shapes = SlotFormat.of(name).shapes(128, torch.bfloat16).values()
        count = sum(torch.empty(shape, dtype=kind).nbytes for shape, kind in shapes)
        assert count == nbytes, name


# What slots hold, and what attention reads of it ------------------------------------------------


def turn(x: Tensor, position: Tensor, layer: BudgetLayer) -> Tensor:
    """X [..., n, D] float64 rotated on by `position` [..., n], where the layer rotates."""
    if layer.rope is None:
        return x
    angles = position.double()[..., None] * layer.rope.inv_freq.double()
    turns, half = torch.polar(torch.ones_like(angles), angles), angles.shape[-1]
    first, rest = x[..., : 2 * half], x[..., 2 * half :]
    if layer.rope.interleaved:
        pairs = torch.complex(first[..., ::2], first[..., 1::2]) * turns
        first = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    else:
        pairs = torch.complex(first[..., :half], first[..., half:]) * turns
        first = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((first, rest), -1)


class Truth:
    """Remembers what arrives in every layer, and holds attention to what the slots have."""

    def __init__(self, monkeypatch: Any) -> None:
        self.arrived: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of each layer, token by token
        self.means: dict[int, Tensor] = {}
        self.attended = 0
        read_of, attend_of, again_of = BudgetLayer._read, EagerSlots.attend, EagerSlots.again

        def read(layer: BudgetLayer, block: Any, query: Tensor, call: Any) -> Tensor:
            keys, values = (x.double().clone() for x in block.arrived)
            before = layer.seen
            start = before if block.context.start is None else block.context.start
            if layer.rotates:
                at = start + torch.arange(block.length)
                keys = turn(keys, -at.expand(keys.shape[:3]), layer)
            if not before:
                self.means[layer.index] = keys.mean(2)
            tokens = self.arrived.setdefault(layer.index, [])
            tokens[before:] = [(keys[:, :, t], values[:, :, t]) for t in range(block.length)]
            block.layer = layer
            return read_of(layer, block, query, call)

        def attend(engine: Any, query: Tensor, block: Any, call: Any) -> Tensor:
            layer = block.layer
            block.truth = [held(layer, segment) for segment in layer.segments]
            block.past = [(x if layer.rotates else 0) for x in block.offsets]
            block.past *= len(layer.segments) // len(block.past)
            out = attend_of(engine, query, block, call)
            self.check(layer, query, out, block, call)
            return out

        def again(engine: Any, query: Tensor, block: Any, call: Any) -> Tensor:
            out = again_of(engine, query, block, call)
            self.check(block.layer, query, out, block, call)
            return out

        monkeypatch.setattr(BudgetLayer, "_read", read)
        monkeypatch.setattr(EagerSlots, "attend", attend)
        monkeypatch.setattr(EagerSlots, "again", again)

    def check(self, layer: Any, query: Tensor, out: Tensor, block: Any, call: Any) -> None:
        """Hold attention to float64 over the numbers in the slots."""
        pairs = zip(layer.segments, block.truth, block.past, strict=True)
        for segment, (keys, values), past in pairs:
            q = segment.rows_of(query).double()
            if layer.rotates:
                q = turn(q, torch.full(q.shape[:3], -past), layer)
            group = q.shape[1] // keys.shape[1]
            k, v = (x.repeat_interleave(group, 1) for x in (keys, values))
            scale, softcap, sinks = segment.logits_of(call.logits)
            z = q @ k.mT * scale
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            later = torch.ones(q.shape[2], k.shape[2]).triu(k.shape[2] - q.shape[2] + 1).bool()
            z = z.masked_fill(later, float("-inf"))
            if sinks is not None:
                own = sinks.double()[None, :, None, None].expand(*z.shape[:3], 1)
                z = torch.cat((z, own), -1)
            weights = z.softmax(-1)[..., : k.shape[2]]
            output = segment.rows_of(out).double()
            torch.testing.assert_close(output, weights @ v, rtol=1e-5, atol=1e-5)
            self.attended += 1

    def check_slots(self, cache: kvcap.BudgetCache) -> None:
        """Hold every slot to the token that arrived."""
        for layer in cache.capped_layers:
            mean = layer.engine.key_mean
            centred = mean is not None
            if centred:
                torch.testing.assert_close(mean, self.means[layer.index].float())
            for s in layer.segments:
                for b, k, n in torch.cartesian_prod(
                    *(torch.arange(x) for x in (s.batch, s.heads, s.held))
                ).tolist():
                    index, head = (b, k, n), (s.row + b, s.head + k)
                    key, value = self.arrived[layer.index][int(s.positions[index])]
                    own = key[head] - (self.means[layer.index][head] if centred else 0)
                    for name, true in (("key", own), ("value", value[head])):
                        stored, off = vector(s, name, index)
                        assert ((stored - true).abs() <= off + 1e-5).all(), (name, index)
                    if layer.rotates:
                        rank = int((s.positions[b, k] < s.positions[index]).sum())
                        assert int(s.aux(SHIFT)[index]) == -rank


def vector(segment: Segment, name: str, index: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The key or value of a slot, from its bytes, and the most that its numbers may be off."""
    named = segment.pool.named()
    sides = {part: f"{name}_{part}" for part in ("scale", "low") if f"{name}_{part}" in named}
    parts = {part: segment.view(named[of])[index] for part, of in {"": f"{name}s", **sides}.items()}
    return numbers(4 if "low" in parts else 8, parts)


def held(layer: BudgetLayer, segment: Segment) -> tuple[Tensor, Tensor]:
    """Keys at the positions where they count, and values [b, k, held, D] float64, of a segment."""
    shape = (segment.batch, segment.heads, segment.held)
    indices = torch.cartesian_prod(*map(torch.arange, shape)).tolist()
    keys, values = (
        torch.stack([vector(segment, name, tuple(p))[0] for p in indices]).view(*shape, -1)
        for name in ("key", "value")
    )
    if (mean := layer.engine.key_mean) is not None:
        keys = keys + segment.rows_of(mean)[:, :, None].double()
    if layer.rotates:
        ranks = segment.positions.argsort(-1).argsort(-1)
        keys = turn(keys, ranks, layer)
    return keys, values


def read(cache: kvcap.BudgetCache, model: Any, ids: Tensor) -> None:
    loop = BlockLoop(model, cache, graphs=False)
    loop.prefill(ids[:, :-4])
    for i in range(4):
        loop.read(ids[:, ids.shape[1] - 4 + i :][:, :1])


FAMILIES = ["llama", "gemma2", "gemma3_text", "smollm3", "phi3", "glm", "cohere", "gemma3n",
            "gemma4", "gemma4 k=v", "gpt_oss", "granite_swa", "qwen3_5_text", "lfm2",
            "granitemoehybrid"]  # fmt: skip
FAMILIES = [family for family in FAMILIES if not (OLD and family in STATES)]


EVICTIONS = sorted(  # a corrector is refused
    name for name, x in policies().items() if not {"corrector", "full"} & {*x.parts, name}
)


@pytest.mark.slow(keep=14, ci=28)
@pytest.mark.parametrize("seed", range(100))
def test_random_combinations(seed, monkeypatch):
    """After many evictions, in every kind of layer, under every policy."""
    draw, kind = Random(seed), KINDS[seed % len(KINDS)]
    family, batch = draw.choice(FAMILIES) if seed % 2 else "llama", draw.choice([1, 2])
    model, truth = model_of(family), Truth(monkeypatch)
    policy = EVICTIONS[seed // 2 % len(EVICTIONS)] if family == "llama" else "keydiff"
    eviction = small_policy(policy, model.config)
    modes = ["compact", *(["true"] if kind != "int4" and family == "llama" else [])]
    positions = draw.choice(modes)
    cache = kvcap.BudgetCache(
        model.config,
        draw.randint(14, 24),
        draw.randint(3, 8),
        eviction,
        positions=positions,
        kv_dtype=kind,
    ).allocate(batch, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    read(cache, model, 3 + torch.randint(90, (batch, draw.randint(40, 60)), generator=generator))
    assert cache.held <= cache.layout.budget_tokens
    assert truth.attended
    truth.check_slots(cache)


def test_keys_read_by_generate_count_from_all_tokens_read(tokens, monkeypatch):
    """There a block is read at its place in the text, past what is held."""
    model, truth = tiny_model("llama"), Truth(monkeypatch)
    with kvcap.cap(model, 12, 5, kv_dtype="int4") as capped:
        model.generate(tokens(70), max_new_tokens=3, do_sample=False)
        truth.check_slots(capped.cache)
        assert capped.cache.held == 12


@pytest.mark.parametrize("kind", KINDS)
def test_large_rows_are_read_in_pieces(kind, tokens, monkeypatch):
    """Some slots of one head after the other, where many are all read at once."""
    model, reads = tiny_model("llama"), []
    for piece in (pool.PIECE, 1):
        monkeypatch.setattr(pool, "PIECE", piece)
        cache = kvcap.BudgetCache(model.config, 40, 8, kv_dtype=kind)
        read(cache, model, tokens(90, 2))
        (segment,), layer = cache.capped_layers[0].segments, cache.capped_layers[0]
        weights = torch.rand(2, 2, 3, segment.held, generator=torch.Generator().manual_seed(0))
        assert len(list(segment.pieces(segment.held))) == (1 if piece > 1 else 8)
        keys = layer.engine.read_keys(segment)
        reads.append((keys, read_values(segment), weigh_values(segment, weights)))
    for whole, pieces in zip(*reads, strict=True):
        torch.testing.assert_close(whole, pieces)


# Bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", FAMILIES[-1]])
def test_planned_bytes_are_allocated_bytes(family, kind):
    config = config_of(family)
    for dtype, batch, policy in ((torch.float32, 2, "h2o"), (torch.bfloat16, 1, "adakv")):
        eviction = small_policy(policy, config)
        given: dict[str, Any] = {"policy": eviction, "block_size": 8, "kv_dtype": kind}
        plan = kvcap.MemoryPlan.of(config, budget_tokens=24, batch=batch, dtype=dtype, **given)
        cache = kvcap.BudgetCache(
            config, 24, 8, eviction, positions=plan.positions, kv_dtype=kind
        ).allocate(batch, dtype, "cpu")
        assert cache.allocation.nbytes == plan.cache_bytes - plan.sliding_layers
        assert plan.kv_dtype == kind
        assert cache.used_bytes < cache.nbytes


def test_the_dry_run_counts_the_copies_that_attention_reads():
    config = tiny_config("llama", hidden_size=128, head_dim=32)
    plain, less = (
        rehearse_block(config, CacheSettings(2000, 8, "keydiff", kv_dtype=kind), torch.float32)
        for kind in (None, "int8")
    )
    values = 2 * 2008 * 32 * 4  # of two heads
    assert plain + values * 0.8 < less < plain + values * 2.5


# Sessions ---------------------------------------------------------------------------------------


def test_in_a_smaller_cache_the_same_bytes_stay(tokens, tmp_path):
    model, ids = tiny_model("llama"), tokens(84)
    session = runtime_of(model, budget=40, kv_dtype="int4").session(seed=1)
    session.loop.prefill(ids[:, :70])
    session.save(tmp_path / "s")
    small = Session.load(runtime_of(model, budget=16, kv_dtype="int4"), tmp_path / "s")
    assert small.cache.held == 16
    pairs = zip(session.cache.capped_layers, small.cache.capped_layers, strict=True)
    for before, after in pairs:
        (old,), (new,) = before.segments, after.segments
        for k in range(new.heads):
            times = old.positions[0, k].tolist()
            source = [times.index(t) for t in new.positions[0, k].tolist()]
            for name, buffer in new.pool.named().items():
                if name != SHIFT:
                    whole = old.view(old.pool.named()[name])[0, k, source]
                    assert torch.equal(new.view(buffer)[0, k], whole), name
            ranks = new.positions[0, k].argsort().argsort()
            assert torch.equal(new.aux(SHIFT)[0, k], -ranks.int())
    assert small.loop.prefill(ids[:, 70:]).isfinite().all()


@pytest.mark.parametrize(("one", "other"), [("int8", None), (None, "int4"), ("int4", "int8")])
def test_a_session_of_other_slots_is_refused(one, other, tokens, tmp_path):
    model = tiny_model("llama")
    session = runtime_of(model, kv_dtype=one).session(seed=1)
    session.loop.prefill(tokens(30))
    session.save(tmp_path / "s")
    with pytest.raises(SessionFileForeign, match=f"--kv-dtype{f' {one}' if one else ''}"):
        Session.load(runtime_of(model, kv_dtype=other), tmp_path / "s")


# What cannot be ---------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_by_name():
    config = tiny_config("llama")
    with pytest.raises(PlanInfeasible, match=r"kv_dtype='int5'.*int8, int8-int4, int4"):
        kvcap.BudgetCache(config, kv_dtype="int5")
    with pytest.raises(PlanInfeasible, match="kv_dtype='fp3'"):
        kvcap.MemoryPlan.of(config, kv_dtype="fp3")
    with pytest.raises(UnsupportedModel, match="int8-int4"):
        kvcap.BudgetCache(config, positions="true", kv_dtype="int4")
    with pytest.raises(UnsupportedModel, match=r"calidrop.*without the corrector"):
        kvcap.BudgetCache(config, policy=load_policy("calidrop"), kv_dtype="int8")
    with pytest.raises(UnsupportedModel, match="hold latents"):
        kvcap.BudgetCache(config_of("deepseek_v3"), kv_dtype="int8")
    layout = kvcap.BudgetCache(config, kv_dtype="int8-int4").layout
    with pytest.raises(UnsupportedModel, match="two numbers in a byte"):
        replace(layout, shape=replace(layout.shape, head_size=15))


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graphs_can_be_made(kind):
    assert why_unsteady(kvcap.BudgetCache(tiny_config("llama"), kv_dtype=kind)) is None
