"""What the integer instructions of PTX compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.emulated.registers import DTYPES, Operation, on_pairs, pack, unpack
from kernels.emulated.rounding import Array

INTEGERS: dict[str, tuple[int, Callable[..., Array]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "rem": (2, lambda a, b: np.fmod(a, np.where(b == 0, 1, b).astype(b.dtype))),
}


def integer(base: str, modifiers: list[str], kind: str) -> Operation | None:
    """The operation `base` on integers of `kind`; None if that is not known."""
    dtype, position = DTYPES[kind], DTYPES["u32"]
    bits = dtype.itemsize * 8
    if base in ("mul", "mad") and (modifiers in (["lo"], ["hi"]) or (modifiers == ["wide"] and bits < 64)):
        return _product(base, modifiers[0], dtype)
    if base == "shf" and modifiers in (["l", "wrap"], ["l", "clamp"], ["r", "wrap"], ["r", "clamp"]):
        return Operation(_funnel(*modifiers), (dtype,) * 3, dtype)
    if base == "bfind" and modifiers in ([], ["shiftamt"]):
        return Operation(lambda x: _highest(x, bool(modifiers)), (dtype,), position)
    if modifiers:
        return None
    if base in INTEGERS:
        arity, function = INTEGERS[base]
        return Operation(on_pairs(function, kind) if kind.endswith("x2") else function, (dtype,) * arity, dtype)
    others: dict[str, tuple[Callable[..., Array], tuple[np.dtype, ...], np.dtype]] = {
        "shl": (lambda x, by: _shift_left(x, by, bits), (dtype, position), dtype),
        "shr": (lambda x, by: _shift_right(x, by, bits), (dtype, position), dtype),
        "div": (_quotient, (dtype, dtype), dtype),
        "bfe": (_bit_field, (dtype, position, position), dtype),
        "bfi": (_inserted, (dtype, dtype, position, position), dtype),
        "popc": (_ones, (dtype,), position),
        "clz": (_leading_zeros, (dtype,), position),
        "brev": (_reversed, (dtype,), dtype),
        "prmt": (_permuted_bytes, (dtype,) * 3, dtype),
        "sad": (lambda a, b, c: c + np.maximum(a, b) - np.minimum(a, b), (dtype,) * 3, dtype),
    }
    return Operation(*others[base]) if base in others else None


def bitwise(base: str, modifiers: list[str], kind: str) -> Operation | None:
    dtype = DTYPES[kind]
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
    if modifiers:
        return None
    if base == "lop3":
        return Operation(_looked_up, (dtype,) * 4, dtype)
    return Operation(functions[base], (dtype,) * (1 if base == "not" else 2), dtype)


def _product(base: str, half: str, dtype: np.dtype) -> Operation:
    """mul and mad: the lower or upper half of the product, or all of it."""
    size = dtype.itemsize
    wide = np.dtype(f"{dtype.kind}{2 * size}") if size < 8 else None
    functions: dict[str, Callable[..., Array]] = {
        "lo": np.multiply,
        "wide": lambda a, b: np.multiply(a, b, dtype=wide),
        "hi": lambda a, b: (np.multiply(a, b, dtype=wide) >> (8 * size)).astype(dtype),
    }
    multiply = _upper_half_of_64 if half == "hi" and wide is None else functions[half]
    result = wide if half == "wide" and wide else dtype
    if base == "mul":
        return Operation(multiply, (dtype, dtype), result)
    return Operation(lambda a, b, c: multiply(a, b) + c, (dtype, dtype, result), result)


def _upper_half_of_64(a: Array, b: Array) -> Array:
    exact = a.astype(object) * b.astype(object)
    return np.asarray(exact >> 64).astype(a.dtype)


def _shift_left(x: Array, by: Array, bits: int) -> Array:
    if by.max() >= bits:  # where C and NumPy leave the result open, PTX says zero
        return np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), x.dtype.type(0))
    return x << by.astype(x.dtype)


def _shift_right(x: Array, by: Array, bits: int) -> Array:
    if by.max() >= bits:
        far = x >> x.dtype.type(bits - 1) if x.dtype.kind == "i" else np.zeros_like(x)
        return np.where(by < bits, x >> np.minimum(by, bits - 1).astype(x.dtype), far)
    return x >> by.astype(x.dtype)


def _quotient(a: Array, b: Array) -> Array:
    """Rounded towards zero. A division by zero has no value in PTX; here it gives all ones."""
    divisor = np.where(b == 0, 1, b).astype(b.dtype)
    quotient = a // divisor
    if a.dtype.kind == "i":
        quotient += ((a % divisor != 0) & ((a < 0) != (divisor < 0))).astype(a.dtype)
    return np.where(b == 0, np.invert(np.zeros_like(a)), quotient)


def _bit_field(x: Array, position: Array, length: Array) -> Array:
    """bfe: `length` bits of x from `position` on, extended by zeros or by the field's sign."""
    bits = x.dtype.itemsize * 8
    position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
    if x.dtype.kind == "u":
        field = _shift_right(x, position, bits)
        ones = np.invert(np.zeros_like(x))
        return field & ~_shift_left(ones, length, bits)
    end = np.minimum(position + length, np.uint32(bits))
    raised = _shift_left(x, np.uint32(bits) - end, bits)
    field = _shift_right(raised, np.uint32(bits) - end + position, bits)
    return np.where(length == 0, x.dtype.type(0), field)


