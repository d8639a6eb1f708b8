"""The GPUs that kernels are compiled for, and the calls that are compiled."""

from __future__ import annotations

import re
from types import ModuleType
from typing import NamedTuple

from kernels.form import FORMS, LLAMA, Form

SHAPE = (8, 2048)  # of the rows: few enough for partial sums to show
N_ROWS = SHAPE[0] * SHAPE[1]


class Target(NamedTuple):
    backend: str
    arch: int | str
    warp_size: int
    multiprocessors: int  # of the GPU in the comment; the launcher asks for them
    shared: int  # bytes that a block may have: NVIDIA's cuda/__device/arch_traits.h, LLVM's AMDGPU guide
    since: tuple[int, int]  # the first Triton whose wheel compiles for it


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 108, 163 * 1024, (3, 2)),  # A100
    "sm_90": Target("cuda", 90, 32, 132, 227 * 1024, (3, 2)),  # H100
    "sm_100": Target("cuda", 100, 32, 148, 227 * 1024, (3, 3)),  # B200
    "sm_120": Target("cuda", 120, 32, 170, 99 * 1024, (3, 3)),  # GeForce RTX 5090
    "gfx942": Target("hip", "gfx942", 64, 304, 64 * 1024, (3, 3)),  # MI300X
}


class Case(NamedTuple):
    """The dtypes of a call, its form, and its options."""

    x: str
    residual: str
    weight: str | None
    form: Form = LLAMA
    frozen: bool = False  # nobody wants dweight
    strided: bool = False  # axes swapped, so that a row is found by two strides


CASES = {
    "bfloat16": Case("bfloat16", "bfloat16", "bfloat16"),
    "float16": Case("float16", "float16", "float16"),
    "float32": Case("float32", "float32", "float32"),
    "mixed": Case("bfloat16", "bfloat16", "float32"),
    "autocast": Case("bfloat16", "float32", "float32"),
    "gemma": Case("bfloat16", "bfloat16", "bfloat16", FORMS["gemma"]),
    "no-weight": Case("bfloat16", "bfloat16", None),
    "frozen": Case("bfloat16", "bfloat16", "bfloat16", frozen=True),
    "strided": Case("bfloat16", "bfloat16", "bfloat16", strided=True),
}


def version_of(triton: ModuleType) -> tuple[int, ...]:
    """Major and minor version, as in Target.since."""
    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
