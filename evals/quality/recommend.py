"""Chooses a policy by figures of a user's model: flow and facts together, then speed.

Flow is the loss on passages of the user's text; facts are needles that are found. All policies have
figures of the same passages and needles, so that they can be compared pairwise. Measures nothing,
and knows no model.
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
FACTS_WORTH = 0.1  # how much lower a perplexity finding all facts rather than none outweighs
SAME = 0.01  # difference of perplexities, or of what facts are worth, that a reader does not notice
QUICKER = 0.25  # share of the time by which reading must be faster to count, above its noise
FLOW, FACTS = UNITS["perplexity"], UNITS["share"]


@dataclass(frozen=True)
class PolicyFigures:
    """The figures of a policy at the budget."""

    policy: str
    slots: int | None  # slots per KV head and layer; None: the policy never evicts
    kv_bytes: int | None  # bytes of the cache; None: the policy never evicts
    losses: tuple[float, ...]  # mean loss per token of every passage, in nats
    facts: tuple[float, ...] = ()  # score of every needle; (): not measured
    read_ms: float | None = None  # milliseconds in which a token of the text is read

    @property
    def perplexity(self) -> float:
        """Return the perplexity over all passages of the text."""
        return cell_score(self.losses, FLOW)

    @property
    def cost(self) -> float:
        """Return the logarithm of the perplexity, less what the facts are worth.

        The share of facts is that of two more, of which one is found, so that few facts weigh less.
        """
        share = (sum(self.facts) + 1) / (len(self.facts) + 2)
        return fmean(self.losses) - FACTS_WORTH * share

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as one object of JSON."""
        facts_share = fmean(self.facts) if self.facts else None
        return {
            **asdict(self),
            "perplexity": self.perplexity,
            "facts_found": facts_share,
            "cost": self.cost,
        }


@dataclass(frozen=True)
class Recommendation:
    """The recommended policy, and why the others are not."""

    policy: str | None  # None: no measured policy can be recommended
    reasons: Mapping[str, str]  # why each other candidate was dropped, by its policy
    remarks: tuple[str, ...]  # sentences that a reader needs beside the table


def choose(rows: Sequence[PolicyFigures]) -> Recommendation:
    """Choose the candidate of the least cost; of those within `SAME`, one that reads fastest.

    Candidates whose cost is higher than that of random eviction by more than `SAME` are dropped.
    """
    candidates = [row for row in rows if row.policy not in NEVER]
    floor = next(row for row in rows if row.policy == FLOOR)
    sound = [row for row in candidates if row.cost <= floor.cost + SAME]
    if not sound:
        reasons = {row.policy: _worse(row, floor) for row in candidates}
        sentences = (f"{name} is worse than random eviction: {x}" for name, x in reasons.items())
        return Recommendation(None, reasons, tuple(sentences))
    least = min(row.cost for row in sound)
    alike = [row for row in sound if row.cost <= least + SAME]
    fastest = min(_time(row) for row in alike)
    quick = (row for row in alike if _time(row) <= (1 + QUICKER) * fastest)
    chosen = min(quick, key=lambda row: row.cost)
    others = [row for row in candidates if row is not chosen]
    reasons = {row.policy: _reason(row, chosen, alike) for row in others}
    remarks = [_on_choice(chosen, floor)]
    for row in others:
        chance = "" if _told_apart(row, chosen) else ", a difference that may be chance"
        remarks.append(f"{row.policy} is dropped: {reasons[row.policy]}{chance}")
    if chosen.facts and not any(any(row.facts) for row in rows):
        remarks.append("the model finds no fact even uncapped, so that flow alone decides")
    return Recommendation(chosen.policy, reasons, tuple(remarks))


def flow_beside(row: PolicyFigures, other: PolicyFigures) -> Comparison:
    """Compare perplexities on the same text: the difference is a row's divided by the other's."""
    return compare(row.losses, other.losses, FLOW)


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

    >>> chosen = Recommendation("snapkv", {}, ())
    >>> " ".join(command(chosen, "pocket", "a.txt", {"--kv-budget": "1MiB"}, 64, plain=False))
    'kvcap chat pocket --policy snapkv --kv-budget 1MiB --recall auto'
    """
    assert choice.policy is not None, "nothing was recommended"
    begun = ["generate", model, "--file", file, "--raw"] if plain else ["chat", model]
    options = [part for name, value in given.items() for part in (name, str(value))]
    # For plain text, 'auto' would turn recall off; only a number of tokens turns it on.
    mode = str(recall) if plain else "auto"
    return ["kvcap", *begun, "--policy", choice.policy, *options, "--recall", mode]


def share(scores: Sequence[float]) -> str:
    """Return a text such as '3 of 4' for the needles that were found; '' if not measured."""
    return f"{sum(scores):g} of {len(scores)}" if scores else ""


def _on_choice(chosen: PolicyFigures, floor: PolicyFigures) -> str:
    """Return a sentence on the figures of the chosen policy, beside those of random eviction."""
    facts = f" and {share(chosen.facts)} facts" if chosen.facts else ""
    ratio = flow_beside(chosen, floor).difference
    sentence = f"{chosen.policy} is chosen, with a perplexity of {chosen.perplexity:.3f}{facts}"
    return f"{sentence}; that is {ratio:.3f} times the perplexity of random eviction" + (
        f", which finds {share(floor.facts)}" if floor.facts else ""
    )


def _reason(row: PolicyFigures, chosen: PolicyFigures, alike: Iterable[PolicyFigures]) -> str:
    """Return why a candidate was not chosen."""
    if row not in alike:
        return _worse(row, chosen)
    same = sum(row.facts) == sum(chosen.facts)
    facts = "" if same else f" ({share(row.facts)} facts against {share(chosen.facts)})"
    if _time(row) > (1 + QUICKER) * _time(chosen):
        slower = _time(row) / _time(chosen) - 1
        return f"as good within {SAME:.0%}{facts}, and reads {slower:.0%} slower"
    return f"as good within {SAME:.0%}{facts}, and no faster"


def _worse(row: PolicyFigures, other: PolicyFigures) -> str:
    """Return by which figures a row is worse than another, and which of its own these outweigh."""
    flow = flow_beside(row, other).difference - 1
    facts = sum(other.facts) - sum(row.facts)
    parts = [(flow, f"perplexity {abs(flow):.1%} {'higher' if flow > 0 else 'lower'}")]
    if facts:
        amount = f"{abs(facts):g} fact{'' if abs(facts) == 1 else 's'}"
        shares = f"{share(row.facts)} against {share(other.facts)}"
        parts.append((facts, f"{amount} {'fewer' if facts > 0 else 'more'} ({shares})"))
    bad = " and ".join(text for value, text in parts if value > 0)
    good = " and ".join(text for value, text in parts if value <= 0)
    if not bad or not good or not facts:
        return bad or good
    return f"{bad}, which {good} does not outweigh"


def _told_apart(row: PolicyFigures, other: PolicyFigures) -> bool:
    """Return whether the interval of the ratio of perplexities, or of the facts, has no 0."""
    flow = flow_beside(row, other)
    if not flow.ci_low <= 1 <= flow.ci_high:
        return True
    if not row.facts:
        return False
    facts = compare(row.facts, other.facts, FACTS)
    return not facts.ci_low <= 0 <= facts.ci_high


def _time(row: PolicyFigures) -> float:
    return math.inf if row.read_ms is None else row.read_ms
