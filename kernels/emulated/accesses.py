"""Loads, stores, asynchronous copies, matrix loads and atomic instructions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kernels.emulated.arithmetic import DTYPES, pack, unpack
from kernels.emulated.blocks import WARP, Blocks
from kernels.emulated.memory import SPACE, SeveralTensors, Violation
from kernels.emulated.operands import Operands, Step
from kernels.emulated.ptx import Instruction
from kernels.emulated.rounding import Array, from_bfloat16, to_bfloat16
from kernels.emulated.words import WORDS, as_words


def access(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of an instruction that touches memory; None if that is not known."""
    parts = instruction.parts
    name = parts[0]
    if name == "ld" and parts[1] == "param":
        return _parameter(instruction, operands)
    if name in ("ld", "st", "ldu"):
        return _load_or_store(instruction, operands)
    if name == "cp":
        return _asynchronous(instruction, operands)
    if name in ("ldmatrix", "stmatrix"):
        return _matrix(instruction, operands)
    if name in ("atom", "red"):
        return _atomic(instruction, operands)
    return None


def space_of(instruction: Instruction) -> str | None:
    """ "global", "shared" or "local", of an access that is emulated; None of others."""
    spaces = {part.partition(":")[0] for part in instruction.parts}
    if spaces & {"const", "param", "tensor", "bulk"}:
        return None
    return next((space for space in ("shared", "local") if space in spaces), "global")


def width_of(instruction: Instruction) -> int | None:
    """Bytes that a thread loads, stores or copies at once; None where the instruction is no such one."""
    parts = instruction.parts
    if parts[0] in ("ld", "st", "ldu") and parts[1] != "param" and parts[-1] in DTYPES:
        count = next((int(part[1]) for part in parts if re.fullmatch(r"v[248]", part)), 1)
        return count * DTYPES[parts[-1]].itemsize
    if instruction.name.startswith(("cp.async.ca.", "cp.async.cg.")):
        return int(instruction.operands[2], 0)
    if parts[0] in ("ldmatrix", "stmatrix"):
        return 2 if "trans" in parts else 4
    if parts[0] in ("atom", "red") and parts[-1] in DTYPES:
        return DTYPES[parts[-1]].itemsize
    return None


def _parameter(instruction: Instruction, operands: Operands) -> Step | None:
    dtype = DTYPES[instruction.parts[-1]]
    read_address = operands.address(instruction.operands[1])
    write = operands.write(instruction.operands[0], dtype)

    def load(blocks: Blocks, mask: Array | None) -> None:
        bits = blocks.arguments[read_address(blocks) >> 3]
        write(blocks, bits.astype(f"u{dtype.itemsize}").view(dtype), mask)

    return load


def _load_or_store(instruction: Instruction, operands: Operands) -> Step | None:
    space, width = space_of(instruction), width_of(instruction)
    if space is None or width not in WORDS:
        return None
    dtype = DTYPES[instruction.parts[-1]]
    loads = instruction.parts[0] != "st"
    registers, place = instruction.operands[:2] if loads else instruction.operands[1::-1]
    read_address = operands.address(place)
    names = operands.vector(registers)

    def locate(blocks: Blocks) -> Array:
        addresses = read_address(blocks)
        if space == "shared" and addresses.shape[1] == 1:  # each thread leaves its own mark there
            return np.broadcast_to(addresses, (len(addresses), blocks.shape[1]))
        return blocks.full(addresses) if space == "local" else addresses

    move = {
        "global": (_load_global, _store_global),
        "shared": (_load_shared, _store_shared),
        "local": (_load_local, _store_local),
    }[space][not loads]
    if loads:
        writes = [operands.write(name, dtype) for name in names]

        def load(blocks: Blocks, mask: Array | None) -> None:
            addresses, mask = _active(blocks, locate(blocks), mask)
            if blocks.counts and space != "local":
                blocks.counts.access(space, "load", blocks, addresses, mask, width)
            words = move(blocks, addresses, width, mask=mask)
            values = unpack(_everywhere(blocks, words, mask), dtype)
            for part, write in enumerate(writes):
                write(blocks, values[..., part], mask)

        return load
    reads = [operands.read(name, dtype) for name in names]

    def store(blocks: Blocks, mask: Array | None) -> None:
        addresses, mask = _active(blocks, locate(blocks), mask)
        values = [read(blocks) for read in reads]
        if len(values) == 1:
            words = values[0].view(WORDS[width])
        else:
            words = pack(np.stack(np.broadcast_arrays(*values), axis=-1), np.dtype(WORDS[width]))
        if mask is not None:
            words = blocks.full(words)[mask]
        elif space == "global" and words.shape != addresses.shape:
            addresses, words = np.broadcast_arrays(addresses, words)
        if blocks.counts and space != "local":
            blocks.counts.access(space, "store", blocks, addresses, mask, width)
        move(blocks, addresses, words, width, mask=mask)

    return store


