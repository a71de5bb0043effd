"""Times a whole model on a GPU: Llama-3.2-3B's shape, random bfloat16 weights, with peers.

`prefill` is the time from a prompt to its last token's logits, `decode` that of one more token,
`decode_16` the same if 16 tokens are evicted at once (`--evict-every 16`; transformers evicts
none). Peers: `transformers` reads the prompt at once into its growing cache, by SDPA;
`streaming_llm` is kvcap under the policy that scores nothing; `materialised` is kvcap under h2o,
eagerly, with attention weights in memory. The floor of a token is the time to read the weights and
all slots once, at the bandwidth that a sum over 4 GiB reaches; a prompt has no floor.
`scratch_bytes` is the allocator's peak above the weights and the memory in use before. Reads
`lengths`, `budgets`, `policies`, `repeats`, `steps`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvcap import kernels
from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import Plain, percentiles, quoted
from kvcap.evals.reports import device_name, versions
from kvcap.lab.bench.kernels import read_bandwidth
from kvcap.lab.random_models import random_model
from kvcap.runtime.backends.pytorch.cuda_graphs import PASS
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache

DEFAULTS = {"lengths": (32768,), "budgets": (2048,), "repeats": 3, "steps": 64}
BLOCKS = (128, 512, 1024)
EVERY = 16
WORKS = ("prefill", "decode", f"decode_{EVERY}")
PEERS = ("transformers", "streaming_llm", "materialised")
COLUMNS = (
    "work", "n", "budget", "block", "policy", "median_ms", "floor_ms", "peer", "peer_median_ms",
    "ratio", "scratch_bytes", "blocks_are",
)  # fmt: skip


def run(options: BenchmarkOptions) -> Result:
    """Return a row for every setting and peer.

    Raises:
        ValueError: there is no CUDA device.
    """
    require_cuda()
    bandwidth, model = read_bandwidth(), random_model("random-3b", "cuda")
    machine = {"device": device_name("cuda"), "versions": versions()}
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), device="cuda")
        repeats = max(1, options.repeats * 32768 // max(length, 32768))
        plain = _measured("transformers", model, ids, repeats, options)
        for budget, block in product(options.budgets, BLOCKS):
            peers = {"transformers": plain}
            for name in PEERS[1:]:
                often = 1 if name == "materialised" else repeats  # the materialised peer is slow
                peers[name] = _measured(name, model, ids, often, options, budget, block)
            for policy in options.policies:
                mine = _measured(policy, model, ids, repeats, options, budget, block)
                slots = mine["kv_bytes"] + _weights(model)
                setting = {"n": length, "budget": budget, "block": block, "policy": policy}
                for row in _rows(mine, peers, slots / bandwidth * 1e3):
                    rows += [{**row, **setting, **machine}]
    return Result("gpu", COLUMNS, rows, {**machine, "read_tb_s": bandwidth / 1e12})


def require_cuda() -> None:
    """Refuse to run without a GPU.

    Raises:
        ValueError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA device; this machine has none")


def _measured(
    what: str,
    model: Any,
    ids: Tensor,
    repeats: int,
    options: BenchmarkOptions,
    budget: int = 0,
    block: int = 0,
) -> dict[str, Any]:
    """Return times and bytes of reading `ids` and of `options.steps` tokens after them."""
    model.set_attn_implementation("sdpa" if what == "transformers" else "kvcap")
    policy = "h2o" if what == "materialised" else what
    eagerly = kernels.use("eager") if what == "materialised" else nullcontext()
    token = ids[:, :1]
    gc.collect()  # frees CUDA graphs of earlier measurements, whose memory would count
    with eagerly:
        if what == "transformers":

            def begin() -> Any:
                return Plain(model)
        else:
            cache = BudgetCache(model.config, budget, block, policy)
            loop = BlockLoop(model, cache.allocate(1, torch.bfloat16, "cuda"))

            def begin() -> Any:
                cache.reset()
                return loop

        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        for _ in range(2):  # the last pass, which needs logits, is captured the second time
            warm = begin()
            # The last passes are like those of the whole prompt.
            warm.prefill(ids[:, : (budget or 2048) + 8 * PASS])
            for _ in range(4):
                warm.read(token)
            del warm
        prefill, decode = [], []
        for _ in range(repeats):
            reader = begin()
            prefill.append(milliseconds(partial(reader.prefill, ids)))
            decode += [
                milliseconds(partial(reader.read, token)) for _ in range(options.steps // repeats)
            ]
            del reader
        peak = torch.cuda.max_memory_allocated() - held
        figures: dict[str, Any] = {"prefill": percentiles(prefill), "decode": percentiles(decode)}
        if what != "transformers":
            figures["blocks_are"] = loop.execution
            figures["kv_bytes"] = cache.nbytes
            del loop, cache
        if what not in ("transformers", "materialised") and block == BLOCKS[0]:
            figures[WORKS[2]] = percentiles(_rarely_evicting(model, ids, policy, budget, options))
    torch.cuda.empty_cache()
    return {**figures, "scratch_bytes": peak}


def _rarely_evicting(
    model: Any, ids: Tensor, policy: str, budget: int, options: BenchmarkOptions
) -> list[float]:
    """Return milliseconds per token, averaged over as many tokens as are evicted at once."""
    cache = BudgetCache(model.config, budget, BLOCKS[0], policy, evict_every=EVERY)
    loop = BlockLoop(model, cache.allocate(1, torch.bfloat16, "cuda"))
    loop.prefill(ids[:, : budget + 8 * PASS])

    def tokens() -> None:
        for _ in range(EVERY):
            loop.read(ids[:, :1])

    for _ in range(4):  # warms up: each span has a graph of its own
        tokens()
    return [milliseconds(tokens) / EVERY for _ in range(max(1, options.steps // 4))]


def _rows(
    mine: dict[str, Any], peers: dict[str, dict[str, Any]], floor: float
) -> Iterator[dict[str, Any]]:
    for work, (name, peer) in product(WORKS, peers.items()):
        if work not in mine or (name == "materialised" and work not in peer):
            continue
        took = peer.get(work, peer["decode"])
        yield {
            "work": work,
            **quoted(mine[work], "ms"),
            "floor_ms": None if work == "prefill" else floor,
            "peer": name,
            **quoted(took, "ms", "peer_"),
            "ratio": took["p50"] / mine[work]["p50"],
            "scratch_bytes": mine["scratch_bytes"],
            "peer_scratch_bytes": peer["scratch_bytes"],
            "blocks_are": mine["blocks_are"],
        }


def _weights(model: Any) -> int:
    return sum(x.nbytes for x in model.parameters())


def milliseconds(work: Callable[[], Any]) -> float:
    """Time work by CUDA events, from an idle device until it is idle again; in milliseconds."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))
