"""What emulate refuses, and when a GPU is emulated that nobody has named: where there is none, and no interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import kernels
from kernels import InputError, emulated
from kernels.emulated import emulate, emulate_without_gpu, emulated_gpu, gpus, runs_emulated
from model.cli import check_compilable, choose_device
from tests.helpers import CPU, ROOT, needs_compiler, needs_triton


def refused(name, reason):
    before = os.environ.get("TRITON_INTERPRET")
    with pytest.raises(InputError, match=reason) as caught:
        emulate(name)
    assert str(caught.value).startswith(f"--emulate {name}: ")
    assert "\n" not in str(caught.value)
    assert os.environ.get("TRITON_INTERPRET") == before  # or what is decorated later would be of another kind


@pytest.mark.parametrize("name", ["sm_70", "H100", "gfx942", ""])
def test_a_gpu_that_is_not_emulated_is_refused(name):
    refused(name, "expected one of sm_80, sm_90, sm_100, sm_120")


def test_triton_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(gpus, "_chosen", [])
    monkeypatch.setattr(gpus, "_default", [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("sm_90", r"triton is not installed; pip install triton \(Linux alone has it\)")


def test_a_second_gpu_is_refused(monkeypatch):
    """Triton would go on with the kernels that it has compiled for the first one."""
    for names in (["sm_90"], []), ([], ["sm_90"]):
        monkeypatch.setattr(gpus, "_chosen", names[0])
        monkeypatch.setattr(gpus, "_default", names[1])
        refused("sm_80", "this process emulates sm_90; emulate one GPU in a process")


@needs_triton
def test_triton_in_its_interpreter_is_named(undecided, monkeypatch):
    monkeypatch.setattr(emulated, "interpreted", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton  # noqa: F401

    refused("sm_90", "Triton already runs in its interpreter; emulate before it is imported")


@pytest.fixture
def undecided(monkeypatch):
    """A process without a GPU that emulates none yet; the names of those that it begins to."""
    began = []
    monkeypatch.setattr(gpus, "_chosen", [])
    monkeypatch.setattr(gpus, "_default", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(emulated, "interpreted", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(emulated, "_drive", lambda name, say="": began.append(name))
    return began


@needs_triton
def test_without_a_gpu_one_is_emulated_once(undecided):
    emulate_without_gpu()
    emulate_without_gpu()
    assert undecided == ["sm_90"]
    assert emulated_gpu() == gpus.GPUS["sm_90"]


def a_gpu_is_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def triton_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def one_is_named(monkeypatch):
    monkeypatch.setattr(gpus, "_chosen", ["sm_80"])


def the_interpreter_is_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(emulated, "interpreted", lambda: True)


@needs_triton
@pytest.mark.parametrize(
    "given", [a_gpu_is_here, triton_is_missing, one_is_named, the_interpreter_is_asked_for], ids=lambda f: f.__name__
)
def test_none_is_emulated_by_default_where(given, undecided, monkeypatch):
    given(monkeypatch)
    before = emulated_gpu()
    emulate_without_gpu()
    assert (undecided, emulated_gpu()) == ([], before)


@needs_triton
def test_the_interpreter_asked_for_too_late_is_an_error(undecided, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InputError, match="TRITON_INTERPRET=1 was set after Triton was imported, too late"):
        emulate_without_gpu()
    assert not undecided


@needs_triton
def test_a_norm_of_ones_own_finds_a_gpu_and_other_norms_import_no_triton(undecided):
    for name in ("reference", "torch", "auto", "torch@float16"):
        kernels.load_backend(name, CPU)
    assert not undecided
    kernels.load_backend("tests.norms:noisy", CPU)
    assert undecided == ["sm_90"]


def test_the_default_decides_nothing_else(monkeypatch):
    """A norm and a device are chosen as without it; by name, an emulated GPU is the device."""
    monkeypatch.setattr(gpus, "_default", ["sm_90"])
    monkeypatch.setattr(gpus, "_chosen", [])
    assert kernels.load_backend("auto", CPU).description == "torch"
    with pytest.raises(InputError, match="its tensors hold no data"):
        choose_device("meta")


@needs_triton
@pytest.mark.skipif(emulated_gpu() is None, reason="Triton has a GPU")
@needs_compiler
def test_what_a_compiler_can_not_look_into_is_refused():
    ours, other = (kernels.load_backend(name, CPU) for name in ("triton", "reference"))
    assert (runs_emulated(ours), runs_emulated(other)) == (True, False)
    with pytest.raises(InputError, match="--compile: PyTorch would compile my:norm for the CPU, where a Triton kernel"):
        check_compilable("my:norm", ours, CPU)
    check_compilable("triton", ours, CPU)  # an operator, which the compiler leaves alone
    check_compilable("my:norm", other, CPU)


OWN = """
import torch, triton, triton.language as tl

@triton.jit
def copy(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at))

def norm(x, weight, eps):
    y = torch.empty_like(x)
    copy[(1,)](x, y, x.numel())
    return y
"""
USER = """
import torch, triton.language, triton.runtime
from kernels import load_backend
x, weight = torch.randn(2, 64, dtype=torch.bfloat16), torch.ones(64)
ours, own = (load_backend(name, x.device) for name in ("triton", "own_kernel:norm"))
print(ours.description)
assert torch.equal(ours.rms_norm(x, weight, 1e-5), load_backend("reference", x.device).rms_norm(x, weight, 1e-5))
for _ in range(2):
    assert torch.equal(own.rms_norm(x, weight, 1e-5), x)
"""


def of_a_process(folder, code, **variables):
    (folder / "own_kernel.py").write_text(OWN)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
@needs_triton
def test_a_program_that_has_imported_triton(tmp_path):
    """And the line about another's kernel, once, from the first of torchrun's processes."""
    description = "triton, compiled for sm_90, on an emulated one: no measure of speed\n"
    said = "Triton's kernels are compiled for sm_90 and run on an emulated one: no measure of speed\n"
    assert of_a_process(tmp_path, USER, RANK="0") == (description, said)
    assert of_a_process(tmp_path, USER, RANK="1") == (description, "")


INTERPRETED = """
import os
os.environ["NORM_TEST_DEVICE"] = "cpu"
import torch
from kernels import load_backend
from tests.kernels import contract
norm = load_backend("triton", torch.device("cpu"))
contract.gradients_are_those_of_the_formula(norm.rms_norm, torch.float32, (60, 40))
contract.any_width(norm.rms_norm, 17000)
contract.half_precision_rounds_in_the_order_of_the_form(norm.rms_norm, torch.float16)
contract.strides_change_nothing(norm.rms_norm, "slice of a fused projection")
contract.add_rms_norm_is_the_two_steps(norm, torch.float16, torch.float16, (6, 48))
x, weight = contract.rows(7, 48), contract.weights(48)
compiled = torch.compile(lambda x: norm.rms_norm(x, weight, 1e-3) + 1, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(x), norm.rms_norm(x, weight, 1e-3) + 1)
print(norm.description)
"""


@needs_triton
def test_tritons_own_interpreter_gives_the_contracts_results(tmp_path):
    """In the dtypes whose rounding it computes; bfloat16 it truncates."""
    out, _ = of_a_process(tmp_path, INTERPRETED, TRITON_INTERPRET="1")
    assert out == "triton (in its interpreter: right, but no measure of its speed)\n"
