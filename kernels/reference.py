"""The formula in eager PyTorch: the contract that every other backend is held to.

RMSNorm is by Biao Zhang and Rico Sennrich, "Root Mean Square Layer Normalization", 2019
(https://arxiv.org/abs/1910.07467). LLaMA computes it with eps inside the root and in this order of rounding:

    x_hat = x * rsqrt(mean(x^2) + eps)        every statistic in float32 (float64 for a float64 x)
    y     = x_hat rounded to x's dtype, times weight, rounded to x's dtype

Other models have another form (kernels/form.py). `offset`, Gemma's 1, is added to the weight in float32. `round_once`,
as in nn.RMSNorm, OLMo 2 and Gemma, leaves the first rounding out; in half precision that changes the last bit of about
one element in four.

eps is positive and finite. A row whose squares add up to more than float32's largest number, 3.4e38, gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import add_then


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_once: bool = False) -> Tensor:
    """Normalise the last axis of x, (..., D), to a root mean square of 1, and scale it by offset + weight, (D,).

    The result and dx have x's dtype; dweight has the weight's, and is summed in float32.
    """
    return scale(normalize(x, eps), x.dtype, weight, offset, round_once)


add_rms_norm = add_then(rms_norm)  # (y, h): h = x + residual, rounded to its dtype, and y = rms_norm(h)


def normalize(x: Tensor, eps: float) -> Tensor:
    """x_hat in the dtype of the statistics."""
    wide = x.to(wide_dtype(x))
    mean_square = wide.square().mean(-1, keepdim=True)  # (..., 1)
    return wide * torch.rsqrt(mean_square + eps)


def scale(x_hat: Tensor, dtype: torch.dtype, weight: Tensor, offset: float = 0.0, round_once: bool = False) -> Tensor:
    """x_hat, rounded to `dtype` unless round_once, times offset + weight, rounded to `dtype`."""
    wide = wide_dtype(x_hat)
    wide_weight = weight.to(wide) + offset if offset else weight.to(wide)
    return ((x_hat if round_once else x_hat.to(dtype)).to(wide) * wide_weight).to(dtype)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x's statistics: float64 for a float64 x, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_device(device: torch.device) -> None:
    """Plain PyTorch runs on every device."""
