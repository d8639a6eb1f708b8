"""What each arithmetic instruction of PTX computes, on NumPy arrays with one element a thread.

Names and semantics: NVIDIA, Parallel Thread Execution ISA, chapter 9. Multiplications and additions are rounded one by
one, although ptxas may fuse those without .rn.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from kernels.emulated.conversions import WIDE, conversion
from kernels.emulated.integers import bitwise, integer
from kernels.emulated.registers import DTYPES, PAIRS, Operation, on_pairs, pack, unpack
from kernels.emulated.rounding import (
    Array,
    approximate,
    directed,
    flush,
    fma_float32,
    fma_float64,
    fma_half,
)

__all__ = ["DTYPES", "Operation", "operation", "pack", "unpack"]


def operation(parts: list[str], count: int) -> Operation | None:
    """What the instruction with this name (["add", "rn", "f32"]) computes from `count` operands; None: not known."""
    known = _operation(parts, count)
    return known if known is not None and len(known.sources) == count else None


def _operation(parts: list[str], count: int) -> Operation | None:
    base, *modifiers = parts
    if base == "cvt":
        return conversion(modifiers)
    if base == "setp":
        return _comparison(modifiers)
    if not modifiers or modifiers[-1] not in DTYPES:
        return None
    kind = modifiers.pop()
    if base in ("and", "or", "xor", "not", "lop3"):
        return bitwise(base, modifiers, kind)
    if base == "testp":
        return _test(modifiers, kind)
    if kind in FLOATS:
        return _floating(base, modifiers, kind, count)
    return integer(base, modifiers, kind)


# Floating point

FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
MODES = ("rn", "rz", "rm", "rp")
Function = Callable[..., Array]

PLAIN: dict[str, tuple[int, Function]] = {  # rounded to the nearest, as IEEE 754 and so NumPy has it
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "div": (2, np.divide),
    "rcp": (1, np.reciprocal),
    "sqrt": (1, np.sqrt),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "copysign": (2, lambda sign, x: np.copysign(x, sign)),
}
ONE = np.ones(1)
FUSED: dict[str, Function] = {"f32": fma_float32, "f32x2": fma_float32, "f64": fma_float64}
# In float64, of float32 numbers: exact, or rounded to odd, or (a quotient, a root) too near to harm a rounding.
EXACT: dict[str, Function] = {
    "add": lambda a, b: fma_half(a, ONE, b),
    "sub": lambda a, b: fma_half(a, ONE, -b),
    "mul": np.multiply,
    "fma": fma_half,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}
# The manual's bounds for float32.
APPROXIMATE: dict[str, tuple[Function, dict[str, float]]] = {
    "rcp": (np.reciprocal, {"ulps": 1}),
    "sqrt": (np.sqrt, {"relative": 2.0**-23}),
    "rsqrt": (lambda x: 1 / np.sqrt(x), {"relative": 2.0**-22.9}),
    "ex2": (np.exp2, {"ulps": 2}),
    "sin": (np.sin, {"absolute": 2.0**-20.5}),
    "cos": (np.cos, {"absolute": 2.0**-20.5}),
    "lg2": (np.log2, {"absolute": 2.0**-22}),
    "tanh": (np.tanh, {"relative": 2.0**-11}),
}
# Their bounds for other arguments.
ELSEWHERE: dict[str, tuple[Callable[[Array], Array], dict[str, float]]] = {
    "sin": (lambda x: np.abs(x) > 2 * np.pi, {"absolute": 2.0**-14.7}),
    "cos": (lambda x: np.abs(x) > 2 * np.pi, {"absolute": 2.0**-14.7}),
    "lg2": (lambda x: (x <= 0.5) | (x >= 2), {"relative": 2.0**-22}),
}


def _floating(base: str, modifiers: list[str], kind: str, count: int) -> Operation | None:
    allowed = {"sat"} if kind not in ("f64", "bf16", "bf16x2") else set()
    allowed |= {"ftz"} if kind in ("f32", "f32x2") else set()
    if base in ("min", "max"):
        return _extreme(base, modifiers, kind, count, allowed | {"NaN", "abs", "xorsign"})
    if {"approx", "full"} & set(modifiers):
        return _approximation(base, modifiers, kind)
    base = "fma" if base == "mad" else base
    allowed |= {"relu"} if base == "fma" and kind in WIDE else set()
    if modifiers[-1:] == ["f32"] and kind in ("f16", "bf16"):
        return _mixed(base, modifiers[:-1], kind)
    modes = [part for part in modifiers if part in MODES]
    if not allowed.issuperset(set(modifiers) - set(modes)) or len(modes) > 1:
        return None
    if base in ("div", "rcp", "sqrt") and (not modes or kind not in ("f32", "f64")):
        return None  # they name how they round
    if modes and modes != ["rn"]:
        if base not in EXACT or kind not in ("f32", "f32x2"):
            return None
        arity, function = 3 if base == "fma" else PLAIN[base][0], _rounded(base, modes[0])
    elif base == "fma":
        arity, function = 3, FUSED.get(kind, fma_half)
    elif base in PLAIN:
        arity, function = PLAIN[base]
    else:
        return None
    return _float_operation(arity, function, kind, modifiers)


def _rounded(base: str, mode: str) -> Function:
    """A function of float32 numbers that is rounded in a direction."""
    exact = EXACT[base]
    narrow = directed(mode, lambda x: x.astype(np.float64), lambda x: x.astype(np.float32))

    def compute(*sources: Array) -> Array:
        wide = [source.astype(np.float64) for source in sources]
        result = exact(*wide)
        if mode == "rm" and base in ("add", "sub", "fma"):  # the sum of opposite numbers is -0 then
            last = -wide[-1] if base == "sub" else wide[-1]
            first = wide[0] * wide[1] if base == "fma" else wide[0]
            result = np.where((result == 0) & (np.signbit(first) | np.signbit(last)), -0.0, result)
        return narrow(result)

    return compute


def _mixed(base: str, modifiers: list[str], kind: str) -> Operation | None:
    """add.f32.bf16 and its like: all but the last operand are in half precision, the sum is in float32."""
    function = {"add": np.add, "sub": np.subtract, "fma": fma_float32}.get(base)
    if function is None or not {"rn", "sat"} >= set(modifiers):
        return None
    narrow = 2 if base == "fma" else 1
    widen = WIDE[kind][0]

    def compute(*sources: Array) -> Array:
        return function(*map(widen, sources[:-1]), sources[-1])

    computed = _saturating(compute) if "sat" in modifiers else compute
    return Operation(computed, (DTYPES[kind],) * narrow + (DTYPES["f32"],), DTYPES["f32"])


def _extreme(base: str, modifiers: list[str], kind: str, count: int, allowed: set[str]) -> Operation | None:
    """min and max, of two or (sm_100) three numbers. Of a number and a NaN they are the number, unless .NaN."""
    if not (allowed - {"sat"}).issuperset(modifiers) or count not in (2, 3):
        return None

    def two(a: Array, b: Array) -> Array:
        first = (a < b) | ((a == b) & np.signbit(a))  # -0 is less than +0
        result = np.where(first == (base == "min"), a, b)
        a_missing, b_missing = np.isnan(a), np.isnan(b)
        if "NaN" in modifiers:
            return np.where(a_missing | b_missing, a.dtype.type(np.nan), result)
        return np.where(a_missing, b, np.where(b_missing, a, result))

    def compute(*sources: Array) -> Array:
        result = two(*(np.abs(x) for x in sources[:2]) if "abs" in modifiers else sources[:2])
        if len(sources) == 3:
            result = two(result, np.abs(sources[2]) if "abs" in modifiers else sources[2])
        if "xorsign" in modifiers:
            return np.copysign(
                result, np.where(np.signbit(sources[0]) ^ np.signbit(sources[1]), -1, 1).astype(result.dtype)
            )
        return result

    return _float_operation(count, compute, kind, modifiers)


def _approximation(base: str, modifiers: list[str], kind: str) -> Operation | None:
    if (base, kind) == ("rsqrt", "f64") and modifiers == ["approx"]:  # the manual gives no bound
        return _float_operation(1, lambda x: 1 / np.sqrt(x), kind, modifiers)
    if kind == "f64" and base in ("rcp", "rsqrt") and modifiers == ["approx", "ftz"]:
        exact = np.reciprocal if base == "rcp" else lambda x: 1 / np.sqrt(x)
        return _float_operation(1, lambda x: _upper_word(exact(_upper_word(x))), kind, [])
    if kind != "f32" or set(modifiers) not in ({"approx"}, {"approx", "ftz"}, {"full"}, {"full", "ftz"}):
        return None
    if base == "div":
        return _float_operation(2, _divide if "full" in modifiers else _divide_in_range, kind, modifiers)
    if base not in APPROXIMATE or "full" in modifiers:
        return None
    function, bound = APPROXIMATE[base]

    def compute(x: Array) -> Array:
        exact = function(x.astype(np.float64))
        result = approximate(exact, **bound)
        if base in ELSEWHERE:
            other, other_bound = ELSEWHERE[base]
            result = np.where(other(x), approximate(exact, **other_bound), result)
        known = (x == 0) | np.isinf(x)  # for these arguments the manual gives the result
        return np.where(known, exact.astype(np.float32), result)

    return _float_operation(1, compute, kind, modifiers)


def _upper_word(x: Array) -> Array:
    """Of a float64 its upper 32 bits, to which rcp.approx.ftz.f64 confines itself; subnormal numbers become zeros."""
    upper = (x.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    return np.where(np.abs(x) < np.finfo(np.float64).tiny, np.copysign(0.0, x), np.where(np.isnan(x), np.nan, upper))


def _divide(a: Array, b: Array) -> Array:
    return approximate(np.divide(a, b, dtype=np.float64), ulps=2)


def _divide_in_range(a: Array, b: Array) -> Array:
    """div.approx, which for a divisor beyond 2^126 gives 0."""
    quotient = _divide(a, b)
    far = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(far, np.where(np.isfinite(a), np.copysign(np.float32(0), quotient), np.float32(np.nan)), quotient)


def _float_operation(arity: int, function: Function, kind: str, modifiers: list[str]) -> Operation:
    """The operation on registers of `kind`, from `function` on float32 numbers (float64 for f64)."""
    dtype, compute = DTYPES[kind], function
    if "ftz" in modifiers:
        compute = _flushing(compute)
    if "sat" in modifiers:
        compute = _saturating(compute)
    if "relu" in modifiers:
        compute = _clamped(compute)
    if kind in WIDE:
        compute = _through_float32(compute, *WIDE[kind])
    if kind.endswith("x2"):
        compute = on_pairs(compute, kind)
    return Operation(compute, (dtype,) * arity, dtype)


def _flushing(function: Function) -> Function:
    return lambda *sources: flush(function(*map(flush, sources)))


def _saturating(function: Function) -> Function:
    def saturated(*sources: Array) -> Array:
        result = function(*sources)
        return np.where(np.isnan(result), 0, np.clip(result, 0, 1)).astype(result.dtype)

    return saturated


def _clamped(function: Function) -> Function:
    """Negative results become 0 (.relu)."""

    def clamped(*sources: Array) -> Array:
        result = function(*sources)
        return np.where(result < 0, result.dtype.type(0), result)

    return clamped


def _through_float32(function: Function, widen: Function, narrow: Function) -> Function:
    return lambda *sources: narrow(function(*map(widen, sources)))


def _test(modifiers: list[str], kind: str) -> Operation | None:
    """testp: a predicate, whether a number has a property. Zeros count as normal."""
    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= np.finfo(x.dtype).tiny) | (x == 0)),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
    }
    if len(modifiers) != 1 or modifiers[0] not in tests or kind not in ("f32", "f64"):
        return None
    return Operation(tests[modifiers[0]], (DTYPES[kind],), DTYPES["pred"])


# Comparisons

COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
COMBINED = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _comparison(modifiers: list[str]) -> Operation | None:
    """setp: a predicate, from two numbers and, for setp.lt.and and its like, another predicate.

    Of packed numbers (f16x2) two predicates, (..., 2).
    """
    name, *rest = [part for part in modifiers if part != "ftz"]
    kind = rest.pop() if rest else ""
    function = _comparison_of(name, kind)
    if function is None or len(rest) > 1 or not COMBINED.keys() >= set(rest):
        return None
    if "ftz" in modifiers:
        if kind != "f32":
            return None
        function = _through_float32(function, flush, lambda truth: truth)
    if kind in WIDE:
        function = _through_float32(function, WIDE[kind][0], lambda truth: truth)
    if kind.endswith("x2"):
        halves, part = function, PAIRS[kind]
        function = lambda a, b: halves(unpack(a, part), unpack(b, part))  # noqa: E731
    dtype = DTYPES[kind]
    if not rest:
        return Operation(function, (dtype, dtype), DTYPES["pred"])
    if kind in PAIRS:
        return None
    combine = COMBINED[rest[0]]
    return Operation(lambda a, b, p: combine(function(a, b), p), (dtype, dtype, DTYPES["pred"]), DTYPES["pred"])


def _comparison_of(name: str, kind: str) -> Callable[[Array, Array], Array] | None:
    if kind not in DTYPES:
        return None
    floating = kind in FLOATS
    if floating and name in ("num", "nan"):
        return (
            (lambda a, b: ~(np.isnan(a) | np.isnan(b))) if name == "num" else (lambda a, b: np.isnan(a) | np.isnan(b))
        )
    if name in COMPARISONS:
        ordered = COMPARISONS[name]
        if floating and name == "ne":  # false for a NaN, unlike NumPy's
            return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
        return ordered
    if floating and name.endswith("u") and name[:-1] in COMPARISONS:  # true for a NaN
        ordered = COMPARISONS[name[:-1]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    return None
