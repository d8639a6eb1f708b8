"""Tensors of the CPU that say they are on a GPU, the emulated one, to packages that take no others.

Packages ask torch for a GPU before they launch a kernel: whether a tensor is there, how many multiprocessors it has,
whether it may be the current one. Some name "cuda" where they allocate. Here all of them are answered as an emulated
GPU would be, for the time of a call; the tensors stay what they are, and so do the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from kernels.emulated import emulated_gpu

DEVICE = torch.device("cuda", 0)
_ANSWERS = {
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: DEVICE,  # type: ignore[attr-defined]
    torch.Tensor.get_device: 0,
}


class _Current(contextlib.nullcontext):
    """torch.cuda.device and its like."""

    idx = 0


class _Mode(TorchFunctionMode):
    """Answer questions about a tensor's device, and allocate on the CPU what names the GPU."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _ANSWERS:
            return _ANSWERS[function]
        if function is torch.device:
            return torch.device(*args, **(kwargs or {}))
        args = tuple(_on_the_cpu(value) for value in args)
        return function(*args, **{name: _on_the_cpu(value) for name, value in (kwargs or {}).items()})


def _on_the_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


@contextlib.contextmanager
def as_cuda() -> Iterator[None]:
    """Within it, tensors of the CPU are on the emulated GPU, for whoever asks."""
    gpu = emulated_gpu()
    assert gpu is not None, "there is a GPU to emulate"
    major, minor = divmod(gpu.arch, 10)
    properties = SimpleNamespace(
        name=gpu.example, major=major, minor=minor, multi_processor_count=gpu.multi_processor_count,
        warp_size=gpu.warp_size, shared_memory_per_block_optin=gpu.shared, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, total_memory=80 << 30, gcnArchName="",
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
        "get_device_capability": (major, minor), "get_device_name": gpu.example, "is_bf16_supported": True,
        "synchronize": None, "set_device": None, "is_current_stream_capturing": False, "_lazy_init": None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        for name in ("device", "device_of", "stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, _Current))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True))
        stack.enter_context(mock.patch.object(BackwardCFunction, "apply", _backward))
        stack.enter_context(_Mode())
        yield


_apply_backward = BackwardCFunction.apply


def _backward(context: Any, *gradients: Tensor) -> Any:
    """The backward of an autograd Function, which autograd calls without the mode that is on."""
    with _Mode():
        return _apply_backward(context, *gradients)


class _Call(torch.autograd.Function):
    """A call of a function whose forward and backward both run as_cuda."""

    @staticmethod
    def forward(ctx: Any, function: Callable, *tensors: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        ctx.inputs = [t.detach().requires_grad_(wants) for t, wants in zip(tensors, wanted, strict=True)]
        with torch.enable_grad(), as_cuda():
            found = function(*ctx.inputs)
        ctx.outputs = found if isinstance(found, tuple) else (found,)
        given = tuple(output.detach() for output in ctx.outputs)
        # Without a backward of its own the function has none here.
        ctx.mark_non_differentiable(*(g for g, own in zip(given, ctx.outputs, strict=True) if not own.requires_grad))
        return given if isinstance(found, tuple) else given[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [t for t in ctx.inputs if t.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        with as_cuda():
            torch.autograd.backward(ctx.outputs, gradients, retain_graph=True, inputs=leaves)
        return None, *(t.grad for t in ctx.inputs)


def call_as_cuda(function: Callable, *tensors: Tensor) -> Any:
    """function(*tensors), and later its backward, as on the emulated GPU."""
    return _Call.apply(function, *tensors)
