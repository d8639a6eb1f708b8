"""What the benchmarks share: a description of the machine and its limits, calls timed in turn, and their table."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any, NamedTuple, TypeVar

import torch

from model.cli import choose_autocast_dtype

Result = TypeVar("Result")
UNITS = {"s": 1.0, "ms": 1e-3, "MB": 1e6}  # in seconds or bytes
HEAD = f"{'':34}{'dtype':12}{'ours':>32}{'theirs':>32}{'theirs/ours':>22}"


class Limits(NamedTuple):
    """The best that the CPU did."""

    bandwidth: float  # bytes read per second
    products: dict[str, float]  # FLOP/s of a matrix product, by dtype


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


def measure_limits(dtypes: list[str]) -> Limits:
    """The bandwidth of reading 256 MB, and the rate of a matrix product in each dtype: the fastest of 5 calls."""
    large = torch.ones(2**26)  # not zeros: Linux would back them all with one page of memory
    bandwidth = large.nbytes / min(seconds(large.sum) for _ in range(5))
    products, n = {}, 1024
    for dtype in dtypes:
        a, b = (torch.ones(n, n, dtype=getattr(torch, dtype)) for _ in range(2))
        products[dtype] = 2 * n**3 / min(seconds(lambda a=a, b=b: a @ b.T) for _ in range(5))  # b as a layer's weight
    return Limits(bandwidth, products)


def seconds(call: Callable[[], Any]) -> float:
    """The time that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls: dict[str, Callable[[], Result]], repeats: int) -> dict[str, list[Result]]:
    """What each call returns, one result per repeat. All are called once before the first turn that counts."""
    results = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            result = call()
            if turn > 0:
                results[name].append(result)
    return results


def spread(numbers: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    low, _, high = quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3
    return median(numbers), low, high


def ratios(row: Row) -> list[float]:
    """Theirs over ours, within each turn."""
    return [theirs / ours for ours, theirs in zip(*row.found.values(), strict=True)] if "theirs" in row.found else []


def line(row: Row) -> str:
    """A row of the table: medians with their quartiles, the ratio, and the note."""

    def cell(numbers: list[float], digits: str, unit: str = "") -> str:
        if not numbers:
            return ""
        middle, low, high = (format(number, digits) for number in spread(numbers))
        return f"{middle} [{low}, {high}] {unit}".rstrip()

    scale = UNITS[row.unit]
    sides = ([number / scale for number in row.found.get(side, [])] for side in ("ours", "theirs"))
    ours, theirs = (cell(numbers, ".4g", row.unit) for numbers in sides)
    return f"{row.what:34}{row.dtype:12}{ours:>32}{theirs:>32}{cell(ratios(row), '.2f'):>22}   {row.note}".rstrip()
