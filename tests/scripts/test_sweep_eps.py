"""A sweep of eps: the loss with another eps in every norm, and the share of rows that it reaches."""

import argparse
import math
import re

import pytest
import torch

import kernels
from model.checkpoint.load import load_checkpoint
from model.norm import RMSNorm
from scripts import perplexity, sweep_eps
from tests.helpers import CPU


def load(checkpoint, eps=None):
    return load_checkpoint(checkpoint, kernels.load_backend("reference", CPU), CPU, torch.float32, eps).eval()


@pytest.fixture
def ids():
    return torch.randint(290, (100,), generator=torch.Generator().manual_seed(0))


def test_the_loss_is_that_of_the_checkpoint_with_this_eps(checkpoint, ids):
    model = load(checkpoint)
    found = sweep_eps.measure(model, ids, 64, 30, 0.5)
    assert found.loss == pytest.approx(perplexity.mean_loss(load(checkpoint, 0.5), ids, 64, 30), rel=1e-6)
    assert found.loss != pytest.approx(perplexity.mean_loss(model, ids, 64, 30), rel=1e-3)
    assert {norm.eps for norm in model.modules() if isinstance(norm, RMSNorm)} == {3e-3}


def test_a_reached_row_is_changed_by_1_percent_or_more(checkpoint, ids):
    """By hand, from the first norm's input, the embedding: it does not depend on eps."""
    model, eps = load(checkpoint), 2e-4
    rows = torch.cat(
        [model.embed_tokens.weight[ids[start : end - 1]] for start, end, _ in perplexity.windows(100, 64, 30)]
    )
    squares = rows.double().square().mean(-1)
    changed = squares.sqrt() / (squares + eps).sqrt() < 0.99
    found = sweep_eps.measure(model, ids, 64, 30, eps)
    assert 0.1 < changed.double().mean() < 0.9
    assert found.shares[0] == pytest.approx(changed.double().mean().item())
    assert len(found.shares) == 5
    assert sweep_eps.measure(model, ids, 64, 30, 1e-12).shares == [0] * 5
    assert sweep_eps.measure(model, ids, 64, 30, 1e3).shares == [1] * 5


def test_decades():
    assert sweep_eps.decades("1e-3:1") == pytest.approx([1e-3, 1e-2, 1e-1, 1])
    assert sweep_eps.decades("2e-3:9") == pytest.approx([1e-2, 1e-1, 1])
    assert sweep_eps.decades("1e-37:1e38") == pytest.approx([10.0**power for power in range(-37, 39)])
    for wrong in ("1", "1:1e-3", "0:1", "1e-3:1:2", "a:b", "2e-5:3e-5", "1e-38:1", "1:1e39", "1e300:1e308"):
        with pytest.raises(argparse.ArgumentTypeError):
            sweep_eps.decades(wrong)


def test_the_command_prints_a_row_an_eps_and_draws(checkpoint, command, tmp_path):
    picture = tmp_path / "deep/eps.png"
    done = command(
        sweep_eps.main, "--ckpt", checkpoint, "--text", checkpoint / "text.txt", "--norm", "reference",
        "--dtype", "float32", "--eps", "1e-4:1e-1", "--picture", picture,
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = [re.findall(r"[^|]+", line) for line in done.out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["0.0001", "0.001", "**0.003**", "0.01", "0.1"]
    own = command(
        perplexity.main, "--ckpt", checkpoint, "--text", checkpoint / "text.txt", "--norm", "reference",
        "--dtype", "float32",
    )  # fmt: skip
    assert f"perplexity {float(rows[2][1]):.4g}" in re.sub(r"(\d+\.\d+)", lambda n: f"{float(n[0]):.4g}", own.out)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("picture", ["x.xyz", "noext", "folder", "x.pdf"])
def test_a_picture_that_is_not_a_png_is_refused_before_the_sweep(checkpoint, command, tmp_path, picture):
    (tmp_path / "folder").mkdir()
    done = command(sweep_eps.main, "--ckpt", checkpoint, "--picture", tmp_path / picture)
    assert (done.code, done.out) == (2, "")
    assert f"{picture}' does not end in .png" in done.err


def sweep(command, checkpoint, *more):
    """Two epsilons of a few tokens."""
    return command(
        sweep_eps.main, "--ckpt", checkpoint, "--text", checkpoint / "text.txt", "--norm", "reference", "--dtype",
        "float32", "--max-tokens", 20, "--eps", "1e-4:1e-4", *more,
    )  # fmt: skip


def test_a_picture_that_cannot_be_drawn_ends_no_sweep(checkpoint, command, tmp_path):
    (tmp_path / "taken.png").mkdir()
    done = sweep(command, checkpoint, "--picture", tmp_path / "taken.png")
    assert done.code == 0
    assert len(done.out.splitlines()) == 4
    assert "taken.png is not drawn (IsADirectoryError" in done.err
    assert "drawn: " not in done.err


def test_a_loss_of_nan_is_refused(checkpoint, command, tmp_path, monkeypatch):
    def load(*arguments):
        model = load_checkpoint(*arguments)
        torch.nn.init.constant_(model.norm.weight, math.nan)
        return model

    monkeypatch.setattr(perplexity, "load_checkpoint", load)
    done = sweep(command, checkpoint, "--picture", tmp_path / "eps.png")
    assert (done.code, done.out, list(tmp_path.iterdir())) == (2, "", [])
    assert "error: the loss is nan in float32; expected a finite one; weights may be NaN" in done.err


def test_the_help_has_one_default_a_flag(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sweep_eps.py", "--help"])
    with pytest.raises(SystemExit):
        sweep_eps.parse_args()
    assert not re.search(r"\(default:[^()]*\)\s*\(default:", capsys.readouterr().out)


def test_the_table_and_the_picture_show_what_was_measured(monkeypatch, tmp_path):
    measured = [sweep_eps.Measured(1e-3, math.log(20), [0.0, 0.25]), sweep_eps.Measured(1.0, 1000.0, [1.0, 0.5])]
    assert sweep_eps.table(measured, 1e-3).splitlines()[2:] == [
        "| **0.001** | 20 | 12.5% | 25.0% |", "| 1 | above 1e43 | 75.0% | 100.0% |",
    ]  # fmt: skip
    figure = sweep_eps.new_figure(7, 6)
    monkeypatch.setattr(sweep_eps, "new_figure", lambda *size: figure)
    sweep_eps.draw(measured, 1e-3, ["0.attention_norm", "norm"], tmp_path / "eps.png")
    above, below, _ = figure.axes
    assert above.lines[0].get_xydata()[0].tolist() == pytest.approx([1e-3, 20])
    assert list(above.lines[1].get_xdata()) == [1e-3, 1e-3]
    assert below.collections[0].get_array().tolist() == [[0.0, 1.0], [0.25, 0.5]]  # a norm a row
    assert [label.get_text() for label in below.get_yticklabels()] == ["0.attention_norm", "norm"]