def _bit_matrix(x: Array) -> Array:
    """(..., T) -> (..., T, bits), the lowest bit first."""
    return (x[..., None] >> np.arange(x.dtype.itemsize * 8, dtype=x.dtype)) & x.dtype.type(1)


def _ones(x: Array) -> Array:
    return _bit_matrix(x).sum(-1, dtype=np.uint32)


def _leading_zeros(x: Array) -> Array:
    bits = _bit_matrix(x)[..., ::-1]
    return np.where(x == 0, bits.shape[-1], bits.argmax(-1)).astype(np.uint32)


def _reversed(x: Array) -> Array:
    weights = np.left_shift(1, np.arange(x.dtype.itemsize * 8, dtype=x.dtype), dtype=x.dtype)[::-1]
    return (_bit_matrix(x) * weights).sum(-1, dtype=x.dtype)


def _permuted_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt: each byte of the result is one of the eight of a and b, or eight copies of its sign."""
    both = np.concatenate(np.broadcast_arrays(unpack(a, DTYPES["u8"]), unpack(b, DTYPES["u8"])), axis=-1)
    nibbles = (selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(0xF)
    shape = np.broadcast_shapes(both.shape[:-1], nibbles.shape[:-1])
    both, nibbles = np.broadcast_to(both, (*shape, 8)), np.broadcast_to(nibbles, (*shape, 4))
    chosen = np.take_along_axis(both, (nibbles & np.uint32(7)).astype(np.intp), axis=-1)
    signs = np.where(chosen >> np.uint8(7), np.uint8(0xFF), np.uint8(0))
    return pack(np.where(nibbles >> np.uint32(3), signs, chosen), np.dtype(np.uint32))


def _inserted(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: b, whose `length` bits from `position` on are the lowest ones of a."""
    bits = a.dtype.itemsize * 8
    position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
    ones = np.invert(np.zeros_like(a))
    field = _shift_left(~_shift_left(ones, length, bits), position, bits)
    return (b & ~field) | (_shift_left(a, position, bits) & field)


def _looked_up(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: bit by bit, what a table of eight says of the three."""
    result = a & 0
    for row in range(8):
        chosen = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        result = result | np.where(table >> np.uint32(row) & np.uint32(1), chosen, np.uint32(0))
    return result


def _funnel(direction: str, beyond: str) -> Callable[..., Array]:
    """shf: of the 64 bits of b and a, the upper (l) or lower (r) 32 after a shift by c."""

    def shifted(a: Array, b: Array, c: Array) -> Array:
        by = (c & np.uint32(31) if beyond == "wrap" else np.minimum(c, np.uint32(32))).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        return ((both << by) >> np.uint64(32) if direction == "l" else both >> by).astype(np.uint32)

    return shifted


def _highest(x: Array, from_above: bool) -> Array:
    """bfind: the place of the highest bit that differs from the sign, or how far it is from the top; else all ones."""
    bits = x.dtype.itemsize * 8
    magnitude = np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x
    zeros = _leading_zeros(magnitude.astype(f"u{x.dtype.itemsize}"))
    none = zeros == bits
    if from_above:
        return np.where(none, np.uint32(0xFFFFFFFF), zeros)
    return np.where(none, np.uint32(0xFFFFFFFF), np.uint32(bits - 1) - zeros)
