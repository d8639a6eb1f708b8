"""RMSNorm in Triton of rows that are divided over processes (kernels/split.py).

A row's sum of squares and its projection leave the kernels, to be summed over the processes, and come back to them.
Scaling and the gradients are those of kernels/triton_rms_norm.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import wide_dtype
from kernels.triton_rms_norm import (
    _as_rows,
    _check,
    _pointers,
    _row_pointers,
    _scale,
    forward_tile,
    launch_backward,
    launch_projection,
    one_launch,
    wrap_triton,
)


@triton.jit
def _squares_kernel(
    h_ptr, h_outer, h_inner, squares_ptr, n_rows, n_inner,
    D: tl.constexpr, ALIGN: tl.constexpr, H_COL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sum of squares of every row."""
    wide = squares_ptr.dtype.element_ty
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    h_rows = _row_pointers(h_ptr, h_outer, h_inner, rows, n_inner, ALIGN)
    squares = tl.full((ROWS, COLS), 0.0, wide)
    for start in range(0, D, COLS):
        cols = start + tl.arange(0, COLS)[None, :]
        h = tl.load(h_rows + cols * H_COL, mask=(rows < n_rows) & (cols < D), other=0.0).to(wide)
        squares += h * h
    tl.store(squares_ptr + rows, tl.sum(squares, axis=1, keep_dims=True), mask=rows < n_rows)


@triton.jit
def _scale_kernel(
    h_ptr, h_outer, h_inner, weight_ptr, rstd_ptr, y_ptr, n_rows, n_inner,
    D: tl.constexpr, ALIGN: tl.constexpr, H_COL: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    ROUND_ONCE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y of rows whose rstd is known."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    h_rows = _row_pointers(h_ptr, h_outer, h_inner, rows, n_inner, ALIGN)
    y_rows = y_ptr + rows.to(tl.int64) * D
    rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)  # (ROWS, 1)
    for start in range(0, D, COLS):
        cols = start + tl.arange(0, COLS)[None, :]
        in_tile = (rows < n_rows) & (cols < D)
        h = tl.load(h_rows + cols * H_COL, mask=in_tile, other=0.0).to(rstd.dtype)
        y = _scale(h, rstd, weight_ptr, cols, D, WEIGHT, OFFSET, ROUND_ONCE, y_ptr.dtype.element_ty)
        tl.store(y_rows + cols, y, mask=in_tile)


def launch_squares(h: Tensor) -> Tensor:
    """Sum of squares of every row, of shape h.shape[:-1], in the dtype of h's statistics."""
    squares = h.new_zeros(h.shape[:-1], dtype=wide_dtype(h))
    if h.numel():
        (rows,), align = _as_rows(h)
        tile = forward_tile(h, align)
        with one_launch, torch.cuda.device_of(h):
            wrap_triton(_squares_kernel)[(triton.cdiv(squares.numel(), tile["ROWS"]),)](
                *_pointers(align, rows), squares, squares.numel(), rows.shape[1],
                D=int(h.shape[-1]), ALIGN=align, H_COL=rows.stride(2), **tile,
            )  # fmt: skip
    return squares


def launch_scale(h: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, round_once: bool) -> Tensor:
    """y of h's shape and dtype."""
    y = h.new_empty(h.shape)
    if h.numel():
        (rows,), align = _as_rows(h)
        tile = forward_tile(h, align)
        with one_launch, torch.cuda.device_of(h):
            wrap_triton(_scale_kernel)[(triton.cdiv(rstd.numel(), tile["ROWS"]),)](
                *_pointers(align, rows), rstd if weight is None else weight.contiguous(), rstd, y, rstd.numel(),
                rows.shape[1], D=int(h.shape[-1]), ALIGN=align, H_COL=rows.stride(2),
                WEIGHT=weight is not None, OFFSET=offset, ROUND_ONCE=round_once, **tile,
            )  # fmt: skip
    return y


class _SplitRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float,
        offset: float, round_once: bool, group: dist.ProcessGroup | None, width: int,
    ) -> Any:  # fmt: skip
        h = x if residual is None else x + residual
        squares = launch_squares(h)
        dist.all_reduce(squares, group=group)
        rstd = torch.rsqrt(squares / width + eps)
        ctx.adds, ctx.form, ctx.group = residual is not None, (offset, round_once), group
        ctx.share = h.shape[-1] / width  # of this process's mean in that of whole rows
        ctx.set_materialize_grads(False)  # an output that nobody used arrives as None, not as zeros
        ctx.save_for_backward(h, weight, rstd)
        y = launch_scale(h, weight, rstd, offset, round_once)
        return y if residual is None else (y, h)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None) -> tuple:
        if torch.is_grad_enabled():  # with create_graph alone
            raise NotImplementedError("--norm triton can't be differentiated twice; use --norm reference, which can")
        wants_dweight, dx, dweight = ctx.needs_input_grad[2], dh, None
        if dy is not None:
            (h, weight, rstd), (offset, round_once) = ctx.saved_tensors, ctx.form
            projection = launch_projection(dy, h, weight, rstd, offset) * ctx.share
            if any(ctx.needs_input_grad[:2]):
                dist.all_reduce(projection, group=ctx.group)
            dx, dweight = launch_backward(dy, dh, h, weight, rstd, offset, round_once, wants_dweight, projection)
        # Where x or the residual is narrower than h, autograd itself casts to its dtype.
        return dx, dx if ctx.adds else None, dweight if wants_dweight else None, *[None] * 5


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """`options`: offset, round_once, group and width, the number of elements of a whole row."""
    _check(x, None, weight, eps, options["offset"])
    return _SplitRMSNorm.apply(x, None, weight, eps, *_in_order(**options))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **options: Any
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, eps, options["offset"])
    return _SplitRMSNorm.apply(x, residual, weight, eps, *_in_order(**options))


def _in_order(offset: float, round_once: bool, group: dist.ProcessGroup | None, width: int) -> tuple:
    return offset, round_once, group, width
