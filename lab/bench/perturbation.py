"""Draws CriticalKV's Figure 4: how far the next token's attention moves, with and without it.

Every policy keeps `budget` of a text's tokens, once alone and once with `+criticalkv`. For each
query head, `‖o - ô‖₁` behind that head's slice of `W_O` is averaged over the texts, for the query
of the next token, which no policy has observed. `mass` is the paper's σ, the attention of that
query to its top `α · budget` tokens: Theorem 3.5 needs more than half (Assumption 3.4). Reads
`lengths` (the first), `budgets`, `policies`, `repeats` (texts).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles
from kvcap.lab.captured import pocket_layers, until
from kvcap.policies import Eviction, Observation, load_policy

DEFAULTS = {"lengths": (1024,), "budgets": (256,), "policies": ("snapkv", "h2o"), "repeats": 16}
WHERE = ("policy", "budget", "layer", "heads", "mass")
COLUMNS = (*WHERE, "base", "critical", "ratio", "spread", "better")
ALPHA = 0.5  # criticalkv's own default
LEAST = 1e-4  # relative to ‖o‖₁; heads with a smaller error are not compared


def run(options: BenchmarkOptions) -> Result:
    """Return both errors, mean and percentiles of their ratio, and the share of better heads.

    Only heads with an error count, `heads` of them. A head is `better` if its error with criticalkv
    is at most the base policy's.
    """
    tokens = options.lengths[0]
    cases = list(product(options.policies, options.budgets))
    sums: dict[tuple[str, int], Tensor] = {}
    for layers in pocket_layers(options.repeats, tokens + 1):
        for name, budget in cases:
            errors = torch.stack([measure(layer, name, tokens, budget) for layer in layers], 1)
            sums[name, budget] = sums.get((name, budget), torch.zeros(())) + errors
    rows = []
    for name, budget in cases:
        mean = sums[name, budget] / options.repeats  # [4, L, H]
        whole = mean.flatten(1)
        parts: list[tuple[int | str, Tensor]] = [*enumerate(mean.unbind(1))]
        parts += [("all", whole), ("mass > 0.5", whole[:, whole[3] > 0.5])]
        rows += [_row(name, budget, layer, part) for layer, part in parts]
    return Result("perturbation", COLUMNS, rows, {"tokens": tokens, "texts": options.repeats})


def measure(whole: Observation, policy: str, tokens: int, budget: int) -> Tensor:
    """Measure one layer and the token after `tokens`, by query head [4, H].

    The rows are the error of the policy, its error with criticalkv, `‖o‖₁`, and the mass of the top
    `α · budget` tokens.
    """
    base = load_policy(policy)
    critical = load_policy(f"{policy}+criticalkv", alpha=ALPHA)
    obs = until(whole, tokens, base.policy.queries_observed, budget)
    empty = torch.zeros(obs.positions.shape)
    obs.state = {name: empty.to(dtype) for name, dtype in critical.state.items()}
    obs.state = critical.update(obs)
    after = until(whole, tokens + 1, 1)
    errors = [error(after, kept(obs, eviction)) for eviction in (base, critical)]
    size = projected(after, after.attention[0, :, :, 0])
    mass = after.attention[0, :, :, 0].topk(int(ALPHA * budget)).values.sum(-1).flatten()
    return torch.stack((*errors, size, mass))


def kept(obs: Observation, eviction: Eviction) -> Tensor:
    """Return the slots that stay, bool [1, K, n]."""
    evicted = eviction.select(obs, obs.positions.shape[-1] - obs.budget)
    return torch.ones_like(obs.positions, dtype=torch.bool).scatter(-1, evicted, False)


def error(after: Observation, kept: Tensor) -> Tensor:
    """Return `‖(A - A') V W_O‖₁` of the last token by query head [H]; `kept` [1, K, n - 1] stay."""
    own = kept.new_ones(*kept.shape[:2], 1)  # a token always sees itself
    attention = after.attention[0, :, :, 0]  # [K, G, n]
    left = attention * torch.cat((kept, own), -1)[0, :, None]
    return projected(after, attention - left / left.sum(-1, keepdim=True))


def projected(after: Observation, weights: Tensor) -> Tensor:
    """Return `‖weights · V W_O‖₁` by query head: [K, G, n] -> [H]."""
    assert after.output_projection is not None
    mixed = torch.matmul(weights, after.values[0].float())  # [K, G, D]
    if after.expansion is not None:  # slots hold latents, which each query head expands
        mixed = after.expansion.head_values(mixed.transpose(0, 1)[None])[0].transpose(0, 1)
    out = torch.einsum("kgd,kgde->kge", mixed, after.output_projection.float())
    return out.abs().sum(-1).flatten()


def _row(policy: str, budget: int, layer: int | str, mean: Tensor) -> dict[str, Any]:
    """Return the row of measurements [4, heads]."""
    base, critical, _, mass = mean[:, mean[0] > LEAST * mean[2]]
    row: dict[str, Any] = {"policy": policy, "budget": budget, "layer": layer, "heads": len(base)}
    if not len(base):
        return {**row, **dict.fromkeys(COLUMNS[len(WHERE) - 1 :], "")}
    return {
        **row,
        "mass": float(mass.mean()),
        "base": float(base.mean()),
        "critical": float(critical.mean()),
        "ratio": float((critical / base).mean()),
        "spread": percentiles((critical / base).tolist()),
        "better": float((critical <= base).float().mean()),
    }
