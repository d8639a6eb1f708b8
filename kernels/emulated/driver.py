"""Put Triton on the emulated GPU: the driver that its launches ask, in the place of CUDA's."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from kernels.emulated.counts import Counts
from kernels.emulated.gpus import GPUS
from kernels.emulated.machine import Machine
from kernels.emulated.memory import GlobalMemory
from kernels.emulated.ptx import EmulationError, parse
from kernels.emulated.unwritten import shadow_of

OURS = "kernels.triton_rms_norm"  # whose description says where its kernels run
TRITON_3_4 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4)


def keep_freed_memory() -> None:
    """Have glibc keep large arrays that are freed for the next ones, in place of returning each to the system.

    A launch makes and drops thousands of arrays; with their pages mapped and cleared anew it takes twice the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


class EmulatedDriver:
    """What Triton asks a driver for. It writes `say`, a line for the user, at the first launch of another's kernel."""

    def __init__(self, name: str, say: str = "") -> None:
        keep_freed_memory()
        Launcher.line = say
        self.gpu = GPUS[name]
        self.target = GPUTarget("cuda", self.gpu.arch, self.gpu.warp_size)
        self.device = list(GPUS).index(name)  # Triton keeps compiled kernels by the device's number
        self.utils = self
        self.launcher_cls = Launcher

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.gpu.arch, 10)

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        """An autotuner's stopwatch. There is no time here, so that the first of its configurations wins."""
        return lambda launch, quantiles=(), **_: [1.0] * len(quantiles) or 1.0

    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        return {
            "max_shared_mem": self.gpu.shared, "multiprocessor_count": self.gpu.multi_processor_count,
            "max_num_regs": 65536, "warpSize": self.gpu.warp_size,
            "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
        }  # fmt: skip

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spills, and the most threads of a block. The launcher has the PTX."""
        return (name, name, 0, 0, 1024)[: 5 if TRITON_3_4 else 4]

    def unload_module(self, module: Any) -> None:
        pass


@contextmanager
def counting() -> Iterator[list[Counts]]:
    """Count what launches do: the list that it gives grows by one for each. They take several times as long."""
    before, Launcher.counted = Launcher.counted, []
    try:
        yield Launcher.counted
    finally:
        Launcher.counted = before


class Launcher:
    """Launches of one compiled kernel."""

    workers: ThreadPoolExecutor
    chosen: ClassVar[list[Callable[[int], Sequence[int]]]] = []  # by only_blocks
    counted: list[Counts] | None = None  # None: nobody counts
    line = ""  # that the user has not been told yet
    n_launches = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        path = get_cache_manager(metadata.hash).get_file(f"{source.name[:150]}.ptx")
        if path is None:
            raise EmulationError(f"{metadata.name}: Triton's cache does not hold its PTX; was it removed?")
        self.machine = Machine(parse(Path(path).read_text()), metadata.shared)
        self.kernel = metadata.name
        self.kinds = source.signature  # of each argument that a launch gives, by its name
        self.constants = {"constexpr", *(name for name in source.constants if isinstance(name, str))}
        if Launcher.line and source.fn.__module__ != OURS:
            if os.environ.get("RANK", "0") == "0":  # of torchrun's processes
                print(Launcher.line, file=sys.stderr)
            Launcher.line = ""

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, launch_metadata: Any,
        enter: Any, leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        Launcher.n_launches += 1
        args += (None,) * (len(self.kinds) - len(args))  # constants at the end, which CUDA's launcher does without too
        with torch._C.DisableTorchFunction():  # tensors may say that they are elsewhere (scripts/as_cuda.py)
            memory = GlobalMemory()
            bits = [
                argument_bits(memory, name, kind, value)
                for (name, kind), value in zip(self.kinds.items(), args, strict=True)
                if not {name, kind} & self.constants  # Triton 3.2 names the arguments that are 1 there
            ]
            if not x * y * z:
                return
            if x >= 2**31 or max(y, z) >= 2**16:
                raise EmulationError(
                    f"{self.kernel}: a grid of {x} x {y} x {z} blocks, where a GPU takes up to "
                    "2147483647 x 65535 x 65535; put the larger number first"
                )
            only = self.chosen[-1](x * y * z) if self.chosen else None
            counts = None
            if self.counted is not None:
                counts = Counts(self.kernel, (x, y, z))
                tensors = {name: value for name, value in zip(self.kinds, args, strict=True) if torch.is_tensor(value)}
                counts.tensors = {name: (tuple(each.shape), each.element_size()) for name, each in tensors.items()}
                self.counted.append(counts)
            self.machine.run((x, y, z), bits, memory, counts, only=only, workers=self.workers)


def _hire_workers() -> None:
    Launcher.workers = ThreadPoolExecutor(torch.get_num_threads())


_hire_workers()
os.register_at_fork(after_in_child=_hire_workers)  # a fork has none of the threads


@contextmanager
def only_blocks(choose: Callable[[int], Sequence[int]]) -> Iterator[None]:
    """Within it, a launch of n blocks runs those numbered choose(n) alone, so that its tensors may pass all memory."""
    Launcher.chosen.append(choose)
    try:
        yield
    finally:
        Launcher.chosen.pop()


def argument_bits(memory: GlobalMemory, name: str, kind: str, value: Any) -> int:
    """A kernel's argument as the bits of its parameter; a tensor's address in `memory`."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise EmulationError(f"argument {name} is on {value.device}; the emulated GPU works on CPU tensors")
        return memory.add(name, value, shadow_of(value))
    if value is None:
        return 0
    floats: dict[str, Any] = {"fp16": np.float16, "fp32": np.float32, "f32": np.float32, "fp64": np.float64}
    if kind in floats:
        return int.from_bytes(np.array(value, floats[kind]).tobytes(), "little")
    return int(value)
