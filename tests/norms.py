"""Norms that tests name with --norm, in processes of their own too: some watch, some fail."""

import os
import signal
from pathlib import Path

import torch

from kernels import reference
from model.cli import rank
from model.training.run_folder import newest_step


def noisy(x, weight, eps, **form):
    """A norm with random rounding, as kernels in low precision have it: the run depends on every random number."""
    return reference.rms_norm(x, weight, eps, **form) * (1 + 1e-3 * torch.rand_like(x))


def infinite_gradient(x, weight, eps):
    y = reference.rms_norm(x, weight, eps)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / torch.zeros_like(gradient).index_fill(-1, torch.tensor([1]), 1))
    return y


def checked(x, weight, eps):
    """A norm that fails unless its inputs are bfloat16 and its statistics float32, whose rounding would show."""
    y = reference.rms_norm(x, weight, eps)
    if not torch.is_grad_enabled():  # the sample at the end is float32's
        return y
    assert (x.dtype, weight.dtype, y.dtype) == (torch.bfloat16,) * 3
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    same = (y == exact.to(x.dtype) * weight).float().mean()
    assert same > 0.99, same
    rounded = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    assert (y == rounded * weight).float().mean() < 0.9  # what the line above would have found
    return y


def plain(x, weight, eps):
    """A norm that takes nothing but tensors with memory of their own, as a kernel does."""

    def check(*tensors):
        assert all(type(tensor) is torch.Tensor and tensor.data_ptr() for tensor in tensors), list(map(type, tensors))

    check(x, weight.detach())
    y = reference.rms_norm(x, weight, eps)
    if y.requires_grad:
        y.register_hook(check)
    return y


def seen(x, weight, eps):
    if torch.is_grad_enabled():  # in training alone
        with Path(f"{rank()}.seeds").open("a") as file:
            file.write(f"{torch.initial_seed()}\n")
    return reference.rms_norm(x, weight, eps)


def dying(x, weight, eps):
    if rank() == 1 and newest_step(Path("out/torchrun/state")):
        os.kill(os.getpid(), signal.SIGKILL)
    return reference.rms_norm(x, weight, eps)


def centered(x, weight, eps):
    """LayerNorm without a bias, which is not RMSNorm."""
    return reference.rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


def add_centered(x, residual, weight, eps):
    return centered(x + residual, weight, eps), x + residual


def nan_in_evaluation(x, weight, eps):
    y = reference.rms_norm(x, weight, eps)
    return y if torch.is_grad_enabled() else y * torch.nan
