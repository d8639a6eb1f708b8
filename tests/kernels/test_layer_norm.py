"""LayerNorm: against its formula in float64 and nn.LayerNorm, and how it differs from RMSNorm to those who load it."""

import pytest
import torch

import kernels
from kernels import InputError, reference
from kernels.form import FORMS
from kernels.layer_norm import layer_norm
from tests.helpers import CPU
from tests.kernels.contract import EPS, rows, weights

HALF_ULP = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def formula(x, weight, eps, bias=0.0):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def inputs(dtype, scale=0.05):
    """Rows with a mean, whose variance is about EPS for the default scale; a weight, and a bias or none."""
    x, weight, bias = rows(3, 5, 48, scale=scale) + 2 * scale, weights(48), rows(48, scale=1.0, seed=2)
    return [tensor.to(CPU, dtype) for tensor in (x, weight, bias)]


@pytest.mark.parametrize("scale", [1e-3, 0.05, 30.0])  # eps rules, is felt, and is nothing
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", HALF_ULP)
def test_it_is_the_formula_with_one_rounding(dtype, with_bias, scale):
    x, weight, bias = inputs(dtype, scale)
    bias = bias if with_bias else None
    wide = [x.double(), weight.double(), EPS, *([bias.double()] if with_bias else [])]
    expected, found = formula(*wide), layer_norm(x, weight, EPS, bias)
    assert found.dtype == dtype
    # One rounding of the result, and before it a dozen in the statistics' dtype, of terms up to 5 (x_hat) * 1.5 + 3.
    inner = 12 * 10 * (2**-53 if dtype == torch.float64 else 2**-24)
    assert ((found.double() - expected).abs() <= HALF_ULP[dtype] * expected.abs() + inner).all()
    theirs = torch.nn.LayerNorm(48, EPS, bias=with_bias, dtype=dtype)
    theirs.load_state_dict({"weight": weight} | ({"bias": bias} if with_bias else {}))
    assert torch.equal(found, theirs(x))


def test_its_gradients_are_those_of_the_formula():
    x, weight, bias = (tensor.requires_grad_() for tensor in inputs(torch.float64))
    dy = rows(3, 5, 48, seed=3).double()
    expected = torch.autograd.grad(formula(x, weight, EPS, bias), (x, weight, bias), dy)
    found = torch.autograd.grad(layer_norm(x, weight, EPS, bias), (x, weight, bias), dy)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_bias"])
@pytest.mark.parametrize("rounded", ["", "@float16"])
def test_it_is_a_backend_by_name(name, rounded):
    backend = kernels.load_backend(name + rounded, CPU)
    assert backend.has_bias is (name == "layer_norm_bias")
    assert backend.description == name + (", on float16" if rounded else "")
    x, weight, bias = inputs(torch.float32)
    bias = {"bias": bias} if backend.has_bias else {}
    seen = x.half().float() if rounded else x
    y = backend.rms_norm(x, weight, EPS, **bias)
    torch.testing.assert_close(y, layer_norm(seen, weight, EPS, **bias), rtol=2**-11 if rounded else 0, atol=0)
    y, h = backend.add_rms_norm(x, 2 * x, weight, EPS, **bias)
    torch.testing.assert_close(h, 3 * x, rtol=3 * 2**-11 if rounded else 0, atol=1e-7)  # subnormals
    assert torch.equal(y, backend.rms_norm(h, weight, EPS, **bias))


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_bias"])
def test_it_has_no_other_form(name):
    with pytest.raises(InputError, match=rf"{name}' does not take this form of the norm: weight \+ 1"):
        kernels.load_backend(name, CPU, FORMS["gemma"])


def test_of_centred_rows_it_is_rmsnorm():
    x, weight, _ = inputs(torch.float64)
    x = x - x.mean(-1, keepdim=True)
    expected = reference.rms_norm(x, weight, EPS)
    torch.testing.assert_close(layer_norm(x, weight, EPS), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("layer_norm", "layer_norm"),
        ("layer_norm_bias@bfloat16", "layer_norm_bias"),
        ("scripts.peers:layer_norm", None),  # somebody's own function, whatever its name
        ("torch", None),
        (None, None),
    ],
)
def test_its_name_is_known_with_a_dtype_too(name, found):
    assert kernels.layer_norm_in(name) == found
