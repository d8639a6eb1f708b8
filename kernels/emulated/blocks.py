"""The state of the blocks that an emulated GPU runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kernels.emulated.arithmetic import DTYPES
from kernels.emulated.memory import LAST_MARK, ON_ITS_WAY, GlobalMemory, Incomplete, LocalMemory, SharedMemory
from kernels.emulated.rounding import Array

if TYPE_CHECKING:
    from kernels.emulated.counts import Counts
    from kernels.emulated.ptx import Program

WARP = 32


class Blocks:
    """C blocks of T threads in lockstep.

    A register is an array that broadcasts to (C, T): (1, 1) if all threads hold one number, (C, 1) if those of a block
    do. A mask is such an array of truth values: the threads that take part; None stands for all of them.
    """

    def __init__(
        self, program: Program, ids: Array, grid: tuple[int, int, int], arguments: Sequence[int],
        memory: GlobalMemory, shared: tuple[int, int], synchronises: bool, counts: Counts | None,
    ) -> None:  # fmt: skip
        self.ids = ids.reshape(-1, 1)  # (C, 1)
        self.shape = (len(ids), program.threads)
        threads = np.arange(program.threads)[None]
        self.warps, self.lanes = threads // WARP, threads % WARP  # (1, T)
        self.barriers = np.ones((len(ids), 1), np.int64)  # that each block has passed, and one
        bits = [*arguments, *[0] * len(program.parameters)]  # Triton adds null pointers at the end
        self.arguments = np.array([each % 2**64 for each in bits], np.uint64)
        self.memory, self.counts = memory, counts
        self.shared = SharedMemory(len(ids), *shared)
        self._mark()
        self.local = LocalMemory(
            len(ids) * program.threads, sum(-(-size // 16) * 16 for size in program.local.values())
        )
        self.synchronises = synchronises  # by atomic instructions, so that blocks may read what others wrote
        # A register that nobody has written is all ones: NaN, -1, an address that is outside of everything.
        poison = {bits: np.full((1, 1), -1, f"i{bits // 8}").view(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
        poison[1] = np.zeros((1, 1), np.bool_)
        self.registers: list[Array] = [poison[bits] for bits in program.registers.values()]
        x, y, z = grid
        special = {
            "%tid.x": threads, "%tid.y": 0, "%tid.z": 0, "%laneid": self.lanes, "%warpid": self.warps,
            "%ctaid.x": self.ids % x, "%ctaid.y": self.ids // x % y, "%ctaid.z": self.ids // (x * y),
            "%ntid.x": program.threads, "%ntid.y": 1, "%ntid.z": 1, "%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z,
        }  # fmt: skip
        self.special = {name: np.array(value, np.uint32, ndmin=2) for name, value in special.items()}
        self.groups = np.zeros((len(ids), 1), np.int64)  # of asynchronous copies, that each block has committed
        self.copies: list[Copies] = []
        self.carry = np.zeros((1, 1), np.uint64)  # of the last sum that left one

    def who(self, mask: Array | None) -> Array:
        """The mark that each thread of the mask leaves in shared memory now, int16; (1, T) if blocks don't differ."""
        marks = self.marks
        return marks if mask is None else np.broadcast_to(marks, self.shape)[mask]

    def full(self, array: Array) -> Array:
        """The array with an element for every thread."""
        return np.broadcast_to(array, self.shape)

    def thread(self, lane: int, mask: Array | None, shape: tuple[int, ...]) -> tuple[int, int]:
        """Row and thread of address number `lane`: of those of a mask's threads, or of an array of this shape."""
        if mask is None:
            row, thread = np.unravel_index(lane, shape)
            return int(row), int(thread)
        return divmod(int(np.flatnonzero(self.full(mask))[lane]), self.shape[1])

    def gather(self, mask: Array | None, groups: int, what: str) -> None:
        """Raise Incomplete where only a part of a group of `groups` threads takes part."""
        if mask is None:
            return
        per_group = self.full(mask).reshape(-1, groups)
        torn = per_group.any(1) & ~per_group.all(1)
        if torn.any():
            first = int(np.flatnonzero(torn)[0])
            thread = first * groups + int(np.flatnonzero(~per_group[first])[0])
            raise Incomplete(f"does not reach {what} that others reach", at=divmod(thread, self.shape[1]))

    def pass_barrier(self, mask: Array | None) -> None:
        self.gather(mask, self.shape[1], "a barrier")
        self.barriers = self.barriers + (1 if mask is None else self.full(mask)[:, :1])
        self.shared.pass_barrier(mask is None)
        if int(self.barriers.max()) * 64 >= LAST_MARK:
            self.shared.count_anew()
            self.barriers = np.ones_like(self.barriers)
        self._mark()

    def _mark(self) -> None:
        counts = self.barriers[:1] if (self.barriers == self.barriers[0]).all() else self.barriers
        self.marks = (counts << 6 | self.warps).astype(np.int16)
        self.since = int(counts.min()) << 6

    def copy(self, index: Array, words: Array, width: int, mask: Array | None) -> None:
        """Begin an asynchronous copy of words to shared memory; it arrives when its group is waited for."""
        me = self.who(mask)
        if self.copies:
            self.shared.refuse_under_way(index, width)
        self.shared.claim(index, width, me, np.full_like(me, ON_ITS_WAY))
        lanes = np.arange(self.shape[0] * self.shape[1]) if mask is None else np.flatnonzero(self.full(mask))
        groups = self.groups[lanes // self.shape[1], 0]
        self.copies.append(Copies(width, lanes, groups, index.reshape(-1), words.reshape(-1)))

    def wait(self, pending: int, mask: Array | None) -> None:
        """Let those copies arrive that are not among the last `pending` groups of their thread."""
        enough = np.broadcast_to(self.groups - pending, self.shape).reshape(-1)
        active = None if mask is None else self.full(mask).reshape(-1)
        marks = np.broadcast_to(self.marks, self.shape).reshape(-1)
        kept = []
        for copies in self.copies:
            done = copies.groups < enough[copies.lanes]
            if active is not None:
                done &= active[copies.lanes]
            if not done.all():
                kept.append(copies.those(~done))
            if done.any():
                arrived = copies.those(done)
                self.shared.store(arrived.index, arrived.words, copies.width, marks[arrived.lanes])
        self.copies = kept


class Copies(NamedTuple):
    """Asynchronous copies under way: words of some width, and of each its thread, group, and index in shared memory."""

    width: int
    lanes: Array
    groups: Array
    index: Array
    words: Array

    def those(self, chosen: Array) -> Copies:
        return Copies(self.width, *(part[chosen] for part in self[1:]))


def immediate(text: str, dtype: np.dtype) -> Array | None:
    """The number that an operand spells out, (1, 1); None if it is none."""
    if text.startswith(("0f", "0F")):
        return np.full((1, 1), int(text[2:], 16), np.uint32).view(np.float32).view(dtype)
    if text.startswith(("0d", "0D")):
        return np.full((1, 1), int(text[2:], 16), np.uint64).view(np.float64).view(dtype)
    try:
        number = int(text.rstrip("U"), 0)
    except ValueError:
        return None
    if dtype == DTYPES["pred"]:
        return np.full((1, 1), number != 0)
    bits = dtype.itemsize * 8
    return np.full((1, 1), number & ((1 << bits) - 1), f"u{dtype.itemsize}").view(dtype)