def _active(blocks: Blocks, addresses: Array, mask: Array | None) -> tuple[Array, Array | None]:
    """The addresses of the threads that take part, and the mask with an element for every thread."""
    if mask is None:
        return addresses, None
    mask = blocks.full(mask)
    return blocks.full(addresses)[mask], mask


def _naming_the_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """The access, whose violations say which thread did it."""

    def named(blocks: Blocks, addresses: Array, *rest: Any, mask: Array | None) -> Any:
        try:
            return function(blocks, addresses, *rest, mask=mask)
        except Violation as violation:
            shape = addresses.shape if violation.lane < addresses.size else blocks.shape  # one row may stand for all
            violation.at = violation.at or blocks.thread(violation.lane, mask, shape)
            raise

    return named


def _everywhere(blocks: Blocks, words: Array, mask: Array | None) -> Array:
    """The words of a mask's threads, with something that nobody looks at for the others."""
    if mask is None:
        return words
    everywhere = np.zeros(blocks.shape, words.dtype)
    everywhere[mask] = words
    return everywhere


@_naming_the_thread
def _load_of_one(blocks: Blocks, addresses: Array, width: int, mask: Array | None) -> Array:
    return blocks.memory.load(addresses, width, blocks, mask)


@_naming_the_thread
def _store_to_one(blocks: Blocks, addresses: Array, words: Array, width: int, mask: Array | None) -> None:
    blocks.memory.store(addresses, words, width, blocks, mask)


def _load_global(blocks: Blocks, addresses: Array, width: int, mask: Array | None) -> Array:
    try:
        return _load_of_one(blocks, addresses, width, mask=mask)
    except SeveralTensors:  # as where the number of its block says which tensor a thread works on
        words = np.empty(blocks.shape if mask is None else addresses.shape, WORDS[width])
        for chosen, part, there in _by_tensor(blocks, addresses, mask):
            words.reshape(-1)[chosen] = _load_of_one(blocks, part, width, mask=there)
        return words


def _store_global(blocks: Blocks, addresses: Array, words: Array, width: int, mask: Array | None) -> None:
    try:
        _store_to_one(blocks, addresses, words, width, mask=mask)
    except SeveralTensors:
        words = (blocks.full(words) if mask is None else words).reshape(-1)
        for chosen, part, there in _by_tensor(blocks, addresses, mask):
            _store_to_one(blocks, part, words[chosen], width, mask=there)


def _by_tensor(blocks: Blocks, addresses: Array, mask: Array | None) -> Iterator[tuple[Array, Array, Array]]:
    """For each tensor that the threads touch, which of the threads do, their addresses, and the mask of them."""
    if mask is None:
        mask, addresses = np.ones(blocks.shape, np.bool_), blocks.full(addresses).reshape(-1)
    numbers = addresses >> SPACE
    for number in np.unique(numbers):
        chosen = numbers == number
        yield chosen, addresses[chosen], _spread(mask, chosen)


@_naming_the_thread
def _change_global(blocks: Blocks, addresses: Array, width: int, mask: Array | None) -> tuple[Array, Array]:
    return blocks.memory.locate(addresses, width)


@_naming_the_thread
def _load_shared(blocks: Blocks, addresses: Array, width: int, mask: Array | None) -> Array:
    index = _shared_index(blocks, addresses, width, "reads", mask=mask)
    return blocks.shared.load(index, width, blocks.who(mask), blocks.since)


@_naming_the_thread
def _store_shared(blocks: Blocks, addresses: Array, words: Array, width: int, mask: Array | None) -> None:
    index = _shared_index(blocks, addresses, width, "writes", mask=mask)
    if blocks.copies:
        blocks.shared.refuse_under_way(index, width)
    blocks.shared.store(index, words, width, blocks.who(mask))


@_naming_the_thread
def _load_local(blocks: Blocks, addresses: Array, width: int, mask: Array | None) -> Array:
    index = blocks.local.index(addresses, width, "reads", _threads(blocks, mask))
    return as_words(blocks.local.bytes, width)[index]


@_naming_the_thread
def _store_local(blocks: Blocks, addresses: Array, words: Array, width: int, mask: Array | None) -> None:
    index = blocks.local.index(addresses, width, "writes", _threads(blocks, mask))
    as_words(blocks.local.bytes, width)[index] = words


