"""Defines the style of all pictures: widths, sizes of letters, and lines that differ clearly."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from kvcap.runtime.errors import how_to_install

WIDTH = 8.6  # inches of a picture; 8-point letters are readable at half a page's width
DPI = 160
SIZES = {"title": 10, "label": 9, "tick": 8}  # points
Dash = str | tuple[float, tuple[float, ...]]
MARKERS = "osD^vP*X<>"
DASHES: tuple[Dash, ...] = ("-", (0, (4, 1.5)), (0, (1.5, 1)))
# Paul Tol's bright colors, which differ in lightness and for colour-blind readers.
COLORS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#b58a00", "#2a9fc4", "#777777")


def require_matplotlib() -> None:
    """Check for matplotlib before a sweep, whose picture may come hours later.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib; {how_to_install('plot')}")


@dataclass(frozen=True)
class Style:
    """The style of one line or kind of points; no two of 70 look alike."""

    color: str
    marker: str
    dash: Dash

    @classmethod
    def of(cls, index: int) -> Style:
        """Return the style of the line with this index in the legend."""
        marker = MARKERS[index % len(MARKERS)]
        return cls(COLORS[index % len(COLORS)], marker, DASHES[index % len(DASHES)])
