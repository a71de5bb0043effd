"""Draws CriticalKV's Figures 4 to 6: how far attention's output moves under two policies.

A policy reads a text up to its last token. Then the output of attention for that token, behind the
output projection, is compared with the uncapped output: `‖o - ô‖₁` by query head, where `ô` attends
only to the tokens that the policy kept, with keys and values of the uncapped model. Policies evict
in two ways: `once`, after the whole text, as in the paper, and `blocks`, after every block, as in a
chat. `growth` is `‖ô‖₁ / ‖o‖₁`: above 1 attention concentrates on large values. Reads `policies`
(two), `budgets` and `block_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcap.lab.analyze import AnalysisOptions
from kvcap.lab.bench.perturbation import projected
from kvcap.lab.captured import until
from kvcap.lab.texts import Text
from kvcap.policies import Observation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Change of attention's output"
PAPER = "CriticalKV, arXiv 2502.03805, Fig. 4-6"
POLICIES: tuple[str, ...] = ("snapkv", "criticalkv")
SHARES: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5)
PROJECTIONS = True
TEXTS = None
WAYS = ("once", "blocks")
LABELS = {"once": "evicted once", "blocks": "after every block"}
LEAST = 1e-4  # relative to ‖o‖₁; heads that change less are not compared


def check(options: AnalysisOptions) -> None:
    """Refuse options that do not name exactly two policies.

    Raises:
        ValueError: one, or more than two, are named.
    """
    if len(options.policies) != 2:
        raise ValueError(
            f"perturbation compares two policies, and {len(options.policies)} were given; such "
            "as --policies snapkv,criticalkv"
        )


def measure(text: Text, options: AnalysisOptions) -> dict[str, Any]:
    """Return changes and growths [way, policy, budget, L, H], and the sizes `‖o‖₁` [L, H]."""
    tokens = len(text) - 1
    after = [until(whole, tokens + 1, 1) for whole in text.layers]
    size = torch.stack([projected(one, one.attention[0, :, :, 0]).cpu() for one in after])
    changes, growths = [], []
    for way in WAYS:
        block = tokens if way == "once" else options.block_size
        for policy in options.policies:
            for budget in options.budgets:
                sets = text.kept(policy, budget, block, options.policy_options, tokens)
                moved = [moves(one, kept) for one, kept in zip(after, sets, strict=True)]
                changes.append(torch.stack([one[0].cpu() for one in moved]))
                growths.append(torch.stack([one[1].cpu() for one in moved]) / size.clamp(min=1e-30))
    shape = len(WAYS), 2, len(options.budgets)
    return {
        "layers": text.numbers,
        "size": size,
        "change": torch.stack(changes).unflatten(0, shape),
        "growth": torch.stack(growths).unflatten(0, shape),
    }


def moves(after: Observation, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return `‖o - ô‖₁` and `‖ô‖₁` of the last token by query head [H]; `kept` [K, n - 1] stay."""
    left = attention_to(after, kept)
    return projected(after, after.attention[0, :, :, 0] - left), projected(after, left)


def attention_to(after: Observation, kept: Tensor) -> Tensor:
    """Return the last token's attention [K, G, n] to itself and to tokens in `kept` [K, n - 1]."""
    own = kept.new_ones(kept.shape[0], 1)  # a token always sees itself
    logits = after.logits[0, :, :, 0]
    gone = ~torch.cat((kept, own), -1)[:, None].to(logits.device)
    logits = logits.masked_fill(gone, -torch.inf)
    if after.rule.sinks is None:
        return logits.softmax(-1)
    sinks = after.rule.sinks.float().view(*logits.shape[:2], 1)
    return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]


def gather(measured: Sequence[dict[str, Any]], options: AnalysisOptions) -> dict[str, Any]:
    """Return means over texts for each way of evicting, and the share of heads that change less."""
    size = torch.stack([one["size"] for one in measured]).mean(0)  # [L, H]
    change = torch.stack([one["change"] for one in measured]).mean(0)  # [way, policy, budget, L, H]
    growth = torch.stack([one["growth"] for one in measured]).mean(0)
    lost = change[:, 0] > LEAST * size  # [way, budget, L, H]
    ratio = torch.where(lost, change[:, 1] / change[:, 0], torch.nan)
    figures: dict[str, Any] = {
        "policies": options.policies,
        "budgets": options.budgets,
        "layers": measured[0]["layers"],
        "texts": len(measured),
        "block_size": options.block_size,
    }
    for i, way in enumerate(WAYS):
        figures[way] = {
            "ratio_by_head": ratio[i],  # [budget, L, H]
            "lower": [float((r[r.isfinite()] <= 1).double().mean()) for r in ratio[i]],
            "median_ratio": ratio[i].flatten(1).nanmedian(-1).values,
            "relative_by_layer": (change[i] / size.clamp(min=1e-30)).mean(
                -1
            ),  # [policy, budget, L]
            "relative": (change[i].sum((-2, -1)) / size.sum()),  # [policy, budget]
            "growth": growth[i].mean((-2, -1)),  # [policy, budget]
        }
    return figures


