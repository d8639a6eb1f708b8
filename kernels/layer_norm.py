"""LayerNorm (Jimmy Lei Ba et al., 2016, https://arxiv.org/abs/1607.06450), which RMSNorm is compared with.

    y = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * weight + bias      over the last axis

It is PyTorch's operator: statistics in float32, and one rounding, of the result. It is another function than the
contract's, so a model that is trained with it is saved as one that no other software takes for a LLaMA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """x (..., D), weight and bias (D,) -> LayerNorm of x, in x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def is_layer_norm(norm: Callable[..., Tensor]) -> bool:
    """True for a backend's function if it is layer_norm, under whichever name, also on rounded inputs."""
    return inspect.unwrap(norm) is layer_norm
