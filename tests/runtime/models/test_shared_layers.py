"""Layers that attend to an earlier layer's keys and values (Gemma 3n, Gemma 4), under the cap.

Logits and kept tokens are held to a slow reference, in which a layer evicts when the last of its
readers has attended, and to the uncapped model while tokens fit.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import SIZES, as_cache, in_turn, small_policy
from families import READERS as FAMILIES
from reference import STEPS, ReferenceLayer, Setting
from tools import in_blocks, runtime_of
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvcap
from kvcap import kernels
from kvcap.export.adopted import adopt
from kvcap.export.decoder.spec import layout_for
from kvcap.policies import load_policy
from kvcap.runtime.backends.pytorch.cuda_graphs import why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cache.slots import EagerSlots
from kvcap.runtime.errors import BlockTooLarge, NotExportable, SessionBroken, UnsupportedModel
from kvcap.runtime.models import config as model_config
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import Rotation, rope_of
from kvcap.runtime.session.session import Session

REFERENCE = "slow_shared_reference"
SHARED = ["gemma3n", "gemma4"]
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("keydiff", {}),
    ("snapkv", {"window": 9, "kernel": 5, "pool": "avg"}),  # longer than the block
    ("h2o", {}),
    ("streaming_llm", {"sinks": 2}),
]


def tiny_config(family: str, **changes: Any) -> Any:
    kind = f"{family.split()[0]}_text"
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    return AutoConfig.for_model(kind, **{**SIZES, **FAMILIES[family], **changes})


def tiny_model(family: str, attention: str = "kvcap", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1)
        else:
            torch.nn.init.normal_(weight, 0.0, 0.15)
    return model.eval()


@cache
def uncapped(family: str, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return ids, tiny_model(family, "eager")(ids).logits


# The reference ------------------------------------------------------------------------------------


class SharedReferenceLayer(ReferenceLayer):
    """Evicts, by its own queries, when the last of its readers has attended.

    With `follow`, it evicts what another cache did: what that held after every block, by head.
    """

    def __init__(
        self, setting: Setting, inv_freq: Tensor, index: int, readers: int, follow: Any = None
    ) -> None:
        super().__init__(setting, inv_freq, index)
        self.readers, self.attended, self.due = readers, 0, (0, 0, 0.0)
        self.follow = None if follow is None else iter(follow)

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        own = self.attended == 0
        mine = self.queries
        if not own:
            self.queries = [[query] * (self.seen - query.shape[2]) for _ in range(query.shape[1])]
        out = super().attend(query, scaling)
        if not own:
            self.queries = mine
        self.attended = (self.attended + 1) % self.readers
        if self.attended == 0:
            self.evict_now()
        return out

    def evict(self, group: int, length: int, scaling: float) -> None:
        if self.attended == 0:
            self.due = group, length, scaling

    def evict_now(self) -> None:
        if self.follow is None:
            super().evict(*self.due)
            return
        kept = next(self.follow)
        for k, slots in enumerate(self.heads):
            self.heads[k] = [slot for slot in slots if slot.time in kept[k]]


class SharedReference(Cache):
    def __init__(self, model: Any, setting: Setting, follow: Any = None) -> None:
        config, layers = model.config, []
        own = config.num_hidden_layers - (config.num_kv_shared_layers or 0)
        kinds = config.layer_types
        for i, kind in enumerate(kinds[:own]):
            if kind == "sliding_attention":
                layers.append(DynamicSlidingWindowLayer(config.sliding_window))
                continue
            last = kind not in kinds[i + 1 : own]
            readers = 1 + (kinds[own:].count(kind) if last else 0)
            inv_freq = getattr(model.model.rotary_emb, "full_attention_inv_freq", None)
            if inv_freq is None:  # transformers 4.57
                inv_freq = model.model.rotary_emb.inv_freq
            layer = SharedReferenceLayer(setting, inv_freq, i, readers, follow and follow[i])
            layers.append(layer)
        super().__init__(layers=layers)


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> Any:
    if hasattr(key, "reference"):
        out = key.reference.attend(query, 1.0)
        return out.transpose(1, 2).contiguous(), None
    group, length, slots = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    keys, values = (x.repeat_interleave(group, 1).double() for x in (key, value))
    far = torch.arange(slots - length, slots)[:, None] - torch.arange(slots)
    seen = (far >= 0) & (far < module.sliding_window)
    logits = (query.double() @ keys.mT).masked_fill(~seen, -torch.inf)
    out = (logits.softmax(-1) @ values).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(REFERENCE, _forward)


def parts_of(ids: Tensor, block: int) -> list[Tensor]:
    return [*ids.split(block, 1), *STEPS]


def reference(
    family: str, ids: Tensor, block: int, setting: Setting, follow: Any = None
) -> tuple[Any, Tensor]:
    model = tiny_model(family, REFERENCE)
    made = SharedReference(model, setting, follow)
    with torch.no_grad():
        logits = [
            model(part, **as_cache(made), logits_to_keep=1).logits for part in parts_of(ids, block)
        ]
    return made, torch.cat(logits)[:, -1]


def kept(layer: Any) -> list[list[int]]:
    """Tokens held by every head, in order."""
    heads = [head for s in layer.segments for head in s.positions[0]]
    return [sorted(head.tolist()) for head in heads]


def capped(family: str, ids: Tensor, block: int, setting: Setting, policy: Any = None) -> Any:
    """The cache, its logits, and what each capped layer held after every block."""
    model = tiny_model(family)
    eviction = policy or load_policy(setting.policy, **setting.options).plain()
    held = kvcap.BudgetCache(
        model.config, setting.budget, block, eviction, positions=setting.positions
    )
    loop, logits, history = BlockLoop(model, held), [], []
    for part in parts_of(ids, block):
        logits.append(loop.read(part))
        history.append([kept(layer) for layer in held.capped_layers])
    where = held.layout.shape.capped
    return held, torch.cat(logits), {i: [h[n] for h in history] for n, i in enumerate(where)}


def worst(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


IDS = 3 + torch.randperm(50, generator=torch.Generator().manual_seed(1))[None, :40]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("family", "positions", "policy", "options"), in_turn(
    [(family, positions) for family in FAMILIES for positions in ("compact", "true")], POLICIES, 2,
))  # fmt: skip
def test_logits_and_kept_sets(family, policy, options, positions):
    setting = Setting(policy, 12, positions, options)
    held, logits, _ = capped(family, IDS, 6, setting)
    slow, expected = reference(family, IDS, 6, setting)
    for layer, index in zip(held.capped_layers, held.layout.shape.capped, strict=True):
        assert kept(layer) == [[s.time for s in slots] for slots in slow.layers[index].heads]
    assert worst(logits, expected) <= 1e-4


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("policy", "family", "positions"), in_turn(
    in_turn(["dropkv", "adakv", "criticalkv", "andpro", "cake"], SHARED, 2), ["compact", "true"],
))  # fmt: skip
def test_logits_of_what_is_kept(family, policy, positions):
    """Whatever a policy keeps, in heads and layers of unequal budgets too."""
    setting = Setting(policy, 12, positions)
    eviction = small_policy(policy, tiny_config(family))
    _, logits, history = capped(family, IDS, 6, setting, eviction)
    _, expected = reference(family, IDS, 6, setting, history)
    assert worst(logits, expected) <= 1e-4


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("block", [1, 5, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_uncapped_model_while_tokens_fit(family, block):
    ids, expected = uncapped(family, 60)
    model = tiny_model(family)
    held = kvcap.BudgetCache(model.config, 64, block)
    assert worst(in_blocks(model, held, ids, block), expected) <= 1e-4
    assert held.held == 60


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keydiff-window", "h2o", "adakv"])
@pytest.mark.parametrize("family", SHARED)
def test_kernels_and_batches_compute_the_same(family, policy):
    pytest.importorskip("triton")
    from interpreted import DEVICE

    eviction = small_policy(policy, tiny_config(family))
    ids = torch.cat((IDS[:, :27], IDS[:, :27].flip(1))).to(DEVICE)
    found = []
    for choice, batch in (("triton", ids), ("eager", ids), ("eager", ids[:1])):
        model = tiny_model(family).to(DEVICE)
        held = kvcap.BudgetCache(model.config, 12, 6, eviction)
        with kernels.use(choice):
            loop = BlockLoop(model, held)
            logits = [loop.prefill(batch[:, :24])]
            logits += [loop.read(batch[:, i : i + 1]) for i in range(24, 27)]
        found.append(torch.stack(logits))
    assert worst(found[0], found[1]) <= 1e-4
    assert worst(found[2][:, :1], found[1][:, :1]) <= 1e-4


# Stock attention; generate; cap -------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_the_uncapped_model_while_tokens_fit(family, tokens):
    ids = tokens(30)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 2,
               "attention_mask": torch.ones_like(ids)}  # fmt: skip
    plain = tiny_model(family, "sdpa")
    expected = plain.generate(ids, **as_cache(DynamicCache(config=plain.config)), **options)
    for attention in ("kvcap", "sdpa", "eager"):
        model = tiny_model(family, attention)
        held = kvcap.BudgetCache(model.config, 64, 16)
        got = model.generate(ids, **as_cache(held), prefill_chunk_size=16, **options)
        assert got.tolist() == expected.tolist()
    model = tiny_model(family, "sdpa")
    with kvcap.cap(model, 64, 16):
        assert model.generate(ids, **options).tolist() == expected.tolist()


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_attention_evicts_when_the_next_block_arrives(family, attention):
    """Every reader has attended by then."""
    setting = Setting("streaming_llm", 12, "true", {"sinks": 2})
    model = tiny_model(family, attention)
    eviction = load_policy("streaming_llm", sinks=2)
    held = kvcap.BudgetCache(model.config, 12, 6, eviction)
    with torch.no_grad():
        logits = [
            model(part, **as_cache(held), logits_to_keep=1).logits for part in parts_of(IDS, 6)
        ]
    _, expected = reference(family, IDS, 6, setting)
    assert worst(torch.cat(logits)[:, -1], expected) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cap_reads_long_inputs_block_by_block(family, tokens):
    ids, model = tokens(60), tiny_model(family)
    expected = in_blocks(model, kvcap.BudgetCache(model.config, 16, 8), ids, 8)
    with kvcap.cap(model, 16, 8), torch.no_grad():
        assert worst(model(ids).logits, expected) <= 1e-4
        some = model(ids, logits_to_keep=3).logits  # Gemma 4 leaves out the queries of the others
        last = model(ids, logits_to_keep=3, labels=ids[:, -3:]).logits
    assert worst(some, expected[:, -3:]) <= 1e-4
    assert worst(last, expected[:, -3:]) <= 1e-4


# Positions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_are_the_models_own_and_move_keys(family):
    model = tiny_model(family)
    rotary, shape = model.model.rotary_emb, ModelShape.of(model.config)
    own = getattr(rotary, "full_attention_inv_freq", None)
    own = rotary.inv_freq if own is None else own
    rope = rope_of(model.config)
    torch.testing.assert_close(rope.inv_freq, own, rtol=1e-6, atol=0)
    assert len(own) == shape.head_size // 2
    key = torch.randn(1, 2, 5, shape.head_size)

    def read_at(start: int) -> Tensor:
        angles = (start + torch.arange(5.0))[:, None] * torch.cat((own, own))
        half = torch.cat((-key[..., len(own) :], key[..., : len(own)]), -1)
        return key * angles.cos() + half * angles.sin()

    for start in (0, 100):
        moved = Rotation(own, 64, "cpu").back(read_at(start + 37), torch.full((1, 2, 5), 37))
        error = (moved - read_at(start)).norm() / read_at(start).norm()
        assert error <= 1e-5


def test_proportional_rope_leaves_most_of_a_head_where_it_is():
    rope = rope_of(tiny_config("gemma4"))
    assert rope.kind == "proportional"
    assert rope.inv_freq is not None
    assert (rope.inv_freq > 0).sum() == 4  # a quarter of 16 pairs


# What the cache holds -----------------------------------------------------------------------------


def test_what_layers_are():
    for family in SHARED:
        shape = ModelShape.of(tiny_config(family))
        assert [layer.kind for layer in shape.layers] == ["sliding", "capped"] * 2 + ["shared"] * 4
        assert [layer.reads for layer in shape.layers] == [None] * 4 + [2, 3] * 2
        assert [shape.readers(i) for i in range(4)] == [1, 1, 3, 3]
        assert shape.layers[7].numbers == 0
    assert (shape.kv_heads, shape.head_size) == (2, 32)
    assert shape.layers[0].head_size == 16
    shape = ModelShape.of(tiny_config("gemma4 k=v"))
    assert [(x.kv_heads, x.head_size) for x in shape.layers] == [(2, 16), (1, 32)] * 2
    assert (shape.kv_heads, shape.head_size, shape.groups) == (1, 32, 4)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_what_is_held(family, positions, tokens):
    model = tiny_model(family)
    plan = kvcap.MemoryPlan.of(
        model.config, policy=load_policy("snapkv", window=8), budget_tokens=16, block_size=8,
        dtype=torch.float32, positions=positions, rehearse=True,
    )  # fmt: skip
    held = kvcap.BudgetCache(
        model.config, 16, 8, load_policy("snapkv", window=8), positions=positions
    )
    loop = BlockLoop(model, held)
    loop.prefill(tokens(96))
    assert held.nbytes == plan.cache_bytes
    own = [x for x in held.layout.shape.layers if x.kind != "shared"]
    assert plan.token_bytes + plan.sliding_token_bytes == 8 * sum(
        x.kv_heads * x.head_size for x in own
    )


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "h2o"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_session_goes_on_exactly(family, policy, tokens, tmp_path):
    runtime = runtime_of(tiny_model(family), policy)
    session, ids = runtime.session(seed=1), tokens(70)
    session.loop.prefill(ids[:, :55])
    session.save(tmp_path / "s")
    fork = Session.load(runtime, tmp_path / "s")

    def read_on(one: Any) -> Tensor:
        found = [one.loop.prefill(ids[:, 55:66])]
        found += [one.loop.read(ids[:, i : i + 1]) for i in range(66, 70)]
        return torch.stack(found)

    assert torch.equal(read_on(fork), read_on(session))


@pytest.mark.parametrize("family", SHARED)
def test_eviction_every_few_tokens(family, tokens):
    model, ids = tiny_model(family), tokens(40)
    held = kvcap.BudgetCache(model.config, 16, 8, evict_every=4)
    loop = BlockLoop(model, held)
    loop.prefill(ids[:, :32])
    counts = [loop.read(ids[:, i : i + 1]) is not None and held.held for i in range(32, 35)]
    assert counts == [17, 18, 19]
    with pytest.raises(BlockTooLarge, match="5 fit before the next eviction"), torch.no_grad():
        model(ids[:, :8], **as_cache(held))
    assert held.consistent
    assert held.seen == 35
    loop.prefill(ids[:, :8])  # in two passes
    assert held.held == 16


# Planted faults -----------------------------------------------------------------------------------


def evict_early(monkeypatch: Any) -> None:
    """The layer evicts when it has attended itself, and its readers see what is left."""
    block = EagerSlots.attend

    def early(self: Any, query: Tensor, pending: Any, call: Any) -> Tensor:
        out = block(self, query, pending, call)
        if pending.shown is not None:
            step = pending.shown.step
            self.evict(step, True)
            pending.shown = pending.shown._replace(held=self._held_keys(pending.length))
        return out

    monkeypatch.setattr(EagerSlots, "attend", early)


def observe_readers(monkeypatch: Any) -> None:
    """The policy's window takes in the queries of other layers."""
    again = EagerSlots.again

    def observed(self: Any, query: Tensor, pending: Any, call: Any) -> Tensor:
        self.storage.query_window.append(self._aligned(query, pending.offsets))
        return again(self, query, pending, call)

    monkeypatch.setattr(EagerSlots, "again", observed)


