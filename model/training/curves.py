"""Pictures of a training run, drawn from the lines of its metrics.jsonl."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure  # alone, since pyplot would look for a window to draw in
from matplotlib.ticker import MaxNLocator

from model.checkpoint.save import replace_file

N_CURVES = 20  # logged steps that are drawn: more cannot be told apart


def plot_losses(metrics: list[dict[str, Any]], unigram_loss: float, path: Path) -> None:
    """Draw training and validation loss over the steps, and the loss of predicting each token by its frequency."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = [m["step"] + 1 for m in metrics]
    marker = "o" if len(steps) == 1 else None  # a line through one step shows nothing
    axes.plot(steps, [m["loss"] for m in metrics], color="0.7", linewidth=1, marker=marker, label="training")
    evaluated = [(m["step"] + 1, m["val_loss"]) for m in metrics if "val_loss" in m]
    axes.plot(*zip(*evaluated, strict=True), "o-", color="C0", label="validation")
    axes.axhline(unigram_loss, color="C3", linestyle="--", linewidth=1, label="unigram distribution")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{path.parent.name}: loss")
    axes.xaxis.set_major_locator(_whole_steps())
    axes.legend(frameon=False, loc="upper right")
    _save(figure, path)


def plot_norms(metrics: list[dict[str, Any]], names: list[str], eps: float, path: Path) -> None:
    """Draw the mean square of each norm's input by depth, and its smallest row's, of the logged steps.

    `names` label the norms, in order. Draws nothing where no step has been logged.
    """
    logged = [m for m in metrics if "norm_mean_square" in m]
    if not logged:
        return
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["viridis_r"]  # dark at the end, which matters most
    scale = Normalize(logged[0]["step"], logged[-1]["step"] + 1)
    for i in np.linspace(0, len(logged) - 1, min(len(logged), N_CURVES), dtype=int):
        color = colors(scale(logged[i]["step"] + 1))
        axes.plot(logged[i]["norm_mean_square"], color=color, linewidth=1.2)
        axes.plot(logged[i]["norm_least_square"], color=color, linewidth=1, linestyle=":")
    axes.axhline(eps, color="C3", linestyle="--", linewidth=1)
    axes.plot([], color="0.4", label="mean over the rows")
    axes.plot([], color="0.4", linestyle=":", label="smallest row")
    axes.plot([], color="C3", linestyle="--", label=f"eps {eps:g}")
    every = max(1, len(names) // 12)  # names that fit beside each other
    axes.set_xticks(range(0, len(names), every), names[::every], rotation=30, ha="right")
    axes.set(yscale="log", ylabel="mean square of a norm's input", title=f"{path.parent.name}: what the norms see")
    axes.legend(frameon=False)
    figure.colorbar(ScalarMappable(scale, colors), ax=axes, label="step", ticks=_whole_steps())
    _save(figure, path)


def _whole_steps() -> MaxNLocator:
    """Ticks at whole steps, also where there is only one."""
    return MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)


def _save(figure: Figure, path: Path) -> None:
    figure.axes[0].spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    replace_file(path, content.getvalue())
