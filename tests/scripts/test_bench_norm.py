"""The norms' benchmark: its arithmetic, what it times, and norms that differ, refuse or can't be timed.

Nothing here looks at how long anything took.
"""

import json
import re
import sys
from itertools import product

import pytest
import torch

import kernels
from kernels import Backend, InputError
from scripts import bench_norm, peers
from tests.helpers import CPU, needs_triton

PASSES = ["forward", "backward", "add_forward", "add_backward"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little to read before each call."""
    monkeypatch.setattr(bench_norm, "COLD", {"cpu": 2**12})


def tensors(rows=3, width=5, dtypes=(torch.float16, torch.float32)):
    return bench_norm.make_tensors(rows, width, list(dtypes), CPU)


@pytest.mark.parametrize(("pass_name", "expected"), list(zip(PASSES, [80, 130, 140, 160], strict=True)))
def test_the_floor_counts_each_tensor_once(pass_name, expected):
    x, _, weight, *_ = tensors()
    assert (x.nbytes, weight.nbytes) == (30, 20)
    [copy] = bench_norm.measure(pass_name, "eager", {}, tensors(), torch.ones(1), repeats=1)
    assert copy["floor_bytes"] == expected


def test_the_share_is_the_copys_median_over_the_norms(monkeypatch):
    # in the order of the calls: the copy and the norm, then the norm first, then the copy again
    times = iter([10.0, 40.0, 80.0, 30.0, 20.0, 60.0])
    monkeypatch.setattr(bench_norm, "time_last", lambda steps, mode, other: next(times))
    norm = kernels.load_backend("reference", CPU)
    copy, row = bench_norm.measure("backward", "eager", {"mine": norm}, tensors(), torch.ones(1), repeats=3)
    assert (copy["norm"], copy["median_us"], copy["share"]) == ("copy", 20, 1)
    assert (row["norm"], row["median_us"], row["quartiles_us"]) == ("mine", 60, [50, 70])
    assert row["share"] == pytest.approx(1 / 3)
    assert row["gb_per_s"] == pytest.approx(130 / 60e-6 / 1e9)
    assert (row["width"], row["rows"], row["floor_bytes"]) == (5, 3, 130)


@pytest.fixture
def counted():
    """A backend that counts its forwards."""
    reference = kernels.load_backend("reference", CPU)
    calls = []

    def rms_norm(*arguments):
        calls.append(1)
        return reference.rms_norm(*arguments)

    return Backend("counted", rms_norm, kernels.add_then(rms_norm)), calls


@pytest.mark.parametrize("pass_name", PASSES)
def test_what_is_timed_is_that_pass_alone_and_the_whole_of_it(counted, pass_name):
    backend, calls = counted
    x, residual, weight, dy, dh, bias = tensors(dtypes=[torch.float64] * 2)
    *before, timed = bench_norm.make_steps(backend, pass_name, (x, residual, weight, dy, dh, bias))
    h = x + residual if pass_name.startswith("add") else x
    y = h * (h.square().mean(-1, keepdim=True) + bench_norm.EPS).rsqrt() * weight
    if pass_name.startswith("add"):
        outputs, inputs, gradients = (y, h), (x, residual, weight), (dy, dh)
    else:
        outputs, inputs, gradients = (y,), (x, weight), (dy,)
    backward = pass_name.endswith("backward")
    assert len(before) == (1 if backward else 0)
    for step in before:
        torch.testing.assert_close(step(), outputs)
    calls.clear()
    found = timed()
    assert len(calls) == (0 if backward else 1)
    torch.testing.assert_close(found, torch.autograd.grad(outputs, inputs, gradients) if backward else outputs)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("pass_name", PASSES)
def test_a_bias_is_added_and_has_its_gradient(pass_name, trained):
    made = bench_norm.make_tensors(3, 5, [torch.float64] * 2, CPU)
    x, residual, weight, dy, dh, bias = made
    for vector in (weight, bias):
        vector.requires_grad_(trained)
    add = pass_name.startswith("add")
    h = x + residual if add else x
    y = torch.nn.functional.layer_norm(h, (5,), weight, bias, bench_norm.EPS)
    outputs, inputs, gradients = ((y, h), (x, residual), (dy, dh)) if add else ((y,), (x,), (dy,))
    inputs += (weight, bias) if trained else ()
    *before, timed = bench_norm.make_steps(kernels.load_backend("layer_norm_bias", CPU), pass_name, made)
    for step in before:
        step()
    expected = torch.autograd.grad(outputs, inputs, gradients) if pass_name.endswith("backward") else outputs
    torch.testing.assert_close(timed(), expected)


def test_a_frozen_weight_has_no_gradient_and_no_place_in_the_floor(monkeypatch, tmp_path, command):
    gradients, measure = [], bench_norm.measure

    def watched(pass_name, mode, norms, tensors, *rest):
        *before, timed = bench_norm.make_steps(norms["reference"], pass_name, tensors)
        for step in before:
            step()
        gradients.append(len(timed()))
        return measure(pass_name, mode, norms, tensors, *rest)

    monkeypatch.setattr(bench_norm, "measure", watched)
    flags = f"--norms reference --widths 16 --rows 2 --repeats 1 --frozen --device cpu --out {tmp_path}"
    code, _, err = command(bench_norm.main, *flags.split())
    assert code == 0, err
    rows = json.loads((tmp_path / "norm.json").read_text())["results"]
    floors = {row["pass"]: row["floor_bytes"] // 64 for row in rows}  # in rows of 16 numbers
    assert floors == {"forward": 5, "backward": 7, "add_forward": 9, "add_backward": 9}
    assert gradients == [1, 1, 2, 2]  # y; dx; y and h; dx and the residual's


def test_a_missing_gradient_is_refused():
    backend = Backend("mine", lambda x, weight, eps: x * 1.0, None)
    row = bench_norm.measure("backward", "eager", {"mine": backend}, tensors(), torch.ones(1), repeats=1)[1]
    assert "appears to not have been used in the graph" in row["refused"]


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_function_is_told_from_another_rounding(pass_name, dtype):
    reference = kernels.load_backend("reference", CPU)

    def same(name, norm):
        wide = tensors(5, 4096, [dtype] * 2)  # over so many columns a mean of 0 would come out as 0
        return bench_norm.measure(pass_name, "eager", {name: norm}, wide, torch.ones(1), repeats=1)[1]

    def wrong_h(x, residual, weight, eps):
        return reference.add_rms_norm(x, residual, weight, eps)[0], x

    for backend in (reference, peers.load("torch_fused", CPU)):
        assert same("right", backend)["same_function"] is True
    nan = Backend("nan", lambda x, weight, eps: x * weight * float("nan"), None)
    nan = nan._replace(add_rms_norm=kernels.add_then(nan.rms_norm))
    for backend in (peers.load("layer_norm", CPU), nan):
        assert same("wrong", backend)["same_function"] is False
    if pass_name.startswith("add"):
        assert same("wrong", reference._replace(add_rms_norm=wrong_h))["same_function"] is False


NORMS = """
from kernels.reference import rms_norm as mine

def broken(x, weight, eps):
    if x.shape[-1] > 32:
        raise ValueError("64 is too wide\\nfor this norm")
    return mine(x, weight, eps)
"""


def test_a_run_fills_every_cell_and_survives_a_norm_that_refuses(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # load_backend adds to it
    (tmp_path / "norms_to_bench.py").write_text(NORMS)
    names = ["reference", "layer_norm", "norms_to_bench:mine", "norms_to_bench:broken"]
    arguments = "--widths 64,32 --rows 8 --repeats 2 --out a/bench --device cpu --dtype bfloat16 --weight-dtype float32"
    code, out, err = command(bench_norm.main, "--norms", ",".join(names), *arguments.split())
    assert code == 0, err
    assert (tmp_path / "a/bench/norm.png").read_bytes().startswith(b"\x89PNG")

    result = json.loads((tmp_path / "a/bench/norm.json").read_text())
    assert result["arguments"]["rows"] == "[8]"
    assert out.splitlines()[:2] == [result["machine"], "x in bfloat16, weight in float32"]
    assert torch.__version__ in result["machine"]
    cells = {(row["pass"], row["mode"], row["width"], row["norm"]): row for row in result["results"]}
    assert len(cells) == len(result["results"])
    assert set(cells) == set(product(PASSES, ["eager"], [32, 64], ["copy", *names]))
    for (pass_name, _, width, norm), row in cells.items():
        assert row["rows"] == 8
        if norm == "norms_to_bench:broken" and width == 64:
            assert row["refused"] == "ValueError: 64 is too wide"
            assert f"norms_to_bench:broken refused {pass_name}, eager, 8 x 64: ValueError: 64 is too wide" in out
            assert "share" not in row
        else:
            assert row["median_us"] > 0
            assert row["share"] > 0
            assert row["quartiles_us"][0] <= row["median_us"] <= row["quartiles_us"][1]
            assert row.get("same_function", True) is (norm != "layer_norm")
    assert "* layer_norm is another function" in out


def test_a_run_in_another_form(tmp_path, monkeypatch, command):
    """The formula that the norms are measured against has that form; what can't take it is left out, or refused."""
    monkeypatch.chdir(tmp_path)
    arguments = "--device cpu --widths 32 --rows 8 --repeats 1 --out . --form gemma"
    code, out, _ = command(bench_norm.main, *arguments.split(), "--norms", "reference,torch,torch_fused")
    assert code == 0
    assert out.splitlines()[1] == "x in float32, weight in float32, form gemma"
    rows = [row for row in json.loads((tmp_path / "norm.json").read_text())["results"] if row["norm"] != "copy"]
    assert len(rows) == 3 * len(PASSES)
    assert all(row["same_function"] for row in rows)
    code, _, err = command(bench_norm.main, *arguments.split(), "--norms", "torch,layer_norm")
    assert (code, err.count("\n")) == (2, 1)
    assert "layer_norm' does not take this form" in err


NO_GPU = "{} is not timed here: without a GPU its time says nothing about Triton's speed"


@needs_triton
def test_tritons_kernels_are_not_timed_without_a_gpu(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(bench_norm.main, "--norms", "triton", "--device", "cpu")
    assert (code, out, list(tmp_path.iterdir())) == (2, NO_GPU.format("triton") + "\n", [])
    assert err.startswith("error: --norms is 'triton'; expected norms to time here")
    arguments = "--norms triton,triton@bfloat16,torch --device cpu --widths 8 --rows 2 --repeats 1 --out ."
    code, out, _ = command(bench_norm.main, *arguments.split())
    assert code == 0
    assert out.splitlines()[:2] == [NO_GPU.format("triton"), NO_GPU.format("triton@bfloat16")]
    result = json.loads((tmp_path / "norm.json").read_text())
    assert {row["norm"] for row in result["results"]} == {"copy", "torch"}


def test_a_default_that_cant_run_is_left_out_with_its_reason(monkeypatch, capsys):
    def load(name, device, form):
        if name == "compile":
            raise InputError("no compiler")
        return Backend("triton (in its interpreter)" if name == "triton" else name, None, None)

    monkeypatch.setattr(peers, "load", load)
    monkeypatch.setattr(peers, "installed", lambda: ["layer_norm"])
    assert list(bench_norm.load_norms(None, CPU)) == ["reference", "torch", "layer_norm"]
    out = capsys.readouterr().out
    assert out.splitlines() == ["compile is not timed here: no compiler", NO_GPU.format("triton")]
    with pytest.raises(InputError, match="no compiler"):
        bench_norm.load_norms("compile", CPU)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("--widths=", "argument --widths: ''"),
        ("--widths 64,0", "argument --widths: '0'"),
        ("--widths 64;128", "argument --widths: '64;128'"),
        ("--rows 0", "argument --rows: '0'"),
        ("--megabytes nan", "argument --megabytes: 'nan'"),
        ("--rows 4 --megabytes 2", "not allowed with argument"),
        ("--repeats 0", "argument --repeats: '0'"),
        ("--dtype float8", "invalid choice: 'float8'"),
        ("--mode graph", "a CUDA graph needs a GPU and the device is cpu"),
        ("--mode both", "a CUDA graph needs a GPU and the device is cpu"),
        ("--norms=", "--norms is ''; expected norms to time here"),
        ("--norms torch,nope", "no norm backend is called 'nope'"),
        ("--norms torch,liger", "liger"),  # not installed, or refused on a CPU
        ("--norms torch --out taken", "--out taken cannot be written"),
    ],
)
def test_bad_input_is_one_line_before_any_work(tmp_path, monkeypatch, command, arguments, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(bench_norm, "measure", None)
    code, out, err = command(bench_norm.main, "--device", "cpu", *arguments.split(" "))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert found in err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_help_names_every_peer_once(monkeypatch, capsys):
    assert list(peers.BENCHED) == bench_norm.PEERS
    monkeypatch.setattr(sys, "argv", ["bench_norm.py", "--help"])
    with pytest.raises(SystemExit):
        bench_norm.parse_args()
    words = re.sub(r"\W+", " ", capsys.readouterr().out.partition("--norms NORMS ")[2].partition("--form")[0]).split()
    assert [words.count(name) for name in bench_norm.PEERS] == [1] * len(bench_norm.PEERS)
