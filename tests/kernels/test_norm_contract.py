"""Every backend against the contract of kernels/reference.py. The oracle is NumPy or autograd, in float64.

    pytest tests/kernels/test_norm_contract.py --norm my_kernel:rms_norm --device cuda

runs it on a norm of your own. If that doesn't take float64, leave those tests out with -k "not float64".

Tests take the norm as an argument, so that test_planted_faults.py can hand them wrong ones.
"""

import os
import sys

import numpy as np
import pytest
import torch

import kernels
from model.cli import names_in
from tests.helpers import needs_compiler, needs_triton

DEVICE = torch.device(os.environ["NORM_TEST_DEVICE"])  # pytest --device
EPS = 3e-3  # unlike any model's, so that a literal in the code can't pass
HALF = [torch.float16, torch.bfloat16]
EAGER = ["reference", "torch", pytest.param("triton", marks=needs_triton)]  # compile has a shorter list, at the end


def pytest_generate_tests(metafunc):
    if "norm_name" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--norm")
        metafunc.parametrize("norm_name", names_in(chosen) if chosen else EAGER)


@pytest.fixture
def backend(norm_name):
    if norm_name == "compile":
        torch._dynamo.reset()  # the tests show the compiler more dtypes and ranks than its cache holds
    return kernels.load_backend(norm_name, DEVICE)


@pytest.fixture
def rms_norm(backend):
    return backend.rms_norm


def rows(*shape, dtype=torch.float32, scale=0.05, seed=0):
    """Random rows whose mean square, 0.0025, is about EPS: half of what divides them."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def weights(size, dtype=torch.float32, seed=1):
    return (torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.5).to(DEVICE, dtype)


def exact(tensor):
    return tensor.detach().double().cpu().numpy()


def oracle(x, weight, eps=EPS):
    """The formula in NumPy, float64, without any rounding."""
    x = exact(x)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * exact(weight)


def truncates(norm, dtype):
    """Triton's interpreter cuts bfloat16 off, where hardware rounds it."""
    module = sys.modules.get("kernels.triton_rms_norm")
    interpreted = module is not None and norm in (module.rms_norm, module.add_rms_norm) and module.INTERPRETED
    return interpreted and dtype == torch.bfloat16


def unit(dtype, norm=None):
    """Largest relative error of one rounding."""
    return torch.finfo(dtype).eps / (1 if truncates(norm, dtype) else 2)


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def value_bound(dtype, width, norm):
    """Relative error of y: a sum of `width` squares (halved by the root) and six operations in the wide dtype, and
    below float32 two roundings to the narrow one."""
    bound = (width / 2 + 6) * unit(wide(dtype))
    return bound if dtype == wide(dtype) else bound + 2.01 * unit(dtype, norm)


def check_values(norm, x, weight, eps=EPS):
    y, expected = norm(x, weight, eps), oracle(x, weight, eps)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    smallest = torch.finfo(x.dtype).smallest_normal  # below it the spacing is absolute
    error = np.abs(exact(y) - expected)
    assert (error <= value_bound(x.dtype, x.shape[-1], norm) * np.abs(expected) + smallest).all()


@pytest.mark.parametrize("shape", [(7, 48), (48, 48), (2, 3, 5, 17), (768,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
def test_values_are_the_formula(rms_norm, dtype, shape):
    check_values(rms_norm, rows(*shape, dtype=dtype), weights(shape[-1], dtype))


@pytest.mark.parametrize("width", [1, 3, 17, 768, 1792, 4097, 40000, 70001])
def test_any_width(rms_norm, width):
    x, weight = rows(3, width), weights(width)
    expected = oracle(x, weight)
    # Every backend sums in blocks, whose error grows as the root of the width at most.
    bound = (np.sqrt(width) + 6) * unit(torch.float32)
    assert (np.abs(exact(rms_norm(x, weight, EPS)) - expected) <= bound * np.abs(expected)).all()


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 0.30151134), (1e-6, 0.70710678)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_eps_of_the_model_shows_in_small_rows(rms_norm, eps, expected, dtype):
    x, weight = torch.full((2, 64), 1e-3, dtype=dtype), torch.ones(64, dtype=dtype)
    y = rms_norm(x.to(DEVICE), weight.to(DEVICE), eps)
    # 1e-3 itself is rounded to the dtype, then x_hat is: two roundings, and the last one of the weight is exact.
    assert exact(y) == pytest.approx(expected, rel=2.01 * unit(dtype, rms_norm) + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_rows(rms_norm, dtype):
    """1e18 squared times 48 is still a float32; eps is nothing beside it."""
    check_values(rms_norm, rows(7, 48, dtype=dtype, scale=1e18), weights(48, dtype))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-39), (torch.bfloat16, 1e-39), (torch.float16, 1e-6)])
