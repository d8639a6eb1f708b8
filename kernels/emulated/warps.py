"""Instructions that threads run together: shuffles, votes, barriers."""

from __future__ import annotations

import numpy as np

from kernels.emulated.arithmetic import DTYPES
from kernels.emulated.blocks import WARP, Blocks
from kernels.emulated.operands import Operands, Step
from kernels.emulated.ptx import Instruction
from kernels.emulated.rounding import Array

LANE = np.arange(WARP)
QUIET = ("fence", "membar", "nanosleep", "prefetch", "prefetchu", "griddepcontrol", "pmevent")  # no effect on values


def together(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of an instruction for a warp or a block; None if that is not known."""
    parts = instruction.parts
    if parts[0] in QUIET:
        return lambda blocks, mask: None
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

    def step(blocks: Blocks, mask: Array | None) -> None:
        blocks.gather(mask, WARP, "a shuffle")
        values = read(blocks)
        lanes, valid = _source_lanes(mode, blocks.full(read_distance(blocks)), read_limits(blocks))
        if values.shape[1] > 1:  # else all lanes hold the same
            by_warp = np.broadcast_to(values, (values.shape[0], blocks.shape[1])).reshape(values.shape[0], -1, WARP)
            if isinstance(lanes, slice) or lanes.ndim == 1:
                values = by_warp[..., lanes].reshape(values.shape[0], -1)
            else:
                values = np.take_along_axis(blocks.full(values).reshape(lanes.shape), lanes, -1).reshape(blocks.shape)
        write(blocks, values, mask)
        if write_flag:
            shape = (1, -1) if valid.ndim == 1 else blocks.shape
            found = np.tile(valid, blocks.shape[1] // WARP) if valid.ndim == 1 else valid
            write_flag(blocks, found.reshape(shape), mask)

    return step


def _source_lanes(mode: str, distance: Array, limits: Array) -> tuple[Array, Array]:
    """The lane that each lane reads, and whether it is in range: (32,), or (C, warps, 32) where threads differ."""
    if distance.min() == distance.max():
        by = int(distance.flat[0]) & 31
    else:
        by = (distance.astype(np.int64) & 31).reshape(distance.shape[0], -1, WARP)
    limit = int(limits.flat[0])
    clamp, segment = limit & 31, limit >> 8 & 31
    last = (LANE & segment) | (clamp & ~segment)
    if mode == "up":
        lanes, valid = LANE - by, LANE - by >= last
    elif mode == "down":
        lanes, valid = LANE + by, LANE + by <= last
    elif mode == "bfly":
        lanes, valid = LANE ^ by, (LANE ^ by) <= last
    else:
        lanes = (LANE & segment) | (by & ~segment)
        valid = lanes <= last
    return np.where(valid, lanes, LANE), np.broadcast_to(valid, lanes.shape)


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
    parts = instruction.parts
    functions = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    if parts[2] not in functions or parts[-1] not in ("u32", "s32", "b32"):
        return None
    dtype = DTYPES[parts[-1]]
    read, write = operands.read(instruction.operands[1], dtype), operands.write(instruction.operands[0], dtype)

    def step(blocks: Blocks, mask: Array | None) -> None:
        blocks.gather(mask, WARP, "a reduction")
        found = functions[parts[2]].reduce(_per_warp(blocks, read(blocks)), axis=-1)
        write(blocks, np.repeat(found, WARP, axis=1), mask)

    return step
