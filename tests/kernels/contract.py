"""The contract of kernels/reference.py as checks, functions of a norm. The oracle is NumPy or autograd, in float64.

test_norm_contract.py runs all of them on every backend, test_planted_faults.py each on a norm that it must refuse.
Where the form of the norm matters, the check takes it. The norm has it bound already.
"""

import functools
import os

import numpy as np
import torch
from torch.autograd.gradcheck import GradcheckError

from kernels.form import FORMS, LLAMA, Form

DEVICE = torch.device(os.environ["NORM_TEST_DEVICE"])  # pytest --device
EPS = 3e-3  # unlike any model's, so that a literal in the code can't pass
HALF = [torch.float16, torch.bfloat16]
F64, F32, F16, BF16 = torch.float64, torch.float32, *HALF
OTHER_FORMS = [FORMS["torch"], FORMS["gemma"], Form(0.3, False)]  # no model's, and 0.3 is not the same in float32


def rows(*shape, dtype=torch.float32, scale=0.05, seed=0):
    """Random rows whose mean square, 0.0025, is about EPS: half of what divides them."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def weights(size, dtype=torch.float32, seed=1, form=LLAMA):
    """offset + weight is between 0.5 and 1.5."""
    return (torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.5 - form.offset).to(DEVICE, dtype)


def expect(holds, message):
    """Fail with the message alone: pytest would explain an assert with tensors that are cut short."""
    if not holds:
        raise AssertionError(message)


def a_tensor(found):
    expect(isinstance(found, torch.Tensor), f"found {type(found).__name__}, expected a tensor")
    return found


def exact(found):
    return a_tensor(found).detach().double().cpu().numpy()


def oracle(x, weight, eps=EPS, form=LLAMA):
    """The formula in NumPy, float64, without any rounding."""
    x = exact(x)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (exact(weight) + form.offset)


def formula(x, weight, eps, form=LLAMA):
    """Differentiable oracle, for float64 tensors."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + form.offset)


def gradients(norm, x, weight, dy):
    """dx and dweight of sum(norm(x) * dy)."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(a_tensor(norm(x, weight, EPS)), (x, weight), dy)


def unit(dtype):
    """Largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def value_bound(dtype, width):
    """Relative error of y: a sum of `width` squares (halved by the root) and six operations in the wide dtype, and
    below float32 two roundings to the narrow one."""
    bound = (width / 2 + 6) * unit(wide(dtype))
    return bound if dtype == wide(dtype) else bound + 2.01 * unit(dtype)


def assert_within(bound, found, expected):
    """Fail with the element that is furthest above its bound, an absolute error; NaN is above any."""
    found, expected = exact(found), expected if isinstance(expected, np.ndarray) else exact(expected)
    expect(found.shape == expected.shape, f"found shape {found.shape}, expected {expected.shape}")
    with np.errstate(invalid="ignore"):  # infinity less infinity
        error, bound = np.abs(found - expected), np.broadcast_to(exact(torch.as_tensor(bound)), expected.shape)
    over = ~(error <= bound)
    if over.any():
        worst = tuple(map(int, np.unravel_index(np.argmax(error - bound), error.shape)))  # a NaN comes first
        raise AssertionError(
            f"found {found[worst]:.9g} at {worst}, expected {expected[worst]:.9g} within {bound[worst]:.2g}; "
            f"{over.sum()} of {over.size} elements are further off"
        )


DEFAULT = {
    F64: (1e-7, 1e-7),
    F32: (1.3e-6, 1e-5),
    F16: (1e-3, 1e-5),
    BF16: (1.6e-2, 1e-5),
}  # torch.testing's rtol, atol


def assert_close(found, expected, rtol=None, atol=None):
    """torch.testing.assert_close, which demands shape and dtype too, with the message of assert_within."""
    try:
        torch.testing.assert_close(a_tensor(found), expected, rtol=rtol, atol=atol)
    except AssertionError:
        assert_dtypes([found], expected.dtype)
        default = DEFAULT[expected.dtype]
        rtol, atol = (default[i] if given is None else given for i, given in enumerate((rtol, atol)))
        assert_within(atol + rtol * np.abs(exact(expected)), found, expected)
        raise  # of a device, say


def assert_equal(found, expected):
    """Fail unless dtype, shape and all elements are the same."""
    assert_close(a_tensor(found).cpu(), expected.cpu(), rtol=0, atol=0)


