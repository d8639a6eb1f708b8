"""Floating-point results: exactly rounded where the manual says so, and where it does not, as inexact as it allows."""

import numpy as np
import pytest
import torch

from tests.kernels.emulated import exact
from tests.kernels.emulated.by_hand import compute
from tests.kernels.emulated.hard_numbers import (
    FORMATS,
    almost_ties,
    assert_same,
    near_numbers_of,
    operands,
    random,
    special,
    to_bits,
    to_values,
)

TO_NEAREST = [
    "add.f32", "add.rn.f32", "sub.f32", "sub.rn.f32", "mul.f32", "mul.rn.f32", "fma.rn.f32", "mad.rn.f32",
    "div.rn.f32", "rcp.rn.f32", "sqrt.rn.f32", "add.f64", "add.rn.f64", "sub.f64", "mul.f64", "mul.rn.f64",
    "div.rn.f64", "rcp.rn.f64", "sqrt.rn.f64", "add.f16", "add.rn.f16", "sub.f16", "mul.f16", "mul.rn.f16",
    "fma.rn.f16", "add.bf16", "add.rn.bf16", "sub.bf16", "mul.bf16", "mul.rn.bf16", "fma.rn.bf16",
]  # fmt: skip
DIRECTED = [
    "add.rz.f32", "add.rm.f32", "add.rp.f32", "sub.rz.f32", "sub.rm.f32", "sub.rp.f32", "mul.rz.f32", "mul.rm.f32",
    "mul.rp.f32", "fma.rz.f32", "fma.rm.f32", "fma.rp.f32", "div.rz.f32", "div.rm.f32", "div.rp.f32", "sqrt.rz.f32",
    "sqrt.rm.f32", "sqrt.rp.f32", "rcp.rz.f32", "rcp.rm.f32", "rcp.rp.f32",
]  # fmt: skip
PACKED = [
    "add.f16x2", "sub.f16x2", "mul.f16x2", "fma.rn.f16x2", "add.bf16x2", "sub.bf16x2", "mul.bf16x2", "fma.rn.bf16x2",
    "add.f32x2", "add.rn.f32x2", "sub.f32x2", "sub.rn.f32x2", "mul.f32x2", "mul.rn.f32x2", "fma.rn.f32x2",
    "add.rz.f32x2", "fma.rm.f32x2",
]  # fmt: skip
ARITY = {"rcp": 1, "sqrt": 1, "fma": 3, "mad": 3}
HALVES = {"f16": np.uint32, "bf16": np.uint32, "f32": np.uint64}


def take_apart(name):
    """add.rn.f32 -> the exact function, the number of its operands, its mode of rounding, f32."""
    base, *modes, kind = name.split(".")
    function = getattr(exact, "fma" if base == "mad" else base)
    return function, ARITY.get(base, 2), modes[0] if modes else "rn", kind.removesuffix("x2")


def expected_of(name, inputs):
    function, _, mode, kind = take_apart(name)
    form = FORMATS[kind][0]
    return [function(*each, form, mode) for each in zip(*(map(float, x) for x in inputs), strict=True)]


@pytest.mark.parametrize("name", TO_NEAREST + DIRECTED)
def test_arithmetic_is_exactly_rounded(name):
    _, count, _, kind = take_apart(name)
    bits = operands(kind, count, 300)
    if count == 3:
        bits = [np.concatenate(pair) for pair in zip(bits, almost_ties(kind), strict=True)]
    found = compute(f"{name} %y, {', '.join(['%a', '%b', '%c'][:count])};", *bits, result=FORMATS[kind][1])
    values = [to_values(each, kind) for each in bits]
    assert_same(found, expected_of(name, values), values, kind)


