"""A norm in the form that somebody claims for it, whether or not it takes the form as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import Backend, load_backend
from kernels.form import LLAMA, Form


def load_as_claimed(name: str, device: torch.device, form: Form) -> Backend:
    """load_backend, but a function (x, weight, eps) of the user's own that takes no form is held to be of this one."""
    if ":" not in name or form == LLAMA:
        return load_backend(name, device, form)
    backend = load_backend(name, device)
    if takes_form(backend.rms_norm):
        return load_backend(name, device, form)
    return backend._replace(description=f"{name}, held to be of the form: {form}", form=form)


def takes_form(norm: Callable[..., Any]) -> bool:
    """True for a function that takes `offset` and `round_once`."""
    try:
        inspect.signature(norm).bind("x", "weight", "eps", **LLAMA._asdict())
    except (TypeError, ValueError):  # ValueError: a builtin that does not say what it takes
        return False
    return True


def __getattr__(name: str) -> Callable[..., Tensor]:
    """A norm that takes any form and computes its own: train.py --norm scripts.judging.claims:my_kernel:rms_norm."""
    if ":" not in name or name.startswith("add_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    norm = load_backend(name, torch.device("cpu")).rms_norm

    def in_any_form(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_once: bool = False) -> Tensor:
        return norm(x, weight, eps)

    return in_any_form
