"""Draws curves with Matplotlib: as PNG files, and as SVG that takes its colours from the page's style sheet.

It gets finished numbers (`curves.py`) and decides only how they look.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miniverl.report.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (5.2, 2.9)
PNG_COLOURS = {
    "ink": "#4b5563", "grid": "#e5e7eb",
    "c0": "#2563eb", "c1": "#d97706", "c2": "#059669", "c3": "#7c3aed", "c4": "#db2777", "c5": "#64748b",
}
# Stand-ins that Matplotlib passes through to the SVG, where they become var(--ink), var(--c0), …
SVG_COLOURS = {name: f"#0101{index:02x}" for index, name in enumerate(PNG_COLOURS, start=16)}


@dataclass(frozen=True)
class Drawing:
    """An SVG element, and what a pointer needs to read values off it."""

    svg: str
    box: tuple[float, float, float, float]
    """Left, top, right, bottom of the plot area in the SVG's units."""
    x_limits: tuple[float, float]


def draw_svg(curve: Curve) -> Drawing:
    """The curve as an inline SVG without fixed size, font, colours, ids that clash, or links."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": curve.key, "font.size": 10.5}):
        figure, axes = _draw(curve, SVG_COLOURS)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    width, height = (inches * 72 for inches in SIZE_INCHES)
    place = axes.get_position()
    box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
    low, high = axes.get_xlim()
    return Drawing(_inline(file.getvalue(), curve.title), box, (float(low), float(high)))


def save_png(curve: Curve, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"font.size": 10.5}):
        figure, axes = _draw(curve, PNG_COLOURS)
        axes.set_title(curve.title, loc="left", color="#111827")
        axes.set_xlabel("step", color=PNG_COLOURS["ink"])
        if curve.kind == "stack" or len(curve.lines) > 1:
            figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=3)
        figure.savefig(path, dpi=150, facecolor="white")


def _draw(curve: Curve, colours: Mapping[str, str]) -> tuple[Figure, Axes]:
    # Figure itself, not pyplot: no global state, no display, safe in a process that draws elsewhere.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    if curve.kind == "stack":
        steps, parts = curve.lines[0].steps, [line.values for line in curve.lines]
        fills = [colours[f"c{line.colour}"] for line in curve.lines]
        axes.stackplot(steps, parts, labels=[line.label for line in curve.lines], colors=fills, lw=0)
    else:
        _draw_lines(axes, curve, colours)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    if curve.unit == "%":
        axes.set_ylim(-2, 102)
        axes.set_yticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    elif curve.log:
        axes.set_yscale("log")
    elif min(value for line in curve.lines for value in line.values) >= 0:
        axes.set_ylim(bottom=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colours["grid"])
    axes.grid(axis="y", color=colours["grid"], lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=colours["ink"])
    return figure, axes


def _draw_lines(axes: Axes, curve: Curve, colours: Mapping[str, str]) -> None:
    for line in curve.lines:
        dots = len(line.steps) == 1 or (curve.kind == "marked" and len(line.steps) <= 60)
        marker = "o" if dots else ""
        axes.plot(line.steps, line.values, color=colours[f"c{line.colour}"], marker=marker, markersize=4,
                  lw=1 if line.faint else 2, alpha=0.35 if line.faint else 1, label=line.label)


def _inline(svg: str, title: str) -> str:
    svg = svg[svg.index("<svg"):]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    tag = svg[:svg.index(">")]
    svg = re.sub(r' (width|height|version)="[^"]*"', "", tag) + svg[len(tag):]
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    for name, stand_in in SVG_COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg
