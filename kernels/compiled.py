"""The formula under torch.compile, which fuses it into one kernel on a GPU and one C++ loop on a CPU."""

from __future__ import annotations

import os
import shutil

import torch
from torch import Tensor

from kernels import InputError, add_then, reference
from kernels.torch_version import TORCH_2_13

# By default Inductor drops the rounding of x_hat, and a quarter of the elements in half precision change their last
# bit. fullgraph: a shape or dtype too many for Dynamo's cache is an error, not a quiet return to eager.
OPTIONS = {"fullgraph": True, "options": {"emulate_precision_casts": True}}
if TORCH_2_13:
    rms_norm = torch.compile(reference.rms_norm, **OPTIONS)
    add_rms_norm = torch.compile(reference.add_rms_norm, **OPTIONS)
else:  # on a CPU it drops that rounding all the same, unless the graph ends there
    _normalize = torch.compile(lambda x, eps: reference.normalize(x, eps).to(x.dtype), **OPTIONS)
    _rms_norm = torch.compile(reference.rms_norm, **OPTIONS)

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
