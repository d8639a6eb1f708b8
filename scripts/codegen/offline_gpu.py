"""Compile the Triton kernels for GPUs that are not here: exactly what their launchers would launch there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from scripts.codegen.targets import SHAPE, TARGETS, Case

EPS = 1e-5


class Launch(NamedTuple):
    name: str
    compiled: Any
    grid: tuple[int, ...]
    args: dict[str, Any]  # by the kernel's names for them


class FakeDriver:
    """Stand-in for the driver that Triton asks before it compiles, for a GPU that is not here."""

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
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    from triton.runtime import driver

    from kernels import triton_rms_norm

    driver.set_active(FakeDriver(target))  # pyright: ignore[reportArgumentType]  (only what a compilation asks for)
    gpu = TARGETS[target]
    properties = SimpleNamespace(multi_processor_count=gpu.multiprocessors, warp_size=gpu.warp_size)
    triton_rms_norm._gpu = lambda device: properties
    triton_rms_norm.wrap_triton = CompileOnly
    return triton_rms_norm


def launches_of(step: str, target: str, case: Case, width: int, shape: tuple[int, int] = SHAPE) -> tuple[
    list[Launch], float, float
]:  # fmt: skip
    """The compiled kernels of a pass, its floor, and what it may read again, both in bytes an element."""
    kernels, CompileOnly.launches = kernels_for(target), []
    floor, again = launch(kernels, step, case, width, shape, "meta")
    return CompileOnly.launches, floor, again


def launch(
    kernels: ModuleType, step: str, case: Case, width: int, shape: tuple[int, int], device: str
) -> tuple[float, float]:
    """Launch the kernels of a pass; its floor, and what it may read again, both in bytes an element.

    The floor is the least that it must move. Rows too wide for one tile are read again: h in forward, h and dy in
    backward.
    """

    def empty(dtype: torch.dtype) -> torch.Tensor:
        if case.strided:
            return torch.ones(shape[1], shape[0], width, dtype=dtype, device=device).transpose(0, 1)
        return torch.ones(*shape, width, dtype=dtype, device=device)

    names = (case.x, case.residual if step.startswith("add") else case.x)
    x, residual = (empty(getattr(torch, name)) for name in names)
    weight = torch.ones(width, dtype=getattr(torch, case.weight), device=device) if case.weight else None
    wide = torch.promote_types(x.dtype, residual.dtype)
    rstd = torch.ones(shape, device=device)
    if step == "forward":
        kernels.launch_forward(x, None, weight, EPS, *case.form)
        tensors = [x.dtype, x.dtype]
    elif step == "add_forward":
        kernels.launch_forward(x, residual, weight, EPS, *case.form)
        tensors = [x.dtype, residual.dtype, wide, wide]
    else:
        dy, dh, h = (empty(wide) for _ in range(3))
        dh = dh if step == "add_backward" else None
        kernels.launch_backward(dy, dh, h, weight, rstd, *case.form, weight is not None and not case.frozen)
        tensors = [wide] * (3 if dh is None else 4)
    floor = sum(dtype.itemsize for dtype in tensors) + rstd.itemsize / width
    return floor, wide.itemsize * (1 if step.endswith("forward") else 2)
