"""The tables and the picture of bench_norm.py, from its rows of results."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.training.picture import new_figure

Result = dict[str, Any]  # one norm, or the copy, in one pass, mode and size


def report(results: list[Result]) -> list[str]:
    """The tables as lines of text: for each mode and pass, shares and times, and times over those of one norm."""
    lines = ["share of the copy's bandwidth, median time in us, ± half the distance between its quartiles"]
    ours = "triton" if any(row["norm"] == "triton" for row in results) else results[1]["norm"]  # the first is the copy
    for mode, pass_name in dict.fromkeys((row["mode"], row["pass"]) for row in results):
        part = [row for row in results if (row["mode"], row["pass"]) == (mode, pass_name)]
        norms = [row for row in part if row["norm"] != "copy"]
        base = {size_of(row): row.get("median_us", math.nan) for row in norms if row["norm"] == ours}
        lines += table(f"{pass_name}, {mode}", part, share_and_time)
        title = f"{pass_name}, {mode}: time over that of {ours}"
        lines += table(title, norms, lambda row, base=base: f"{row['median_us'] / base[size_of(row)]:.2f}")
        if pass_name == "backward" and mode == results[0]["mode"] and any("peak_bytes" in row for row in norms):
            title = "forward and backward: MB at the peak beside x, weight and dy"
            lines += table(title, norms, lambda row: f"{row['peak_bytes'] / 2**20:.1f}")
    far = {row["norm"]: row["distance"] for row in results if not row.get("same_function", True)}
    lines += ["", *(f"* {name} is another function: its y is {error:.0%} off" for name, error in far.items())]
    for row in results:
        if "refused" in row:
            lines.append("{norm} refused {pass}, {mode}, {rows} x {width}: {refused}".format(**row))
    return lines


def table(title: str, results: list[Result], show: Callable[[Result], str]) -> list[str]:
    """Lines of text: sizes down, norms across. A star marks a norm that computes another function."""
    heads = {row["norm"]: row["norm"] for row in results}
    heads |= {row["norm"]: f"{row['norm']}*" for row in results if not row.get("same_function", True)}
    cells = {(*size_of(row), row["norm"]): show(row) if "share" in row else "refused" for row in results}
    wide = 3 + max(map(len, [*heads, *cells.values()]))
    lines = ["", title, "     D     rows" + "".join(head.rjust(wide) for head in heads.values())]
    for width, n_rows in dict.fromkeys(map(size_of, results)):
        shown = "".join(cells[width, n_rows, name].rjust(wide) for name in heads)
        lines.append(f"{width:>6}{n_rows:>9}{shown}")
    return lines


def size_of(row: Result) -> tuple[int, int]:
    """D and the number of rows."""
    return row["width"], row["rows"]


def share_and_time(row: Result) -> str:
    low, high = row["quartiles_us"]
    share = f"{row['gb_per_s']:.1f} GB/s" if row["norm"] == "copy" else f"{row['share']:.0%}"
    return f"{share}{row['median_us']:>9.1f} ±{(high - low) / 2 / row['median_us']:>3.0%}"


def plot(results: list[Result], path: Path) -> None:
    """The share over D: a panel per pass, a line per norm, in the last mode and with the most rows of each D."""
    mode = results[-1]["mode"]  # graph, where there is a GPU to time graphs on
    most = {row["width"]: row["rows"] for row in results}  # rows ascend, so the last of a width has the most
    results = [row for row in results if row["mode"] == mode and row["rows"] == most[row["width"]]]
    figure = new_figure(9, 6.4)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, pass_name in zip(panels.flat, dict.fromkeys(row["pass"] for row in results), strict=True):
        for name in dict.fromkeys(row["norm"] for row in results):  # the copy's share is 1
            line = [row for row in results if (row["pass"], row["norm"]) == (pass_name, name)]
            axes.semilogx(list(most), [row.get("share", math.nan) for row in line], "o-", base=2, label=name)
        axes.set_title(pass_name.replace("add_", "add + norm, "))
    panels[0, 0].set(xticks=list(most), xticklabels=list(most), ylim=(0, None))
    figure.supxlabel("D")
    figure.supylabel(f"share of the copy's bandwidth ({mode})")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=150)
