"""Tests KeyDiff's Table 3: do keys that differ most from all others get the most attention?

The figure is Spearman's rank correlation, per layer, of KeyDiff's score `-cos(k_j, mean key)` and
attention. The paper does not say which queries' attention, so there are two: `window` is that of
the last queries, for tokens that all of them see; `all` is a token's mean over all queries that see
it, its own included. Attention is summed over the query group. Reads no options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcap.lab.analyze import AnalysisOptions
from kvcap.lab.captured import windows
from kvcap.lab.texts import Text
from kvcap.policies import Observation, load_policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Distinct keys and attention"
PAPER = "KeyDiff, arXiv 2504.15364, Table 3"
POLICIES: tuple[str, ...] = ()
SHARES: tuple[float, ...] = ()
PROJECTIONS = False
TEXTS = None
WINDOW = 32  # queries


def check(options: AnalysisOptions) -> None:
    """Accept all options: this analysis has none to refuse."""


def measure(text: Text, options: AnalysisOptions) -> dict[str, Any]:
    """Return correlations by layer and KV head, [L][K]; NaN if all scores or weights are equal."""
    window, every = [], []
    for whole in text.layers:
        n = whole.keys.shape[2]
        score = load_policy("keydiff").policy.score(whole)[0]  # [K, n]
        old = n - min(WINDOW, n // 2)
        window.append(spearman(score[:, :old], received(whole, n - old)[:, :old]))
        seen_by = torch.arange(n, 0, -1, device=score.device)
        every.append(spearman(score, received(whole, None) / seen_by))
    return {"layers": text.numbers, "window": window, "all": every}


def received(whole: Observation, window: int | None) -> Tensor:
    """Return the attention that each token gets from the last `window` queries, [K, n]."""
    total = torch.zeros(whole.keys.shape[1:3], device=whole.keys.device)
    for part in windows(whole, whole.keys.shape[2], window):
        total[:, : part.keys.shape[2]] += part.attention.sum((2, 3))[0]
    return total


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Return Spearman's rank correlation [R] of rows [R, n]; equal numbers share a rank.

    It is NaN for rows of equal numbers, or of fewer than two.
    """
    a, b = (ranks(part) for part in (x, y))
    a, b = (part - part.mean(-1, keepdim=True) for part in (a, b))
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def ranks(x: Tensor) -> Tensor:
    """Return the ranks from 1 of numbers within rows [R, n], float64; equal ones share the mean."""
    x = x.contiguous()
    ordered = x.sort(-1).values
    below = torch.searchsorted(ordered, x)
    upto = torch.searchsorted(ordered, x, right=True)
    return (below + upto + 1).double() / 2


def gather(measured: Sequence[dict[str, Any]], options: AnalysisOptions) -> dict[str, Any]:
    """Return means over KV heads and texts by layer, their spread, and the mean of all layers."""
    figures: dict[str, Any] = {"layers": measured[0]["layers"]}
    for name in ("window", "all"):
        each = torch.stack([torch.stack([rho.cpu() for rho in one[name]]) for one in measured])
        means = each.nanmean((0, 2))  # [L]
        figures[name] = {
            "mean": means,
            "low": each.transpose(0, 1).flatten(1).nanquantile(0.1, dim=1),
            "high": each.transpose(0, 1).flatten(1).nanquantile(0.9, dim=1),
            "over_layers": means.nanmean(),
        }
    return figures


def explain(figures: dict[str, Any]) -> str:
    """Explain the picture in two sentences: how to read it, and what it says."""
    mean = figures["window"]["over_layers"]
    result = "is undefined" if mean is None else f"is {mean:.2f}"
    return (
        "A bar near 1 means that the keys which differ most from the mean key get the most "
        "attention in that layer, so that KeyDiff can keep them without looking at attention; "
        "near 0 it knows nothing of attention. Over all layers the mean correlation with the "
        f"attention of the last {WINDOW} queries {result} (the paper reports 0.94 for Llama 3.2 "
        "3B)."
    )


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Draw bars by layer, with the middle 80 % of heads and texts."""
    figure.set_size_inches(max(4.8, 1.6 + 0.32 * len(figures["layers"])), 3.4)
    axis = figure.subplots()
    nan = float("nan")
    styles = (
        ("window", "#0b62a4", f"of the last {WINDOW} queries", -0.2),
        ("all", "#d1590f", "of all queries", 0.2),
    )
    for name, color, label, shift in styles:
        mean, low, high = (
            [nan if x is None else x for x in figures[name][part]]
            for part in ("mean", "low", "high")
        )
        across = [i + shift for i in range(len(mean))]
        axis.bar(across, mean, 0.36, color=color, label=f"attention {label}")
        axis.vlines(across, low, high, color="black", lw=0.8)
    axis.axhline(0, color="black", lw=0.6)
    axis.set_xticks(range(len(figures["layers"])), [str(i) for i in figures["layers"]])
    axis.tick_params(labelsize=7)
    axis.set_xlabel("layer", fontsize=8)
    axis.set_ylabel("Spearman's ρ (line: 80 % of heads, texts)", fontsize=8)
    axis.set_ylim(-1, 1)
    axis.set_title(TITLE, fontsize=9, loc="left")
    axis.legend(fontsize=7, frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
