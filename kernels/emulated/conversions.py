"""cvt: numbers of one type as numbers of another, rounded and clamped as the instruction says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.emulated.registers import DTYPES, PAIRS, Operation, pack, unpack
from kernels.emulated.rounding import Array, directed, flush, from_bfloat16, odd_float32, to_bfloat16, to_float16

Function = Callable[[Array], Array]
LARGEST = {"f16": 65504.0, "bf16": float(2**128 - 2**120), "tf32": float(2**128 - 2**117)}


def _narrow_bfloat16(x: Array) -> Array:
    return to_bfloat16(odd_float32(x) if x.dtype == np.float64 else x)


def _to_float32(x: Array) -> Array:
    return x.astype(np.float32)


# Numbers that are computed in float32, which holds their exact product and rounds their sum harmlessly: to it and back.
WIDE: dict[str, tuple[Function, Function]] = {
    "f16": (_to_float32, to_float16),
    "f16x2": (_to_float32, to_float16),
    "bf16": (from_bfloat16, _narrow_bfloat16),
    "bf16x2": (from_bfloat16, _narrow_bfloat16),
}
FLOATS: dict[str, tuple[Function, Function]] = WIDE | {
    "f32": (lambda x: x, _to_float32),
    "f64": (lambda x: x, lambda x: x.astype(np.float64)),
}
WHOLE = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def conversion(modifiers: list[str]) -> Operation | None:
    """cvt: to the first type named from the second. Two float32 numbers make a pair, the first in the upper bits."""
    kinds = [part for part in modifiers if part in DTYPES]
    rest = [part for part in modifiers if part not in DTYPES]
    if len(kinds) != 2 or len({"rn", "rz", "rm", "rp", "rna", *WHOLE} & set(rest)) > 1:
        return None
    to, source = kinds
    if to in SMALL or source in SMALL:
        return _small(to, source, rest)
    if to.endswith("x2"):
        convert = _to_float(to.removesuffix("x2"), source, rest) if to in WIDE and source == "f32" else None
        return None if convert is None else _pair(convert, to)
    if to == "tf32":
        convert = _to_tf32(rest) if source == "f32" else None
    elif to in FLOATS:
        convert = _to_float(to, source, rest)
    elif source in FLOATS:
        convert = _to_integer(to, source, rest)
    elif set(rest) <= {"sat"} and not source.endswith("x2"):
        convert = _clipped(DTYPES[to]) if rest else lambda x: x.astype(DTYPES[to])
    else:
        convert = None
    return None if convert is None else Operation(convert, (DTYPES[source],), DTYPES[to])


def _pair(convert: Function, to: str) -> Operation:
    def compute(upper: Array, lower: Array) -> Array:
        pair = np.broadcast_arrays(convert(lower), convert(upper))
        return pack(np.stack(pair, axis=-1), DTYPES[to])

    return Operation(compute, (DTYPES["f32"],) * 2, DTYPES[to])


def _to_float(to: str, source: str, rest: list[str]) -> Function | None:
    widen, narrow = FLOATS[source][0] if source in FLOATS else _exact, FLOATS[to][1]
    mode = next((part for part in rest if part[0] == "r" and part != "relu"), "rn")
    if not {mode, "ftz", "sat", "relu", "satfinite"}.issuperset(rest) or mode == "rna" or source.endswith("x2"):
        return None
    if ({"relu", "satfinite"} & set(rest) and to not in WIDE) or ("ftz" in rest and "f32" not in (to, source)):
        return None
    if mode in WHOLE:  # to a whole number of the same type
        if to != source:
            return None
        narrow = _after(WHOLE[mode], narrow)
    elif mode != "rn" and to == "f64":
        return None
    elif mode != "rn":
        back = (lambda x: x.astype(np.float64)) if to == "f32" else WIDE[to][0]
        narrow = directed(mode, back, narrow)
    elif to == "f64" and source not in FLOATS:
        widen = narrow  # in one step
    if "ftz" in rest and source == "f32":
        widen = flush
    if "ftz" in rest and to == "f32":
        narrow = _after(narrow, flush)
    if set(rest) & {"sat", "relu", "satfinite"}:
        narrow = _after(lambda x: _limited(x, rest, LARGEST.get(to, np.inf)), narrow)
    return _after(widen, narrow)


def _after(first: Function, second: Function) -> Function:
    return lambda x: second(first(x))


def _limited(x: Array, rest: list[str], largest: float) -> Array:
    if "sat" in rest:
        return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))
    if "relu" in rest:
        x = np.where(x < 0, x.dtype.type(0), x)
    return np.clip(x, -largest, largest).astype(x.dtype) if "satfinite" in rest else x


def _exact(x: Array) -> Array:
    """Integers as float64; of the largest the lower bits become a single 1, which rounds as they do."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    lower = x.dtype.type(0xFFF)
    sticky = np.where(x & lower != 0, (x & ~lower) | x.dtype.type(0x800), x)
    small = (x < 2**52) & (x > -(2**52)) if x.dtype.kind == "i" else x < 2**52
    return np.where(small, x, sticky).astype(np.float64)


