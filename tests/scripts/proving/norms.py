"""Norms to prove: right ones, and some that do what norms should not. Named as tests.scripts.proving.norms:NAME."""

import os
import signal

import torch

from kernels import reference
from tests.kernels import faults


def right(x, weight, eps):
    """Plain PyTorch, in another order of operations than the reference."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    root = (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return ((wide / root).to(x.dtype) * weight.to(wide.dtype)).to(x.dtype)


def in_float32(x, weight, eps):
    """float64 is taken and computed in float32."""
    return (
        reference.rms_norm(x.float(), weight.float(), eps).to(x.dtype)
        if x.dtype == torch.float64
        else right(x, weight, eps)
    )


def forward_alone(x, weight, eps):
    return reference.rms_norm(x.detach(), weight.detach(), eps)


def dies_of_strides(x, weight, eps):
    if not x.is_contiguous():
        os.kill(os.getpid(), signal.SIGSEGV)
    return reference.rms_norm(x, weight, eps)


def dies(x, weight, eps):
    os.kill(os.getpid(), signal.SIGSEGV)


def nothing(x, weight, eps):
    reference.rms_norm(x, weight, eps)


def pair(x, weight, eps):
    return reference.rms_norm(x, weight, eps), x


def flat(x, weight, eps):
    return reference.rms_norm(x, weight, eps).flatten()


def other_arguments(x, eps):
    return x


def wide_result(x, weight, eps):
    return reference.rms_norm(x, weight, eps).float()


def in_place(x, weight, eps):
    y = reference.rms_norm(x, weight, eps)
    x.data.copy_(y)
    return y


def fails_without_rows(x, weight, eps):
    return reference.rms_norm(x, weight, eps) / (1 // x.numel() + 1)


def needs_a_gpu(x, weight, eps):
    assert x.is_cuda
    return reference.rms_norm(x, weight, eps)


def outside_and_dropped(x, weight, eps):
    return faults.eps_outside_the_root(x, torch.ones_like(weight), eps)


dy_overwritten = faults.with_backward(faults.dy_overwritten)
residual_overwritten = right


def add_residual_overwritten(x, residual, weight, eps):
    return faults.residual_added_in_place(x, residual, weight, eps)
