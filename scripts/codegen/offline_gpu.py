"""Compile the Triton kernels for GPUs that are not here: exactly what their launchers would launch there."""

from __future__ import annotations

import os
import re
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import torch

SHAPE = (8, 2048)  # of the rows: few enough for partial sums to show
N_ROWS = SHAPE[0] * SHAPE[1]
EPS = 1e-5


class Target(NamedTuple):
    backend: str
    arch: int | str
    warp_size: int
    multiprocessors: int  # of the GPU in the comment; the launcher asks for them
    shared: int  # bytes that a block may have: NVIDIA's cuda/__device/arch_traits.h, LLVM's AMDGPU guide
    since: tuple[int, int]  # the first Triton whose wheel compiles for it


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 108, 163 * 1024, (3, 2)),  # A100
    "sm_90": Target("cuda", 90, 32, 132, 227 * 1024, (3, 2)),  # H100
    "sm_100": Target("cuda", 100, 32, 148, 227 * 1024, (3, 3)),  # B200
    "sm_120": Target("cuda", 120, 32, 170, 99 * 1024, (3, 3)),  # GeForce RTX 5090
    "gfx942": Target("hip", "gfx942", 64, 304, 64 * 1024, (3, 3)),  # MI300X
}


class Case(NamedTuple):
    """The dtypes of a call, and its options."""

    x: str
    residual: str
    weight: str | None
    unit_offset: bool = False
    round_once: bool = False
    frozen: bool = False  # nobody wants dweight
    strided: bool = False  # axes swapped, so that a row is found by two strides


CASES = {
    "bfloat16": Case("bfloat16", "bfloat16", "bfloat16"),
    "float16": Case("float16", "float16", "float16"),
    "float32": Case("float32", "float32", "float32"),
    "mixed": Case("bfloat16", "bfloat16", "float32"),
    "autocast": Case("bfloat16", "float32", "float32"),
    "gemma": Case("bfloat16", "bfloat16", "bfloat16", unit_offset=True, round_once=True),
    "no-weight": Case("bfloat16", "bfloat16", None),
    "frozen": Case("bfloat16", "bfloat16", "bfloat16", frozen=True),
    "strided": Case("bfloat16", "bfloat16", "bfloat16", strided=True),
}


class Launch(NamedTuple):
    name: str
    compiled: Any
    grid: tuple[int, ...]
    args: dict[str, Any]  # by the kernel's names for them


class FakeDriver:
    """What Triton asks of a driver before it compiles, answered for a GPU that is not here."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*TARGETS[target][:3])
        self.device = list(TARGETS).index(target)  # Triton keeps compiled kernels by the device's number

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        import torch

        return torch.device("meta")


class CompileOnly:
    """In the place of wrap_triton: kernel[grid](...) compiles the kernel and keeps it."""

    launches: list[Launch]

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = self.kernel.warmup(*args, grid=grid, **options)
            named = dict(zip(self.kernel.arg_names, args, strict=False)) | options
            self.launches.append(Launch(self.kernel.fn.__name__, compiled, grid, named))

        return launch


def kernels_for(target: str) -> ModuleType:
    """The kernels' module, whose launchers from now on compile for `target`."""
    os.environ["TRITON_INTERPRET"] = "0"  # before the import
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    import torch
    from triton.runtime import driver

    from kernels import triton_rms_norm

    driver.set_active(FakeDriver(target))
    gpu = TARGETS[target]
    properties = SimpleNamespace(multi_processor_count=gpu.multiprocessors, warp_size=gpu.warp_size)
    torch.cuda.get_device_properties = lambda _: properties
    triton_rms_norm.wrap_triton = CompileOnly
    return triton_rms_norm


def launches_of(step: str, target: str, case: Case, width: int) -> tuple[list[Launch], float, float]:
    """The kernels that a pass would launch, compiled; the fewest bytes an element that it must move; and how many more
    it moves where a row is too wide for one tile, so that forward reads h twice, and backward h and dy."""
    import torch

    kernels, CompileOnly.launches = kernels_for(target), []

    def rows(*names: str) -> list[torch.Tensor]:
        return [empty(getattr(torch, name)) for name in names]

    def empty(dtype: torch.dtype) -> torch.Tensor:
        if case.strided:
            return torch.empty(SHAPE[1], SHAPE[0], width, dtype=dtype, device="meta").transpose(0, 1)
        return torch.empty(*SHAPE, width, dtype=dtype, device="meta")

    x, residual = rows(case.x, case.residual if step.startswith("add") else case.x)
    weight = torch.empty(width, dtype=getattr(torch, case.weight), device="meta") if case.weight else None
    wide = torch.promote_types(x.dtype, residual.dtype)
    rstd = torch.empty(SHAPE, device="meta")
    options = case.unit_offset, case.round_once
    if step == "forward":
        kernels.launch_forward(x, None, weight, EPS, *options)
        tensors = [x.dtype, x.dtype]
    elif step == "add_forward":
        kernels.launch_forward(x, residual, weight, EPS, *options)
        tensors = [x.dtype, residual.dtype, wide, wide]
    else:
        dy, dh, h = (empty(wide) for _ in range(3))
        dh = dh if step == "add_backward" else None
        kernels.launch_backward(dy, dh, h, weight, rstd, *options, weight is not None and not case.frozen)
        tensors = [wide] * (3 if dh is None else 4)
    floor = sum(dtype.itemsize for dtype in tensors) + rstd.itemsize / width
    return CompileOnly.launches, floor, wide.itemsize * (1 if step.endswith("forward") else 2)


def version_of(triton: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
