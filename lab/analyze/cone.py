"""Tests DropKV's Tables 12 to 16: do Theorem 1's assumptions hold, and how good is its choice?

For a query, tokens may be evicted if they are before the newest 8, and not in the tenth that gets
the most attention. `epsilon` is the most attention that one of them gets (Assumption 1, Table 12).
`cone` is the cone constant `c*` of their residuals `a - v_j`, above 0 if all lie in one cone
(Assumption 2, Tables 13 and 14). `bound` is the theorem's factor `1 / (c* (1 - ε) (1 - kε))`, if it
exists (Table 15); `k` is the number of tokens above the budget. `ratio` is the change of the output
by DropKV's choice of 10 or 18 of 20 tokens, divided by that of the best choice of all (Table 16). A
triple is a query head at a place of a text. Reads `budgets` (the first).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcap.lab.analyze import AnalysisOptions
from kvcap.lab.bench import proxy
from kvcap.lab.captured import on_cpu, until
from kvcap.lab.texts import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "DropKV's assumptions and its choice"
PAPER = "DropKV (Zhang et al. 2026), Tables 12-16"
POLICIES: tuple[str, ...] = ()
SHARES: tuple[float, ...] = (0.1,)
PROJECTIONS = False
TEXTS = None
STEPS = 300  # steps of the search for a cone
POOLS = 150  # triples of a text, per stratum, whose best set is searched for, as in Table 16
FLOOR = 1e-9  # least attention that the picture has
QUANTILES = ("min", "p05", "p50", "p95", "max")
LEVELS = (0.0, 0.05, 0.5, 0.95, 1.0)
CONES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)  # Table 14's


def check(options: AnalysisOptions) -> None:
    """Accept all options: this analysis has none to refuse."""


def measure(text: Text, options: AnalysisOptions) -> dict[str, Any]:
    """Measure every layer and query head: constants [L, H], and ratios by stratum and number."""
    tokens = len(text)
    cones, epsilons = [], []
    drawn: dict[str, list[proxy.Pools]] = {}
    most = max(1, POOLS // len(text.layers))  # query heads of a layer
    for j, whole in enumerate(text.layers):
        rng = Random(f"cone/{text.name}/{j}")
        seen = on_cpu(until(whole, rng.randrange(tokens // 2, tokens) + 1, 1))
        by_stratum, residuals = proxy.draw(seen, seed=j)
        cones.append(proxy.cone(residuals, STEPS))
        epsilons.append(candidates(seen).amax(-1))
        heads = range(len(residuals))
        chosen = torch.tensor(sorted(rng.sample(heads, min(most, len(heads)))))
        for name, pools in by_stratum.items():
            drawn.setdefault(name, []).append(pools.heads(chosen).noticed())
    return {
        "layers": text.numbers,
        "cone": torch.stack(cones),
        "epsilon": torch.stack(epsilons),
        "evicted": max(0, tokens - options.budgets[0]),
        "ratio": ratios(drawn),
    }


def ratios(drawn: dict[str, list[proxy.Pools]]) -> dict[tuple[str, int], Tensor]:
    """Return `F(Ĵ) / F(J*)` [2, R] by stratum and number evicted: by costs and by attention."""
    sizes = [sum(len(pools.cost) for pools in parts) for parts in drawn.values()]
    parts = [pools for several in drawn.values() for pools in several]
    every = proxy.Pools(*(torch.cat(part) for part in zip(*parts, strict=True)))
    by_stratum = {}
    for count in proxy.EVICTED:  # all pools at once, as the same sets of tokens are tried in each
        best = proxy.optimum(every, count).sqrt()
        moved = [proxy.chosen(every, by, count).sqrt() for by in (every.cost, every.attention)]
        by_stratum[count] = (torch.stack(moved) / best).split(sizes, -1)
    return {
        (name, count): by_stratum[count][i]
        for i, name in enumerate(drawn)
        for count in proxy.EVICTED
    }


def gather(measured: Sequence[dict[str, Any]], options: AnalysisOptions) -> dict[str, Any]:
    """Join the texts' figures as distributions over all triples."""
    cone = torch.stack([one["cone"] for one in measured])  # [texts, L, H]
    epsilon = torch.stack([one["epsilon"] for one in measured]).double()
    evicted = torch.tensor([one["evicted"] for one in measured]).view(-1, 1, 1)
    left = 1 - evicted * epsilon
    bound = 1 / (cone * (1 - epsilon) * left)
    applies = (cone > 0) & (left > 0)
    table = []
    for name, count in measured[0]["ratio"]:
        both = torch.cat([one["ratio"][name, count] for one in measured], -1)
        chosen, plain = both[:, both.isfinite().all(0)]
        table.append(
            {
                "pools": name,
                "evicted": count,
                "records": len(chosen),
                "dropkv": quantiles(chosen),
                "attention": quantiles(plain),
            }
        )
    return {
        "layers": measured[0]["layers"],
        "triples": cone.numel(),
        "cone": quantiles(cone.flatten()),
        "cone_values": cone.flatten().sort().values,
        "cone_above": {str(x): float((cone > x).double().mean()) for x in CONES},
        "cone_by_layer": (cone > 0).double().mean((0, 2)),
        "epsilon": quantiles(epsilon.flatten()),
        "epsilon_by_layer": epsilon.transpose(0, 1).flatten(1).median(1).values,
        "evicted": [one["evicted"] for one in measured],
        "bound": quantiles(bound[applies]),
        "bound_finite": float(applies.double().mean()),
        "ratio": table,
    }