@pytest.mark.parametrize("name", PACKED)
def test_packed_arithmetic_is_that_of_the_halves(name):
    _, count, _, kind = take_apart(name)
    width, dtype = 8 * FORMATS[kind][1]().itemsize, HALVES[kind]
    bits = operands(kind, count, 200)
    if count == 3:
        bits = [np.concatenate(pair) for pair in zip(bits, almost_ties(kind), strict=True)]
    packed = [each.astype(dtype) | np.roll(each, 1).astype(dtype) << dtype(width) for each in bits]
    found = compute(f"{name} %y, {', '.join(['%a', '%b', '%c'][:count])};", *packed, result=dtype)
    values = [to_values(each, kind) for each in bits]
    expected = expected_of(name, values)
    assert_same(found.astype(FORMATS[kind][1]), expected, values, kind)
    upper = (found >> dtype(width)).astype(FORMATS[kind][1])
    assert_same(upper, np.roll(expected, 1), [np.roll(each, 1) for each in values], kind)


def test_fma_of_float64():
    """Products whose lower half is lost or counts, sums that cancel; not those that leave the range of exponents."""
    bits = [random("f64", 3000, seed)[1500:] for seed in range(3)]
    bits = [np.concatenate(pair) for pair in zip(bits, almost_ties("f64"), strict=True)]
    a, b, c = (to_values(each, "f64") for each in bits)
    cancelling = np.stack([a, b, -(a * b)])
    a, b, c = np.concatenate([np.stack([a, b, c]), cancelling], axis=1)
    other = np.array([(np.inf, 1, -1), (np.inf, 0, 1), (0, 5, -0.0), (-0.0, 5, -0.0), (1, 2, np.nan), (1, -1, 1)]).T
    a, b, c = np.concatenate([(a, b, c), other], axis=1)
    found = compute("fma.rn.f64 %y, %a, %b, %c;", *(x.view(np.uint64) for x in (a, b, c)), result=np.uint64)
    assert_same(found, expected_of("fma.rn.f64", (a, b, c)), (a, b, c), "f64")


@pytest.mark.parametrize(
    "name",
    ["add.rn.f32.bf16", "sub.rn.f32.bf16", "fma.rn.f32.bf16", "add.rn.f32.f16", "sub.rn.f32.f16", "fma.rn.f32.f16"],
)
def test_half_precision_joins_a_sum_in_float32(name):
    base, *_, kind = name.split(".")
    narrow = operands(kind, 2, 300)
    n = len(narrow[0])
    narrow = narrow if base == "fma" else narrow[:1]
    last = np.resize(np.concatenate([special("f32"), random("f32", 300, seed=5)]), n)
    names = "%a, %b, %c" if base == "fma" else "%a, %b"
    found = compute(f"{name} %y, {names};", *narrow, last, result=np.uint32)
    values = [to_values(each, kind) for each in narrow] + [to_values(last, "f32")]
    assert_same(found, expected_of(f"{base}.rn.f32", values), values, "f32")


@pytest.mark.parametrize("name", ["add.ftz.f32", "mul.rn.ftz.f32", "fma.rn.ftz.f32", "add.ftz.f32x2"])
def test_subnormal_numbers_become_zeros_of_their_sign(name):
    """.ftz, of what an instruction reads and of what it gives."""
    base = name.split(".")[0]
    smallest = 2.0**-126
    subnormal, normal = to_bits([5e-40, -5e-40], "f32"), to_bits([smallest * 1.5, -smallest * 1.25], "f32")

    def flushed(x):
        return np.copysign(0, x) if abs(x) < smallest else x

    count = ARITY.get(base, 2)
    grids = np.meshgrid(*[np.concatenate([subnormal, normal, to_bits([0.5, 1.0], "f32")])] * count)
    bits = [each.reshape(-1) for each in grids]
    values = [to_values(each, "f32") for each in bits]
    plain = f"{base}.rn.f32"
    expected = [flushed(x) for x in expected_of(plain, [list(map(flushed, each)) for each in values])]
    if name.endswith("x2"):
        wide = [each.astype(np.uint64) | each.astype(np.uint64) << np.uint64(32) for each in bits]
        found = compute(f"{name} %y, {', '.join(['%a', '%b', '%c'][:count])};", *wide, result=np.uint64)
        found = (found >> np.uint64(32)).astype(np.uint32)
    else:
        found = compute(f"{name} %y, {', '.join(['%a', '%b', '%c'][:count])};", *bits, result=np.uint32)
    assert_same(found, expected, values, "f32")


