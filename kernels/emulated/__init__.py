"""An emulated GPU: Triton kernels on CPU tensors, run as they are compiled for an NVIDIA GPU.

    from kernels.emulated import emulate
    emulate("sm_90")     # from then on every launch of this process runs here

Where there is no GPU, `--norm triton` and norms of one's own do that by themselves (emulate_without_gpu).
ptx.py reads what Triton compiles; machine.py runs it, with arithmetic.py, integers.py, carries.py and conversions.py
for numbers, accesses.py for memory, warps.py and matrix_unit.py for what threads do together; memory.py watches;
counts.py counts; driver.py puts Triton on it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from contextlib import suppress

from kernels import Backend, InputError, kernel_errors
from kernels.emulated.gpus import DEFAULT, GPUS, Gpu, choose, choose_default, chosen_gpu, description, emulated_gpu

__all__ = [
    "DEFAULT", "GPUS", "Gpu", "chosen_gpu", "description", "emulate", "emulate_without_gpu", "emulated_gpu",
    "interpreted", "runs_emulated",
]  # fmt: skip


def emulate(name: str) -> None:
    """Run all Triton kernels of this process on an emulated GPU. Raises InputError where that can't be."""
    if name not in GPUS:
        raise InputError(f"--emulate {name}: expected one of {', '.join(GPUS)}")
    gpu = emulated_gpu()
    if gpu not in (None, GPUS[name]):
        raise InputError(f"--emulate {name}: this process emulates sm_{gpu.arch}; emulate one GPU in a process")
    if importlib.util.find_spec("triton") is None:
        raise InputError(f"--emulate {name}: triton is not installed; pip install triton (Linux alone has it)")
    if "triton" in sys.modules and interpreted():
        raise InputError(f"--emulate {name}: Triton already runs in its interpreter; emulate before it is imported")
    os.environ["TRITON_INTERPRET"] = "0"  # for what is imported and decorated from now on
    _drive(name)
    choose(name)


def emulate_without_gpu() -> None:
    """Run Triton's kernels on an emulated GPU, DEFAULT, where there is no real one and Triton is installed.

    One that was named before stays, and so does Triton's interpreter, which TRITON_INTERPRET=1 asks for.
    Raises InputError where that was set when Triton had been imported.
    """
    if emulated_gpu() or importlib.util.find_spec("triton") is None:
        return
    import torch

    try:
        import triton  # noqa: F401
    except ImportError:
        return  # a broken one, which is an error for whoever needs it
    if os.environ.get("TRITON_INTERPRET") == "1" and not interpreted():
        raise InputError(
            "TRITON_INTERPRET=1 was set after Triton was imported, too late to run in its interpreter; set it in the "
            "environment of the process, or leave it out"
        )
    if not torch.cuda.is_available() and not interpreted():
        _drive(DEFAULT, f"Triton's kernels are compiled for {DEFAULT} and run on an emulated one: no measure of speed")
        choose_default()


def interpreted() -> bool:
    """True if Triton runs kernels in its interpreter, which it decides when it is imported."""
    import triton

    return not isinstance(triton.language.sum, triton.JITFunction)  # its own functions show it


def runs_emulated(norm: Backend) -> bool:
    """True if the norm launches kernels on the emulated GPU; its errors are for others to show."""
    if emulated_gpu() is None:
        return False
    import torch

    from kernels.emulated.driver import Launcher

    before = Launcher.n_launches
    with suppress(*kernel_errors()):
        norm.rms_norm(torch.ones(1, 64), torch.ones(64), 1.0)
    return Launcher.n_launches > before


def _drive(name: str, say: str = "") -> None:
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 speaks of 3.10
    from triton.runtime import driver

    from kernels.emulated.driver import EmulatedDriver
    from kernels.emulated.unwritten import watch_fresh_memory

    watch_fresh_memory()
    driver.set_active(EmulatedDriver(name, say))  # pyright: ignore[reportArgumentType]  (what a launch asks for, no more)
