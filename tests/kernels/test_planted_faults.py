"""The classic mistakes in an RMSNorm and its kernels, each planted and caught by the test that is named beside it."""

import pytest
import torch

import kernels
from kernels import reference
from model.norm import RMSNorm
from tests.helpers import CPU
from tests.kernels import test_norm_contract
from tests.model import test_norm


def rstd(x, eps, axis=-1):
    return torch.rsqrt(x.float().square().mean(axis, keepdim=True) + eps)


def square_of_the_mean(x, weight, eps):
    return x * torch.rsqrt(x.mean(-1, keepdim=True).square() + eps) * weight


def over_the_batch(x, weight, eps):
    return x * rstd(x, eps, axis=0).to(x.dtype) * weight


def over_the_sequence(x, weight, eps):
    return x * rstd(x, eps, axis=-2).to(x.dtype) * weight


def keepdim_forgotten(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1) + eps) * weight


def eps_missing(x, weight, eps):
    return (x * rstd(x, 0.0)).to(x.dtype) * weight


def eps_outside_the_root(x, weight, eps):
    return (x / (x.float().square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype) * weight


def eps_of_another_model(x, weight, eps):
    return (x * rstd(x, 1e-6)).to(x.dtype) * weight


def statistics_in_half_precision(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def weight_dropped(x, weight, eps):
    return (x * rstd(x, eps)).to(x.dtype)


def rounding_in_the_other_order(x, weight, eps):
    return (x * rstd(x, eps) * weight.float()).to(x.dtype)


def mean_removed_as_well(x, weight, eps):
    x = x - x.mean(-1, keepdim=True)
    return (x * rstd(x, eps)).to(x.dtype) * weight


def with_backward(backward):
    """The right norm with a backward of its own: (dy, x, weight, rstd) -> dx, dweight."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            ctx.save_for_backward(x, weight, rstd(x, eps))
            return reference.rms_norm(x, weight, eps)

        @staticmethod
        def backward(ctx, dy):
            return *backward(dy, *ctx.saved_tensors), None

    return Norm.apply


def right_gradients(dy, x, weight, rstd):
    x_hat, weighted = x * rstd, dy * weight
    dx = rstd * (weighted - x_hat * (x_hat * weighted).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * x_hat.to(x.dtype).float()).flatten(0, -2).sum(0).to(weight.dtype)


def dx_without_the_mean(dy, x, weight, rstd):
    return (rstd * dy * weight).to(x.dtype), right_gradients(dy, x, weight, rstd)[1]


def dweight_of_one_block(dy, x, weight, rstd):
    dx, _ = right_gradients(dy, x, weight, rstd)
    return dx, right_gradients(dy[:256], x[:256], weight, rstd[:256])[1]


def dweight_summed_in_half_precision(dy, x, weight, rstd):
    dweight = torch.zeros_like(weight)
    for row in (dy * (x * rstd).to(x.dtype)).flatten(0, -2):
        dweight += row
    return right_gradients(dy, x, weight, rstd)[0], dweight


def dweight_of_the_unrounded_x_hat(dy, x, weight, rstd):
    return right_gradients(dy, x.float(), weight, rstd)[0].to(x.dtype), (dy * (x * rstd)).sum(0)


def dy_overwritten(dy, x, weight, rstd):
    dx, dweight = right_gradients(dy, x, weight, rstd)
    return dy.copy_(dx), dweight


def strides_ignored(x, weight, eps):
    contiguous = torch.empty(x.shape).stride()
    needed = sum((size - 1) * stride for size, stride in zip(x.shape, contiguous, strict=True)) + 1
    storage = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage())
    if needed > storage.numel():
        raise AssertionError("read beyond the end")  # on a GPU nobody would say so
    return reference.rms_norm(storage.as_strided(x.shape, contiguous) + 0 * x, weight, eps)


def columns_beyond_a_power_of_two_ignored(x, weight, eps):
    block = 1 << (x.shape[-1].bit_length() - 1)
    statistic = x[..., :block].square().sum(-1, keepdim=True) / x.shape[-1]
    return x * torch.rsqrt(statistic + eps) * weight


def h_not_rounded(x, residual, weight, eps):
    h = x.float() + residual.float()
    return reference.rms_norm(h, weight, eps).to(x.dtype), h.to(x.dtype)


def gradient_of_h_dropped(x, residual, weight, eps):
    y, h = reference.add_rms_norm(x, residual, weight, eps)
    return y, h.detach() + 0 * h


def residual_added_in_place(x, residual, weight, eps):
    h = residual.detach().add_(x).requires_grad_()
    return reference.rms_norm(h, weight, eps), h + 0 * (x + residual)


FAULTS = {
    square_of_the_mean: ("test_values_are_the_formula", (torch.float32, (7, 48))),
    over_the_batch: ("test_a_row_depends_on_itself_alone", ()),
    over_the_sequence: ("test_a_row_depends_on_itself_alone", ()),
    keepdim_forgotten: ("test_values_are_the_formula", (torch.float32, (48, 48))),  # a square broadcasts in silence
    eps_missing: ("test_eps_of_the_model_shows_in_small_rows", (1e-5, 0.30151134, torch.float32)),
    eps_outside_the_root: ("test_eps_of_the_model_shows_in_small_rows", (1e-5, 0.30151134, torch.float32)),
    eps_of_another_model: ("test_eps_of_the_model_shows_in_small_rows", (1e-5, 0.30151134, torch.float16)),
    statistics_in_half_precision: ("test_statistics_are_float32_in_half_precision", ()),
    weight_dropped: ("test_values_are_the_formula", (torch.float32, (7, 48))),
    rounding_in_the_other_order: ("test_half_precision_rounds_before_the_weight", (torch.bfloat16,)),
    mean_removed_as_well: ("test_the_mean_is_not_removed", ()),
    strides_ignored: ("test_strides_change_nothing", ("slice of a fused projection",)),
    columns_beyond_a_power_of_two_ignored: ("test_any_width", (4097,)),
}
WRONG_GRADIENTS = {
    dx_without_the_mean: ("test_gradients_are_those_of_the_formula", (torch.float32, (7, 48))),
    dweight_of_one_block: ("test_gradients_are_those_of_the_formula", (torch.float32, (600, 40))),
    dweight_summed_in_half_precision: ("test_dweight_is_summed_in_float32", (torch.float16,)),
    dweight_of_the_unrounded_x_hat: ("test_dweight_is_made_of_the_rounded_x_hat", ()),
    dy_overwritten: ("test_inputs_are_left_as_they_were", ()),
}
WRONG_ADDITIONS = {
    h_not_rounded: (torch.float16, torch.float16, (6, 48)),
    gradient_of_h_dropped: (torch.float32, torch.float32, (6, 48)),
    residual_added_in_place: (torch.float32, torch.float32, (6, 48)),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_norm_is_caught(fault):
    name, arguments = FAULTS[fault]
    check = getattr(test_norm_contract, name)
    check(kernels.load_backend("reference", CPU).rms_norm, *arguments)  # the right norm passes the same test
    with pytest.raises(AssertionError):
        check(fault, *arguments)


@pytest.mark.parametrize("fault", WRONG_GRADIENTS, ids=lambda fault: fault.__name__)
def test_a_wrong_gradient_is_caught(fault):
    name, arguments = WRONG_GRADIENTS[fault]
    check = getattr(test_norm_contract, name)
    check(with_backward(right_gradients), *arguments)
    with pytest.raises(AssertionError):
        check(with_backward(fault), *arguments)


@pytest.mark.parametrize("fault", WRONG_ADDITIONS, ids=lambda fault: fault.__name__)
def test_a_wrong_addition_is_caught(fault):
    check, right = test_norm_contract.test_add_rms_norm_is_the_two_steps, kernels.load_backend("reference", CPU)
    check(right, *WRONG_ADDITIONS[fault])
    with pytest.raises(AssertionError):
        check(right._replace(add_rms_norm=fault), *WRONG_ADDITIONS[fault])


def test_a_unit_offset_formed_in_half_precision_is_caught(monkeypatch):
    """1 + 2^-12 is 1 in float16."""
    pytest.importorskip("triton", reason="triton is made for Linux alone")
    from kernels import triton_rms_norm
    from tests.kernels import test_triton_rms_norm

    def fault(x, weight, eps, **options):
        return rms_norm(x, 1 + weight, eps, round_once=True)

    rms_norm = triton_rms_norm.rms_norm
    test_triton_rms_norm.test_unit_offset_and_one_rounding_are_gemmas_norm(torch.float16)
    monkeypatch.setattr(triton_rms_norm, "rms_norm", fault)
    with pytest.raises(AssertionError):
        test_triton_rms_norm.test_unit_offset_and_one_rounding_are_gemmas_norm(torch.float16)


def test_one_norm_shared_by_all_layers_is_caught(config, make_model):
    model = make_model(config)
    shared = RMSNorm(config.hidden_size, config.rms_norm_eps, model.norm.backend)
    for layer in model.layers:
        layer.attention_norm = layer.ffn_norm = shared
    model.norm = shared
    with pytest.raises(AssertionError):
        test_norm.test_every_sub_layer_owns_its_norm(config, lambda config: model)
