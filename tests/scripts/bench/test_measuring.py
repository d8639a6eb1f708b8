"""scripts/bench/measuring.py: the arithmetic of a row, turns, and the description of the machine."""

import pytest
import torch

from model.cli import choose_autocast_dtype
from scripts.bench import measuring
from scripts.bench.measuring import Row
from tests.helpers import CPU


def test_the_ratio_is_theirs_over_ours_of_each_pair():
    row = Row("decode", "float32", "ms", {"ours": [0.001, 0.002, 0.004], "theirs": [0.003, 0.004, 0.004]})
    assert measuring.line(row).split("ms")[-1].split() == ["2.00", "[1.50,", "2.50]"]  # of 3, 2 and 1, and not 4 / 2


@pytest.mark.parametrize(
    ("unit", "shown"), [("s", "0.002 [0.0015, 0.003] s"), ("ms", "2 [1.5, 3] ms"), ("MB", "2e-09 [1.5e-09, 3e-09] MB")]
)
def test_a_row_shows_median_and_quartiles_in_its_unit(unit, shown):
    line = measuring.line(Row("decode", "float32", unit, {"ours": [0.004, 0.001, 0.002]}, "a note"))
    assert line.split() == ["decode", "float32", *shown.split(), "a", "note"]


def test_ours_and_theirs_take_turns_and_the_first_of_each_does_not_count():
    calls, times = [], iter([90.0, 91.0, 1.0, 2.0, 3.0, 4.0])

    def call(name):
        return lambda: (calls.append(name), next(times))[1]

    turns = measuring.in_turn({name: call(name) for name in ("ours", "theirs")}, repeats=2)
    assert turns == {"ours": [1.0, 3.0], "theirs": [2.0, 4.0]}
    assert calls == ["ours", "theirs"] * 3


def test_the_limits_are_those_of_the_fastest_call(monkeypatch):
    taken = iter([2.0, 1.0, 4.0, 2.0, 2.0, 8.0, 9.0, 8.0, 4.0, 5.0])
    monkeypatch.setattr(measuring, "seconds", lambda call: next(taken))
    monkeypatch.setattr(measuring.torch, "ones", lambda *shape, dtype=None: torch.empty(shape, device="meta"))
    limits = measuring.measure_limits(["bfloat16"])
    assert limits == (2**28, {"bfloat16": 2 * 1024**3 / 4})


@pytest.mark.parametrize("auto", [torch.float32, torch.bfloat16])
def test_a_cpu_is_described_with_what_its_figures_depend_on(monkeypatch, auto):
    monkeypatch.setattr(measuring, "choose_autocast_dtype", lambda name, device: auto)
    text = measuring.describe(CPU)
    assert torch.backends.cpu.get_cpu_capability() in text
    assert f"--dtype auto is {str(auto).removeprefix('torch.')})" in text
    assert f"{torch.get_num_threads()} threads" in text
    assert torch.__version__ in text
    monkeypatch.undo()
    assert str(choose_autocast_dtype("auto", CPU)).removeprefix("torch.") in measuring.describe(CPU)
