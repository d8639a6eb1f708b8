"""The parity run: its scale, its verdict, and that it can tell a wrong norm from a right one."""

import itertools
import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock

import kernels
from kernels.emulated import emulated_gpu
from scripts import loss_parity
from tests.helpers import CPU, needs_triton
from tests.kernels import contract
from tests.kernels.contract import EPS, rows, weights
from tests.model.training import runs

REFERENCE = [7.0, 6.5, 6.25, 6.0]
ULP = float(np.spacing(np.float32(7.0)))  # 4.8e-7


CONTROLS = [getattr(loss_parity, name) for name in loss_parity.CONTROLS]


def shifted(*differences):
    return [loss + difference for loss, difference in zip(REFERENCE, differences, strict=True)]


def controls(columns, blocks, division):
    return {"control_columns": columns, "control_blocks": blocks, "control_division": division}


@pytest.mark.parametrize("control", CONTROLS, ids=loss_parity.CONTROLS)
def test_a_control_is_right(control):
    for dtype in (torch.float32, *contract.HALF):
        contract.values_are_the_formula(control, dtype, (7, 48))
        contract.gradients_are_those_of_the_formula(control, dtype, (7, 48))
    for dtype in contract.HALF:
        contract.half_precision_rounds_in_the_order_of_the_form(control, dtype)


def test_the_controls_round_differently_from_the_reference_and_from_each_other():
    x, weight = rows(64, 256), weights(256)
    norms = [kernels.load_backend("reference", CPU).rms_norm, *CONTROLS]
    for one, other in itertools.combinations([norm(x, weight, EPS) for norm in norms], 2):
        assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (contract.values_are_the_formula, (torch.float32, (7, 48))),
        (contract.half_precision_rounds_in_the_order_of_the_form, (torch.float16,)),
    ],
)
def test_the_impostor_fails_the_contract(check, arguments):
    with pytest.raises(AssertionError):
        check(loss_parity.impostor, *arguments)


@pytest.mark.parametrize(
    ("differences", "passes", "first_step_over"),
    [
        ((0, 0, 0, 0), True, None),
        ((1e-3, 1e-3, -1e-3, 1e-3), True, None),  # up to what is allowed
        ((1.2e-3, 0, 0, 0), False, 0),
        ((0, 0, -1.2e-3, 0), False, 2),
        ((0, 0, 0, math.nan), False, 3),
        ((0, math.inf, 0, 0), False, 1),
    ],
)
@pytest.mark.parametrize("largest", [0, 1, 2])
def test_a_run_is_judged_by_the_control_that_differs_most(differences, passes, first_step_over, largest):
    shown = [shifted(0, 1e-6, 0, 1e-5)] * 3
    shown[largest] = shifted(0, 1e-5, -1.1e-4, 0)
    losses = {"reference": REFERENCE, "mine": shifted(*differences), **controls(*shown)}
    verdict = loss_parity.judge(losses)["mine"]
    assert (verdict["passes"], verdict["first_step_over"]) == (passes, first_step_over)


@pytest.mark.parametrize(("first_step", "first_step_over"), [(5, None), (4, 4)])
def test_a_run_may_be_ten_steps_ahead_of_the_controls(first_step, first_step_over):
    late = [7.0] * 15 + [7.0001] * 5
    mine = [7.0] * first_step + [7.0009] * (20 - first_step)
    losses = {"reference": [7.0] * 20, "mine": mine, **controls(late, late, late)}
    assert loss_parity.judge(losses)["mine"]["first_step_over"] == first_step_over


def test_controls_that_agree_to_the_bit_allow_ten_units_in_the_last_place():
    losses = {"reference": REFERENCE, **controls(REFERENCE, REFERENCE, REFERENCE)}
    losses |= {"at": shifted(10 * ULP, -10 * ULP, 0, 0), "over": shifted(11 * ULP, 0, 0, 0)}
    verdicts = loss_parity.judge(losses)
    assert verdicts["at"]["passes"]
    assert verdicts["over"]["first_step_over"] == 0


def grown(first, last):
    """A loss a step whose difference from 7 grows evenly, on a log scale, over 100 steps."""
    return (7.0 + np.geomspace(first, last, 100)).tolist()