def test_subnormal_rows(rms_norm, dtype, scale):
    """Below the smallest normal number bits are lost, and a GPU may flush to zero; what comes out is as small."""
    x, weight = rows(7, 48, dtype=dtype, scale=scale), weights(48, dtype)
    y, expected = exact(rms_norm(x, weight, 1e-5)), oracle(x, weight, 1e-5)
    # x times 316: for float16 a normal number again, whose statistics in float32 have lost nothing.
    lost = 0 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal * 400
    bound = value_bound(dtype, 48, rms_norm) * np.abs(expected) + lost + torch.finfo(dtype).smallest_normal
    assert (np.abs(y - expected) <= bound).all()
    assert np.isfinite(y).all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_rounds_before_the_weight(rms_norm, dtype):
    if truncates(rms_norm, dtype):
        dtype = torch.float16  # the same kernel, in the dtype whose rounding the interpreter computes
    x, weight = rows(64, 256, dtype=dtype), weights(256, dtype)
    x_hat = torch.from_numpy(oracle(x, torch.ones(256))).to(dtype)
    expected = (x_hat.double() * weight.double().cpu()).to(dtype)
    # A float32 statistic moves x_hat by about 8 of its units, and 2^-24 * 8 is 1/1024 of float16's spacing: about
    # 0.1 % of the elements lie so close to a rounding boundary. The other order of rounding moves about 25 %.
    differing = (rms_norm(x, weight, EPS).cpu() != expected).double().mean().item()
    assert differing < 0.005


def test_statistics_are_float32_in_half_precision(rms_norm):
    x = torch.full((2, 64), 300.0, dtype=torch.float16).to(DEVICE)  # 300^2 is above float16's largest number, 65504
    weight = weights(64, torch.float16)
    assert torch.equal(rms_norm(x, weight, EPS), weight.expand(2, 64))


def test_a_row_depends_on_itself_alone(rms_norm):
    x, weight = rows(4, 5, 48), weights(48)
    alone = rms_norm(x[1:2, 2:3].clone(), weight, EPS)
    other = x * 100
    other[1, 2] = x[1, 2]
    # The same row in another place may be summed in another order: one unit each for the root and two products.
    torch.testing.assert_close(rms_norm(other, weight, EPS)[1:2, 2:3], alone, rtol=4 * unit(torch.float32), atol=0)


def test_the_mean_is_not_removed(rms_norm):
    weight = weights(48)
    y = rms_norm(torch.full((3, 48), 2.0).to(DEVICE), weight, EPS)
    torch.testing.assert_close(y, weight.expand(3, 48) * (2 / (4 + EPS) ** 0.5), rtol=1e-6, atol=0)


def test_root_mean_square_is_one_at_unit_weight(rms_norm):
    y = rms_norm(rows(9, 768, scale=3.0), torch.ones(768).to(DEVICE), 1e-12)
    torch.testing.assert_close(y.square().mean(-1).sqrt().cpu(), torch.ones(9), rtol=1e-6, atol=0)


def test_zero_row_gives_zero_and_a_finite_gradient(rms_norm):
    x, weight = torch.zeros(2, 48).to(DEVICE).requires_grad_(), weights(48).requires_grad_()
    y = rms_norm(x, weight, 1e-5)
    y.sum().backward()
    assert torch.equal(y.cpu(), torch.zeros(2, 48))
    torch.testing.assert_close(x.grad, (weight * 316.227766).expand(2, 48).detach(), rtol=1e-6, atol=0)
    assert torch.equal(weight.grad.cpu(), torch.zeros(48))


def gradients(norm, x, weight, dy):
    """dx and dweight of sum(norm(x) * dy)."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(norm(x, weight, EPS), (x, weight), dy)


def formula(x, weight, eps):
    """Differentiable oracle, for float64 tensors."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


