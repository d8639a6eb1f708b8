"""Other people's norms to compare ours with, each a function (x, weight, eps) -> y.

They go wherever a norm is named, as in `train.py --norm scripts.peers:liger`, and bench_norm.py takes their short names
too. add_liger and add_quack are those packages' own kernels for the add and the norm together.

None is held to the contract of kernels/reference.py: torch_fused and quack round once, after the weight, and layer_norm
is another function. It is here because "RMSNorm is faster than LayerNorm" should be measured. torch_fused and liger
take the form of the norm (kernels/form.py).
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import Backend, InputError, load_backend
from kernels.emulated.gpus import emulated_gpu
from kernels.form import LLAMA, Form

# Module, attribute, and the package to install. Both packages have kernels for GPUs only.
LIGER = ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction", "liger-kernel")
LIGER_ADD = ("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction", "liger-kernel")
QUACK = ("quack", "rmsnorm", "quack-kernels")
PEERS = {"torch_fused": None, "layer_norm": None, "liger": LIGER, "quack": QUACK}


def torch_fused(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_once: bool = True) -> Tensor:
    """PyTorch's operator with the weight inside, as in nn.RMSNorm: one kernel on a GPU in recent versions.

    It rounds once, whatever is asked for. It is fused for one dtype alone, so offset + weight is rounded to x's.
    """
    if offset:
        weight = (weight.float() + offset).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LayerNorm without a bias, so that it has as many parameters as RMSNorm."""
    return F.layer_norm(x, x.shape[-1:], weight, None, eps)


def liger(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_once: bool = False) -> Tensor:
    """Liger's Triton kernel."""
    return _fetch(*LIGER).apply(x, weight, *_liger_options(x, eps, offset, round_once))


def add_liger(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_once: bool = False
) -> tuple[Tensor, Tensor]:
    """Liger's kernel for the add and the norm together: (y, h)."""
    return _fetch(*LIGER_ADD).apply(x, residual, weight, *_liger_options(x, eps, offset, round_once))


def _liger_options(x: Tensor, eps: float, offset: float, round_once: bool) -> tuple[float, float, str, bool]:
    """eps, the offset added to the weight, the rounding order, and False for in place, which would write dx over dy."""
    order = "gemma" if round_once else "llama"
    if x.is_cuda or emulated_gpu():
        return eps, offset, order, False
    # On a CPU its kernels run in Triton's interpreter as they are, given two things that are missing there.
    import triton.language as tl

    for name in (LIGER[0], LIGER_ADD[0]):
        module: Any = importlib.import_module(name)
        module.rsqrt = lambda value: tl.rsqrt(value)  # instead of libdevice's
    return _Number(eps), _Number(offset), order, False


class _Number(float):
    """A float with the method `to` of Triton's scalars."""

    def to(self, dtype: Any) -> Any:
        import triton.language as tl

        return tl.full((), float(self), dtype)


def quack(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """QuACK's CuTe kernel."""
    return _fetch(*QUACK)(x, weight, eps=eps)


def add_quack(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """QuACK's kernel for the add and the norm together, (y, h); its y comes from h before h is rounded."""
    return _fetch(*QUACK)(x, weight, residual=residual, eps=eps, prenorm=True)


def installed() -> list[str]:
    """The names of the peers whose package is installed."""
    return [name for name, needs in PEERS.items() if not needs or find_spec(needs[0].partition(".")[0])]


def load(name: str, device: torch.device, form: Form = LLAMA) -> Backend:
    """load_backend that takes the peers' short names too.

    Raises InputError if a peer's package is missing or has no kernels for `device`.
    """
    short = name.removeprefix("scripts.peers:")
    if package := PEERS.get(short):
        _fetch(*package)
        if device.type != "cuda":
            raise InputError(f"norm '{name}': its kernels take GPU tensors and the device is '{device}'; leave it out")
    return load_backend(f"scripts.peers:{short}" if short in PEERS else name, device, form)


@functools.cache  # looked up once, so that timed calls don't pay for it
def _fetch(module: str, attribute: str, package: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library that it needs
        raise InputError(f"can't import {attribute} from {module} ({error}); pip install {package}") from error
