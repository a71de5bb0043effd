"""Draws OBCache's Figure 2: which scores find the tokens whose eviction moves the output most?

The oracle is the true change of attention's output, for the token that follows the text, when one
token alone is evicted. Scores use the last queries of the text, the perturbation window. `recall`
is the share of the oracle's first `budget` tokens that are among the score's first, per KV head;
`reserved` is the recall if the newest 20 tokens are always kept (Fig. 2b). `exact` is the oracle's
own change summed over the window, which OBCache's three scores approximate. Reads `budgets` (the
first; the paper's is 40).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcap.lab.analyze import AnalysisOptions
from kvcap.lab.bench.saliency import SCORES, oracle, recall, scores
from kvcap.lab.captured import windows
from kvcap.lab.texts import Text
from kvcap.policies import Observation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Recall of the tokens that matter"
PAPER = "OBCache, Fig. 2"
POLICIES: tuple[str, ...] = ()
SHARES: tuple[float, ...] = (0.04,)  # the paper's 40 of 1,000 tokens
PROJECTIONS = False
TEXTS = None
RESERVED = 20  # newest tokens that are always kept
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # queries of the window, besides all queries


def check(options: AnalysisOptions) -> None:
    """Accept all options: this analysis has none to refuse."""


def measure(text: Text, options: AnalysisOptions) -> dict[str, Any]:
    """Measure recall by window and score [windows, scores], the mean over layers and KV heads."""
    tokens = len(text) - 1
    count = min(options.budgets[0], tokens)
    sizes = [size for size in SIZES if size < tokens]
    plain, kept = torch.zeros(len(sizes) + 1, len(SCORES)), torch.zeros(len(sizes) + 1, len(SCORES))
    for whole in text.layers:
        truth = oracle(whole, tokens)
        for i, each in enumerate(growing(whole, tokens, sizes)):
            for j, score in enumerate(each):
                plain[i, j] += recall(score, truth, count)
                kept[i, j] += recall(with_recents(score, min(RESERVED, count)), truth, count)
    layers = len(text.layers)
    return {"windows": [*sizes, tokens], "recall": plain / layers, "reserved": kept / layers}


def growing(whole: Observation, tokens: int, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield every score [scores, B, K, tokens] over growing windows of last queries, and over all.

    Args:
        whole: the captured observation.
        tokens: number of tokens that are scored.
        sizes: sizes of windows, rising, each below `tokens`.
    """
    total = torch.zeros(len(SCORES), *whole.keys.shape[:2], tokens, device=whole.keys.device)
    last = tokens
    for size in (*sizes, tokens):
        first = tokens - size
        for part in windows(whole, last, last - first):
            total[..., : part.keys.shape[2]] += torch.stack([*scores(part).values()])
        last = first
        yield total


def with_recents(score: Tensor, count: int) -> Tensor:
    """Put the newest `count` tokens of a score [B, K, n] before all others."""
    score = score.clone()
    score[..., score.shape[-1] - count :] = torch.inf
    return score


def gather(measured: Sequence[dict[str, Any]], options: AnalysisOptions) -> dict[str, Any]:
    """Return the means over texts."""
    return {
        "budget": options.budgets[0],
        "texts": len(measured),
        "scores": list(SCORES),
        "windows": measured[0]["windows"],  # the last window is the whole text
        "recall": torch.stack([one["recall"] for one in measured]).mean(0),
        "reserved": torch.stack([one["reserved"] for one in measured]).mean(0),
    }


def explain(figures: dict[str, Any]) -> str:
    """Explain the picture in two sentences: how to read it, and what it says."""
    best = [max(row[j] for row in figures["recall"]) for j in range(len(SCORES))]
    listed = ", ".join(f"{name} {x:.2f}" for name, x in zip(SCORES, best, strict=True))
    return (
        "The higher a line, the more of the tokens whose eviction would move the next output most "
        "are among those the score keeps; to the right, scores add up more of the past queries. "
        f"The best of all windows, {figures['budget']} slots: {listed}."
    )


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Draw Fig. 2a and 2b: a line for each score over the window."""
    figure.set_size_inches(8.4, 3.4)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    windows_ = figures["windows"]
    for axis, key, title in zip(
        axes, ("recall", "reserved"), ("", f", newest {RESERVED} reserved"), strict=True
    ):
        for j, (name, style) in enumerate(zip(figures["scores"], STYLES, strict=True)):
            color, marker, dash, width = style
            up = [row[j] for row in figures[key]]
            axis.plot(
                windows_,
                up,
                color=color,
                marker=marker,
                ls=dash,
                lw=width,
                ms=4,
                label=name,
                zorder=2 + (width < 2),
            )
        axis.set_title(f"first {figures['budget']} tokens{title}", fontsize=8, loc="left")
        axis.set_xscale("log", base=2)
        axis.set_xticks(windows_, [*map(str, windows_[:-1]), "all"])
        axis.set_xticks([], minor=True)
        axis.tick_params(labelsize=7)
        axis.set_ylim(0, 1.02)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("last queries that are looked at", fontsize=8)
    axes[0].set_ylabel("recall of the oracle's choice", fontsize=8)
    axes[1].legend(fontsize=7, frameon=False, loc="best")
    figure.suptitle(TITLE, fontsize=9, x=0.01, ha="left")


# `exact` is a wide pale line, behind the lines that approximate it.
STYLES = (
    ("#6b6f76", "o", "-", 1.2),
    ("#0b62a4", "s", "--", 1.2),
    ("#b4450b", "^", ":", 1.4),
    ("#3d7d1e", "D", "-.", 1.2),
    ("#c9a7e0", "", "-", 3.0),
)