SHAPES = [(7, 48), (2, 3, 17), (600, 40), (3, 1), (5, 4097), (3, 40000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
def test_gradients_are_those_of_the_formula(rms_norm, dtype, shape):
    x, weight, dy = rows(*shape, dtype=dtype), weights(shape[-1], dtype), rows(*shape, dtype=dtype, scale=1.0, seed=2)
    dx, dweight = gradients(rms_norm, x, weight, dy)
    assert (dx.dtype, dweight.dtype) == (dtype, dtype)
    exact_dx, exact_dweight = gradients(formula, x.double(), weight.double(), dy.double())
    # dx is a difference, so its error is measured against its terms, weight * dy * rstd: about as large as the
    # largest dx of its row. Up to four narrow roundings, and the sums' growth in the wide dtype.
    narrow = 0 if dtype == wide(dtype) else 4 * unit(dtype, rms_norm)
    scale = exact_dx.abs().amax(-1, keepdim=True)
    if shape[-1] == 1:  # then the two terms nearly cancel, and the largest dx says nothing about them
        scale = (weight * dy).double().abs() / (x.double().square() + EPS).sqrt()
    assert ((dx.double() - exact_dx).abs() <= (narrow + (shape[-1] / 2 + 20) * unit(wide(dtype))) * scale).all()
    # dweight sums one product a row, each with a narrow rounding of x_hat, whose errors add up as a random walk at
    # 6 sigma or less; then it is rounded once itself.
    n_rows = x.numel() // shape[-1]
    terms = (dy.double() * formula(x.double(), torch.ones_like(weight).double(), EPS)).flatten(0, -2).abs().amax(0)
    bound = (6 * np.sqrt(n_rows) * (narrow / 4 + (np.sqrt(shape[-1]) + 20) * unit(wide(dtype)))) * terms
    assert ((dweight.double() - exact_dweight).abs() <= bound + narrow * exact_dweight.abs()).all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_dweight_is_summed_in_float32(rms_norm, dtype):
    """Ones, added up in half precision, stop at 256 or 2048."""
    x, weight = torch.full((4096, 16), 2.0, dtype=dtype).to(DEVICE), weights(16, dtype)
    _, dweight = gradients(rms_norm, x, weight, torch.ones_like(x))
    x_hat = 2 / np.sqrt(4 + EPS)
    assert exact(dweight) == pytest.approx(4096 * x_hat, rel=2.01 * unit(dtype, rms_norm))


def test_dweight_is_made_of_the_rounded_x_hat(rms_norm):
    """As autograd has it, since the weight multiplies the rounded one. A float32 weight shows the bits."""
    x, weight = rows(1, 48, dtype=torch.float16), weights(48)
    _, dweight = gradients(rms_norm, x, weight, torch.ones_like(x))
    assert torch.equal(dweight, dweight.half().float())


def test_gradcheck_in_float64(rms_norm):
    x, weight = rows(3, 4, 5, dtype=torch.float64).requires_grad_(), weights(5, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, EPS), (x, weight))


@pytest.mark.parametrize("weight_dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, *HALF], ids=str)
def test_result_and_gradients_keep_their_dtypes(rms_norm, x_dtype, weight_dtype):
    x, weight = rows(6, 48, dtype=x_dtype), weights(48, weight_dtype)
    dx, dweight = gradients(rms_norm, x, weight, torch.ones_like(x))
    assert (dx.dtype, dweight.dtype) == (x_dtype, weight_dtype)
    check_values(rms_norm, x, weight)


STRIDED = {
    "transposed": lambda: rows(48, 6).t(),
    "every second column": lambda: rows(6, 96)[:, ::2],
    "slice of a fused projection": lambda: rows(6, 144)[:, 48:96],
    "heads of a fused projection": lambda: rows(2, 3, 7, 48)[:, :, 2:5],
    "swapped axes": lambda: rows(3, 5, 48).transpose(0, 1),
    "swapped heads": lambda: rows(2, 3, 5, 48).transpose(1, 2),
    "expanded rows": lambda: rows(1, 48).expand(6, 48),
    "expanded columns": lambda: rows(6, 1).expand(6, 48),
    "one number": lambda: rows(1, 1, 1).expand(2, 3, 48),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_change_nothing(rms_norm, name):
    x, dy, weight = STRIDED[name](), STRIDED[name]() * 20, weights(96)[::2]
    dy = torch.as_strided(dy, x.shape, x.stride()) if name.startswith(("expanded", "one")) else dy  # * 20 filled it up
    assert not x.is_contiguous()
    strided = (rms_norm(x, weight, EPS), *gradients(rms_norm, x, weight, dy))
    plain = x.contiguous()
    weight = weight.contiguous()
    contiguous = (rms_norm(plain, weight, EPS), *gradients(rms_norm, plain, weight, dy.contiguous()))
    for got, expected in zip(strided, contiguous, strict=True):
        # Sums may run in another order. Only rounding may differ: a few units of the largest element.
        torch.testing.assert_close(got, expected, rtol=0, atol=16 * unit(torch.float32) * expected.abs().max().item())


def test_gradient_of_a_sum_arrives_expanded(rms_norm):
    x, weight = rows(6, 48).requires_grad_(), weights(48).requires_grad_()
    rms_norm(x, weight, EPS).sum().backward()  # dy is one element with strides of 0
    dx, dweight = gradients(rms_norm, x, weight, torch.ones_like(x))
    torch.testing.assert_close(x.grad, dx, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, dweight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 48), (3, 0, 48), (3, 0)], ids=str)
def test_nothing_gives_an_empty_tensor(rms_norm, shape):
    x, weight = torch.empty(shape).to(DEVICE).requires_grad_(), weights(shape[-1]).requires_grad_()
    y = rms_norm(x, weight, EPS)
    y.sum().backward()
    assert y.shape == x.grad.shape == torch.Size(shape)
    assert torch.equal(weight.grad.cpu(), torch.zeros(shape[-1]))


def test_inputs_are_left_as_they_were(rms_norm):
    inputs = [rows(6, 48), weights(48), rows(6, 48, seed=2)]
    before = [tensor.clone() for tensor in inputs]
    gradients(rms_norm, *inputs)
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor, copy)


