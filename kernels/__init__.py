"""The norm backends, by name. A backend is a module of this folder, or a function of the user's own.

All of them are held to one contract, which is stated and computed in kernels/reference.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels.form import LLAMA, Form

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
# Another function, to compare RMSNorm with, by name: True where it has a bias besides the weight.
LAYER_NORMS = {"layer_norm": False, "layer_norm_bias": True}
DTYPES = ("float16", "bfloat16", "float32")
RMS_USAGE = f"{', '.join(BACKENDS)}, auto, or your own package.module:function(x, weight, eps) -> y"
USAGE = (
    f"{RMS_USAGE}; "
    f"{', '.join(LAYER_NORMS)} (not RMSNorm, but to compare it with); "
    "@float16 or @bfloat16 after a name rounds x and the residual first"
)


class InputError(ValueError):
    """The user's input can't be used; the message is one line: what was found, what was expected, what to do."""


class Backend(NamedTuple):
    """One way to compute the norm.

    rms_norm(x, weight, eps) -> y, with x and y of shape (..., D) and weight of shape (D,).
    add_rms_norm(x, residual, weight, eps) -> (y, h), where h = x + residual and y is the norm of h.
    Both take a keyword `bias` of shape (D,) as well where the norm has one.
    """

    description: str  # for the person at the terminal: the name, how it runs here, and a form that is not LLaMA's
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    form: Form = LLAMA  # that both compute
    has_bias: bool = False
    name: str = ""  # in BACKENDS; empty for any other


def load_backend(name: str, device: torch.device, form: Form = LLAMA) -> Backend:
    """The backend called `name`, ready for tensors on `device`.

    `auto` takes triton on a GPU, also on an emulated one that was named, and torch elsewhere. Triton's kernels that are
    asked for on a machine without a GPU run on an emulated one.

    Its functions compute the norm in this `form`, which they are called without.
    `name@dtype` is the same backend on inputs rounded to that dtype, as a residual stream in half precision has them.
    Raises InputError when there is no such backend, or when it can't run here or in this form.
    """
    from kernels.emulated.gpus import chosen_gpu

    if "@" in name:
        name, _, dtype = name.rpartition("@")
        if dtype not in DTYPES:
            raise InputError(f"norm '{name}@{dtype}': expected one of {', '.join(DTYPES)} after the @")
        return in_form(_rounded(load_backend(name, device), dtype), form)
    if name == "auto":
        on_gpu = device.type == "cuda" or chosen_gpu()
        name = "triton" if on_gpu and importlib.util.find_spec("triton") else "torch"
    if ":" in name:
        return in_form(_own_backend(name), form)
    if name in LAYER_NORMS:
        from kernels.layer_norm import layer_norm

        return in_form(Backend(name, layer_norm, add_then(layer_norm), has_bias=LAYER_NORMS[name]), form)
    if name not in BACKENDS:
        raise InputError(f"no norm backend is called '{name}'; use one of: {USAGE}")
    module = importlib.import_module(BACKENDS[name])
    module.check_device(device)
    description = getattr(module, "DESCRIPTION", name)
    return in_form(Backend(description, module.rms_norm, module.add_rms_norm, name=name), form)


def layer_norm_in(name: str | None) -> str | None:
    """The name of LAYER_NORMS that a --norm or a config's `norm` names, with or without an @dtype; None for others."""
    plain = (name or "").partition("@")[0]
    return plain if plain in LAYER_NORMS else None


def __getattr__(name: str) -> Any:
    """A name of PyPI's package `kernels`, which transformers imports where it is installed."""
    from kernels.shadowed import attribute

    return attribute(name)


def kernel_errors() -> tuple[type[Exception], ...]:
    """Exceptions of a kernel that can't be built or run: Python's everyday ones, and Triton's own."""
    everyday = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    triton = sys.modules.get("triton.errors")
    return everyday if triton is None else (*everyday, triton.TritonError)


def in_form(backend: Backend, form: Form) -> Backend:
    """The backend bound to a form of the norm. Raises InputError for a function of the user's own that takes none."""
    if form == backend.form:
        return backend
    assert backend.form == LLAMA, "a backend is bound to a form once"
    both = (backend.rms_norm, ("x", "weight", "eps")), (backend.add_rms_norm, ("x", "residual", "weight", "eps"))
    for function, inputs in both:
        try:
            inspect.signature(function).bind(*inputs, **form._asdict())
        except (TypeError, ValueError) as error:  # ValueError: a builtin that does not say what it takes
            raise InputError(
                f"norm '{backend.description}' does not take this form of the norm: {form}; expected a function of "
                f"{', '.join([*inputs, *form._fields])}, or use --norm torch"
            ) from error
    options: dict[str, Any] = form._asdict()
    rms_norm, add_rms_norm = partial(backend.rms_norm, **options), partial(backend.add_rms_norm, **options)
    return Backend(f"{backend.description}, {form}", rms_norm, add_rms_norm, form, backend.has_bias, backend.name)


def _own_backend(name: str) -> Backend:
    importlib.import_module("kernels.emulated").emulate_without_gpu()  # it may be written in Triton
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
    rms_norm: Callable[..., Tensor],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The two steps of add_rms_norm, for a norm without a kernel that does both."""

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, **form: Any) -> tuple[Tensor, Tensor]:
        h = x + residual
        return rms_norm(h, weight, eps, **form), h

    return add_rms_norm


def _rounded(backend: Backend, dtype_name: str) -> Backend:
    import torch

    dtype = getattr(torch, dtype_name)

    @wraps(backend.rms_norm)
    def rms_norm(x: Tensor, weight: Tensor, eps: float, **form: Any) -> Tensor:
        return backend.rms_norm(x.to(dtype), weight, eps, **form).to(x.dtype)

    @wraps(backend.add_rms_norm)
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, **form: Any) -> tuple[Tensor, Tensor]:
        y, h = backend.add_rms_norm(x.to(dtype), residual.to(dtype), weight, eps, **form)
        return y.to(x.dtype), h.to(residual.dtype)

    return Backend(f"{backend.description}, on {dtype_name}", rms_norm, add_rms_norm, has_bias=backend.has_bias)
