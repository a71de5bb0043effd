"""CaliDrop's kernels against its eager code: on CUDA, else in triton's interpreter."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401
from torch import Tensor

from kvcap import kernels
from kvcap.kernels import calidrop as kernel
from kvcap.policies import Observation, load_policy
from kvcap.runtime.cache.evicted_store import EvictedStore
from kvcap.runtime.cache.pool import SHIFT, Segment, SlotPool
from kvcap.runtime.models.rope import Rotation

THETAS = {"theta1": 0.1, "theta2": 0.3}  # of random queries, some do each of the three


@dataclass(frozen=True)
class Case:
    """Sizes of a layer."""

    batch: int
    kv_heads: int
    group: int
    size: int
    budget: int
    block: int
    kept: int  # evicted tokens
    softcap: float | None = None
    compact: bool = True
    several: bool = False  # a segment for every head

    def __str__(self) -> str:
        return "-".join(str(x) for x in vars(self).values())


CASES = (
    Case(1, 1, 1, 64, 9, 1, 5),
    Case(2, 2, 3, 64, 20, 7, 12),
    Case(1, 2, 2, 80, 33, 40, 30, softcap=3.0),  # several tiles of queries
    Case(1, 3, 2, 64, 12, 5, 40, compact=False, several=True),
    Case(2, 2, 1, 128, 18, 18, 6, several=True),
)


class Layer:
    """A layer's segments, and what is kept of what they evict."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        c, new = case, torch.zeros
        capacity = c.budget + c.block
        rows = c.batch * c.kv_heads
        moved = {SHIFT: torch.int32} if c.compact else {}
        pool = SlotPool(rows * capacity, c.size, dtype, DEVICE, moved, new)
        places = [(0, 0, c.batch, c.kv_heads)]
        if c.several:
            places = [(b, k, 1, 1) for b in range(c.batch) for k in range(c.kv_heads)]
        self.segments, start = list[Segment](), 0
        for row, head, b, k in places:
            segment = Segment(
                pool, start, c.budget, c.block, b, k, row=row, head=head, layer_heads=c.kv_heads
            )
            self.segments.append(segment)
            start += segment.slots
        self.rotation = None
        if c.compact:
            inv_freq = 10000.0 ** -(torch.arange(0, c.size, 2) / c.size)
            self.rotation = Rotation(inv_freq, 4 * capacity, DEVICE)
        corrector = load_policy("calidrop", calibration_size=c.kept, **THETAS).corrector
        assert corrector is not None
        self.store = EvictedStore(corrector, self.segments, c.kv_heads * c.group, self.rotation)
        self.seen = 0

    def read(self, case: Case, inputs: tuple[Tensor, ...]) -> Tensor:
        """Append a block, attend to it, and give up what is above the budget."""
        keys, values, query, scores = inputs
        length = keys.shape[2]
        times = self.seen + torch.arange(length, dtype=torch.int32, device=DEVICE)
        self.seen, out = self.seen + length, torch.empty_like(query)
        for i, s in enumerate(self.segments):
            s.append(s.rows_of(keys), s.rows_of(values), times)
            held = s.keys if self.rotation is None else self.rotation.back(s.keys, s.aux(SHIFT))
            given = held, 0.3, case.softcap
            s.rows_of(out).copy_(self.store.attend(i, s, s.rows_of(query), *given)[0])
            if (count := s.held - s.budget) <= 0:
                continue
            worth = s.rows_of(scores)[..., : s.held]
            slots = worth.topk(count, largest=False).indices
            obs = Observation(held, s.values, s.positions, self.seen, s.budget, scaling=0.3,
                              softcap=case.softcap)  # fmt: skip
            if self.rotation is not None:
                gone = s.positions.gather(2, slots).sort().values
                older = torch.searchsorted(gone, s.positions.contiguous(), out_int32=True)
                s.aux(SHIFT).add_(older)
            self.store.take(i, s, slots, worth, obs)
            s.compact(slots)
        return out


