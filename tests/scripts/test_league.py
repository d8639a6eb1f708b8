"""The league: a norm is judged by the contract and by what it moves, and the verdicts become a table and a picture."""

import json
import os
import subprocess
import sys

import pytest

from scripts import league, peers
from scripts.judging import judge, report
from scripts.judging.judge import Verdict
from tests.helpers import ROOT, needs_triton

# A norm of one program a row, as packages write them, but with faults to choose: it claims PyTorch's form.
NORM = """
import torch, triton, triton.language as tl

@triton.jit
def forward_kernel(X, Y, W, N, eps, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + at, at < N, 0.0).to(tl.float32)
    w = tl.load(W + at, at < N, 0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / N + eps)
    if ORDER == "llama":
        y = y.to(Y.dtype.element_ty).to(tl.float32)
    tl.store(Y + tl.program_id(0) * N + at, y * w, at < N)

ORDER: tl.constexpr = tl.constexpr("torch")

def rms_norm(x, weight, eps):
    assert x.is_cuda
    y = torch.empty_like(x, device="cuda")
    rows = x.shape[:-1].numel()
    forward_kernel[(rows,)](x, y, weight, x.shape[-1], eps, BLOCK=triton.next_power_of_2(x.shape[-1]))
    return y

def add_rms_norm(x, residual, weight, eps):
    h = x + residual
    return rms_norm(h, weight, eps), h
"""
SCRIPT = """
import json, sys
from dataclasses import asdict
from scripts import peers
from scripts.judging import judge

call = lambda f, x, w, eps, form: f(x, w, eps)
made_up = peers.Package("pytest", ("torch",), "made_up:rms_norm", call)
peers.PACKAGES |= {
    "good": made_up._replace(add_source="made_up:add_rms_norm", add=lambda f, x, r, w, eps, form: f(x, r, w, eps)),
    "bad": made_up._replace(source="made_up_llama:rms_norm"),
    "missing": made_up._replace(install="a-package-that-nobody-has einops"),
    "broken": made_up._replace(source="made_up:nothing"),
}
from tests.kernels import test_norm_contract as contract
few = ("torch.float32-(7, 48)", "torch.float64-(7, 48)", "order", "transposed", "any_width-17")
contract.RMS_NORM[:] = [case for case in contract.RMS_NORM if any(part in case.id for part in few)]
print(json.dumps([asdict(judge.judge(name, "torch", "sm_90", [256])) for name in peers.PACKAGES if name in
    ("good", "bad", "missing", "broken")]))
"""


@needs_triton
@pytest.mark.long
def test_norms_are_judged(tmp_path):
    (tmp_path / "made_up.py").write_text(NORM)
    (tmp_path / "made_up_llama.py").write_text(NORM.replace('constexpr("torch")', 'constexpr("llama")'))
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "NORM_TEST_DEVICE": "cpu"}
    environment["TRITON_INTERPRET"] = "0"
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    good, bad, missing, broken = (Verdict(**verdict) for verdict in json.loads(done.stdout))
    assert missing.why_not == "not installed; pip install --no-deps a-package-that-nobody-has einops"
    assert broken.why_not.startswith("InputError: can't import nothing from made_up")
    assert (good.version, good.why_not, good.backward, good.adds) == (pytest.__version__, "", False, True)
    # Forward alone, so the strides are not among the checks.
    assert good.passed == {"forward": 5, "add": 3}
    assert [failure[:2] for failure in good.failed["forward"]] == [
        ["values_are_the_formula", "torch.float64-(7, 48)"],
    ]
    assert {failure[0] for failure in bad.failed["forward"]} == {
        "values_are_the_formula",
        "half_precision_rounds_in_the_order_of_the_form",
    }
    assert not bad.adds
    assert set(bad.table) == {"forward"}
    # x and y once, and the weight by each program: 4 bytes an element, and 2.
    assert good.moved == {"forward": {"256": 4.0}, "add": {"256": 4.0}}
    assert good.table["forward"][:2] == [4.0, 2.0]
    assert good.table["forward"][2] > 3


