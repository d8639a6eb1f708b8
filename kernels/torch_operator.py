"""PyTorch's own operator. It normalises; the weight stays outside, since inside it would be rounded only once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import add_then
from kernels.reference import wide_dtype

# torch 2.6 rounds the root to half precision before the product, 2.13 doesn't; no version between was tried.
# Asked once: the comparison of versions takes as long as the norm of a row.
KEEPS_ROOT = torch.__version__ >= "2.13"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The contract of kernels/reference.py, computed by F.rms_norm."""
    wide = x if KEEPS_ROOT else x.to(wide_dtype(x))
    # eps is always passed: without it F.rms_norm takes the machine epsilon of the dtype.
    x_hat = F.rms_norm(wide, x.shape[-1:], eps=eps).to(x.dtype)  # autocast may have widened it
    return (x_hat * weight).to(x.dtype)


add_rms_norm = add_then(rms_norm)


def check_device(device: torch.device) -> None:
    """PyTorch's operator runs on every device."""
