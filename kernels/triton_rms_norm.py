"""RMSNorm in Triton, forward and backward, as operators that autograd and torch.compile understand.

The kernels work on tiles of [ROWS, COLS] with COLS the width rounded up to a power of two. On a GPU a tile is
small enough for the registers; in Triton's interpreter, where each program costs a millisecond of Python, it
is tall. The formula and its order of rounding are those of kernels/reference.py. With x_hat = x * rstd:

    dx      = rstd * (weight * dy - x_hat * mean(x_hat * weight * dy))
    dweight = sum over rows of dy * (x_hat rounded to x's dtype)
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from kernels import InputError, interpret_without_gpu
from kernels.reference import wide_dtype

if importlib.util.find_spec("triton") is None:
    raise InputError("--norm triton: the package triton is not installed; pip install triton, or use --norm torch")
interpret_without_gpu()  # before the import, which is when Triton reads it

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DESCRIPTION = "triton (in its interpreter: right, but no measure of its speed)" if INTERPRETED else "triton"
if INTERPRETED and isinstance(tl.sum, triton.JITFunction):
    raise InputError(
        "--norm triton: triton was imported before kernels.triton_rms_norm, too early to run in its interpreter; "
        "set TRITON_INTERPRET=1 in the environment, or import kernels.triton_rms_norm first"
    )


def check_device(device: torch.device) -> None:
    """Raises InputError where the kernels can't take tensors of `device`."""
    if device.type != "cuda" and not INTERPRETED:
        raise InputError(
            f"--norm triton: compiled kernels take GPU tensors and the device is '{device}'; "
            "use --device cuda, set TRITON_INTERPRET=1, or use --norm torch"
        )


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, n_rows,
    D: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    wide = rstd_ptr.dtype.element_ty  # float32, or float64 for a float64 x
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # since rows * D may pass 2^31
    cols = tl.arange(0, COLS)[None, :]
    in_tile = (rows < n_rows) & (cols < D)

    x = tl.load(x_ptr + rows * D + cols, mask=in_tile, other=0.0).to(wide)  # (ROWS, COLS)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + EPS)  # (ROWS, 1)
    x_hat = (x * rstd).to(x_ptr.dtype.element_ty)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(wide)
    y = x_hat.to(wide) * weight
    tl.store(y_ptr + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=in_tile)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, n_rows, n_tiles,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # Each program walks over every n-th tile and keeps its own sum for dweight: no atomics, so the same bits
    # come out of every run.
    wide = rstd_ptr.dtype.element_ty
    program = tl.program_id(0)
    cols = tl.arange(0, COLS)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(wide)  # (1, COLS)
    dweight = tl.full((1, COLS), 0.0, wide)
    tile = program
    while tile < n_tiles:  # no range: the interpreter of Triton 3.2 can't count with NumPy 2.4
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        in_tile = (rows < n_rows) & (cols < D)
        x = tl.load(x_ptr + rows * D + cols, mask=in_tile, other=0.0).to(wide)  # (ROWS, COLS)
        dy = tl.load(dy_ptr + rows * D + cols, mask=in_tile, other=0.0).to(wide)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)  # (ROWS, 1)

        x_hat = x * rstd
        dweight += tl.sum(dy * x_hat.to(x_ptr.dtype.element_ty).to(wide), axis=0, keep_dims=True)
        weighted = dy * weight
        projection = tl.sum(x_hat * weighted, axis=1, keep_dims=True) / D  # (ROWS, 1)
        dx = rstd * (weighted - x_hat * projection)
        tl.store(dx_ptr + rows * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=in_tile)
        tile += tl.num_programs(0)
    tl.store(partial_ptr + program * D + cols, dweight, mask=cols < D)


def _tile(n_rows: int, width: int) -> tuple[int, int, int]:
    """ROWS, COLS and warps for one program. Fixed, not tuned: no warm-up, and the same bits every run."""
    cols = triton.next_power_of_2(width)
    if INTERPRETED:  # NumPy does the work: few programs, each with arrays that still fit the cache
        rows = max(1, min(2**18 // cols, triton.next_power_of_2(n_rows)))
        return rows, cols, 1
    rows = max(1, 1024 // cols)
    return rows, cols, min(32, max(1, rows * cols // 512))  # about 16 elements a thread, until 32 warps


@torch.library.custom_op("rmsllama::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y of x's shape and dtype, and rstd = 1 / sqrt(mean(x^2) + eps) of shape x.shape[:-1], for the backward."""
    width = x.shape[-1]
    x, weight = x.contiguous(), weight.contiguous()
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=wide_dtype(x))
    n_rows = rstd.numel()
    if x.numel():
        rows, cols, warps = _tile(n_rows, width)
        tile = {"D": width, "ROWS": rows, "COLS": cols, "num_warps": warps}
        with torch.cuda.device_of(x):  # Triton launches on the current GPU
            _forward_kernel[(triton.cdiv(n_rows, rows),)](x, weight, y, rstd, n_rows, EPS=eps, **tile)
    return y, rstd


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=wide_dtype(x))


@torch.library.custom_op("rmsllama::rms_norm_backward", mutates_args=())
def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx of x's shape and dtype, dweight of the weight's."""
    width, n_rows = x.shape[-1], rstd.numel()
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    rows, cols, warps = _tile(n_rows, width)
    n_programs = n_tiles = triton.cdiv(n_rows, rows)
    if not INTERPRETED:
        n_programs = min(n_tiles, 4 * torch.cuda.get_device_properties(x.device).multi_processor_count)
    partial = x.new_empty((n_programs, width), dtype=rstd.dtype)
    tile = {"D": width, "ROWS": rows, "COLS": cols, "num_warps": warps}
    with torch.cuda.device_of(x):
        _backward_kernel[(n_programs,)](dy, x, weight, rstd, dx, partial, n_rows, n_tiles, **tile)
    return dx, partial.sum(0).to(weight.dtype)


@_rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(weight, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor, _drstd: Tensor) -> tuple:
    return *_rms_norm_backward(dy, *ctx.saved_tensors), None


_rms_norm.register_autograd(_backward, setup_context=_save_for_backward)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The contract of kernels/reference.py, in one kernel forward and one backward."""
    if weight.shape != x.shape[-1:] or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)} and weight {tuple(weight.shape)}; expected (..., D), (D,)"
        )
    return _rms_norm(x, weight, eps)[0]
