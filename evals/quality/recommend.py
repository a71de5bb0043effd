"""Chooses a policy by figures of a user's model: flow first, then facts, then time.

Flow is the loss on pieces of the user's text; facts are needles that are found. All policies have
figures of the same pieces and samples, so that they can be compared pairwise. Measures nothing, and
knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from kvcap.evals.quality.paired import Comparison, compare
from kvcap.evals.quality.scores import UNITS, cell_score

FLOOR, UNCAPPED = "random", "full"
NEVER = (FLOOR, UNCAPPED)  # policies that are measured for comparison, and never recommended
SAME_FLOW = 1.01  # ratio of perplexities up to which a reader notices no difference
FLOW, FACTS = UNITS["perplexity"], UNITS["share"]


@dataclass(frozen=True)
class PolicyFigures:
    """The figures of a policy at the budget."""

    policy: str
    slots: int | None  # slots per KV head and layer; None: the policy never evicts
    kv_bytes: int | None  # bytes of the cache; None: the policy never evicts
    losses: tuple[float, ...]  # mean loss per token of every piece of the text, in nats
    facts: tuple[float, ...] = ()  # score of every needle; (): not measured
    recalled: tuple[float, ...] = ()  # scores of the same needles with recall; (): not measured
    eviction_ms: float | None = None  # milliseconds per block, all layers together
    decode_ms: float | None = None  # milliseconds per token of an answer

    @property
    def perplexity(self) -> float:
        """Return the perplexity over all pieces of the text."""
        return cell_score(self.losses, FLOW)

    @property
    def recall_helps(self) -> bool:
        """Return whether more facts are found with recall than without it."""
        return bool(self.recalled) and fmean(self.recalled) > fmean(self.facts)

    @property
    def best_facts(self) -> tuple[float, ...]:
        """Return the scores of needles with recall where that helps, else without it."""
        return self.recalled if self.recall_helps else self.facts

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as one object of JSON."""
        return {
            **asdict(self),
            "perplexity": self.perplexity,
            "facts_found": _mean(self.facts),
            "recalled_found": _mean(self.recalled),
        }


@dataclass(frozen=True)
class Recommendation:
    """The recommended policy, and the reasons."""

    policy: str | None  # None: no measured policy can be recommended
    recall: bool  # whether to use recall
    near: tuple[str, ...]  # policies whose flow is as good as the best, in the order measured
    remarks: tuple[str, ...]  # sentences that a reader needs beside the table


def near_best(rows: Sequence[PolicyFigures]) -> list[PolicyFigures]:
    """Return the candidates whose flow is not worse than the best, nor than random eviction."""
    dropped = below_random(rows)
    sound = [row for row in _candidates(rows) if row not in dropped]
    if not sound:
        return []
    best = min(sound, key=lambda row: row.perplexity)
    return [row for row in sound if not is_worse(row, best)]


def below_random(rows: Sequence[PolicyFigures]) -> list[PolicyFigures]:
    """Return the candidates whose flow is worse than that of random eviction.

    One whose pieces differ too much to tell is dropped if its perplexity is no lower than that of
    another that was dropped: noise does not recommend a policy.
    """
    candidates, floor = _candidates(rows), _named(rows, FLOOR)
    least = min((row.perplexity for row in candidates if is_worse(row, floor)), default=math.inf)
    return [row for row in candidates if row.perplexity >= least]


def is_worse(row: PolicyFigures, other: PolicyFigures) -> bool:
    """Return whether a row's flow is significantly worse, by more than `SAME_FLOW`."""
    beside = flow_beside(row, other)
    return beside.ci_low > 1 and beside.difference > SAME_FLOW


def flow_beside(row: PolicyFigures, other: PolicyFigures) -> Comparison:
    """Compare perplexities on the same pieces: the difference is a row's divided by the other's."""
    return compare(row.losses, other.losses, FLOW)


