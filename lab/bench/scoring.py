"""Times eviction for a block: state, scores, selection, and moving kept tokens.

Times are of all layers together over a full cache, as in `kvcap eval`. Policies that need a table
of heads get one of arbitrary numbers. Reads `policies`, `budgets`, `block_size`, `repeats`.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import VOCABULARY, percentiles, random_llama, random_prompt
from kvcap.evals.quality.tune import spelled_out
from kvcap.lab.eviction_time import eviction_ms
from kvcap.lab.quality.measuring import COMMON
from kvcap.lab.quality.sweep import options_of
from kvcap.policies import load_policy
from kvcap.runtime.cache.cache import BudgetCache

DEFAULTS = {"policies": ("all",)}
COLUMNS = ("policy", "budget", "scoring_ms", "ratio", "extra_bytes")
PEER = "keydiff"
BLOCKS = 4  # blocks that are measured in each repeat


def run(options: BenchmarkOptions) -> Result:
    """Time a block of every policy, in ms, with its ratio to keydiff and its extra bytes."""
    model = random_llama(options, "kvcap")
    names = [n for n in spelled_out(options.policies) if load_policy(n).policy.evicts]
    with TemporaryDirectory() as folder:
        table = Path(folder) / "heads.json"
        table.write_text(json.dumps({"kind": "heads", "scores": _importances(model.config)}))
        rows = [
            _measure(model, name, budget, options, str(table))
            for budget, name in product(options.budgets, dict.fromkeys((PEER, *names)))
        ]
    base = {row["budget"]: row["scoring_ms"]["p50"] for row in rows if row["policy"] == PEER}
    for row in rows:
        row["ratio"] = row["scoring_ms"]["p50"] / base[row["budget"]]
    rows.sort(key=lambda row: (row["budget"], row["ratio"]))
    derived = {name: getattr(options, name) for name in ("block_size", "layers", "hidden")}
    return Result("scoring", COLUMNS, rows, {**derived, "dtype": "float32"})


def _measure(
    model: Any, name: str, budget: int, options: BenchmarkOptions, table: str
) -> dict[str, Any]:
    given = {"table": table} if "table" in options_of(name) else {}
    cache = BudgetCache(model.config, budget, options.block_size, load_policy(name, **given))
    sizes = cache.layout.nbytes(1, model.dtype)
    times = eviction_ms(model, cache, random_prompt(VOCABULARY), BLOCKS * options.repeats)
    return {
        "policy": name,
        "budget": budget,
        "scoring_ms": percentiles(times),
        "extra_bytes": sum(size for part, size in sizes.items() if part not in COMMON),
    }


def _importances(config: Any) -> list[list[float]]:
    """Return an arbitrary importance for every KV head of every layer."""
    rng = Random(0)
    heads = range(config.num_key_value_heads)
    return [[rng.random() for _ in heads] for _ in range(config.num_hidden_layers)]
