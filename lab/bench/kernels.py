"""Times a score on a GPU: Triton's twin beside eager, `torch.compile` and a naive formula.

The shape is one layer of an 8 B Llama: 32 query and 8 KV heads of 128, bfloat16, as views into a
pool. Times are by CUDA events around every call, one call right after another, so that the host's
launches count if they take longer than the device; `graph_ms` replays a CUDA graph, without
launches. Inputs rotate through at least 512 MiB, so that none is in the GPU's cache. The floor is
the bytes that must be read, divided by the bandwidth that a sum over 4 GiB reached in the same run.
Scores are pooled in time only if the name of the work says so. Peers: `eager` is the policy itself,
in float32; `expanded` is DropKV in 16-bit matrix products without repetition; `naive` follows
DropKV's formula literally. Reads `lengths` and `repeats`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvcap import kernels
from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles, quoted
from kvcap.evals.reports import device_name, versions
from kvcap.policies import Observation, Policy
from kvcap.policies.andpro import AnDPro
from kvcap.policies.base import Logits
from kvcap.policies.dropkv import DropKV
from kvcap.policies.h2o import H2O
from kvcap.policies.keydiff import KeyDiff
from kvcap.policies.saliencies.obcache import OBCache
from kvcap.policies.snapkv import SnapKV

HEADS, KV_HEADS, SIZE, DTYPE = 32, 8, 128, torch.bfloat16
ROTATED = 512 * 2**20  # bytes of keys and values, several times the GPU's cache
DEFAULTS = {"lengths": (4096, 16384, 65536, 131072), "repeats": 3}
COLUMNS = (
    "work", "n", "median_ms", "graph_ms", "floor_ms", "of_read", "peer", "peer_median_ms", "ratio",
    "scratch_bytes", "peer_scratch_bytes",
)  # fmt: skip
Call = Callable[[Observation], Any]
Input = TypeVar("Input")


@dataclass
class Inputs(Observation):
    """An observation with the sum of its keys [B, K, 1, D], if that is known."""

    key_sums: Tensor | None = None


@dataclass(frozen=True)
class Work:
    """A score, the data that it must read, and its peers besides eager."""

    name: str
    policy: Policy
    keys_read: int  # passes over the keys
    values_read: int = 0  # passes over the values
    queries: int = 1
    saliency: OBCache | None = None
    known_sum: bool = False  # whether attention has summed the keys
    compiled: bool = False  # whether torch.compile is a peer
    naive: bool = False  # whether `naive` and `expanded` are peers

    def twin(self, obs: Observation) -> Tensor:
        """Score by the kernels."""
        if isinstance(self.policy, H2O):
            return kernels.update(self.policy, obs)["accumulated"]
        sums = obs.key_sums if isinstance(obs, Inputs) else None
        if sums is not None:
            from kvcap.kernels import keydiff  # imports triton

            return keydiff.scores(obs.keys, key_sums=sums)
        return kernels.score(self.policy, obs)

    def eager(self, obs: Observation) -> Tensor:
        """Score by the policy itself, without results of earlier calls."""
        obs = replace(obs)
        if isinstance(self.policy, H2O):
            return self.policy.update(obs)["accumulated"]
        return self.policy.score(obs)


WORKS = (
    Work("dropkv", DropKV(kernel=1), 2, 2, queries=8, compiled=True, naive=True),
    Work("dropkv, pooled in time", DropKV(), 2, 2, queries=8),
    Work("keydiff", KeyDiff(), 2, compiled=True),
    Work("keydiff, sum known", KeyDiff(), 1, known_sum=True, compiled=True),
    Work("snapkv", SnapKV(kernel=1), 2, queries=32),
    Work("obcache", SnapKV(kernel=1, window=8), 2, 2, queries=8, saliency=OBCache()),
    Work("andpro", AnDPro(), 2, 2, queries=8),
    Work("h2o, block of 128", H2O(), 2, queries=128),
)


def run(options: BenchmarkOptions) -> Result:
    """Time every score and its peers, in ms, with the share of the read bandwidth that they reach.

    Raises:
        ValueError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("the benchmark of the kernels needs a CUDA device; this machine has none")
    bandwidth = read_bandwidth()
    machine = {
        "device": device_name("cuda"),
        "versions": {**versions(), "triton": triton_version()},
    }
    rows: list[dict[str, Any]] = []
    for work in WORKS:
        for n in options.lengths:
            torch.manual_seed(0)
            inputs = [observe(n, work) for _ in range(max(1, ROTATED // (n * _slot_bytes())))]
            rows += _measure(work, inputs, 20 * options.repeats, bandwidth, machine)
            del inputs
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "dtype": "bfloat16"}
    return Result("kernels", COLUMNS, rows, {**machine, **sizes, "read_tb_s": bandwidth / 1e12})


def _measure(
    work: Work, inputs: list[Observation], repeats: int, bandwidth: float, machine: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield one row for each peer."""
    n = inputs[0].keys.shape[2]
    must_read = n * KV_HEADS * SIZE * DTYPE.itemsize * (work.keys_read + work.values_read)
    mine, graphed = percentiles(timed(work.twin, inputs, repeats)), replayed(work.twin, inputs)
    common = {
        "work": work.name,
        "n": n,
        **quoted(mine, "ms"),
        "graph_ms": graphed,
        "floor_ms": must_read / bandwidth * 1e3,
        "tb_s": must_read / mine["p50"] / 1e9,
        "of_read": must_read / mine["p50"] * 1e3 / bandwidth,
        "scratch_bytes": scratch(work.twin, inputs[0]),
    }
    peers: dict[str, Call] = {"eager": work.eager}
    if work.compiled:
        peers["torch.compile"] = compiled(work.policy.score, inputs[0])
    if work.naive:
        peers |= {"naive": naive, "expanded": expanded}
        peers["expanded, torch.compile"] = compiled(expanded, inputs[0])
    for name, peer in peers.items():
        theirs = percentiles(timed(peer, inputs, max(10, repeats // 3)))
        yield {
            **common,
            "peer": name,
            **quoted(theirs, "ms", "peer_"),
            "peer_scratch_bytes": scratch(peer, inputs[0]),
            "ratio": theirs["p50"] / mine["p50"],
            **machine,
        }


def observe(n: int, work: Work) -> Observation:
    """Make random tensors of `n` slots in random order, none newer than the first query."""

    def pool() -> Tensor:
        whole = torch.randn(1, KV_HEADS, n + 128, SIZE, device="cuda", dtype=DTYPE)
        return whole[:, :, :n]

    keys = pool()
    positions = torch.stack([torch.randperm(n, device="cuda") for _ in range(KV_HEADS)])
    queries = torch.randn(1, work.queries, HEADS, SIZE, device="cuda", dtype=DTYPE).transpose(1, 2)
    state = {"accumulated": torch.zeros(1, KV_HEADS, n, device="cuda")}
    sums = keys.float().sum(2, keepdim=True) if work.known_sum else None
    return Inputs(
        keys,
        pool(),
        positions[None].int(),
        n + work.queries,
        n // 2,
        queries=queries,
        rule=Logits(SIZE**-0.5),
        saliency=work.saliency,
        state=state,
        key_sums=sums,
    )


def naive(obs: Observation) -> Tensor:
    """Score DropKV by its formula: keys and values are repeated, all differences are in memory."""
    assert obs.queries is not None
    k = obs.keys.repeat_interleave(HEADS // KV_HEADS, 1)  # [B, H, n, D]
    v = obs.values.repeat_interleave(HEADS // KV_HEADS, 1)
    p = (obs.queries @ k.mT * obs.rule.scale).float().softmax(-1)  # [B, H, w, n]
    a = p.to(v.dtype) @ v  # [B, H, w, D]
    distance = (a[:, :, :, None] - v[:, :, None]).square().sum(-1)  # [B, H, w, n]
    cost = ((p / (1 - p + 1e-6)).square() * distance).sum(2)
    scores: Tensor = cost.unflatten(1, (KV_HEADS, -1)).mean(2)
    return scores


def expanded(obs: Observation) -> Tensor:
    """Score DropKV by `|a - v|² = |a|² + |v|² - 2 a·v` in 16-bit products, without repetition."""
    assert obs.queries is not None
    k, v = obs.keys, obs.values
    q = obs.queries.unflatten(1, (KV_HEADS, -1)).flatten(2, 3)  # [B, K, G·w, D]
    p = (q @ k.mT * obs.rule.scale).float().softmax(-1)  # [B, K, G·w, n]
    a = p.to(v.dtype) @ v  # [B, K, G·w, D]
    squares = a.float().square().sum(-1, keepdim=True) + v.float().square().sum(-1)[:, :, None]
    distance = squares - 2 * (a @ v.mT)
    cost: Tensor = (p / (1 - p + 1e-6)).square() * distance
    return cost.sum(2) / (HEADS // KV_HEADS)


def compiled(score: Callable[[Observation], Tensor], like: Observation) -> Call:
    """Compile `score` by `torch.compile`, for tensors of these shapes."""

    def function(keys: Tensor, values: Tensor, positions: Tensor, queries: Tensor | None) -> Tensor:
        return score(
            Observation(
                keys,
                values,
                positions,
                like.num_tokens,
                like.budget,
                queries=queries,
                rule=like.rule,
            )
        )

    torch.compiler.reset()
    fast = torch.compile(function, dynamic=False)
    return lambda obs: fast(obs.keys, obs.values, obs.positions, obs.queries)


def timed(call: Callable[[Input], Any], inputs: list[Input], repeats: int) -> list[float]:
    """Return the milliseconds of each of `repeats` calls, one right after another."""
    for obs in inputs[:3]:
        call(obs)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event, obs in zip(events[1:], cycle(inputs), strict=False):
        call(obs)
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return times[1:]  # during the first call the device waits for the host


def replayed(call: Callable[[Input], Any], inputs: list[Input], replays: int = 20) -> float:
    """Return the median milliseconds of a call within a CUDA graph, nearly without launches.

    The graph calls it on one input after another, over and over.
    """
    graph, calls = torch.cuda.CUDAGraph(), max(64, len(inputs))
    with torch.cuda.graph(graph):
        for obs in islice(cycle(inputs), calls):
            call(obs)
    times = timed(lambda _: graph.replay(), inputs[:1], replays)
    return percentiles(times)["p50"] / calls


def scratch(call: Call, obs: Observation) -> int:
    """Return the bytes that one call allocates at its peak, besides its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call(obs)
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before - result.nbytes)


def read_bandwidth() -> float:
    """Return the bytes per second that a sum over 4 GiB reads."""
    x = torch.randn(2**30, device="cuda")
    obs = Observation(x, x, x, 0, 0)
    return x.nbytes / percentiles(timed(lambda s: s.keys.sum(), [obs], 20))["p50"] * 1e3


def _slot_bytes() -> int:
    return 2 * KV_HEADS * SIZE * DTYPE.itemsize


def triton_version() -> str:
    """Return Triton's version."""
    from importlib.metadata import version

    return version("triton")
