"""Count what a launch does: sectors of global memory, passes over shared memory, instructions. No measure of time.

A count says what the threads ask for. What a cache answers, how much runs at once and what ptxas makes of the PTX
(it fuses mul and add, and drops most mov) is not in it.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulated.memory import SPACE, Threads
from kernels.emulated.rounding import Array

if TYPE_CHECKING:
    from kernels.emulated.ptx import Instruction

SECTOR = 32  # bytes that global memory moves at least
BANKS, BANK = 32, 4  # of shared memory, and the bytes of a word in each
WARP = 32
CLASS_OF = {  # what computes is "float" or "integer"
    **dict.fromkeys(("ld", "ldu", "st", "cp", "ldmatrix", "stmatrix", "atom", "red"), "memory"),
    **dict.fromkeys(("mov", "selp", "cvta", "prmt"), "move"),
    **dict.fromkeys(("shfl", "vote", "redux", "elect", "bar", "barrier", "fence", "membar"), "together"),
    "cvt": "convert",
}


class Counts:
    """What one launch did.

    `tensors` has the shapes and the bytes of an element of its tensors, by the kernel's names for them.
    """

    def __init__(self, kernel: str = "", grid: tuple[int, ...] = ()) -> None:
        self.kernel, self.grid = kernel, grid
        self.tensors: dict[str, tuple[tuple[int, ...], int]] = {}
        self.sectors: Counter[tuple[str, str]] = Counter()  # by tensor and "load", "store" or "atomic", each warp's own
        self.bytes: Counter[tuple[str, str]] = Counter()  # that threads asked for
        self.wavefronts = 0  # passes over shared memory
        self.conflicts = 0  # those of them that bank conflicts add
        self.executed: Counter[str] = Counter()  # instructions of threads, by class; also what a predicate switches off

    def sector_bytes(self, *names: str) -> int:
        """Bytes of all sectors moved, of these tensors or of all."""
        return SECTOR * sum(count for (name, _), count in self.sectors.items() if not names or name in names)

    def access(self, space: str, kind: str, blocks: Threads, addresses: Array, mask: Array | None, width: int) -> None:
        """An access of the threads of a mask, each to `width` bytes at its address."""
        everywhere = np.full(blocks.shape, -1, np.int64)
        if mask is None:
            everywhere[:] = addresses
        else:
            everywhere[mask] = addresses
        by_warp = everywhere.reshape(-1, WARP)
        if space == "shared":
            self._passes(by_warp, width)
        else:
            tensor = self._tensor(blocks, addresses)
            self.sectors[tensor, kind] += int(_new(np.sort(by_warp // SECTOR, axis=1)).sum())
            self.bytes[tensor, kind] += width * int((by_warp >= 0).sum())

    def _tensor(self, blocks: Threads, addresses: Array) -> str:
        buffer = blocks.memory.buffers.get(int(addresses.flat[0]) >> SPACE) if addresses.size else None
        return buffer.name if buffer else ""

    def _passes(self, by_warp: Array, width: int) -> None:
        """A warp's accesses to shared memory, (warps, 32).

        All banks together give 128 bytes. Accesses of 8 bytes go in halves of a warp, those of 16 in quarters.
        """
        words = max(1, width // BANK)  # of each thread
        groups = by_warp.reshape(-1, WARP // words)
        touched = groups[..., None] // BANK + (groups >= 0)[..., None] * np.arange(words)
        self._add_passes(touched.reshape(len(groups), -1))

    def matrix(self, rows: Array) -> None:
        """A matrix instruction: every 8 rows of 16 bytes, (warps, rows), are one pass if no two share a bank."""
        self._add_passes((rows.reshape(-1, 8)[..., None] // BANK + np.arange(4)).reshape(-1, 32))

    def _add_passes(self, words: Array) -> None:
        """(groups, n) words, -1 for none: a pass gives one word of each bank, to all threads that want it."""
        words = np.sort(words, axis=1)
        rows, columns = np.nonzero(_new(words))
        banks = rows * BANKS + words[rows, columns] % BANKS
        passes = np.bincount(banks, minlength=len(words) * BANKS).reshape(-1, BANKS).max(1)
        self.wavefronts += int(passes.sum())
        self.conflicts += int(np.maximum(passes - 1, 0).sum())

    def instructions(self, instructions: list[Instruction], blocks: Threads, mask: Array | None) -> None:
        """Instructions that the threads of a mask have run; branches are not among them."""
        threads = blocks.shape[0] * blocks.shape[1] if mask is None else int(blocks.full(mask).sum())
        for instruction in instructions:
            self.executed[class_of(instruction.name)] += threads


@functools.cache
def class_of(name: str) -> str:
    """The class of an instruction, such as "mul.wide.s32"; what computes goes by the type that it computes in."""
    first, *_, last = name.split(".")
    return CLASS_OF.get(first) or ("float" if last.startswith(("f", "bf")) else "integer")


def _new(ordered: Array) -> Array:
    """Which of sorted numbers, (n, m), differ from the one before them in their row, without -1."""
    new = ordered >= 0
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return new
