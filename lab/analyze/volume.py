"""Draws KeyDiff's Figure 12: the volume that kept keys span, `log det` of their Gram matrix.

For the kept keys `K` [N, D] of one KV head, as the uncapped model computes them, `log det(K Kᵀ)` is
the sum of the logarithms of the squared singular values. For `N > D` that determinant is 0, so
`log det(Kᵀ K)` is used, which has the same singular values without the zeros: in both cases
`min(N, D)` of them are summed. Keys that span fewer directions have no volume and are counted as
`flat`. Reads `policies`, `budgets` (the first) and `block_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcap.lab.analyze import AnalysisOptions
from kvcap.lab.texts import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Volume that kept keys span"
PAPER = "KeyDiff, arXiv 2504.15364, Fig. 12"
POLICIES: tuple[str, ...] = ("streaming_llm", "tova", "keydiff", "random")
SHARES: tuple[float, ...] = (0.25,)
PROJECTIONS = False
TEXTS = None


def check(options: AnalysisOptions) -> None:
    """Accept all options: this analysis has none to refuse."""


def measure(text: Text, options: AnalysisOptions) -> dict[str, Any]:
    """Return volumes by policy, [L][K]."""
    volumes: dict[str, list[list[float]]] = {}
    for policy in options.policies:
        sets = text.kept(policy, options.budgets[0], options.block_size, options.policy_options)
        volumes[policy] = [
            [log_volume(keys[kept]) for keys, kept in zip(layer.keys[0].cpu(), mask, strict=True)]
            for layer, mask in zip(text.layers, sets, strict=True)
        ]
    return {"layers": text.numbers, "volumes": volumes}


def log_volume(keys: Tensor) -> float:
    """Return `log det(K Kᵀ)`, or `log det(Kᵀ K)` of more rows than columns; -inf for flat keys."""
    sizes = torch.linalg.svdvals(keys.double())  # [min(N, D)], descending
    if not len(sizes) or sizes[-1] <= sizes[0] * max(keys.shape) * torch.finfo(sizes.dtype).eps:
        return -torch.inf
    return float(2 * sizes.log().sum())


def gather(measured: Sequence[dict[str, Any]], options: AnalysisOptions) -> dict[str, Any]:
    """Join each policy's volumes [texts, L, K] into a list, with quantiles and medians by layer."""
    figures: dict[str, Any] = {
        "layers": measured[0]["layers"],
        "budget": options.budgets[0],
        "policies": {},
    }
    for policy in options.policies:
        each = torch.tensor([one["volumes"][policy] for one in measured], dtype=torch.float64)
        whole = each[each.isfinite()]
        levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
        spanned = torch.where(each.isfinite(), each, torch.nan)
        figures["policies"][policy] = {
            "values": whole,
            "quantiles": whole.quantile(levels) if len(whole) else [None] * 5,
            "by_layer": spanned.transpose(0, 1).flatten(1).nanmedian(1).values,
            "flat": int((~each.isfinite()).sum()),
        }
    return figures


def explain(figures: dict[str, Any]) -> str:
    """Explain the picture in two sentences: how to read it, and what it says."""
    medians = {name: one["quantiles"][2] for name, one in figures["policies"].items()}
    known = {name: x for name, x in medians.items() if x is not None}
    best = max(known, key=lambda name: known[name]) if known else "none"
    listed = ", ".join(
        f"{name} {'no volume' if x is None else f'{x:.0f}'}" for name, x in medians.items()
    )
    return (
        "The further right a policy's box, the more of the key space its kept keys span, the same "
        "number of keys for each; one unit is a factor of e in the squared volume. The largest "
        f"median here is that of {best} ({listed})."
    )


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Draw a box for each policy over all heads, and the medians by layer."""
    policies = figures["policies"]
    figure.set_size_inches(8.2, max(2.8, 1.3 + 0.34 * len(policies)))
    boxes, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    names = list(policies)[::-1]
    nan = float("nan")
    for index, name in enumerate(names):
        low, quarter, middle, most, high = policies[name]["quantiles"]
        if middle is not None:
            boxes.hlines(index, low, high, color="#0b62a4", lw=1)
            boxes.barh(index, most - quarter, 0.5, quarter, color="#a9cbe6")
            boxes.vlines(middle, index - 0.3, index + 0.3, color="#b4450b", lw=2)
    flat = [policies[name]["flat"] for name in names]
    labels = [f"{n} ({f} flat)" if f else n for n, f in zip(names, flat, strict=True)]
    boxes.set_yticks(range(len(names)), labels)
    boxes.set_xlabel(
        "log det of the Gram matrix (median; box: half of the heads; line: 80 %)", fontsize=8
    )
    for (name, one), style in zip(policies.items(), STYLES * len(policies), strict=False):
        marker, dash = style
        up = [nan if x is None else x for x in one["by_layer"]]
        lines.plot(range(len(up)), up, marker=marker, ls=dash, ms=4, lw=1.1, label=name)
    lines.set_xticks(range(len(figures["layers"])), [str(i) for i in figures["layers"]])
    lines.set_xlabel("layer", fontsize=8)
    lines.set_ylabel("median over heads and texts", fontsize=8)
    lines.legend(fontsize=6.5, frameon=False)
    for axis in (boxes, lines):
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{TITLE}, {figures['budget']} slots", fontsize=9, x=0.01, ha="left")


STYLES = [("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."), ("v", "-"), ("x", "--")]
