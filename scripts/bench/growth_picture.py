"""The picture of how cost grows: a panel a question of growth.py, with logarithmic axes."""

from __future__ import annotations

import math
from pathlib import Path

from model.training.picture import new_figure
from scripts.bench.growth import PANELS, Point
from scripts.bench.measuring import UNITS

TITLES = {  # and the horizontal axis
    "context": ("time of a decoded token", "tokens before it"),
    "size": ("time of a decoded token", "parameters"),
    "tokens": ("time of a training step", "tokens a step"),
    "tokens_memory": ("peak memory of a training step", "tokens a step"),
    "layers": ("time of a training step", "layers"),
    "layers_memory": ("peak memory of a training step", "layers"),
}
SIDES = {"ours": ("C0", "o"), "theirs": ("C1", "s"), "least": ("0.4", "")}  # colour and marker
LABELS = {"ours": "ours", "theirs": "transformers", "least": "at the least"}
LINES = ["-", "--"]  # of the dtypes


def short(n: int) -> str:
    """A count for an axis: 15M, 1.2B; context and tokens, powers of two, as 32768."""
    return f"{n / 1e9:.2g}B" if n >= 1e9 else f"{n / 1e6:.0f}M" if n >= 1e6 else str(n)


def draw(points: list[Point], path: Path) -> None:
    """The median of each side over the size, with the least."""
    panels = [panel for panel in PANELS if any(point.panel == panel for point in points)]
    dtypes = list(dict.fromkeys(point.dtype for point in points))
    n_rows = math.ceil(len(panels) / 2)
    figure = new_figure(9, 0.6 + 3 * n_rows)
    grid = figure.subplots(n_rows, 2, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        unit = PANELS[panel][1]
        for dtype, style in zip(dtypes, LINES, strict=False):
            line = [point for point in points if (point.panel, point.dtype) == (panel, dtype)]
            for side in line[0].costs():
                costs = [point.costs()[side] / UNITS[unit] for point in line]
                look = {"color": SIDES[side][0], "marker": SIDES[side][1], "linestyle": style, "markersize": 4}
                axes.plot([point.n for point in line], costs, label=f"{LABELS[side]}, {dtype}", **look)
        title, name = TITLES[panel]
        axes.set(xscale="log", yscale="log", title=title, xlabel=name, ylabel=unit)
        axes.minorticks_off()
        axes.set_xticks(sizes := sorted({point.n for point in points if point.panel == panel}), map(short, sizes))
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=150)
