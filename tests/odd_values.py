"""Makes documents like those of malicious files: JSON with an unexpected value."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

VALUES = [
    None, True, False, -1, 0, 1, 2, 7, 255, 1 << 31, 1 << 62, -(1 << 63), 10**30, 10**400,
    0.0, -0.5, 1.5, 1e-320, 1e308, float("inf"), float("nan"), "", "x", "0", "\0", "\ud800", "../x",
    "/etc/passwd", "float64", "x" * 10_000, [], [[]], {}, [0], [-1], [None], ["x"], [1 << 40],
    [[0, 1]] * 2000, {"x": 1}, {"": None},
]  # fmt: skip


def paths_of(document: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a document."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = list(enumerate(document))[:3]
    paths = [(*before, key) for key, _ in items]
    return paths + [path for key, value in items for path in paths_of(value, (*before, key))]


@st.composite
def odd(draw: Any, document: Any) -> Any:
    """Return the document with one or two values removed or replaced by odd ones."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        *above, last = draw(st.sampled_from(paths_of(changed)))
        holder = changed
        for key in above:
            holder = holder[key]
        kind = draw(st.sampled_from(["value", "value", "gone", "near"]))
        if kind == "gone":
            del holder[last]
        elif kind == "near" and type(holder[last]) in (int, float):
            holder[last] += draw(st.sampled_from([-1, 1, 5, 1000]))
        else:
            holder[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return changed
