"""Runs the papers' own diagnostics of a model: one file per analysis, named as the analysis.

An analysis measures one text after another, joins the measurements into figures for a JSON file,
draws them, and explains the picture in two sentences. To add one, add a file that defines all names
of `Analysis`. Texts are read uncapped, so that an analysis sees the model's own queries, keys and
values; a capped cache shows which tokens a policy keeps.
"""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from kvcap.evals.reports import environment
from kvcap.lab.quality.sweep import options_of
from kvcap.lab.texts import Text
from kvcap.runtime.errors import ExtraMissing, how_to_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = "all"


@dataclass(frozen=True)
class AnalysisOptions:
    """Settings of an analysis; each analysis reads those that its docstring names."""

    policies: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()  # slots per KV head
    block_size: int = 128
    layer: int | None = None  # index in the model; None: each analysis chooses
    head: int | None = None  # KV head
    policy_options: Mapping[str, Any] = field(default_factory=dict)


class Analysis(Protocol):
    """A module that defines an analysis: one file of this folder."""

    TITLE: str
    PAPER: str
    """Names the paper that has this figure; empty: none has."""
    POLICIES: tuple[str, ...]
    """Lists the policies compared by default; empty: the analysis reads no policies."""
    SHARES: tuple[float, ...]
    """Lists the default budgets as shares of a text; empty: the analysis reads no budgets."""
    PROJECTIONS: bool
    """Says whether the analysis reads output projections."""
    TEXTS: int | None
    """Limits the texts that the analysis measures; None: all."""

    def check(self, options: AnalysisOptions) -> None:
        """Refuse options that the analysis cannot use.

        Raises:
            ValueError: naming the option.
        """

    def measure(self, text: Text, options: AnalysisOptions) -> Any:
        """Measure one text; return the measurement, for `gather`."""

    def gather(self, measured: Sequence[Any], options: AnalysisOptions) -> dict[str, Any]:
        """Join the measurements of all texts into lists and numbers; an undefined one is None."""

    def explain(self, figures: dict[str, Any]) -> str:
        """Explain the picture in two sentences: how to read it, and what it shows here."""

    def draw(self, figures: dict[str, Any], figure: Figure) -> None:
        """Draw into an empty figure."""


@cache
def analyses() -> dict[str, Analysis]:
    """Import every analysis; return them by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {n: cast(Analysis, importlib.import_module(f"{__name__}.{n}")) for n in names}


def named(names: Iterable[str]) -> list[str]:
    """Return each name once, with 'all' replaced by the names of all analyses.

    Raises:
        ValueError: there is no such analysis; the message names the nearest one.
    """
    parts = ([*analyses()] if name == ALL else [name] for name in names)
    chosen = list(dict.fromkeys(name for part in parts for name in part))
    for name in chosen:
        if name not in analyses():
            close = difflib.get_close_matches(name, analyses(), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(analyses())}"
            raise ValueError(f"no analysis is called {name!r}; {hint}")
    if not chosen:
        raise ValueError(f"name at least one analysis: all, {', '.join(analyses())}")
    return chosen


def require_matplotlib() -> None:
    """Check for matplotlib, before anything is measured.

    Raises:
        ExtraMissing: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ExtraMissing(f"kvcap analyze needs matplotlib; {how_to_install('plot')}")


def run(
    names: Sequence[str],
    texts: Sequence[Callable[[], Text]],
    options: AnalysisOptions,
    out: Path,
    report: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, dict[str, Any]]:
    """Measure texts one after another; write a PNG and a JSON document per analysis.

    Args:
        names: names of analyses.
        texts: functions that make a text; each text is dropped before the next one is made.
        options: settings; without policies or budgets, each analysis uses its own.
        out: the folder to write the files into.
        report: called with (measurements done, measurements in all).

    Raises:
        ValueError, PolicyError: options cannot work, which is checked before anything is measured;
            or a budget holds a whole text, or not even a policy's pins.
    """
    chosen = {name: analyses()[name] for name in named(names)}
    for analysis in chosen.values():
        analysis.check(_with_policies(analysis, options))
    _check_options(chosen.values(), options)
    counts = {name: min(len(texts), a.TEXTS or len(texts)) for name, a in chosen.items()}
    measured: dict[str, list[Any]] = {name: [] for name in chosen}
    settings: dict[str, AnalysisOptions] = {}
    lengths: list[int] = []
    done, total = 0, sum(counts.values())
    report(done, total)
    for i, make in enumerate(texts):
        due = [name for name in chosen if i < counts[name]]
        if not due:
            break
        text = make()
        text.projections = any(chosen[name].PROJECTIONS for name in due)
        lengths.append(len(text))
        for name in due:
            if name not in settings:  # budgets are shares of the first text
                settings[name] = _with_budgets(chosen[name], options, len(text))
            measured[name].append(chosen[name].measure(text, settings[name]))
            done += 1
            report(done, total)
    out.mkdir(parents=True, exist_ok=True)
    device = text.model.device
    head = {"model": text.model_name, "positions": text.positions, **environment(device)}
    documents = {}
    for name, analysis in chosen.items():
        figures = plain(analysis.gather(measured[name], settings[name]))
        used = settings[name]
        documents[name] = {
            "analysis": name,
            "title": analysis.TITLE,
            "paper": analysis.PAPER,
            "read": analysis.explain(figures),
            **head,
            "tokens": lengths[: counts[name]],
            "policies": list(used.policies),
            "budgets": list(used.budgets),
            "block_size": used.block_size,
            "policy_options": dict(used.policy_options),
            "figures": figures,
        }
        _write(documents[name], analysis, out)
    return documents


def plain(value: Any) -> Any:
    """Turn tensors into lists for JSON, with six digits, and None in place of NaN and infinity.

    >>> plain({"a": torch.tensor([0.5, float("nan")]), "b": (1, float("inf"))})
    {'a': [0.5, None], 'b': [1, None]}
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if -torch.inf < value < torch.inf else None
    return value


def _check_options(chosen: Iterable[Analysis], options: AnalysisOptions) -> None:
    """Refuse names that are no policy's, and options that no policy has."""
    compared = {name for one in chosen for name in _with_policies(one, options).policies}
    known = {option for name in compared for option in options_of(name)}
    for option in options.policy_options:
        if option not in known:
            close = difflib.get_close_matches(option, sorted(known), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {sorted(known)}"
            raise ValueError(f"no policy that is compared has an option {option!r}; {hint}")


def _with_policies(analysis: Analysis, options: AnalysisOptions) -> AnalysisOptions:
    return replace(
        options, policies=(options.policies or analysis.POLICIES) * bool(analysis.POLICIES)
    )


def _with_budgets(analysis: Analysis, options: AnalysisOptions, tokens: int) -> AnalysisOptions:
    shares = [max(1, int(share * tokens)) for share in analysis.SHARES]
    budgets = (options.budgets or tuple(shares)) * bool(shares)
    return replace(_with_policies(analysis, options), budgets=budgets)


def _write(document: dict[str, Any], analysis: Analysis, out: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    figure = Figure(dpi=160, layout="constrained")
    analysis.draw(document["figures"], figure)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    text = json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n"
    (out / f"{document['analysis']}.png").write_bytes(picture.getvalue())
    (out / f"{document['analysis']}.json").write_text(text, encoding="utf-8")
