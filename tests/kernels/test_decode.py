"""Split decode attention: on CUDA where there is one, else in triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcap.kernels import decode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """Sizes of an attention."""

    batch: int
    kv_heads: int
    group: int
    tokens: int
    slots: int
    size: int
    softcap: float | None = None
    processors: int = 4  # the more, the shorter the parts

    def __str__(self) -> str:
        return "-".join(str(x) for x in vars(self).values())


CASES = (
    Case(1, 1, 1, 1, 1, 64),  # one slot
    Case(1, 2, 3, 1, 2, 128),  # a tile that is nearly empty
    Case(2, 2, 2, 1, 65, 64),
    Case(1, 2, 4, 2, 96, 80, softcap=5.0),
    Case(1, 1, 8, 3, 161, 96),
    Case(1, 1, 3, 4, 300, 128, processors=1),  # several tiles in a part
    Case(1, 2, 1, 1, 130, 80),
    Case(1, 1, 5, 1, 40, 128, softcap=3.0),
    Case(1, 1, 7, 4, 36, 256),
    Case(3, 1, 6, 1, 200, 64, processors=1),
    Case(1, 1, 2, 16, 40, 64),  # its first tokens unseen by the last part
    Case(1, 2, 3, 50, 170, 64, processors=1),  # several programs' rows, one part
    Case(2, 1, 3, 70, 90, 128),  # several of both
    Case(1, 1, 4, 33, 133, 32, softcap=4.0),
)


class Inputs:
    """Random queries and a pool [B, K, n + 5, D] whose spare slots hold NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, seed: int = 0) -> None:
        c, g = case, torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE, dtype)  # noqa: E731
        self.case, self.scaling = case, case.size**-0.5 * 1.3
        # Transformers hands queries over as a transposed view.
        self.query = rand(c.batch, c.tokens, c.kv_heads * c.group, c.size).transpose(1, 2)
        pools = [rand(c.batch, c.kv_heads, c.slots + 5, c.size) for _ in range(2)]
        for pool in pools:
            pool[:, :, c.slots :] = float("nan")
        self.keys, self.values = (pool[:, :, : c.slots] for pool in pools)

    def attend(self, **changed) -> Tensor:
        arguments = {
            "query": self.query,
            "keys": self.keys,
            "values": self.values,
            "scaling": self.scaling,
            "softcap": self.case.softcap,
        }
        if self.case.tokens <= decode.MOST_TOKENS:
            assert decode.covers(self.query, self.keys, self.values)
        return decode.attend(**{**arguments, **changed})

    def truth(self) -> Tensor:
        return plain(self.query.double(), self.keys.double(), self.values.double(), self)

    def eager(self) -> Tensor:
        """In the tensors' own precision."""
        if self.case.softcap is not None:
            return plain(self.query, self.keys, self.values, self)
        group = self.case.group
        keys, values = (x.repeat_interleave(group, 1) for x in (self.keys, self.values))
        mask = visible(self.case.tokens, keys.shape[2])
        return scaled_dot_product_attention(self.query, keys, values, mask, scale=self.scaling)


def visible(tokens: int, slots: int) -> Tensor:
    return torch.ones(tokens, slots, dtype=torch.bool, device=DEVICE).tril(slots - tokens)


def plain(query: Tensor, keys: Tensor, values: Tensor, inputs: Inputs) -> Tensor:
    """The formula."""
    keys, values = (x.repeat_interleave(inputs.case.group, 1) for x in (keys, values))
    z = query @ keys.mT * inputs.scaling
    if inputs.case.softcap is not None:
        z = inputs.case.softcap * torch.tanh(z / inputs.case.softcap)
    z = z.masked_fill(~visible(z.shape[-2], z.shape[-1]), float("-inf"))
    return z.softmax(-1) @ values


def check_lse(lse: Tensor, inputs: Inputs, own: bool) -> None:
    """Against the formula in float64."""
    keys = inputs.keys.double().repeat_interleave(inputs.case.group, 1)
    z = inputs.query.double() @ keys.mT * inputs.scaling
    if inputs.case.softcap is not None:
        z = inputs.case.softcap * torch.tanh(z / inputs.case.softcap)
    if own:
        z = z.masked_fill(~visible(*z.shape[-2:]), float("-inf"))
    close = 1e-5 if inputs.query.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(lse.double(), z.logsumexp(-1), rtol=close, atol=close)


