"""Names the formulations, the ways to compute a policy's score in a graph, in a sentence each.

Commands, manifests, plans, reports, the page on a phone and the docs use these names and no others.
"""

from __future__ import annotations

TRACED = "naive"  # the one that every policy has

FORMULATIONS = {
    TRACED: "the policy's own score, as traced; nothing is kept between blocks",
    "stateless": "unit keys times the unit anchor; nothing is kept between blocks",
    "inverse_norms": "the inverse norm of every slot's key is kept between blocks",
    "running_anchor": "inverse norms and the sum of all keys are kept between blocks",
}
