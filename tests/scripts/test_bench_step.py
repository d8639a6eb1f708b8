"""The training step's benchmark: what it trains, in which order, and what it prints. Nothing here looks at the time."""

import json
import re

import pytest
import torch

from scripts import bench_step
from scripts.bench import model_parts
from tests.helpers import ROOT

SHORT = ["--batch-size", "2", "--block-size", "8", "--repeats", "3"]


@pytest.fixture
def steps(monkeypatch):
    """(norm, gradients, weights' change) of each step, in the order in which they run."""
    found, training_step = [], model_parts.training_step

    def watched(batch, dtype, model, forward):
        step, weight = training_step(batch, dtype, model, forward), model.norm.weight

        def run():
            before = weight.detach().clone()
            took = step()
            found.append((model.norm.backend.description, weight.grad, (weight - before).abs().max().item()))
            return took

        return run

    monkeypatch.setattr(bench_step, "training_step", watched)
    return found


def test_each_norm_trains_in_turn_and_the_ratio_is_to_the_first(steps, command):
    code, out, err = command(bench_step.main, "--norms", "torch,layer_norm,reference", *SHORT)
    assert code == 0, err
    names = [name for name, *_ in steps]
    assert len(names) == 3 * (bench_step.WARM_UP + 3)
    turns = [names[i : i + 3] for i in range(0, len(names), 3)]
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)
    assert {turn[0] for turn in turns[:3]} == set(turns[0])  # each norm begins one
    assert all(change > 0 and gradient is None for _, gradient, change in steps)  # updated, and cleared for the next
    assert "tiny, 2 x 8 tokens, float32, eager but for the norm" in out
    assert f"torch {torch.__version__}" in out
    rows = dict(re.findall(r"^(\w+) +[\d.]+ \[[\d.]+, [\d.]+\] ms +([\d.]+) \[", out, re.MULTILINE))
    assert list(rows) == ["torch", "layer_norm", "reference"]
    assert rows["torch"] == "1.00"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_models_are_the_same_and_compute_in_the_dtype_asked_for(dtype, monkeypatch, command):
    weights, dtypes, original = [], [], bench_step.Llama.forward

    def forward(self, *arguments, **options):
        weights.append(self.layers[0].attention.q_proj.weight.sum().item())
        logits = original(self, *arguments, **options)
        dtypes.append(logits.dtype)
        return logits

    monkeypatch.setattr(bench_step.Llama, "forward", forward)
    monkeypatch.setattr(bench_step, "WARM_UP", 0)
    arguments = ["--norms", "torch,reference", "--dtype", dtype, *SHORT[:4], "--repeats", "1"]
    code, _, err = command(bench_step.main, *arguments)
    assert code == 0, err
    assert weights[0] == weights[1]
    assert dtypes == [getattr(torch, dtype)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--norms", "nothing"], "no norm backend is called 'nothing'"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--config", str(ROOT / "configs/tiny-gemma.json"), "--norms", "layer_norm"], "norm 'layer_norm' does not"),
        (["--config", "on_layer_norm.json", "--norms", "torch"], "on_layer_norm.json has norm layer_norm; expected"),
        (["--block-size", "1025", "--norms", "torch"], "--block-size is 1025; expected at most 1024, the model's"),
        (["--norms", "reference", "--emulate", "sm_90"], "--emulate"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_line(arguments, message, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = json.loads((ROOT / "configs/tiny.json").read_text()) | {"model_type": "rmsllama", "norm": "layer_norm"}
    (tmp_path / "on_layer_norm.json").write_text(json.dumps(shape))
    code, out, err = command(bench_step.main, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
