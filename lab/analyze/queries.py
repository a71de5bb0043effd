"""Draws CaliDrop's Figures 1 and 3b: how alike neighbouring queries are, how often it recomputes.

`heatmap` is the cosine of every pair of the last 64 queries of one query head. `similarity` is the
mean cosine of two queries by their distance in tokens. `recomputed` is the share of steps in which
CaliDrop would attend to the evicted tokens again, if the second half of the text were generated: it
does so, and remembers the query, if the cosine with the remembered query is below θ1. It depends on
queries alone. `loss` is `‖o - ô‖₁ / ‖o‖₁` of the last token after a policy evicted once, without
calibration, and with the output that a query 1 to 10 tokens earlier got from the evicted tokens.
Queries are rotated to their places in the text. Reads `policies` (the first), `budgets` (the
first), `layer` (the middle one) and `head` (the first, a KV head).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvcap.lab.analyze import AnalysisOptions
from kvcap.lab.analyze.pca import layer_and_head
from kvcap.lab.captured import until
from kvcap.lab.texts import Text
from kvcap.policies import Observation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Similar queries and recomputing"
PAPER = "CaliDrop, Fig. 1 and 3b"
POLICIES: tuple[str, ...] = ("snapkv",)
SHARES: tuple[float, ...] = (0.125,)
PROJECTIONS = False
TEXTS = None
SHOWN = 64  # queries of the heatmap
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
THETAS = (0.5, 0.6, 0.7, 0.8, 0.9)
EARLIER = 10  # most tokens between the remembered query and the last one


def check(options: AnalysisOptions) -> None:
    """Accept all options: this analysis has none to refuse."""


def measure(text: Text, options: AnalysisOptions) -> dict[str, Any]:
    """Measure similarity [L, distances], recomputed [θ1, L] and losses [2, L], and one heatmap."""
    tokens = len(text)
    distances = [d for d in DISTANCES if d < tokens // 2]
    layer, head = layer_and_head(text, options)
    sets = text.kept(
        options.policies[0], options.budgets[0], tokens, options.policy_options, tokens - 1
    )
    earlier = Random(f"queries/{text.name}").randint(1, min(EARLIER, tokens - 2))
    similar, recomputed, losses = [], [], []
    for whole, kept in zip(text.layers, sets, strict=True):
        assert whole.queries is not None
        unit = normalize(whole.queries[0].float(), dim=-1)  # [H, n, D]
        similar.append(
            torch.stack([(unit[:, d:] * unit[:, :-d]).sum(-1).mean() for d in distances])
        )
        steps = unit[:, tokens // 2 :]
        recomputed.append(torch.stack([recompute_share(steps, theta).mean() for theta in THETAS]))
        losses.append(loss(whole, kept.to(unit.device), tokens, earlier))
    drawn = text.layers[layer]
    assert drawn.queries is not None
    last = normalize(drawn.queries[0, head * drawn.groups, -SHOWN:].float(), dim=-1)
    return {
        "layers": text.numbers,
        "shown": (text.numbers[layer], head * drawn.groups),
        "apart": distances,
        "heatmap": (last @ last.T).cpu(),
        "similarity": torch.stack(similar).cpu(),
        "recomputed": torch.stack(recomputed, 1).cpu(),
        "loss": torch.stack(losses, 1).cpu(),
    }


def recompute_share(unit: Tensor, theta: float) -> Tensor:
    """Return the share of steps after the first that recompute, by query head [H].

    Args:
        unit: queries of unit length [H, steps, D]; the first is remembered at the start.
        theta: a step recomputes if the cosine with the remembered query is below this.
    """
    remembered = unit[:, 0]
    count = torch.zeros(unit.shape[0], device=unit.device)
    for query in unit[:, 1:].unbind(1):
        recomputes = (query * remembered).sum(-1) < theta  # [H]
        remembered = torch.where(recomputes[:, None], query, remembered)
        count += recomputes
    return count / max(1, unit.shape[1] - 1)


def loss(whole: Observation, kept: Tensor, tokens: int, earlier: int) -> Tensor:
    """Return the mean over heads of `‖o - ô‖₁ / ‖o‖₁`, without and with calibration, [2].

    Args:
        whole: the captured observation.
        kept: tokens that were kept, bool [K, tokens - 1].
        tokens: number of tokens of the text.
        earlier: tokens from the remembered query to the last one.
    """
    last, before = until(whole, tokens, 1), until(whole, tokens - earlier, 1)
    assert before.queries is not None
    # The earlier query takes the last place, so that it sees every evicted token.
    old = until(whole, tokens, 1)
    old.queries = before.queries
    own = kept.new_ones(kept.shape[0], 1)
    held = torch.cat((kept, own), -1)[:, None]  # [K, 1, n]
    true, total = attend(last, torch.ones_like(held))
    capped, capped_lse = attend(last, held)
    missing, missing_lse = attend(old, ~held)
    share = torch.sigmoid(missing_lse - capped_lse)[..., None]
    calibrated = capped + share * (missing - capped)
    if last.rule.sinks is not None:  # sink logits count once for kept and evicted tokens together
        sinks = last.rule.sinks.float().view(total.shape)
        both = torch.logaddexp(capped_lse, missing_lse)
        parts = ((true, total), (capped, capped_lse), (calibrated, both))
        true, capped, calibrated = (x * torch.sigmoid(lse - sinks)[..., None] for x, lse in parts)
    size = true.abs().sum(-1).clamp(min=1e-30)
    errors = [(true - output).abs().sum(-1) / size for output in (capped, calibrated)]
    return torch.stack([error.mean() for error in errors])


def attend(obs: Observation, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attend by one query to the slots `seen` [K, 1, n]; return [K, G, D] and log-sum-exp [K, G].

    Without any slot they are 0 and -inf.
    """
    logits = obs.logits[0, :, :, 0].masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp().nan_to_num(nan=0.0)
    return torch.matmul(weights, obs.values[0].float()), lse