def test_sat_and_relu():
    x = np.array([-2, -0.25, 0.25, 0.75, 3, np.inf, -np.inf, np.nan], np.float32)
    one, zero = np.float32(1), np.float32(0)
    for name, given in (("add.sat.f32", (x, zero)), ("mul.sat.f32", (x, one)), ("fma.rn.sat.f32", (x, one, zero))):
        found = compute(f"{name} %y, {', '.join(['%a', '%b', '%c'][: len(given)])};", *given, result=np.float32)
        np.testing.assert_array_equal(found, [0, 0, 0.25, 0.75, 1, 1, 0, 0])
    for kind, name in (("bf16", "fma.rn.relu.bf16"), ("f16", "fma.rn.relu.f16")):
        bits = [to_bits(np.broadcast_to(each, x.shape), kind) for each in (x, one, zero)]
        found = to_values(compute(f"{name} %y, %a, %b, %c;", *bits, result=np.uint16), kind)
        np.testing.assert_array_equal(found, [0, 0, 0.25, 0.75, 3, np.inf, 0, np.nan])


# Conversions


@pytest.mark.parametrize("name", [
    "cvt.rn.f16.f32", "cvt.rz.f16.f32", "cvt.rm.f16.f32", "cvt.rp.f16.f32", "cvt.rn.bf16.f32", "cvt.rz.bf16.f32",
    "cvt.rm.bf16.f32", "cvt.rp.bf16.f32", "cvt.rn.f32.f64", "cvt.rz.f32.f64", "cvt.rm.f32.f64", "cvt.rp.f32.f64",
    "cvt.rn.f16.f64", "cvt.rn.bf16.f64", "cvt.rz.bf16.f64",
])  # fmt: skip
def test_cvt_rounds_to_a_narrower_type(name):
    _, mode, to, source = name.split(".")
    bits = np.concatenate([near_numbers_of(to, source), random(source, 300)])
    values = to_values(bits, source)
    found = compute(f"{name} %y, %a;", bits, result=FORMATS[to][1])
    assert_same(found, [exact.convert(float(x), FORMATS[to][0], mode) for x in values], [values], to)


@pytest.mark.parametrize("name", ["cvt.f32.f16", "cvt.f32.bf16", "cvt.f64.f32", "cvt.f64.f16", "cvt.rn.bf16.f16"])
def test_cvt_widens_exactly(name):
    *_, to, source = name.split(".")
    bits = np.arange(2**16, dtype=np.uint16) if source != "f32" else random("f32", 500)
    bits = bits[:: 1 if to == "f32" else 37]
    values = to_values(bits, source)
    found = compute(f"{name} %y, %a;", bits, result=FORMATS[to][1], threads=1024)
    expected = values if to != "bf16" else [exact.convert(float(x), exact.BFLOAT16) for x in values]
    assert_same(found, expected, [values], to)


@pytest.mark.parametrize("name", ["cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"])
def test_cvt_packs_the_first_number_into_the_upper_half(name):
    _, mode, to, _ = name.split(".")
    kind = to.removesuffix("x2")
    first = near_numbers_of(kind, "f32", 100)
    second = first[::-1].copy()
    found = compute(f"{name} %y, %a, %b;", first, second, result=np.uint32)
    for half, given in ((found >> 16, first), (found & 0xFFFF, second)):
        values = to_values(given, "f32")
        expected = [exact.convert(float(x), FORMATS[kind][0], mode) for x in values]
        assert_same(half.astype(np.uint16), expected, [values], kind)


def test_a_nan_is_converted_to_the_canonical_one():
    nans = np.array([0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800001], np.uint32)
    for kind in ("f16", "bf16"):
        assert set(compute(f"cvt.rn.{kind}.f32 %y, %a;", nans, result=np.uint16)) == {0x7FFF}
        packed = compute(f"cvt.rn.{kind}x2.f32 %y, %a, %b;", nans, nans, result=np.uint32)
        assert set(packed) == {0x7FFF7FFF}


