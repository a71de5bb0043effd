"""Prints the tables of `kvcap policies` and `kvcap plan` on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcap.runtime.cache.settings import BLOCK_SIZE
from kvcap.runtime.cli.console import dim
from kvcap.runtime.memory.free_memory import FreeMemory
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.types import EVICT_EVERY, PINS, SlotUse
from kvcap.runtime.units import format_bytes
from kvcap.sinks import SINK_TOKENS

if TYPE_CHECKING:  # PyTorch stands behind these, and plans are shown without it too
    from kvcap.policies import Eviction
    from kvcap.policies.base import Component, Preset

WORKSPACE = 3  # float32 copies of an observed query's row, as plans count: z, masked z, A
DOES = {
    "policy": "score",
    "saliency": "saliency",
    "layer_budget": "layers",
    "head_budget": "heads",
    "rescorer": "rescore",
    "corrector": "correct",
}
LEGEND = (
    "The highest scores stay. A slot holds one token of one KV head. In formulas j is a slot with "
    "key k_j and value v_j, t a query; z_tj is attention's logit, A_tj its weight, a_t its output; "
    "N is the budget in slots. Workspace: float32 numbers "
    "per slot and query head while a block is scored; a block has 128 tokens by default. "
    f"The first {SINK_TOKENS} tokens stay besides, under every policy (--sink-tokens). "
    "`kvcap plan MODEL --policy NAME` counts all bytes."
)


class TablePart(NamedTuple):
    """A component of a policy, with its name and the slot that it fills."""

    slot: str
    name: str
    component: Component

    def row(self) -> dict[str, Any]:
        """Return the part as `kvcap policies --json` has it."""
        part = self.component
        return {
            "name": self.name,
            "slot": self.slot,
            "formula": part.formula,
            "paper": part.paper,
            "when": part.when,
            "options": part.options(),
            "observes": sorted(part.observes),
            "state_bytes_per_slot": sum(dtype.itemsize for dtype in part.state.values()),
        }


def describe(name: str, eviction: Eviction) -> dict[str, Any]:
    """Return a policy or preset as `kvcap policies --json` has it."""
    from kvcap.policies import SLOTS, policies
    from kvcap.policies.base import Preset

    filled = {slot: part for slot in SLOTS if (part := getattr(eviction, slot)) is not None}
    parts = [TablePart(slot, _name(part), part) for slot, part in filled.items()]
    recipe = policies().get(name)
    preset = Preset(name) if recipe is None else Preset(name, recipe.options, recipe.when)
    return row_of(name, parts, preset, eviction.sink_tokens, eviction.recent_tokens)


def row_of(
    name: str,
    parts: Sequence[TablePart],
    preset: Preset,
    sink_tokens: int | None = None,
    recent_tokens: int = 0,
) -> dict[str, Any]:
    """Return the row of a policy or preset, from its parts in the order of their slots."""
    rows, filled = [part.row() for part in parts], {part.slot: part.component for part in parts}
    policy: Any = filled["policy"]
    corrector: Any = filled.get("corrector")
    usual, queries = SINK_TOKENS if policy.evicts else 0, policy.queries_observed
    sinks = usual if sink_tokens is None else sink_tokens
    # As `--policy-option` takes them: an option is the first part's that has it.
    options = {k: v for row in reversed(rows) for k, v in row["options"].items()}
    return {
        "name": name,
        "composition": " + ".join(part.name for part in parts),
        "when": preset.when or _when(filled),
        "parts": rows,
        "options": {**options, "sink_tokens": sinks, "recent_tokens": recent_tokens},
        "preset": dict(preset.options),  # options that are not the parts' defaults
        "observes": sorted({view for row in rows for view in row["observes"]}),
        "evicts": policy.evicts,
        "window_queries": queries,  # null: every query of the block
        "state_bytes_per_slot": sum(row["state_bytes_per_slot"] for row in rows),
        "evicted_tokens_kept": 0 if corrector is None else corrector.size,
        "workspace_floats": WORKSPACE * (BLOCK_SIZE if queries is None else queries),
    }


def describe_companions() -> list[dict[str, Any]]:
    """Return the companions of policies as `kvcap policies --json` has them."""
    from kvcap.policies import SLOTS, companions

    return companion_rows(
        TablePart(next(slot for slot, kind in SLOTS.items() if issubclass(cls, kind)), name, cls())
        for name, cls in companions().items()
    )


def companion_rows(parts: Iterable[TablePart]) -> list[dict[str, Any]]:
    """Return the rows of companions, by slot and name."""
    order = list(DOES)
    return [part.row() for part in sorted(parts, key=lambda x: (order.index(x.slot), x.name))]


def print_policies(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Print the list of `kvcap policies`: a block for each, so that 80 columns are enough."""
    for row in rows:
        _print_block(row)
        show("")
    show(Text.assemble(("companions", "bold"), ", one of each kind: --policy h2o+criticalkv"))
    table = _block()
    for part in others:
        named = Text.assemble((part["name"], "bold"), ": ", _text(part, {}))
        table.add_row(DOES[part["slot"]], named)
    show(table)
    show("")
    show(LEGEND)
    dim("--policy-option KEY=VALUE sets an option; kvcap policies NAME shows one")


