"""The peers: PyTorch's compute what their names say, and the others are called as they should be."""

import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import InputError, load_backend
from kernels.emulated import emulated_gpu
from kernels.form import FORMS
from scripts import peers
from tests.helpers import CPU

EPS = 3e-3  # unlike any model's
GPU = torch.device("cuda")  # to be named only; nothing here runs on it


def rows(*shape, seed=0):
    """Random rows whose mean square, 0.0025, is about EPS."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def weights(size):
    return torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5


@pytest.fixture(autouse=True)
def no_package_is_remembered():
    peers.fetch.cache_clear()
    yield
    peers.fetch.cache_clear()


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
    x = SimpleNamespace(is_cuda=True)
    for call in (
        lambda: peers.load(name, GPU),
        lambda: getattr(peers, name)(x, "weight", EPS),
        lambda: getattr(peers, f"add_{name}")(x, "residual", "weight", EPS),
    ):
        with pytest.raises(InputError, match=f"; pip install --no-deps {package}$") as caught:
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


def test_quack_is_asked_for_h_as_well_where_it_adds(stubs):
    # rmsnorm(x, weight, bias, residual, out_dtype, residual_dtype, eps, prenorm) in quack-kernels 0.6.5
    backend, x = peers.load("scripts.peers:quack", GPU), SimpleNamespace(is_cuda=True)
    assert backend.rms_norm(x, "weight", EPS) == ((x, "weight"), {"eps": EPS})
    added = backend.add_rms_norm(x, "residual", "weight", EPS)
    assert added == ((x, "weight"), {"residual": "residual", "eps": EPS, "prenorm": True})


def test_a_peer_of_one_form_takes_no_other(stubs):
    with pytest.raises(InputError, match=r"quack.* does not take this form of the norm: weight \+ 1, rounded once"):
        peers.load("quack", GPU, FORMS["gemma"])


def test_a_peer_of_two_forms_takes_no_third(monkeypatch):
    monkeypatch.setattr(peers, "fetch", lambda *_: SimpleNamespace(apply=print))
    norm = peers.load("unsloth", GPU, FORMS["torch"]).rms_norm
    with pytest.raises(InputError, match="form 'rounded once': this peer computes LLaMA's form and Gemma's"):
        norm(SimpleNamespace(is_cuda=True), "weight", EPS)


@pytest.mark.parametrize("name", ["liger", "quack", "scripts.peers:liger"])
def test_kernels_for_a_gpu_are_refused_on_a_cpu(stubs, monkeypatch, name):
    monkeypatch.setattr("kernels.emulated.gpus._chosen", [])  # also where this process emulates one
    monkeypatch.setattr("kernels.emulated.gpus._default", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # or one is emulated
    with pytest.raises(InputError, match=f"norm '{name}': its kernels take GPU tensors and the device is 'cpu'"):
        peers.load(name, CPU)
    norm = load_backend(f"scripts.peers:{name.removeprefix('scripts.peers:')}", CPU).rms_norm
    with pytest.raises(InputError, match="got some on 'cpu'; use --device cuda or --emulate sm_90"):
        norm(rows(7, 48), weights(48), EPS)


def test_a_peer_without_its_own_add_has_none():
    assert not hasattr(peers, "add_trinix")
    assert callable(peers.add_fla)
    assert not hasattr(peers, "nobody")


def test_a_norm_is_imported_without_the_packages_around_it(monkeypatch, tmp_path):
    """Where a package's own import wants a compiled extension, say."""
    inner = tmp_path / "greedy" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("import an_extension_that_nobody_has")
    (inner / "norm.py").write_text("from .beside import number\nfrom greedy_too.words import word\n")
    (inner / "beside.py").write_text("number = 7")
    (tmp_path / "greedy_too").mkdir()
    (tmp_path / "greedy_too" / "__init__.py").write_text("import an_extension_that_nobody_has")
    (tmp_path / "greedy_too" / "words.py").write_text("word = 'seven'")
    monkeypatch.syspath_prepend(tmp_path)
    package = peers.Package("greedy greedy_too", ("torch",), "greedy.inner.norm:number", lambda f, x, w, eps, form: x)
    with pytest.raises(InputError, match="an_extension_that_nobody_has"):
        peers.fetch(package.source, package)
    try:
        assert peers.fetch(package.source, package._replace(bare=True)) == 7
        assert peers.fetch("greedy.inner.norm:word", package._replace(bare=True)) == "seven"
    finally:
        for name in [name for name in sys.modules if name.startswith("greedy")]:
            del sys.modules[name]


def test_only_what_is_installed_is_listed(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda module: module == "quack" or None)
    assert peers.installed() == ["torch_fused", "layer_norm", "quack"]


@pytest.mark.skipif(emulated_gpu() is None, reason="Liger's kernels need a GPU or an emulated one: --emulate")
@pytest.mark.parametrize("width", [768, 1024, 4097])
def test_ligers_kernels_have_our_bits_in_bfloat16(width):
    """In its llama mode; both sum in float32 in an order of their own, and the roundings of x_hat and h hide that."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: pip install liger-kernel")
    ours, theirs = (load_backend(name, CPU) for name in ("triton", "scripts.peers:liger"))
    x, residual = (rows(37, width, seed=seed).bfloat16() for seed in (0, 2))
    weight = weights(width).bfloat16()
    assert torch.equal(theirs.rms_norm(x, weight, EPS), ours.rms_norm(x, weight, EPS))
    for found, expected in zip(*(norm.add_rms_norm(x, residual, weight, EPS) for norm in (theirs, ours)), strict=True):
        assert torch.equal(found, expected)