def _to_tf32(rest: list[str]) -> Function | None:
    """The 13 lower bits of a float32 become 0. rna: of two numbers that are equally near, the one away from zero."""
    if rest[:1] not in (["rna"], ["rn"], ["rz"]) or not {"satfinite", "relu"}.issuperset(rest[1:]):
        return None

    def convert(x: Array) -> Array:
        limited = _limited(x, rest, LARGEST["tf32"])
        bits = np.ascontiguousarray(limited).view(np.uint32)
        half = {"rz": np.uint32(0), "rna": np.uint32(0x1000), "rn": np.uint32(0xFFF) + (bits >> np.uint32(13) & 1)}
        rounded = (bits + half[rest[0]].astype(np.uint32)) & np.uint32(0xFFFFE000)
        return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), np.where(np.isinf(limited), bits, rounded))

    return convert


def _to_integer(to: str, source: str, rest: list[str]) -> Function | None:
    """Out of range, the nearest integer of the type. A NaN gives 0 or, with 64 bits on a side, the upper bit alone."""
    mode = next((part for part in rest if part in WHOLE), None)
    if mode is None or not {mode, "ftz", "sat"}.issuperset(rest) or source.endswith("x2") or to not in DTYPES:
        return None
    if "ftz" in rest and source != "f32":
        return None
    dtype = DTYPES[to]
    limits = np.iinfo(dtype)
    uppermost = source == "f64" or dtype.itemsize == 8
    missing = np.array(1 << (8 * dtype.itemsize - 1) if uppermost else 0, f"u{dtype.itemsize}").view(dtype)
    widen = flush if "ftz" in rest else FLOATS[source][0]

    def convert(x: Array) -> Array:
        whole = WHOLE[mode](widen(x).astype(np.float64))
        inside = (whole >= limits.min) & (whole < float(limits.max) + 1)
        clamped = np.where(whole < 0, limits.min, limits.max).astype(dtype)
        result = np.where(inside, np.where(inside, whole, 0).astype(dtype), clamped)
        return np.where(np.isnan(whole), missing, result)

    return convert


def _clipped(dtype: np.dtype) -> Function:
    limits = np.iinfo(dtype)

    def convert(x: Array) -> Array:
        own = np.iinfo(x.dtype)
        return np.clip(x, max(limits.min, own.min), min(limits.max, own.max)).astype(dtype)

    return convert


# 8-bit numbers: exponent bits, their bias, the code of the largest number; the codes above it are NaN or infinite.

SMALL = {"e4m3x2": (4, 7, 0x7E), "e5m2x2": (5, 15, 0x7B)}


def small_values(kind: str) -> Array:
    """The float16 of each of the 256 codes."""
    exponent_bits, bias, largest = SMALL[kind]
    mantissa_bits = 7 - exponent_bits
    code = np.arange(128)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    values = fraction * 2.0 ** (np.maximum(exponent, 1) - bias)
    values[largest + 1 :] = np.nan
    if kind == "e5m2x2":
        values[largest + 1] = np.inf
    return np.concatenate([values, -values]).astype(np.float16)


def _to_small(x: Array, kind: str) -> Array:
    """The nearest code, ties to even; beyond the largest number, that one."""
    values = small_values(kind)[: SMALL[kind][2] + 1].astype(np.float32)
    between = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(between, np.abs(x))
    tie = between[np.minimum(code, len(between) - 1)] == np.abs(x)
    code = np.where(tie, code + (code & 1), code) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def _small(to: str, source: str, rest: list[str]) -> Operation | None:
    if source in SMALL:
        if to not in ("f16x2", "bf16x2") or not {"rn", "relu"}.issuperset(rest):
            return None
        table, half = small_values(source).astype(np.float32), WIDE[to][1]

        def widen(codes: Array) -> Array:
            values = table[unpack(codes, DTYPES["u8"])]
            return pack(half(_limited(values, rest, np.inf)), DTYPES[to])

        return Operation(widen, (DTYPES[source],), DTYPES[to])
    if "satfinite" not in rest or not {"rn", "relu", "satfinite"}.issuperset(rest):
        return None

    def narrow(x: Array) -> Array:
        return _to_small(_limited(x.astype(np.float32), [part for part in rest if part == "relu"], np.inf), to)

    if source == "f32":
        return _pair(narrow, to)
    if source in ("f16x2", "bf16x2"):
        part, to_float = PAIRS[source], WIDE[source][0]
        return Operation(lambda x: pack(narrow(to_float(unpack(x, part))), DTYPES[to]), (DTYPES[source],), DTYPES[to])
    return None
