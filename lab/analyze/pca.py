"""Draws KeyDiff's Figure 5: kept and evicted keys in two dimensions.

The picture has the keys of one KV head, as the uncapped model computes them, along the two
directions in which they vary most, and marks those whose tokens a policy keeps when it reads the
text block by block under its cap. `spread` is the mean squared distance of the kept keys from their
own mean, divided by that of all keys: above 1 the kept ones vary more than the text. Reads
`policies`, `budgets` (the first), `block_size`, `layer` (the middle one) and `head` (the first).
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

TITLE = "Kept and evicted keys"
PAPER = "KeyDiff, arXiv 2504.15364, Fig. 5"
POLICIES: tuple[str, ...] = ("streaming_llm", "tova", "keydiff")
SHARES: tuple[float, ...] = (0.25,)
PROJECTIONS = False
TEXTS = 1
KEPT, EVICTED = "#0b62a4", "#e8a33d"


def check(options: AnalysisOptions) -> None:
    """Accept all options; `layer_and_head` refuses a missing one once the text is read."""


def measure(text: Text, options: AnalysisOptions) -> dict[str, Any]:
    """Return the coordinates of all keys, and which of them each policy keeps."""
    layer, head = layer_and_head(text, options)
    keys = text.layers[layer].keys[0, head].double().cpu()  # [n, D]
    points, explained = project(keys)
    kept = {}
    for policy in options.policies:
        sets = text.kept(policy, options.budgets[0], options.block_size, options.policy_options)
        kept[policy] = sets[layer][head]
    return {
        "layer": text.numbers[layer],
        "head": head,
        "budget": options.budgets[0],
        "points": points,
        "explained": explained,
        "kept": {policy: one.nonzero().flatten() for policy, one in kept.items()},
        "spread": {policy: spread(keys, one) for policy, one in kept.items()},
    }


def layer_and_head(text: Text, options: AnalysisOptions) -> tuple[int, int]:
    """Return the requested layer's index among the captured ones, and the KV head.

    Raises:
        ValueError: there is no such layer or head, or the layer is never capped.
    """
    numbers, heads = text.numbers, text.layers[0].keys.shape[1]
    layer = numbers[len(numbers) // 2] if options.layer is None else options.layer
    head = options.head or 0
    if layer not in numbers:
        known = ", ".join(map(str, numbers))
        raise ValueError(f"--layer {layer}: this model's capped layers are {known}")
    if not 0 <= head < heads:
        raise ValueError(f"--head {head}: a layer has KV heads 0 to {heads - 1}")
    return numbers.index(layer), head


def project(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates along the two main axes [n, 2], and the share of variance along each [2].

    An axis points to where its largest number is positive, so that signs are the same on every
    machine. All are 0 if keys do not vary.
    """
    centred = keys - keys.mean(0)
    _, sizes, axes = torch.linalg.svd(centred, full_matrices=False)
    axes = torch.cat((axes, axes.new_zeros(2, axes.shape[1])))[:2]  # one key has one axis
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = torch.where(largest < 0, -axes, axes)
    squares = torch.cat((sizes.square(), sizes.new_zeros(2)))
    return centred @ axes.T, squares[:2] / squares.sum().clamp(min=1e-300)


def spread(keys: Tensor, kept: Tensor) -> float:
    """Return the variance of the kept keys divided by that of all; NaN if all keys are equal."""
    variances = [x.var(0, correction=0).sum() for x in (keys[kept], keys)]
    return float(variances[0] / variances[1])


def gather(measured: Sequence[dict[str, Any]], options: AnalysisOptions) -> dict[str, Any]:
    """Return the figures of the one text."""
    return measured[0]


def explain(figures: dict[str, Any]) -> str:
    """Explain the picture in two sentences: how to read it, and what it says."""
    listed = ", ".join(
        f"{policy} {'undefined' if x is None else f'{x:.2f}'}"
        for policy, x in figures["spread"].items()
    )
    return (
        "Each dot is a token's key; a policy whose blue dots reach as far as the orange ones keeps "
        "keys of every kind, and one whose blue dots huddle keeps many alike. The variance of the "
        f"kept keys over that of all keys is, by policy: {listed}."
    )


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Draw a panel for each policy."""
    policies = list(figures["kept"])
    columns = min(len(policies), 4)
    rows = -(-len(policies) // columns)
    figure.set_size_inches(max(2.6 * columns, 5.2), 2.5 * rows + 0.9)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    points = figures["points"]
    for axis, policy in zip(axes, policies, strict=False):
        kept = set(figures["kept"][policy])
        for mine, color, size, label in ((False, EVICTED, 5, "evicted"), (True, KEPT, 8, "kept")):
            chosen = [p for i, p in enumerate(points) if (i in kept) == mine]
            marker = "o" if mine else "x"
            axis.scatter(
                [p[0] for p in chosen],
                [p[1] for p in chosen],
                size,
                color,
                marker=marker,
                lw=0.6,
                alpha=0.75,
                label=label,
            )
        x = figures["spread"][policy]
        suffix = "" if x is None else f", spread {x:.2f}"
        axis.set_title(f"{policy}{suffix}", fontsize=8)
        axis.tick_params(labelsize=6)
    for axis in axes[len(policies) :]:
        axis.set_visible(False)
    shares = [100 * (x or 0) for x in figures["explained"]]
    figure.supxlabel(f"first axis ({shares[0]:.0f} % of the variance)", fontsize=8)
    figure.supylabel(f"second axis ({shares[1]:.0f} %)", fontsize=8)
    where = f"layer {figures['layer']}, KV head {figures['head']}, {figures['budget']} slots"
    figure.suptitle(f"{TITLE}: {where}", fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=2, fontsize=7, frameon=False)
