"""The memories of an emulated GPU, which watch what is done to them.

Addresses are the machine's own. Every tensor that a launch is given has a space of 2^40 bytes to itself, so an address
outside of it is found as such, even where it would meet another tensor's elements in the same storage. A tensor may
have more elements than fit this machine as long as few of them are touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kernels.emulated.rounding import Array
from kernels.emulated.words import WORDS, as_words, lazy_zeros, memory_at, ones

if TYPE_CHECKING:
    from kernels.emulated.unwritten import Shadow

SPACE = 40  # bits of the offset within a tensor's storage
UNWRITTEN, ON_ITS_WAY = 32767, 32766  # the mark of a place in shared memory that has no writer yet
LAST_MARK = 510 << 6  # marks below it count barriers
SEVERAL = 63  # instead of the one warp that read a place


def constant_addresses(constants: dict[str, bytes]) -> dict[str, int]:
    """Where a kernel's own tables are: behind all tensors."""
    return {name: (2**22 + number) << SPACE for number, name in enumerate(constants)}


class Threads(Protocol):
    """What memory and counts ask the blocks (blocks.py) whose threads use them."""

    shape: tuple[int, int]  # (C, T): blocks, and threads of each
    ids: Array  # (C, 1)
    barriers: Array  # (C, 1), that each block has passed
    warps: Array  # (1, T)
    synchronises: bool  # by atomic instructions, so that blocks may read what others wrote
    memory: GlobalMemory

    def full(self, array: Array) -> Array: ...

    def thread(self, lane: int, mask: Array | None, shape: tuple[int, ...]) -> tuple[int, int]: ...


