"""The classic mistakes in an RMSNorm and its kernels; test_planted_faults.py names the check that catches each."""

import torch

from kernels import reference


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


def rounding_in_the_other_order(x, weight, eps, offset=0.0, round_once=False):
    return reference.rms_norm(x, weight, eps, offset, not round_once)


def offset_formed_in_half_precision(x, weight, eps, offset, round_once):
    return reference.rms_norm(x, weight + offset, eps, round_once=round_once)


def offset_added_to_x_hat(x, weight, eps, offset, round_once):
    x_hat = x * rstd(x, eps) if round_once else (x * rstd(x, eps)).to(x.dtype)
    return ((x_hat + offset) * weight.float()).to(x.dtype)


def offset_forgotten(x, weight, eps, offset, round_once):
    return reference.rms_norm(x, weight, eps, round_once=round_once)


def mean_removed_as_well(x, weight, eps):
    x = x - x.mean(-1, keepdim=True)
    return (x * rstd(x, eps)).to(x.dtype) * weight


def nan(x, weight, eps):
    return x * torch.nan


def with_backward(backward, **form):
    """The right norm with a backward of its own: (dy, x, weight, rstd) -> dx, dweight, where weight has no offset."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            ctx.save_for_backward(x, weight, rstd(x, eps))
            return reference.rms_norm(x, weight, eps, **form)

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
