"""Bytes that are kept and allocated, on examples that can be counted by hand."""

import json
import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import kernels
from kernels import Backend, add_then
from model.config import LlamaConfig
from scripts import bench_memory
from tests.helpers import CPU, ROOT, TRAINED, needs_triton


def test_a_storage_is_kept_once_however_many_tensors_look_into_it():
    x, y = torch.ones(6, 100, requires_grad=True), torch.ones(100, requires_grad=True)
    assert bench_memory.kept_bytes(lambda: x[0] * x[1]) == 2400  # two rows of one storage
    assert bench_memory.kept_bytes(lambda: x * y) == 2800
    assert bench_memory.kept_bytes(lambda: x * y, besides=[y]) == 2400
    assert bench_memory.kept_bytes(lambda: x + y) == 0
    assert bench_memory.kept_bytes(lambda: x.exp().exp()) == 4800  # each keeps its result


def test_what_is_kept_at_one_address_after_another_is_counted_apart():
    x = torch.ones(1000, requires_grad=True)

    def forward():
        for _ in range(10):
            y = x.exp()  # a graph that is dropped, and its storage with it
        return y

    assert bench_memory.kept_bytes(forward) == 40000


def test_what_was_counted_is_not_held():
    x, results = torch.ones(1000, requires_grad=True), []

    def forward():
        y = x.exp()
        results.append(StorageWeakRef(y.untyped_storage()))
        return y

    assert bench_memory.kept_bytes(forward) == 4000
    assert results[0].expired()


def test_the_peak_is_the_most_at_a_time():
    kept, before = [], torch.empty(10**6)

    def step():
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(5000, dtype=torch.uint8)
        del a
        kept.append(torch.empty(2000, dtype=torch.uint8))  # 5000 + 2000 at a time, and never 8000
        del b

    # Allocations are aligned to 64 bytes at most. What a step leaves, or is there already, is not the next one's.
    for _ in range(2):
        assert 7000 <= bench_memory.peak_bytes(step, CPU) < 7200
        kept.clear()
    kept.append(before)
    for _ in range(2):
        assert 7000 <= bench_memory.peak_bytes(step, CPU) < 7200


def test_the_peak_sees_within_an_operator():
    x = torch.randn(1000, 50)
    assert (
        bench_memory.peak_bytes(lambda: x.sort(dim=0), CPU) >= x.nbytes + 2 * x.nbytes
    )  # values, and indices in int64


def test_what_the_formulas_need():
    assert bench_memory.needed_bytes("torch", 3, 60) == 60 + 12
    assert bench_memory.needed_bytes("layer_norm_bias@float16", 3, 60) == 60 + 24
    assert bench_memory.needed_bytes(bench_memory.CONTROL, 3, 60) == 60 + 24