class Violation(Exception):
    """What a thread did wrong: the one that gave address number `lane`, or the one `at` a row of blocks and a place."""

    def __init__(self, message: str, lane: int = 0, at: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.lane, self.at = lane, at


class Incomplete(Violation):
    """Some threads of a warp or of a block do together what others of it don't."""


class SeveralTensors(Exception):
    """The threads of one instruction touch different tensors."""


class Storage:
    """The memory that one or more tensors share."""

    def __init__(self, tensor: torch.Tensor, shadow: Shadow | None) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        # As far from a multiple of 16 as on this machine: Triton has looked how the tensors are aligned there.
        self.start = address % 16
        self.bytes = memory_at(address - self.start, self.start + size)
        self.shadow = shadow
        self.writers: Array | None = None  # who wrote each unit last in this launch; None: nobody looks
        self.unit = 16  # bytes of the smallest element


class Buffer:
    """A tensor that a launch was given, with a space of addresses to itself."""

    def __init__(self, name: str, tensor: torch.Tensor, number: int, storage: Storage) -> None:
        self.name, self.tensor, self.storage = name, tensor, storage
        self.base = number << SPACE
        item = tensor.element_size()
        strides = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        # The tensor lies from byte `first` to before `last`; nothing is between its elements where `allowed` is None.
        self.first = storage.start + int(tensor.storage_offset()) * item
        self.last, self.allowed = self.first, None
        if tensor.numel():
            self.last += item * (1 + sum((size - 1) * stride for size, stride in strides))
            storage.unit = min(storage.unit, item)
            if math.prod(size for size, _ in strides) * item != self.last - self.first:
                # A view leaves out the rest of a row, say: 1 for each byte of the storage that belongs to an element.
                self.allowed = lazy_zeros(len(storage.bytes), np.uint8)
                sizes, steps = [size for size, _ in strides], [stride * item for _, stride in strides]
                elements = np.lib.stride_tricks.as_strided(self.allowed[self.first :], (*sizes, item), (*steps, 1))
                elements[...] = 1

    def describe(self, offset: int) -> str:
        """Where a byte lies, in words."""
        what = f"{self.name} {tuple(self.tensor.shape)} {str(self.tensor.dtype).removeprefix('torch.')}"
        if offset >= self.last:
            return f"{offset - self.last} bytes behind the end of {what}"
        if offset < self.first:
            return f"{self.first - offset} bytes before {what}"
        return f"byte {offset - self.first} of {what}"

    def describe_gap(self, offset: int, width: int) -> str:
        """Where the first byte of a word lies that belongs to no element, in words."""
        allowed: Array = self.allowed  # type: ignore[assignment]
        offset += int(np.argmin(allowed[offset : offset + width]))
        end = offset - int(np.argmax(allowed[offset - 1 :: -1]))  # of the element before it
        return f"{offset - end} bytes behind the element at {self.describe(end - self.tensor.element_size())}"


class GlobalMemory:
    """The tensors that a launch was given."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}  # by the number of their space
        self.storages: dict[tuple[int, int], Storage] = {}  # by their address on this machine and their size

    def add(self, name: str, tensor: torch.Tensor, shadow: Shadow | None = None) -> int:
        """The address of the tensor's first element. The shadow tells where its storage has been written."""
        key = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if key not in self.storages:
            self.storages[key] = Storage(tensor, shadow)
        number = len(self.buffers) + 1
        buffer = self.buffers[number] = Buffer(name, tensor, number, self.storages[key])
        return buffer.base + buffer.first

    def add_constants(self, constants: dict[str, bytes]) -> None:
        """Tables that a kernel brings along."""
        for name, address in constant_addresses(constants).items():
            tensor = torch.tensor(list(constants[name]), dtype=torch.uint8)
            self.buffers[address >> SPACE] = Buffer(name, tensor, address >> SPACE, Storage(tensor, None))

    def _find(self, addresses: Array, width: int, does: str) -> tuple[Buffer, Array]:
        """The buffer that holds all addresses, and the index of each in it, in words of `width` bytes."""
        number = int(addresses.flat[0]) >> SPACE
        buffer = self.buffers.get(number)
        offsets = (addresses - (number << SPACE)).view(np.uint64)  # what lies before is far behind
        if buffer is None or int(offsets.max()) + width > buffer.last or (
            buffer.first and int(offsets.min()) < buffer.first
        ):  # fmt: skip
            raise self._stray(addresses, width, does)
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (width - 1):
            lane = int(np.flatnonzero(offsets & np.uint64(width - 1))[0])
            place = buffer.describe(int(offsets.flat[lane]))
            raise Violation(f"{does} {width} bytes at once at an address that {width} does not divide, {place}", lane)
        index = (offsets >> np.uint64(width.bit_length() - 1)).view(np.int64)
        if buffer.allowed is not None:
            inside = as_words(buffer.allowed, width)[index] == ones(width)
            if not inside.all():
                lane = int(np.flatnonzero(~inside)[0])
                place = buffer.describe_gap(int(offsets.flat[lane]), width)
                raise Violation(f"{does} {width} bytes between the elements of a view: {place}", lane)
        return buffer, index

    def _stray(self, addresses: Array, width: int, does: str) -> Violation | SeveralTensors:
        """The first address that is in no tensor; where there is none, the lanes are in several tensors."""
        flat = addresses.reshape(-1)
        numbers = flat >> SPACE
        for number in np.unique(numbers):
            buffer = self.buffers.get(int(number))
            lanes = np.flatnonzero(numbers == number)
            if buffer is None:
                before = self.buffers.get(int(number) + 1)
                offset = int(flat[lanes[0]]) - ((int(number) + 1) << SPACE)
                where = f"address {int(flat[lanes[0]]):#x}, in no tensor"
                if before and offset >= -(1 << (SPACE - 1)):
                    where = before.describe(offset)
                return Violation(f"{does} {width} bytes outside the tensors: {where}", int(lanes[0]))
            offsets = flat[lanes] - buffer.base
            bad = np.flatnonzero((offsets < buffer.first) | (offsets + width > buffer.last))
            if len(bad):
                lane, offset = int(lanes[bad[0]]), int(offsets[bad[0]])
                after = self.buffers.get(int(number) + 1)
                if after is not None and offset > 1 << (SPACE - 1):  # nearer to the next one
                    buffer, offset = after, offset - (1 << SPACE)
                elif offset >= buffer.first:  # the word may begin inside
                    offset = max(offset, buffer.last)
                return Violation(f"{does} {width} bytes outside the tensors: {buffer.describe(offset)}", lane)
        return SeveralTensors(f"{does} several tensors in one instruction")

    def load(self, addresses: Array, width: int, blocks: Threads, mask: Array | None) -> Array:
        """A word of `width` bytes for each address."""
        buffer, index = self._find(addresses, width, "reads")
        storage = buffer.storage
        if storage.shadow:
            self._check_written(buffer, storage.shadow, index, width, "reads")
        if storage.writers is not None:
            self._check_writers(buffer, addresses, width, blocks, mask)
        return as_words(storage.bytes, width).take(index, mode="clip")

    def store(self, addresses: Array, values: Array, width: int, blocks: Threads, mask: Array | None) -> None:
        """Write a word of `width` bytes, as load returns them, to each address."""
        buffer, index = self._find(addresses, width, "writes")
        storage = buffer.storage
        as_words(storage.bytes, width)[index] = values
        if storage.shadow:
            storage.shadow.mark(index, width)
        if storage.writers is not None:
            units, me = self._units(buffer, addresses, width, blocks, mask)
            storage.writers[units] = me

    @staticmethod
    def _check_written(buffer: Buffer, shadow: Shadow, index: Array, width: int, does: str) -> None:
        lane = shadow.first_unwritten(index, width)
        if lane is not None:
            place = buffer.describe(int(index.flat[lane]) * width)
            raise Violation(f"{does} global memory that nobody has written: {place}", lane)

    def watch(self, loaded: Iterable[int], stored: Iterable[int]) -> None:
        """From now on, find reads of what another warp or block has written with no barrier in between.

        Only where that may be: in a storage of which one address is loaded from and one is stored to.
        """
        from_these, to_these = (
            {id(self.buffers[a >> SPACE].storage) for a in ends if a >> SPACE in self.buffers}
            for ends in (loaded, stored)
        )
        for storage in self.storages.values():
            if id(storage) in from_these & to_these:
                storage.writers = lazy_zeros(len(storage.bytes) // storage.unit + 1, np.int64)

    def _units(
        self, buffer: Buffer, addresses: Array, width: int, blocks: Threads, mask: Array | None
    ) -> tuple[Array, Array]:
        """The units that each thread touches, (threads, units), and who it is: block, barriers passed, warp."""
        me = (blocks.ids + 1) << 32 | blocks.barriers << 8 | blocks.warps
        me = np.broadcast_to(me, blocks.shape)
        if mask is None:
            addresses = np.broadcast_to(addresses, blocks.shape)
        else:
            me = me[np.broadcast_to(mask, blocks.shape)]
        unit = buffer.storage.unit
        return (addresses[..., None] - buffer.base) // unit + np.arange(max(1, width // unit)), me[..., None]

    def _check_writers(self, buffer: Buffer, addresses: Array, width: int, blocks: Threads, mask: Array | None) -> None:
        units, me = self._units(buffer, addresses, width, blocks, mask)
        writer = buffer.storage.writers[units]  # type: ignore[index]
        elsewhere = (writer != 0) & (writer >> 32 != me >> 32) & (not blocks.synchronises)
        behind = (writer >> 8 == me >> 8) & (writer != me)  # same block and barrier, another warp
        bad = np.flatnonzero(elsewhere | behind)
        if len(bad):
            thread = int(bad[0]) // units.shape[-1]
            place = buffer.describe(int(units.flat[bad[0]]) * buffer.storage.unit)
            another_block = elsewhere.reshape(-1)[bad[0]]
            who = "another block has written" if another_block else "another warp has written since the last barrier"
            raise Violation(f"reads what {who}: {place}", at=blocks.thread(thread, mask, blocks.shape))

    def locate(self, addresses: Array, width: int) -> tuple[Array, Array]:
        """All words of the storage that holds the addresses, and the index of each: for atomic instructions."""
        buffer, index = self._find(addresses, width, "changes")
        if buffer.storage.shadow:
            self._check_written(buffer, buffer.storage.shadow, index, width, "changes")
        return as_words(buffer.storage.bytes, width), index


class LocalMemory:
    """What each thread has to itself, poisoned: an array that a kernel indexes, as the sine of a large number does."""

    def __init__(self, threads: int, size: int) -> None:
        self.size = size  # of a thread's part
        self.bytes = np.full(threads * size, 0xFF, np.uint8)

    def index(self, addresses: Array, width: int, does: str, threads: Array) -> Array:
        """The number of each thread's address among all words of `width` bytes."""
        bad = (addresses < 0) | (addresses + width > self.size) | (addresses & (width - 1) != 0)
        if bad.any():
            lane = int(np.flatnonzero(bad)[0])
            message = f"{does} {width} bytes at byte {int(addresses.flat[lane])} of its local memory"
            raise Violation(f"{message}, of which it has {self.size}", lane)
        return addresses // width + threads * (self.size // width)


class SharedMemory:
    """The shared memory of some blocks, which knows who has written and read each place since the last barrier.

    A place is `unit` bytes, the least that the kernel reads or writes there at once. Its mark is the number of barriers
    that its last writer had passed, times 64, plus that writer's warp. So a mark is below 64 times a block's barriers
    where a barrier lies between. As long as all blocks use the same places at once, the marks of one stand for all.

    An index is the number of a word among those of all blocks, or, with the shape (1, T), of each block.
    """

    def __init__(self, blocks: int, size: int, unit: int) -> None:
        self.limit, self.unit = size, unit
        self.size = -(-size // 16) * 16  # of a block's part
        self.rows = np.arange(blocks)[:, None]
        self.bytes = np.zeros(blocks * self.size, np.uint8)
        self.alike = True  # so far: writers and readers are those of one block
        self.writers = np.full(self.size // unit, UNWRITTEN, np.int16)
        self.readers = np.zeros(self.size // unit, np.int16)
        self.reads: list[tuple[Array, int, Array]] = []  # since the last barrier: index, width, and marks of who reads

    def index(self, addresses: Array, width: int, does: str, rows: Array | None = None) -> Array:
        """The index of each address, of words of `width` bytes: of every block, or of the block rows[i]."""
        offsets = addresses.view(np.uint64)  # a negative one is far behind
        if int(offsets.max()) + width > self.limit:
            lane = int(np.flatnonzero(offsets > max(0, self.limit - width))[0])
            found = int(addresses.flat[lane])
            message = f"{does} {width} bytes at byte {found} of shared memory"
            raise Violation(f"{message}, and the block has {self.limit}", lane)
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (width - 1):
            lane = int(np.flatnonzero(offsets & np.uint64(width - 1))[0])
            message = f"{does} {width} bytes of shared memory at once at an address that {width} does not divide"
            raise Violation(f"{message}, byte {int(addresses.flat[lane])}", lane)
        words = addresses >> (width.bit_length() - 1)
        if rows is None and len(words) == 1:
            return words
        return words + (self.rows if rows is None else rows) * (self.size // width)

    def _of_all(self, index: Array, width: int) -> Array:
        """The index among the words of all blocks."""
        return index + self.rows * (self.size // width) if index.ndim == 2 and len(index) == 1 else index

    def _of_marks(self, index: Array, width: int, me: Array) -> Array:
        """The index among the marks, which become those of all blocks where these don't do the same."""
        if self.alike and not (index.ndim == 2 and len(index) == len(me) == 1):
            self.alike, blocks = False, len(self.rows)
            self.writers, self.readers = np.tile(self.writers, blocks), np.tile(self.readers, blocks)
            self.reads = [(self._of_all(each, wide), wide, who) for each, wide, who in self.reads]
        return index if self.alike else self._of_all(index, width)

    def load(self, index: Array, width: int, me: Array, since: int) -> Array:
        """The words at `index`. me: the readers' marks; those from `since` on may be younger than the last barrier."""
        marked = self._of_marks(index, width, me)
        found = self._places(self.writers, marked, width)
        if int(found.max()) >= since:
            self._check_read(found, marked, width, me)
        self.reads.append((marked, width, me))
        words = self.bytes.view(WORDS[width])
        if index.ndim == 2 and len(index) == 1:
            return words.reshape(len(self.rows), -1).take(index[0], axis=1)
        return words.take(index)

    def store(self, index: Array, values: Array, width: int, me: Array) -> None:
        self.claim(index, width, me, me)
        self.bytes.view(WORDS[width])[self._of_all(index, width)] = values

    def claim(self, index: Array, width: int, me: Array, marks: Array) -> None:
        """Write marks to the words at `index`, after a look at who has read them."""
        index = self._of_marks(index, width, me)
        if self.reads:
            self._note_reads()
            found = self._places(self.readers, index, width)
            bad = (found ^ np.broadcast_to(me, index.shape)[..., None]).view(np.uint16) - np.uint16(1) < SEVERAL
            if bad.any():
                what = "writes shared memory that another warp has read since the last barrier"
                raise self._violation(what, bad, index, width)
        self._set_places(self.writers, index, width, marks)

    def refuse_under_way(self, index: Array, width: int) -> None:
        """Raise Violation where an asynchronous copy will write to a word that is written to now."""
        index = self._of_all(index, width)  # copies have set the blocks apart
        bad = self._places(self.writers, index, width) == ON_ITS_WAY
        if bad.any():
            what = "writes shared memory to which an asynchronous copy is on its way"
            raise self._violation(what, bad, index, width)

    def _places(self, marks: Array, index: Array, width: int) -> Array:
        """(..., n): the marks of the n places of each word."""
        count = max(1, width // self.unit)
        size = min(count * 2, 16)
        if count * 2 == size:
            return marks.view(WORDS[size]).take(index)[..., None].view(np.int16)
        return marks.reshape(-1, count)[index]

    def _set_places(self, marks: Array, index: Array, width: int, values: Array) -> None:
        """Write to all places of each word the mark in `values`, which broadcasts to the index."""
        count = max(1, width // self.unit)
        values = np.repeat(values[..., None], count, axis=-1)
        if count * 2 <= 16:
            marks.view(WORDS[count * 2])[index] = values.view(WORDS[count * 2])[..., 0]
        else:
            marks.reshape(-1, count)[index] = values

    def _check_read(self, found: Array, index: Array, width: int, me: Array) -> None:
        mine = np.broadcast_to(me, index.shape)[..., None]
        bad = (found >= LAST_MARK) | ((found ^ mine).view(np.uint16) - np.uint16(1) < SEVERAL)
        if bad.any():
            what = {
                UNWRITTEN: "that nobody has written",
                ON_ITS_WAY: "before the asynchronous copy to it was waited for",
            }.get(int(found[bad][0]), "that another warp has written since the last barrier")
            raise self._violation(f"reads shared memory {what}", bad, index, width)

    def _note_reads(self) -> None:
        """Enter the reads since the last barrier into `readers`. A place that several warps have read is SEVERAL's."""
        for index, width, me in self.reads:
            mine = np.broadcast_to(me, index.shape)
            before = self._places(self.readers, index, width)
            self._set_places(self.readers, index, width, mine)
            after = self._places(self.readers, index, width)  # of lanes that read one place, the last has entered
            shared = (after != mine[..., None]) | ((before ^ mine[..., None]).view(np.uint16) - np.uint16(1) < SEVERAL)
            lanes = shared.any(-1)
            if lanes.any():
                self._set_places(self.readers, index[lanes], width, mine[lanes] | np.int16(SEVERAL))
        self.reads.clear()

    def pass_barrier(self, all_blocks: bool) -> None:
        """Forget reads that lie before a barrier of all blocks; keep the others, whose marks tell."""
        if all_blocks:
            self.reads.clear()
        else:
            self._note_reads()

    def count_anew(self) -> None:
        """Count barriers from the start: all that was written or read lies before those to come."""
        for marks in (self.writers, self.readers):
            marks[marks < LAST_MARK] = 0

    def _violation(self, message: str, bad: Array, index: Array, width: int) -> Violation:
        lane, place = divmod(int(np.flatnonzero(bad)[0]), bad.shape[-1])
        byte = int(index.reshape(-1)[lane]) * width % self.size + place * self.unit
        return Violation(f"{message}, byte {byte}", lane)
