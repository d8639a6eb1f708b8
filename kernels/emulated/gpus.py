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

_chosen: list[str] = []


def choose(name: str) -> None:
    _chosen[:] = [name]


def emulated_gpu() -> Gpu | None:
    """The GPU that this process emulates, if it does."""
    return GPUS[_chosen[0]] if _chosen else None


def description() -> str:
    return f"triton, compiled for {_chosen[0]}, on an emulated one"
