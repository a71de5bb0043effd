"""Split decode attention: on CUDA where there is one, else in triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from interpreted import DEVICE, multiprocessors, pytestmark, unwritten  # noqa: F401
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from twins import DTYPES, assert_as_near

from kvcap.kernels import decode

pytestmark = [pytestmark, pytest.mark.usefixtures("unwritten", "multiprocessors")]


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

    def eager(self) -> Tensor:
        """In the tensors' own precision."""
        if self.case.softcap is not None:
            return answer(self, self.query.dtype)
        group = self.case.group
        keys, values = (x.repeat_interleave(group, 1) for x in (self.keys, self.values))
        mask = visible(self.case.tokens, keys.shape[2])
        return scaled_dot_product_attention(self.query, keys, values, mask, scale=self.scaling)


def visible(tokens: int, slots: int) -> Tensor:
    return torch.ones(tokens, slots, dtype=torch.bool, device=DEVICE).tril(slots - tokens)


def logits(inputs: Inputs, dtype: torch.dtype, own: bool = True) -> Tensor:
    """The formula's, which hide the tokens behind a query among a block's own. [B, H, T, n]."""
    keys = inputs.keys.to(dtype).repeat_interleave(inputs.case.group, 1)
    z, cap = inputs.query.to(dtype) @ keys.mT * inputs.scaling, inputs.case.softcap
    z = z if cap is None else cap * torch.tanh(z / cap)
    return z.masked_fill(~visible(*z.shape[-2:]), float("-inf")) if own else z


def answer(inputs: Inputs, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """The formula's; a sink of each head is a logit without a value."""
    values = inputs.values.to(dtype).repeat_interleave(inputs.case.group, 1)
    z = logits(inputs, dtype)
    if sinks is not None:
        z = torch.cat((z, sinks.to(dtype)[:, None, None].expand(*z.shape[:-1], 1)), -1)
    return z.softmax(-1)[..., : values.shape[2]] @ values


def check(out: Tensor, inputs: Inputs) -> None:
    assert_as_near(out, answer(inputs, torch.float64), inputs.eager(), slack=5e-7)


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
    close = 1e-5 if dtype == torch.float32 else 2e-2
    expected = logits(inputs, torch.float64, own).logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, rtol=close, atol=close)
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


@pytest.mark.parametrize(("tokens", "dtype", "softcap", "sinks"), [
    (1, torch.float32, 8.0, None), (3, torch.float32, 8.0, None), (1, torch.bfloat16, 8.0, None),
    (3, torch.bfloat16, 8.0, None), (1, torch.float32, None, [0.5, -1.0, 2.0, 1.5, 0.0, 3.0]),
], ids=str)  # fmt: skip
def test_heads_that_hold_unequally_many_slots(tokens, dtype, softcap, sinks):
    """Each in its place in one pool, each with spare slots behind it."""
    held = [tokens, 70, 33, 101]  # of B = 2, K = 2
    heads = [Inputs(Case(1, 1, 3, tokens, n, 64, softcap), dtype, n) for n in held]
    # A head's whole row of its own pool, spare slots and all.
    whole = lambda x: x.as_strided((x.shape[2] + 5, *x.shape[3:]), x.stride()[2:])  # noqa: E731
    keys, values = (torch.cat([whole(getattr(h, n)) for h in heads]) for n in ("keys", "values"))
    starts = torch.tensor([0, *(n + 5 for n in held[:-1])]).cumsum(0).int().to(DEVICE)
    query = torch.cat([h.query for h in heads]).view(2, 6, tokens, 64)
    assert decode.covers(query, keys, values, kv_heads=2)
    sinks = None if sinks is None else torch.tensor(sinks, device=DEVICE)
    lengths = torch.tensor(held).int().to(DEVICE)
    given = query, keys, values, starts, lengths, heads[0].scaling
    for longest in (None, 101):
        out = decode.attend_ragged(*given, softcap=softcap, sinks=sinks, max_length=longest)
        for i, (head, inputs) in enumerate(
            zip(out.reshape(4, 1, 3, tokens, 64), heads, strict=True)
        ):
            if sinks is None:
                check(head, inputs)
            else:
                expected = answer(inputs, torch.float64, sinks.view(2, 3)[i % 2])
                torch.testing.assert_close(head.double(), expected, rtol=1e-5, atol=1e-5)


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
    out, expected = inputs.attend(sinks=sinks), answer(inputs, torch.float64, sinks)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32 and sink < 100:
        none = answer(inputs, torch.float64, torch.zeros_like(sinks))
        assert (out - none).abs().max() > 1e-4  # a zero sink is another


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
