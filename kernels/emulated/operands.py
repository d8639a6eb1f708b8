"""Decode the operands of an instruction once, into functions that read and write them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from kernels.emulated.arithmetic import DTYPES
from kernels.emulated.blocks import Blocks, immediate
from kernels.emulated.memory import constant_addresses
from kernels.emulated.ptx import EmulationError, Program, split
from kernels.emulated.rounding import Array

Read = Callable[[Blocks], Array]
Write = Callable[[Blocks, Array, "Array | None"], None]
Step = Callable[[Blocks, "Array | None"], None]  # runs one instruction for the threads of a mask
SPECIAL = re.compile(r"%(?:laneid|warpid|n?(?:tid|ctaid)\.[xyz])")


class Operands:
    """The names that a program's operands may have."""

    def __init__(self, program: Program) -> None:
        self.slots = {name: slot for slot, name in enumerate(program.registers)}
        self.bits = program.registers
        self.parameters = program.parameters
        # A parameter has an address where the compiler chooses among several of them.
        self.symbols = {"global_smem": 0} | {name: 8 * number for number, name in enumerate(self.parameters)}
        self.symbols |= constant_addresses(program.constants)
        for variables in (program.static_shared, program.local):
            end = 0
            for name, size in variables.items():
                self.symbols[name], end = end, end + -(-size // 16) * 16

    def read(self, operand: str, dtype: np.dtype) -> Read:
        """A function that gives the operand's value as numbers of `dtype`, in a shape that broadcasts to (C, T)."""
        if operand in self.slots:
            slot, size = self.slots[operand], dtype.itemsize

            def read_register(blocks: Blocks) -> Array:
                value = blocks.registers[slot]
                if value.dtype is dtype:
                    return value
                if value.dtype.itemsize == size:
                    return value.view(dtype)
                return value.view(f"u{value.dtype.itemsize}").astype(f"u{size}").view(dtype)  # the lower bits

            return read_register
        if SPECIAL.fullmatch(operand):
            return lambda blocks: blocks.special[operand].astype(dtype)
        number = self.symbols.get(operand)
        value = immediate(operand if number is None else str(number), dtype)
        if value is None:
            raise EmulationError(f"operand '{operand}'")
        return lambda _: value

    def write(self, operand: str, dtype: np.dtype) -> Write:
        """A function that puts numbers of `dtype` into the operand, for the threads of a mask."""
        if operand == "_":
            return lambda blocks, value, mask: None
        if operand not in self.slots:
            raise EmulationError(f"operand '{operand}'")
        slot, size = self.slots[operand], max(1, self.bits[operand] // 8)
        if dtype.itemsize < size and dtype.kind != "b":
            wide = np.dtype(f"{dtype.kind if dtype.kind == 'i' else 'u'}{size}")  # extended by zeros or by the sign
        else:
            wide = dtype

        def write_register(blocks: Blocks, value: Array, mask: Array | None) -> None:
            if wide is not dtype:
                value = value.astype(wide)
            if mask is not None:
                value = np.where(mask, value, blocks.registers[slot].view(value.dtype))
            blocks.registers[slot] = value

        return write_register

    def address(self, operand: str) -> Read:
        """A function that gives the addresses of "[%rd1 + 8]", int64."""
        inside = operand.strip("[] \t")
        base, plus, offset = inside.partition("+")
        if not plus and (minus := re.match(r"(.+?)\s*(-\d+)$", inside)):
            base, offset = minus.groups()
        base, distance = base.strip(), np.int64(int(offset or "0", 0))
        bits = self.bits.get(base, 64)
        read = self.read(base, DTYPES[f"s{bits}"])  # with the offset, 32 bits come round to 0

        def read_address(blocks: Blocks) -> Array:
            value = read(blocks).astype(np.int64, copy=False)
            return value + distance if distance else value

        return read_address

    def vector(self, operand: str) -> list[str]:
        """The parts of "{%r1, %r2}", or the one operand."""
        return split(operand.strip("{} \t")) if operand.startswith("{") else [operand]