def candidates(seen: Any) -> Tensor:
    """Return the attention [H, n'] of tokens that may be evicted, chosen as in `bench.proxy`."""
    last = seen.positions.shape[-1] - proxy.SPARED
    p = seen.attention[0, :, :, 0, :last].flatten(0, 1)  # [H, n]
    least: Tensor = p.topk(last - int(proxy.NEEDED * last), largest=False).values
    return least


def quantiles(values: Tensor) -> dict[str, float | None]:
    """Return minimum, 5th, 50th and 95th percentile and maximum; all None without values."""
    if not values.numel():
        return dict.fromkeys(QUANTILES)
    at_levels = values.double().quantile(torch.tensor(LEVELS, dtype=torch.float64))
    return dict(zip(QUANTILES, at_levels.tolist(), strict=True))


def explain(figures: dict[str, Any]) -> str:
    """Explain the picture in two sentences: how to read it, and what it says."""
    held, median = figures["cone_above"]["0.0"], figures["cone"]["p50"]
    random = figures["ratio"][0]["dropkv"]
    factors = (
        "undefined" if random["p50"] is None else f"{random['p50']:.2f} (95 %: {random['p95']:.2f})"
    )
    return (
        "Mass to the right of 0 in the first panel, and dots near 1 in the last, mean that "
        "choosing tokens one by one, as DropKV does, is nearly as good as the best choice of all "
        "of them together. Here all candidates lie in one cone in "
        f"{100 * held:.0f} % of {figures['triples']:,} triples (median constant {median:.2f}), and "
        f"DropKV's choice from random pools moves the output {factors} times as far as the best."
    )


def draw(figures: dict[str, Any], figure: Figure) -> None:
    """Draw the cone constants, the two assumptions by layer, and the ratios by stratum."""
    figure.set_size_inches(9.6, 3.5)
    cones, layers, ratios = figure.subplots(1, 3, width_ratios=(1, 1, 1.35))
    cones.hist(figures["cone_values"], bins=24, color="#0b62a4")
    cones.axvline(0, color="black", lw=1, ls=":")
    cones.set_xlabel("cone constant c* (above 0: it holds)", fontsize=8)
    cones.set_ylabel("triples", fontsize=8)
    numbers = figures["layers"]
    across = range(len(numbers))
    layers.plot(
        across,
        figures["cone_by_layer"],
        marker="o",
        ms=4,
        color="#0b62a4",
        lw=1.2,
        label="share with c* > 0",
    )
    layers.set_ylim(-0.03, 1.03)
    layers.set_xticks(across, [str(i) for i in numbers])
    layers.set_xlabel("layer", fontsize=8)
    layers.set_ylabel("share of triples with c* > 0 (●)", fontsize=8, color="#0b62a4")
    other = layers.twinx()
    most = [max(x, FLOOR) for x in figures["epsilon_by_layer"]]
    other.plot(across, most, marker="s", ms=4, ls="--", color="#b4450b", lw=1.2)
    other.set_yscale("log")
    other.set_ylabel("median ε, most attention (■; floor 1e-9)", fontsize=8, color="#b4450b")
    names = [f"{row['pools']}, {row['evicted']} of 20" for row in figures["ratio"]]
    for index, row in enumerate(figures["ratio"]):
        for key, color, marker, shift in (
            ("dropkv", "#0b62a4", "o", 0.14),
            ("attention", "#b4450b", "s", -0.14),
        ):
            one = row[key]
            if one["p50"] is not None:
                ratios.hlines(index + shift, one["p05"], one["p95"], color=color, lw=1)
                ratios.plot(
                    one["p50"],
                    index + shift,
                    marker,
                    color=color,
                    ms=4.5,
                    label=key if index == 0 else None,
                )
    ratios.set_yticks(range(len(names)), names)
    ratios.invert_yaxis()
    ratios.axvline(1, color="black", lw=0.6, ls=":")
    ratios.set_xlabel("change / least change (line: 5 to 95 %)", fontsize=8)
    ratios.legend(fontsize=7, frameon=False, loc="lower right")
    for axis in (cones, layers, ratios, other):
        axis.tick_params(labelsize=7)
        axis.spines["top"].set_visible(False)
    figure.suptitle(TITLE, fontsize=9, x=0.01, ha="left")
