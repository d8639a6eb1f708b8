"""Comparisons, predicates, the least and the largest, signs; test_rounding.py has sums and products."""

import itertools
import operator

import numpy as np
import pytest

from tests.kernels.emulated.by_hand import apply, compute
from tests.kernels.emulated.hard_numbers import integers, random, special, to_bits, to_values

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
    assert apply(name, a, b, result=np.bool_).tolist() == expected


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
    np.testing.assert_array_equal(apply(name, *bits, result=np.bool_), expected)


def test_a_comparison_that_flushes():
    small = to_bits([1e-40, -1e-40, 0, 1], "f32")
    assert compute("setp.eq.ftz.f32 %y, %a, 0f00000000;", small, result=np.bool_).tolist() == [True, True, True, False]


def test_comparisons_join_another_predicate():
    a, b, p = (np.array(each) for each in zip(*itertools.product([1, 2], [1, 2], [False, True]), strict=True))
    a, b = a.astype(np.int32), b.astype(np.int32)
    joined = {"setp.lt.and.s32": (a < b) & p, "setp.lt.or.s32": (a < b) | p, "setp.lt.xor.s32": (a < b) ^ p}
    for name, expected in joined.items():
        assert (apply(name, a, b, p, result=np.bool_) == expected).all()


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
        assert (apply(name, p, q, result=np.bool_) == expected).all()
    assert (apply("not.pred", p, result=np.bool_) == ~p).all()
    assert (apply("mov.pred", p, result=np.bool_) == p).all()
    assert compute("mov.pred %y, -1;", p, result=np.bool_).all()
    assert not compute("mov.pred %y, 0;", p, result=np.bool_).any()
    kinds = {
        "selp.b16": np.uint16, "selp.b32": np.uint32, "selp.f32": np.float32, "selp.b64": np.uint64,
        "selp.f64": np.float64, "selp.s32": np.int32,
    }  # fmt: skip
    for name, dtype in kinds.items():
        a, b = np.array([1, 2, 3, 4], dtype), np.array([5, 6, 7, 8], dtype)
        assert (apply(name, a, b, p, result=dtype) == np.where(p, a, b)).all()
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
        np.testing.assert_array_equal(apply(f"{name}.{kind}", bits, result=np.bool_), truth, name)


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
        found = to_values(apply(name, *columns[:count], result=columns[0].dtype), kind)
        expected = np.array([of(row) for row in zip(*values[:count], strict=True)])
        np.testing.assert_array_equal(found, expected)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


def test_least_and_largest_magnitude():
    a, b = (each.reshape(-1) for each in np.meshgrid(*[np.float32([-3, -1, 1, 2, 0.5])] * 2))
    for name, function in {"min.xorsign.abs.f32": np.minimum, "max.xorsign.abs.f32": np.maximum}.items():
        found = apply(name, a, b, result=np.float32)
        np.testing.assert_array_equal(found, function(abs(a), abs(b)) * np.sign(a) * np.sign(b))
    for name, function in {"min.bf16x2": np.minimum, "max.bf16x2": np.maximum}.items():
        halves = [to_bits(x, "bf16").astype(np.uint32) * 0x10001 for x in (a, b)]
        found = apply(name, *halves, result=np.uint32)
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
        found = apply(name, to_bits(sign, kind), bits, result=bits.dtype)
        assert (found == to_bits(np.copysign(x, sign), kind)).all()
        return
    expected = to_bits(-x if base == "neg" else np.abs(x), single)
    if kind != single:
        bits, expected = bits.astype(np.uint32) * 0x10001, expected.astype(np.uint32) * 0x10001
    assert (apply(name, bits, result=bits.dtype) == expected).all()


def test_signs_of_what_is_flushed():
    subnormal = to_bits([1e-40, -1e-40, 2, -2], "f32")
    assert (apply("abs.ftz.f32", subnormal, result=np.float32) == [0, 0, 2, 2]).all()
    assert (apply("neg.ftz.f32", subnormal, result=np.float32) == [0, 0, -2, 2]).all()