def assert_dtypes(tensors, *expected):
    found = tuple(a_tensor(each).dtype for each in tensors)
    words = (", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) for dtypes in (found, expected))
    expect(found == expected, "found dtype {}, expected dtype {}".format(*words))


def check_values(norm, x, weight, eps=EPS, form=LLAMA):
    y, expected = norm(x, weight, eps), oracle(x, weight, eps, form)
    assert_dtypes([y], x.dtype)
    smallest = torch.finfo(x.dtype).smallest_normal  # below it the spacing is absolute
    assert_within(value_bound(x.dtype, x.shape[-1]) * np.abs(expected) + smallest, y, expected)


def values_are_the_formula(norm, dtype, shape, form=LLAMA):
    check_values(norm, rows(*shape, dtype=dtype), weights(shape[-1], dtype, form=form), form=form)


def a_zero_weight_leaves_the_offset(norm, dtype, form=LLAMA):
    check_values(norm, rows(7, 48, dtype=dtype), torch.zeros(48, dtype=dtype, device=DEVICE), form=form)


def any_width(norm, width, form=LLAMA):
    x, weight = rows(3, width), weights(width, form=form)
    expected = oracle(x, weight, form=form)
    # Every backend sums in blocks, whose error grows as the root of the width at most.
    assert_within((np.sqrt(width) + 6) * unit(torch.float32) * np.abs(expected), norm(x, weight, EPS), expected)


def eps_of_the_model_shows_in_small_rows(norm, dtype, eps_and_result):
    eps, expected = eps_and_result
    x, weight = torch.full((2, 64), 1e-3, dtype=dtype), torch.ones(64, dtype=dtype)
    # 1e-3 itself is rounded to the dtype, then x_hat is: two roundings, and the last one of the weight is exact.
    bound = (2.01 * unit(dtype) + 1e-6) * expected
    assert_within(bound, norm(x.to(DEVICE), weight.to(DEVICE), eps), np.full((2, 64), expected))


def huge_rows(norm, dtype):
    """1e18 squared times 48 is still a float32; eps is nothing beside it."""
    check_values(norm, rows(7, 48, dtype=dtype, scale=1e18), weights(48, dtype))


def rows_too_large_for_float32_give_zero(norm, dtype):
    """Squares that add up to more than a float32 holds: 0 and no gradient, as from the formula in float32."""
    x, weight = rows(2, 48, dtype=dtype, scale=1e25), weights(48, dtype)
    for found in (norm(x, weight, EPS), *gradients(norm, x, weight, rows(2, 48, dtype=dtype, scale=1.0, seed=2))):
        assert_within(0, found, np.zeros(found.shape))


def subnormal_rows(norm, dtype):
    """Below the smallest normal number bits are lost, and a GPU may flush to zero; the result must be as small."""
    x, weight = rows(7, 48, dtype=dtype, scale=1e-6 if dtype == torch.float16 else 1e-39), weights(48, dtype)
    y, expected = norm(x, weight, 1e-5), oracle(x, weight, 1e-5)
    # x times 316: for float16 a normal number again, whose statistics in float32 have lost nothing.
    lost = 0 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal * 400
    assert_within(value_bound(dtype, 48) * np.abs(expected) + lost + torch.finfo(dtype).smallest_normal, y, expected)


def half_precision_rounds_in_the_order_of_the_form(norm, dtype, form=LLAMA):
    x, weight = rows(64, 256, dtype=dtype), weights(256, dtype, form=form)
    x_hat = torch.from_numpy(oracle(x, torch.ones(256)))
    x_hat = x_hat if form.round_once else x_hat.to(dtype).double()
    expected = (x_hat * (weight.double().cpu() + form.offset)).to(dtype)
    # A float32 statistic moves x_hat by about 8 of its units, and 2^-24 * 8 is 1/1024 of float16's spacing: about
    # 0.1 % of the elements lie so close to a rounding boundary. The other order of rounding moves about 25 %.
    found = a_tensor(norm(x, weight, EPS)).cpu()
    differing = (found != expected).double().mean().item()
    at = tuple((found != expected).nonzero()[0].tolist()) if differing else ()
    expect(
        differing < 0.005,
        f"found {differing:.2%} of the elements to differ, expected less than 0.5 %; the first at {at}: "
        f"found {found[at].tolist()}, expected {expected[at].tolist()}",
    )


def statistics_are_float32_in_half_precision(norm):
    x = torch.full((2, 64), 300.0, dtype=torch.float16).to(DEVICE)  # 300^2 is above float16's largest number, 65504
    weight = weights(64, torch.float16)
    assert_equal(norm(x, weight, EPS), weight.expand(2, 64))


def a_row_depends_on_itself_alone(norm):
    x, weight = rows(4, 5, 48), weights(48)
    alone = norm(x[1:2, 2:3].clone(), weight, EPS)
    other = x * 100
    other[1, 2] = x[1, 2]
    # The same row in another place may be summed in another order: one unit each for the root and two products.
    assert_close(norm(other, weight, EPS)[1:2, 2:3], alone, rtol=4 * unit(torch.float32), atol=0)


def the_mean_is_not_removed(norm):
    weight = weights(48)
    y = norm(torch.full((3, 48), 2.0).to(DEVICE), weight, EPS)
    assert_close(y, weight.expand(3, 48) * (2 / (4 + EPS) ** 0.5), rtol=1e-6, atol=0)


def root_mean_square_is_one_at_unit_weight(norm):
    y = norm(rows(9, 768, scale=3.0), torch.ones(768).to(DEVICE), 1e-12)
    assert_close(y.square().mean(-1).sqrt().cpu(), torch.ones(9), rtol=1e-6, atol=0)


def zero_row_gives_zero_and_a_finite_gradient(norm, form=LLAMA):
    x, weight = torch.zeros(2, 48).to(DEVICE).requires_grad_(), weights(48, form=form).requires_grad_()
    y = norm(x, weight, 1e-5)
    y.sum().backward()
    assert_equal(y, torch.zeros(2, 48))
    assert_close(x.grad, ((weight + form.offset) * 316.227766).expand(2, 48).detach(), rtol=1e-6, atol=0)
    assert_equal(weight.grad, torch.zeros(48))


def gradients_are_those_of_the_formula(norm, dtype, shape, form=LLAMA, weight_dtype=None):
    x, dy = rows(*shape, dtype=dtype), rows(*shape, dtype=dtype, scale=1.0, seed=2)
    weight = weights(shape[-1], weight_dtype or dtype, form=form)
    dx, dweight = gradients(norm, x, weight, dy)
    assert_dtypes((dx, dweight), dtype, weight.dtype)
    exact_norm = functools.partial(formula, form=form)
    exact_dx, exact_dweight = gradients(exact_norm, x.double(), weight.double(), dy.double())
    # dx is a difference, so its error is measured against its terms, such as weight * dy * rstd: about as large as the
    # largest dx of its row. Up to four narrow roundings, and the sums' growth in the wide dtype.
    narrow = 0 if dtype == wide(dtype) else 4 * unit(dtype)
    scale = exact_dx.abs().amax(-1, keepdim=True)
    if shape[-1] == 1:  # then the two terms nearly cancel, and the largest dx says nothing about them
        scale = ((weight.double() + form.offset) * dy.double()).abs() / (x.double().square() + EPS).sqrt()
    assert_within((narrow + (shape[-1] / 2 + 20) * unit(wide(dtype))) * scale, dx, exact_dx)
    # dweight sums one product a row, each with a narrow rounding of x_hat, whose errors add up as a random walk at
    # 6 sigma or less; then it is rounded once itself.
    n_rows = x.numel() // shape[-1]
    terms = (dy.double() * torch.from_numpy(oracle(x, torch.ones(1))).to(DEVICE)).flatten(0, -2).abs().amax(0)
    bound = (6 * np.sqrt(n_rows) * (narrow / 4 + (np.sqrt(shape[-1]) + 20) * unit(wide(dtype)))) * terms
    rounded = 0 if weight.dtype == wide(weight.dtype) else 4 * unit(weight.dtype)
    assert_within(bound + rounded * exact_dweight.abs(), dweight, exact_dweight)


def dweight_is_summed_in_float32(norm, dtype):
    """Ones, added up in half precision, stop at 256 or 2048."""
    x, weight = torch.full((4096, 16), 2.0, dtype=dtype).to(DEVICE), weights(16, dtype)
    _, dweight = gradients(norm, x, weight, torch.ones_like(x))
    expected = np.full(16, 4096 * 2 / np.sqrt(4 + EPS))
    assert_within(2.01 * unit(dtype) * expected, dweight, expected)


def dweight_is_made_of_what_the_weight_multiplies(norm, form=LLAMA):
    """The rounded x_hat, or the unrounded one if the form rounds once. A float32 weight shows the bits."""
    x, weight = rows(1, 48, dtype=torch.float16), weights(48, form=form)
    _, dweight = gradients(norm, x, weight, torch.ones_like(x))
    if form.round_once:
        expected = oracle(x[0], torch.ones(48))
        assert_within(30 * unit(torch.float32) * np.abs(expected), dweight, expected)
    else:
        assert_equal(dweight, dweight.half().float())


def gradcheck_in_float64(norm):
    x, weight = rows(3, 4, 5, dtype=torch.float64).requires_grad_(), weights(5, torch.float64).requires_grad_()
    try:
        torch.autograd.gradcheck(lambda x, weight: norm(x, weight, EPS), (x, weight))
    except GradcheckError as error:
        words = " ".join(str(error).partition("numerical:")[0].split()).rstrip(",")
        raise AssertionError(f"found a gradient that is not the numerical one, expected it: {words}") from error


def result_and_gradients_keep_their_dtypes(norm, x_dtype, weight_dtype, form=LLAMA):
    x, weight = rows(6, 48, dtype=x_dtype), weights(48, weight_dtype, form=form)
    assert_dtypes(gradients(norm, x, weight, torch.ones_like(x)), x_dtype, weight_dtype)
    check_values(norm, x, weight, form=form)


STRIDED = {
    "transposed": lambda: rows(48, 6).t(),
    "every second column": lambda: rows(6, 96)[:, ::2],
    "slice of a fused projection": lambda: rows(6, 144)[:, 48:96],
    "heads of a fused projection": lambda: rows(2, 3, 7, 48)[:, :, 2:5],
    "swapped axes": lambda: rows(3, 5, 48).transpose(0, 1),
    "some rows of each batch, at odd addresses": lambda: rows(4, 16, 5)[:, :3],
    "swapped axes of wide rows": lambda: rows(3, 5, 20000).transpose(0, 1),
    "swapped heads": lambda: rows(2, 3, 5, 48).transpose(1, 2),
    "expanded rows": lambda: rows(1, 48).expand(6, 48),
    "expanded columns": lambda: rows(6, 1).expand(6, 48),
    "one number": lambda: rows(1, 1, 1).expand(2, 3, 48),
}


def strides_change_nothing(norm, name):
    x, dy = STRIDED[name](), STRIDED[name]() * 20
    weight = weights(2 * x.shape[-1])[::2]
    dy = torch.as_strided(dy, x.shape, x.stride()) if name.startswith(("expanded", "one")) else dy  # * 20 filled it up
    expect(not x.is_contiguous(), f"{name} shows nothing")
    strided = (norm(x, weight, EPS), *gradients(norm, x, weight, dy))
    plain, weight = x.contiguous(), weight.contiguous()
    contiguous = (norm(plain, weight, EPS), *gradients(norm, plain, weight, dy.contiguous()))
    for found, expected in zip(strided, contiguous, strict=True):
        # Sums may run in another order. Only rounding may differ: a few units of the largest element.
        assert_within(16 * unit(torch.float32) * expected.abs().max(), found, expected)


def gradient_of_a_sum_arrives_expanded(norm):
    x, weight = rows(6, 48).requires_grad_(), weights(48).requires_grad_()
    norm(x, weight, EPS).sum().backward()  # dy is one element with strides of 0
    dx, dweight = gradients(norm, x, weight, torch.ones_like(x))
    assert_close(x.grad, dx, rtol=1e-5, atol=1e-6)
    assert_close(weight.grad, dweight, rtol=1e-5, atol=1e-6)


def nothing_gives_an_empty_tensor(norm, shape):
    x, weight = torch.empty(shape).to(DEVICE).requires_grad_(), weights(shape[-1]).requires_grad_()
    y = norm(x, weight, EPS)
    y.sum().backward()
    found = tuple(y.shape), tuple(x.grad.shape)
    expect(found == (shape, shape), f"found y {found[0]} and dx {found[1]}, expected {shape}")
    assert_equal(weight.grad, torch.zeros(shape[-1]))


def inputs_are_left_as_they_were(norm):
    inputs = [rows(6, 48), weights(48), rows(6, 48, seed=2)]
    before = [tensor.clone() for tensor in inputs]
    gradients(norm, *inputs)
    for tensor, copy in zip(inputs, before, strict=True):
        assert_equal(tensor, copy)


def a_frozen_weight_changes_no_other_gradient(norm):
    x, weight, dy = rows(6, 48).requires_grad_(), weights(48), rows(6, 48, seed=2)
    (dx,) = torch.autograd.grad(norm(x, weight, EPS), x, dy)
    weight.requires_grad_()
    (dweight,) = torch.autograd.grad(norm(x.detach(), weight, EPS), weight, dy)
    for found, expected in zip((dx, dweight), gradients(norm, x, weight, dy), strict=True):
        assert_equal(found, expected)


def repeated_runs_have_the_same_bits(norm):
    x, weight, dy = rows(700, 48), weights(48), rows(700, 48, seed=2)
    for first, second in zip(gradients(norm, x, weight, dy), gradients(norm, x, weight, dy), strict=True):
        assert_equal(first, second)


def autocast_changes_nothing(norm, x_dtype, weight_dtype):
    """Activations beside float32 weights, a float32 stream, and weights in half precision beside both."""
    x, weight, dy = rows(6, 48, dtype=x_dtype), weights(48, weight_dtype), rows(6, 48, dtype=x_dtype, seed=2)
    plain = norm(x, weight, EPS), *gradients(norm, x, weight, dy)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = norm(x, weight, EPS), *gradients(norm, x, weight, dy)
    assert_dtypes(inside, x_dtype, x_dtype, weight_dtype)
    for found, expected in zip(inside, plain, strict=True):
        assert_equal(found, expected)


def add_rms_norm_is_the_two_steps(backend, dtype, residual_dtype, shape):
    norm = backend.rms_norm
    x, residual = rows(*shape, dtype=dtype), rows(*shape, dtype=residual_dtype, seed=3)
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weights(shape[-1], dtype))]
    y, h = backend.add_rms_norm(*leaves, EPS)
    assert_dtypes((y, h), residual_dtype, residual_dtype)
    assert_equal(h, x + residual)
    # A kernel that reads two dtypes may add the squares up in another order.
    another_order = 0 if dtype == residual_dtype else (np.sqrt(shape[-1]) + 6) * unit(h.dtype)
    assert_close(y, norm(h, leaves[2], EPS), rtol=another_order, atol=0)

    dy, dh = (rows(*shape, dtype=h.dtype, scale=1.0, seed=seed) for seed in (4, 5))
    dx, dresidual, dweight = torch.autograd.grad((y, h), leaves, (dy, dh), retain_graph=True)
    assert_dtypes((dx, dresidual, dweight), dtype, residual_dtype, dtype)
    through_norm, expected_dweight = gradients(norm, h, leaves[2], dy)
    rounding = 0 if dtype == residual_dtype else 2 * unit(dtype)
    assert_close(dweight, expected_dweight, rtol=rounding, atol=rounding)
    # Both outputs carry gradient. Three terms are added up, in any order: two roundings of the largest partial sum,
    # and one to dx's dtype.
    largest = 2 * (through_norm.abs().max() + dh.abs().max()).item()
    for gradient in (dx, dresidual):
        bound = (2 * unit(h.dtype) + unit(gradient.dtype)) * largest
        assert_within(bound, gradient, through_norm.double() + dh.double())
    # And either alone.
    assert_close(torch.autograd.grad(y, x, dy, retain_graph=True)[0], through_norm.to(dtype))
    assert_equal(torch.autograd.grad(h, residual, dh)[0], dh)


