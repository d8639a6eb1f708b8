"""mma: products of small matrices, of which the 32 threads of a warp hold a few elements each."""

from __future__ import annotations

import re

import numpy as np

from kernels.emulated.blocks import WARP, Blocks
from kernels.emulated.conversions import WIDE, small_values
from kernels.emulated.operands import Operands, Step
from kernels.emulated.ptx import Instruction
from kernels.emulated.registers import DTYPES, pack, unpack
from kernels.emulated.rounding import Array, to_float16

NAME = re.compile(r"mma\.sync\.aligned\.m(8|16)n8k(\d+)\.row\.col(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.\4")
LANE = np.arange(WARP)[:, None]
NEIGHBOURS = {
    "f64": 1,
    "tf32": 1,
    "f16": 2,
    "bf16": 2,
    "s8": 4,
    "u8": 4,
    "e4m3": 4,
    "e5m2": 4,
}  # of a row, in a register
TAKES = {"f32": ("f16", "bf16", "tf32", "e4m3", "e5m2"), "f16": ("f16",), "s32": ("s8", "u8"), "f64": ("f64",)}


def matrix_product(instruction: Instruction, operands: Operands) -> Step | None:
    """D = A @ B + C, where A is (M, K), B (K, 8), and C and D are (M, 8), M = 8 or 16; None: not that kind of product.

    The manual leaves open how a sum of floating-point numbers is rounded: here once, at its end.
    """
    known = NAME.fullmatch(instruction.name)
    if known is None or not {known[5], known[6]} <= set(TAKES.get(known[4], ())):
        return None
    tall, k, result, kinds = int(known[1]) // 8, int(known[2]), known[4], (known[5], known[6])
    each, each_c = NEIGHBOURS[kinds[0]], 2 if result == "f16" else 1
    d, a, b, c = (operands.vector(operand) for operand in instruction.operands)
    n_c = 2 * tall // each_c
    if (kinds[0] != kinds[1] and each < 4) or bool(known[3]) > (result == "s32"):
        return None
    if (len(a), len(b), len(c), len(d)) != (tall * k // (4 * each), k // (4 * each), n_c, n_c):
        return None
    # Rows and columns of what a register holds: a thread has a row of A, C and D, and a column of B.
    along = LANE % 4 * each + np.arange(each)
    in_a = [(LANE // 4 + part % tall * 8, along + part // tall * 4 * each) for part in range(len(a))]
    in_b = [(along + part * 4 * each, LANE // 4) for part in range(len(b))]
    firsts = [part * each_c for part in range(n_c)]
    in_c = [(LANE // 4 + i // 2 * 8, LANE % 4 * 2 + i % 2 + np.arange(each_c)) for i in firsts]
    dtype = DTYPES["f16x2" if result == "f16" else result]
    read_a, read_b = ([operands.read(name, DTYPES["f64" if result == "f64" else "b32"]) for name in n] for n in (a, b))
    read_c = [operands.read(name, dtype) for name in c]
    writes = [operands.write(name, dtype) for name in d]

    def step(blocks: Blocks, mask: Array | None) -> None:
        blocks.gather(mask, WARP, "a matrix product")
        warps = (blocks.shape[0], blocks.shape[1] // WARP)

        def whole(shape: tuple[int, int], kind: str, reads: list, places: list) -> Array:
            """All warps' matrices, (C, warps, *shape), in float64."""
            matrix = np.empty((*warps, *shape))
            for read, (rows, columns) in zip(reads, places, strict=True):
                held = _numbers(blocks.full(read(blocks)), kind)
                matrix[..., rows, columns] = held.reshape(*warps, WARP, -1)
            return matrix

        product = whole((8 * tall, k), kinds[0], read_a, in_a) @ whole((k, 8), kinds[1], read_b, in_b)
        product += whole((8 * tall, 8), result, read_c, in_c)
        for write, (rows, columns) in zip(writes, in_c, strict=True):
            held = _rounded(product[..., rows, columns], result, known[3] is not None)
            write(blocks, held.reshape(blocks.shape), mask)

    return step


def _numbers(register: Array, kind: str) -> Array:
    """(C, T) -> (C, T, neighbours)"""
    if kind in ("f32", "f64", "s32"):
        return register[..., None]
    if kind == "tf32":  # the lower bits are not looked at
        return (register & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    if kind in ("e4m3", "e5m2"):
        return small_values(f"{kind}x2")[unpack(register, DTYPES["u8"])]
    return WIDE[kind][0](unpack(register, DTYPES[kind])) if kind in WIDE else unpack(register, DTYPES[kind])


def _rounded(numbers: Array, kind: str, clamped: bool) -> Array:
    """(..., neighbours) in float64 -> (...), a register."""
    if kind == "f16":
        return pack(to_float16(numbers), DTYPES["f16x2"])
    if kind == "s32" and clamped:
        numbers = np.clip(numbers, -(2**31), 2**31 - 1)
    return numbers[..., 0].astype(np.int64).astype(np.int32) if kind == "s32" else numbers[..., 0].astype(DTYPES[kind])