def _threads(blocks: Blocks, mask: Array | None) -> Array:
    """The numbers of the threads of a mask, among all blocks'."""
    return np.flatnonzero(mask) if mask is not None else np.arange(blocks.full(blocks.lanes).size).reshape(blocks.shape)


@_naming_the_thread
def _begin_copy(blocks: Blocks, index: Array, words: Array, width: int, mask: Array | None) -> None:
    blocks.copy(index, words, width, mask)


@_naming_the_thread
def _shared_index(blocks: Blocks, addresses: Array, width: int, does: str, mask: Array | None) -> Array:
    return blocks.shared.index(addresses, width, does, None if mask is None else np.nonzero(mask)[0])


def _asynchronous(instruction: Instruction, operands: Operands) -> Step | None:
    name = instruction.name
    if name.startswith("cp.async.commit_group"):

        def commit(blocks: Blocks, mask: Array | None) -> None:
            blocks.gather(mask, blocks.shape[1], "a commit of asynchronous copies")
            blocks.groups = blocks.groups + (1 if mask is None else blocks.full(mask)[:, :1])

        return commit
    if name.startswith("cp.async.wait"):
        # wait_all waits for copies of no group yet, too.
        pending = int(instruction.operands[0], 0) if instruction.operands else -1
        return lambda blocks, mask: blocks.wait(pending, mask)
    if not re.match(r"cp\.async\.c[ag]\.shared(::cta)?\.global", name) or len(instruction.operands) < 3:
        return None
    width = int(instruction.operands[2], 0)
    read_target, read_source = operands.address(instruction.operands[0]), operands.address(instruction.operands[1])
    size = instruction.operands[3] if len(instruction.operands) > 3 else str(width)
    read_size = operands.read(size, DTYPES["u32"])  # bytes to read; the rest becomes zero

    def copy(blocks: Blocks, mask: Array | None) -> None:
        targets, full = _active(blocks, blocks.full(read_target(blocks)), mask)
        sources, _ = _active(blocks, read_source(blocks), mask)
        sizes, _ = _active(blocks, read_size(blocks), mask)
        index = _shared_index(blocks, targets, width, "writes", mask=full)
        sources, sizes = np.broadcast_to(sources, index.shape), np.broadcast_to(sizes, index.shape)
        words = np.zeros(index.shape, WORDS[width])
        if (large := sizes > width).any():
            lane = int(np.flatnonzero(large)[0])
            at = blocks.thread(lane, full, index.shape)
            raise Violation(f"copies {int(sizes.flat[lane])} bytes where {width} are the most", at=at)
        for size in np.unique(sizes):
            if size == 0:
                continue
            those = sizes == size
            reading = those if full is None else _spread(full, those)
            if blocks.counts:
                blocks.counts.access("global", "load", blocks, sources[those], reading, int(size))
            if size == width:
                words[those] = _load_global(blocks, sources[those], width, mask=reading)
                continue
            bytes_read = np.zeros((int(those.sum()), width), np.uint8)
            for at in range(int(size)):
                bytes_read[:, at] = _load_global(blocks, sources[those] + at, 1, mask=reading)
            words[those] = bytes_read.view(WORDS[width])[:, 0]
        if blocks.counts:
            blocks.counts.access("shared", "store", blocks, targets, full, width)
        _begin_copy(blocks, index, words, width, mask=full)

    return copy


def _spread(mask: Array, chosen: Array) -> Array:
    """The mask of those of its threads that are chosen."""
    spread = np.zeros(mask.shape, np.bool_)
    spread[mask] = chosen
    return spread


