"""Shared by the benchmarks: a description of the machine and its limits, calls timed in turn, and their table."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from model.cli import choose_autocast_dtype
from model.large_pages import large_pages

Result = TypeVar("Result")
UNITS = {"s": 1.0, "ms": 1e-3, "MB": 1e6}  # in seconds or bytes
HEAD = f"{'':34}{'dtype':12}{'ours':>32}{'theirs':>32}{'theirs/ours':>22}"


class Row(NamedTuple):
    """One line of the table. Less is better."""

    what: str
    dtype: str
    unit: str  # to show the numbers in: a key of UNITS
    found: dict[str, list[float]]  # seconds or bytes, one per repeat, of "ours" and, with transformers, "theirs"
    note: str = ""


def describe(device: torch.device) -> str:
    """The device and what its figures depend on: instructions and threads of a CPU, and PyTorch's version."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        auto = str(choose_autocast_dtype("auto", device)).removeprefix("torch.")
        instructions = f"{torch.backends.cpu.get_cpu_capability()}; train.py --dtype auto is {auto}"
        name = f"CPU ({instructions}), {torch.get_num_threads()} threads"
    return f"{name}, {platform.machine()}, torch {torch.__version__}"


def measure_limits(dtypes: list[str]) -> tuple[float, dict[str, float]]:
    """Bytes per second of reading 256 MB, and FLOP/s of a matrix product by dtype: the fastest of 5 calls.

    Read in large pages where the system has them, as the compiled step reads its weights; small ones are slower.
    """
    large = large_pages(2**28).view(torch.float32).fill_(1)  # of zeros Linux would keep one page alone
    bandwidth = large.nbytes / min(seconds(large.sum) for _ in range(5))
    products, n = {}, 1024
    for dtype in dtypes:
        a, b = (torch.ones(n, n, dtype=getattr(torch, dtype)) for _ in range(2))
        products[dtype] = 2 * n**3 / min(seconds(lambda a=a, b=b: a @ b.T) for _ in range(5))  # b as a layer's weight
    return bandwidth, products


def seconds(call: Callable[[], Any]) -> float:
    """The time that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls: dict[str, Callable[[], Result]], repeats: int) -> dict[str, list[Result]]:
    """Results of each call, one per repeat. All are called once before the first turn that counts."""
    turns = [{name: call() for name, call in calls.items()} for _ in range(repeats + 1)]
    return {name: [turn[name] for turn in turns[1:]] for name in calls}


def line(row: Row) -> str:
    """A row of the table: medians with their quartiles, the ratio within each turn, and the note."""
    scale = UNITS[row.unit]
    ours, theirs = (np.array(row.found.get(side, [])) for side in ("ours", "theirs"))
    cells = f"{cell(ours / scale, '.4g', row.unit):>32}{cell(theirs / scale, '.4g', row.unit):>32}"
    ratio = cell(theirs / ours, ".2f") if theirs.size else ""
    return f"{row.what:34}{row.dtype:12}{cells}{ratio:>22}   {row.note}".rstrip()


def cell(numbers: np.ndarray, digits: str, unit: str = "") -> str:
    """Median and quartiles."""
    if not numbers.size:
        return ""
    low, median, high = (format(number, digits) for number in np.percentile(numbers, [25, 50, 75]))
    return f"{median} [{low}, {high}] {unit}".rstrip()