def gather(measured: Sequence[dict[str, Any]], options: AnalysisOptions) -> dict[str, Any]:
    """Return the means over texts, and the heatmap of the first text."""
    shortest = min(len(one["apart"]) for one in measured)
    layer, head = measured[0]["shown"]
    return {
        "layers": measured[0]["layers"],
        "layer": layer,
        "head": head,
        "policy": options.policies[0],
        "budget": options.budgets[0],
        "apart": measured[0]["apart"][:shortest],
        "thetas": THETAS,
        "heatmap": measured[0]["heatmap"],
        "similarity": torch.stack([one["similarity"][:, :shortest] for one in measured]).mean(0),
        "recomputed": torch.stack([one["recomputed"] for one in measured]).mean(0),
        "loss": torch.stack([one["loss"] for one in measured]).mean(0),
    }


def explain(figures: dict[str, Any]) -> str:
    """Explain the picture in two sentences: how to read it, and what it says."""
    shares = figures["recomputed"][THETAS.index(0.7)]
    mean = sum(shares) / len(shares)
    plain, calibrated = (sum(row) / len(row) for row in figures["loss"])
    return (
        "The more alike neighbouring queries are (a bright band along the diagonal, lines near 1), "
        "the longer what an earlier query got from evicted tokens can stand in for what a later "
        f"one would get. At θ1 0.7 {100 * mean:.0f} % of steps attend to the evicted tokens anew "
        "(the paper: one of eight), and calibration takes the error of attention's output from "
        f"{plain:.2f} to {calibrated:.2f} of its size."
    )


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Draw the heatmap, similarity by distance, recomputed steps and losses by layer."""
    figure.set_size_inches(8.8, 6.6)
    (heat, lines), (steps, losses) = figure.subplots(2, 2)
    picture = heat.imshow(
        figures["heatmap"], vmin=-1, vmax=1, cmap="PuOr_r", interpolation="nearest"
    )
    heat.set_title(
        f"queries of layer {figures['layer']}, head {figures['head']}", fontsize=8, loc="left"
    )
    heat.set_xlabel(f"the last {len(figures['heatmap'])} queries", fontsize=8)
    bar = figure.colorbar(picture, ax=heat, ticks=[-1, 0, 1])
    bar.ax.tick_params(labelsize=7)
    bar.set_label("cosine", fontsize=8)
    numbers = figures["layers"]
    chosen = sorted({round(i * (len(numbers) - 1) / 5) for i in range(6)})
    for i, style in zip(chosen, STYLES, strict=False):
        color, marker, dash = style
        lines.plot(
            figures["apart"],
            figures["similarity"][i],
            color=color,
            marker=marker,
            ls=dash,
            ms=4,
            lw=1.2,
            label=f"layer {numbers[i]}",
        )
    lines.set_xscale("log", base=2)
    lines.set_xticks(figures["apart"], [str(d) for d in figures["apart"]])
    lines.set_xticks([], minor=True)
    lines.set_xlabel("tokens apart", fontsize=8)
    lines.set_ylabel("mean cosine of two queries", fontsize=8)
    across = range(len(numbers))
    for theta, shares, style in zip(figures["thetas"], figures["recomputed"], STYLES, strict=False):
        color, marker, dash = style
        steps.plot(
            across, shares, color=color, marker=marker, ls=dash, ms=4, lw=1.2, label=f"θ1 = {theta}"
        )
    steps.axhline(1 / 8, color="black", lw=0.7, ls=":", label="one of eight")
    steps.set_ylim(-0.02, 1.02)
    steps.set_ylabel("share of steps that recompute", fontsize=8)
    for i, (label, style) in enumerate(zip(("without", "with"), STYLES, strict=False)):
        color, marker, dash = style
        losses.plot(
            across,
            figures["loss"][i],
            color=color,
            marker=marker,
            ls=dash,
            ms=4,
            lw=1.2,
            label=f"{label} calibration",
        )
    losses.set_ylim(bottom=0)
    losses.set_ylabel("‖o − ô‖₁ / ‖o‖₁ of the next token", fontsize=8)
    losses.set_title(
        f"{figures['policy']}, {figures['budget']} slots, evicted once", fontsize=8, loc="left"
    )
    for axis in (steps, losses):
        axis.set_xticks(across, [str(i) for i in numbers])
        axis.set_xlabel("layer", fontsize=8)
    steps.legend(fontsize=6.5, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    for axis in (lines, losses):
        axis.legend(fontsize=6.5, frameon=False)
    for axis in (lines, steps, losses):
        axis.spines[["top", "right"]].set_visible(False)
    for axis in (heat, lines, steps, losses):
        axis.tick_params(labelsize=7)
    figure.suptitle(TITLE, fontsize=9, x=0.01, ha="left")


STYLES = (
    ("#0b62a4", "o", "-"),
    ("#b4450b", "s", "--"),
    ("#3d7d1e", "^", ":"),
    ("#6f4bb0", "D", "-."),
    ("#6b6f76", "v", "-"),
    ("#b23a6b", "x", "--"),
)
