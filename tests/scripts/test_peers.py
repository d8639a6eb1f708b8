"""The peers: PyTorch's compute what their names say, and the others are called as they should be."""

import sys
from types import SimpleNamespace

import pytest
import torch

import kernels
from kernels import InputError
from kernels.emulated import emulated_gpu
from kernels.form import FORMS
from scripts import peers
from tests.helpers import CPU, needs_triton

EPS = 3e-3  # unlike any model's
GPU = torch.device("cuda")  # to be named only; nothing here runs on it


def rows(*shape, seed=0):
    """Random rows whose mean square, 0.0025, is about EPS."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def weights(size):
    return torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5


@pytest.fixture(autouse=True)
def no_package_is_remembered():
    peers._fetch.cache_clear()
    yield
    peers._fetch.cache_clear()


def test_torch_fused_is_rms_norm():
    x, weight = rows(7, 48) + 0.02, weights(48)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(peers.torch_fused(x, weight, EPS).double(), want, rtol=1e-5, atol=1e-6)


def test_layer_norm_is_layer_norm():
    x, weight = rows(7, 48) + 0.02, weights(48)
    wide = x.double() - x.double().mean(-1, keepdim=True)
    want = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(peers.layer_norm(x, weight, EPS).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["layer_norm", "scripts.peers:layer_norm"])
def test_a_peer_without_its_own_add_adds_first(name):
    x, residual, weight = rows(7, 48), rows(7, 48, seed=2), weights(48)
    y, h = peers.load(name, CPU).add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, peers.layer_norm(h, weight, EPS))


def test_torch_fused_takes_the_form_and_layer_norm_does_not():
    x, weight = rows(7, 48), weights(48)
    norm = peers.load("torch_fused", CPU, FORMS["gemma"])
    torch.testing.assert_close(norm.rms_norm(x, weight, EPS), peers.torch_fused(x, 1 + weight, EPS))
    with pytest.raises(InputError, match=r"layer_norm. does not take this form of the norm: weight \+ 1, rounded once"):
        peers.load("layer_norm", CPU, FORMS["gemma"])


def test_any_other_name_is_a_backend():
    from kernels import reference

    assert peers.load("reference", CPU).rms_norm is reference.rms_norm
    with pytest.raises(InputError, match="no norm backend is called 'nope'"):
        peers.load("nope", CPU)


@pytest.mark.parametrize(("name", "package"), [("liger", "liger-kernel"), ("quack", "quack-kernels")])
def test_a_package_that_is_missing_is_one_line_that_names_it(monkeypatch, name, package):
    for module in ("liger_kernel", "liger_kernel.ops.rms_norm", "liger_kernel.ops.fused_add_rms_norm", "quack"):
        monkeypatch.setitem(sys.modules, module, None)  # Python's own way to say that there is none
    arguments = rows(7, 48), weights(48), EPS
    for call in (
        lambda: peers.load(name, GPU),
        lambda: getattr(peers, name)(*arguments),
        lambda: getattr(peers, f"add_{name}")(arguments[0], *arguments),
    ):
        with pytest.raises(InputError, match=f"; pip install {package}$") as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.fixture
def stubs(monkeypatch):
    """Packages that return how they were called."""

    class Function:
        @staticmethod
        def apply(*arguments):
            return arguments

    for module, stub in {
        "liger_kernel.ops.rms_norm": SimpleNamespace(LigerRMSNormFunction=Function),
        "liger_kernel.ops.fused_add_rms_norm": SimpleNamespace(LigerFusedAddRMSNormFunction=Function),
        "quack": SimpleNamespace(rmsnorm=lambda *arguments, **options: (arguments, options)),
    }.items():
        monkeypatch.setitem(sys.modules, module, stub)


def test_liger_is_called_in_llamas_order_and_never_in_place(stubs):
    # forward(X, W, eps, offset, casting_mode, in_place) in liger-kernel 0.8.5; in place by default
    x = SimpleNamespace(is_cuda=True)
    assert peers.load("liger", GPU).rms_norm(x, "weight", EPS) == (x, "weight", EPS, 0.0, "llama", False)
    added = peers.load("liger", GPU).add_rms_norm(x, "residual", "weight", EPS)
    assert added == (x, "residual", "weight", EPS, 0.0, "llama", False)
    gemma = peers.load("liger", GPU, FORMS["gemma"])
    assert gemma.rms_norm(x, "weight", EPS) == (x, "weight", EPS, 1.0, "gemma", False)
    assert gemma.add_rms_norm(x, "residual", "weight", EPS) == (x, "residual", "weight", EPS, 1.0, "gemma", False)


@needs_triton
def test_liger_on_a_cpu_has_what_the_interpreter_lacks(stubs, monkeypatch):
    monkeypatch.setattr("kernels.emulated.gpus._chosen", [])
    x = SimpleNamespace(is_cuda=False)
    for options in (peers.liger(x, "weight", EPS, 0.5)[2:], peers.add_liger(x, "residual", "weight", EPS, 0.5)[3:]):
        assert options == (EPS, 0.5, "llama", False)
        assert all(hasattr(number, "to") for number in options[:2])
    for name in ("liger_kernel.ops.rms_norm", "liger_kernel.ops.fused_add_rms_norm"):
        assert callable(sys.modules[name].rsqrt)


def test_liger_on_an_emulated_gpu_is_called_as_on_a_gpu(stubs, monkeypatch):
    monkeypatch.setattr("kernels.emulated.gpus._chosen", ["sm_90"])
    x = SimpleNamespace(is_cuda=False)
    options = peers.liger(x, "weight", EPS, 0.5)[2:]
    assert options == (EPS, 0.5, "llama", False)
    assert type(options[0]) is float
    assert not hasattr(sys.modules["liger_kernel.ops.rms_norm"], "rsqrt")


@pytest.mark.skipif(emulated_gpu() is None, reason="the interpreter cuts bfloat16 off: --emulate")
@pytest.mark.parametrize("width", [768, 1024, 4097])
def test_ligers_kernels_have_our_bits_in_bfloat16(width):
    """In its llama mode; both sum in float32 in an order of their own, and the roundings of x_hat and h hide that."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: pip install liger-kernel")
    ours, theirs = (kernels.load_backend(name, CPU) for name in ("triton", "scripts.peers:liger"))
    x, residual = (rows(37, width, seed=seed).bfloat16() for seed in (0, 2))
    weight = weights(width).bfloat16()
    assert torch.equal(theirs.rms_norm(x, weight, EPS), ours.rms_norm(x, weight, EPS))
    for found, expected in zip(*(norm.add_rms_norm(x, residual, weight, EPS) for norm in (theirs, ours)), strict=True):
        assert torch.equal(found, expected)


def test_quack_is_asked_for_h_as_well_where_it_adds(stubs):
    # rmsnorm(x, weight, bias, residual, out_dtype, residual_dtype, eps, prenorm) in quack-kernels 0.6.5
    backend = peers.load("scripts.peers:quack", GPU)
    assert backend.rms_norm("x", "weight", EPS) == (("x", "weight"), {"eps": EPS})
    added = backend.add_rms_norm("x", "residual", "weight", EPS)
    assert added == (("x", "weight"), {"residual": "residual", "eps": EPS, "prenorm": True})


@pytest.mark.parametrize("name", ["liger", "quack", "scripts.peers:liger"])
def test_kernels_for_a_gpu_are_refused_on_a_cpu(stubs, name):
    with pytest.raises(InputError, match=f"norm '{name}': its kernels take GPU tensors and the device is 'cpu'"):
        peers.load(name, CPU)


def test_only_what_is_installed_is_listed(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda module: module == "quack" or None)
    assert peers.installed() == ["torch_fused", "layer_norm", "quack"]
