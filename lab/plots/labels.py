"""Puts labels beside points so that none covers another label or a point."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi, sin
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RADII = range(8, 120, 8)  # distances of a label from its point, in typographic points
ANGLES = [pi / 4 * i for i in (1, 7, 3, 5, 2, 6, 0, 4)]  # directions, in the order of trying


def put_labels(axis: Axes, points: Sequence[tuple[float, float, str]], size: float) -> list[Any]:
    """Annotate points (x, y, text), each at the nearest free place.

    The axes must have their final place (`Figure.draw_without_rendering`). If there is no free
    place inside the axes, a label is put to the right of its point.

    Args:
        axis: axes of the points; labels do not cover its lines either.
        points: points and their texts, which may have several lines.
        size: size of the letters, in typographic points.

    Returns:
        The annotations, in the order of the points.
    """
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    renderer = axis.figure.canvas.get_renderer()  # type: ignore[attr-defined]  # Agg has one
    scale = axis.figure.dpi / 72  # pixels per point
    inside = axis.get_window_extent(renderer)
    marks = [
        axis.transData.transform(pair)
        for line in axis.lines
        for pair in np.array(line.get_xydata())
    ]
    taken = [Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale) for x, y in marks]
    put = []
    for x, y, text in points:
        note = axis.annotate(
            text,
            (x, y),
            xytext=(8, 0),
            textcoords="offset points",
            fontsize=size,
            va="center",
            zorder=9,
            bbox={"facecolor": "white", "alpha": 0.7, "lw": 0, "pad": 0.5},
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "#555555", "shrinkB": 3},
        )
        for radius, angle in ((r, a) for r in RADII for a in ANGLES):
            note.set_position((radius * cos(angle), radius * sin(angle)))
            note.set_horizontalalignment("left" if cos(angle) > -0.1 else "right")
            note.update_positions(renderer)
            # The box of the text, without the line to the point.
            box = Text.get_window_extent(note, renderer)
            free = not any(box.overlaps(other) for other in taken)
            if free and inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1):
                taken.append(box)
                break
        put.append(note)
    return put
