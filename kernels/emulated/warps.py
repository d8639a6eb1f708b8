"""Instructions that threads run together: shuffles, votes, barriers."""

from __future__ import annotations

import numpy as np

from kernels.emulated.arithmetic import operation
from kernels.emulated.blocks import WARP, Blocks, immediate
from kernels.emulated.operands import Operands, Step
from kernels.emulated.ptx import Instruction
from kernels.emulated.registers import DTYPES
from kernels.emulated.rounding import Array

LANE = np.arange(WARP)
QUIET = ("fence", "membar", "nanosleep", "prefetch", "prefetchu", "griddepcontrol", "pmevent")  # no effect on values


def together(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of an instruction for a warp or a block; None if that is not known."""
    parts = instruction.parts
    if parts[0] in QUIET:
        return lambda blocks, mask: None
    if parts[0] == "createpolicy":  # a hint to the cache, which a load then names
        write = operands.write(instruction.operands[0], DTYPES["b64"])
        return lambda blocks, mask: write(blocks, np.zeros((1, 1), np.uint64), mask)
    if parts[0] in ("bar", "barrier"):
        return _barrier(instruction)
    if parts[0] == "shfl":
        return _shuffle(instruction, operands)
    if parts[:2] == ["vote", "sync"]:
        return _vote(instruction, operands)
    if parts[:2] == ["redux", "sync"]:
        return _reduction(instruction, operands)
    if parts[0] == "elect":
        write = operands.write(instruction.operands[0].rpartition("|")[2], DTYPES["pred"])
        first = (LANE == 0)[None]
        return lambda blocks, mask: write(blocks, np.tile(first, blocks.shape[1] // WARP), mask)
    return None


def _barrier(instruction: Instruction) -> Step | None:
    if "warp" in instruction.parts:
        return lambda blocks, mask: blocks.gather(mask, WARP, "a barrier of its warp")
    if instruction.operands != ("0",) or "sync" not in instruction.parts:
        return None  # a barrier for a part of the block
    return lambda blocks, mask: blocks.pass_barrier(mask)


def _shuffle(instruction: Instruction, operands: Operands) -> Step | None:
    mode = instruction.parts[2]
    target, source, distance, limits = instruction.operands[:4]
    register, _, flag = target.partition("|")
    read, write = operands.read(source, DTYPES["b32"]), operands.write(register, DTYPES["b32"])
    write_flag = operands.write(flag, DTYPES["pred"]) if flag else None
    read_distance, read_limits = operands.read(distance, DTYPES["u32"]), operands.read(limits, DTYPES["u32"])
    constant = None not in (immediate(distance, DTYPES["u32"]), immediate(limits, DTYPES["u32"]))
    known: list[Array] = []  # lanes and their validity, where the instruction spells them out

    def step(blocks: Blocks, mask: Array | None) -> None:
        blocks.gather(mask, WARP, "a shuffle")
        values = read(blocks)
        lanes, valid = known or _source_lanes(mode, read_distance(blocks), read_limits(blocks), blocks.shape[1])
        if constant:
            known[:] = lanes, valid
        if values.shape[1] > 1:  # else all lanes hold the same
            values = values.take(lanes[0], axis=1) if len(lanes) == 1 else np.take_along_axis(values, lanes, 1)
        write(blocks, values, mask)
        if write_flag:
            write_flag(blocks, valid, mask)

    return step


def _source_lanes(mode: str, distance: Array, limits: Array, threads: int) -> tuple[Array, Array]:
    """The thread that each thread reads, and whether it is in range: (1, T), or (C, T) where blocks differ."""
    by = distance.astype(np.int64) & 31
    thread = np.arange(threads)[None]
    lane = thread & 31
    clamp, segment = limits.astype(np.int64) & 31, limits.astype(np.int64) >> 8 & 31
    last = (lane & segment) | (clamp & ~segment)
    if mode == "up":
        lanes = lane - by
        valid = lanes >= last
    else:
        lanes = {"down": lane + by, "bfly": lane ^ by, "idx": (lane & segment) | (by & ~segment)}[mode]
        valid = lanes <= last
    return thread - lane + np.where(valid, lanes, lane), valid


def _per_warp(blocks: Blocks, values: Array) -> Array:
    return blocks.full(values).reshape(blocks.shape[0], -1, WARP)


def _vote(instruction: Instruction, operands: Operands) -> Step | None:
    mode = instruction.parts[2]
    target, source = instruction.operands[:2]
    negated, source = source.startswith("!"), source.lstrip("!")
    kind = DTYPES["b32" if mode == "ballot" else "pred"]
    read, write = operands.read(source, DTYPES["pred"]), operands.write(target, kind)
    functions = {
        "any": lambda p: p.any(-1),
        "all": lambda p: p.all(-1),
        "uni": lambda p: p.all(-1) | ~p.any(-1),
        "ballot": lambda p: (p * (1 << LANE)).sum(-1).astype(np.uint32),
    }
    if mode not in functions:
        return None

    def step(blocks: Blocks, mask: Array | None) -> None:
        blocks.gather(mask, WARP, "a vote")
        found = functions[mode](_per_warp(blocks, read(blocks) ^ negated))
        write(blocks, np.repeat(found, WARP, axis=1), mask)

    return step


def _reduction(instruction: Instruction, operands: Operands) -> Step | None:
    """redux: the two-operand instruction of the same name, over the lanes of a warp."""
    known = operation(instruction.parts[2:], 2)
    if known is None or instruction.parts[2] not in ("add", "min", "max", "and", "or", "xor"):
        return None
    read = operands.read(instruction.operands[1], known.result)
    write = operands.write(instruction.operands[0], known.result)

    def step(blocks: Blocks, mask: Array | None) -> None:
        blocks.gather(mask, WARP, "a reduction")
        found = _per_warp(blocks, read(blocks))
        while found.shape[-1] > 1:
            half = found.shape[-1] // 2
            found = known.compute(found[..., :half], found[..., half:])
        write(blocks, np.repeat(found[..., 0], WARP, axis=1), mask)

    return step
