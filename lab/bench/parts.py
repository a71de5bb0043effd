"""Times the parts of a layer's step on a GPU: kvcap's kernels beside torch's, in CUDA graphs.

The shape is one layer of Llama-3.2-3B: 24 query and 8 KV heads of 128, hidden 3,072, bfloat16, one
sequence whose heads are rows of a pool. `n` is the number of slots, or of a product's matrix rows.
Inputs rotate through 256 MiB, so that none is in the GPU's cache. The floor is the time to read all
inputs once at the bandwidth of a sum over 4 GiB, for parts that reading bounds. Peers: `sdpa` is
torch's FlashAttention with grouped heads; `eager` is kvcap's own code without kernels; `cublas` is
torch's matrix product. Reads `budgets` and `repeats`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear as product
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcap import kernels
from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles, quoted
from kvcap.evals.reports import device_name, versions
from kvcap.kernels import linear, pool, token
from kvcap.kernels import rows as row_kernels
from kvcap.kernels.arguments import Pins
from kvcap.lab.bench.gpu import require_cuda
from kvcap.lab.bench.kernels import read_bandwidth, timed
from kvcap.policies import Eviction, Observation
from kvcap.policies.base import Logits, RowRanges, pool_in_time
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.attention.functions import attend_rows
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.cache.row_table import ALIGNED, STEP
from kvcap.runtime.models.rope import Rotation, table_dtype

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, DTYPE = 24, 8, 128, 3072, 8192, torch.bfloat16
ROTATED = 256 * 2**20
CALLS = 20  # calls in one CUDA graph
DEFAULTS = {"budgets": (2048, 8192), "repeats": 20}
COLUMNS = ("work", "n", "tokens", "median_us", "floor_us", "peer", "peer_median_us", "ratio")


@dataclass(frozen=True)
class Part:
    """A part of a step, done by kvcap (`mine`) and a peer (`theirs`) on tensors of `inputs`."""

    work: str
    n: int
    tokens: int  # tokens of the block
    inputs: Callable[[], Any]
    mine: Callable[[Any], Any]
    peer: str
    theirs: Callable[[Any], Any]
    bytes_read: int = 0  # 0: the part is not bounded by reading


def run(options: BenchmarkOptions) -> Result:
    """Time every part, in microseconds.

    Raises:
        ValueError: there is no CUDA device.
    """
    require_cuda()
    bandwidth = read_bandwidth()
    machine = {"device": device_name("cuda"), "versions": versions()}
    rows = []
    with torch.inference_mode():
        for part in _parts(options.budgets):
            inputs = [part.inputs()]
            size = max(1, sum(x.nbytes for x in _tensors(inputs[0])))
            inputs += [part.inputs() for _ in range(min(CALLS, ROTATED // size))]
            mine = _microseconds(part.mine, inputs, options.repeats)
            theirs = _microseconds(part.theirs, inputs, options.repeats)
            rows.append(
                {
                    "work": part.work,
                    "n": part.n,
                    "tokens": part.tokens,
                    **quoted(mine, "us"),
                    "floor_us": part.bytes_read / bandwidth * 1e6 or None,
                    "peer": part.peer,
                    **quoted(theirs, "us", "peer_"),
                    "ratio": theirs["p50"] / mine["p50"],
                    **machine,
                }
            )
    return Result("parts", COLUMNS, rows, {**machine, "read_tb_s": bandwidth / 1e12})


def _parts(budgets: Sequence[int]) -> Iterator[Part]:
    item = DTYPE.itemsize
    for n in budgets:
        for tokens in (1, 128, 512, 1024):
            slots = n + tokens
            yield Part(
                "attention",
                slots,
                tokens,
                partial(_Attention, slots, tokens),
                _Attention.by_rows,
                "sdpa",
                _Attention.sdpa,
                2 * slots * KV_HEADS * SIZE * item if tokens == 1 else 0,
            )
            yield Part(
                "eviction",
                slots,
                tokens,
                partial(_Slots, slots, tokens),
                _Slots.by_kernels,
                "eager",
                _Slots.eagerly,
            )
        yield Part(
            "token",
            n + 1,
            1,
            partial(_Token, n),
            _Token.by_kernels,
            "eager",
            _Token.eagerly,
            2 * n * KV_HEADS * SIZE * item,
        )
        yield Part(
            "token",
            n + 1,
            1,
            partial(_Token, n),
            _Token.by_kernels,
            "unrotated",
            _Token.unrotated,
            2 * n * KV_HEADS * SIZE * item,
        )
        yield Part(
            "pooling",
            n,
            1,
            partial(_scores, n),
            _pooled(pool.pool_in_time),
            "eager",
            _pooled(pool_in_time),
        )
        yield Part(
            "rotation",
            n,
            1,
            partial(_rotation, n),
            _rotated("triton"),
            "eager",
            _rotated("eager"),
            n * KV_HEADS * SIZE * item,
        )
    for rows, columns in ((HIDDEN, HIDDEN), (1024, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
        yield Part(
            f"product with {columns}",
            rows,
            1,
            partial(_row_and_matrix, rows, columns),
            lambda x: linear.matvec(*x),
            "cublas",
            lambda x: product(*x),
            rows * columns * item,
        )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def _rows(slots: int, room: int) -> RowRanges:
    """Make rows for heads that hold `slots` each, with `room` for more behind them."""
    new = partial(torch.full, dtype=torch.int32, device="cuda")
    starts = torch.arange(KV_HEADS + 1, dtype=torch.int32, device="cuda") * (slots + room)
    longest = -(-slots // STEP) * STEP + ALIGNED
    return RowRanges(starts, new((KV_HEADS,), slots), longest)


class _Attention:
    """The queries of a block, and heads whose slots hold it."""

    def __init__(self, slots: int, tokens: int) -> None:
        self.query = _random(1, tokens, HEADS, SIZE).transpose(1, 2)
        self.pool = SlotPool(KV_HEADS * (slots + 9), SIZE, DTYPE, "cuda")
        self.pool.keys.normal_()
        self.pool.values.normal_()
        self.segment = Segment(self.pool, 0, slots, 9, 1, KV_HEADS)
        self.segment.held, self.rows = slots, _rows(slots, 9)

    def by_rows(self) -> Tensor:
        """Attend as the runtime does."""
        return attend_rows(
            self.query, self.pool.keys, self.pool.values, self.rows, Logits(SIZE**-0.5)
        )

    def sdpa(self) -> Tensor:
        """Attend by torch's own operator."""
        return _sdpa(self.query, self.segment.keys, self.segment.values)


