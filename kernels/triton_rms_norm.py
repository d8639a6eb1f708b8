"""RMSNorm in Triton, forward and backward, alone or fused with the residual's addition.

Formula and forms are those of kernels/reference.py. With h = x + residual, x_hat = h * rstd and w = offset + weight:

    dx      = rstd * (w * dy - x_hat * mean(x_hat * w * dy)) + dh
    dweight = sum over rows of dy * (x_hat, rounded to h's dtype unless round_once)

The kernels work on tiles of [ROWS, COLS]. A row that fits the registers is one tile wide and is read once. A wider
one is walked over in tiles: forward reads it a second time, from the cache, to scale it; backward finds the means in
a first kernel and everything else in a second one.

On a machine without a GPU they run as compiled for one, on an emulated one (kernels/emulated). With TRITON_INTERPRET=1
they run in Triton's interpreter, which is slower and truncates bfloat16.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import InputError
from kernels.emulated import DEFAULT, GPUS, Gpu, description, emulate_without_gpu, emulated_gpu, interpreted
from kernels.reference import wide_dtype
from kernels.torch_version import TORCH_2_13

if importlib.util.find_spec("triton") is None:
    raise InputError(
        "--norm triton: triton is not installed; pip install triton (Linux alone has it), or use --norm torch"
    )
import triton
import triton.language as tl

emulate_without_gpu()
INTERPRETED = interpreted()
DESCRIPTION = "triton (in its interpreter: right, but no measure of its speed)" if INTERPRETED else "triton"
if emulated_gpu():
    DESCRIPTION = description()
# torch.compile can look into a triton_op, unless kernels are interpreted, or emulated: Inductor would compile them anew
# for the CPU, and Triton has no compiler for one. In torch 2.6 it changes the strides of tensors after the launchers
# have read them.
LOOKED_INTO = TORCH_2_13 and not INTERPRETED and not emulated_gpu()
operator = torch.library.triton_op if LOOKED_INTO else torch.library.custom_op
wrap_triton = torch.library.wrap_triton if LOOKED_INTO else lambda kernel: kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The interpreter patches Triton's language for the time of a launch, in all threads.
one_launch = threading.Lock() if INTERPRETED else contextlib.nullcontext()


def check_device(device: torch.device) -> None:
    """Raise InputError where the kernels can't take tensors of `device`."""
    if device.type != "cuda" and not INTERPRETED and not emulated_gpu():
        raise InputError(
            f"--norm triton: compiled kernels take GPU tensors and the device is '{device}'; "
            "use --device cuda, --emulate sm_90, or --norm torch"
        )


