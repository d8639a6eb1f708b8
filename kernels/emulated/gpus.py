"""The GPUs that can be emulated, and the one that this process emulates. It imports nothing that takes time."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """What a launcher asks a GPU for."""

    example: str
    arch: int
    multi_processor_count: int
    shared: int  # bytes that a block may have: NVIDIA's cuda/__device/arch_traits.h
    warp_size: int = 32


GPUS = {
    "sm_80": Gpu("A100", 80, 108, 163 * 1024),
    "sm_90": Gpu("H100", 90, 132, 227 * 1024),
    "sm_100": Gpu("B200", 100, 148, 227 * 1024),
    "sm_120": Gpu("GeForce RTX 5090", 120, 170, 99 * 1024),
}

DEFAULT = "sm_90"  # on a machine without a GPU, where nobody names one

_chosen: list[str] = []  # the one that somebody has named
_default: list[str] = []  # the one that nobody has


def choose(name: str) -> None:
    _chosen[:] = [name]


def choose_default() -> None:
    _default[:] = [DEFAULT]


def chosen_gpu() -> Gpu | None:
    """The GPU that --emulate or a program has named for this process, if one has."""
    return GPUS[_chosen[0]] if _chosen else None


def emulated_gpu() -> Gpu | None:
    """The GPU that this process emulates, named or by default, if it does."""
    names = _chosen or _default
    return GPUS[names[0]] if names else None


def description() -> str:
    return f"triton, compiled for {(_chosen or _default)[0]}, on an emulated one: no measure of speed"
