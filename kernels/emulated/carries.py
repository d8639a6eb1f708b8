"""Sums of several words: instructions that leave a carry (.cc), and those that add it (addc, madc)."""

from __future__ import annotations

import numpy as np

from kernels.emulated.blocks import Blocks
from kernels.emulated.operands import Operands, Step
from kernels.emulated.ptx import Instruction
from kernels.emulated.registers import DTYPES
from kernels.emulated.rounding import Array


def carrying(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of add.cc.u32, addc.u32, mad.lo.cc.u32, madc.hi.u32 and their like; None of others."""
    base, *modifiers = instruction.parts
    adds, leaves = base in ("addc", "madc"), "cc" in modifiers
    if not adds and not (base in ("add", "mad") and leaves):
        return None
    rest = [part for part in modifiers if part != "cc"]
    if rest not in ([["u32"]] if base[:3] == "add" else [["lo", "u32"], ["hi", "u32"]]):
        return None
    target, *sources = instruction.operands
    reads, write = [operands.read(source, DTYPES["u32"]) for source in sources], operands.write(target, DTYPES["u32"])

    def step(blocks: Blocks, mask: Array | None) -> None:
        *factors, addend = (read(blocks).astype(np.uint64) for read in reads)
        total = addend + blocks.carry if adds else addend
        product = np.prod(np.broadcast_arrays(*factors), axis=0, dtype=np.uint64)  # of an addition: its other addend
        total = total + (product >> np.uint64(32) if "hi" in rest else product & np.uint64(2**32 - 1))
        write(blocks, total.astype(np.uint32), mask)
        if leaves:
            carry = total >> np.uint64(32)
            blocks.carry = carry if mask is None else np.where(mask, carry, blocks.carry)

    return step
