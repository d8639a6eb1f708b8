"""The norm that is to be proved: what it is called, how it runs here, and the kernels that it launches."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from kernels import Backend, emulated, kernel_errors
from kernels.emulated.gpus import emulated_gpu
from kernels.form import FORMS, Form
from scripts.judging.claims import load_as_claimed

# What a norm of somebody else's may raise. Whatever else it raises ends its process, which is a finding too.
ERRORS = (*kernel_errors(), ImportError, OSError, MemoryError, NameError)


class Subject(NamedTuple):
    """A norm by its name. It is loaded in a process apart alone."""

    name: str
    form_name: str = "llama"
    device: str = "cpu"
    gpu: str = "none"  # to emulate

    @property
    def form(self) -> Form:
        return FORMS[self.form_name]


@functools.cache
def load(subject: Subject) -> Backend:
    """The norm, ready to run in this process. Raises InputError where it can't be loaded."""
    warnings.simplefilter("ignore")
    os.environ["NORM_TEST_DEVICE"] = subject.device  # for the contract's checks
    torch.set_num_threads(1)
    if subject.gpu != "none":
        emulated.emulate(subject.gpu)
    return load_as_claimed(subject.name, torch.device(subject.device), subject.form)


class Launched:
    """What ran while it was watched: compiled kernels by name, or the names of interpreted ones."""

    def __init__(self) -> None:
        self.compiled: dict[str, Any] = {}
        self.interpreted: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.compiled or self.interpreted)


@contextmanager
def watching() -> Iterator[Launched]:
    """Collect the Triton kernels that are launched meanwhile."""
    found = Launched()
    if "triton" not in sys.modules:  # then nobody has a kernel to launch
        yield found
        return
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    run, execute = JITFunction.run, GridExecutor.__call__

    def compiled(kernel: Any, *args: Any, **options: Any) -> Any:
        result = run(kernel, *args, **options)
        if hasattr(result, "asm"):
            found.compiled[kernel.fn.__name__] = result
        return result

    def interpreted(executor: Any, *args: Any, **options: Any) -> Any:
        found.interpreted.append(executor.fn.__name__)
        return execute(executor, *args, **options)

    with mock.patch.object(JITFunction, "run", compiled), mock.patch.object(GridExecutor, "__call__", interpreted):
        yield found


def how_it_runs(launched: Launched) -> str:
    """How the kernels ran that were launched, in words: chosen by kernels.load_backend, or by --emulate."""
    if not launched:
        return "plain PyTorch: it launches no Triton kernel"
    names = ", ".join(dict.fromkeys([*launched.compiled, *launched.interpreted]))
    if launched.interpreted:
        return f"Triton kernels ({names}) in Triton's interpreter, which cuts off bfloat16; --emulate sm_90 rounds it"
    gpu = emulated_gpu()
    where = f"compiled for {gpu.example} (sm_{gpu.arch}), on an emulated one" if gpu else "compiled for this GPU"
    return f"Triton kernels ({names}), {where}"
