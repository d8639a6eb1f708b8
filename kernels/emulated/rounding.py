"""Floating-point results as a GPU rounds them: half precision, fused multiply-add, and approximate functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SMALLEST_NORMAL = np.float32(2.0**-126)


def from_bfloat16(bits: Array) -> Array:
    """uint16 -> the float32 of the same value."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """float32 -> the bits of the nearest bfloat16, ties to even, uint16. A NaN becomes 0x7fff, as cvt makes it."""
    bits = x.view(np.uint32)
    rounded = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), result) if nan.any() else result


def to_float16(x: Array) -> Array:
    """float32 or float64 -> the nearest float16, ties to even. A NaN becomes 0x7fff."""
    result = x.astype(np.float16)
    nan = np.isnan(result)
    return np.where(nan, np.uint16(0x7FFF).view(np.float16), result) if nan.any() else result


def flush(x: Array) -> Array:
    """Subnormal float32 numbers become zeros of their sign (.ftz)."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def fma_float32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 numbers, rounded once.

    The product is exact in float64. The sum is rounded there and again to float32, which can be wrong only where the
    first rounding gives a number halfway between two float32 ones, or where the result is subnormal.
    """
    total = np.multiply(a, b, dtype=np.float64)
    total = np.add(total, c, out=total if np.broadcast(total, c).shape == total.shape else None)
    result = total.astype(np.float32)
    bits = total.view(np.uint64)
    bits &= np.uint64(0x1FFFFFFF)  # in its place: memory is what this takes its time for
    doubtful = bits == np.uint64(0x10000000)
    if np.fmin.reduce(np.abs(result), axis=None) < SMALLEST_NORMAL:  # a NaN would hide them from min()
        doubtful |= np.abs(result) < SMALLEST_NORMAL
    lanes = np.flatnonzero(doubtful)
    if lanes.size:
        a, b, c = (np.broadcast_to(each, result.shape).reshape(-1)[lanes].astype(np.float64) for each in (a, b, c))
        np.put(result, lanes, _sum_to_odd(a * b, c).astype(np.float32))
    return result


def fma_half(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of numbers in half precision, given as float32, in a float64 that rounds to half as the sum does."""
    return _sum_to_odd(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))


def fma_float64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float64 numbers, rounded once, unless a part under- or overflows.

    Sylvie Boldo and Guillaume Melquiond, 2008, "Emulation of a FMA and correctly rounded sums: proved algorithms using
    rounding to odd".
    """
    product = a * b
    low = _product_error(a, b, product)
    total = product + c
    error = _sum_error(product, c, total)
    result = total + _sum_to_odd(error, low)
    return np.where(np.isfinite(total) & (result != 0), result, total)  # the errors of infinities are NaN, of -0 are +0


def odd_float32(x: Array) -> Array:
    """float64 -> float32 rounded to odd: rounding that again to half precision equals rounding x to it."""
    result = x.astype(np.float32)
    return _to_odd(result, x - result, np.uint32, np.float32)


def _product_error(a: Array, b: Array, product: Array) -> Array:
    """a * b - product, exactly (T. J. Dekker, 1971)."""
    a_high, b_high = _upper_half(a), _upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    return a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _upper_half(x: Array) -> Array:
    scaled = x * np.float64(2.0**27 + 1)
    return scaled - (scaled - x)


def _sum_error(a: Array, b: Array, total: Array) -> Array:
    """a + b - total, exactly (Donald Knuth, 1969)."""
    part = total - a
    return (a - (total - part)) + (b - part)


def _sum_to_odd(a: Array, b: Array) -> Array:
    """a + b in float64; where that is inexact, the neighbour whose last bit is 1: a second rounding is right then."""
    total = a + b
    return _to_odd(total, _sum_error(a, b, total), np.uint64, np.float64)


def _to_odd(rounded: Array, error: Array, bits: type, dtype: type) -> Array:
    even = (rounded.view(bits) & bits(1)) == 0
    moved = (error != 0) & even & np.isfinite(rounded) & np.isfinite(error)
    if not moved.any():
        return rounded
    return np.where(moved, np.nextafter(rounded, np.where(error > 0, dtype(np.inf), dtype(-np.inf))), rounded)


def approximate(exact: Array, relative: float = 0.0, ulps: float = 0.0, absolute: float = 0.0) -> Array:
    """A float32 that is off from the float64 `exact` by up to a bound: relative, absolute, or in ulps.

    The manual gives the bounds and no more. So the error here is a fixed, evenly spread function of the result's bits:
    the same in every run, as large as a GPU may make it, and of no use to a kernel that counts on more.
    """
    last = 2.0**-24  # of a number, the least that its last place can be; the rounding at the end may add half of one
    bound = max(relative - last, (ulps - 0.5) * last if ulps else 0.0)
    mixed = exact.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    spread = (mixed >> np.uint64(11)).astype(np.float64)
    spread *= 2.0**-52
    spread -= 1  # in [-1, 1)
    off = exact * (1 + spread * bound)
    if absolute:
        off += spread * (absolute - np.abs(exact) * last)
    finite = np.isfinite(exact)
    return (off if finite.all() else np.where(finite, off, exact)).astype(np.float32)


def directed(mode: str, widen: Callable[[Array], Array], narrow: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function that rounds towards zero (rz), down (rm) or up (rp), from `narrow`, which rounds to the nearest.

    `widen` is its reverse. One more in a number's bits is the next one away from zero, be that infinite.
    """

    def rounded(x: Array) -> Array:
        near = narrow(x)
        back, bits = widen(near), near.view(f"u{near.dtype.itemsize}")
        beyond = {"rz": np.abs(back) > np.abs(x), "rm": back > x, "rp": back < x}[mode]
        away = np.signbit(x) == (mode == "rm") if mode != "rz" else np.zeros_like(beyond)
        step = np.where(beyond, np.where(away, 1, -1), 0).astype(bits.dtype)
        return (bits + step).view(near.dtype)

    return rounded
