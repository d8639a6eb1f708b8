"""The pictures of a run: what is drawn is what the metrics say, for short runs, deep models and rows of zeros too."""

import matplotlib
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from model.training import curves

NAMES = ["0.attention_norm", "0.ffn_norm", "1.attention_norm", "1.ffn_norm", "norm"]
pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns of what it can't draw


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Calls a plot function with a path in the folder "run": the figures that it saves."""
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k)))
    (tmp_path / "run").mkdir()

    def call(plot, *arguments):
        figures.clear()
        plot(*arguments, tmp_path / "run/plot.png")
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["plot.png"] * len(figures)
        assert all((tmp_path / "run/plot.png").read_bytes().startswith(b"\x89PNG") for _ in figures)
        return figures

    return call


def steps_of(n, n_norms=5, every=1):
    """Metrics of n steps, in which no two numbers are the same."""
    metrics = [{"step": step, "loss": 5 - step / n} for step in range(n)]
    for line in metrics[::every]:
        line["norm_mean_square"] = [1 + i + line["step"] / n for i in range(n_norms)]
        line["norm_least_square"] = [number / 100 for number in line["norm_mean_square"]]
    metrics[-1]["val_loss"] = 4.5
    return metrics


def curves_of(figure):
    return [line for line in figure.axes[0].lines if len(line.get_xdata())]


def test_losses_are_drawn_at_the_steps_that_they_are_of(draw):
    metrics = [{"step": 0, "loss": 5.0}, {"step": 1, "loss": 4.0, "val_loss": 4.2}]
    metrics += [{"step": 2, "loss": 3.5}, {"step": 3, "loss": 3.0, "val_loss": 3.3}]
    [figure] = draw(curves.plot_losses, metrics, 3.7)
    training, validation, unigram = curves_of(figure)
    assert training.get_xydata().tolist() == [[1, 5.0], [2, 4.0], [3, 3.5], [4, 3.0]]
    assert validation.get_xydata().tolist() == [[2, 4.2], [4, 3.3]]
    assert list(unigram.get_ydata()) == [3.7, 3.7]
    assert figure.axes[0].get_title() == "run: loss"
    assert [line.get_label() for line in curves_of(figure)] == ["training", "validation", "unigram distribution"]


def test_steps_without_metrics_are_a_gap(draw):
    metrics = [line for line in steps_of(9) if line["step"] not in (0, 4, 5)]
    [figure] = draw(curves.plot_losses, metrics, 3.7)
    training = curves_of(figure)[0]
    assert training.get_xdata().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    drawn = {x - 1: y for x, y in training.get_xydata().tolist() if y == y}
    assert drawn == {line["step"]: line["loss"] for line in metrics}
    [figure] = draw(curves.plot_norms, metrics[-2:], NAMES, 3e-3)
    assert figure.axes[1].get_ylim() == (7, 9)


def test_one_step_is_seen(draw):
    [figure] = draw(curves.plot_losses, steps_of(1), 3.7)
    assert [line.get_marker() for line in curves_of(figure)[:2]] == ["o", "o"]
    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [1]


@pytest.mark.parametrize(("n", "every", "drawn"), [(1, 1, [0]), (7, 3, [0, 3, 6]), (500, 1, None)])
def test_norms_are_drawn_by_depth_and_coloured_by_step(draw, n, every, drawn):
    metrics = steps_of(n, every=every)
    [figure] = draw(curves.plot_norms, metrics, NAMES, 3e-3)
    *lines, eps = curves_of(figure)
    of_step = {tuple(m["norm_mean_square"]): m for m in metrics if "norm_mean_square" in m}
    shown = [of_step[tuple(line.get_ydata())] for line in lines[::2]]
    if drawn is None:  # too many to tell apart
        assert len(shown) == curves.N_CURVES
        drawn = sorted({0, 499, *(m["step"] for m in shown)})
    assert [m["step"] for m in shown] == drawn
    assert [list(line.get_ydata()) for line in lines[1::2]] == [m["norm_least_square"] for m in shown]
    colors = matplotlib.colormaps["viridis_r"]
    assert to_rgba(lines[-1].get_color()) == colors(1.0)
    assert len({line.get_color() for line in lines}) == len(shown)
    assert list(eps.get_ydata()) == [3e-3, 3e-3]
    assert figure.axes[0].get_yscale() == "log"
    bar = figure.axes[1]
    assert bar.get_ylim() == (0, drawn[-1] + 1)
    assert all(tick == round(tick) for tick in bar.get_yticks())


@pytest.mark.parametrize("n_layers", [1, 24, 80])
def test_the_names_of_the_norms_stand_at_their_places(draw, n_layers):
    names = [f"{i}.{name}" for i in range(n_layers) for name in ("attention_norm", "ffn_norm")] + ["norm"]
    [figure] = draw(curves.plot_norms, steps_of(2, n_norms=len(names)), names, 1e-5)
    ticks = figure.axes[0].get_xticks()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [names[int(tick)] for tick in ticks]
    assert 3 <= len(ticks) <= 24
    assert max(ticks) > 2 * n_layers - len(names) / len(ticks)  # they reach to the end


@pytest.mark.parametrize("keys", [["norm_least_square"], ["norm_least_square", "norm_mean_square"]])
def test_rows_of_zeros_are_left_out_of_a_logarithmic_scale(draw, keys):
    metrics = steps_of(2)
    for line in metrics:
        line.update({key: [0.0] * 5 for key in keys})
    [figure] = draw(curves.plot_norms, metrics, NAMES, 1e-5)
    low, high = figure.axes[0].get_ylim()
    assert 0 < low < 1e-5 < high


def test_without_a_logged_step_no_norms_are_drawn(draw):
    assert draw(curves.plot_norms, [{"step": 0, "loss": 1.0}], NAMES, 1e-5) == []
