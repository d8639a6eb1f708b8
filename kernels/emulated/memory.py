"""The memories of an emulated GPU, which watch what is done to them.

Addresses are the machine's own. Every tensor's storage has a space of 2^40 bytes to itself, so an address outside the
tensors is found as such, and a tensor may have more elements than fit this machine as long as few of them are touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels.emulated.rounding import Array

if TYPE_CHECKING:
    import torch

    from kernels.emulated.blocks import Blocks

SPACE = 40  # bits of the offset within a storage
# As what so many bytes are read at once: types that NumPy copies without looking at them.
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
UNWRITTEN, ON_ITS_WAY = -1, -2  # instead of the warp that wrote to a place of shared memory
SEVERAL = 63  # instead of the one warp that read a place


class Violation(Exception):
    """What a thread did wrong: the one that gave address number `lane`, or the one `at` a row of blocks and a number."""

    def __init__(self, message: str, lane: int = 0, at: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.lane, self.at = lane, at


class Buffer:
    """The storage of one or more tensors."""

    def __init__(self, tensor: torch.Tensor, number: int) -> None:
        import torch

        storage = tensor.untyped_storage()
        self.base = number << SPACE
        self.bytes: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload]
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.first, self.last = len(self.bytes), 0  # bytes that belong to a tensor lie from first to before last
        self.allowed: Array | None = None  # which of them do, one byte each; None: all
        self.written: Array | None = None  # 1 where somebody has written; None: everywhere
        self.writers: Array | None = None  # who wrote each unit last in this launch; None: nobody looks
        self.unit = 16  # bytes of the smallest element

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors.append((name, tensor))
        if not tensor.numel():
            return
        strides = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        item = tensor.element_size()
        first = tensor.storage_offset() * item
        last = first + item * (1 + sum((size - 1) * stride for size, stride in strides))
        alone = self.first >= self.last
        self.first, self.last = min(self.first, first), max(self.last, last)
        self.unit = min(self.unit, item)
        if not alone or int(np.prod([size for size, _ in strides])) * item != last - first:
            self._allow_only_elements()

    def _allow_only_elements(self) -> None:
        """Tell the tensors' elements from what lies between them: the rest of a row that a view leaves out."""
        import torch

        allowed = torch.from_numpy(np.zeros(len(self.bytes), np.uint8))  # torch.zeros would touch every page
        for _, tensor in self.tensors:
            item = tensor.element_size()
            strides = [stride * item for stride in tensor.stride()]
            view = allowed.as_strided((*tensor.shape, item), (*strides, 1), tensor.storage_offset() * item)
            view.fill_(1)
        self.allowed = allowed.numpy()

    def describe(self, offset: int) -> str:
        """Where a byte lies, in words."""
        name, tensor = self.tensors[0]
        what = f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        if offset >= self.last:
            return f"{offset - self.last} bytes behind the end of {what}"
        if offset < self.first:
            return f"{self.first - offset} bytes before {what}"
        return f"byte {offset - self.first} of {what}"