def leave_queries(monkeypatch: Any) -> None:
    """The queries of other layers stay at the positions where they were read."""
    again = EagerSlots.again

    def unaligned(self: Any, query: Tensor, pending: Any, call: Any) -> Tensor:
        back = tuple(-offset for offset in pending.offsets)
        return again(self, self._aligned(query, back), pending, call)

    monkeypatch.setattr(EagerSlots, "again", unaligned)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("fault", [evict_early, observe_readers, leave_queries])
@pytest.mark.parametrize("family", SHARED)
def test_planted_faults_are_seen(family, fault, monkeypatch):
    fault(monkeypatch)
    setting = Setting("snapkv", 12, "compact", {"window": 9, "kernel": 5, "pool": "avg"})
    held, logits, _ = capped(family, IDS, 6, setting)
    slow, expected = reference(family, IDS, 6, setting)
    pairs = zip(held.capped_layers, held.layout.shape.capped, strict=True)
    differ = [kept(x) != [[s.time for s in h] for h in slow.layers[i].heads] for x, i in pairs]
    assert any(differ) or worst(logits, expected) > 1e-2
    if fault is evict_early:
        assert worst(logits[:3], expected[:3]) > 0.1


@pytest.mark.parametrize("family", SHARED)
def test_a_wrong_owner_is_seen(family, monkeypatch, tokens):
    """Layers that are said to read layer 1, and read layer 3."""
    right = model_config.read_layers
    monkeypatch.setattr(
        model_config,
        "read_layers",
        lambda *a: [1 if x == 3 else x for x in right(*a)],
    )
    model = tiny_model(family)
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 16, 8))
    with pytest.raises(UnsupportedModel, match="more layers attend"):
        loop.prefill(tokens(8))


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SHARED)
def test_a_pass_that_failed_half_way(family, tokens, monkeypatch):
    model, ids = tiny_model(family), tokens(24)
    held = kvcap.BudgetCache(model.config, 16, 8)
    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[6].mlp, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(ids[:, :8], **as_cache(held))
    assert not held.consistent
    with pytest.raises(SessionBroken, match="not all layers"), torch.no_grad():
        model(ids[:, 8:16], **as_cache(held))
    held.reset()
    with torch.no_grad():
        model(ids[:, :8], **as_cache(held))
    assert held.consistent


def test_what_cannot_run_is_refused_by_name():
    layers = "layers 4 to 7 read 2 and 3"
    for family in SHARED:
        config = tiny_config(family)
        with pytest.raises(UnsupportedModel, match=rf"attend to them too \({layers}\)"):
            kvcap.BudgetCache(config, 16, 8, "calidrop")
        with pytest.raises(NotExportable, match=layers):
            layout_for(config, CacheSettings(16, 8, load_policy("keydiff")))
        with pytest.raises(UnsupportedModel, match=layers):
            adopt._agree(ModelShape.of(config), SimpleNamespace(nodes=None))
        held = kvcap.BudgetCache(config, 16, 8)
        assert why_unsteady(held) == "layers read the slots of others"
        assert "2 of 8 layers capped" in repr(held)


def test_capped_layers_of_unequal_sizes_are_refused():
    config = tiny_config("gemma4", per_layer_config={1: {"head_dim": 64}, 3: {"head_dim": 32}})
    with pytest.raises(UnsupportedModel, match="2 of 32, 2 of 64"):
        ModelShape.of(config)
