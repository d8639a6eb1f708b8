"""Norms of tensors that are divided over processes, by columns or by rows.

    split_hidden    a process holds some of each row's D elements, and of the weight, as in tensor parallel
    split_rows      a process holds some of the rows, and all of the weight, as in sequence parallel

With shards x_r and weight_r of D_r elements, w_r = offset + weight_r, and sums over all processes:

    rstd       = 1 / sqrt(sum of sum(x_r^2) / D + eps)
    y_r        = x_r * rstd * w_r
    projection = sum of sum(x_hat_r * w_r * dy_r) / D
    dx_r       = rstd * (w_r * dy_r - x_hat_r * projection)

So each direction has one all-reduce of one number a row, in the dtype of the statistics, and dweight is complete where
it is. With split_rows nothing is summed but dweight. Precision and rounding are the contract's (kernels/reference.py).
Every process of the group has to call the norm, and its backward, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Backend, InputError, add_then
from kernels.reference import scale, wide_dtype


def split_hidden(backend: Backend, group: dist.ProcessGroup | None, width: int) -> Backend:
    """The same norm of rows of `width` elements, of which each process of the group has a part: x and y (..., D_r).

    The parts may be unequal. None is the group of all processes. The weight's gradient is that of its own part.
    Raises InputError for a backend that takes no statistics from outside.
    """
    if backend.name not in SPLIT:
        raise InputError(
            f"norm '{backend.description}' can't be split over processes, since it computes a row's statistics and "
            f"its result in one; use --norm {' or '.join(SPLIT)}"
        )
    rms_norm, add_rms_norm = SPLIT[backend.name]()
    options = {**backend.form._asdict(), "group": group, "width": width}
    description = f"{backend.description}, hidden axis split over {dist.get_world_size(group)} processes"
    return Backend(description, partial(rms_norm, **options), partial(add_rms_norm, **options), backend.form)


def split_rows(backend: Backend, group: dist.ProcessGroup | None) -> Backend:
    """The same norm where each process of the group has some of the rows: dweight is summed over the processes.

    Any backend will do. None is the group of all processes.
    """

    def whole(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: _SummedGradient.apply(parameter, group) for name, parameter in parameters.items()}

    def rms_norm(x: Tensor, weight: Tensor, eps: float, **bias: Tensor) -> Tensor:
        return backend.rms_norm(x, _SummedGradient.apply(weight, group), eps, **whole(bias))

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, **bias: Tensor) -> tuple[Tensor, Tensor]:
        return backend.add_rms_norm(x, residual, _SummedGradient.apply(weight, group), eps, **whole(bias))

    description = f"{backend.description}, rows split over {dist.get_world_size(group)} processes"
    return backend._replace(description=description, rms_norm=rms_norm, add_rms_norm=add_rms_norm, name="")


class _Sum(torch.autograd.Function):
    """Sum over the processes. Its gradient is a sum as well: each process's y depends on it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, ctx.group), None


class _SummedGradient(torch.autograd.Function):
    """The tensor itself, whose gradient is summed over the processes, in float32 where it is narrower."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient.to(wide_dtype(gradient)), ctx.group).to(gradient.dtype), None


def _sum_of_squares(wide: Tensor) -> Tensor:
    return wide.square().sum(-1, keepdim=True)


def _scale_by(
    mean_square: Tensor, wide: Tensor, dtype: torch.dtype, weight: Tensor, eps: float, offset: float, round_once: bool
) -> Tensor:
    return scale(wide * torch.rsqrt(mean_square + eps), dtype, weight, offset, round_once)


Norms = tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]


def _formula(sum_of_squares: Callable[..., Tensor], scale_by: Callable[..., Tensor]) -> Norms:
    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, offset: float, round_once: bool,
        group: dist.ProcessGroup | None, width: int,
    ) -> Tensor:  # fmt: skip
        wide = x.to(wide_dtype(x))  # outside of both graphs: the gradient of each is added in float32, then rounded
        mean_square = _Sum.apply(sum_of_squares(wide), group) / width
        return scale_by(mean_square, wide, x.dtype, weight, eps, offset, round_once)

    return rms_norm, add_then(rms_norm)


def _reference() -> Norms:
    return _formula(_sum_of_squares, _scale_by)


def _compiled() -> Norms:
    """The two halves compiled, with the all-reduce between them."""
    from kernels import compiled
    from kernels.torch_version import TORCH_2_13

    compiled_sum = compiled.compile_whole(_sum_of_squares)
    # Before 2.13 Inductor would leave the rounding of x_hat out, as it would in kernels/compiled.py.
    return _formula(compiled_sum, compiled.compile_whole(_scale_by) if TORCH_2_13 else _scale_by)


def _triton() -> Norms:
    from kernels import triton_split

    return triton_split.rms_norm, triton_split.add_rms_norm


SPLIT: dict[str, Callable[[], Norms]] = {"reference": _reference, "compile": _compiled, "triton": _triton}
