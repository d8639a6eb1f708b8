"""PyTorch's own operator. It normalises; the weight stays outside, since inside it would be rounded only once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import add_then
from kernels.reference import wide_dtype
from kernels.torch_version import TORCH_2_13


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The contract of kernels/reference.py, computed by F.rms_norm."""
    wide = x if TORCH_2_13 else x.to(wide_dtype(x))  # torch 2.6 rounds the root to half precision before the product
    # eps is always passed: without it F.rms_norm takes the machine epsilon of the dtype.
    x_hat = F.rms_norm(wide, x.shape[-1:], eps=eps).to(x.dtype)  # autocast may have widened it
    return (x_hat * weight).to(x.dtype)


add_rms_norm = add_then(rms_norm)


def check_device(device: torch.device) -> None:
    """PyTorch's operator runs on every device."""
