"""Other people's norms to compare ours with, each by name a function (x, weight, eps) -> y.

They go wherever a norm is named, as in `train.py --norm scripts.peers:liger`, and bench_norm.py takes their short names
too. add_liger and its like, (x, residual, weight, eps) -> (y, h), are those packages' own kernels for both steps.

Packages' kernels need a GPU or an emulated one (--emulate). None is held to the contract of kernels/reference.py:
scripts/league.py shows what each does in the form that it claims. layer_norm is another function. It is here because
"RMSNorm is faster than LayerNorm" should be measured.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import Backend, InputError, in_form, load_backend
from kernels.emulated import chosen_gpu, emulated_gpu
from kernels.form import FORMS, LLAMA, Form
from kernels.layer_norm import layer_norm as layer_norm  # a peer, by this name

BENCHED = ("torch_fused", "layer_norm", "liger", "quack")  # by bench_norm.py, unless it is told what to time


class Package(NamedTuple):
    """A package's norm and how to call it. What adds in place gets copies of x and the residual."""

    install: str  # pip install --no-deps
    forms: tuple[str, ...]  # that it claims, of kernels/form.py; with two, its function takes the form
    source: str  # module:attribute
    norm: Callable[..., Tensor]  # (what the source holds, x, weight, eps, form) -> y
    add_source: str = ""
    add: Callable[..., Any] | None = None  # (what add_source holds, x, residual, weight, eps, form) -> (y, h)
    bare: bool = False  # the __init__ of its packages is left out: it wants more than the norm does
    add_forms: tuple[str, ...] = ()  # of add, if it has not all of `forms`

    def adds_in(self, form: str) -> bool:
        """True if it has a kernel for the add and the norm together in the form of this name."""
        return self.add is not None and form in (self.add_forms or self.forms)


def torch_fused(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_once: bool = True) -> Tensor:
    """PyTorch's operator with the weight inside, as in nn.RMSNorm: one kernel on a GPU in recent versions.

    It rounds once, whatever is asked for. It is fused for one dtype alone, so offset + weight is rounded to x's.
    """
    if offset:
        weight = (weight.float() + offset).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _liger(function: Any, *tensors_and_eps: Any) -> Any:
    """Not in place, which would write dx over dy."""
    *before, form = tensors_and_eps
    return function.apply(*before, form.offset, "gemma" if form.round_once else "llama", False)


def _gemma(form: Form) -> bool:
    if form not in (LLAMA, FORMS["gemma"]):
        raise InputError(f"form '{form}': this peer computes LLaMA's form and Gemma's; expected one of them")
    return form == FORMS["gemma"]


def _chalk(build: Callable, x: Tensor, weight: Tensor, eps: float, form: Form) -> Tensor:
    return _chalk_kernels(build, _gemma(form))(x, weight, eps)


@functools.cache
def _chalk_kernels(build: Callable, gemma: bool) -> Callable:
    return build(gemma)


def _conch(rms_norm: Callable, x: Tensor, weight: Tensor, eps: float, form: Form) -> Tensor:
    if not _gemma(form):
        return rms_norm(x, weight, eps)
    launch = importlib.import_module("conch.kernels.normalization.gemma_rms_norm").gemma_rms_norm_inplace_launcher
    rows = x.detach().reshape(-1, x.shape[-1]).clone()  # it takes two axes alone, and writes in place
    launch(rows, weight, eps)
    return rows.view(x.shape)


