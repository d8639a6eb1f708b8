"""Measure whether a norm computes the contract's formula, whatever its precision and its order of rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import Backend, InputError, reference
from kernels.form import LLAMA, Form

# In bfloat16 the formula is off by up to 0.9 %, and by 1.4 % in Triton's interpreter, which truncates. Norms of another
# kind are further off on the rows below: LayerNorm, an eps ten times off, 1 + weight, statistics of another axis.
BOUND = 0.02


@torch.no_grad()
def is_the_formula(norm: Backend, hidden_size: int, eps: float, device: torch.device, form: Form = LLAMA) -> bool:
    """True if rms_norm and add_rms_norm of `norm` are within 2 % of the formula on float32 rows (2, 3, hidden_size).

    The formula is that of `form`. Errors are measured against the largest element of their row. NaN is not the formula.
    Raises InputError for other shapes than x's, and what the norm itself raises. The random state stays as it was.
    """
    generator = torch.Generator().manual_seed(0)
    # Rows with a mean, in six sizes, where eps is felt in the smaller ones. float16 holds little below 1e-4.
    sizes = max(eps**0.5, 1e-4) * torch.tensor([[1.0, 4, 16], [2, 8, 32]])[..., None]  # (2, 3, 1)
    x, residual = (sizes * (torch.randn(2, 3, hidden_size, generator=generator) + 0.5) for _ in range(2))
    weight = torch.rand(hidden_size, generator=generator) / 2 + 0.25  # far from 0 and from 1
    x_wide, residual_wide, weight_wide = (tensor.double() for tensor in (x, residual, weight))
    options = form._asdict()
    expected = (
        reference.rms_norm(x_wide, weight_wide, eps, **options),
        *reference.add_rms_norm(x_wide, residual_wide, weight_wide, eps, **options),
    )
    x, residual, weight = (tensor.to(device) for tensor in (x, residual, weight))
    # A norm under torch.compile runs uncompiled: it would be compiled for these shapes, and again for the model's.
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
    ):
        found = norm.rms_norm(x, weight, eps), *norm.add_rms_norm(x, residual, weight, eps)
    if (shapes := [tuple(tensor.shape) for tensor in found]) != [tuple(x.shape)] * 3:
        raise InputError(f"the norm {norm.description} returns shapes {shapes} for x of {tuple(x.shape)}; expected x's")
    return all(map(_is_close, found, expected))


def _is_close(found: Tensor, expected: Tensor) -> bool:
    error = (found.cpu().double() - expected).abs().amax(-1)
    return bool((error <= BOUND * expected.abs().amax(-1)).all())  # False if the error is NaN
