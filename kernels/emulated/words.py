"""Memory as words: the bytes that an instruction reads or writes at once."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

from kernels.emulated.rounding import Array

# Types that NumPy copies without looking at them, by their bytes.
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
LARGE = 2**28  # bytes


def as_words(array: Array, width: int) -> Array:
    """Bytes as words; what is left over at the end is not a whole word, and nobody reads it as one."""
    return array[: len(array) // width * width].view(WORDS[width])


def ones(width: int) -> Array:
    """A word whose bytes all are 1."""
    return np.ones(width, np.uint8).view(WORDS[width])[0]


def lazy_zeros(size: int, dtype: type[np.generic]) -> Array:
    """Zeros whose pages appear when they are touched, even where this machine has less memory than that."""
    n_bytes = size * np.dtype(dtype).itemsize
    if n_bytes < LARGE:
        return np.zeros(size, dtype)
    no_reserve = 0x4000  # Linux's MAP_NORESERVE; Triton exists there alone
    return np.frombuffer(mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), dtype)


def memory_at(address: int, size: int) -> Array:
    """The bytes at an address of this machine."""
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memory, np.uint8) if size else np.zeros(0, np.uint8)
