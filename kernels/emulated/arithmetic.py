"""What each arithmetic instruction of PTX computes, on NumPy arrays with one element a thread.

Names and semantics: NVIDIA, Parallel Thread Execution ISA, chapter 9. A register is bits; each instruction says as
what it reads them. Multiplications and additions are rounded one by one, although ptxas may fuse those without .rn.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kernels.emulated.rounding import (
    Array,
    approximate,
    flush,
    fma_float32,
    fma_float64,
    fma_half,
    from_bfloat16,
    odd_float32,
    to_bfloat16,
    to_float16,
)

# As what a register is read. bfloat16 has no NumPy type, and packed pairs are taken apart by what computes them.
DTYPES = {
    "pred": np.dtype(np.bool_),
    **{f"{kind}8": np.dtype(dtype) for kind, dtype in (("b", np.uint8), ("u", np.uint8), ("s", np.int8))},
    **{f"{kind}16": np.dtype(dtype) for kind, dtype in (("b", np.uint16), ("u", np.uint16), ("s", np.int16))},
    **{f"{kind}32": np.dtype(dtype) for kind, dtype in (("b", np.uint32), ("u", np.uint32), ("s", np.int32))},
    **{f"{kind}64": np.dtype(dtype) for kind, dtype in (("b", np.uint64), ("u", np.uint64), ("s", np.int64))},
    "f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    "f16x2": np.dtype(np.uint32), "bf16x2": np.dtype(np.uint32), "f32x2": np.dtype(np.uint64),
}  # fmt: skip


class Operation(NamedTuple):
    """compute(*sources) -> result, of arrays that broadcast against each other."""

    compute: Callable[..., Array]
    sources: tuple[np.dtype, ...]
    result: np.dtype


def operation(parts: list[str]) -> Operation | None:
    """What the instruction computes whose name has these parts (["add", "rn", "f32"]); None if that is not known."""
    base, *modifiers = parts
    if base == "cvt":
        return _conversion(modifiers)
    if base == "setp":
        return _comparison(modifiers)
    if not modifiers or modifiers[-1] not in DTYPES:
        return None
    kind = modifiers.pop()
    if base in ("and", "or", "xor", "not"):
        return _bitwise(base, kind)
    if kind[0] == "f" or kind.startswith("bf"):
        return _floating(base, modifiers, kind)
    return _integer(base, modifiers, kind)


# Floating point

FLOATS: dict[str, tuple[int, Callable[..., Array]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "min": (2, np.fmin),  # of a number and a NaN, the number
    "max": (2, np.fmax),
    "copysign": (2, lambda sign, x: np.copysign(x, sign)),
}
# The manual's bounds for float32.
APPROXIMATE: dict[str, tuple[Callable[[Array], Array], dict[str, float]]] = {
    "rcp": (np.reciprocal, {"ulps": 1}),
    "sqrt": (np.sqrt, {"relative": 2.0**-23}),
    "rsqrt": (lambda x: 1 / np.sqrt(x), {"relative": 2.0**-22.9}),
    "ex2": (np.exp2, {"relative": 2.0**-22}),
    "lg2": (np.log2, {"absolute": 2.0**-22.6}),
    "sin": (np.sin, {"absolute": 2.0**-20.9}),
    "cos": (np.cos, {"absolute": 2.0**-20.9}),
    "tanh": (np.tanh, {"relative": 2.0**-11}),
}
EXACT = {"rcp": np.reciprocal, "sqrt": np.sqrt, "div": np.divide}


def _floating(base: str, modifiers: list[str], kind: str) -> Operation | None:
    if "f32" in modifiers and kind in ("f16", "bf16"):
        return _mixed(base, [part for part in modifiers if part != "f32"], kind)
    known = {"rn", "ftz", "approx", "full", "NaN", "sat", "lo"}
    if not known.issuperset(modifiers):  # another direction of rounding, say
        return None
    if base in ("fma", "mad"):
        return _fused(kind, modifiers)
    if base in APPROXIMATE and "approx" in modifiers and kind == "f32":
        function, bound = APPROXIMATE[base]
        return _float_operation(1, lambda x: approximate(function(x.astype(np.float64)), **bound), kind, modifiers)
    if base == "rsqrt" and kind == "f64" and "approx" in modifiers:  # no bound in the manual; CUDA's rsqrt has 1 ulp
        return _float_operation(1, lambda x: 1 / np.sqrt(x), kind, modifiers)
    if base == "div" and kind == "f32" and {"approx", "full"} & set(modifiers):
        return _float_operation(2, _divide if "full" in modifiers else _divide_in_range, kind, modifiers)
    if base in EXACT and "rn" in modifiers and kind in ("f32", "f64"):
        return _float_operation(2 if base == "div" else 1, EXACT[base], kind, modifiers)
    if base not in FLOATS or {"approx", "full"} & set(modifiers):
        return None
    arity, function = FLOATS[base]
    if "NaN" in modifiers:
        function = {"min": np.minimum, "max": np.maximum}[base]
    return _float_operation(arity, function, kind, modifiers)


def _divide(a: Array, b: Array) -> Array:
    return approximate(np.divide(a, b, dtype=np.float64), ulps=2)


def _divide_in_range(a: Array, b: Array) -> Array:
    """div.approx, which for a divisor beyond 2^126 gives 0."""
    quotient = _divide(a, b)
    far = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(far, np.where(np.isinf(a), np.float32(np.nan), np.float32(0)), quotient)


def _mixed(base: str, modifiers: list[str], kind: str) -> Operation | None:
    """fma.rn.f32.bf16 and its like: all operands but the last are in half precision, and the result is float32."""
    known = _floating(base, modifiers, "f32") if base in ("add", "sub", "fma") else None
    if known is None:
        return None
    widen = WIDE[kind][0]
    sources = (DTYPES[kind],) * (len(known.sources) - 1) + (DTYPES["f32"],)
    return Operation(lambda *given: known.compute(*map(widen, given[:-1]), given[-1]), sources, DTYPES["f32"])


def _fused(kind: str, modifiers: list[str]) -> Operation:
    functions = {"f32": fma_float32, "f32x2": fma_float32, "f64": fma_float64}
    return _float_operation(3, functions.get(kind, fma_half), kind, modifiers)


def _float_operation(arity: int, function: Callable[..., Array], kind: str, modifiers: list[str]) -> Operation:
    """The operation on registers of `kind`, from `function` on float32 numbers (float64 for f64)."""
    dtype = DTYPES[kind]
    compute = function
    if "ftz" in modifiers and kind.startswith("f32"):
        compute = _flushing(compute)
    if "sat" in modifiers:
        compute = _saturating(compute)
    if kind in WIDE:
        compute = _through_float32(compute, *WIDE[kind])
    if kind.endswith("x2"):
        compute = _on_pairs(compute, PAIRS[kind], dtype)
    return Operation(compute, (dtype,) * arity, dtype)


def _flushing(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *sources: flush(function(*map(flush, sources)))


def _saturating(function: Callable[..., Array]) -> Callable[..., Array]:
    def saturated(*sources: Array) -> Array:
        result = function(*sources)
        return np.where(np.isnan(result), 0, np.clip(result, 0, 1)).astype(result.dtype)

    return saturated


def _narrow_bfloat16(x: Array) -> Array:
    return to_bfloat16(odd_float32(x) if x.dtype == np.float64 else x)


WIDE = {  # kinds whose numbers are computed in float32: float32 holds the exact product, and rounds a sum harmlessly
    "f16": (lambda x: x.astype(np.float32), to_float16),
    "f16x2": (lambda x: x.astype(np.float32), to_float16),
    "bf16": (from_bfloat16, _narrow_bfloat16),
    "bf16x2": (from_bfloat16, _narrow_bfloat16),
}
PAIRS = {"f16x2": np.dtype(np.float16), "bf16x2": np.dtype(np.uint16), "f32x2": np.dtype(np.float32)}


def _through_float32(function: Callable[..., Array], widen: Callable, narrow: Callable) -> Callable[..., Array]:
    return lambda *sources: narrow(function(*map(widen, sources)))


def unpack(pairs: Array, part: np.dtype) -> Array:
    """(..., T) -> (..., T, n): the n smaller numbers in each, the one in the lowest bits first."""
    whole = np.ascontiguousarray(pairs)
    return whole.view(part).reshape(*whole.shape, whole.dtype.itemsize // part.itemsize)


def pack(parts: Array, dtype: np.dtype) -> Array:
    """(..., T, n) -> (..., T), the reverse of unpack."""
    return np.ascontiguousarray(parts).view(dtype)[..., 0]


def _on_pairs(function: Callable[..., Array], part: np.dtype, dtype: np.dtype) -> Callable[..., Array]:
    return lambda *sources: pack(function(*(unpack(source, part) for source in sources)), dtype)


# Integers

INTEGERS: dict[str, tuple[int, Callable[..., Array]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "rem": (2, lambda a, b: np.fmod(a, np.where(b == 0, 1, b).astype(b.dtype))),
}


def _integer(base: str, modifiers: list[str], kind: str) -> Operation | None:
    dtype = DTYPES[kind]
    bits = dtype.itemsize * 8
    if base in ("mul", "mad") and modifiers in (["lo"], ["wide"], ["hi"]):
        return _product(base, modifiers[0], dtype)
    if base in ("shl", "shr") and not modifiers:
        shift = _shift_left if base == "shl" else _shift_right
        return Operation(lambda x, by: shift(x, by, bits), (dtype, DTYPES["u32"]), dtype)
    if modifiers:
        return None
    if base == "div":
        return Operation(_quotient, (dtype, dtype), dtype)
    if base == "bfe":
        return Operation(_bit_field, (dtype, DTYPES["u32"], DTYPES["u32"]), dtype)
    if base == "selp":
        raise AssertionError("selp reads a predicate; the machine decodes it")
    if base in ("popc", "clz", "brev"):
        function = {"popc": _ones, "clz": _leading_zeros, "brev": _reversed}[base]
        return Operation(function, (dtype,), dtype if base == "brev" else DTYPES["u32"])
    if base == "prmt":
        return Operation(_permuted_bytes, (dtype,) * 3, dtype)
    if base not in INTEGERS:
        return None
    arity, function = INTEGERS[base]
    return Operation(function, (dtype,) * arity, dtype)


def _bitwise(base: str, kind: str) -> Operation:
    dtype = DTYPES[kind]
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[base]
    return Operation(function, (dtype,) * (1 if base == "not" else 2), dtype)


def _product(base: str, half: str, dtype: np.dtype) -> Operation:
    """mul and mad: the lower or upper half of the product, or all of it."""
    wide = np.dtype(f"{dtype.kind}{dtype.itemsize * 2}") if dtype.itemsize < 8 else None
    result = wide if half == "wide" and wide is not None else dtype

    def multiply(a: Array, b: Array) -> Array:
        if half == "lo":
            return a * b
        if wide is None:
            return _upper_half_of_64(a, b)
        product = np.multiply(a, b, dtype=wide)
        return product if half == "wide" else (product >> wide.type(dtype.itemsize * 8)).astype(dtype)

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


# Comparisons and conversions

COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
COMBINED = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _comparison(modifiers: list[str]) -> Operation | None:
    """setp: a predicate, from two numbers and, for setp.lt.and and its like, another predicate."""
    name, *rest = [part for part in modifiers if part != "ftz"]
    kind = rest.pop() if rest else ""
    function = _comparison_of(name, kind)
    if function is None or len(rest) > 1 or not COMBINED.keys() >= set(rest):
        return None
    dtype = DTYPES[kind]
    if kind == "bf16":
        function = _through_float32(function, from_bfloat16, lambda truth: truth)
    if not rest:
        return Operation(function, (dtype, dtype), DTYPES["pred"])
    combine = COMBINED[rest[0]]
    return Operation(lambda a, b, p: combine(function(a, b), p), (dtype, dtype, DTYPES["pred"]), DTYPES["pred"])


def _comparison_of(name: str, kind: str) -> Callable[[Array, Array], Array] | None:
    if kind not in DTYPES:
        return None
    floating = kind[0] == "f" or kind == "bf16"
    if floating and name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if floating and name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name in COMPARISONS:
        ordered = COMPARISONS[name]
        if floating and name == "ne":  # false for a NaN, unlike NumPy's
            return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
        return ordered
    if floating and name.endswith("u") and name[:-1] in COMPARISONS:  # true for a NaN
        ordered = COMPARISONS[name[:-1]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    return None


def _conversion(modifiers: list[str]) -> Operation | None:
    """cvt: to the first type named from the second. Two float32 numbers make a pair, the first in the upper bits."""
    kinds = [part for part in modifiers if part in DTYPES]
    if len(kinds) != 2 or not {"rn", "rzi", "rni", "rmi", "rpi", "ftz", "sat"} >= set(modifiers) - set(kinds):
        return None
    to, source = kinds
    if to in ("bf16x2", "f16x2") and source == "f32":
        narrow, part = WIDE[to][1], PAIRS[to]

        def compute(upper: Array, lower: Array) -> Array:
            pair = np.broadcast_arrays(narrow(lower), narrow(upper))
            return pack(np.stack(pair, axis=-1).view(part), DTYPES[to])

        return Operation(compute, (DTYPES["f32"],) * 2, DTYPES[to])
    if to.endswith("x2") or source.endswith("x2"):
        return None
    widen = WIDE[source][0] if source in WIDE else (lambda x: x)
    if to in ("f16", "bf16", "f32", "f64"):
        convert = _to_float(to, source, modifiers)
    elif source in ("f16", "bf16", "f32", "f64"):
        convert = _to_integer(DTYPES[to], modifiers)
    else:
        if "sat" in modifiers:
            return None
        return Operation(lambda x: x.astype(DTYPES[to]), (DTYPES[source],), DTYPES[to])
    if convert is None:
        return None
    return Operation(lambda x: convert(widen(x)), (DTYPES[source],), DTYPES[to])


def _to_float(to: str, source: str, modifiers: list[str]) -> Callable[[Array], Array] | None:
    if {"rzi", "rmi", "rpi", "rni"} & set(modifiers):  # to a whole number of the same type
        if to != source:
            return None
        whole = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}
        function = next(whole[part] for part in modifiers if part in whole)
    elif to in WIDE:
        wide_integer = source[0] in "su" and source[1:] in ("32", "64")
        narrow = WIDE[to][1]
        function = (lambda x: narrow(x.astype(np.float64))) if wide_integer else narrow
        if source[0] in "su" and not wide_integer:
            function = lambda x: narrow(x.astype(np.float32))  # noqa: E731
    else:
        dtype = DTYPES[to]
        function = lambda x: x.astype(dtype)  # noqa: E731
    if "ftz" in modifiers and "f32" in (to, source):
        inner = function
        function = lambda x: inner(flush(x) if x.dtype == np.float32 else x)  # noqa: E731
    return _saturating(function) if "sat" in modifiers else function


def _to_integer(dtype: np.dtype, modifiers: list[str]) -> Callable[[Array], Array]:
    """Out of range, the nearest integer of the type; a NaN becomes 0."""
    rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
    function = next((rounding[part] for part in modifiers if part in rounding), np.trunc)
    limits = np.iinfo(dtype)

    def convert(x: Array) -> Array:
        whole = function(x.astype(np.float64))
        inside = (whole >= limits.min) & (whole < float(limits.max) + 1)
        clamped = np.where(whole < 0, limits.min, limits.max).astype(dtype)
        result = np.where(inside, np.where(inside, whole, 0).astype(dtype), clamped)
        return np.where(np.isnan(whole), dtype.type(0), result)

    return convert
