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
SIZES = [BLOCK_SIZE >> i for i in range(8)]  # of blocks, where none is asked for
MARGIN = 16 << 20  # by which a process differs from one run to the next, and more


def largest(
    plan: Callable[[int, int], MemoryPlan], cap: int, block: int | None, pinned: int
) -> MemoryPlan:
    """The plan with the most slots whose cache fits `cap` bytes.

    Args:
        plan: makes one of so many slots and tokens of a block.
        cap: bytes of the cache.
        block: as the user chose it; else it is halved until it takes at most a third of the slots.
        pinned: the fewest slots that the policy accepts.

    Raises:
        PlanInfeasible: too few slots fit, naming the bytes that would do.
    """
    for size in [block] if block else SIZES:
        fixed = plan(0, size).cache_bytes  # bytes grow by the same step with every slot
        step = plan(1, size).cache_bytes - fixed
        tokens = (cap - fixed) // step
        while tokens > 0 and plan(tokens, size).cache_bytes > cap:
            tokens -= 1  # layer budgets may round the rotation table up
        if tokens >= least_slots(size, block, pinned):
            return plan(tokens, size)
    least = smallest(plan, block, pinned)
    raise PlanInfeasible(
        f"a cache of {cap:,} bytes is too small for {least.policy} and blocks of "
        f"{least.block_size:,}; the least that works is {least.cache_bytes:,} bytes"
        + (", less with a smaller block" if block and block > 1 else ""),
        least_kv_budget=least.cache_bytes,
    )


def least_slots(size: int, block: int | None, pinned: int) -> int:
    """The fewest slots beside blocks of `size`, which were asked for if they equal `block`."""
    return max(1, pinned, 0 if block else 2 * size)


def smallest(plan: Callable[[int, int], MemoryPlan], block: int | None, pinned: int) -> MemoryPlan:
    """The plan that takes the least memory."""
    size = block or SIZES[-1]
    return plan(least_slots(size, block, pinned), size)


def roomy(nbytes: int) -> int:
    """A cap that holds a process planned to take so many bytes another time too: whole MiB.

    >>> roomy(500 << 20) >> 20
    516
    """
    return -(-(nbytes + MARGIN) >> 20) << 20


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
        pinned: the fewest slots that the policy accepts.
        trained_length: tokens, beyond which no more are taken.

    Raises:
        PlanInfeasible: not even the least fits, naming what would.
    """
    least = exactly(smallest(plan, block, pinned))
    fits = least.total_bytes <= cap
    for size in ([block] if block else SIZES) if fits else []:
        fewest = least_slots(size, block, pinned)
        found = exactly(plan(fewest, size))
        if found.total_bytes > cap:
            continue
        most = max(fewest, trained_length - size)
        step = plan(fewest + 1, size).total_bytes - plan(fewest, size).total_bytes
        tokens = fewest
        for _ in range(4):  # the workspace grows with the slots too, nearly evenly
            more = (cap - found.total_bytes) // step
            if not more or (more > 0 and tokens == most):
                break
            tokens = min(most, max(fewest, tokens + more))
            found = exactly(plan(tokens, size))
        while found.total_bytes > cap:
            tokens = max(fewest, tokens - max(1, -((cap - found.total_bytes) // step)))
            found = exactly(plan(tokens, size))
        return found
    raise PlanInfeasible(
        f"{_parts(least)} at the least, with {least.budget_tokens:,} slots and blocks of "
        f"{least.block_size:,}, more than the cap of {cap:,}; raise it to "
        f"{roomy(least.total_bytes) >> 20}MiB, or take a smaller model or dtype",
        least_memory_cap=roomy(least.total_bytes),
    )


def fitting(plan: MemoryPlan, cap: int) -> MemoryPlan:
    """The plan, if its process stays within `cap` bytes.

    Raises:
        PlanInfeasible: it does not.
    """
    if plan.total_bytes > cap:
        raise PlanInfeasible(
            f"{_parts(plan)} for {plan.budget_tokens:,} slots and blocks of "
            f"{plan.block_size:,}, more than the cap of {cap:,}; raise it to "
            f"{roomy(plan.total_bytes) >> 20}MiB, or leave the KV budget out to have the largest "
            "taken that fits",
            least_memory_cap=roomy(plan.total_bytes),
        )
    return plan


def _parts(plan: MemoryPlan) -> str:
    """What makes up the total, in words."""
    rest = plan.workspace + plan.logits
    return (
        f"the process takes {plan.baseline:,} bytes, weights {plan.weights:,}, the cache "
        f"{plan.cache_bytes:,} and a block {rest:,}, together {plan.total_bytes:,},"
    )