def _in_place(function: Callable, x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """function(x, residual, *rest), which writes y over x, and h over the residual."""
    y, h = x.detach().clone(), residual.detach().clone()
    function(y, h, *rest)
    return y, h


def _tri_dao(forms: tuple[str, ...], install: str, module: str) -> Package:
    """Tri Dao's kernel, which two packages carry."""
    source = f"{module}.ops.triton.layer_norm:rms_norm_fn"

    def gemma(form: Form) -> dict[str, bool]:
        return {"zero_centered_weight": form.offset == 1} if len(forms) > 1 else {}

    return Package(
        install, forms, source, lambda f, x, w, eps, form: f(x, w, None, eps=eps, **gemma(form)),
        source, lambda f, x, r, w, eps, form: f(x, w, None, r, eps=eps, prenorm=True, **gemma(form)), bare=True,
    )  # fmt: skip


PACKAGES = {
    "liger": Package(
        "liger-kernel", ("llama", "gemma"), "liger_kernel.ops.rms_norm:LigerRMSNormFunction", _liger,
        "liger_kernel.ops.fused_add_rms_norm:LigerFusedAddRMSNormFunction", _liger,
    ),
    "unsloth": Package(
        "unsloth unsloth_zoo", ("llama", "gemma"), "unsloth.kernels.rms_layernorm:Fast_RMS_Layernorm",
        lambda f, x, w, eps, form: f.apply(x, w, eps, _gemma(form)), bare=True,
    ),
    "chalk": Package("freesolo-chalk", ("gemma", "llama"), "chalk.ops.rmsnorm:_build_kernels", _chalk),
    "conch": Package(
        "conch-triton-kernels", ("llama", "gemma"), "conch.ops.normalization.rms_norm:rms_norm", _conch,
        "conch.ops.normalization.rms_norm:fused_add_rms_norm",
        lambda f, x, r, w, eps, form: _in_place(f, x, r, w, eps), add_forms=("llama",),
    ),
    "fms": Package(
        "fms-acceleration-foak", ("llama", "gemma"),
        "fms_acceleration_foak.kernels.unsloth.rms_layernorm:Fast_RMS_Layernorm",
        lambda f, x, w, eps, form: f.apply(x, w, eps, _gemma(form)), bare=True,
    ),
    "triformer": Package(
        "triformer", ("llama",), "triformer.rms_norm:FastRMSNorm", lambda f, x, w, eps, form: f.apply(x, w, eps)
    ),
    "flash_attn": _tri_dao(("torch", "gemma"), "flash-attn", "flash_attn"),
    "mamba_ssm": _tri_dao(("torch",), "mamba-ssm", "mamba_ssm"),
    "fla": Package(
        "fla-core einops", ("torch",), "fla.modules.layernorm:rms_norm",
        lambda f, x, w, eps, form: f(x, w, None, eps=eps),
        "fla.modules.layernorm:rms_norm", lambda f, x, r, w, eps, form: f(x, w, None, r, eps, prenorm=True),
    ),
    "flag_gems": Package(
        "flag-gems sqlalchemy", ("torch",), "flag_gems:rms_norm",
        lambda f, x, w, eps, form: f(x, x.shape[-1:], w, eps),
        "flag_gems.fused:fused_add_rms_norm",
        lambda f, x, r, w, eps, form: _in_place(f, x, r, x.shape[-1:], w, eps),
    ),
    "torchnorm": Package(
        "torchnorm", ("torch",), "torchnorm._triton:fused_rms_norm", lambda f, x, w, eps, form: f(x, w, eps),
        "torchnorm._triton:fused_add_rms_norm", lambda f, x, r, w, eps, form: f(x, r, w, eps),
    ),
    "trinix": Package(
        "trinix", ("torch",), "trinix.kernels.rmsnorm_kernel:TritonRMSNormFunction",
        lambda f, x, w, eps, form: f.apply(x, w, eps),
    ),
    "miniworld": Package(
        "miniworld-engine", ("torch",), "miniworld_engine.kernels.rmsnorm.triton.main:triton_rmsnorm",
        lambda f, x, w, eps, form: f(x[(None,) * (3 - x.dim())], w, eps).view(x.shape),  # three axes at least
    ),
    "xformers": Package(
        "xformers==0.0.27", ("torch",), "xformers.ops._triton.rmsnorm_kernels:_rms_norm_forward",
        lambda f, x, w, eps, form: f(x, w, eps),
        "xformers.ops._triton.rmsnorm_kernels:_rms_norm_add_forward",
        lambda f, x, r, w, eps, form: (f(h := x.detach().clone(), r, w, eps), h), bare=True,
    ),
    "lmdeploy": Package(
        "lmdeploy", ("torch",), "lmdeploy.pytorch.kernels.cuda.rms_norm:rms_norm",
        lambda f, x, w, eps, form: f(x, w, eps),
        "lmdeploy.pytorch.kernels.cuda.rms_norm:rms_norm",
        lambda f, x, r, w, eps, form: f(x, w, eps, r), bare=True,
    ),
    "dlblas": Package(
        "dlblas", ("torch",), "dlblas.kernels.rms_norm:rms_norm", lambda f, x, w, eps, form: f(x, w, eps),
        "dlblas.kernels.rms_norm:rms_norm", lambda f, x, r, w, eps, form: f(x, w, eps, r),
    ),
    "sglang": Package(
        "sglang", ("torch",), "sglang.kernels.ops.layernorm.rmsnorm_fp32:rmsnorm_fp32",
        lambda f, x, w, eps, form: f(x, w, eps), bare=True,
    ),
    "lightllm": Package(
        "lightllm", ("torch",), "lightllm.models.llama.triton_kernel.rmsnorm:rmsnorm_forward",
        lambda f, x, w, eps, form: f(x, w, eps),
    ),
    "flashnn": Package(
        "flashnn", ("torch",), "flashnn.triton_kernels.rms_norm:triton_rmsnorm_forward",
        lambda f, x, w, eps, form: f(x, w, eps),
    ),
    "colossalai": Package(
        "colossalai", ("torch",), "colossalai.kernel.triton.rms_layernorm:rms_layernorm",
        lambda f, x, w, eps, form: f(x.detach().reshape(-1, x.shape[-1]), w, eps)[0].view(x.shape),  # two axes alone
    ),
    "rotalabs": Package(
        "rotalabs-accel", ("torch",), "rotalabs_accel.kernels.rmsnorm:rmsnorm",
        lambda f, x, w, eps, form: f(x, w, eps),
    ),
    "tritonllm": Package(
        "tritonllm", ("torch",), "tritonllm.gpt_oss.triton.triton_kernels:rmsnorm_forward",
        lambda f, x, w, eps, form: f(x, w, eps),
    ),
    "quack": Package(
        "quack-kernels", ("torch",), "quack:rmsnorm", lambda f, x, w, eps, form: f(x, w, eps=eps),
        "quack:rmsnorm", lambda f, x, r, w, eps, form: f(x, w, residual=r, eps=eps, prenorm=True),
    ),
}  # fmt: skip


def __getattr__(name: str) -> Callable[..., Any]:
    """The norm of a package by its name, and after "add_" its kernel for the add and the norm together."""
    adds = name.startswith("add_")
    peer = PACKAGES.get(name.removeprefix("add_"))
    run = peer and (peer.add if adds else peer.norm)
    if peer is None or run is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    source = peer.add_source if adds else peer.source

    def in_form(*tensors_and_eps: Any, form: Form) -> Any:
        *tensors, eps = tensors_and_eps
        on_a_gpu = tensors[0].is_cuda
        if not on_a_gpu and emulated_gpu() is None:
            raise InputError(
                f"norm '{name}': its kernels take GPU tensors and got some on '{tensors[0].device}'; "
                "use --device cuda or --emulate sm_90"
            )
        function = fetch(source, peer)
        if on_a_gpu:
            return run(function, *tensors, eps, form)
        from scripts.as_cuda import call_as_cuda

        return call_as_cuda(lambda *tensors: run(function, *tensors, eps, form), *tensors)

    return _signature(adds, FORMS[peer.forms[0]], len(peer.forms) > 1, in_form)


def _signature(adds: bool, first: Form, takes_form: bool, in_form: Callable[..., Any]) -> Callable[..., Any]:
    """`in_form` as a norm with the arguments that kernels.in_form looks for."""
    if not takes_form and adds:
        return lambda x, residual, weight, eps: in_form(x, residual, weight, eps, form=first)
    if not takes_form:
        return lambda x, weight, eps: in_form(x, weight, eps, form=first)
    if adds:
        return lambda x, residual, weight, eps, offset=0.0, round_once=False: in_form(
            x, residual, weight, eps, form=Form(offset, round_once)
        )
    return lambda x, weight, eps, offset=0.0, round_once=False: in_form(x, weight, eps, form=Form(offset, round_once))


def installed() -> list[str]:
    """Those names of BENCHED whose package is installed."""
    return [
        name
        for name in BENCHED
        if name not in PACKAGES or find_spec(PACKAGES[name].source.partition(":")[0].partition(".")[0])
    ]


def load(name: str, device: torch.device, form: Form = LLAMA) -> Backend:
    """load_backend that takes the peers' short names too.

    Raises InputError if a peer's package is missing or has no kernels for `device`.
    """
    short = name.removeprefix("scripts.peers:")
    if package := PACKAGES.get(short):
        fetch(package.source, package)
        if device.type != "cuda" and chosen_gpu() is None:
            raise InputError(f"norm '{name}': its kernels take GPU tensors and the device is '{device}'; leave it out")
    if short not in [*PACKAGES, *BENCHED]:
        return load_backend(name, device, form)
    backend = load_backend(f"scripts.peers:{short}", device)
    if name == short:  # messages name it as the user has
        backend = backend._replace(description=backend.description.removeprefix("scripts.peers:"))
    return in_form(backend, form)


@functools.cache  # looked up once, so that timed calls don't pay for it
def fetch(source: str, package: Package) -> Any:
    """What a peer's source holds. Raises InputError with the line that installs it."""
    module, _, attribute = source.partition(":")
    try:
        if emulated_gpu() is None:
            return getattr(_import(module, package), attribute)
        from scripts.as_cuda import as_cuda

        os.environ.setdefault("GEMS_VENDOR", "nvidia")  # flag_gems would ask nvidia-smi
        with as_cuda():
            return getattr(_import(module, package), attribute)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library that it needs
        message = f"can't import {attribute} from {module} ({error}); pip install --no-deps {package.install}"
        raise InputError(message) from error


def _import(module: str, package: Package) -> ModuleType:
    if package.bare:
        parts = module.split(".")
        parents = [".".join(parts[: depth + 1]) for depth in range(len(parts) - 1)]
        for name in [*parents, *package.install.split()[1:]]:
            _import_bare(name)
    return importlib.import_module(module)


def _import_bare(name: str) -> None:
    """Put a package into sys.modules that has its modules, but of which nothing has run."""
    top, *inner = name.split(".")
    spec = sys.modules[top].__spec__ if top in sys.modules else find_spec(top)
    if name not in sys.modules and spec is not None and spec.submodule_search_locations:
        package = sys.modules[name] = ModuleType(name)
        package.__spec__, package.__path__ = spec, [str(Path(spec.submodule_search_locations[0], *inner))]
