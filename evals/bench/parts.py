"""What a layer's step is made of on a GPU: kvcap's kernels beside torch's, each within CUDA graphs.

The shape is a layer of Llama-3.2-3B's: 24 query and 8 KV heads of 128, hidden 3,072, bfloat16, one
sequence. `n` is the slots held, or of a product the matrix's rows. Inputs rotate through 256 MiB,
so that none is found in the chip's cache. The floor is one read of what must be read at the
bandwidth of a sum over 4 GiB, where reading is what bounds it. Peers: `sdpa` is torch's
FlashAttention with grouped heads; `eager` kvcap's own code without kernels; `cublas` torch's
product. Reads `budgets` and `repeats`.
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
from kvcap.evals.bench.gpu import require_cuda
from kvcap.evals.bench.kernels import read_bandwidth, timed
from kvcap.evals.measure import percentiles, quoted
from kvcap.evals.reports import device_name, versions
from kvcap.kernels import decode, evict, linear, pool, token
from kvcap.policies import Eviction, Observation
from kvcap.policies.base import pool_in_time
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.models.rope import Rotation, table_dtype

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, DTYPE = 24, 8, 128, 3072, 8192, torch.bfloat16
ROTATED = 256 * 2**20
CALLS = 20  # of a graph
DEFAULTS = {"budgets": (2048, 8192), "repeats": 20}
COLUMNS = ("work", "n", "tokens", "median_us", "floor_us", "peer", "peer_median_us", "ratio")


@dataclass(frozen=True)
class Part:
    """Something that a step does, and who else could do it. `inputs` makes one set of tensors."""

    work: str
    n: int
    tokens: int  # of the block
    inputs: Callable[[], Any]
    mine: Callable[[Any], Any]
    peer: str
    theirs: Callable[[Any], Any]
    bytes_read: int = 0  # 0: reading is not what bounds it


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
            rows.append({
                "work": part.work, "n": part.n, "tokens": part.tokens,
                **quoted(mine, "us"),
                "floor_us": part.bytes_read / bandwidth * 1e6 or None, "peer": part.peer,
                **quoted(theirs, "us", "peer_"),
                "ratio": theirs["p50"] / mine["p50"], **machine,
            })  # fmt: skip
    return Result("parts", COLUMNS, rows, {**machine, "read_tb_s": bandwidth / 1e12})


def _parts(budgets: Sequence[int]) -> Iterator[Part]:
    item = DTYPE.itemsize
    for n in budgets:
        for tokens in (1, 128, 512, 1024):
            slots = n + tokens
            yield Part(
                "attention", slots, tokens, partial(_attention, slots, tokens),
                _attend, "sdpa", _sdpa,
                2 * slots * KV_HEADS * SIZE * item if tokens == 1 else 0,
            )  # fmt: skip
            yield Part(
                "eviction", slots, tokens, partial(_Slots, slots, tokens),
                _Slots.by_kernels, "eager", _Slots.eagerly,
            )  # fmt: skip
        yield Part(
            "token", n + 1, 1, partial(_Token, n), _Token.by_kernels, "eager", _Token.eagerly,
            2 * n * KV_HEADS * SIZE * item,
        )  # fmt: skip
        yield Part(
            "token", n + 1, 1, partial(_Token, n), _Token.by_kernels,
            "unrotated", _Token.unrotated, 2 * n * KV_HEADS * SIZE * item,
        )  # fmt: skip
        yield Part(
            "pooling", n, 1, partial(_scores, n), _pooled(pool.pool_in_time),
            "eager", _pooled(pool_in_time),
        )  # fmt: skip
        yield Part(
            "rotation", n, 1, partial(_rotation, n), _rotated("triton"), "eager",
            _rotated("eager"), n * KV_HEADS * SIZE * item,
        )  # fmt: skip
    for rows, columns in ((HIDDEN, HIDDEN), (1024, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
        yield Part(
            f"product with {columns}", rows, 1,
            partial(_row_and_matrix, rows, columns),
            lambda x: linear.matvec(*x), "cublas", lambda x: product(*x), rows * columns * item,
        )  # fmt: skip


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def _attention(slots: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    query = _random(1, tokens, HEADS, SIZE).transpose(1, 2)
    keys, values = (_random(1, KV_HEADS, slots + 9, SIZE)[:, :, :slots] for _ in range(2))
    return query, keys, values


def _row_and_matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return _random(1, 1, columns), _random(rows, columns)


def _attend(x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    query, keys, values = x
    return decode.attend(query, keys, values, SIZE**-0.5)


def _sdpa(x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    query, keys, values = x
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
    """Scores and positions in no order."""
    places = torch.stack([torch.randperm(slots, device="cuda") for _ in range(KV_HEADS)])
    return torch.randn(1, KV_HEADS, slots, device="cuda"), places[None].int()


def _pooled(by: Callable[..., Tensor]) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """Over 11 neighbours in time, as DropKV does."""
    return lambda x: by(*x, 11, "max", x[1].shape[-1], 8)


class _Slots:
    """A full layer with a block behind, its scores, and what evicts as many."""

    def __init__(self, slots: int, count: int) -> None:
        side = {"shift": torch.int32}
        self.pool = SlotPool(KV_HEADS * slots, SIZE, DTYPE, "cuda", side)
        self.segment = Segment(self.pool, 0, slots - count, count, 1, KV_HEADS)
        self.segment.held, self.slots, self.count = slots, slots, count
        self.segment.positions.copy_(torch.arange(slots))
        self.scores = torch.randn(1, KV_HEADS, slots, device="cuda")
        self.eviction = Eviction(KeyDiff())

    def by_kernels(self) -> None:
        """As `runtime/cache/evictor.py` does."""
        self.segment.held = self.slots
        shift, buffers = self.segment.aux("shift"), self.segment.buffers()
        pins = evict.Pins(self.eviction.sinks(), self.eviction.recent_tokens, self.slots, ())
        evict.give_up(self.scores, self.segment.positions, self.count, pins, shift, buffers)

    def eagerly(self) -> None:
        """Likewise, without kernels."""
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
        segment.compact(evicted)


class _Token:
    """A full layer whose keys have moved, and a token that is yet to be rotated."""

    def __init__(self, slots: int) -> None:
        self.rotation, keys, shift = _rotation(slots)
        self.pool = SlotPool(KV_HEADS * (slots + 1), SIZE, DTYPE, "cuda", {"shift": torch.int32})
        self.segment = Segment(self.pool, 0, slots, 1, 1, KV_HEADS)
        self.segment.held, self.slots = slots, slots
        self.segment.keys.copy_(keys)
        self.segment.values.copy_(_random(*keys.shape))
        self.segment.aux("shift").copy_(shift)
        sizes = HEADS, KV_HEADS, KV_HEADS
        heads = _random(1, 1, sum(sizes), SIZE).transpose(1, 2)
        self.query, self.key, self.value = heads.split(sizes, dim=1)
        self.angles = (_random(1, 1, SIZE), _random(1, 1, SIZE))
        self.time = torch.zeros(1, dtype=torch.int32, device="cuda")

    def by_kernels(self, rotated: bool = True) -> Tensor:
        """As `runtime/cache/attend.py` does."""
        self.segment.held = self.slots
        buffers = self.segment.append_views(whole=False)
        turn = (self.segment.aux("shift"), self.rotation.table) if rotated else None
        return token.attend(
            self.query, self.key, self.value, self.angles, self.time, buffers, SIZE**-0.5, turn,
        )[0]  # fmt: skip

    def unrotated(self) -> Tensor:
        """The same with held keys as they are."""
        return self.by_kernels(rotated=False)

    def eagerly(self) -> Tensor:
        """As models, and kvcap without kernels: rotate, append, rotate what is held, attend."""
        self.segment.held = self.slots
        with kernels.use("eager"):
            query, key = apply_rotary_pos_emb(self.query, self.key, *self.angles)
            self.segment.append(key, self.value, self.time)
            keys = self.rotation.back(self.segment.keys, self.segment.aux("shift"))
            return _sdpa((query, keys, self.segment.values))


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, _Slots | _Token):
        return x.pool.buffers()
    return [y for y in x if isinstance(y, Tensor)]


def _microseconds(call: Callable[[Any], Any], inputs: list[Any], repeats: int) -> dict[str, float]:
    """Percentiles of a call's time within graphs of `CALLS`."""
    for x in inputs[:3]:
        call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in islice(cycle(inputs), CALLS):
            call(x)
    times = timed(lambda _: graph.replay(), [None], repeats)
    return percentiles([ms / CALLS * 1e3 for ms in times])
