"""The command: its stages in their order, its page and its exit codes."""

import json
import os
import subprocess
import sys

import pytest

from scripts import prove
from scripts.proving import cost, training
from tests.helpers import ROOT, needs_triton

NORMS = "tests.scripts.proving.norms"
CONTROLS = ("control_columns", "control_blocks", "control_division")


@pytest.fixture
def proved(command, tmp_path):
    """Prove a norm; returns the exit code, stdout, stderr, and what was found."""

    def run(norm, *arguments):
        name = norm if ":" in norm or norm == "triton" else f"{NORMS}:{norm}"
        path = tmp_path / "found.json"
        code, out, err = command(prove.main, name, "--out", tmp_path / "out", "--json", path, *arguments)
        return code, out, err, json.loads(path.read_text()) if path.exists() else None

    return run


@pytest.mark.long
def test_a_norm_that_dies_of_strides_is_a_finding_and_the_rest_goes_on(proved, tmp_path):
    code, out, err, found = proved("dies_of_strides", "--quick")
    assert code == 1, err
    assert "a segmentation fault, at x (6, 48) with strides (144, 1): a slice of a fused projection" in out
    assert "to change: x = x.contiguous() first" in out
    assert "2. Which norm is it?" in out
    assert list(found["stages"]) == ["fits", "identity", "promises"]
    states = {promise["words"]: promise["state"] for promise in found["stages"]["promises"]}
    assert states["strides change nothing"] == "broken"
    assert states["values are the formula's, in each dtype"] == "kept"
    assert "a segmentation fault" in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize(
    ("norm", "words"),
    [("nothing", "it returns None, expected a tensor like x"), ("dies", "a segmentation fault, at x (6, 48) float32")],
)
def test_nothing_else_is_asked_of_what_does_not_run(proved, norm, words):
    code, out, _, found = proved(norm)
    assert code == 1
    assert words in out
    assert out.splitlines()[-1].startswith(f"{NORMS}:{norm} can't be used: ")
    assert list(found["stages"]) == ["fits"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere:norm"], "can't import 'nowhere'"),
        (["nothing"], "no norm backend is called 'nothing'"),
        (["a:b,c:d"], "names several norms; expected one"),
        ([], "the following arguments are required: norm"),
        (["torch", "--form", "olmo"], "invalid choice: 'olmo'"),
    ],
)
def test_what_could_not_be_run_is_one_line_and_exit_code_2(command, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(prove.main, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("report.md"))


PASSES = {"first_difference": 0.0, "largest_difference": 1e-6, "passes": True, "first_step_over": None}
FAILS = {"first_difference": 0.1, "largest_difference": 0.4, "passes": False, "first_step_over": 0}


@pytest.fixture
def later_stages(monkeypatch):
    """Made-up results of training and costs; returns what was asked."""
    asked = []

    def parity(subject, bound, out, tick):
        asked.append("training")
        verdicts = {subject.name: PASSES, "impostor": FAILS, **dict.fromkeys(CONTROLS, PASSES)}
        one = {"verdicts": verdicts, "picture": "parity/float32.png", "losses": {subject.name: [6.0, 5.0]}}
        return {"failures": [], "notes": [], "dtypes": {"float32": one}}

    monkeypatch.setattr(training, "parity", parity)
    monkeypatch.setattr(cost, "nothing_to_count", lambda *_: asked.append("cost") or "there is nothing to count")
    return asked


@pytest.mark.long
def test_a_right_norm_goes_through_all_stages(proved, later_stages, tmp_path):
    code, out, err, found = proved("right")
    assert code == 0, out + err
    assert [line for line in out.splitlines() if line[:1].isdigit()] == [
        "1. Does it fit?", "2. Which norm is it?", "3. The contract", "4. Does it train?", "5. What does it cost?",
    ]  # fmt: skip
    assert later_stages == ["training", "cost"]
    assert "   yes float32: its loss differs from the reference's by at most 1.0e-06" in out
    verdict = f"{NORMS}:right: it is LLaMA's norm (rounded twice); 18 of 18 promises kept; "
    verdict += "trains as the reference does in float32"
    assert out.splitlines()[-1] == found["verdict"] == verdict
    assert list(found["stages"]) == ["fits", "identity", "promises", "parity", "cost"]
    assert found["exit_code"] == 0
    page = (tmp_path / "out/report.md").read_text()
    assert page.splitlines()[2] == f"**{verdict}.**"
    assert f"`python scripts/prove.py {NORMS}:right`" in page
    assert "![Training loss with each norm, in float32](parity/float32.png)" in page
    assert "There is nothing to count." in page


@pytest.mark.long
def test_a_norm_of_another_function_is_not_trained(proved, later_stages):
    code, out, _, found = proved("tests.kernels.faults:eps_outside_the_root")
    assert code == 1
    assert later_stages == []
    assert "4. and 5. are left out: " in out
    assert "It is not LLaMA's norm: eps stands outside the root." in out
    assert "smallest that shows it: x (0.001), weight 1, eps 1e-05: found (0.9901), right (0.3015)" in out
    assert "it is not LLaMA's norm: eps stands outside the root; " in found["verdict"]


def test_help_needs_no_torch_and_names_no_folder():
    command = [sys.executable, "-X", "importtime", ROOT / "scripts/prove.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| torch\n" not in done.stderr
    assert str(ROOT) not in done.stdout
    assert "Exit code 0: every promise" in " ".join(done.stdout.split())


@pytest.mark.long
def test_a_plain_norm_needs_no_triton(tmp_path):
    """A folder in front of all others has a triton that can't be imported."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise ImportError('no triton here')")
    (tmp_path / "mine.py").write_text("from kernels.reference import rms_norm\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, ROOT / "scripts/prove.py", "mine:rms_norm", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plain PyTorch: it launches no Triton kernel" in done.stdout
    assert (tmp_path / "out/prove/mine/report.md").exists()


@needs_triton
@pytest.mark.long
def test_a_triton_kernel_is_counted_on_an_emulated_gpu(tmp_path):
    """Stages 1 and 5 of our own kernels, as compiled for an H100."""
    script = """
import sys
from scripts.proving import cost, fits
from scripts.proving.subject import Subject
subject = Subject("triton", gpu="sm_90")
lines = fits.runs(subject)
figures = cost.counted(subject, backward=True, adds=True)
print(lines[0].found)
print(*(f"{name} {one['figures'][0]:.2f} {len(one['kernels'])} {one['kernels'][-1]['spills']}" for name, one in
        figures.items()), sep=chr(10))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NORM_TEST_DEVICE": "cpu", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "compiled for H100 (sm_90), on an emulated one" in lines[0]
    assert lines[1:] == ["forward 4.00 1 none", "backward 6.00 2 none", "add 8.00 1 none"]