def check(out: Tensor, inputs: Inputs) -> None:
    """At most twice as wrong as eager low precision."""
    truth = inputs.truth()
    assert out.shape == inputs.query.shape
    assert out.dtype == inputs.query.dtype
    floor = torch.finfo(out.dtype).eps * truth.abs().max() / 4 + 5e-7
    # The interpreter cuts to bfloat16 where everything else rounds: twice the error.
    factor = 4 if DEVICE == "cpu" and out.dtype == torch.bfloat16 else 2
    allowed = factor * (inputs.eager().double() - truth).abs().max() + floor
    assert (out.double() - truth).abs().max() <= allowed  # NaN never passes


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What nothing wrote is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


@pytest.fixture(autouse=True)
def _processors(monkeypatch, request):
    case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
    count = case.processors if case else 4
    monkeypatch.setattr(decode, "multiprocessors", lambda device: count)


@pytest.mark.slow(keep=28)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_as_near_the_truth_as_eager(case, dtype):
    inputs = Inputs(case, dtype)
    out = inputs.attend()
    check(out, inputs)
    assert out.transpose(1, 2).is_contiguous()  # as the output projection wants it
    if dtype == torch.bfloat16:
        assert torch.equal(out, inputs.attend())


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_log_sum_exp_comes_along(case, dtype, own):
    """Of a block's own tokens and those before, or of older ones alone, all of which it sees."""
    inputs = Inputs(case, dtype)
    given = inputs.query, inputs.keys, inputs.values, inputs.scaling, case.softcap
    out, lse = decode.attend_with_lse(*given, own)
    check_lse(lse, inputs, own)
    if own:
        assert torch.equal(out, inputs.attend())
    else:
        every, group = inputs.query.transpose(1, 2).flatten(0, 1)[:, :, None], case.tokens
        keys, values = (x.repeat_interleave(group, 0) for x in (inputs.keys, inputs.values))
        each = decode.attend(every, keys, values, inputs.scaling, case.softcap)  # one by one
        each = each.view(case.batch, case.tokens, -1, case.size).transpose(1, 2)
        torch.testing.assert_close(out, each, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", [Case(1, 1, 1, 1, 8400, 64, processors=999)], ids=str)
def test_more_parts_than_are_merged_at_once(case):
    inputs = Inputs(case, torch.float16)
    check(inputs.attend(), inputs)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_that_hold_unequally_many_slots(dtype, tokens):
    """Each in its place in one pool, each with spare slots behind it."""
    held = [tokens, 70, 33, 101]  # of B = 2, K = 2
    heads = [Inputs(Case(1, 1, 3, tokens, n, 64, 8.0), dtype, n) for n in held]
    # A head's whole row of its own pool, spare slots and all.
    whole = lambda x: x.as_strided((x.shape[2] + 5, *x.shape[3:]), x.stride()[2:])  # noqa: E731
    keys, values = (torch.cat([whole(getattr(h, n)) for h in heads]) for n in ("keys", "values"))
    starts = torch.tensor([0, *(n + 5 for n in held[:-1])]).cumsum(0).int().to(DEVICE)
    query = torch.cat([h.query for h in heads]).view(2, 6, tokens, 64)
    assert decode.covers(query, keys, values, kv_heads=2)
    for longest in (None, 101):
        out = decode.attend_ragged(
            query,
            keys,
            values,
            starts,
            torch.tensor(held).int().to(DEVICE),
            heads[0].scaling,
            softcap=8.0,
            max_length=longest,
        )
        for head, inputs in zip(out.reshape(4, 1, 3, tokens, 64), heads, strict=True):
            check(head, inputs)


@pytest.mark.parametrize(
    ("blocks", "tiles", "expected"),
    [
        (33, 8, 1),  # a program for each block
        (130, 48, 26),  # five parts of a tile fit at once, six do not
        (40, 192, 40),  # whole tiles: they are all under way, and nothing is merged
        (136, 192, 34),  # three full rounds instead of one in which half have two programs' time
        (144, 384, 72),
        (1, 3000, 1),
        (0, 8, 1),
    ],
)
def test_parts_are_such_that_all_are_done_the_soonest(blocks, tiles, expected, monkeypatch):
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    device = torch.device(DEVICE)
    assert decode.blocks_in_part(blocks, tiles, decode.tile_of(256), device) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [-3.0, 1.0, 200.0])
