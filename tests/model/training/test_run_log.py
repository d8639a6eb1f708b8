"""What a run shows and draws as it goes: the line fits a terminal, and a picture never ends a run."""

import io
import os
import re
import sys

import pytest

import train
from kernels import InputError
from model.training import curves
from model.training.run_log import RunLog
from tests.helpers import metrics_of


@pytest.mark.parametrize("columns", [79, 80, 200])
def test_the_progress_line_fits_the_terminal(columns, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.isatty = lambda: True
    monkeypatch.setattr(RunLog, "_draw", lambda log: None)
    line = {"step": 123_455, "loss": 10.1234, "val_loss": 10.25, "tokens_per_s": 1_234_567.8}
    with RunLog(tmp_path, [], 123_455, 999_999, 5.0, [], 1e-5, peak_speed=1e7) as log:
        log._bar.ncols = columns
        log._bar.start_t -= 1.14  # seconds that the first step took
        log.record(line)
        shown = str(log._bar)
    count, bar, rest = re.fullmatch(
        r"(123456/999999) (.*) (loss 10.123, val 10.250, 1,234,568 tokens/s, .*)", shown
    ).groups()
    assert re.fullmatch(r".*s, 27\d:\d\d:\d\d left", rest)
    assert len(bar) == columns - len(count) - len(rest) - 2 > 0


def test_without_matplotlib_a_run_says_so_once_and_goes_on(trained, workplace, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, _, stderr = trained("--steps", 3, "--eval-interval", 1)
    assert stderr.count("out/model/loss.png is not drawn (") == 1
    assert "import of matplotlib.figure halted" in stderr
    assert len(metrics_of(workplace / "out/model")) == 3
    assert not (workplace / "out/model/loss.png").exists()


def test_a_disk_too_full_for_a_picture_does_not_end_a_run(trained, workplace, monkeypatch):
    def full(path, content):
        raise InputError(f"{path} cannot be written (No space left on device)")

    monkeypatch.setattr(curves, "replace_file", full)
    _, _, stderr = trained("--steps", 2)
    assert "loss.png cannot be written (No space left on device)); all else goes on\n" in stderr


def test_metrics_are_on_the_disk_before_the_state(trained, workplace, monkeypatch):
    flushed, path = [], workplace / "out/model/metrics.jsonl"

    def fsync(descriptor, usual=os.fsync):
        usual(descriptor)
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            flushed.append(len(metrics_of(path.parent)))

    def save_state(folder, step, *rest, usual=train.save_state):
        assert flushed[-1] == step
        usual(folder, step, *rest)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(train, "save_state", save_state)
    trained("--steps", 4, "--save-interval", 2)
    assert flushed == [2, 4]
