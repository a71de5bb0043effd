"""Plans how many conversations a server holds at once under one cap, before anything is loaded.

Evictions make every conversation the same size, so that this is arithmetic:

    process + weights + passes + rows of those that are answered + one prompt that is tokenised
    + shared prompts × cache + places × (cache + text + index of it) <= cap
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from kvcap.runtime.errors import PlanInfeasible
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.units import format_bytes, with_margin

if TYPE_CHECKING:
    from typing_extensions import Unpack

SERVING = 64 << 20  # bytes: the server's libraries and threads, requests that are read or wait
BODY = 4 << 20  # bytes of a request, at most, where there is no cap
CAPPED_BODY = 256 << 10  # likewise under a cap, since the memory to tokenise it is kept free
TEXT = 64 << 10  # bytes of what was said in a conversation, beside its cache
TOGETHER = (8, 4, 2, 1)  # answers at once, tried in this order unless a number is given
PLACES = 64  # conversations where there is no cap
SHARED_PROMPTS = 4  # copies of caches behind system prompts unless a number is given
EACH_SHARED = 8  # then one such copy for so many conversations that fit


class Shared(NamedTuple):
    """A count of the bytes that answering several conversations at once takes besides these."""

    rows: int = 0  # the cache that they share meanwhile, or the rows that they get of it
    workspace: int = 0  # of reading a token of each


class ServerSizes(TypedDict, total=False):
    """A set of sizes that a server was asked for; None leaves one to the plan."""

    together: int | None
    """Says how many answers are written at once; by default 8, or as many as places fit."""
    places: int | None
    """Says how many conversations are in memory, at most; by default all that fit, or 64."""
    body: int | None
    """Says how many bytes a request has, at most; by default 256 KiB, 4 MiB without a cap."""
    shared_prompts: int | None
    """Says how many copies of caches behind system prompts are kept, at most.

    By default 4, or one in the place of each eighth conversation that fits."""


@dataclass(frozen=True)
class ServingPlan:
    """A plan that gives a server's bytes by component, and how many conversations fit."""

    one: MemoryPlan  # of one conversation, with the process before it
    together: int  # answers that are written at once
    shared: Shared
    places: int  # conversations in memory
    cap: int | None = None  # bytes of the process
    body: int = BODY  # bytes of a request, at most
    index: int = 0  # bytes of the index of a conversation's text, at most
    shared_prompts: int = 0  # copies of caches behind system prompts, at most

    @property
    def tokenising(self) -> int:
        """Return the bytes that the longest request takes while it, alone, is tokenised."""
        return self.one.tokenising * self.body

    @property
    def passes(self) -> int:
        """Return the bytes of the largest pass's workspace, and of the logits of all answers."""
        logits = self.one.logits * self.together
        block = self.one.workspace + self.one.logits
        return max(block, self.shared.workspace + logits) + logits

    @property
    def place_bytes(self) -> int:
        """Return the bytes that each conversation in memory adds."""
        return self.one.cache_bytes + TEXT + self.index

    @property
    def restoring(self) -> int:
        """Return the bytes held twice while a conversation is read from disk."""
        return 2 * self.one.cache_bytes

    @property
    def shared_prompt_bytes(self) -> int:
        """Return the bytes of all copies of caches behind system prompts, at most."""
        return self.shared_prompts * self.one.cache_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes that are held however many conversations there are."""
        own = self.one.baseline + SERVING + self.one.weights + self.shared_prompt_bytes
        own += self.one.word_vectors if self.index else 0
        return own + self.tokenising + self.passes + self.shared.rows + self.restoring

    @property
    def total_bytes(self) -> int:
        """Return the bytes that the process takes at most."""
        return self.fixed_bytes + self.places * self.place_bytes

    @property
    def summary(self) -> str:
        """Return one line: how many conversations fit, and how many bytes one takes."""
        under = "" if self.cap is None else f" under {format_bytes(self.cap)}"
        return (
            f"{self.places:,} conversations fit in memory{under}, {self.together} of them answered "
            f"at once: {format_bytes(self.place_bytes)} each beside "
            f"{format_bytes(self.fixed_bytes)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        return {
            "places": self.places,
            "together": self.together,
            "place_bytes": self.place_bytes,
            "index_bytes": self.index,
            "fixed_bytes": self.fixed_bytes,
            "rows_bytes": self.shared.rows,
            "passes_bytes": self.passes,
            "restoring_bytes": self.restoring,
            "shared_prompts": self.shared_prompts,
            "shared_prompt_bytes": self.shared_prompt_bytes,
            "serving_bytes": SERVING,
            "tokenising_bytes": self.tokenising,
            "body_bytes": self.body,
            "cap": self.cap,
            "total_bytes": self.total_bytes,
        }

    @property
    def _fit(self) -> int | None:
        """Return how many conversations fit under the cap; None: there is none."""
        return None if self.cap is None else (self.cap - self.fixed_bytes) // self.place_bytes

    @classmethod
    def of(
        cls,
        one: MemoryPlan,
        shared: Callable[[int], Shared],
        *,
        cap: int | None = None,
        index: int = 0,
        **sizes: Unpack[ServerSizes],
    ) -> ServingPlan:
        """Plan a server.

        Args:
            one: the plan of one conversation; its `baseline` is the process before.
            shared: what so many answers at once take beside their conversations.
            cap: bytes of the process; None: there is none.
            index: bytes of the index of a conversation's text, at most.
            sizes: as requested.

        Raises:
            PlanInfeasible: not one fits, or fewer than requested, saying how many do.
        """
        together, places = sizes.get("together"), sizes.get("places")
        body, shared_prompts = sizes.get("body"), sizes.get("shared_prompts")
        body = usual_body(cap) if body is None else body
        for number in (together,) if together else TOGETHER:
            if places is not None and places < number and not together:
                continue
            plan = cls(one, number, shared(number), 0, cap, body, index, shared_prompts or 0)
            least = max(number, places or 1)
            fit = plan._fit
            if fit is None or fit >= least:
                if shared_prompts is None:
                    spare = PLACES if fit is None else min(fit // EACH_SHARED, fit - least)
                    plan = replace(plan, shared_prompts=min(SHARED_PROMPTS, spare))
                    fit = plan._fit
                count = places or (PLACES if fit is None else fit)
                return replace(plan, places=max(number, count))
        assert cap is not None
        least = plan.fixed_bytes + max(plan.together, places or 1) * plan.place_bytes
        number = max(plan.together, places or 1)
        conversations = f"{number:,} conversation{'s' * (number > 1)}"
        raise PlanInfeasible(
            f"a server of {conversations} takes {least:,} bytes, more than the cap of {cap:,}: "
            f"{plan.fixed_bytes:,} beside them and {plan.place_bytes:,} each, so that "
            f"{max(0, fit or 0):,} fit; raise the cap to {with_margin(least) >> 20}MiB, or lower "
            f"{'--shared-prompts, ' if shared_prompts else ''}"
            f"{'--recall-store, the KV budget' if index else 'the KV budget'} or --max-body",
            least_memory_cap=with_margin(least),
        )


def usual_body(cap: object | None) -> int:
    """Return the most bytes of a request where nobody says how many.

    Args:
        cap: of the process; None: there is none.
    """
    return BODY if cap is None else CAPPED_BODY
