"""The forms of the norm: the models' own modules as oracles, and how a form is bound to a backend."""

import inspect
import sys

import pytest
import torch
from torch import nn

import kernels
from kernels import InputError, reference
from kernels.form import FORMS, LLAMA, Form
from tests.helpers import CPU, needs_triton
from tests.kernels.contract import EPS, rows, weights

GEMMA, TORCH = FORMS["gemma"], FORMS["torch"]


def gemma_norm():
    return pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(48, eps=EPS)


def olmo2_norm():
    return pytest.importorskip("transformers.models.olmo2.modeling_olmo2").Olmo2RMSNorm(48, eps=EPS)


def llama_norm():
    return pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(48, eps=EPS)


def torch_norm():
    return nn.RMSNorm(48, eps=EPS)


F32, BF16 = torch.float32, torch.bfloat16
MODULES = [
    *((llama_norm, LLAMA, dtype) for dtype in (F32, BF16)),
    *((gemma_norm, GEMMA, dtype) for dtype in (F32, BF16)),
    *((olmo2_norm, TORCH, dtype) for dtype in (F32, BF16)),
    (torch_norm, TORCH, F32),
]


@pytest.mark.parametrize(("make", "form", "dtype"), MODULES)
def test_the_reference_has_the_bits_of_other_peoples_modules(make, form, dtype):
    module = make().to(dtype)
    x, weight = rows(64, 48, dtype=dtype).cpu(), weights(48, dtype, form=form).cpu()
    module.weight.data.copy_(weight)
    assert torch.equal(reference.rms_norm(x, weight, EPS, *form), module(x))


def test_a_small_weight_of_gemma_is_not_lost():
    """1 + 2^-8 is 1 in bfloat16."""
    x, weight = torch.ones(1, 1), torch.full((1,), 2**-8, dtype=torch.bfloat16)
    assert reference.rms_norm(x, weight, 1e-12, *GEMMA).item() == 1 + 2**-8
    assert reference.rms_norm(x, 1 + weight, 1e-12, round_once=True).item() == 1


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (TORCH, "reference, rounded once"),
        (GEMMA, "reference, weight + 1, rounded once"),
        (Form(0.3), "reference, weight + 0.3, rounded twice"),
        (Form(0, False), "reference"),
    ],
)
def test_the_description_names_the_form(form, words):
    assert kernels.load_backend("reference", CPU, form).description == words
    assert kernels.load_backend("reference@float16", CPU, form).description == words.replace(
        "reference", "reference, on float16"
    )


@pytest.mark.parametrize("name", ["reference", "torch", pytest.param("triton", marks=needs_triton)])
def test_llamas_form_binds_nothing(name):
    backend = kernels.load_backend(name, CPU)
    assert inspect.isfunction(backend.rms_norm)
    assert inspect.isfunction(backend.add_rms_norm)
    defaults = {name: option.default for name, option in inspect.signature(backend.rms_norm).parameters.items()}
    assert {name: defaults[name] for name in Form._fields} == LLAMA._asdict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_dtype_after_the_name_goes_with_a_form(dtype):
    x, residual, weight = rows(6, 48).cpu(), rows(6, 48, seed=3).cpu(), weights(48).cpu()
    backend = kernels.load_backend(f"reference@{str(dtype).removeprefix('torch.')}", CPU, GEMMA)
    y, h = backend.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(y, reference.rms_norm(h.to(dtype), weight, EPS, *GEMMA).float())
    assert torch.equal(backend.rms_norm(x, weight, EPS), reference.rms_norm(x.to(dtype), weight, EPS, *GEMMA).float())


OWN = """
def plain(x, weight, eps): return x
def keywords(x, weight, eps, *, offset, round_once): return x, offset, round_once
def any_form(x, weight, eps, **form): return x, *form.values()
def half(x, weight, eps, offset=0.0): return x
def positional(x, weight, eps, offset, round_once, /): return x
def fused(x, weight, eps, **form): return x, *form.values()
def add_fused(x, residual, weight, eps): return x, residual
def both(x, weight, eps, **form): return x, *form.values()
def add_both(x, residual, weight, eps, offset, round_once): return x, residual, offset, round_once
silent = type
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "norms_of_a_form.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "norms_of_a_form"
    sys.modules.pop("norms_of_a_form", None)


@pytest.mark.parametrize("name", ["keywords", "any_form", "both"])
def test_a_function_of_ones_own_is_given_the_form(own, name):
    backend = kernels.load_backend(f"{own}:{name}", CPU, GEMMA)
    assert backend.rms_norm(1, 2, 3) == (1, 1.0, True)
    assert backend.description.endswith(", weight + 1, rounded once")
    expected = (1, 2, 1.0, True) if name == "both" else ((3, 1.0, True), 3)
    assert backend.add_rms_norm(1, 2, 3, 4) == expected


@pytest.mark.parametrize("name", ["plain", "half", "positional", "fused", "silent"])
def test_a_function_of_ones_own_that_takes_no_form_is_refused(own, name):
    kernels.load_backend(f"{own}:{name}", CPU)  # as ever
    described = f"{own}:fused and its add_fused" if name == "fused" else f"{own}:{name}"
    inputs = "x, residual, weight, eps" if name == "fused" else "x, weight, eps"
    with pytest.raises(InputError) as error:
        kernels.load_backend(f"{own}:{name}@bfloat16", CPU, GEMMA)
    assert str(error.value) == (
        f"norm '{described}, on bfloat16' does not take this form of the norm: weight + 1, rounded once; "
        f"expected a function of {inputs}, offset, round_once, or use --norm torch"
    )