def print_policy(row: dict[str, Any]) -> None:
    """Print one policy, for `kvcap policies NAME`."""
    _print_block(row)
    show("")
    pins = [f"{name}={row['options'][name]}" for name in ("sink_tokens", "recent_tokens")]
    show(f"Every policy takes {' and '.join(pins)} too: first and newest tokens that stay.")
    show(LEGEND)
    dim(f"try it: kvcap chat --policy {row['name']} [--policy-option KEY=VALUE]")


def _print_block(row: dict[str, Any]) -> None:
    pins = {k: row["preset"][k] for k in PINS if k in row["preset"]}
    composition = f" = {row['composition']}" if len(row["parts"]) > 1 else ""
    show(Text.assemble((row["name"], "bold"), composition))
    table = _block()
    if row["when"]:
        table.add_row("use", row["when"])
    for part in row["parts"]:
        table.add_row(DOES[part["slot"]], _text(part, pins if part["slot"] == "policy" else {}))
    table.add_row("reads", ", ".join(row["observes"]) or "nothing")
    table.add_row("costs", _costs(row))
    show(table)


def _when(filled: Mapping[str, Component]) -> str:
    """Return when to use a combination: the reasons for its companions, else its policy's."""
    added = [part.when for slot, part in filled.items() if slot != "policy" and part.when]
    return "; ".join(dict.fromkeys(added)) or filled["policy"].when


def _name(part: Component) -> str:
    """Return the name of a part in a combination, such as `h2o+criticalkv`."""
    from kvcap.policies import policies

    registered = {  # by other packages, under names of their own
        recipe.parts["policy"]: name
        for name, recipe in policies().items()
        if len(recipe.parts) == 1 and not recipe.options
    }
    return registered.get(type(part), type(part).__module__.rsplit(".", 1)[-1])


def _block() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    table.add_column(width=max(map(len, DOES.values())))
    table.add_column()
    return table


def _text(part: Mapping[str, Any], pins: Mapping[str, int]) -> Text:
    """Return a part's formula, and below it its source and options."""
    options = {**part["options"], **pins}
    given = " ".join(f"{k}={v!r}" if v == "" else f"{k}={v}" for k, v in options.items())
    source = " · ".join(text for text in (part["paper"], given) if text)
    return Text.assemble(part["formula"], "\n", (source, "dim"))


def _costs(row: Mapping[str, Any]) -> str:
    queries = row["window_queries"]
    costs = [f"{row['state_bytes_per_slot']} bytes a slot"]
    if row["evicted_tokens_kept"]:
        costs.append(f"{row['evicted_tokens_kept']:,} evicted tokens a head")
    if queries is not None and queries > 1:
        costs.append(f"{queries} queries a head")
    times = {None: f"{WORKSPACE} · block", 0: "0"}.get(queries, f"{WORKSPACE} · {queries}")
    return ", ".join([*costs, f"workspace {times}"])


