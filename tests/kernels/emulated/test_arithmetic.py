"""Integers, bits, comparisons and choices, against Python's integers."""

import itertools
import operator
import struct

import numpy as np
import pytest

from tests.kernels.emulated.by_hand import compute
from tests.kernels.emulated.hard_numbers import random, special, to_bits, to_values

# Whole functions of Python's integers. The result is cut to the bits of its type.
BINARY = {
    "add.s32": lambda a, b: a + b, "add.s64": lambda a, b: a + b, "add.u32": lambda a, b: a + b,
    "add.u64": lambda a, b: a + b, "add.s16": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b, "sub.s64": lambda a, b: a - b, "sub.u16": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b, "mul.lo.s64": lambda a, b: a * b, "mul.lo.u32": lambda a, b: a * b,
    "mul.lo.s16": lambda a, b: a * b,
    "mul.hi.s32": lambda a, b: a * b >> 32, "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s64": lambda a, b: a * b >> 64, "mul.hi.u64": lambda a, b: a * b >> 64,
    "mul.wide.s32": lambda a, b: a * b, "mul.wide.u32": lambda a, b: a * b, "mul.wide.s16": lambda a, b: a * b,
    "mul.wide.u16": lambda a, b: a * b,
    "min.s32": min, "max.s32": max, "min.u32": min, "max.u32": max, "min.s64": min, "max.s64": max,
    "min.u64": min, "max.s16": max,
    "and.b16": lambda a, b: a & b, "and.b32": lambda a, b: a & b, "and.b64": lambda a, b: a & b,
    "or.b16": lambda a, b: a | b, "or.b32": lambda a, b: a | b, "or.b64": lambda a, b: a | b,
    "xor.b16": lambda a, b: a ^ b, "xor.b32": lambda a, b: a ^ b, "xor.b64": lambda a, b: a ^ b,
}  # fmt: skip
UNARY = {
    "neg.s32": lambda a: -a, "neg.s64": lambda a: -a, "neg.s16": lambda a: -a, "abs.s32": abs, "abs.s64": abs,
    "not.b32": lambda a: ~a, "not.b64": lambda a: ~a, "not.b16": lambda a: ~a,
    "cvt.s64.s32": lambda a: a, "cvt.u64.u32": lambda a: a, "cvt.u32.u64": lambda a: a, "cvt.u16.u32": lambda a: a,
    "cvt.u32.u16": lambda a: a, "cvt.s32.s16": lambda a: a, "cvt.s32.s8": lambda a: a, "cvt.u16.u8": lambda a: a,
    "cvt.u8.u32": lambda a: a, "cvt.s16.s32": lambda a: a, "cvt.s64.u16": lambda a: a,
    "cvt.sat.s16.s32": lambda a: max(-(2**15), min(2**15 - 1, a)), "cvt.sat.u8.s32": lambda a: max(0, min(255, a)),
    "cvt.sat.u32.s64": lambda a: max(0, min(2**32 - 1, a)), "cvt.sat.s32.u32": lambda a: min(2**31 - 1, a),
}  # fmt: skip
FUSED = {
    "mad.lo.s32": lambda a, b, c: a * b + c, "mad.lo.s64": lambda a, b, c: a * b + c,
    "mad.lo.u32": lambda a, b, c: a * b + c, "mad.hi.u32": lambda a, b, c: (a * b >> 32) + c,
    "mad.hi.s32": lambda a, b, c: (a * b >> 32) + c, "sad.u32": lambda a, b, c: abs(a - b) + c,
    "sad.s32": lambda a, b, c: abs(a - b) + c,
}  # fmt: skip
NAMES = "%a", "%b", "%c", "%d"