def _matrix(instruction: Instruction, operands: Operands) -> Step | None:
    """8 x 8 matrices of 16-bit numbers, whose rows' addresses the threads of a warp give.

    Thread t holds two neighbours of row t // 4 (of column t // 4, with .trans) of every matrix.
    """
    parts = instruction.parts
    count = next((int(part[1]) for part in parts if re.fullmatch(r"x[124]", part)), 0)
    if not count or "m8n8" not in parts or parts[-1] != "b16":
        return None
    loads = parts[0] == "ldmatrix"
    registers, place = instruction.operands if loads else instruction.operands[::-1]
    read_address = operands.address(place)
    names = operands.vector(registers)
    dtype = DTYPES["b32"]
    reads = [operands.read(name, dtype) for name in names] if not loads else []
    writes = [operands.write(name, dtype) for name in names] if loads else []
    lane = np.arange(WARP)
    if "trans" in parts:
        rows, within = [2 * (lane % 4), 2 * (lane % 4) + 1], [2 * (lane // 4)] * 2
    else:
        rows, within = [lane // 4], [4 * (lane % 4)]
    width = 4 // len(rows)

    def step(blocks: Blocks, mask: Array | None) -> None:
        blocks.gather(mask, WARP, "a matrix instruction")
        given = blocks.full(read_address(blocks))
        giving = blocks.full(blocks.lanes < 8 * count if mask is None else (blocks.lanes < 8 * count) & mask)
        _shared_index(blocks, given[giving], 16, "reads" if loads else "writes", mask=giving)
        given = given.reshape(blocks.shape[0], -1, WARP)
        if blocks.counts:
            blocks.counts.matrix(given.reshape(-1, WARP)[:, : 8 * count])
        for matrix in range(count):
            places = [given[..., 8 * matrix + row] + part for row, part in zip(rows, within, strict=True)]
            places = [_active(blocks, place.reshape(blocks.shape), mask) for place in places]
            if loads:
                halves = [_load_shared(blocks, place, width, mask=full) for place, full in places]
                words = halves[0] if len(halves) == 1 else pack(np.stack(halves, axis=-1), dtype)
                writes[matrix](blocks, _everywhere(blocks, words, places[0][1]), mask)
                continue
            words, full = _active(blocks, reads[matrix](blocks), mask)
            words = blocks.full(words) if full is None else words
            halves = [words] if len(places) == 1 else list(np.moveaxis(unpack(words, DTYPES["b16"]), -1, 0))
            for (place, _), half in zip(places, halves, strict=True):
                _store_shared(blocks, place, half, width, mask=full)

    return step


ATOMIC: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new,
}  # fmt: skip


def _atomic(instruction: Instruction, operands: Operands) -> Step | None:
    """Threads take turns, in the order of their numbers. A GPU's order is open, and so are its sums' last bits.

    Of a vector (.v2, .v4, .v8) each element is changed by itself.
    """
    parts = instruction.parts
    returns = parts[0] == "atom"
    name = next((part for part in parts if part in ATOMIC or part == "cas"), None)
    kind = parts[-1]
    if name is None or space_of(instruction) != "global" or kind not in DTYPES:
        return None
    dtype = DTYPES[kind]
    place, *values = instruction.operands[1 if returns else 0 :]
    read_address = operands.address(place)
    reads = [[operands.read(part, dtype) for part in operands.vector(value)] for value in values]
    writes = [operands.write(part, dtype) for part in operands.vector(instruction.operands[0])] if returns else []
    count = len(reads[0])  # neighbours that a thread changes at once
    width = count * dtype.itemsize
    if width not in WORDS:
        return None
    compute = _on_kind(ATOMIC.get(name, lambda old, new: new), kind)

    def step(blocks: Blocks, mask: Array | None) -> None:
        if mask is None:
            mask = np.ones((1, 1), np.bool_)
        addresses, mask = _active(blocks, read_address(blocks), mask)
        if not addresses.size:
            return
        if blocks.counts:
            blocks.counts.access("global", "atomic", blocks, addresses, mask, width)
        words, index = _change_global(blocks, addresses, width, mask=mask)
        memory = words.view(dtype)
        for part in range(count):
            given = [blocks.full(read[part](blocks))[mask] for read in reads]
            places = index * count + part
            before = np.empty(len(index), dtype)
            for turn in _turns(places):
                at = places[turn]
                before[turn] = old = memory[at]
                if name == "cas":
                    memory[at] = np.where(old == given[0][turn], given[1][turn], old)
                else:
                    memory[at] = compute(old, given[0][turn])
            if writes:
                writes[part](blocks, _everywhere(blocks, before, mask), mask)

    return step


def _turns(index: Array) -> list[Array]:
    """Lanes by whose turn it is at their word: no turn has a word twice, and the lanes of a word keep their order."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    turn = np.arange(len(index)) - np.repeat(first, np.diff(np.append(first, len(index))))
    return [order[turn == number] for number in range(int(turn.max()) + 1)]


def _on_kind(compute: Callable[[Array, Array], Array], kind: str) -> Callable[[Array, Array], Array]:
    """The function on registers of `kind`, which may hold bfloat16 or a pair of numbers."""
    if kind == "bf16":
        return lambda old, new: to_bfloat16(compute(from_bfloat16(old), from_bfloat16(new)))
    if kind == "bf16x2":
        one = _on_kind(compute, "bf16")
        return lambda old, new: pack(one(unpack(old, DTYPES["b16"]), unpack(new, DTYPES["b16"])), DTYPES["b32"])
    if kind == "f16x2":
        return lambda old, new: pack(compute(unpack(old, DTYPES["f16"]), unpack(new, DTYPES["f16"])), DTYPES["b32"])
    return compute
