"""PyTorch's own operator. The weight stays outside, unless the form rounds once: inside, x_hat is not rounded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import add_then
from kernels.reference import wide_dtype
from kernels.torch_version import TORCH_2_13


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_once: bool = False) -> Tensor:
    """The contract of kernels/reference.py, computed by F.rms_norm."""
    dtype = wide_dtype(x)
    if offset:
        weight = weight.to(dtype) + offset
    if round_once:  # in one kernel where the dtypes agree; torch 2.6 rounds in between
        inside = x.dtype if TORCH_2_13 and weight.dtype == x.dtype else dtype
        return F.rms_norm(x.to(inside), x.shape[-1:], weight.to(inside), eps).to(x.dtype)
    wide = x if TORCH_2_13 else x.to(dtype)  # torch 2.6 rounds the root to half precision before the product
    # eps is always passed: without it F.rms_norm takes the machine epsilon of the dtype.
    x_hat = F.rms_norm(wide, x.shape[-1:], eps=eps).to(x.dtype)  # autocast may have widened it
    return (x_hat * weight).to(x.dtype)


add_rms_norm = add_then(rms_norm)


def check_device(device: torch.device) -> None:
    """PyTorch's operator runs on every device."""
