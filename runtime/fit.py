"""The largest plan that fits: slots and blocks sought by what their bytes come to.

Knows how to ask for a plan, not how one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcap.runtime.errors import PlanInfeasible

if TYPE_CHECKING:
    from kvcap.runtime.plan import MemoryPlan

BLOCK_SIZE = 128  # unless bytes are few


def largest(plan: Callable[[int, int], MemoryPlan], cap: int, block: int | None) -> MemoryPlan:
    """The plan with the most slots whose cache fits `cap` bytes.

    Args:
        plan: makes one of so many slots and tokens of a block.
        cap: bytes of the cache.
        block: as the user chose it; else it is halved until it takes at most a third of the slots.

    Raises:
        PlanInfeasible: no slot fits, naming what would.
    """
    for size in [block] if block else [BLOCK_SIZE >> i for i in range(8)]:
        fixed = plan(0, size).cache_bytes  # bytes grow by the same step with every slot
        step = plan(1, size).cache_bytes - fixed
        tokens = (cap - fixed) // step
        while tokens > 0 and plan(tokens, size).cache_bytes > cap:
            tokens -= 1  # layer budgets may round the rotation table up
        if tokens >= (1 if block else 2 * size):
            return plan(tokens, size)
    raise PlanInfeasible(
        f"a cache of {cap:,} bytes holds no token at block_size={size}; the least that works is "
        f"{plan(1, size).cache_bytes:,} bytes" + (", less with a smaller block" if block else "")
    )


def within(
    plan: Callable[[int, int], MemoryPlan],
    exactly: Callable[[MemoryPlan], MemoryPlan],
    cap: int,
    block: int | None,
    pinned: int,
    trained_length: int,
) -> MemoryPlan:
    """The plan with the most slots whose process stays within `cap` bytes.

    Args:
        plan: makes one of so many slots and tokens of a block.
        exactly: the same plan with the workspace that it really takes.
        cap: bytes of the process.
        block: as the user chose it; else the largest that leaves room for twice its slots.
        pinned: slots that no policy gives up.
        trained_length: tokens, beyond which no more are taken.

    Raises:
        PlanInfeasible: not even the least fits, naming what would.
    """
    for size in [block] if block else [BLOCK_SIZE >> i for i in range(8)]:
        least = max(1, pinned, 0 if block else 2 * size)
        most = max(least, trained_length - size)
        found = exactly(plan(least, size))
        if found.total_bytes > cap:
            continue
        step = plan(least + 1, size).total_bytes - plan(least, size).total_bytes
        tokens = least
        for _ in range(4):  # the workspace grows with the slots too, nearly evenly
            more = (cap - found.total_bytes) // step
            if not more or (more > 0 and tokens == most):
                break
            tokens = min(most, max(least, tokens + more))
            found = exactly(plan(tokens, size))
        while found.total_bytes > cap:
            tokens = max(least, tokens - max(1, -((cap - found.total_bytes) // step)))
            found = exactly(plan(tokens, size))
        return found
    raise PlanInfeasible(
        f"{_parts(found)} at the least, with {found.budget_tokens:,} slots and blocks of "
        f"{found.block_size:,}, more than the cap of {cap:,}; raise it to {found.total_bytes:,}, "
        "or take a smaller model or dtype"
    )


def fitting(plan: MemoryPlan, cap: int) -> MemoryPlan:
    """The plan, if its process stays within `cap` bytes.

    Raises:
        PlanInfeasible: it does not.
    """
    if plan.total_bytes > cap:
        raise PlanInfeasible(
            f"{_parts(plan)} for {plan.budget_tokens:,} slots and blocks of "
            f"{plan.block_size:,}, more than the cap of {cap:,}; leave the KV budget out "
            "to have the largest taken that fits"
        )
    return plan


def _parts(plan: MemoryPlan) -> str:
    """What makes up the total, in words."""
    rest = plan.workspace + plan.logits
    return (
        f"the process takes {plan.baseline:,} bytes, weights {plan.weights:,}, the cache "
        f"{plan.cache_bytes:,} and a block {rest:,}, together {plan.total_bytes:,},"
    )