@pytest.mark.parametrize("case", [CASES[i] for i in (0, 2, 3, 6, 9, 11, 12)], ids=str)
def test_sink_logits(case, sink, dtype):
    """Beside those of slots, in one part and in many; far above them nothing is left."""
    inputs = Inputs(case, dtype)
    heads = case.kv_heads * case.group
    sinks = torch.linspace(sink, sink + 2, heads).to(DEVICE, dtype)
    out, expected = inputs.attend(sinks=sinks), plain_with_sinks(inputs, sinks)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32 and sink < 100:
        none = plain_with_sinks(inputs, torch.zeros_like(sinks))
        assert (out - none).abs().max() > 1e-4  # a zero sink is another


def plain_with_sinks(inputs: Inputs, sinks: Tensor) -> Tensor:
    """A column of logits without a value."""
    group, cap = inputs.case.group, inputs.case.softcap
    keys, values = (x.double().repeat_interleave(group, 1) for x in (inputs.keys, inputs.values))
    z = inputs.query.double() @ keys.mT * inputs.scaling
    z = z if cap is None else cap * torch.tanh(z / cap)
    z = z.masked_fill(~visible(z.shape[-2], z.shape[-1]), float("-inf"))
    column = sinks.double()[:, None, None].expand(*z.shape[:-1], 1)
    return torch.cat((z, column), -1).softmax(-1)[..., :-1] @ values


def test_sink_logits_of_heads_that_hold_unequally_many_slots():
    held, sinks = [3, 70, 33, 101], torch.tensor([0.5, -1.0, 2.0, 1.5, 0.0, 3.0], device=DEVICE)
    heads = [Inputs(Case(1, 1, 3, 1, n, 64), torch.float32, n) for n in held]
    whole = lambda x: x.as_strided((x.shape[2] + 5, *x.shape[3:]), x.stride()[2:])  # noqa: E731
    keys, values = (torch.cat([whole(getattr(h, n)) for h in heads]) for n in ("keys", "values"))
    starts = torch.tensor([0, *(n + 5 for n in held[:-1])]).cumsum(0).int().to(DEVICE)
    out = decode.attend_ragged(
        torch.cat([h.query for h in heads]).view(2, 6, 1, 64),
        keys,
        values,
        starts,
        torch.tensor(held).int().to(DEVICE),
        heads[0].scaling,
        sinks=sinks,
    )
    for i, (head, inputs) in enumerate(zip(out.reshape(4, 1, 3, 1, 64), heads, strict=True)):
        expected = plain_with_sinks(inputs, sinks.view(2, 3)[i % 2])
        torch.testing.assert_close(head.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_is_covered():
    def covered(tokens=1, size=64, dtype=torch.bfloat16, heads=4, kv_heads=2):
        query = torch.zeros(1, heads, tokens, size, dtype=dtype, device=DEVICE)
        keys = torch.zeros(1, kv_heads, 20, size, dtype=dtype, device=DEVICE)
        return decode.covers(query, keys, keys)

    assert covered()
    assert covered(tokens=16, size=256)
    assert covered(tokens=96, size=128)
    assert not covered(tokens=96, size=256)
    assert not covered(tokens=96, size=128, dtype=torch.float32)
    assert not covered(size=512)
    assert not covered(dtype=torch.float64)
    strided = torch.zeros(1, 2, 64, 20, device=DEVICE).mT
    assert not decode.covers(torch.zeros(1, 2, 1, 64, device=DEVICE), strided, strided)


def test_a_cpu_is_covered_only_in_the_interpreter(monkeypatch):
    x = torch.zeros(1, 1, 1, 64)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert decode.covers(x, x, x)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not decode.covers(x, x, x)