def test_a_frozen_weight_changes_no_other_gradient(rms_norm):
    x, weight, dy = rows(6, 48).requires_grad_(), weights(48), rows(6, 48, seed=2)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, EPS), x, dy)
    assert torch.equal(dx, gradients(rms_norm, x, weight, dy)[0])
    weight.requires_grad_()
    (dweight,) = torch.autograd.grad(rms_norm(x.detach(), weight, EPS), weight, dy)
    assert torch.equal(dweight, gradients(rms_norm, x, weight, dy)[1])


def test_repeated_runs_have_the_same_bits(rms_norm):
    x, weight, dy = rows(700, 48), weights(48), rows(700, 48, seed=2)
    first, second = gradients(rms_norm, x, weight, dy), gradients(rms_norm, x, weight, dy)
    assert all(map(torch.equal, first, second))


def test_autocast_changes_nothing(rms_norm):
    x, weight = rows(6, 48, dtype=torch.bfloat16), weights(48)
    plain = rms_norm(x, weight, EPS)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = rms_norm(x, weight, EPS)
    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside, plain)


@pytest.mark.parametrize("shape", [(6, 48), (3, 40000)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [(torch.float32, torch.float32), *((half, half) for half in HALF), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_add_rms_norm_is_the_two_steps(backend, dtype, residual_dtype, shape):
    norm = backend.rms_norm
    x, residual = rows(*shape, dtype=dtype), rows(*shape, dtype=residual_dtype, seed=3)
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weights(shape[-1], dtype))]
    y, h = backend.add_rms_norm(*leaves, EPS)
    assert y.dtype == h.dtype == residual_dtype
    if truncates(norm, h.dtype):
        torch.testing.assert_close(h, x + residual, rtol=unit(h.dtype, norm), atol=0)
    else:
        assert torch.equal(h, x + residual)
    if dtype == residual_dtype:
        assert torch.equal(y, norm(h, leaves[2], EPS))
    else:  # a kernel that reads two dtypes may add the squares up in another order
        torch.testing.assert_close(y, norm(h, leaves[2], EPS), rtol=(np.sqrt(shape[-1]) + 6) * unit(h.dtype), atol=0)

    dy, dh = (rows(*shape, dtype=h.dtype, scale=1.0, seed=seed) for seed in (4, 5))
    dx, dresidual, dweight = torch.autograd.grad((y, h), leaves, (dy, dh), retain_graph=True)
    assert (dx.dtype, dresidual.dtype, dweight.dtype) == (dtype, residual_dtype, dtype)
    through_norm, expected_dweight = gradients(norm, h, leaves[2], dy)
    rounding = 0 if dtype == residual_dtype else 2 * unit(dtype, norm)
    torch.testing.assert_close(dweight, expected_dweight, rtol=rounding, atol=rounding)
    # Both outputs carry gradient. Three terms are added up, in any order: two roundings of the largest partial sum,
    # and one to dx's dtype.
    expected = through_norm.double() + dh.double()
    largest = 2 * (through_norm.abs().max() + dh.abs().max()).item()
    for gradient in (dx, dresidual):
        tolerance = (2 * unit(h.dtype, norm) + unit(gradient.dtype, norm)) * largest
        torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=tolerance)
    # And either alone.
    torch.testing.assert_close(torch.autograd.grad(y, x, dy, retain_graph=True)[0], through_norm.to(dtype))
    assert torch.equal(torch.autograd.grad(h, residual, dh)[0], dh)


