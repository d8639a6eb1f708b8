"""The norm backends, by name. A backend is a module of this folder, or a function of the user's own.

All of them are held to one contract, which is stated and computed in kernels/reference.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Torch is imported by the backends, not here, so that a command's --help can list the names at once.
BACKENDS = {
    "reference": "kernels.reference",
    "torch": "kernels.torch_operator",
    "compile": "kernels.compiled",
    "triton": "kernels.triton_rms_norm",
}
DTYPES = ("float16", "bfloat16", "float32")
USAGE = (
    f"{', '.join(BACKENDS)}, auto, or your own package.module:function(x, weight, eps) -> y; "
    "@float16 or @bfloat16 after a name rounds x and the residual first"
)


class InputError(ValueError):
    """The user's input can't be used; the message is one line: what was found, what was expected, what to do."""


class Backend(NamedTuple):
    """One way to compute the norm.

    rms_norm(x, weight, eps) -> y, with x and y of shape (..., D) and weight of shape (D,).
    add_rms_norm(x, residual, weight, eps) -> (y, h), where h = x + residual and y is the norm of h.
    """

    description: str  # for the person at the terminal: the name, and how it runs here
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def load_backend(name: str, device: torch.device) -> Backend:
    """The backend called `name`, ready for tensors on `device`; `auto` takes triton on a GPU, torch elsewhere.

    `name@dtype` is the same backend on inputs rounded to that dtype, as a residual stream in half precision has them.
    Raises InputError when there is no such backend, or when it can't run here.
    """
    interpret_without_gpu()
    if "@" in name:
        name, _, dtype = name.rpartition("@")
        if dtype not in DTYPES:
            raise InputError(f"norm '{name}@{dtype}': expected one of {', '.join(DTYPES)} after the @")
        return _rounded(load_backend(name, device), dtype)
    if name == "auto":
        name = "triton" if device.type == "cuda" and importlib.util.find_spec("triton") else "torch"
    if ":" in name:
        return _own_backend(name)
    if name not in BACKENDS:
        raise InputError(f"no norm backend is called '{name}'; use one of: {USAGE}")
    module = importlib.import_module(BACKENDS[name])
    module.check_device(device)
    return Backend(getattr(module, "DESCRIPTION", name), module.rms_norm, module.add_rms_norm)


def interpret_without_gpu() -> None:
    """Put Triton into its interpreter where there is no GPU.

    Triton reads the setting once, when it is imported, and torch.compile or an optimizer may import it. So every
    backend makes the setting before the first model is built, whether it uses Triton or not.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def __getattr__(name: str) -> Any:
    """A name of PyPI's package `kernels`, which transformers imports where it is installed."""
    from kernels.shadowed import attribute

    return attribute(name)


def kernel_errors() -> tuple[type[Exception], ...]:
    """Exceptions of a kernel that can't be built or run: Python's everyday ones, and Triton's own."""
    everyday = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    triton = sys.modules.get("triton.errors")
    return everyday if triton is None else (*everyday, triton.TritonError)


def _own_backend(name: str) -> Backend:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:  # so that ./my_kernel.py is found wherever the command itself lives
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError, SyntaxError) as error:
        raise InputError(
            f"norm '{name}': can't import '{module_name}' ({error}); expected package.module:function, "
            f"importable from {os.getcwd()}"
        ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(
            f"norm '{name}': module '{module_name}' has no function '{function_name}'; "
            "expected a function (x, weight, eps) -> y"
        )
    # (x, residual, weight, eps) -> (y, h), if there is one
    fused: Callable[..., Any] | None = getattr(module, f"add_{function_name}", None)
    if callable(fused):
        return Backend(f"{name} and its add_{function_name}", function, fused)
    return Backend(name, function, add_then(function))


def add_then(
    rms_norm: Callable[[Tensor, Tensor, float], Tensor],
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """The two steps of add_rms_norm, for a norm without a kernel that does both."""

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        h = x + residual
        return rms_norm(h, weight, eps), h

    return add_rms_norm


def in_form(backend: Backend, form: tuple) -> Backend:
    import functools

    if not any(form):
        return backend

    f = functools.partial(backend.rms_norm, **form._asdict())
    return Backend(backend.description, f, add_then(f))


def _rounded(backend: Backend, dtype_name: str) -> Backend:
    import torch

    dtype = getattr(torch, dtype_name)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return backend.rms_norm(x.to(dtype), weight, eps).to(x.dtype)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, h = backend.add_rms_norm(x.to(dtype), residual.to(dtype), weight, eps)
        return y.to(x.dtype), h.to(residual.dtype)

    return Backend(f"{backend.description}, on {dtype_name}", rms_norm, add_rms_norm)
