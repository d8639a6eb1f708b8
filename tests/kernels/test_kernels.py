"""Looking a norm backend up by name."""

import importlib.util
import sys

import pytest
import torch

import kernels
from kernels import InputError, reference
from tests.helpers import CPU
from tests.kernels.contract import EPS, rows, weights


def without(monkeypatch, package):
    """Make `package` look as if it were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )
    monkeypatch.delitem(sys.modules, "kernels.triton_rms_norm", raising=False)


@pytest.mark.parametrize("name", ["Triton", "rmsnorm", "", "apex"])
def test_unknown_name_is_answered_with_the_known_ones(name):
    with pytest.raises(InputError) as error:
        kernels.load_backend(name, CPU)
    assert f"'{name}'" in str(error.value)
    assert all(known in str(error.value) for known in [*kernels.BACKENDS, "auto", "package.module:function"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:rms_norm", "No module named 'no_such_module'"),
        ("kernels.reference:layer_norm", "has no function 'layer_norm'"),
        ("kernels.reference:", "has no function ''"),
        (":rms_norm", "can't import ''"),
        (".relative:rms_norm", "can't import '.relative'"),
        ("kernels.reference:torch.nn", "has no function 'torch.nn'"),
    ],
)
def test_a_callable_that_is_not_there_is_refused(name, reason):
    with pytest.raises(InputError, match=r"package\.module:function|expected a function") as error:
        kernels.load_backend(name, CPU)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def norm(x, weight, eps):\n    return x *\n", r"invalid syntax \(broken_norm.py, line 2\)"),
        ("def norm(x, weight, eps):\nreturn x\n", r"expected an indented block .*line 2\)"),
        ("import no_such_package\n", "No module named 'no_such_package'"),
        ("from kernels import no_such_name\n", "cannot import name 'no_such_name'"),
    ],
)
def test_a_module_of_ones_own_that_cannot_be_imported_is_named(tmp_path, monkeypatch, code, reason):
    (tmp_path / "broken_norm.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InputError, match=f"can't import 'broken_norm' \\({reason}") as error:
        kernels.load_backend("broken_norm:norm", CPU)
    assert "\n" not in str(error.value)


def test_a_function_of_ones_own_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_kernel.py").write_text("def doubled(x, weight, eps):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    backend = kernels.load_backend("my_kernel:doubled", CPU)
    y, h = backend.add_rms_norm(torch.ones(3), torch.ones(3), torch.ones(3), 0.5)
    assert backend.description == "my_kernel:doubled"
    assert sys.path[-1] == str(tmp_path)  # last, so that no file there hides an installed package
    assert torch.equal(h, torch.full((3,), 2.0))
    assert torch.equal(y, torch.full((3,), 4.0))


@pytest.mark.parametrize(("device", "emulated"), [("cuda", []), ("cpu", ["sm_90"])])
def test_auto_is_triton_on_a_gpu_and_on_an_emulated_one(device, emulated, monkeypatch):
    pytest.importorskip("triton", reason="triton is made for Linux alone")
    from kernels import triton_rms_norm

    monkeypatch.setattr("kernels.emulated.gpus._chosen", emulated)
    backend = kernels.load_backend("auto", torch.device(device))
    assert backend.rms_norm is triton_rms_norm.rms_norm


def test_triton_where_it_is_not_installed(monkeypatch):
    without(monkeypatch, "triton")
    with pytest.raises(InputError, match=r"triton is not installed; .* use --norm torch"):
        kernels.load_backend("triton", CPU)
    assert kernels.load_backend("auto", torch.device("cuda")).description == "torch"


def test_compiled_kernels_refuse_a_cpu(monkeypatch):
    pytest.importorskip("triton", reason="triton is made for Linux alone")
    from kernels import triton_rms_norm

    monkeypatch.setattr(triton_rms_norm, "INTERPRETED", False)
    monkeypatch.setattr("kernels.emulated.gpus._chosen", [])
    monkeypatch.setattr("kernels.emulated.gpus._default", [])
    with pytest.raises(InputError, match="the device is 'cpu'; use --device cuda, --emulate sm_90, or --norm torch"):
        kernels.load_backend("triton", CPU)


def test_compile_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler on a CPU and 'g\\+\\+' is not on the PATH"):
        kernels.load_backend("compile", CPU)
    kernels.load_backend("compile", torch.device("cuda"))  # whose kernels need none


def test_the_compiler_is_the_one_that_cxx_names(tmp_path, monkeypatch):
    (tmp_path / "clang++").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "clang++")
    assert kernels.load_backend("compile", CPU).description == "compile"  # and is not refused


def test_a_dtype_after_the_name_rounds_what_the_norm_gets():
    backend = kernels.load_backend("reference@float16", CPU)
    assert backend.description == "reference, on float16"
    x, residual, weight = rows(6, 48), rows(6, 48, seed=3), weights(48)
    y, (y_sum, h) = backend.rms_norm(x, weight, EPS), backend.add_rms_norm(x, residual, weight, EPS)
    assert y.dtype == y_sum.dtype == h.dtype == torch.float32
    assert torch.equal(y, reference.rms_norm(x.half(), weight, EPS).float())
    assert torch.equal(h, (x.half() + residual.half()).float())
    assert torch.equal(y_sum, reference.rms_norm(h.half(), weight, EPS).float())


def test_a_dtype_after_the_name_leaves_the_stream_in_its_own():
    """Under autocast x is half precision and the residual stream is not."""
    x, residual, weight = rows(6, 48, dtype=torch.bfloat16), rows(6, 48, seed=3), weights(48)
    backend = kernels.load_backend("reference@float16", CPU)
    y, h = backend.add_rms_norm(x, residual, weight, EPS)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(h, (x.half() + residual.half()).float())
    y, h = backend.add_rms_norm(residual, x, weight, EPS)
    assert (y.dtype, h.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", ["torch@int8", "torch@", "torch@float16@half"])
def test_another_word_after_the_name_is_refused(name):
    with pytest.raises(InputError, match="expected one of float16, bfloat16, float32 after the @"):
        kernels.load_backend(name, CPU)


def test_a_fused_addition_of_ones_own_is_found_beside_the_norm(tmp_path, monkeypatch):
    (tmp_path / "my_fused.py").write_text(
        "def norm(x, weight, eps):\n    return x\n\ndef add_norm(x, residual, weight, eps):\n    return x, residual\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    backend = kernels.load_backend("my_fused:norm", CPU)
    assert backend.description == "my_fused:norm and its add_norm"
    assert backend.add_rms_norm(1, 2, 3, 0.5) == (1, 2)