def test_add_rms_norm_takes_any_strides(backend):
    """x, the residual and both gradients, each with strides of its own."""
    x, residual, weight = rows(3, 5, 48).transpose(0, 1), rows(5, 3, 144, seed=3)[..., 48:96], weights(48)
    dy, dh = rows(5, 1, 48, scale=1.0, seed=4).expand(5, 3, 48), rows(5, 3, 1, scale=1.0, seed=5).expand(5, 3, 48)
    constant = rows(5, 3, 1, seed=6).expand(5, 3, 48)

    def run(*tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in (*tensors[:2], weight)]
        outputs = backend.add_rms_norm(*leaves, EPS)
        return *outputs, *torch.autograd.grad(outputs, leaves, tensors[2:])

    for inputs in ((x, residual, dy, dh), (constant, residual, dh, dy), (x, constant, dh, dh)):
        for got, expected in zip(run(*inputs), run(*(tensor.contiguous() for tensor in inputs)), strict=True):
            bound = 16 * unit(torch.float32) * expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=0, atol=bound)


@needs_compiler
def test_runs_inside_a_compiled_graph(backend):
    torch._dynamo.reset()
    norm = backend.rms_norm
    compiled = torch.compile(lambda x, weight: norm(x * 2, weight, EPS) + 1, fullgraph=True)
    x, weight = rows(6, 48).requires_grad_(), weights(48).requires_grad_()
    got, expected = compiled(x, weight), norm(x * 2, weight, EPS) + 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(got.sum(), (x, weight)), torch.autograd.grad(expected.sum(), (x, weight)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


SHAPE = (7, 48)


@needs_compiler
@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (test_values_are_the_formula, (torch.float32, SHAPE)),
        (test_values_are_the_formula, (torch.float64, SHAPE)),
        (test_half_precision_rounds_before_the_weight, (torch.float16,)),
        (test_half_precision_rounds_before_the_weight, (torch.bfloat16,)),
        (test_statistics_are_float32_in_half_precision, ()),
        (test_gradients_are_those_of_the_formula, (torch.float32, SHAPE)),
        (test_gradients_are_those_of_the_formula, (torch.bfloat16, SHAPE)),
        (test_result_and_gradients_keep_their_dtypes, (torch.bfloat16, torch.float32)),
        (test_zero_row_gives_zero_and_a_finite_gradient, ()),
        (test_dweight_is_summed_in_float32, (torch.bfloat16,)),
        (test_nothing_gives_an_empty_tensor, ((0, 48),)),
        (test_strides_change_nothing, ("slice of a fused projection",)),
        (test_add_rms_norm_is_the_two_steps, (torch.float32, torch.float32, SHAPE)),
        (test_add_rms_norm_is_the_two_steps, (torch.bfloat16, torch.bfloat16, SHAPE)),
    ],
    ids=lambda value: value.__name__.removeprefix("test_") if callable(value) else str(value),
)
def test_compile_backend(check, arguments):
    """Each case costs seconds of compilation, so these are the ones that a compiler could get wrong."""
    torch._dynamo.reset()  # together they show the compiler more dtypes than its cache holds
    backend = kernels.load_backend("compile", DEVICE)
    check(backend if check is test_add_rms_norm_is_the_two_steps else backend.rms_norm, *arguments)