class GlobalMemory:
    """The tensors that a launch was given."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}
        self.numbers: dict[int, int] = {}  # of a storage, by its address on this machine

    def add(self, name: str, tensor: torch.Tensor) -> int:
        """The address of the tensor's first element."""
        key = tensor.untyped_storage().data_ptr()
        number = self.numbers.get(key)
        if number is None or not key:
            number = len(self.buffers) + 1
            self.numbers[key], self.buffers[number] = number, Buffer(tensor, number)
        self.buffers[number].add(name, tensor)
        return self.buffers[number].base + tensor.storage_offset() * tensor.element_size()

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
            inside = self._bytes(buffer.allowed, width)[index] == _ones(width)
            if not inside.all():
                lane = int(np.flatnonzero(~inside)[0])
                place = buffer.describe(int(offsets.flat[lane]))
                raise Violation(f"{does} memory between the elements of a view: {place}", lane)
        return buffer, index

    def _stray(self, addresses: Array, width: int, does: str) -> Violation:
        """The first address that is in no tensor; where there is none, the lanes are in several tensors."""
        flat = addresses.reshape(-1)
        numbers = flat >> SPACE
        for number in np.unique(numbers):
            buffer = self.buffers.get(int(number))
            lanes = np.flatnonzero(numbers == number)
            if buffer is None:
                before = self.buffers.get(int(number) + 1)
                offset = int(flat[lanes[0]]) - ((int(number) + 1) << SPACE)
                where = before.describe(offset) if before else f"address {int(flat[lanes[0]]):#x}, in no tensor"
                return Violation(f"{does} {width} bytes outside the tensors: {where}", int(lanes[0]))
            offsets = flat[lanes] - buffer.base
            bad = np.flatnonzero((offsets < buffer.first) | (offsets + width > buffer.last))
            if len(bad):
                lane, offset = int(lanes[bad[0]]), int(offsets[bad[0]])
                after = self.buffers.get(int(number) + 1)
                if after is not None and offset > 1 << (SPACE - 1):  # nearer to the next one
                    buffer, offset = after, offset - (1 << SPACE)
                return Violation(f"{does} {width} bytes outside the tensors: {buffer.describe(offset)}", lane)
        return Violation(f"{does} several tensors in one instruction, which is not emulated", 0)

    @staticmethod
    def _bytes(array: Array, width: int) -> Array:
        """The bytes as words; what is left over at the end is no whole word, and nobody reads it as one."""
        return array[: len(array) // width * width].view(WORDS[width])

    def load(self, addresses: Array, width: int, blocks: Blocks, mask: Array | None) -> Array:
        """A word of `width` bytes for each address."""
        buffer, index = self._find(addresses, width, "reads")
        if buffer.written is not None:
            known = self._bytes(buffer.written, width)[index] == _ones(width)
            if not known.all():
                lane = int(np.flatnonzero(~known)[0])
                place = buffer.describe(int(addresses.flat[lane]) - buffer.base)
                raise Violation(f"reads global memory that nobody has written: {place}", lane)
        if buffer.writers is not None:
            self._check_writers(buffer, addresses, width, blocks, mask)
        return self._bytes(buffer.bytes, width).take(index, mode="clip")

    def store(self, addresses: Array, values: Array, width: int, blocks: Blocks, mask: Array | None) -> None:
        """Write a word of `width` bytes, as load returns them, to each address."""
        buffer, index = self._find(addresses, width, "writes")
        self._bytes(buffer.bytes, width)[index] = values
        if buffer.written is not None:
            self._bytes(buffer.written, width)[index] = _ones(width)
        if buffer.writers is not None:
            units, me = self._units(buffer, addresses, width, blocks, mask)
            buffer.writers[units] = me

    def watch(self) -> None:
        """From now on, find reads of what another warp or block has written with no barrier in between."""
        for buffer in self.buffers.values():
            buffer.writers = np.zeros(len(buffer.bytes) // buffer.unit + 1, np.int64)

    def _units(
        self, buffer: Buffer, addresses: Array, width: int, blocks: Blocks, mask: Array | None
    ) -> tuple[Array, Array]:
        """The units that each lane touches, (lanes, units), and who it is: block, barriers passed, warp."""
        me = (blocks.ids + 1) << 32 | blocks.barriers << 8 | blocks.warps
        me = np.broadcast_to(me, blocks.shape)
        if mask is None:
            addresses = np.broadcast_to(addresses, blocks.shape)
        else:
            me = me[np.broadcast_to(mask, blocks.shape)]
        steps = np.arange(max(1, width // buffer.unit))
        return (addresses[..., None] - buffer.base) // buffer.unit + steps, me[..., None]

    def _check_writers(
        self, buffer: Buffer, addresses: Array, width: int, blocks: Blocks, mask: Array | None
    ) -> None:
        units, me = self._units(buffer, addresses, width, blocks, mask)
        writer = buffer.writers[units]  # type: ignore[index]
        elsewhere = (writer != 0) & (writer >> 32 != me >> 32) & (not blocks.synchronises)
        behind = (writer >> 8 == me >> 8) & (writer != me)  # same block and barrier, another warp
        if (elsewhere | behind).any():
            lane, unit = divmod(int(np.flatnonzero(elsewhere | behind)[0]), units.shape[-1])
            place = buffer.describe(int(units.reshape(-1, units.shape[-1])[lane, unit]) * buffer.unit)
            who = "another block has written" if elsewhere.any() else "another warp has written since the last barrier"
            raise Violation(f"reads what {who}: {place}", lane)

    def locate(self, addresses: Array, width: int) -> tuple[Array, Array]:
        """All words of the storage that holds the addresses, and the index of each: for atomic instructions."""
        buffer, index = self._find(addresses, width, "changes")
        if buffer.written is not None and not (self._bytes(buffer.written, width)[index] == _ones(width)).all():
            raise Violation("changes global memory that nobody has written")
        return self._bytes(buffer.bytes, width), index


class SharedMemory:
    """The shared memory of some blocks, (C, bytes). It knows who has written and read each place since the last barrier.

    A place is `unit` bytes, the least that the kernel reads or writes there at once.
    """

    def __init__(self, blocks: int, size: int, unit: int) -> None:
        self.size, self.unit = -(-size // 16) * 16, unit
        self.limit = size
        self.bytes = np.zeros(blocks * self.size, np.uint8)
        places = blocks * self.size // unit
        self.writers = np.full(places, UNWRITTEN, np.int32)
        self.readers = np.full(places, UNWRITTEN, np.int32)

    def find(self, addresses: Array, width: int, does: str, rows: Array) -> Array:
        """The index of each address, given within its block, in bytes of all blocks; rows are the blocks' numbers."""
        offsets = addresses.view(np.uint64) if addresses.dtype == np.int64 else addresses
        if int(offsets.max()) + width > self.limit:
            lane = int(np.flatnonzero(offsets + width > self.limit)[0])
            found = int(addresses.flat[lane])
            raise Violation(f"{does} byte {found} of shared memory, and the block has {self.limit}", lane)
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (width - 1):
            lane = int(np.flatnonzero(offsets & (width - 1))[0])
            message = f"{does} {width} bytes of shared memory at once at an address that {width} does not divide"
            raise Violation(f"{message}, byte {int(addresses.flat[lane])}", lane)
        return addresses + rows * self.size

    def places(self, index: Array, width: int) -> Array:
        """(lanes) -> (lanes, n): the places that each lane touches."""
        return index[..., None] // self.unit + np.arange(max(1, width // self.unit))

    def load(self, index: Array, width: int, me: Array) -> Array:
        places = self.places(index, width)
        self.check_read(places, me)
        return self.bytes.view(WORDS[width]).take(index // width, mode="clip")

    def store(self, index: Array, values: Array, width: int, me: Array) -> None:
        places = self.places(index, width)
        self.check_write(places, me)
        self.bytes.view(WORDS[width])[index // width] = values
        self.writers[places] = me[..., None]

    def check_read(self, places: Array, me: Array) -> None:
        me = me[..., None]
        writers = self.writers.take(places, mode="clip")
        apart = (writers ^ me).view(np.uint32)  # 0: this warp; below 64: another one, since the same barrier
        bad = (writers < 0) | (apart - np.uint32(1) < SEVERAL)
        if bad.any():
            lane, place = divmod(int(np.flatnonzero(bad)[0]), places.shape[-1])
            byte = int(places.reshape(-1, places.shape[-1])[lane, place]) * self.unit % self.size
            what = {
                UNWRITTEN: "that nobody has written",
                ON_ITS_WAY: "before the asynchronous copy to it was waited for",
            }.get(int(writers.reshape(-1)[lane * places.shape[-1] + place]))
            what = what or "that another warp has written since the last barrier"
            raise Violation(f"reads shared memory {what}, byte {byte}", lane)
        self.readers[places] = me
        others = self.readers.take(places, mode="clip") != me  # of several lanes that read a place, one is left
        if others.any():
            self.readers[places[others]] = (np.broadcast_to(me, places.shape)[others] & ~SEVERAL) | SEVERAL

    def check_write(self, places: Array, me: Array) -> None:
        me = me[..., None]
        readers = self.readers.take(places, mode="clip")
        bad = (readers >= 0) & (readers & ~SEVERAL == me & ~SEVERAL) & (readers != me)
        if bad.any():
            lane, place = divmod(int(np.flatnonzero(bad)[0]), places.shape[-1])
            byte = int(places.reshape(-1, places.shape[-1])[lane, place]) * self.unit % self.size
            raise Violation(f"writes shared memory that another warp has read since the last barrier, byte {byte}", lane)


def _ones(width: int) -> Array:
    """A word whose bytes all are 1."""
    return np.ones(width, np.uint8).view(WORDS[width])[0]
