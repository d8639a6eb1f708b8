"""Pictures of a training run, drawn from the lines of its metrics.jsonl."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from model.saving import replace_file


def plot_losses(metrics: list[dict[str, Any]], unigram_loss: float, path: Path) -> None:
    """Training and validation loss over the steps, and the loss of predicting by frequency alone."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [m["step"] + 1 for m in metrics]
    axes.plot(steps, [m["loss"] for m in metrics], color="0.7", linewidth=1, label="training")
    evaluated = [(m["step"] + 1, m["val_loss"]) for m in metrics if "val_loss" in m]
    axes.plot(*zip(*evaluated, strict=True), "o-", color="C0", label="validation")
    axes.axhline(unigram_loss, color="C3", linestyle="--", linewidth=1, label="unigram distribution")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{path.parent.name}: loss")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_norms(metrics: list[dict[str, Any]], eps: float, path: Path) -> None:
    """The mean square of each norm's input by depth, from the first logged step to the last, and the least row's."""
    logged = [m for m in metrics if "norm_mean_square" in m]
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    colors = plt.get_cmap("viridis")
    scale = plt.Normalize(logged[0]["step"] + 1, logged[-1]["step"] + 1)
    names = norm_names(len(logged[0]["norm_mean_square"]))
    for line in logged:
        color = colors(scale(line["step"] + 1))
        axes.plot(line["norm_mean_square"], color=color, linewidth=1.2)
        axes.plot(line["norm_least_square"], color=color, linewidth=1, linestyle=":")
    axes.axhline(eps, color="C3", linestyle="--", linewidth=1)
    axes.plot([], color="0.4", label="mean over the rows")
    axes.plot([], color="0.4", linestyle=":", label="least of the rows")
    axes.plot([], color="C3", linestyle="--", label=f"eps {eps:g}")
    every = max(1, len(names) // 12)  # names that fit beside each other
    axes.set_xticks(range(0, len(names), every), names[::every], rotation=30, ha="right")
    axes.set(yscale="log", ylabel="mean square of a norm's input", title=f"{path.parent.name}: what the norms see")
    axes.legend(frameon=False)
    figure.colorbar(plt.cm.ScalarMappable(scale, colors), ax=axes, label="step")
    _save(figure, path)


def norm_names(n_norms: int) -> list[str]:
    """Of the norms of a model, in the order in which they are applied."""
    layers = range(n_norms // 2)
    return [f"{i}.{name}" for i in layers for name in ("attention_norm", "ffn_norm")] + ["norm"]


def _save(figure: Figure, path: Path) -> None:
    figure.axes[0].spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    plt.close(figure)
    replace_file(path, content.getvalue())
