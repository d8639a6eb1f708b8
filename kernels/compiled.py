"""The formula under torch.compile, which fuses it into one kernel on a GPU and one C++ loop on a CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import InputError, add_then, reference
from kernels.torch_version import TORCH_2_13

# By default Inductor drops the rounding of x_hat, and a quarter of the elements in half precision change their last
# bit. fullgraph: a graph too many for Dynamo's cache is an error, not a quiet return to eager.
OPTIONS: dict[str, Any] = {"fullgraph": True, "options": {"emulate_precision_casts": True}}
# There is a graph for each width and rank, and again without gradients, in inference mode, under autocast and for one
# row. Dynamo keeps 8, and a model with norms of q and k (OLMo 2, Gemma 3) that trains, validates and samples has more.
MOST_GRAPHS = 64
if TORCH_2_13:
    OPTIONS["recompile_limit"] = MOST_GRAPHS


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, **OPTIONS)

    def with_room(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of the graph around it
            return compiled(*inputs)
        with torch._dynamo.config.patch(cache_size_limit=MOST_GRAPHS):
            return compiled(*inputs)

    return compiled if TORCH_2_13 else with_room


if TORCH_2_13:
    rms_norm = compile_whole(reference.rms_norm)
    add_rms_norm = compile_whole(reference.add_rms_norm)
else:  # on a CPU it drops that rounding all the same, unless the graph ends there
    _normalize = compile_whole(lambda x, eps: reference.normalize(x, eps).to(x.dtype))
    _rms_norm = compile_whole(reference.rms_norm)

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_once: bool = False) -> Tensor:
        if round_once:
            return _rms_norm(x, weight, eps, offset, round_once)
        return reference.scale(_normalize(x, eps), x.dtype, weight, offset)

    add_rms_norm = add_then(rms_norm)


def check_device(device: torch.device) -> None:
    """Raise InputError where Inductor would find no C++ compiler for a CPU's code."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise InputError(
            f"torch.compile needs a C++ compiler on a CPU and '{compiler}' is not on the PATH; "
            "install one (and name it in CXX), or run without compilation, for example --norm torch"
        )