def _where(storage: str) -> str:
    """Return in words where evicted tokens are kept; '' for the device of the cache."""
    return {"": "", "device": "", "host": ", on the host"}.get(storage, f", in {storage}")


def print_plan(
    model: str,
    plan: MemoryPlan,
    free: FreeMemory,
    tokens: int,
    *,
    evicts: bool = True,
    library: str = "",
) -> None:
    """Print the table of `kvcap plan`.

    Args:
        model: as the user named it.
        plan: of a run.
        free: the memory that is free here.
        tokens: for how many to count an uncapped cache.
        evicts: whether the policy ever does.
        library: of llama.cpp, if that runs the model.
    """
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("memory")
    table.add_column("size", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("figure")
    parts = [
        ("keys and values", plan.keys_values, "exact"),
        ("positions of the slots", plan.slot_positions, "exact"),
        ("state of the policy", plan.policy_state, "exact"),
        (f"evicted tokens kept aside{_where(plan.evicted_in)}", plan.evicted_store, "exact"),
        ("window of queries", plan.query_window, "exact"),
        ("table of rotations", plan.rotation_table, "exact"),
        ("layers with a window of their own", plan.sliding_layers, "at most"),
        ("states of recurrent layers", plan.state_layers, "exact"),
    ]
    rows = [(name, count, how) for name, count, how in parts if count]
    rows += [("KV cache, all of the above", plan.cache_bytes, "exact")]
    rows += [("workspace of a block", plan.workspace, "dry run" if plan.rehearsed else "estimate")]
    rows += [("logits of a token", plan.logits, "estimate")]
    if plan.recall_store:
        rows += [("index of evicted text", plan.recall_store, "at most")]
        if plan.word_vectors:
            rows += [("its search by meaning", plan.word_vectors, "at most")]
    exact = "" if plan.weights_from.endswith("estimated") else "exact, from "
    rows += [("weights", plan.weights, exact + plan.weights_from)]
    if plan.baseline:
        rows += [("Python, libraries, loading", plan.baseline, "measured here")]
    rows += [("total", plan.total_bytes, "estimate"), ("free here", free.nbytes, free.source)]
    for name, count, how in rows:
        bold = "bold" if name.startswith(("KV cache", "total")) else ""
        table.add_row(name, format_bytes(count), f"{count:,}", how, style=bold)
    whole = "" if evicts else f" of a context of {plan.trained_length:,} tokens"
    print(
        f"{model}: policy {plan.policy}, {plan.budget_tokens:,} slots{whole} + blocks of "
        f"{plan.block_size:,}{f' ({plan.block_why})' if plan.block_why else ''}, {plan.dtype}, "
        f"{plan.positions} positions"
        f"{f', {plan.kv_dtype} slots' if plan.kv_dtype else ''}"
        f"{f', {plan.weights_dtype} weights' if plan.weights_dtype else ''}\n"
    )
    show(table)
    every = min(EVICT_EVERY, plan.block_size)
    if evicts and every > 1:
        most = SlotUse(plan.budget_tokens, every - 1, plan.budget_tokens)
        print(
            f"\nin use in an answer on a CPU, at most: {most}, which take slots of a block and no "
            "more bytes (none with --evict-every 1)"
        )
    uncapped = plan.uncapped_bytes(tokens)
    print(
        f"\nwithout a cap, keys and values of {tokens:,} tokens would take "
        f"{format_bytes(uncapped)} ({uncapped:,} bytes)"
    )
    if plan.layers:
        print(f"layers: {plan.layers}; positions: {plan.position_modes}")
    if plan.layers and not library:
        runs = plan.not_exportable and f"no, {plan.not_exportable}"
        print(f"runs with PyTorch; exported, with ONNX Runtime: {runs or 'yes'}")
    elif library:
        print(f"runs by {library}")
    if plan.least_kv_budget:
        print(
            f"the least that works: --kv-budget {plan.least_kv_budget}, or "
            f"--memory-cap {plan.least_memory_cap >> 20}MiB"
        )
    if not plan.baseline:
        dim("the total is without Python and its libraries; --memory-cap counts them")


def show(table: Any) -> None:
    """Print a table as wide as the terminal, or wide enough where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