@pytest.mark.parametrize("name", ["cvt.rna.tf32.f32", "cvt.rn.tf32.f32", "cvt.rz.tf32.f32"])
def test_cvt_to_tf32(name):
    generator = np.random.default_rng(0)
    bits = random("f32", 400) & np.uint32(0xFFFFE000)
    bits = np.concatenate(
        [bits | generator.choice([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], 400).astype(np.uint32), special("f32")]
    )
    values = to_values(bits, "f32")
    found = compute(f"{name} %y, %a;", bits, result=np.uint32)
    assert not (found[~np.isnan(values)] & 0x1FFF).any()
    assert_same(found, [exact.convert(float(x), exact.TF32, name.split(".")[1]) for x in values], [values], "f32")


SMALL = {"e4m3": (exact.E4M3, torch.float8_e4m3fn), "e5m2": (exact.E5M2, torch.float8_e5m2)}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("e4m3", ["cvt.rn.f16x2.e4m3x2", "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e4m3x2.f16x2"]),
        ("e5m2", ["cvt.rn.f16x2.e5m2x2", "cvt.rn.satfinite.e5m2x2.f32", "cvt.rn.satfinite.e5m2x2.f16x2"]),
    ],
)
def test_cvt_from_and_to_8_bits(kind, names):
    form, dtype = SMALL[kind]
    widen, narrow, narrow_halves = names
    codes = np.arange(256, dtype=np.uint8)
    pairs = codes.astype(np.uint16) | codes[::-1].astype(np.uint16) << 8
    values = torch.from_numpy(codes).view(dtype).float().numpy().astype(np.float64)
    found = compute(f"{widen} %y, %a;", pairs, result=np.uint32)
    assert_same((found & 0xFFFF).astype(np.uint16), values, [codes], "f16")
    assert_same((found >> 16).astype(np.uint16), values[::-1], [codes[::-1]], "f16")

    finite = np.sort(values[np.isfinite(values)]).astype(np.float32)
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.float32(9e9)), [1e9, -1e9, np.inf, -np.inf]]).astype(
        np.float32
    )
    expected = np.clip([exact.convert(float(x), form) for x in points], -form.maximum, form.maximum)
    found = compute(f"{narrow} %y, %a, %b;", points, points[::-1].copy(), result=np.uint16)
    back = [torch.from_numpy((found >> by).astype(np.uint8)).view(dtype).double().numpy() for by in (8, 0)]
    np.testing.assert_array_equal(back[0], expected)
    np.testing.assert_array_equal(back[1], expected[::-1])
    halves = to_bits(np.clip(values, -60000, 60000), "f16")
    found = compute(f"{narrow_halves} %y, %a;", halves.astype(np.uint32) * 0x10001, result=np.uint16)
    assert (found[np.isfinite(values)] == codes[np.isfinite(values)].astype(np.uint16) * 0x101).all()
    nan = compute(f"{narrow} %y, %a, %b;", np.float32([np.nan]), np.float32([1]), result=np.uint16)
    assert nan[0] >> 8 == 0x7F


