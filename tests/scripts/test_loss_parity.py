"""The parity run: its scale, its verdict, and that it can tell a wrong norm from a right one."""

import json
import math

import numpy as np
import pytest
import torch

import kernels
from scripts import loss_parity
from tests.helpers import CPU
from tests.kernels import contract
from tests.kernels.contract import EPS, rows, weights

REFERENCE = [7.0, 6.5, 6.25, 6.0]
ULP = float(np.spacing(np.float32(7.0)))  # 4.8e-7


def shifted(*differences):
    return [loss + difference for loss, difference in zip(REFERENCE, differences, strict=True)]


def test_the_control_is_right_and_rounds_differently():
    for dtype in (torch.float32, torch.float16):
        contract.values_are_the_formula(loss_parity.control, dtype, (7, 48))
        contract.gradients_are_those_of_the_formula(loss_parity.control, dtype, (7, 48))
    reference = kernels.load_backend("reference", CPU).rms_norm
    x, weight = rows(64, 256), weights(256)
    assert not torch.equal(loss_parity.control(x, weight, EPS), reference(x, weight, EPS))


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (contract.values_are_the_formula, (torch.float32, (7, 48))),
        (contract.half_precision_rounds_before_the_weight, (torch.float16,)),
    ],
)
def test_the_impostor_fails_the_contract(check, arguments):
    with pytest.raises(AssertionError):
        check(loss_parity.impostor, *arguments)


@pytest.mark.parametrize(
    ("differences", "passes", "first_step_over"),
    [
        ((0, 0, 0, 0), True, None),
        ((8 * ULP, 1e-5, -1e-4, 1e-3), True, None),  # up to what is allowed
        ((9 * ULP, 0, 0, 0), False, 0),
        ((0, 1.2e-5, 0, 0), False, 1),
        ((0, 0, 1.2e-4, 0), False, 2),
        ((0, 0, 0, math.nan), False, 3),
    ],
)
def test_a_run_is_judged_by_the_controls_difference_so_far(differences, passes, first_step_over):
    losses = {"reference": REFERENCE, "control": shifted(0, 1.1e-6, 1.1e-5, 1.1e-4), "mine": shifted(*differences)}
    verdict = loss_parity.judge(losses)["mine"]
    assert (verdict["passes"], verdict["first_step_over"]) == (passes, first_step_over)


@pytest.fixture
def parity(monkeypatch, command, tmp_path):
    """Run the command with made-up losses instead of training; returns exit code, stdout and parity.json."""
    monkeypatch.chdir(tmp_path)

    def run(**losses):
        made_up = {"reference": REFERENCE, "control": shifted(0, 1e-6, 1e-5, 1e-4), "impostor": shifted(1, 1, 1, 1)}
        made_up |= losses
        monkeypatch.setattr(loss_parity, "train_with", lambda norm, folder, args, bar: made_up[folder.name])
        (tmp_path / "parity").mkdir(exist_ok=True)
        code, out, _ = command(loss_parity.main, "--out", "parity", "--norms", "reference,torch")
        return code, out, json.loads((tmp_path / "parity/parity.json").read_text())

    return run


def test_parity_is_exit_code_0(parity):
    code, out, result = parity(torch=shifted(0, 0, 1e-6, 1e-5))
    assert (code, result["parity"]) == (0, True)
    assert out.splitlines()[-1] == "parity"


def test_a_backend_that_drifts_is_exit_code_1(parity):
    code, out, result = parity(torch=shifted(0, 1e-3, 1e-3, 1e-3))
    assert (code, result["parity"]) == (1, False)
    assert "differs from step 1 on" in out


def test_an_impostor_that_passes_is_exit_code_1(parity):
    code, out, result = parity(torch=REFERENCE, impostor=REFERENCE)
    assert (code, result["parity"]) == (1, False)
    assert "the impostor passes, so this run is too short or too coarse" in out


def test_a_real_run_finds_the_impostor_and_draws_the_curves(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 32,
                "rms_norm_eps": 1e-3,
                "vocab_size": 300,
            }
        )
    )
    arguments = "--config config.json --data text.txt --steps 8 --batch-size 4 --block-size 16 --norms torch"
    code, out, _ = command(loss_parity.main, *arguments.split(), "--out", "parity")
    result = json.loads((tmp_path / "parity/parity.json").read_text())
    assert (code, result["parity"]) == (0, True), out
    assert {name: len(losses) for name, losses in result["losses"].items()} == dict.fromkeys(
        ["reference", "torch", "control", "impostor"], 8
    )
    assert result["verdicts"]["impostor"]["first_step_over"] == 0
    assert (tmp_path / "parity/parity.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("norms", ["", "reference", "control", "torch,nope"])
def test_norms_that_compare_nothing_are_refused_before_any_run(tmp_path, monkeypatch, command, norms):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(loss_parity.main, "--norms", norms, "--out", "parity")
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "compare with the reference" in err or "no norm backend is called 'nope'" in err


def test_a_run_that_fails_is_reported_with_its_reason(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(loss_parity.main, "--config", "nothing.json", "--out", "parity")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: train.py --norm reference failed: error: nothing.json is missing")