def add_rms_norm_takes_any_strides(backend, width):
    """x, the residual and both gradients, each with strides of its own."""
    x, residual = rows(3, 5, width).transpose(0, 1), rows(5, 3, 3 * width, seed=3)[..., width : 2 * width]
    dy, dh = rows(5, 1, width, scale=1.0, seed=4), rows(5, 3, 1, scale=1.0, seed=5)
    dy, dh, weight = dy.expand(5, 3, width), dh.expand(5, 3, width), weights(width)
    constant = rows(5, 3, 1, seed=6).expand(5, 3, width)

    def run(*tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in (*tensors[:2], weight)]
        outputs = backend.add_rms_norm(*leaves, EPS)
        return *outputs, *torch.autograd.grad(outputs, leaves, tensors[2:])

    for inputs in ((x, residual, dy, dh), (constant, residual, dh, dy), (x, constant, dh, dh)):
        for found, expected in zip(run(*inputs), run(*(tensor.contiguous() for tensor in inputs)), strict=True):
            assert_within(16 * unit(torch.float32) * expected.abs().max(), found, expected)


def every_sub_layer_owns_its_norm(model):
    norms = [weight.data_ptr() for name, weight in model.named_parameters() if name.endswith("norm.weight")]
    expected = 2 * model.config.num_hidden_layers + 1
    expect(len(set(norms)) == expected, f"found {len(set(norms))} weights of norms, expected {expected}")
