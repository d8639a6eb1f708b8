"""Count what an emulated launch does: memory moved in sectors, bank conflicts, instructions. No measure of time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kernels.emulated.rounding import Array

if TYPE_CHECKING:
    from kernels.emulated.blocks import Blocks
    from kernels.emulated.ptx import Instruction

SECTOR = 32  # bytes that global memory moves at least
BANKS = 32  # of shared memory, 4 bytes wide each


class Counts:
    """Sums over all launches that it is given to."""

    def __init__(self) -> None:
        self.sectors: Counter[str] = Counter()  # moved by each warp's access, by "load", "store", "atomic"
        self.bytes: Counter[str] = Counter()  # that threads asked for
        self.wavefronts = 0  # passes over shared memory
        self.conflicts = 0  # those of them that bank conflicts add
        self.executed: Counter[str] = Counter()  # instructions of threads, by the first part of their name

    def access(self, space: str, kind: str, blocks: Blocks, addresses: Array, mask: Array | None, width: int) -> None:
        """An access of the threads of a mask, each to `width` bytes at its address."""
        everywhere = np.full(blocks.shape, -1, np.int64)
        if mask is None:
            everywhere[:] = addresses
        else:
            everywhere[mask] = addresses
        by_warp = everywhere.reshape(-1, 32)
        if space == "global":
            self.sectors[kind] += _distinct(np.where(by_warp < 0, -1, by_warp // SECTOR))
            self.bytes[kind] += width * int((by_warp >= 0).sum())
            return
        # 32 threads of 4 bytes each fill the banks once; wider accesses go in halves and quarters of a warp.
        at_once = 32 // max(1, width // 4)
        words = by_warp.reshape(-1, at_once)
        steps = np.arange(max(1, width // 4))
        passes = _passes(np.where(words < 0, -1, words // 4)[..., None] + np.where(words < 0, 0, 1)[..., None] * steps)
        self.wavefronts += int(passes.sum())
        self.conflicts += int(np.maximum(passes - 1, 0).sum())

    def matrix(self, rows: Array) -> None:
        """A matrix instruction: every 8 rows of 16 bytes, (warps, rows), are one pass if no two share a bank."""
        words = rows.reshape(-1, 8)[..., None] // 4 + np.arange(4)
        passes = _passes(words)
        self.wavefronts += int(passes.sum())
        self.conflicts += int((passes - 1).sum())

    def instructions(self, instructions: list[Instruction], blocks: Blocks, mask: Array | None) -> None:
        """Instructions that the threads of a mask have run, also those that a predicate switched off."""
        threads = blocks.shape[0] * blocks.shape[1] if mask is None else int(blocks.full(mask).sum())
        for instruction in instructions:
            self.executed[instruction.parts[0]] += threads


def _distinct(rows: Array) -> int:
    """The number of different values in each row, without -1, summed over the rows."""
    ordered = np.sort(rows, axis=1)
    new = np.ones(ordered.shape, np.bool_)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return int((new & (ordered >= 0)).sum())


def _passes(words: Array) -> Array:
    """How often the banks must be passed for the words of each group, (groups, threads, words of a thread)."""
    groups = words.reshape(len(words), -1)
    passes = np.zeros((len(groups), BANKS), np.int64)
    ordered = np.sort(groups, axis=1)
    new = np.ones(ordered.shape, np.bool_)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    rows, columns = np.nonzero(new & (ordered >= 0))
    np.add.at(passes, (rows, ordered[rows, columns] % BANKS), 1)
    return passes.max(1)
