"""Compares a cell's outputs with the eager policy's, by the check that the plan has for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvcap.android_bench.runner.inputs import DTYPES, Array, Cell

MARK = 1e30  # larger numbers are marks of a policy, not values


def parity(cell: Cell, inputs: dict[str, Array], outputs: dict[str, Array], folder: Path) -> Cell:
    """Compare a cell's outputs with the expected ones.

    Args:
        cell: a cell of the plan.
        inputs: its inputs, by name.
        outputs: its outputs, by name.
        folder: the plan's folder.

    Returns:
        `passed`, the largest `error`, the difference `allowed`, and a `text` on the first fault.
    """
    worst: Cell = {"passed": True, "error": 0.0, "allowed": 0.0}
    share = 0.0
    for port in sorted(cell["outputs"], key=lambda port: port["check"]["kind"] != "slots"):
        name, check = port["name"], port["check"]
        fault, error = _checked(port, inputs, outputs, folder)
        allowed = check.get("allowed", 0.0)
        if fault is not None:
            return {"passed": False, "error": error, "allowed": allowed, "text": f"{name} {fault}"}
        if error is not None and allowed and error / allowed >= share:
            share, worst = error / allowed, {"passed": True, "error": error, "allowed": allowed}
    return worst


def _checked(
    port: Cell, inputs: dict[str, Array], outputs: dict[str, Array], folder: Path
) -> tuple[str | None, float | None]:
    """Return the fault of one output as text, if it has one, and its largest difference."""
    check, value = port["check"], outputs[port["name"]]
    if list(value.shape) != port["shape"] or value.dtype != DTYPES[port["dtype"]]:
        return f"is {value.dtype} {list(value.shape)}", None
    if check["kind"] == "slots":
        return _slots(value, folder / check["file"]), None
    if check["kind"] == "rows":
        rows = _rows(inputs[check["of"]], outputs["kept_slot"])
        same = rows.tobytes() == value.tobytes()
        return (None if same else f"is not {check['of']} of the slots kept"), None
    expected = np.fromfile(folder / check["file"], dtype="<f4")
    if check["kind"] == "by_slot":
        expected = _rows(expected.reshape(*value.shape[:2], -1), outputs["kept_slot"])
    return _compared(value.astype(np.float64).ravel(), expected.ravel(), check["allowed"])


def _compared(value: Array, expected: Array, allowed: float) -> tuple[str | None, float | None]:
    if not np.isfinite(value).all():
        return "is not finite", None
    marks, expected_marks = np.abs(value) > MARK, np.abs(expected) > MARK
    if marks.sum() != expected_marks.sum():
        return f"has {marks.sum()} marks, expected are {expected_marks.sum()}", None
    plain = ~(marks | expected_marks)
    error = float(np.abs(value - expected)[plain].max(initial=0.0))
    fault = f"differs by {error:.3g}, allowed are {allowed:.3g}" if error > allowed else None
    return fault, error


def _slots(slots: Array, file: Path) -> str | None:
    marks = np.fromfile(file, dtype=np.uint8).reshape(*slots.shape[:2], -1)
    if slots.min() < 0 or slots.max() >= marks.shape[-1]:
        return "names slots that are not there"
    if any(len(set(head)) < len(head) for head in slots.reshape(-1, slots.shape[-1]).tolist()):
        return "names a slot twice"
    kept = np.zeros_like(marks, dtype=bool)
    np.put_along_axis(kept, slots.astype(np.int64), True, axis=-1)
    wrong = int((kept & (marks == 0)).sum() + (~kept & (marks == 2)).sum())
    return f"has {wrong} wrong slots" if wrong else None


def _rows(whole: Array, slots: Array) -> Array:
    """Gather the slots `slots` [B, K, N] of an array [B, K, n, ...], as [B, K, N, ...]."""
    index = slots.astype(np.int64).reshape(*slots.shape, *(1,) * (whole.ndim - 3))
    return np.take_along_axis(whole, index, axis=2)