@triton.jit
def _row_pointers(pointer, outer_stride, inner_stride, rows, n_inner, ALIGN: tl.constexpr):
    """Pointers to the first element of each of `rows`, (ROWS, 1); the strides are in units of ALIGN."""
    outer, inner = (rows // n_inner).to(tl.int64), (rows % n_inner).to(tl.int64)  # offsets may pass 2^31
    return pointer + (outer * outer_stride + inner * inner_stride) * ALIGN


@triton.jit
def _load_weight(weight_ptr, cols, D: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr):
    """OFFSET + weight, (1, COLS), in the dtype WIDE."""
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(WIDE)
    if OFFSET != 0.0:
        weight += OFFSET
    return weight


@triton.jit
def _scale(
    h, rstd, weight_ptr, cols, D: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    ROUND_ONCE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """y, in the dtype NARROW, of a tile of h in the dtype of rstd."""
    y = h * rstd
    if WEIGHT:
        weight = _load_weight(weight_ptr, cols, D, OFFSET, rstd.dtype)
        if not ROUND_ONCE:
            y = y.to(NARROW).to(rstd.dtype)
        y *= weight
    return y.to(NARROW)


@triton.jit
def _forward_kernel(
    x_ptr, x_outer, x_inner, residual_ptr, residual_outer, residual_inner,
    weight_ptr, y_ptr, h_ptr, rstd_ptr, n_rows, n_inner,
    D: tl.constexpr, ALIGN: tl.constexpr, X_COL: tl.constexpr, RESIDUAL_COL: tl.constexpr, EPS: tl.constexpr,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND_ONCE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y, rstd and, if ADD, h = x + residual."""
    wide = rstd_ptr.dtype.element_ty  # float32, or float64 for a float64 x
    narrow = y_ptr.dtype.element_ty
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    x_rows = _row_pointers(x_ptr, x_outer, x_inner, rows, n_inner, ALIGN)
    residual_rows = _row_pointers(residual_ptr, residual_outer, residual_inner, rows, n_inner, ALIGN)
    out_rows = rows.to(tl.int64) * D

    squares = tl.full((ROWS, COLS), 0.0, wide)
    h = squares
    for start in range(0, D, COLS):
        cols = start + tl.arange(0, COLS)[None, :]
        in_tile = (rows < n_rows) & (cols < D)
        h = tl.load(x_rows + cols * X_COL, mask=in_tile, other=0.0).to(wide)  # (ROWS, COLS)
        if ADD:
            h += tl.load(residual_rows + cols * RESIDUAL_COL, mask=in_tile, other=0.0).to(wide)
            h = h.to(narrow)
            tl.store(h_ptr + out_rows + cols, h, mask=in_tile)
            h = h.to(wide)
        squares += h * h
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / D + EPS)  # (ROWS, 1)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)

    if ADD and COLS < D:
        tl.debug_barrier()  # before a thread reads what another one has stored
    for start in range(0, D, COLS):
        cols = start + tl.arange(0, COLS)[None, :]
        in_tile = (rows < n_rows) & (cols < D)
        if COLS < D:  # else h is still in the registers
            if ADD:
                h = tl.load(h_ptr + out_rows + cols, mask=in_tile, other=0.0).to(wide)
            else:
                h = tl.load(x_rows + cols * X_COL, mask=in_tile, other=0.0).to(wide)
        y = _scale(h, rstd, weight_ptr, cols, D, WEIGHT, OFFSET, ROUND_ONCE, narrow)
        tl.store(y_ptr + out_rows + cols, y, mask=in_tile)


@triton.jit
def _projection_kernel(
    dy_ptr, dy_outer, dy_inner, h_ptr, h_outer, h_inner, weight_ptr, rstd_ptr, projection_ptr, n_rows, n_inner,
    D: tl.constexpr, ALIGN: tl.constexpr, DY_COL: tl.constexpr, H_COL: tl.constexpr, WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """mean(x_hat * weight * dy) of every row, where the backward kernel doesn't see all of a row at once."""
    wide = rstd_ptr.dtype.element_ty
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    dy_rows = _row_pointers(dy_ptr, dy_outer, dy_inner, rows, n_inner, ALIGN)
    h_rows = _row_pointers(h_ptr, h_outer, h_inner, rows, n_inner, ALIGN)
    products = tl.full((ROWS, COLS), 0.0, wide)
    for start in range(0, D, COLS):
        cols = start + tl.arange(0, COLS)[None, :]
        in_tile = (rows < n_rows) & (cols < D)
        h = tl.load(h_rows + cols * H_COL, mask=in_tile, other=0.0).to(wide)
        dy = tl.load(dy_rows + cols * DY_COL, mask=in_tile, other=0.0).to(wide)
        if WEIGHT:
            dy *= _load_weight(weight_ptr, cols, D, OFFSET, wide)
        products += h * dy
    rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
    projection = tl.sum(products, axis=1, keep_dims=True) * rstd / D
    tl.store(projection_ptr + rows, projection, mask=rows < n_rows)


@triton.jit
def _backward_kernel(
    dy_ptr, dy_outer, dy_inner, dh_ptr, dh_outer, dh_inner, h_ptr, h_outer, h_inner,
    weight_ptr, rstd_ptr, projection_ptr, dx_ptr, partial_ptr, n_rows, n_inner, n_steps,
    D: tl.constexpr, ALIGN: tl.constexpr, DY_COL: tl.constexpr, DH_COL: tl.constexpr, H_COL: tl.constexpr,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, DWEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    ROUND_ONCE: tl.constexpr, PROJECTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and of dweight one sum for each program, which walks over every n-th tile of its columns.

    There are no atomics, so every run has the same bits.
    """
    wide = rstd_ptr.dtype.element_ty
    narrow = dx_ptr.dtype.element_ty
    program = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    if WEIGHT:
        weight = _load_weight(weight_ptr, cols, D, OFFSET, wide)
    dweight = tl.full((ROWS, COLS), 0.0, wide)
    for step in tl.range(0, n_steps, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]  (Triton's stub)
        rows = ((step * tl.num_programs(0) + program) * ROWS + tl.arange(0, ROWS))[:, None]
        dy_rows = _row_pointers(dy_ptr, dy_outer, dy_inner, rows, n_inner, ALIGN)
        h_rows = _row_pointers(h_ptr, h_outer, h_inner, rows, n_inner, ALIGN)
        in_tile = (rows < n_rows) & (cols < D)
        h = tl.load(h_rows + cols * H_COL, mask=in_tile, other=0.0).to(wide)
        dy = tl.load(dy_rows + cols * DY_COL, mask=in_tile, other=0.0).to(wide)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)  # (ROWS, 1)

        x_hat = h * rstd
        if DWEIGHT:
            if ROUND_ONCE:
                dweight += dy * x_hat
            else:
                dweight += dy * x_hat.to(narrow).to(wide)
        if WEIGHT:
            dy *= weight
        if PROJECTED:
            projection = tl.load(projection_ptr + rows, mask=rows < n_rows, other=0.0)
        else:
            projection = tl.sum(x_hat * dy, axis=1, keep_dims=True) / D  # (ROWS, 1)
        dx = rstd * (dy - x_hat * projection)
        if ADD:
            dh_rows = _row_pointers(dh_ptr, dh_outer, dh_inner, rows, n_inner, ALIGN)
            dx += tl.load(dh_rows + cols * DH_COL, mask=in_tile, other=0.0).to(wide)
        tl.store(dx_ptr + rows.to(tl.int64) * D + cols, dx.to(narrow), mask=in_tile)
    if DWEIGHT:
        total = tl.sum(dweight, axis=0, keep_dims=True)
        tl.store(partial_ptr + program * D + cols, total, mask=cols < D)


def _tile(x: Tensor, smallest: int, whole_row: int, part: int, aligned: bool) -> dict[str, int]:
    """ROWS, COLS and warps of a program. Fixed, not tuned: no warm-up, and the same bits every run.

    A tile is a row if that has up to `whole_row` elements, as many rows as fit `smallest` if they are short, and
    `part` elements of one row if it is longer. 16 elements a thread keep two or four loads of 128 bits in flight and
    leave registers for the arithmetic, 8 also for what a loop over columns carries; rows that aren't aligned need an
    address an element. scripts/check_codegen.py shows that none of it spills.
    """
    cols = triton.next_power_of_2(int(x.shape[-1]))
    widest = whole_row * 4 // max(4, x.element_size())  # float64 takes two registers
    if not aligned:
        widest = min(widest, 4096)
    if cols > widest:
        cols = min(part, widest)
    rows = max(1, smallest // cols)
    threads = min(1024, max(128, rows * cols // (16 if aligned and cols >= x.shape[-1] else 8)))
    return {"ROWS": rows, "COLS": cols, "num_warps": threads // _gpu(x.device).warp_size}


def forward_tile(y: Tensor, align: int) -> dict[str, int]:
    whole_row = 32768 if y.element_size() == 2 else 16384
    return _tile(y, 2048, whole_row, part=4096, aligned=align * y.element_size() >= 16)


def _persistent_programs(n_tiles: int, warps: int, device: torch.device) -> tuple[int, int]:
    """Programs that fill the GPU, and the number of tiles that each of them walks over."""
    # 512 threads on every multiprocessor are enough, since loads run ahead; more would only add partial sums.
    each = max(1, 512 // (warps * _gpu(device).warp_size))
    n_steps = triton.cdiv(n_tiles, each * _gpu(device).multi_processor_count)
    return triton.cdiv(n_tiles, n_steps), n_steps


def _gpu(device: torch.device) -> torch._C._CudaDeviceProperties | Gpu:
    """The device, the emulated GPU, or for Triton's interpreter the GPU that would be emulated without it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device)
    return emulated_gpu() or GPUS[DEFAULT]


def _as_rows(*tensors: Tensor | None) -> tuple[list[Tensor], int]:
    """The tensors as views (outer, inner, D), and the largest power of two up to 16 that divides their row strides.

    The last axis has stride 1 or 0. A tensor is copied where it has another, or where its rows have more than two
    strides, as in a transposed (batch, heads, tokens, D).
    """
    given = [t if t.stride(-1) in (0, 1) else t.contiguous() for t in tensors if t is not None]
    shape = given[0].shape
    # Between axes i and i + 1 the rows of some tensor don't follow each other at one distance.
    breaks = [i for i in range(len(shape) - 2) if any(t.stride(i) != t.stride(i + 1) * shape[i + 1] for t in given)]
    inner = math.prod(shape[breaks[0] + 1 : -1]) if breaks else 1
    rows = [t.reshape(-1, inner, shape[-1]) for t in given]
    return rows, math.gcd(16, *(t.stride(i) for t in rows for i in (0, 1) if t.shape[i] > 1))


def _pointers(align: int, *rows: Tensor) -> list[Tensor | int]:
    """Each tensor and its two row strides, in units of `align`: multiplied by it, a stride is known to be aligned."""
    return [argument for t in rows for argument in (t, t.stride(0) // align, t.stride(1) // align)]


def _empty_outputs(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    h = x.new_empty(0 if residual is None else x.shape, dtype=dtype)
    return y, h, x.new_empty(x.shape[:-1], dtype=wide_dtype(y))


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, round_once: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y and h of x's shape, and rstd = 1 / sqrt(mean(h^2) + eps) of shape x.shape[:-1]. No residual: h is empty."""
    y, h, rstd = _empty_outputs(x, residual)
    if not y.numel():
        return y, h, rstd
    (x, *others), align = _as_rows(x, residual)
    tile = forward_tile(y, align)
    r = others[0] if others else h.view(0, 1, 1)  # empty: of x, passed twice, a compiler would make a copy
    with one_launch, torch.cuda.device_of(x):  # Triton launches on the current GPU
        wrap_triton(_forward_kernel)[(triton.cdiv(rstd.numel(), tile["ROWS"]),)](
            *_pointers(align, x, r),
            h if weight is None else weight.contiguous(), y, h, rstd, rstd.numel(), x.shape[1],
            D=int(x.shape[2]), ALIGN=align, X_COL=x.stride(2), RESIDUAL_COL=r.stride(2), EPS=eps,
            ADD=residual is not None, WEIGHT=weight is not None, OFFSET=offset, ROUND_ONCE=round_once, **tile,
        )  # fmt: skip
    return y, h, rstd


def launch_projection(dy: Tensor, h: Tensor, weight: Tensor | None, rstd: Tensor, offset: float) -> Tensor:
    """mean(x_hat * weight * dy) over each row of h, of rstd's shape."""
    if not h.numel():
        return torch.zeros_like(rstd)
    projection = torch.empty_like(rstd)
    (dy, h), align = _as_rows(dy, h)
    tile = _tile(h, 1024, 8192, part=8192, aligned=align * h.element_size() >= 16)
    with one_launch, torch.cuda.device_of(h):
        wrap_triton(_projection_kernel)[(triton.cdiv(rstd.numel(), tile["ROWS"]),)](
            *_pointers(align, dy, h), rstd if weight is None else weight.contiguous(), rstd, projection,
            rstd.numel(), h.shape[1], D=int(h.shape[2]), ALIGN=align, DY_COL=dy.stride(2), H_COL=h.stride(2),
            WEIGHT=weight is not None, OFFSET=offset, **tile,
        )  # fmt: skip
    return projection


def launch_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor,
    offset: float, round_once: bool, wants_dweight: bool, projection: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx of h's shape and dtype, and dweight of the weight's; dweight is empty unless it is wanted.

    `projection` is launch_projection's result where h is a part of its rows, whose mean is that of the whole rows.
    """
    dx, dweight = _empty_gradients(h, weight, wants_dweight)
    if not h.numel():
        return dx, dweight.zero_()
    n_rows, width = rstd.numel(), int(h.shape[-1])
    (dy_rows, h_rows, *others), align = _as_rows(dy, h, dh)
    unused = rstd  # passed where a kernel reads nothing
    g = others[0] if others else unused.view(-1, 1, 1)
    aligned = align * h.element_size() >= 16
    tile = _tile(h, 1024, 8192, part=4096, aligned=aligned)
    # How many tiles are under way: as many as shared memory holds on every GPU. Loads of less than 128 bits don't pay.
    tile_bytes = (2 if dh is None else 3) * tile["ROWS"] * tile["COLS"] * h.element_size()
    stages = min(3 if tile["COLS"] <= 4096 else 2, 1 + 96 * 1024 // tile_bytes) if aligned else 1
    if projection is None and tile["COLS"] < width:
        projection = launch_projection(dy, h, weight, rstd, offset)
    with one_launch, torch.cuda.device_of(h):
        n_programs, n_steps = _persistent_programs(triton.cdiv(n_rows, tile["ROWS"]), tile["num_warps"], h.device)
        partial = rstd.new_empty((n_programs, width) if wants_dweight else 0)
        wrap_triton(_backward_kernel)[(n_programs, triton.cdiv(width, tile["COLS"]))](
            *_pointers(align, dy_rows, g, h_rows), unused if weight is None else weight.contiguous(), rstd,
            unused if projection is None else projection, dx, partial, n_rows, h_rows.shape[1], n_steps,
            D=width, ALIGN=align, DY_COL=dy_rows.stride(2), DH_COL=g.stride(2), H_COL=h_rows.stride(2),
            ADD=dh is not None, WEIGHT=weight is not None, DWEIGHT=wants_dweight, OFFSET=offset,
            ROUND_ONCE=round_once, PROJECTED=projection is not None, STAGES=stages, **tile,
        )  # fmt: skip
    return dx, partial.sum(0).to(dweight.dtype) if wants_dweight else dweight


def _empty_gradients(h: Tensor, weight: Tensor | None, wants_dweight: bool) -> tuple[Tensor, Tensor]:
    dweight = weight.new_empty(weight.shape) if weight is not None and wants_dweight else h.new_empty(0)
    return h.new_empty(h.shape), dweight


def _differentiable(operator: Any, fake: Callable, derivative: Callable, save: Callable) -> Callable[..., Any]:
    """`operator` with two equal derivatives: its own, for torch.compile, and a Function's, for torch.func."""
    operator.register_fake(fake)
    operator.register_autograd(derivative, setup_context=save)

    class RMSNorm(torch.autograd.Function):
        forward = staticmethod(lambda *args: operator(*args))
        setup_context = staticmethod(save)
        backward = staticmethod(derivative)
        jvp = staticmethod(_no_forward_mode)
        generate_vmap_rule = True

    return lambda *args: (operator if torch.compiler.is_compiling() else RMSNorm.apply)(*args)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, residual, weight, _, ctx.offset, ctx.round_once = inputs
    _, h, rstd = output
    ctx.adds = residual is not None
    ctx.set_materialize_grads(False)  # an output that nobody used arrives as None, not as zeros
    ctx.mark_non_differentiable(*([rstd] if any(ctx.needs_input_grad[:2]) else [h, rstd]))
    saved = h if ctx.adds else x
    saved = saved.clone() if saved.is_inference() else saved  # autograd refuses to save one made in inference mode
    ctx.save_for_backward(saved, weight, rstd)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: None) -> tuple:
    wants_dweight = ctx.needs_input_grad[2]
    if not ctx.adds:
        dh = None  # of an empty h
    dx, dweight = dh, None
    if dy is not None:
        options = ctx.offset, ctx.round_once, wants_dweight
        dx, dweight = _rms_norm_backward(dy, dh, *ctx.saved_tensors, *options)
    # Where x or the residual is narrower than h, autograd itself casts to its dtype.
    return dx, dx if ctx.adds else None, dweight if wants_dweight else None, None, None, None


def _no_double_backward(ctx: Any, *_: Tensor) -> tuple:
    raise NotImplementedError("--norm triton can't be differentiated twice; use --norm reference, which can")


def _no_forward_mode(ctx: Any, *_: Tensor) -> tuple:
    raise NotImplementedError("--norm triton has no forward-mode derivative; use --norm reference, which has")


_rms_norm = _differentiable(
    operator("rmsllama::rms_norm", mutates_args=())(launch_forward),
    lambda x, residual, *_: _empty_outputs(x, residual),
    _backward,
    _save_for_backward,
)
_rms_norm_backward = _differentiable(
    operator("rmsllama::rms_norm_backward", mutates_args=())(launch_backward),
    lambda dy, dh, h, weight, rstd, offset, round_once, wants_dweight, projection=None: _empty_gradients(
        h, weight, wants_dweight
    ),
    _no_double_backward,
    lambda ctx, inputs, output: None,
)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, round_once: bool = False) -> Tensor:
    """The contract of kernels/reference.py, in one kernel forward and one backward.

    Without a weight, y is x_hat.
    Raises ValueError for shapes and dtypes that don't fit, and for an eps that is not positive and finite.
    """
    _check(x, None, weight, eps, offset)
    return _rms_norm(x, None, weight, eps, offset, round_once)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float,
    offset: float = 0.0, round_once: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, h): h = x + residual, rounded to its dtype, and y = rms_norm(h), in one kernel forward and one backward."""
    _check(x, residual, weight, eps, offset)
    y, h, _ = _rms_norm(x, residual, weight, eps, offset, round_once)
    return y, h


def _check(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float) -> None:
    shapes_fit = x.dim() > 0 and (weight is None or weight.shape == x.shape[-1:])
    shapes_fit &= residual is None or residual.shape == x.shape
    tensors = [t for t in (x, residual, weight) if t is not None]
    if not shapes_fit or not all(t.dtype in DTYPES and t.device == x.device for t in tensors):
        found = ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors)
        expected = "(..., D) and a weight (D,), of 16 to 64-bit floating point, on one device"
        raise ValueError(f"rms_norm got {found}; expected {expected}")
    if not 0 < eps < math.inf:
        raise ValueError(f"rms_norm got eps {eps}; expected a positive, finite number")
    if offset and weight is None:
        raise ValueError("rms_norm: offset is added to a weight, and there is none")