@pytest.mark.parametrize("name", [
    "cvt.rn.f32.s32", "cvt.rz.f32.s32", "cvt.rm.f32.s32", "cvt.rp.f32.u32", "cvt.rn.f32.u32", "cvt.rn.f32.s64",
    "cvt.rn.f32.u64", "cvt.rz.f32.u64", "cvt.rn.f32.u16", "cvt.rn.f32.s8", "cvt.rn.f64.s32", "cvt.rn.f64.u32",
    "cvt.rn.f64.s64", "cvt.rn.f64.u64", "cvt.rn.f16.s32", "cvt.rn.f16.u64", "cvt.rn.f16.s16", "cvt.rn.bf16.s32",
    "cvt.rn.bf16.s64", "cvt.rn.bf16.u64", "cvt.rn.bf16.u16",
])  # fmt: skip
def test_cvt_from_integers(name):
    _, mode, to, source = name.split(".")
    dtype = np.dtype({"s": "i", "u": "u"}[source[0]] + str(int(source[1:]) // 8))
    limits, generator = np.iinfo(dtype), np.random.default_rng(1)
    edges = [
        v
        for p in range(dtype.itemsize * 8)
        for d in (-1, 0, 1)
        for v in (2**p + d, -(2**p) + d, 2**p + 2 ** (p - p // 2) + d)
    ]
    if dtype.itemsize == 8:  # one more than the middle of two bfloat16 or float32 numbers, which float64 does not hold
        edges += [2**62 + 2**54 + 1, 2**62 + 2**54 - 1, 2**62 + 2**38 + 1, 2**62 + 2**38 - 1, 2**62 + 3 * 2**38]
    integers = [limits.min, limits.max, *(v for v in edges if limits.min <= v <= limits.max)]
    integers += map(int, generator.integers(limits.min, limits.max, 200, dtype, endpoint=True))
    found = compute(f"{name} %y, %a;", np.array(integers, dtype), result=FORMATS[to][1])
    expected = [exact.rounded(exact.Fraction(v), FORMATS[to][0], mode) if v else 0.0 for v in integers]
    assert_same(found, expected, [integers], to)


@pytest.mark.parametrize("name", [
    "cvt.rzi.s32.f32", "cvt.rni.s32.f32", "cvt.rmi.s32.f32", "cvt.rpi.s32.f32", "cvt.rzi.u32.f32", "cvt.rzi.s64.f32",
    "cvt.rzi.u64.f32", "cvt.rzi.s16.f32", "cvt.rzi.u16.f32", "cvt.rzi.s8.f32", "cvt.rzi.u8.f32", "cvt.rzi.s32.f64",
    "cvt.rni.u64.f64", "cvt.rzi.s64.f64", "cvt.rzi.s32.f16", "cvt.rni.s16.f16", "cvt.rzi.s32.bf16",
])  # fmt: skip
def test_cvt_to_integers_clamps(name):
    """Of a NaN comes 0; of a NaN in float64, or as 64 bits, the uppermost bit alone."""
    _, mode, to, source = name.split(".")
    size = int(to[1:])
    dtype = np.dtype({"s": "i", "u": "u"}[to[0]] + str(size // 8))
    generator = np.random.default_rng(1)
    points = [0.5, 1.5, 2.5, 0.49999997, 7.99, 2.0 ** (size - 1), 2.0**size, 2.0 ** (size - 1) - 1, 1e30, np.inf, 5e-40]
    points = np.concatenate([points, np.negative(points), generator.normal(size=200) * 2.0 ** (size // 2)])
    with np.errstate(over="ignore"):
        bits = np.concatenate([to_bits(to_values(to_bits(points, "f32"), "f32"), source), special(source)])
    values = to_values(bits, source)
    found = compute(f"{name} %y, %a;", bits, result=dtype)
    whole = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode]
    limits = np.iinfo(dtype)
    missing = 1 << (size - 1) if source == "f64" or size == 64 else 0

    def expected(x):
        if np.isnan(x):
            return int(np.array(missing, f"u{size // 8}").view(dtype))
        return (
            max(limits.min, min(limits.max, int(whole(x)))) if np.isfinite(x) else limits.max if x > 0 else limits.min
        )

    assert found.tolist() == [int(expected(x)) for x in values]


@pytest.mark.parametrize(
    "name", ["cvt.rzi.f32.f32", "cvt.rni.f32.f32", "cvt.rmi.f32.f32", "cvt.rpi.f32.f32", "cvt.rni.f16.f16"]
)
def test_cvt_to_a_whole_number_of_the_same_type(name):
    _, mode, kind, _ = name.split(".")
    bits = np.concatenate([special(kind), random(kind, 300), to_bits([0.5, 1.5, 2.5, -0.5, -1.5, 0.25, -0.25], kind)])
    values = to_values(bits, kind)
    whole = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode]
    assert_same(compute(f"{name} %y, %a;", bits, result=FORMATS[kind][1]), whole(values), [values], kind)


def test_cvt_clamps_and_flushes():
    x = np.array([-2, -0.25, 0.25, 0.75, 1e6, np.inf, -np.inf, np.nan, 1e-40, -1e-40], np.float32)
    for name, expected in {
        "cvt.sat.f32.f32": [0, 0, 0.25, 0.75, 1, 1, 0, 0, np.float32(1e-40), 0],
        "cvt.ftz.f32.f32": [-2, -0.25, 0.25, 0.75, 1e6, np.inf, -np.inf, np.nan, 0, 0],
    }.items():
        np.testing.assert_array_equal(compute(f"{name} %y, %a;", x, result=np.float32), expected)
    for name, expected in {
        "cvt.rn.relu.f16.f32": [0, 0, 0.25, 0.75, np.inf, np.inf, 0, np.nan, 0, 0],
        "cvt.rn.satfinite.f16.f32": [-2, -0.25, 0.25, 0.75, 65504, 65504, -65504, np.nan, 0, 0],
        "cvt.rn.sat.f16.f32": [0, 0, 0.25, 0.75, 1, 1, 0, 0, 0, 0],
    }.items():
        np.testing.assert_array_equal(compute(f"{name} %y, %a;", x, result=np.float16), expected)


# Approximate functions

TWO_PI, FAR = 2 * np.pi, 100 * np.pi


def uniform(low, high):
    return lambda generator, n: generator.uniform(low, high, n)


def magnitudes(low, high):
    """Positive numbers of every exponent alike."""
    return lambda generator, n: generator.uniform(1, 2, n) * 2.0 ** generator.integers(low, high, n)


def ulps(count):
    return lambda value: count * np.spacing(np.abs(value).astype(np.float32)).astype(np.longdouble)


def relative(power):
    return lambda value: np.abs(value) * np.longdouble(2) ** power


def absolute(power):
    return lambda value: np.longdouble(2) ** power


def rsqrt(x):
    return 1 / np.sqrt(x)


ACCURACY = [  # what the manual promises, and for which arguments
    ("rcp.approx.ftz.f32", np.reciprocal, magnitudes(-120, 120), ulps(1)),
    ("rcp.approx.f32", np.reciprocal, magnitudes(-120, 120), ulps(1)),
    ("sqrt.approx.ftz.f32", np.sqrt, magnitudes(-120, 120), relative(-23)),
    ("sqrt.approx.f32", np.sqrt, magnitudes(-126, 127), relative(-23)),
    ("rsqrt.approx.ftz.f32", rsqrt, magnitudes(-120, 120), relative(-22.9)),
    ("rsqrt.approx.f32", rsqrt, magnitudes(-126, 127), relative(-22.9)),
    ("ex2.approx.ftz.f32", np.exp2, uniform(-120, 127), ulps(2)),
    ("ex2.approx.f32", np.exp2, uniform(-140, 127), ulps(2)),
    ("lg2.approx.ftz.f32", np.log2, uniform(0.5, 2), absolute(-22)),
    ("lg2.approx.f32", np.log2, magnitudes(2, 120), relative(-22)),
    ("sin.approx.f32", np.sin, uniform(-TWO_PI, TWO_PI), absolute(-20.5)),
    ("sin.approx.f32", np.sin, uniform(TWO_PI, FAR), absolute(-14.7)),
    ("cos.approx.f32", np.cos, uniform(-TWO_PI, TWO_PI), absolute(-20.5)),
    ("cos.approx.f32", np.cos, uniform(TWO_PI, FAR), absolute(-14.7)),
    ("tanh.approx.f32", np.tanh, uniform(-8, 8), relative(-11)),
]


@pytest.mark.parametrize(
    ("name", "function", "sample", "bound"), ACCURACY, ids=lambda value: value if isinstance(value, str) else ""
)
def test_approximate_functions_are_as_inexact_as_the_manual_allows(name, function, sample, bound):
    x = sample(np.random.default_rng(0), 20000).astype(np.float32)
    found = compute(f"{name} %y, %a;", x, result=np.float32, threads=1024)
    true = function(x.astype(np.longdouble))
    share = np.abs(found - true) / bound(true)
    assert share.max() <= 1, f"of {x[share.argmax()]}: found {found[share.argmax()]}, expected {true[share.argmax()]}"
    assert share.max() >= 0.5, "better than a GPU need be: a kernel that counts on it would pass"
    again = compute(f"{name} %y, %a;", x[::-1].copy(), result=np.float32)
    np.testing.assert_array_equal(again[::-1], found)  # the same number for an argument, wherever it stands


@pytest.mark.parametrize("name", ["div.full.f32", "div.full.ftz.f32", "div.approx.f32", "div.approx.ftz.f32"])
def test_approximate_division(name):
    generator = np.random.default_rng(0)
    a, b = (magnitudes(-60, 60)(generator, 20000).astype(np.float32) for _ in range(2))
    b *= generator.choice([-1, 1], len(b)).astype(np.float32)
    found = compute(f"{name} %y, %a, %b;", a, b, result=np.float32, threads=1024)
    true = a.astype(np.longdouble) / b
    share = np.abs(found - true) / ulps(2)(true)
    assert 0.5 <= share.max() <= 1


def test_division_beyond_its_range():
    """div.approx gives a zero for |b| > 2^126, and a NaN if a is infinite; div.full doesn't."""
    a, b = np.float32([3e38, -3e38, np.inf, 1, 0, np.nan, 1, -1]), np.float32([2e38, 2e38, 2e38, np.inf, 0, 1, 0, 0])
    found = compute("div.approx.f32 %y, %a, %b;", a, b, result=np.float32)
    np.testing.assert_array_equal(found, np.float32([0, -0.0, np.nan, 0, np.nan, np.nan, np.inf, -np.inf]))
    assert np.signbit(found[1])
    found = compute("div.full.f32 %y, %a, %b;", a, b, result=np.float32)
    np.testing.assert_allclose(found, np.float32([1.5, -1.5, np.inf, 0, np.nan, np.nan, np.inf, -np.inf]), rtol=3e-7)


def test_arguments_for_which_the_manual_gives_the_result():
    x = np.float32([-np.inf, -1, -0.0, 0.0, np.inf, np.nan])
    inf, nan = np.inf, np.nan
    for name, expected in {
        "rcp.approx.f32": [-0.0, None, -inf, inf, 0.0, nan],
        "sqrt.approx.f32": [nan, nan, -0.0, 0.0, inf, nan],
        "rsqrt.approx.f32": [nan, nan, -inf, inf, 0.0, nan],
        "sin.approx.f32": [nan, None, -0.0, 0.0, nan, nan],
        "cos.approx.f32": [nan, None, 1.0, 1.0, nan, nan],
        "lg2.approx.f32": [nan, nan, -inf, -inf, inf, nan],
        "ex2.approx.f32": [0.0, None, 1.0, 1.0, inf, nan],
        "tanh.approx.f32": [-1.0, None, -0.0, 0.0, 1.0, nan],
    }.items():
        found = compute(f"{name} %y, %a;", x, result=np.float32)
        known = [i for i, each in enumerate(expected) if each is not None]
        np.testing.assert_array_equal(found[known], np.float32([expected[i] for i in known]), err_msg=name)
        signs = np.signbit(np.float32([expected[i] for i in known]))
        numbers = ~np.isnan(found[known])
        np.testing.assert_array_equal(np.signbit(found[known])[numbers], signs[numbers], err_msg=name)
    subnormal = np.float32([1e-40, -1e-40])
    assert (compute("rsqrt.approx.ftz.f32 %y, %a;", subnormal, result=np.float32) == [np.inf, -np.inf]).all()
    assert np.isfinite(compute("rsqrt.approx.f32 %y, %a;", subnormal[:1], result=np.float32)).all()


def test_the_reciprocal_root_in_float64():
    """The manual gives no bound; here it is within a step of the right one."""
    x = magnitudes(-1000, 1000)(np.random.default_rng(0), 500)
    found = compute("rsqrt.approx.f64 %y, %a;", x, result=np.float64)
    right = np.array([exact.rcp(exact.sqrt(float(each), exact.FLOAT64), exact.FLOAT64) for each in x])
    assert (np.abs(found - right) <= np.spacing(right)).all()