def _row_and_matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return _random(1, 1, columns), _random(rows, columns)


def _sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    mask: Any = None
    if query.shape[2] > 1:
        mask = causal_lower_right(query.shape[2], keys.shape[2])
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def _rotation(slots: int) -> tuple[Rotation, Tensor, Tensor]:
    frequencies = 500000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    shift = torch.randint(slots, (1, KV_HEADS, slots), dtype=torch.int32, device="cuda")
    rotation = Rotation(frequencies, slots, torch.device("cuda"), table_dtype(DTYPE))
    return rotation, _random(1, KV_HEADS, slots, SIZE), shift


def _rotated(choice: str) -> Callable[[tuple[Rotation, Tensor, Tensor]], Tensor]:
    def rotate(x: tuple[Rotation, Tensor, Tensor]) -> Tensor:
        rotation, keys, shift = x
        with kernels.use(choice):
            return rotation.back(keys, shift)

    return rotate


def _scores(slots: int) -> tuple[Tensor, Tensor]:
    """Make scores, and positions in random order."""
    positions = torch.stack([torch.randperm(slots, device="cuda") for _ in range(KV_HEADS)])
    return torch.randn(1, KV_HEADS, slots, device="cuda"), positions[None].int()


def _pooled(by: Callable[..., Tensor]) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """Pool over 11 neighbours in time, as DropKV does."""
    return lambda x: by(*x, 11, "max", x[1].shape[-1], 8)