class Exact(torch.autograd.Function):
    """RMSNorm that keeps what the formula needs, and returns the gradients of something else."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd.to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dy):
        return dy.clone(), dy.sum(0), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["exact", "layer_norm", "layer_norm_bias", pytest.param("triton", marks=needs_triton)])
def test_a_norm_that_keeps_what_its_formula_needs(name, dtype):
    norm = Backend(name, Exact.apply, add_then(Exact.apply)) if name == "exact" else kernels.load_backend(name, CPU)
    found = bench_memory.alone(name, norm, 64, 96, dtype, CPU)
    x, vector, statistics = 64 * 96 * dtype.itemsize, 96 * dtype.itemsize, 64 * 4
    n_statistics, n_vectors = 2 if "layer" in name else 1, 2 if "bias" in name else 1
    assert found.needed == x + n_statistics * statistics + vector
    assert found.least == 2 * x + n_statistics * statistics + n_vectors * vector
    possible = {found.needed}
    if "layer" in name:  # PyTorch's operator keeps a bias too, and on a CPU bfloat16's statistics in bfloat16
        possible = {x + 2 * 64 * size + n * vector for size in (4, dtype.itemsize) for n in {1, n_vectors}}
    assert found.kept in possible


def test_the_least_is_reached_by_layer_norm():
    """In float32, where PyTorch's operator needs nothing more but a line of the weight's gradient."""
    found = bench_memory.alone("layer_norm", kernels.load_backend("layer_norm", CPU), 4096, 256, torch.float32, CPU)
    assert found.peak == pytest.approx(found.least, rel=0.01)


def test_the_reference_keeps_more_than_its_formula():
    found = bench_memory.alone("reference", kernels.load_backend("reference", CPU), 64, 96, torch.float32, CPU)
    x_hat = 64 * 96 * 4  # for the weight's gradient, where a kernel computes it again
    assert found.needed + x_hat <= found.kept <= found.needed + 2 * x_hat


def test_the_norms_part_of_a_step_is_what_the_formula_says():
    config = LlamaConfig.from_dict(TRAINED)
    batch = torch.randint(290, (3, 17))
    kept = {
        name: bench_memory.in_model(name, norm, config, batch)
        for name, norm in {
            "layer_norm": kernels.load_backend("layer_norm", CPU),
            "exact": Backend("exact", Exact.apply, add_then(Exact.apply)),
            "nothing": bench_memory.NOTHING,
        }.items()
    }
    rows = 3 * 16
    for name, n_statistics in (("exact", 1), ("layer_norm", 2)):
        assert kept[name].needed == 5 * (rows * 32 * 4 + n_statistics * rows * 4)
        assert kept[name].kept - kept["nothing"].kept == kept[name].needed
    # One step's tensors are not there in the next one.
    again = bench_memory.in_model("layer_norm", kernels.load_backend("layer_norm", CPU), config, batch)
    assert again.kept == kept["layer_norm"].kept
    assert again.peak == pytest.approx(kept["layer_norm"].peak, rel=0.02)


ARGUMENTS = ("--config", "config.json", "--rows", 64, "--hidden-size", 96, "--block-size", 16, "--batch-size", 2)


@pytest.mark.long
def test_the_command_prints_a_row_a_norm_alone_and_in_the_model(workplace, command):
    done = command(bench_memory.main, *ARGUMENTS, "--norms", "torch,layer_norm", "--device", "cpu")
    assert done.code == 0, done.err
    above, below = done.out.split("\n\n")
    assert re.findall(r"^\| (\w+) ", above, re.MULTILINE) == ["norm", "torch", "layer_norm", "control"]
    assert re.findall(r"^\| (\w+) ", below, re.MULTILINE) == ["norm", "torch", "layer_norm", "control", "without"]
    assert all(row.count("|") == 8 for row in above.splitlines()[1:])
    assert all(row.count("|") == 7 for row in below.splitlines()[1:])
    x = 64 * 96 * 4 / 1e6
    layer_norm = next(row for row in above.splitlines() if row.startswith("| layer_norm"))
    assert f"| {x + 0.000896:.2f} | {x + 0.000896:.2f} | 1.00 |" in layer_norm


@pytest.mark.long
def test_a_control_that_is_not_found_fails_the_command(workplace, command, monkeypatch):
    monkeypatch.setattr(bench_memory, "doubled", bench_memory.layer_norm)
    done = command(bench_memory.main, *ARGUMENTS, "--norms", "torch", "--device", "cpu")
    assert done.code == 1
    assert "the control is not found to keep one x more" in done.out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--norms", "nobody"], "no norm backend is called 'nobody'"),
        (["--block-size", "65"], "expected at most 64"),
        (["--config", ROOT / "configs/tiny-olmo2.json"], "has model_type olmo2; expected llama"),
        (["--config", "on_layer_norm.json"], "on_layer_norm.json has norm layer_norm; expected a shape on RMSNorm"),
        (["--config", "nope.json"], "error: nope.json"),
        (["--norms", ","], "--norms is ','; expected norms to count here"),
        (["--norms", ""], "--norms is ''; expected norms to count here"),
    ],
)
def test_bad_input_is_one_line(more, said, workplace, command):
    shape = json.loads((workplace / "config.json").read_text()) | {"model_type": "rmsllama", "norm": "layer_norm"}
    (workplace / "on_layer_norm.json").write_text(json.dumps(shape))
    done = command(bench_memory.main, *ARGUMENTS, *more)
    assert (done.code, done.out) == (2, "")
    assert said in done.err.splitlines()[-1]


def test_what_cannot_run_here_is_left_out_aloud(monkeypatch, capsys):
    usual = kernels.load_backend

    def load(name, device):
        if name == "triton":
            raise kernels.InputError("triton is not installed")
        return usual(name, device)

    monkeypatch.setattr(bench_memory, "load_backend", load)
    assert list(bench_memory.load_norms(None, CPU))[-3:] == ["layer_norm", "layer_norm_bias", "control"]
    assert "left out: triton is not installed" in capsys.readouterr().err
    with pytest.raises(kernels.InputError):
        bench_memory.load_norms("triton", CPU)
