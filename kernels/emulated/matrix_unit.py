"""mma: products of small matrices, of which the 32 threads of a warp hold a few elements each."""

from __future__ import annotations

import re

import numpy as np

from kernels.emulated.blocks import WARP, Blocks
from kernels.emulated.conversions import WIDE
from kernels.emulated.operands import Operands, Step
from kernels.emulated.ptx import Instruction
from kernels.emulated.registers import DTYPES, unpack
from kernels.emulated.rounding import Array

NAME = re.compile(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(f16|bf16|tf32)\.\2\.f32")
LANE = np.arange(WARP)[:, None]


def matrix_product(instruction: Instruction, operands: Operands) -> Step | None:
    """D = A @ B + C, where A is (16, K), B (K, 8), and C and D are (16, 8) in float32; None: not that kind of product.

    The manual leaves open how the sum is rounded: here once, at its end.
    """
    known = NAME.fullmatch(instruction.name)
    if known is None:
        return None
    k, kind = int(known[1]), known[2]
    each = 1 if kind == "tf32" else 2  # neighbours in a register
    d, a, b, c = (operands.vector(operand) for operand in instruction.operands)
    if (len(a), len(b), len(c), len(d)) != (k // (2 * each), k // (4 * each), 4, 4):
        return None
    # Rows and columns of what a register holds: a thread has a row of A, C and D, and a column of B.
    along = LANE % 4 * each + np.arange(each)
    in_a = [(LANE // 4 + part % 2 * 8, along + part // 2 * 4 * each) for part in range(len(a))]
    in_b = [(along + part * 4 * each, LANE // 4) for part in range(len(b))]
    in_c = [(LANE // 4 + part // 2 * 8, LANE % 4 * 2 + part % 2) for part in range(4)]
    read_a, read_b = ([operands.read(name, DTYPES["b32"]) for name in names] for names in (a, b))
    read_c = [operands.read(name, DTYPES["f32"]) for name in c]
    writes = [operands.write(name, DTYPES["f32"]) for name in d]

    def numbers(register: Array) -> Array:
        """(C, T) -> (C, T, each)"""
        if register.dtype == np.float32:
            return register[..., None]
        if kind == "tf32":  # the lower bits are not looked at
            return (register & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
        return WIDE[kind][0](unpack(register, DTYPES[kind]))

    def step(blocks: Blocks, mask: Array | None) -> None:
        blocks.gather(mask, WARP, "a matrix product")
        warps = (blocks.shape[0], blocks.shape[1] // WARP)

        def whole(shape: tuple[int, int], reads: list, places: list) -> Array:
            """All warps' matrices, (C, warps, *shape), in float64."""
            matrix = np.empty((*warps, *shape))
            for read, (rows, columns) in zip(reads, places, strict=True):
                held = numbers(blocks.full(read(blocks)))
                matrix[..., rows, columns] = held.reshape(*warps, WARP, -1)
            return matrix

        product = whole((16, k), read_a, in_a) @ whole((k, 8), read_b, in_b) + whole((16, 8), read_c, in_c)
        for write, (rows, columns) in zip(writes, in_c, strict=True):
            write(blocks, product[..., rows, columns].astype(np.float32).reshape(blocks.shape), mask)

    return step