class _Slots:
    """A full layer with a block behind its slots, which evicts as many slots by scores."""

    def __init__(self, slots: int, count: int) -> None:
        side = {"shift": torch.int32}
        self.pool = SlotPool(KV_HEADS * slots, SIZE, DTYPE, "cuda", side)
        self.segment = Segment(self.pool, 0, slots - count, count, 1, KV_HEADS)
        self.segment.held, self.slots, self.count = slots, slots, count
        self.segment.positions.copy_(torch.arange(slots))
        self.eviction, whole = Eviction(KeyDiff()), _rows(slots, 0)
        self.padded = torch.randn(1, KV_HEADS, whole.longest, device="cuda")
        self.scores = self.padded[..., :slots]
        row_pins = [self.eviction.sinks(), self.eviction.recent_tokens]
        self.left = torch.empty_like(whole.lengths)
        self.moved = row_kernels.Pool(
            self.pool.buffers(),
            self.pool.aux["shift"],
            whole,
            torch.tensor([row_pins] * KV_HEADS, dtype=torch.int32, device="cuda"),
            whole.lengths - count,
        )

    def by_kernels(self) -> None:
        """Evict as `RowSlots` does."""
        evict = row_kernels.evict_one if self.count == 1 else row_kernels.evict
        evict(self.padded, Pins(self.slots, ()), self.moved, self.left)

    def eagerly(self) -> None:
        """Evict the same slots without kernels."""
        self.segment.held = self.slots
        segment = self.segment
        obs = Observation(
            segment.keys, segment.values, segment.positions, self.slots, segment.budget
        )
        pinned = self.eviction.pinned(obs)
        evicted = self.eviction.choose(self.scores, pinned, obs, self.count)
        gone = segment.positions.gather(-1, evicted).sort(dim=-1).values
        older = torch.searchsorted(gone, segment.positions.contiguous(), out_int32=True)
        segment.aux("shift").add_(older)
        segment.evict(evicted)


class _Token:
    """A full layer whose keys have shifts, and a token that is not rotated yet."""

    def __init__(self, slots: int) -> None:
        self.rotation, keys, shift = _rotation(slots)
        self.pool = SlotPool(KV_HEADS * (slots + 1), SIZE, DTYPE, "cuda", {"shift": torch.int32})
        self.segment = Segment(self.pool, 0, slots, 1, 1, KV_HEADS)
        self.segment.held, self.slots, self.rows = slots, slots, _rows(slots, 1)
        self.segment.keys.copy_(keys)
        self.segment.values.copy_(_random(*keys.shape))
        self.segment.aux("shift").copy_(shift)
        sizes = HEADS, KV_HEADS, KV_HEADS
        heads = _random(1, 1, sum(sizes), SIZE).transpose(1, 2)
        self.query, self.key, self.value = heads.split(sizes, dim=1)
        self.angles = (_random(1, 1, SIZE), _random(1, 1, SIZE))
        self.time = torch.zeros(1, dtype=torch.int32, device="cuda")

    def by_kernels(self, rotated: bool = True) -> Tensor:
        """Rotate, append and attend as `RowSlots` does."""
        turn = (self.pool.aux["shift"], self.rotation.table) if rotated else None
        return token.attend(
            self.query,
            self.key,
            self.value,
            self.angles,
            self.time,
            self.pool.buffers(),
            SIZE**-0.5,
            turn,
            self.rows,
        )[0]

    def unrotated(self) -> Tensor:
        """Attend by kernels, without rotating the held keys."""
        return self.by_kernels(rotated=False)

    def eagerly(self) -> Tensor:
        """Rotate and append the token, rotate the held keys and attend, without kernels."""
        self.segment.held = self.slots
        with kernels.use("eager"):
            query, key = apply_rotary_pos_emb(self.query, self.key, *self.angles)
            self.segment.append(key, self.value, self.time)
            keys = self.rotation.back(self.segment.keys, self.segment.aux("shift"))
            return _sdpa(query, keys, self.segment.values)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, _Attention | _Slots | _Token):
        return x.pool.buffers()
    return [y for y in x if isinstance(y, Tensor)]


def _microseconds(call: Callable[[Any], Any], inputs: list[Any], repeats: int) -> dict[str, float]:
    """Return percentiles of a call's time within graphs of `CALLS`."""
    for x in inputs[:3]:
        call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in islice(cycle(inputs), CALLS):
            call(x)
    times = timed(lambda _: graph.replay(), [None], repeats)
    return percentiles([ms / CALLS * 1e3 for ms in times])
