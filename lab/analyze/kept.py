"""Shows which tokens of a prompt each policy kept, by layer: the strip of `kvcap report`.

The prompt is read block by block under the cap, as in a chat. `heads` has, for every policy, budget
and layer, how many KV heads hold each token at the end. Reads `policies`, `budgets` and
`block_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcap.lab.analyze import AnalysisOptions
from kvcap.lab.texts import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Tokens that each policy kept"
PAPER = ""
POLICIES: tuple[str, ...] = ("keydiff-window", "snapkv", "streaming_llm")
SHARES: tuple[float, ...] = (0.25,)
PROJECTIONS = False
TEXTS = 1


def check(options: AnalysisOptions) -> None:
    """Accept all options: this analysis has none to refuse."""


def measure(text: Text, options: AnalysisOptions) -> dict[str, Any]:
    """Return the tokens and, for every policy and budget, how many heads hold each, [L][n]."""
    runs = []
    for policy in options.policies:
        for budget in options.budgets:
            sets = text.kept(policy, budget, options.block_size, options.policy_options)
            heads = [one.sum(0) for one in sets]  # [n] each
            runs.append({"policy": policy, "budget": budget, "heads": heads})
    return {
        "text": text.name,
        "pieces": text.pieces,
        "layers": text.numbers,
        "kv_heads": sets[0].shape[0],
        "runs": runs,
    }


def gather(measured: Sequence[dict[str, Any]], options: AnalysisOptions) -> dict[str, Any]:
    """Return the figures of the one text."""
    return measured[0]


def explain(figures: dict[str, Any]) -> str:
    """Explain the picture in two sentences: how to read it, and what it says."""
    tokens, heads = len(figures["pieces"]), len(figures["layers"]) * figures["kv_heads"]
    listed = []
    for run in figures["runs"]:
        somewhere = sum(any(column) for column in zip(*run["heads"], strict=True))
        listed.append(f"{run['policy']} at {run['budget']} slots {100 * somewhere / tokens:.0f} %")
    return (
        f"Each row is a layer, each column a token from the first to the last of {tokens:,}, and "
        f"the darker it is, the more of the {figures['kv_heads']} KV heads still hold it. Of all "
        f"tokens, so many are held by at least one of {heads} heads of the model: "
        f"{', '.join(listed)}."
    )


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Draw a heatmap of layers over tokens for each policy and budget."""
    runs, layers = figures["runs"], figures["layers"]
    height = max(0.75, 0.1 * len(layers))
    figure.set_size_inches(8.4, 1.0 + (height + 0.35) * len(runs))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False).flatten()
    step = -(-len(layers) // 6)
    for axis, run in zip(axes, runs, strict=True):
        picture = axis.imshow(
            run["heads"],
            aspect="auto",
            cmap="Blues",
            vmin=0,
            vmax=figures["kv_heads"],
            interpolation="nearest",
        )
        axis.set_title(f"{run['policy']}, {run['budget']} slots", fontsize=8, loc="left", pad=3)
        axis.set_yticks(range(0, len(layers), step), [str(i) for i in layers[::step]])
        axis.tick_params(labelsize=7)
    figure.supylabel("layer", fontsize=8)
    axes[-1].set_xlabel("token", fontsize=8)
    bar = figure.colorbar(picture, ax=list(axes), aspect=30)
    bar.set_ticks(range(0, figures["kv_heads"] + 1, -(-figures["kv_heads"] // 8)))
    bar.set_label("KV heads that hold it", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.suptitle(f"{TITLE}: {figures['text']}", fontsize=9, x=0.01, ha="left")
