"""An emulated GPU: Triton kernels on CPU tensors, run as they are compiled for an NVIDIA GPU.

    from kernels.emulated import emulate
    emulate("sm_90")     # before Triton is imported; from then on every launch of this process runs here

ptx.py reads what Triton compiles; machine.py runs it, with arithmetic.py for numbers, accesses.py for memory and
warps.py for what threads do together; memory.py watches; counts.py counts; driver.py puts Triton on it.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from kernels import InputError
from kernels.emulated.gpus import GPUS, Gpu

_chosen: list[str] = []


def emulate(name: str) -> None:
    """Run all Triton kernels of this process on an emulated GPU. Raises InputError where that can't be."""
    if name not in GPUS:
        raise InputError(f"--emulate {name}: expected one of {', '.join(GPUS)}")
    if importlib.util.find_spec("triton") is None:
        raise InputError(f"--emulate {name}: triton is not installed; pip install triton (Linux alone has it)")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        raise InputError(f"--emulate {name}: Triton already runs in its interpreter; emulate before it is imported")
    os.environ["TRITON_INTERPRET"] = "0"
    from triton.runtime import driver

    from kernels.emulated.driver import EmulatedDriver
    from kernels.emulated.unwritten import watch_fresh_memory

    watch_fresh_memory()
    driver.set_active(EmulatedDriver(name))  # pyright: ignore[reportArgumentType]  (what a launch asks for, no more)
    _chosen[:] = [name]


def emulated_gpu() -> Gpu | None:
    """The GPU that this process emulates, if it does."""
    return GPUS[_chosen[0]] if _chosen else None


def description() -> str:
    return f"triton, compiled for {_chosen[0]}, on an emulated one"