def type_of(kind):
    return np.dtype({"s": "i", "u": "u", "b": "u"}[kind[0]] + str(int(kind[1:].removesuffix("x2")) // 8))


def integers(kind, count):
    """`count` arrays: every pair (or triple) of the numbers at the ends of the type and around 0, and random ones."""
    dtype = type_of(kind)
    limits, generator = np.iinfo(dtype), np.random.default_rng(0)
    edges = [limits.min, limits.min + 1, limits.max - 1, limits.max, 0, 1, 2, limits.max // 2 + 1, 0x55]
    edges += [-1, -2, -0x56] if dtype.kind == "i" else []
    columns = zip(*itertools.product(edges, repeat=count), strict=True)
    some = [generator.integers(limits.min, limits.max, 100, dtype, endpoint=True) for _ in range(count)]
    return [np.concatenate([np.array(edge, dtype), more]) for edge, more in zip(columns, some, strict=True)]


def cut(value, dtype):
    """The lower bits of a whole number, as the type reads them."""
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


def check(name, function, inputs, result, text="{name} %y, {operands};"):
    found = compute(text.format(name=name, operands=", ".join(NAMES[: len(inputs)])), *inputs, result=result)
    rows = list(zip(*(each.tolist() for each in inputs), strict=True))
    expected = [cut(int(function(*row)), np.dtype(result)) for row in rows]
    wrong = [(row, f, e) for row, f, e in zip(rows, found.tolist(), expected, strict=True) if f != e]
    assert not wrong, f"{name}{wrong[0][0]}: found {wrong[0][1]:#x}, expected {wrong[0][2]:#x}; {len(wrong)} are wrong"


@pytest.mark.parametrize("name", BINARY)
def test_of_two(name):
    kind = name.split(".")[-1]
    dtype = type_of(kind)
    result = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if "wide" in name else dtype
    check(name, BINARY[name], integers(kind, 2), result)


@pytest.mark.parametrize("name", UNARY)
def test_of_one(name):
    parts = name.split(".")
    check(name, UNARY[name], integers(parts[-1], 1), type_of(parts[-1] if parts[0] != "cvt" else parts[-2]))


@pytest.mark.parametrize("name", FUSED)
def test_of_three(name):
    check(name, FUSED[name], integers(name.split(".")[-1], 3), type_of(name.split(".")[-1]))


@pytest.mark.parametrize("name", ["mad.wide.s32", "mad.wide.u32", "mad.wide.u16"])
def test_a_wide_product_and_a_wide_sum(name):
    kind = name.split(".")[-1]
    a, b = integers(kind, 2)
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    c = np.resize(integers(kind[0] + str(16 * a.dtype.itemsize), 1)[0], len(a))
    check(name, lambda a, b, c: a * b + c, [a, b, c], wide)


@pytest.mark.parametrize(
    "name", ["div.s32", "div.u32", "div.s64", "div.u64", "rem.s32", "rem.u32", "rem.s64", "rem.u64"]
)
def test_division_goes_towards_zero(name):
    base, kind = name.split(".")
    a, b = integers(kind, 2)
    some = b != 0

    def quotient(a, b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    function = quotient if base == "div" else lambda a, b: a - b * quotient(a, b)
    check(name, function, [a[some], b[some]], type_of(kind))


@pytest.mark.parametrize(
    "name",
    ["shl.b16", "shl.b32", "shl.b64", "shr.u16", "shr.u32", "shr.u64", "shr.s16", "shr.s32", "shr.s64", "shr.b32"],
)
def test_shifts_beyond_the_width_leave_nothing(name):
    """Or the sign, to the right."""
    base, kind = name.split(".")
    by = np.array([0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 65, 2**31, 2**32 - 1], np.uint32)
    a, by = (each.reshape(-1) for each in np.meshgrid(integers(kind, 1)[0], by))
    check(name, lambda a, by: a << min(by, 64) if base == "shl" else a >> min(by, 64), [a, by], type_of(kind))


@pytest.mark.parametrize("name", ["bfe.u32", "bfe.s32", "bfe.u64", "bfe.s64", "bfi.b32", "bfi.b64"])
def test_bit_fields(name):
    """By the manual's loops over bits."""
    base, kind = name.split(".")
    dtype = type_of(kind)
    size = 8 * dtype.itemsize
    places = [0, 1, 5, 16, size - 1, size, size + 1, 255, 256 + 3]
    grid = itertools.product([0x12345678F0F0A5A5, 2**63 - 1, -1, 0], places, places)
    a, position, length = (list(each) for each in zip(*grid, strict=True))
    a = np.array([cut(each, dtype) for each in a], dtype)
    position, length = np.array(position, np.uint32), np.array(length, np.uint32)

    def extract(a, position, length):
        position, length = position & 0xFF, length & 0xFF
        sign = 0 if kind[0] == "u" or not length else a >> min(position + length - 1, size - 1) & 1
        bits = [a >> (i + position) & 1 if i < length and i + position < size else sign for i in range(size)]
        return sum(bit << i for i, bit in enumerate(bits))

    def insert(a, b, position, length):
        for i in range(length & 0xFF):
            place = i + (position & 0xFF)
            if place < size:
                b = b & ~(1 << place) | (a >> i & 1) << place
        return b

    if base == "bfe":
        check(name, extract, [a, position, length], dtype)
    else:
        check(name, insert, [a, a[::-1].copy(), position, length], dtype)


COUNTS = {
    "popc.b32": lambda a: bin(a).count("1"), "popc.b64": lambda a: bin(a).count("1"),
    "clz.b32": lambda a: 32 - a.bit_length(), "clz.b64": lambda a: 64 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2), "brev.b64": lambda a: int(f"{a:064b}"[::-1], 2),
    "bfind.u32": lambda a: a.bit_length() - 1, "bfind.u64": lambda a: a.bit_length() - 1,
    "bfind.s32": lambda a: (~a if a < 0 else a).bit_length() - 1,
    "bfind.shiftamt.u32": lambda a: 32 - a.bit_length() if a else -1,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counting_bits(name):
    kind = name.split(".")[-1]
    dtype = type_of(kind)
    x = np.concatenate([*integers(kind, 1), np.array([2**p for p in range(8 * dtype.itemsize - 1)], dtype)])
    check(name, COUNTS[name], [x], dtype if name.startswith("brev") else np.uint32)


def test_bytes_are_picked():
    """prmt.b32: selectors of bytes 0 to 7 of b and a, or of copies of their sign."""
    a, b = (np.resize(each, 200) for each in integers("u32", 2))
    selector = np.random.default_rng(0).integers(0, 2**16, 200).astype(np.uint32)

    def permute(a, b, selector):
        source = struct.pack("<II", a, b)
        picked = [(selector >> 4 * i & 7, selector >> 4 * i & 8) for i in range(4)]
        return int.from_bytes(
            [(0xFF if source[at] & 0x80 else 0) if sign else source[at] for at, sign in picked], "little"
        )

    check("prmt.b32", permute, [a, b, selector], np.uint32)


def test_any_function_of_three_bits():
    """lop3.b32: the manual's way to find a table is to compute the function of 0xF0, 0xCC and 0xAA."""
    inputs = [np.resize(each, 300) for each in integers("u32", 3)]
    for function in (
        lambda a, b, c: a & b & c,
        lambda a, b, c: (a & b) | (~a & c),
        lambda a, b, c: a ^ b ^ c,
        lambda a, b, c: a | (b & ~c),
    ):
        table = function(0xF0, 0xCC, 0xAA) & 0xFF
        check("lop3.b32", function, inputs, np.uint32, text="{name} %y, {operands}, " + f"{table};")


@pytest.mark.parametrize("name", ["shf.l.wrap.b32", "shf.l.clamp.b32", "shf.r.wrap.b32", "shf.r.clamp.b32"])
def test_funnel_shifts(name):
    """Of 64 bits, the upper half after a shift to the left or the lower half after one to the right."""
    a, b = (np.repeat(each[:60], 8) for each in integers("u32", 2))
    by = np.resize(np.array([0, 1, 15, 31, 32, 33, 64, 2**32 - 1], np.uint32), len(a))
    _, direction, beyond, _ = name.split(".")

    def shift(a, b, by):
        by = by & 31 if beyond == "wrap" else min(by, 32)
        return (b << 32 | a) << by >> 32 if direction == "l" else (b << 32 | a) >> by

    check(name, shift, [a, b, by], np.uint32)


@pytest.mark.parametrize("name", ["add.u16x2", "add.s16x2", "min.s16x2", "max.u16x2"])
def test_packed_integers(name):
    base, kind = name.split(".")
    columns = integers(kind.removesuffix("x2"), 2)
    a, b = (
        each.view(np.uint16).astype(np.uint32) | np.roll(each.view(np.uint16), 1).astype(np.uint32) << 16
        for each in columns
    )
    found = compute(f"{name} %y, %a, %b;", a, b, result=np.uint32)
    function = {"add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum}[base]
    with np.errstate(over="ignore"):
        expected = function(*columns).view(np.uint16)
    np.testing.assert_array_equal(found & 0xFFFF, expected)
    np.testing.assert_array_equal(found >> 16, np.roll(expected, 1))


# Predicates


COMPARED = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


@pytest.mark.parametrize("name", [
    "setp.eq.s16", "setp.ne.s16", "setp.lt.s16", "setp.le.s16", "setp.gt.s16", "setp.ge.s16", "setp.eq.s32",
    "setp.ne.s32", "setp.lt.s32", "setp.le.s32", "setp.gt.s32", "setp.ge.s32", "setp.eq.s64", "setp.ne.s64",
    "setp.lt.s64", "setp.le.s64", "setp.gt.s64", "setp.ge.s64", "setp.eq.u16", "setp.ne.u16", "setp.lt.u16",
    "setp.le.u16", "setp.gt.u16", "setp.ge.u16", "setp.eq.u32", "setp.ne.u32", "setp.lt.u32", "setp.le.u32",
    "setp.gt.u32", "setp.ge.u32", "setp.eq.u64", "setp.ne.u64", "setp.lt.u64", "setp.le.u64", "setp.gt.u64",
    "setp.ge.u64", "setp.lo.u32", "setp.ls.u32", "setp.hi.u32", "setp.hs.u32", "setp.eq.b16", "setp.ne.b16",
    "setp.eq.b32", "setp.ne.b32", "setp.eq.b64", "setp.ne.b64",
])  # fmt: skip
def test_comparisons_of_integers(name):
    _, comparison, kind = name.split(".")
    a, b = integers(kind, 2)
    expected = [COMPARED[comparison](x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert compute(f"{name} %y, %a, %b;", a, b, result=np.bool_).tolist() == expected


@pytest.mark.parametrize("name", [
    "setp.eq.f32", "setp.ne.f32", "setp.lt.f32", "setp.le.f32", "setp.gt.f32", "setp.ge.f32", "setp.equ.f32",
    "setp.neu.f32", "setp.ltu.f32", "setp.leu.f32", "setp.gtu.f32", "setp.geu.f32", "setp.eq.f64", "setp.ne.f64",
    "setp.lt.f64", "setp.le.f64", "setp.gt.f64", "setp.ge.f64", "setp.equ.f64", "setp.neu.f64", "setp.ltu.f64",
    "setp.leu.f64", "setp.gtu.f64", "setp.geu.f64", "setp.eq.f16", "setp.ne.f16", "setp.lt.f16", "setp.le.f16",
    "setp.gt.f16", "setp.ge.f16", "setp.equ.f16", "setp.neu.f16", "setp.ltu.f16", "setp.leu.f16", "setp.gtu.f16",
    "setp.geu.f16", "setp.eq.bf16", "setp.ne.bf16", "setp.lt.bf16", "setp.le.bf16", "setp.gt.bf16", "setp.ge.bf16",
    "setp.equ.bf16", "setp.neu.bf16", "setp.ltu.bf16", "setp.leu.bf16", "setp.gtu.bf16", "setp.geu.bf16",
    "setp.num.f32", "setp.nan.f32", "setp.num.f64", "setp.nan.f64", "setp.num.f16", "setp.nan.f16", "setp.num.bf16",
    "setp.nan.bf16",
])  # fmt: skip
def test_comparisons_of_floats(name):
    """Ordered ones are false of a NaN, those with a u are true; zeros of either sign are equal."""
    _, comparison, kind = name.split(".")
    bits = [each.reshape(-1) for each in np.meshgrid(special(kind), special(kind))]
    a, b = (to_values(each, kind) for each in bits)
    missing = np.isnan(a) | np.isnan(b)
    if comparison in ("num", "nan"):
        expected = missing == (comparison == "nan")
    elif comparison in COMPARED:
        expected = COMPARED[comparison](a, b) & ~missing
    else:
        expected = COMPARED[comparison[:-1]](a, b) | missing
    np.testing.assert_array_equal(compute(f"{name} %y, %a, %b;", *bits, result=np.bool_), expected)


def test_a_comparison_that_flushes():
    small = to_bits([1e-40, -1e-40, 0, 1], "f32")
    assert compute("setp.eq.ftz.f32 %y, %a, 0f00000000;", small, result=np.bool_).tolist() == [True, True, True, False]


def test_comparisons_join_another_predicate():
    a, b, p = (np.array(each) for each in zip(*itertools.product([1, 2], [1, 2], [False, True]), strict=True))
    a, b = a.astype(np.int32), b.astype(np.int32)
    joined = {"setp.lt.and.s32": (a < b) & p, "setp.lt.or.s32": (a < b) | p, "setp.lt.xor.s32": (a < b) ^ p}
    for name, expected in joined.items():
        assert (compute(f"{name} %y, %a, %b, %c;", a, b, p, result=np.bool_) == expected).all()


def test_comparisons_of_pairs_give_two_predicates():
    for kind, name in (("f16", "setp.lt.f16x2"), ("bf16", "setp.lt.bf16x2")):
        low, high = to_bits([1, 2, np.nan, 3], kind), to_bits([5, 0, 1, 2], kind)
        packed = low.astype(np.uint32) | high.astype(np.uint32) << 16
        two = int(to_bits(2.0, kind)) * 0x10001
        text = f"mov.b32 %r0, {two}; {name} %p0|%p1, %a, %r0; selp.b32 %y, 1, 0, %p0; @%p1 add.s32 %y, %y, 2;"
        assert compute(text, packed, result=np.uint32).tolist() == [1, 2, 2, 0]


def test_predicates_and_choices():
    p, q = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    for name, expected in {"and.pred": p & q, "or.pred": p | q, "xor.pred": p ^ q}.items():
        assert (compute(f"{name} %y, %a, %b;", p, q, result=np.bool_) == expected).all()
    assert (compute("not.pred %y, %a;", p, result=np.bool_) == ~p).all()
    assert (compute("mov.pred %y, %a;", p, result=np.bool_) == p).all()
    assert compute("mov.pred %y, -1;", p, result=np.bool_).all()
    assert not compute("mov.pred %y, 0;", p, result=np.bool_).any()
    kinds = {
        "selp.b16": np.uint16, "selp.b32": np.uint32, "selp.f32": np.float32, "selp.b64": np.uint64,
        "selp.f64": np.float64, "selp.s32": np.int32,
    }  # fmt: skip
    for name, dtype in kinds.items():
        a, b = np.array([1, 2, 3, 4], dtype), np.array([5, 6, 7, 8], dtype)
        assert (compute(f"{name} %y, %a, %b, %c;", a, b, p, result=dtype) == np.where(p, a, b)).all()
    assert (compute("selp.b32 %y, -1, 7, %a;", p, result=np.int32) == np.where(p, -1, 7)).all()


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_properties_of_floats(kind):
    bits = np.concatenate([special(kind), random(kind, 100)])
    x = to_values(bits, kind)
    smallest = 2.0**-126 if kind == "f32" else 2.0**-1022
    normal = np.isfinite(x) & ((np.abs(x) >= smallest) | (x == 0))
    expected = {
        "testp.finite": np.isfinite(x), "testp.infinite": np.isinf(x), "testp.number": ~np.isnan(x),
        "testp.notanumber": np.isnan(x), "testp.normal": normal, "testp.subnormal": np.isfinite(x) & ~normal,
    }  # fmt: skip
    for name, truth in expected.items():
        np.testing.assert_array_equal(compute(f"{name}.{kind} %y, %a;", bits, result=np.bool_), truth, name)


@pytest.mark.parametrize("name", [
    "min.f32", "max.f32", "min.f64", "max.f64", "min.f16", "max.f16", "min.bf16", "max.bf16", "min.NaN.f32",
    "max.NaN.f32", "min.NaN.f16", "max.NaN.f16", "min.NaN.bf16", "max.NaN.bf16",
])  # fmt: skip
def test_least_and_largest(name):
    """-0 is less than +0. Of a number and a NaN the number counts, unless .NaN. In float32 also of three (sm_100)."""
    base, *modifiers, kind = name.split(".")
    columns = [each.reshape(-1) for each in np.meshgrid(*[special(kind)] * (3 if kind == "f32" else 2))]
    values = [to_values(each, kind) for each in columns]

    def of(numbers):
        given = [x for x in numbers if not np.isnan(x)]
        if len(given) < (len(numbers) if modifiers else 1):
            return np.nan
        return (min if base == "min" else max)(given, key=lambda x: (x, np.copysign(1, x)))

    for count in range(2, len(columns) + 1):
        text = f"{name} %y, {', '.join(NAMES[:count])};"
        found = to_values(compute(text, *columns[:count], result=columns[0].dtype), kind)
        expected = np.array([of(row) for row in zip(*values[:count], strict=True)])
        np.testing.assert_array_equal(found, expected)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


def test_least_and_largest_magnitude():
    a, b = (each.reshape(-1) for each in np.meshgrid(*[np.float32([-3, -1, 1, 2, 0.5])] * 2))
    for name, function in {"min.xorsign.abs.f32": np.minimum, "max.xorsign.abs.f32": np.maximum}.items():
        found = compute(f"{name} %y, %a, %b;", a, b, result=np.float32)
        np.testing.assert_array_equal(found, function(abs(a), abs(b)) * np.sign(a) * np.sign(b))
    for name, function in {"min.bf16x2": np.minimum, "max.bf16x2": np.maximum}.items():
        halves = [to_bits(x, "bf16").astype(np.uint32) * 0x10001 for x in (a, b)]
        found = compute(f"{name} %y, %a, %b;", *halves, result=np.uint32)
        np.testing.assert_array_equal(to_values((found >> 16).astype(np.uint16), "bf16"), function(a, b))


@pytest.mark.parametrize("name", [
    "neg.f32", "abs.f32", "neg.f64", "abs.f64", "neg.f16", "abs.f16", "neg.bf16", "abs.bf16", "neg.f16x2",
    "abs.f16x2", "neg.bf16x2", "abs.bf16x2", "copysign.f32", "copysign.f64",
])  # fmt: skip
def test_signs(name):
    """Also of zeros."""
    base, kind = name.split(".")
    single = kind.removesuffix("x2")
    bits = special(single)
    bits = bits[~np.isnan(to_values(bits, single))]
    x = to_values(bits, single)
    if base == "copysign":
        sign = np.resize([-1.0, 1.0], len(x))
        found = compute(f"{name} %y, %a, %b;", to_bits(sign, kind), bits, result=bits.dtype)
        assert (found == to_bits(np.copysign(x, sign), kind)).all()
        return
    expected = to_bits(-x if base == "neg" else np.abs(x), single)
    if kind != single:
        bits, expected = bits.astype(np.uint32) * 0x10001, expected.astype(np.uint32) * 0x10001
    assert (compute(f"{name} %y, %a;", bits, result=bits.dtype) == expected).all()


def test_signs_of_what_is_flushed():
    subnormal = to_bits([1e-40, -1e-40, 2, -2], "f32")
    assert (compute("abs.ftz.f32 %y, %a;", subnormal, result=np.float32) == [0, 0, 2, 2]).all()
    assert (compute("neg.ftz.f32 %y, %a;", subnormal, result=np.float32) == [0, 0, -2, 2]).all()


# Registers


def test_registers_are_packed_and_taken_apart():
    """mov.b32 and mov.b64 with {...} on either side; the first part is in the lowest bits, and _ takes nothing."""
    a, b = (np.arange(5, dtype=np.uint16) * 771 + at for at in (1, 40000))
    word = a.astype(np.uint32) | b.astype(np.uint32) << 16
    assert (compute("mov.b32 %y, {%a, %b};", a, b, result=np.uint32) == word).all()
    assert (compute("mov.b32 {%y, %h1}, %a;", word, result=np.uint16) == a).all()
    assert (compute("mov.b32 {_, %y}, %a;", word, result=np.uint16) == b).all()
    double = word.astype(np.uint64) | (word[::-1].astype(np.uint64) << np.uint64(32))
    assert (compute("mov.b64 %y, {%a, %b};", word, word[::-1].copy(), result=np.uint64) == double).all()
    assert (compute("mov.b64 {%r0, %y}, %a;", double, result=np.uint32) == word[::-1]).all()
    assert (compute("mov.b64 {%h0, %h1, %h2, %y}, %a;", double, result=np.uint16) == b[::-1]).all()
    small = "cvt.u8.u32 %h0, %a; cvt.u8.u32 %h1, %b; mov.b16 %y, {%h0, %h1};"
    assert (compute(small, np.uint32([0x1FE]), np.uint32([0x2A5]), result=np.uint16) == 0xA5FE).all()


def test_immediate_numbers():
    """Decimal, hexadecimal, negative and floating-point ones, of any size of register."""
    nothing = np.zeros(1, np.uint32)
    for text, result, expected in [
        ("mov.b32 %y, -1;", np.uint32, 2**32 - 1),
        ("mov.u32 %y, 0xff;", np.uint32, 255),
        ("mov.b16 %y, -3;", np.int16, -3),
        ("mov.u16 %y, 7;", np.uint16, 7),
        ("mov.b64 %y, -5;", np.int64, -5),
        ("mov.u64 %y, 0x8000000000000000;", np.uint64, 2**63),
        ("mov.s32 %y, 12;", np.int32, 12),
        ("mov.b32 %y, 0f3F800000;", np.float32, 1.0),
        ("mov.f32 %y, 0fBF000000;", np.float32, -0.5),
        ("mov.f64 %y, 0d3FF8000000000000;", np.float64, 1.5),
        ("mov.b32 %r0, 0f40000000; add.f32 %y, %r0, 0f3F800000;", np.float32, 3.0),
    ]:
        assert compute(text, nothing, result=result).tolist() == [expected], text


def test_a_narrow_result_fills_a_wide_register():
    """With zeros, or with the sign; a narrow read takes the lower bits."""
    assert compute("cvt.s8.s32 %r0, %a; mov.b32 %y, %r0;", np.int32([-2, 127]), result=np.int32).tolist() == [-2, 127]
    assert compute("cvt.u8.u32 %r0, %a; mov.b32 %y, %r0;", np.uint32([0x1FE]), result=np.uint32).tolist() == [0xFE]
    assert compute("cvt.u32.u16 %y, %a;", np.uint32([0x12345]), result=np.uint32).tolist() == [0x2345]
