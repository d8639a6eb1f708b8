"""An emulated GPU: Triton kernels on CPU tensors, run as they are compiled for an NVIDIA GPU.

    from kernels.emulated import emulate
    emulate("sm_90")     # before Triton is imported; from then on every launch of this process runs here

ptx.py reads what Triton compiles; machine.py runs it, with arithmetic.py, integers.py, carries.py and conversions.py
for numbers, accesses.py for memory, warps.py and matrix_unit.py for what threads do together; memory.py watches;
counts.py counts; driver.py puts Triton on it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

from kernels import InputError
from kernels.emulated.gpus import GPUS, choose, description, emulated_gpu

__all__ = ["GPUS", "description", "emulate", "emulated_gpu"]


def emulate(name: str) -> None:
    """Run all Triton kernels of this process on an emulated GPU. Raises InputError where that can't be."""
    if name not in GPUS:
        raise InputError(f"--emulate {name}: expected one of {', '.join(GPUS)}")
    if emulated_gpu() not in (None, GPUS[name]):
        raise InputError(f"--emulate {name}: this process has {description()}; emulate one GPU in a process")
    if importlib.util.find_spec("triton") is None:
        raise InputError(f"--emulate {name}: triton is not installed; pip install triton (Linux alone has it)")
    triton = sys.modules.get("triton")
    if triton is not None and not isinstance(triton.language.sum, triton.JITFunction):
        raise InputError(f"--emulate {name}: Triton already runs in its interpreter; emulate before it is imported")
    os.environ["TRITON_INTERPRET"] = "0"  # for what is imported and decorated from now on
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 speaks of 3.10
    from triton.runtime import driver

    from kernels.emulated.driver import EmulatedDriver
    from kernels.emulated.unwritten import watch_fresh_memory

    watch_fresh_memory()
    driver.set_active(EmulatedDriver(name))  # pyright: ignore[reportArgumentType]  (what a launch asks for, no more)
    choose(name)