def blocks(case: Case, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Prompts in whole blocks and in shorter ones, and tokens."""
    c, g = case, torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE, dtype)  # noqa: E731
    found = []
    for length in (c.budget, *[c.block] * 4, *[1] * 9, c.block, 1):
        for part in [min(length, c.block)] * -(-length // c.block):
            # Transformers hands queries over as a transposed view.
            query = rand(c.batch, part, c.kv_heads * c.group, c.size).transpose(1, 2)
            scores = torch.rand(c.batch, c.kv_heads, c.budget + 2 * c.block, generator=g)
            key, value = (rand(c.batch, c.kv_heads, part, c.size) for _ in range(2))
            found.append((key, value, query, scores.to(DEVICE)))
    return found


def in_time(place: Segment) -> list[Tensor]:
    """All that is held, row by row in the order of the text."""
    order, found = place.positions.argsort(), list[Tensor]()
    for x in place.buffers():
        index = order if x.dim() == 3 else order[..., None].expand(x.shape)
        found.append(x.gather(2, index))
    return found


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_conversation_is_the_eager_codes(case, dtype):
    """Outputs, what is remembered, which tokens are kept, and how often was recomputed."""
    mine, its = Layer(case, dtype), Layer(case, dtype)
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    for inputs in blocks(case, dtype):
        with kernels.use("triton"):
            found = mine.read(case, inputs)
        with kernels.use("eager"):
            expected = its.read(case, inputs)
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, **close)
        for a, b in zip(mine.store.evicted, its.store.evicted, strict=True):
            assert a.held == b.held
            for ours, theirs in zip(in_time(a), in_time(b), strict=True):
                assert torch.equal(ours, theirs)
        if dtype == torch.bfloat16:  # a cosine next to a threshold may fall on either side
            for name, ours in mine.store.named().items():
                ours.copy_(its.store.named()[name])
            for a, b in zip(mine.segments, its.segments, strict=True):
                a.positions.copy_(b.positions)
            continue
        for name, ours in mine.store.remembered.items():
            torch.testing.assert_close(ours, its.store.remembered[name], **close)
        assert mine.store.counts == its.store.counts
    steps, anew = mine.store.counts
    assert 0 < anew < steps


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_corrections_by_the_formula(tokens, dtype):
    """Query by query in float64, with a remembered one that some are close to."""
    g = torch.Generator().manual_seed(tokens)
    B, H, D = 2, 3, 80
    rand = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE)  # noqa: E731
    whole = [rand(B, H + 2, 1, D).to(dtype), rand(B, H + 2, 1, D), rand(B, H + 2, 1)]
    whole[2][1, 2] = float("-inf")
    known = [x[:, 1 : 1 + H] for x in whole]  # heads of a layer that has more
    counts = torch.zeros(B, H + 2, 2, dtype=torch.int64, device=DEVICE)
    mixed = known[0].float() * torch.linspace(0, 3, tokens, device=DEVICE)[:, None]
    query = (mixed + rand(B, H, tokens, D))[:, :, torch.randperm(tokens, generator=g)].to(dtype)
    held, fresh = (
        (rand(B, tokens, H, D).transpose(1, 2).to(dtype), rand(B, H, tokens)) for _ in range(2)
    )
    before, base = [x.clone() for x in known], held[0].clone()
    out = kernel.correct(query, held, fresh, tuple(known), counts[:, 1 : 1 + H], 0.4, 0.7)
    assert out.data_ptr() == held[0].data_ptr()
    for b in range(B):
        for h in range(H):
            q, o, lse = (x[b, h].double() for x in before)
            asked = []
            for t in range(tokens):
                rho = torch.cosine_similarity(query[b, h, t].double(), q[0], dim=0)
                anew, expected = bool(rho < 0.4) or bool(lse.isneginf()), base[b, h, t].double()
                if anew:
                    asked.append(t)
                    o_t, lse_t = fresh[0][b, h, t].double(), fresh[1][b, h, t].double()
                else:
                    o_t, lse_t = o[0], lse[0]
                if anew or rho > 0.7:
                    share = torch.sigmoid(lse_t - held[1][b, h, t].double())
                    expected = expected + share * (o_t - expected)
                close = 1e-5 if dtype == torch.float32 else 0.02
                torch.testing.assert_close(out[b, h, t].double(), expected, rtol=close, atol=close)
            at = asked[-1] if asked else None
            new = before if at is None else [query, fresh[0], fresh[1]]
            for was, now, x in zip(before, known, new, strict=True):
                one = was[b, h, 0] if at is None else x[b, h, at]
                assert torch.equal(now[b, h, 0], one.to(now.dtype))
            grown = [1, len(asked)] if tokens == 1 else [0, 0]
            assert counts[b, 1 + h].tolist() == grown
    for i in (0, H + 1):
        assert not counts[:, i].any()


def test_nothing_known_is_not_added_to():
    """Where nothing is remembered, evicted tokens leave it so."""
    known = torch.ones(1, 2, 1, 64, device=DEVICE), torch.ones(1, 2, 1, 64, device=DEVICE)
    lse = torch.tensor([[[float("-inf")], [1.0]]], device=DEVICE)
    before = copy.deepcopy((*known, lse))
    keys = torch.ones(1, 2, 4, 64, device=DEVICE)
    slots = torch.tensor([[[3, 1]] * 2], dtype=torch.int32, device=DEVICE)
    kernel.remember((*known, lse), keys, 3 * keys, slots, 0.1, None)
    assert torch.equal(lse[0, 0], before[2][0, 0])
    assert torch.equal(known[1][0, 0], before[1][0, 0])
    total = torch.tensor([1.0, 6.4, 6.4]).logsumexp(0)
    torch.testing.assert_close(lse[0, 1, 0].cpu(), total)
    share = float((1 - total).exp())
    expected = torch.full((1, 64), share + 3 * (1 - share))
    torch.testing.assert_close(known[1][0, 1].cpu(), expected)


def test_what_is_covered():
    query, keys = torch.zeros(1, 2, 1, 64, device=DEVICE), torch.zeros(1, 1, 4, 64, device=DEVICE)
    assert kernel.covers(query, keys)
    assert not kernel.covers(query, keys.half())
    assert not kernel.covers(query.double(), keys.double())
    assert not kernel.covers(query, keys.mT.contiguous().mT)
    wide = torch.zeros(1, 1, 4, 512, device=DEVICE)
    assert not kernel.covers(wide, wide)
    assert kernel.covers_taking(1024)
    assert not kernel.covers_taking(1025)