def choose(rows: Sequence[PolicyFigures]) -> Recommendation:
    """Choose by facts among the candidates near the best flow, and by time among equals.

    Equals find as many facts, and have perplexities within `SAME_FLOW` of the least. So a policy
    with worse flow is not chosen for its speed if few pieces leave wide intervals.
    """
    near, floor = near_best(rows), _named(rows, FLOOR)
    remarks = [
        f"{row.policy} is worse than random eviction: "
        f"{flow_beside(row, floor).difference:.2f} times its perplexity"
        for row in below_random(rows)
    ]
    if not near:
        return Recommendation(None, False, (), tuple(remarks))
    least = min(row.perplexity for row in near)
    chosen = min(near, key=lambda row: _rank(row, least))
    facts = chosen.best_facts
    if facts:
        remarks += _on_facts(chosen, rows, near)
    names = tuple(row.policy for row in near)
    return Recommendation(chosen.policy, chosen.recall_helps, names, tuple(remarks))


def command(
    choice: Recommendation,
    model: str,
    file: str,
    given: Mapping[str, Any],
    recall: int,
    *,
    plain: bool,
) -> list[str]:
    """Return the command line to use.

    Args:
        choice: a recommendation with a policy.
        model: the model, as the user named it.
        file: the file of the text, which a model without a chat template continues.
        given: values of further options of the command, by option.
        recall: most tokens that were read again for a question.
        plain: whether the model has no chat template.

    >>> chosen = Recommendation("snapkv", True, ("snapkv",), ())
    >>> " ".join(command(chosen, "pocket", "a.txt", {"--kv-budget": "1MiB"}, 64, plain=False))
    'kvcap chat pocket --policy snapkv --kv-budget 1MiB --recall auto'
    """
    assert choice.policy is not None, "nothing was recommended"
    begun = ["generate", model, "--file", file, "--raw"] if plain else ["chat", model]
    options = [part for name, value in given.items() for part in (name, str(value))]
    # For plain text, 'auto' would turn recall off; only a number of tokens turns it on.
    mode = "off" if not choice.recall else str(recall) if plain else "auto"
    return ["kvcap", *begun, "--policy", choice.policy, *options, "--recall", mode]


def _on_facts(
    chosen: PolicyFigures, rows: Sequence[PolicyFigures], near: Sequence[PolicyFigures]
) -> list[str]:
    """Return sentences about the facts that were found."""
    sentences, full = [], _named(rows, UNCAPPED).facts
    if not any(full) and not any(chosen.best_facts):
        return ["the model finds no fact even uncapped, so that flow and time alone decide"]
    if chosen.recalled:
        more = "more than" if chosen.recall_helps else "no more than"
        sentences.append(
            f"with recall {chosen.policy} finds {share(chosen.recalled)} facts, {more} the "
            f"{share(chosen.facts)} without it"
        )
    names = [row.policy for row in near]
    others = [row for row in _candidates(rows) if row.policy not in names and row.best_facts]
    best = max(others, key=lambda row: fmean(row.best_facts), default=None)
    if best is not None and compare(best.best_facts, chosen.best_facts, FACTS).ci_low > 0:
        ratio = flow_beside(best, chosen).difference
        sentences.append(
            f"{best.policy} finds far more facts, {share(best.best_facts)}, at {ratio:.2f} times "
            "the perplexity: take it where facts are all that counts"
        )
    return sentences


def _candidates(rows: Iterable[PolicyFigures]) -> list[PolicyFigures]:
    return [row for row in rows if row.policy not in NEVER]


def _named(rows: Iterable[PolicyFigures], policy: str) -> PolicyFigures:
    return next(row for row in rows if row.policy == policy)


def _rank(row: PolicyFigures, least: float) -> tuple[float, bool, float, float]:
    """Return a sort key, the best row first; `least` is the least perplexity of all rows."""
    facts = _mean(row.best_facts) or 0.0
    time = float("inf") if row.eviction_ms is None else row.eviction_ms
    return -facts, row.perplexity > SAME_FLOW * least, time, row.perplexity


def _mean(scores: Sequence[float]) -> float | None:
    return fmean(scores) if scores else None


def share(scores: Sequence[float]) -> str:
    """Return a text such as '3 of 4' for the needles that were found; '' if not measured."""
    return f"{sum(scores):g} of {len(scores)}" if scores else ""
