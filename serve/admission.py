"""Opens a server under a cap of its process, with as many conversations as fit by known sizes.

Nothing is loaded where not even one conversation fits. What loading really took is measured, and
the plan made again with that; from then on every conversation adds the same bytes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcap.runtime.cli.commands import load_for_chat, planned_serving
from kvcap.runtime.cli.console import say
from kvcap.runtime.cli.options import Run
from kvcap.runtime.memory.cap_guard import CapGuard, check_enforce, limit_data
from kvcap.runtime.memory.free_memory import process_bytes
from kvcap.runtime.planning.plan import RUNNING, parse_cap
from kvcap.runtime.planning.serving import ServerSizes, ServingPlan
from kvcap.runtime.recall.settings import DEFAULT, RecallSettings
from kvcap.runtime.session.template_forms import without_default
from kvcap.runtime.units import parse_bytes
from kvcap.serve.saved import SavedConversations
from kvcap.serve.scheduler import Limits, Scheduler
from kvcap.serve.threads import by_a_thread

if TYPE_CHECKING:
    from typing_extensions import Unpack

SWITCH_S = 0.0005  # seconds after which a busy thread lets others run; 5 ms by default
DISK = "4GiB"  # the most that saved conversations take, by default


@dataclass
class Opened:
    """A server's conversations, and the plan that they keep to."""

    scheduler: Scheduler
    plan: ServingPlan


def open_conversations(
    run: Run,
    *,
    waiting: int = 64,
    folder: str | os.PathLike[str] | None = None,
    disk_cap: str | int = DISK,
    shared: bool = False,
    recall: RecallSettings = DEFAULT,
    **sizes: Unpack[ServerSizes],
) -> Opened:
    """Load a model to answer many conversations at once.

    Args:
        run: the model and its options; `memory_cap` is the whole process's, all else is of each
            conversation. Without `evict_every`, as suits the device: 64 on a CPU and 1 elsewhere.
        waiting: requests in the queue, at most.
        folder: where idle conversations are kept; None: they are forgotten once their place is
            wanted.
        disk_cap: bytes of that folder.
        shared: other processes keep theirs there as well.
        recall: how much evicted text is read again where a request does not say.
        sizes: as for `ServingPlan.of`.

    Raises:
        PlanInfeasible: not even one conversation fits, or fewer than were asked for; nothing is
            loaded.
        SessionNotSaved: the folder cannot be used.
        ValueError: a cap that is not given is to be enforced.
        KvcapError: as loading a model.
    """
    # Every operation of a pass gives Python's lock away and waits for it again, as long as this
    # where another thread reads requests: some hundred times for every token.
    sys.setswitchinterval(SWITCH_S)
    budget = run.budget
    check_enforce(budget.enforce, budget.memory_cap)
    cap = None if budget.memory_cap is None else parse_cap(budget.memory_cap)
    if cap is not None:
        run = replace(run, budget=replace(budget, memory_cap=str(cap)))
    plan = planned_serving(run, starts=True, recall=recall, **sizes)
    disk = (
        None if folder is None else SavedConversations(folder, parse_bytes(disk_cap), shared=shared)
    )

    def open_here() -> Opened:
        one_each = replace(budget, memory_cap=None, enforce="check")  # the watch enforces the cap
        runtime: Any = load_for_chat(replace(run, budget=one_each))
        note = without_default(getattr(runtime.tokenizer, "chat_template", None))
        if note is not None and not run.output.quiet:
            say(note)
        serving = measured(plan, runtime, sizes)
        limits = Limits(
            serving.places, serving.together, waiting, shared_prompts=serving.shared_prompts
        )
        held = runtime.reserve(serving.places)
        watch = None if cap is None else CapWatch.of(serving, runtime, held, enforce=budget.enforce)
        scheduler = Scheduler(runtime, limits, disk, watch=watch, memory_cap=cap, recall=recall)
        return Opened(scheduler, serving)

    try:
        return by_a_thread(open_here)
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def measured(plan: ServingPlan, runtime: Any, sizes: ServerSizes) -> ServingPlan:
    """Return the plan with the bytes that the loaded model and its process really take.

    Args:
        plan: made before.
        runtime: the model.
        sizes: as requested; what it leaves open stays as it was planned, where that fits.

    Raises:
        PlanInfeasible: with that, too few conversations fit.
    """
    own = max(0, process_bytes() + RUNNING - runtime.plan.weights)
    each = replace(plan.one, weights=runtime.plan.weights, baseline=own)
    places = sizes.get("places") or (plan.places if plan.cap is None else None)
    known: ServerSizes = {**sizes, "together": plan.together, "places": places, "body": plan.body}
    return ServingPlan.of(each, lambda _: plan.shared, cap=plan.cap, index=plan.index, **known)


@dataclass
class CapWatch:
    """A watch that looks whether the process stays within its cap, where memory counts it."""

    cap: int
    place: int  # bytes that one more conversation takes
    passes: int  # the largest pass, and the longest text while it is tokenised
    guard: CapGuard

    @classmethod
    def of(
        cls, plan: ServingPlan, runtime: Any, held: int = 0, enforce: str = "check"
    ) -> CapWatch | None:
        """Return a watch over a server of that plan.

        Args:
            plan: of the server.
            runtime: the model.
            held: bytes that the process holds for each conversation before it begins.
            enforce: 'rlimit' has the system hold the cap as well.

        Returns:
            None on a GPU, whose memory is not the process's.
        """
        assert plan.cap is not None
        device = getattr(getattr(runtime, "model", None), "device", None)
        if enforce == "rlimit":
            if device is None:
                limit_data(plan.cap)
            else:
                from kvcap.runtime.backends.pytorch.runtime import enforce_limit

                enforce_limit(plan.cap, device)
        if device is not None and device.type != "cpu":
            return None
        block = plan.one.workspace + plan.one.logits
        guard = CapGuard(plan.cap, block, plan.one.block_size)
        return cls(plan.cap, plan.place_bytes - held, plan.passes + plan.tokenising, guard)

    def has_room(self) -> bool:
        """Return whether one more conversation can be made, whatever else has grown."""
        return process_bytes() + self.place + self.passes <= self.cap

    def over(self, session: Any) -> None:
        """Have a session's loop ask before every block."""
        keeper = session.loop if hasattr(session.loop, "guard") else session.loop.cache
        keeper.guard = self.guard