VERDICTS = [
    Verdict(
        "ours", "llama", backward=True, adds=True, passed={"forward": 2, "backward": 1, "add": 3},
        failed={
            "forward": [["values_are_the_formula", "torch.float64-(7, 48)", "AssertionError: found 1"]],
            "backward": [
                ["gradcheck_in_float64", "", "KeyError: torch.float64"],
                ["strides_change_nothing", "transposed", "AssertionError: found 1"],
                ["strides_change_nothing", "swapped axes", "EmulationError: reads 4 bytes outside the tensors: x"],
                ["repeated_runs_have_the_same_bits", "", "RuntimeError: the Tensor at index 1 appears to not have been "
                 "used in the graph"],
            ],
        },
        moved={"forward": {64: 4.0, 256: 4.0}, "backward": {64: 6.0, 256: "RuntimeError: too wide"}},
        table={"forward": [4.0, 1.0, 12.9], "backward": "RuntimeError: too wide"},
    ),
    Verdict("theirs", "torch", "1.2", passed={"forward": 3}, moved={"forward": {64: 8.0, 256: 1.0}}),
    Verdict("theirs", "gemma", "1.2", passed={"forward": 1}, moved={"forward": {64: 1.0, 256: 1.0}}),
    Verdict("lost", "torch", why_not="not installed; pip install --no-deps lost"),
]  # fmt: skip


def test_the_table_says_what_fails_and_why_one_can_not_run():
    head, _, ours, theirs, _, lost = report.table(VERDICTS).splitlines()
    assert [cell.strip() for cell in ours.split("|")[1:-1]] == [
        "ours", "llama", "2/3", "1/5", "3/3", "float64 2; strides* 2; no dweight 1", "4.00 + 1.00; 13", "fails", "-",
    ]  # fmt: skip
    assert [cell.strip() for cell in theirs.split("|")[1:-1]] == ["theirs 1.2", "torch", "3/3", "-", "-", "", *"---"]
    assert lost.startswith("| lost | torch | can't run: not installed; pip install --no-deps lost |")
    assert {line.count("|") for line in (head, ours, theirs, lost)} == {10}


def test_the_picture_has_a_row_for_each_norm_that_runs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt

    drawn = []
    monkeypatch.setattr(plt.Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    report.draw(VERDICTS, tmp_path / "league.png")
    forward, backward, _ = drawn[0].axes
    assert [label.get_text() for label in forward.get_yticklabels()] == ["ours", "theirs 1.2"]
    assert [text.get_text() for text in forward.texts] == ["1.00", "1.00", "2.00", "a part"]  # of the first form alone
    assert [text.get_text() for text in backward.texts] == ["1.00", "fails", "", ""]
    assert forward.images[0].get_array().tolist() == [[1.0, 1.0], [2.0, None]]  # what moves too little is not good


def test_each_form_that_a_norm_claims_is_judged():
    assert league.entries("liger,fla") == [("liger", "llama"), ("liger", "gemma"), ("fla", "torch")]
    everything = league.entries(None)
    assert {name for name, _ in everything} == {"triton", *peers.PACKAGES} - {"quack"}  # quack is not written in Triton


def test_verdicts_come_in_the_order_of_the_norms(command, monkeypatch, tmp_path):
    monkeypatch.setattr(league, "judge_apart", lambda name, form, gpu, widths: Verdict(name, form, gpu, str(widths)))
    path = tmp_path / "new" / "league.json"
    code, stdout, stderr = command(
        league.main, "--norms", "fla,conch", "--emulate", "sm_80", "--widths", "64", "--json", path
    )
    assert code == 0, stderr
    assert [line.split("|")[1:4] for line in stdout.splitlines()[2:]] == [
        [" fla sm_80 ", " torch ", " can't run: [64] "],
        [" conch sm_80 ", " llama ", " can't run: [64] "],
        [" conch sm_80 ", " gemma ", " can't run: [64] "],
    ]
    assert [verdict["norm"] for verdict in json.loads(path.read_text())] == ["fla", "conch", "conch"]


def test_bad_input_is_one_line(command):
    code, _, stderr = command(league.main, "--norms", "quack")
    assert code == 2
    assert "no Triton norm is called 'quack'; expected some of triton, liger" in stderr


def _dies(*_):
    os._exit(1)


def test_a_norm_that_takes_its_process_down_is_a_verdict(monkeypatch):
    monkeypatch.setattr(league, "judge", _dies)
    assert league.judge_apart("fla", "torch", "sm_90", [64]).why_not == "it takes its process down"


def test_floors_and_passes_belong_together():
    assert tuple(report.FLOORS) == judge.PASSES
