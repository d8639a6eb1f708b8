"""Integers and bits, against Python's integers."""

import itertools
import struct

import numpy as np
import pytest

from tests.kernels.emulated.by_hand import apply, compute
from tests.kernels.emulated.hard_numbers import integers, type_of

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


def cut(value, dtype):
    """The lower bits of a whole number, as the type reads them."""
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


def check(name, function, inputs, result):
    """Compare an instruction with a function of Python's integers."""
    rows = list(zip(*(each.tolist() for each in inputs), strict=True))
    compare(name, apply(name, *inputs, result=result), [function(*row) for row in rows], rows)


def compare(name, found, expected, rows):
    expected = [cut(int(each), found.dtype) for each in expected]
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
    (a,) = integers(kind, 1)
    by = np.array([0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 65, 2**31, 2**32 - 1], np.uint32)
    together = [each.reshape(-1) for each in np.meshgrid(a, by)]
    for columns in (together, *([a, np.full_like(a, each, np.uint32)] for each in by)):  # then each distance alone
        check(name, lambda a, by: a << min(by, 64) if base == "shl" else a >> min(by, 64), columns, type_of(kind))


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
        found = compute(f"lop3.b32 %y, %a, %b, %c, {table};", *inputs, result=np.uint32)
        rows = list(zip(*(each.tolist() for each in inputs), strict=True))
        compare("lop3.b32", found, [function(*row) for row in rows], rows)


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
    found = apply(name, a, b, result=np.uint32)
    function = {"add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum}[base]
    with np.errstate(over="ignore"):
        expected = function(*columns).view(np.uint16)
    np.testing.assert_array_equal(found & 0xFFFF, expected)
    np.testing.assert_array_equal(found >> 16, np.roll(expected, 1))


def test_carries_go_from_word_to_word():
    """Sums of 64 bits and their 65th, and a product to which a word is added."""
    a, b, c, d = np.random.default_rng(0).integers(0, 2**32, (4, 300), dtype=np.uint32)
    b[:100] = ~d[:100]  # what the lower words carry goes on
    total = [(y << 32 | x) + (w << 32 | z) for x, y, z, w in zip(*map(np.ndarray.tolist, (a, b, c, d)), strict=True)]
    words = "add.cc.u32 %r0, %a, %c; addc.cc.u32 %r1, %b, %d; addc.u32 %r2, 0, 0;"
    found = compute(words + "mov.b64 %y, {%r0, %r1};", a, b, c, d, result=np.uint64)
    assert found.tolist() == [each % 2**64 for each in total]
    assert compute(words + "mov.b32 %y, %r2;", a, b, c, d, result=np.uint32).tolist() == [n >> 64 for n in total]
    words = "mad.lo.cc.u32 %r0, %a, %b, %c; madc.hi.u32 %r1, %a, %b, 0; mov.b64 %y, {%r0, %r1};"
    found = compute(words, a, b, c, result=np.uint64)
    assert found.tolist() == [x * y + z for x, y, z in zip(*map(np.ndarray.tolist, (a, b, c)), strict=True)]


def test_a_sum_that_is_switched_off_leaves_the_carry():
    a = np.array([1, 2**32 - 1] * 16, np.uint32)
    body = """
        setp.lt.u32 %p0, %r31, 16; add.cc.u32 %r0, %a, 1; @%p0 add.cc.u32 %r0, 0, 0;
        madc.lo.cc.u32 %r1, 3, 5, 0; addc.u32 %y, %r1, 0;
    """
    assert compute(body, a, result=np.uint32).tolist() == [15] * 16 + [15, 16] * 8