# Of the size that 100 steps of the default config have shown; 1.05e-5 and 4.1e-2 are Triton's on a CPU with bfloat16
# instructions. The first control in bfloat16 agrees with the reference at step 0, as one does there.
SHOWN = {
    "float32": controls(grown(1e-7, 3.2e-5), grown(4.8e-7, 3.9e-5), grown(2e-7, 1.6e-5)),
    "bfloat16": controls([7.0, *grown(3e-6, 2.7e-2)[1:]], grown(5.2e-6, 3e-2), grown(3.3e-6, 1.5e-2)),
}
TRITON = {"float32": grown(4.8e-7, 4.6e-5), "bfloat16": grown(1.05e-5, 4.1e-2)}


@pytest.mark.parametrize(
    ("dtype", "of_triton", "first_step_over"),
    [("float32", "float32", None), ("bfloat16", "bfloat16", None), ("float32", "bfloat16", 0)],
)
def test_what_is_allowed_follows_from_controls_of_the_dtype(dtype, of_triton, first_step_over):
    losses = {"reference": [7.0] * 100, "triton": TRITON[of_triton], "impostor": grown(2.9e-3, 0.13), **SHOWN[dtype]}
    verdicts = loss_parity.judge(losses)
    assert verdicts["triton"]["first_step_over"] == first_step_over
    assert verdicts["impostor"]["first_step_over"] == 0
    assert all(verdicts[name]["passes"] for name in loss_parity.CONTROLS)


@pytest.mark.parametrize("name", loss_parity.CONTROLS)
def test_a_control_is_judged_by_the_others(name):
    losses = {"reference": [7.0] * 100, **SHOWN["float32"], name: grown(4.8e-7, 1e-2)}
    verdicts = loss_parity.judge(losses)
    assert [control for control in loss_parity.CONTROLS if not verdicts[control]["passes"]] == [name]


