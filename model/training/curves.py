"""Pictures of a training run, drawn from the lines of its metrics.jsonl."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model.checkpoint.save import replace_file
from model.training.picture import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_CURVES = 20  # logged steps that are drawn: more cannot be told apart
WHOLE_STEPS: dict[str, Any] = {"nbins": 10, "steps": [1, 2, 5, 10], "integer": True, "min_n_ticks": 1}  # for a locator


def plot_losses(metrics: list[dict[str, Any]], unigram_loss: float, path: Path) -> None:
    """Draw training and validation loss over the steps, and the loss of predicting each token by its frequency.

    The training curve has a gap where steps are missing from the metrics.
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    losses = np.full(metrics[-1]["step"] + 1, np.nan)
    losses[[m["step"] for m in metrics]] = [m["loss"] for m in metrics]
    marker = "o" if len(metrics) == 1 else None  # a line through one step shows nothing
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="0.7", linewidth=1, marker=marker, label="training")
    evaluated = [(m["step"] + 1, m["val_loss"]) for m in metrics if "val_loss" in m]
    axes.plot(*zip(*evaluated, strict=True), "o-", color="C0", label="validation")
    axes.axhline(unigram_loss, color="C3", linestyle="--", linewidth=1, label="unigram distribution")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{path.parent.name}: loss")
    axes.locator_params(axis="x", **WHOLE_STEPS)
    axes.legend(frameon=False, loc="upper right")
    _save(figure, path)


def plot_norms(metrics: list[dict[str, Any]], names: list[str], eps: float, path: Path) -> None:
    """Draw the mean square of each norm's input by depth, and its smallest row's, of the logged steps.

    `names` label the norms, in order. Draws nothing where no step has been logged.
    """
    logged = [m for m in metrics if "norm_mean_square" in m]
    if not logged:
        return
    figure = new_figure(7, 4.4)
    axes = figure.subplots()
    limits = {"vmin": logged[0]["step"], "vmax": logged[-1]["step"] + 1}
    colors = axes.scatter([], [], c=[], cmap="viridis_r", **limits)  # dark at the end, which matters most
    for i in np.linspace(0, len(logged) - 1, min(len(logged), N_CURVES), dtype=int):
        color = colors.to_rgba(logged[i]["step"] + 1)
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
    figure.colorbar(colors, ax=axes, label="step").ax.locator_params(axis="y", **WHOLE_STEPS)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.axes[0].spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    replace_file(path, content.getvalue())