def explain(figures: dict[str, Any]) -> str:
    """Explain the picture in two sentences: how to read it, and what it says."""
    first, second = figures["policies"]
    middle = len(figures["budgets"]) // 2
    shares = [figures[way]["lower"][middle] for way in WAYS]
    texts = ["undefined" if x is None else f"{100 * x:.0f} %" for x in shares]
    grown = [f"{figures['blocks']['growth'][i][middle]:.2f}" for i in (0, 1)]
    return (
        f"Purple cells are heads whose output moves less under {second} than under {first}, orange "
        "ones more, grey ones lose nothing; the lines show by how much of its size the output "
        "moves, solid where each policy evicts once after the text, dashed where it evicts after "
        "every block. At "
        f"{figures['budgets'][middle]} slots {second} moves {texts[0]} of the heads less when it "
        f"evicts once and {texts[1]} in blocks, where the output has {grown[1]} times its uncapped "
        f"size under {second} and {grown[0]} under {first}."
    )


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Draw Fig. 4 for both ways at the middle budget, then Fig. 5 and 6."""
    figure.set_size_inches(8.6, 6.4)
    (once, blocks), (layers, budgets) = figure.subplots(2, 2, height_ratios=(1, 1.1))
    first, second = figures["policies"]
    middle, nan = len(figures["budgets"]) // 2, float("nan")
    slots = figures["budgets"][middle]
    for axis, way in ((once, "once"), (blocks, "blocks")):
        ratio = figures[way]["ratio_by_head"][middle]
        cells = [[nan if x is None or x <= 0 else x for x in row] for row in ratio]
        picture = axis.imshow(
            [[_log2(x) for x in row] for row in cells],
            aspect="auto",
            cmap="PuOr_r",
            vmin=-2,
            vmax=2,
            interpolation="nearest",
        )
        axis.set_facecolor("#c3c8cd")
        lower = figures[way]["lower"][middle]
        suffix = "" if lower is None else f": lower in {100 * lower:.0f} % of heads"
        axis.set_title(f"{LABELS[way]}, {slots} slots{suffix}", fontsize=8)
        axis.set_xlabel("query head", fontsize=8)
        axis.set_ylabel("layer", fontsize=8)
        numbers = figures["layers"]
        step = -(-len(numbers) // 12)
        axis.set_yticks(range(0, len(numbers), step), [str(i) for i in numbers[::step]])
    bar = figure.colorbar(picture, ax=[once, blocks], ticks=[-2, -1, 0, 1, 2], aspect=14)
    bar.ax.set_yticklabels(["≤ 1/4", "1/2", "1", "2", "≥ 4"], fontsize=7)
    bar.set_label(f"{second} / {first} (grey: nothing is lost)", fontsize=8)
    colors, markers = ("#0b62a4", "#d1590f"), ("o", "s")
    for i, policy in enumerate(figures["policies"]):
        for way, dash in (("once", "-"), ("blocks", "--")):
            style = {"color": colors[i], "ls": dash, "marker": markers[i], "ms": 4, "lw": 1.2}
            label = f"{policy}, {LABELS[way]}"
            by_layer = figures[way]["relative_by_layer"][i][middle]
            layers.plot(range(len(by_layer)), by_layer, label=label, **style)
            budgets.plot(figures["budgets"], figures[way]["relative"][i], label=label, **style)
    layers.set_xlabel(f"layer, at {slots} slots", fontsize=8)
    layers.set_xticks(range(len(figures["layers"])), [str(i) for i in figures["layers"]])
    budgets.set_xlabel("slots per KV head", fontsize=8)
    budgets.set_xscale("log", base=2)
    budgets.set_xticks(figures["budgets"], [str(x) for x in figures["budgets"]])
    budgets.set_xticks([], minor=True)
    layers.set_ylabel("‖o − ô‖₁ / ‖o‖₁, behind W_O", fontsize=8)
    layers.legend(fontsize=6.5, frameon=False)
    for axis in (layers, budgets):
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in (once, blocks, layers, budgets):
        axis.tick_params(labelsize=7)
    texts = f"mean of {figures['texts']} text" + "s" * (figures["texts"] > 1)
    figure.suptitle(f"{TITLE}: {first} and {second}, {texts}", fontsize=9, x=0.01, ha="left")


def _log2(ratio: float) -> float:
    return float(torch.tensor(ratio).log2())
