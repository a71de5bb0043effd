"""The tables of `kvcap policies` and `kvcap plan`, on stdout."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcap.policies import Policy
from kvcap.runtime.plan import MemoryPlan
from kvcap.runtime.screen import dim, size


def describe(name: str, policy: Policy) -> dict[str, Any]:
    """One policy for `kvcap policies --json`."""
    state = {key: dtype.itemsize for key, dtype in policy.state.items()}
    return {
        "name": name,
        "formula": policy.formula,
        "paper": policy.paper,
        "options": policy.options(),
        "observes": sorted(policy.observes),
        "evicts": policy.evicts,
        "window_queries": policy.queries_observed,  # null: every query of the block
        "state": state,
        "state_bytes_per_slot": sum(state.values()),
    }


def print_policies(rows: list[dict[str, Any]]) -> None:
    """The table of `kvcap policies`: two lines for each, so that 80 columns are enough."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    for row in rows:
        notes = [row["paper"], *(f"{key}={value}" for key, value in row["options"].items())]
        if row["window_queries"] != 0:
            notes.append(f"queries: {row['window_queries'] or 'all'}")
        if row["state"]:
            notes.append(f"+{row['state_bytes_per_slot']} bytes/slot")
        table.add_row(row["name"], Text.assemble(row["formula"], "\n", (" · ".join(notes), "dim")))
    show(table)
    dim("the highest scores stay; --policy-option KEY=VALUE sets an option")


def print_plan(model: str, plan: MemoryPlan) -> None:
    """The table of `kvcap plan`."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("memory")
    table.add_column("size", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("figure")
    parts = [
        ("keys and values", plan.keys_values, "exact"),
        ("positions of the slots", plan.slot_positions, "exact"),
        ("state of the policy", plan.policy_state, "exact"),
        ("evicted tokens kept aside", plan.evicted_store, "exact"),
        ("window of queries", plan.query_window, "exact"),
        ("table of rotations", plan.rotation_table, "exact"),
        ("layers with a window of their own", plan.sliding_layers, "at most"),
    ]
    rows = [(name, count, how) for name, count, how in parts if count]
    rows += [("KV cache, all of the above", plan.cache_bytes, "exact")]
    rows += [("workspace of a block", plan.workspace, "estimate")]
    rows += [("logits of a token", plan.logits, "estimate")]
    rows += [("weights", plan.weights, "exact"), ("total", plan.total_bytes, "estimate")]
    for name, count, how in rows:
        bold = "bold" if name.startswith(("KV cache", "total")) else ""
        table.add_row(name, size(count), f"{count:,}", how, style=bold)
    print(
        f"{model}: policy {plan.policy}, {plan.budget_tokens:,} slots + blocks of "
        f"{plan.block_size:,}, {plan.dtype}, {plan.positions} positions\n"
    )
    show(table)
    dim("the total is without Python and PyTorch themselves")


def show(table: Any) -> None:
    """A table on stdout, as wide as the terminal, or wide enough where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
