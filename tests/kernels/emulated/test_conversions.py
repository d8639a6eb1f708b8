"""cvt: rounded in each direction, clamped, packed; of NaN, infinities, ties and the ends of each type."""

import numpy as np
import pytest
import torch

from tests.kernels.emulated import exact
from tests.kernels.emulated.by_hand import apply
from tests.kernels.emulated.hard_numbers import (
    FORMATS,
    assert_same,
    near_numbers_of,
    random,
    special,
    to_bits,
    to_values,
)


@pytest.mark.parametrize("name", [
    "cvt.rn.f16.f32", "cvt.rz.f16.f32", "cvt.rm.f16.f32", "cvt.rp.f16.f32", "cvt.rn.bf16.f32", "cvt.rz.bf16.f32",
    "cvt.rm.bf16.f32", "cvt.rp.bf16.f32", "cvt.rn.f32.f64", "cvt.rz.f32.f64", "cvt.rm.f32.f64", "cvt.rp.f32.f64",
    "cvt.rn.f16.f64", "cvt.rn.bf16.f64", "cvt.rz.bf16.f64",
])  # fmt: skip
def test_cvt_rounds_to_a_narrower_type(name):
    _, mode, to, source = name.split(".")
    bits = np.concatenate([near_numbers_of(to, source), random(source, 300)])
    values = to_values(bits, source)
    found = apply(name, bits, result=FORMATS[to][1])
    assert_same(found, [exact.convert(float(x), FORMATS[to][0], mode) for x in values], [values], to)


@pytest.mark.parametrize("name", ["cvt.f32.f16", "cvt.f32.bf16", "cvt.f64.f32", "cvt.f64.f16", "cvt.rn.bf16.f16"])
def test_cvt_widens_exactly(name):
    *_, to, source = name.split(".")
    bits = np.arange(2**16, dtype=np.uint16) if source != "f32" else random("f32", 500)
    bits = bits[:: 1 if to == "f32" else 37]
    values = to_values(bits, source)
    found = apply(name, bits, result=FORMATS[to][1], threads=1024)
    expected = values if to != "bf16" else [exact.convert(float(x), exact.BFLOAT16) for x in values]
    assert_same(found, expected, [values], to)


@pytest.mark.parametrize("name", ["cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"])
def test_cvt_packs_the_first_number_into_the_upper_half(name):
    _, mode, to, _ = name.split(".")
    kind = to.removesuffix("x2")
    first = near_numbers_of(kind, "f32", 100)
    second = first[::-1].copy()
    found = apply(name, first, second, result=np.uint32)
    for half, given in ((found >> 16, first), (found & 0xFFFF, second)):
        values = to_values(given, "f32")
        expected = [exact.convert(float(x), FORMATS[kind][0], mode) for x in values]
        assert_same(half.astype(np.uint16), expected, [values], kind)


def test_a_nan_is_converted_to_the_canonical_one():
    nans = np.array([0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800001], np.uint32)
    for name in ("cvt.rn.f16.f32", "cvt.rn.bf16.f32"):
        assert set(apply(name, nans, result=np.uint16)) == {0x7FFF}
    for name in ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"):
        assert set(apply(name, nans, nans, result=np.uint32)) == {0x7FFF7FFF}


@pytest.mark.parametrize("name", ["cvt.rna.tf32.f32", "cvt.rn.tf32.f32", "cvt.rz.tf32.f32"])
def test_cvt_to_tf32(name):
    generator = np.random.default_rng(0)
    bits = random("f32", 400) & np.uint32(0xFFFFE000)
    bits = np.concatenate(
        [bits | generator.choice([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], 400).astype(np.uint32), special("f32")]
    )
    values = to_values(bits, "f32")
    found = apply(name, bits, result=np.uint32)
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
    found = apply(widen, pairs, result=np.uint32)
    assert_same((found & 0xFFFF).astype(np.uint16), values, [codes], "f16")
    assert_same((found >> 16).astype(np.uint16), values[::-1], [codes[::-1]], "f16")

    finite = np.sort(values[np.isfinite(values)]).astype(np.float32)
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.float32(9e9)), [1e9, -1e9, np.inf, -np.inf]]).astype(
        np.float32
    )
    expected = np.clip([exact.convert(float(x), form) for x in points], -form.maximum, form.maximum)
    found = apply(narrow, points, points[::-1].copy(), result=np.uint16)
    back = [torch.from_numpy((found >> by).astype(np.uint8)).view(dtype).double().numpy() for by in (8, 0)]
    np.testing.assert_array_equal(back[0], expected)
    np.testing.assert_array_equal(back[1], expected[::-1])
    halves = to_bits(np.clip(values, -60000, 60000), "f16")
    found = apply(narrow_halves, halves.astype(np.uint32) * 0x10001, result=np.uint16)
    assert (found[np.isfinite(values)] == codes[np.isfinite(values)].astype(np.uint16) * 0x101).all()
    nan = apply(narrow, np.float32([np.nan]), np.float32([1]), result=np.uint16)
    assert nan[0] >> 8 == 0x7F


@pytest.mark.parametrize("name", ["cvt.rn.satfinite.e4m3x2.bf16x2", "cvt.rn.satfinite.e5m2x2.bf16x2"])
def test_cvt_from_bfloat16_to_8_bits(name):
    """Of sm_100."""
    form, dtype = SMALL[name.split(".")[3].removesuffix("x2")]
    bits = np.concatenate([special("bf16"), random("bf16", 2000)])
    bits = bits[np.isfinite(to_values(bits, "bf16"))]
    expected = [exact.convert(float(x), form) for x in to_values(bits, "bf16")]
    found = apply(name, bits.astype(np.uint32) | bits[::-1].astype(np.uint32) << 16, result=np.uint16)
    for by, wanted in ((0, expected), (8, expected[::-1])):
        back = torch.from_numpy((found >> by).astype(np.uint8)).view(dtype).double().numpy()
        np.testing.assert_array_equal(back, np.clip(wanted, -form.maximum, form.maximum))


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
    found = apply(name, np.array(integers, dtype), result=FORMATS[to][1])
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
    found = apply(name, bits, result=dtype)
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
    found = apply(name, bits, result=FORMATS[kind][1])
    with np.errstate(invalid="ignore"):  # a signaling NaN
        expected = whole(values)
    assert_same(found, expected, [values], kind)


def test_cvt_clamps_and_flushes():
    x = np.array([-2, -0.25, 0.25, 0.75, 1e6, np.inf, -np.inf, np.nan, 1e-40, -1e-40], np.float32)
    for name, expected in {
        "cvt.sat.f32.f32": [0, 0, 0.25, 0.75, 1, 1, 0, 0, np.float32(1e-40), 0],
        "cvt.ftz.f32.f32": [-2, -0.25, 0.25, 0.75, 1e6, np.inf, -np.inf, np.nan, 0, 0],
    }.items():
        np.testing.assert_array_equal(apply(name, x, result=np.float32), expected)
    for name, expected in {
        "cvt.rn.relu.f16.f32": [0, 0, 0.25, 0.75, np.inf, np.inf, 0, np.nan, 0, 0],
        "cvt.rn.satfinite.f16.f32": [-2, -0.25, 0.25, 0.75, 65504, 65504, -65504, np.nan, 0, 0],
        "cvt.rn.sat.f16.f32": [0, 0, 0.25, 0.75, 1, 1, 0, 0, 0, 0],
    }.items():
        np.testing.assert_array_equal(apply(name, x, result=np.float16), expected)
