"""The tables and the picture of bench_norm.py, from its rows of results."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Result = dict[str, Any]  # one norm, or the copy, in one pass, mode and size


def report(results: list[Result]) -> list[str]:
    """The tables as lines of text: for each mode and pass, shares and times, and times over those of one norm."""
    lines = ["share of the copy's bandwidth, median time in us, ± half the distance between its quartiles"]
    names = list(dict.fromkeys(row["norm"] for row in results if row["norm"] != "copy"))
    ours = "triton" if "triton" in names else names[0]
    for mode, pass_name in dict.fromkeys((row["mode"], row["pass"]) for row in results):
        part = [row for row in results if (row["mode"], row["pass"]) == (mode, pass_name)]
        base = {size_of(row): row.get("median_us", math.nan) for row in part if row["norm"] == ours}
        lines += table(f"{pass_name}, {mode}", ["copy", *names], part, share_and_time)
        title = f"{pass_name}, {mode}: time over that of {ours}"
        lines += table(title, names, part, lambda row, base=base: f"{row['median_us'] / base[size_of(row)]:.2f}")
        if pass_name == "backward" and mode == results[0]["mode"] and any("peak_bytes" in row for row in part):
            title = "forward and backward: MB at the peak beside x, weight and dy"
            lines += table(title, names, part, lambda row: f"{row['peak_bytes'] / 2**20:.1f}")
    far = {row["norm"]: row["distance"] for row in results if not row.get("same_function", True)}
    lines += ["", *(f"* {name} is another function: its y is {error:.0%} off" for name, error in far.items())]
    for row in results:
        if "refused" in row:
            where = f"{row['pass']}, {row['mode']}, {row['rows']} x {row['width']}"
            lines.append(f"{row['norm']} refused {where}: {row['refused']}")
    return lines


def table(title: str, names: list[str], results: list[Result], show: Callable[[Result], str]) -> list[str]:
    """Lines of text: sizes down, norms across. A star marks a norm that computes another function."""
    others = {row["norm"] for row in results if not row.get("same_function", True)}
    results = [row for row in results if row["norm"] in names]
    cells = {(*size_of(row), row["norm"]): show(row) if "share" in row else "refused" for row in results}
    wide = 3 + max(map(len, [*names, *cells.values()]))
    heads = [f"{name}*" if name in others else name for name in names]
    lines = ["", title, "     D     rows" + "".join(head.rjust(wide) for head in heads)]
    for width, n_rows in dict.fromkeys(map(size_of, results)):
        shown = "".join(cells[width, n_rows, name].rjust(wide) for name in names)
        lines.append(f"{width:>6}{n_rows:>9}{shown}")
    return lines


def size_of(row: Result) -> tuple[int, int]:
    """D and the number of rows."""
    return row["width"], row["rows"]


def share_and_time(row: Result) -> str:
    low, high = row["quartiles_us"]
    share = f"{row['gb_per_s']:.1f} GB/s" if row["norm"] == "copy" else f"{row['share']:.0%}"
    return f"{share}{row['median_us']:>9.1f} ±{(high - low) / 2 / row['median_us']:>3.0%}"


def plot(results: list[Result], names: list[str], path: Path) -> None:
    """The share over D: a panel per pass, a line per norm, in the last mode and with the most rows of each D."""
    mode = results[-1]["mode"]  # graph, where there is a GPU to time graphs on
    most = {row["width"]: row["rows"] for row in results}  # rows ascend, so the last of a width has the most
    results = [row for row in results if row["mode"] == mode and row["rows"] == most[row["width"]]]
    figure, panels = plt.subplots(2, 2, sharex=True, sharey=True, figsize=(9, 6.4), layout="constrained")
    for axes, pass_name in zip(panels.flat, dict.fromkeys(row["pass"] for row in results), strict=True):
        for i, name in enumerate(names):
            line = [row for row in results if (row["pass"], row["norm"]) == (pass_name, name)]
            shares = [row.get("share", math.nan) for row in line]
            style = f"C{i % 10}{'os^Dv'[i % 5]}-"
            axes.semilogx([row["width"] for row in line], shares, style, base=2, label=name, markersize=4)
        axes.axhline(1, color="0.6", linewidth=1, linestyle=":")
        axes.set_title(pass_name.replace("add_", "add + norm, "), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set(xticks=list(most), xticklabels=list(most), ylim=(0, None))
    figure.supxlabel("D", fontsize=10)
    figure.supylabel(f"share of the copy's bandwidth ({mode})", fontsize=10)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
