"""Know which memory nobody has written: what torch.empty and its like return begins poisoned.

The functions of FRESH fill what they return with poison, NaN in floating point of 16 bits and more, and hang a shadow
on its storage, where launches enter what they write. An element that no launch has written and that still holds
poison has been written by nobody: what torch, NumPy or a collective writes replaces the poison.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.emulated.rounding import Array
from kernels.emulated.words import as_words, memory_at, ones

FRESH = (
    (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"),
    (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"),
)  # fmt: skip
POISON = np.array([0xF5, 0xFF], np.uint8)  # repeated
LARGEST = 2**28  # bytes; a larger tensor may exist for a few of its pages, and filling it would touch them all


class Shadow:
    """Where launches have written to the storage of a fresh tensor, whose elements have `item` bytes."""

    def __init__(self, memory: Array, item: int) -> None:
        self.memory, self.item = memory, item
        self.poison = np.resize(POISON, item)
        self.written = np.zeros(len(memory), np.uint8)  # 1 where they have

    def mark(self, index: Array, width: int) -> None:
        """Enter that the words of `width` bytes at `index` have been written."""
        as_words(self.written, width)[index] = ones(width)

    def first_unwritten(self, index: Array, width: int) -> int | None:
        """The first in `index` of the words of `width` bytes that hold an element which nobody has written."""
        known = as_words(self.written, width)[index] == ones(width)
        if known.all():
            return None
        lanes = np.flatnonzero(~known)
        elements = (index.reshape(-1)[lanes] * width // self.item)[:, None] + np.arange(max(1, width // self.item))
        written, memory = self.written.reshape(-1, self.item), self.memory.reshape(-1, self.item)
        bad = ~written[elements].any(-1) & (memory[elements] == self.poison).all(-1)
        if bad.any():
            return int(lanes[np.flatnonzero(bad.any(-1))[0]])
        written[elements] = 1  # by somebody else
        return None


def shadow_of(tensor: torch.Tensor) -> Shadow | None:
    """The shadow of the tensor's storage; None where the storage has none, or all of it has been written."""
    storage: Any = tensor.untyped_storage()
    shadow: Shadow | None = getattr(storage, "shadow", None)
    if shadow and (len(shadow.memory) != storage.nbytes() or shadow.written.view(np.bool_).all()):
        storage.shadow = shadow = None
    return shadow


def poison(tensor: Any) -> None:
    """Fill a fresh tensor's memory, and hang a shadow on its storage. Fake tensors and the like have no memory."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return
    try:
        storage: Any = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # torch.func's wrappers
        return
    if not 0 < size <= LARGEST:
        return
    memory = memory_at(address, size)
    memory[: size // 2 * 2].view(np.uint16)[...] = POISON.view(np.uint16)
    memory[size // 2 * 2 :] = POISON[0]
    # In integers of 8 and 16 bits, poison may be a number like any other.
    if address % 16 == 0 and (tensor.element_size() > 2 or tensor.dtype in (torch.float16, torch.bfloat16)):
        storage.shadow = Shadow(memory, tensor.element_size())


def watch_fresh_memory() -> None:
    """Poison what the functions of FRESH return in this process from now on."""
    with torch.device("cpu"):
        torch.empty(0)  # so that torch has listed its own functions, not ours, as those that such a `with` is for
    for owner, name in FRESH:
        function = getattr(owner, name)
        if not hasattr(function, "__wrapped__"):
            setattr(owner, name, _poisoning(function))


def _poisoning(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def fresh(*args: Any, **options: Any) -> torch.Tensor:
        tensor = function(*args, **options)
        if not torch.compiler.is_compiling() and "out" not in options:
            poison(tensor)
        return tensor

    return fresh