@pytest.fixture
def parity(monkeypatch, command, tmp_path):
    """Run the command with made-up losses instead of training; returns exit code, stdout and parity.json."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **losses):
        made_up = {"reference": REFERENCE, "torch": REFERENCE, "impostor": shifted(1, 1, 1, 1)}
        made_up |= controls(*[shifted(0, 1e-6, 1e-5, 1e-4)] * 3) | losses

        def train_with(norm, folder, args, bar):
            assert args.dtype in ("float32", "bfloat16")  # train.py is never asked for `auto`
            return made_up[folder.name]

        monkeypatch.setattr(loss_parity, "train_with", train_with)
        (tmp_path / "parity").mkdir(exist_ok=True)
        code, out, _ = command(loss_parity.main, "--out", "parity", "--norms", "reference,torch", *arguments)
        return code, out, json.loads((tmp_path / "parity/parity.json").read_text())

    return run


def test_parity_is_exit_code_0(parity):
    code, out, result = parity(torch=shifted(0, 0, 1e-6, 1e-5))
    assert (code, result["parity"]) == (0, True)
    assert out.splitlines()[-1] == "parity"


def test_a_picture_that_cannot_be_drawn_costs_no_verdict(parity, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, result = parity()
    assert (code, result["parity"], out.splitlines()[-1]) == (0, True, "parity")


def test_a_second_comparison_in_a_folder_is_refused(tmp_path, parity, command):
    parity()
    before = (tmp_path / "parity/parity.json").read_bytes()
    with FileLock(tmp_path / "parity/.lock"):
        code, out, err = command(loss_parity.main, "--out", "parity", "--norms", "torch", "--seed", 5)
    assert (code, out) == (2, "")
    assert "another run is writing parity; " in err
    assert (tmp_path / "parity/parity.json").read_bytes() == before


def test_a_backend_that_drifts_is_exit_code_1(parity):
    code, out, result = parity(torch=shifted(0, 2e-3, 2e-3, 2e-3))
    assert (code, result["parity"]) == (1, False)
    assert "differs from step 1 on" in out


def test_an_impostor_that_passes_is_exit_code_1(parity):
    code, out, result = parity(impostor=REFERENCE)
    assert (code, result["parity"]) == (1, False)
    assert "the impostor passes, so this run is too short or too coarse" in out


def test_a_control_that_the_others_refuse_is_exit_code_1(parity):
    code, out, result = parity(control_blocks=shifted(0, 0, 0, 2e-3))
    assert (code, result["parity"]) == (1, False)
    assert "refused by the other controls: control_blocks;" in out


@pytest.mark.parametrize(
    ("asked", "native", "dtype"),
    [("auto", True, "bfloat16"), ("auto", False, "float32"), ("float32", True, "float32")],
)
def test_the_dtype_that_ran_is_said(parity, monkeypatch, asked, native, dtype):
    monkeypatch.setattr("model.cli._cpu_computes_bfloat16", lambda: native)
    _, out, result = parity("--dtype", asked)
    assert result["dtype"] == dtype
    assert out.startswith(f"norm, in {dtype} ")
    _, out, _ = parity("--dtype", asked, "--norm-dtype", "float16")
    assert out.startswith(f"norm@float16, in {dtype} ")


class Forked:
    """In place of subprocess.Popen: train.py in a process that has imported torch before."""

    def __init__(self, command, stdout, stderr):
        self.process = runs.start(os.getcwd(), command[2:], os.path.abspath(stdout.name))
        self.terminate = self.process.terminate

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.join()

    def poll(self):
        return self.process.exitcode

    returncode = property(poll)


class Ended(Forked):
    """In place of subprocess.Popen: a run that failed at once."""

    def __init__(self):
        self.process = SimpleNamespace(exitcode=2, join=lambda: None)
        self.terminate = lambda: None


LONG = pytest.mark.long
STREAM = [LONG, pytest.mark.skipif(emulated_gpu() is None, reason="--emulate")]
RUNS = [
    ("float32", None),
    pytest.param("bfloat16", None, marks=LONG),
    pytest.param("float32", "bfloat16", marks=STREAM),
]


@needs_triton
@pytest.mark.parametrize(("dtype", "norm_dtype"), RUNS)
def test_a_real_run_finds_the_impostor_and_draws_the_curves(
    tmp_path, monkeypatch, command, pytestconfig, dtype, norm_dtype
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loss_parity.subprocess, "Popen", Forked)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 64,  # smaller, and bfloat16 has next to no roundings that can flip
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "max_position_embeddings": 32,
                "rms_norm_eps": 1e-3,
                "vocab_size": 300,
            }
        )
    )
    arguments = f"--config config.json --data text.txt --steps 20 --batch-size 8 --block-size 32 --dtype {dtype}"
    arguments += f" --emulate {pytestconfig.getoption('--emulate')}"
    arguments += f" --norm-dtype {norm_dtype}" if norm_dtype else ""
    code, out, _ = command(loss_parity.main, *arguments.split(), "--norms", "triton", "--out", "parity")
    result = json.loads((tmp_path / "parity/parity.json").read_text())
    assert (code, result["parity"], result["dtype"]) == (0, True, dtype), out
    names = ["reference", "triton", *loss_parity.CONTROLS, "impostor"]
    assert {name: len(losses) for name, losses in result["losses"].items()} == dict.fromkeys(names, 20)
    for name in names:
        about = json.loads((tmp_path / f"parity/{name}/run.json").read_text())
        assert about["dtype"] == dtype
        assert about["arguments"].items() >= {"seed": 1337, "warmup": 4, "eval_interval": 20}.items()
    assert result["verdicts"]["impostor"]["first_step_over"] == 0
    assert (tmp_path / "parity/parity.png").read_bytes().startswith(b"\x89PNG")


def test_all_runs_emulate_the_gpu_that_is_named(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kernels.emulated.emulate", lambda name: None)
    started = []
    monkeypatch.setattr(loss_parity.subprocess, "Popen", lambda flags, **_: started.append(flags) or Ended())
    code, _, err = command(loss_parity.main, "--norms", "torch", "--emulate", "sm_90", "--out", "parity")
    assert (code, err.splitlines()[-1]) == (2, "error: train.py --norm reference failed: no output")
    assert started[0][started[0].index("--emulate") + 1] == "sm_90"


@pytest.mark.parametrize(("found", "norms"), [(object(), "reference,torch,triton"), (None, "reference,torch")])
def test_triton_is_compared_where_it_is_installed(monkeypatch, found, norms):
    monkeypatch.setattr(loss_parity, "find_spec", lambda name: found)
    monkeypatch.setattr("sys.argv", ["loss_parity.py"])
    assert loss_parity.parse_args().norms == norms


@pytest.mark.parametrize("norms", ["", "reference", "control_blocks", "torch,nope"])
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
