"""Floating-point results: exactly rounded where the manual says so, and where it does not, as inexact as it allows."""

import numpy as np
import pytest

from tests.kernels.emulated import exact
from tests.kernels.emulated.by_hand import apply
from tests.kernels.emulated.hard_numbers import (
    FORMATS,
    almost_ties,
    assert_same,
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
    found = apply(name, *bits, result=FORMATS[kind][1])
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
    found = apply(name, *packed, result=dtype)
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
    found = apply("fma.rn.f64", *(x.view(np.uint64) for x in (a, b, c)), result=np.uint64)
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
    found = apply(name, *narrow, last, result=np.uint32)
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
        found = apply(name, *wide, result=np.uint64)
        found = (found >> np.uint64(32)).astype(np.uint32)
    else:
        found = apply(name, *bits, result=np.uint32)
    assert_same(found, expected, values, "f32")


def test_sat_and_relu():
    x = np.array([-2, -0.25, 0.25, 0.75, 3, np.inf, -np.inf, np.nan], np.float32)
    one, zero = np.float32(1), np.float32(0)
    for name, given in (("add.sat.f32", (x, zero)), ("mul.sat.f32", (x, one)), ("fma.rn.sat.f32", (x, one, zero))):
        found = apply(name, *given, result=np.float32)
        np.testing.assert_array_equal(found, [0, 0, 0.25, 0.75, 1, 1, 0, 0])
    for kind, name in (("bf16", "fma.rn.relu.bf16"), ("f16", "fma.rn.relu.f16")):
        bits = [to_bits(np.broadcast_to(each, x.shape), kind) for each in (x, one, zero)]
        found = to_values(apply(name, *bits, result=np.uint16), kind)
        np.testing.assert_array_equal(found, [0, 0, 0.25, 0.75, 3, np.inf, 0, np.nan])


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
    found = apply(name, x, result=np.float32, threads=1024)
    true = function(x.astype(np.longdouble))
    share = np.abs(found - true) / bound(true)
    assert share.max() <= 1, f"of {x[share.argmax()]}: found {found[share.argmax()]}, expected {true[share.argmax()]}"
    assert share.max() >= 0.5, "better than a GPU need be: a kernel that counts on it would pass"
    again = apply(name, x[::-1].copy(), result=np.float32)
    np.testing.assert_array_equal(again[::-1], found)  # the same number for an argument, wherever it stands


@pytest.mark.parametrize("name", ["div.full.f32", "div.full.ftz.f32", "div.approx.f32", "div.approx.ftz.f32"])
def test_approximate_division(name):
    generator = np.random.default_rng(0)
    a, b = (magnitudes(-60, 60)(generator, 20000).astype(np.float32) for _ in range(2))
    b *= generator.choice([-1, 1], len(b)).astype(np.float32)
    found = apply(name, a, b, result=np.float32, threads=1024)
    true = a.astype(np.longdouble) / b
    share = np.abs(found - true) / ulps(2)(true)
    assert 0.5 <= share.max() <= 1


def test_division_beyond_its_range():
    """div.approx gives a zero for |b| > 2^126, and a NaN if a is infinite; div.full doesn't."""
    a, b = np.float32([3e38, -3e38, np.inf, 1, 0, np.nan, 1, -1]), np.float32([2e38, 2e38, 2e38, np.inf, 0, 1, 0, 0])
    found = apply("div.approx.f32", a, b, result=np.float32)
    np.testing.assert_array_equal(found, np.float32([0, -0.0, np.nan, 0, np.nan, np.nan, np.inf, -np.inf]))
    assert np.signbit(found[1])
    found = apply("div.full.f32", a, b, result=np.float32)
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
        found = apply(name, x, result=np.float32)
        known = [i for i, each in enumerate(expected) if each is not None]
        np.testing.assert_array_equal(found[known], np.float32([expected[i] for i in known]), err_msg=name)
        signs = np.signbit(np.float32([expected[i] for i in known]))
        numbers = ~np.isnan(found[known])
        np.testing.assert_array_equal(np.signbit(found[known])[numbers], signs[numbers], err_msg=name)
    subnormal = np.float32([1e-40, -1e-40])
    assert (apply("rsqrt.approx.ftz.f32", subnormal, result=np.float32) == [np.inf, -np.inf]).all()
    assert np.isfinite(apply("rsqrt.approx.f32", subnormal[:1], result=np.float32)).all()


def test_the_reciprocal_root_in_float64():
    """The manual gives no bound; here it is within a step of the right one."""
    x = magnitudes(-1000, 1000)(np.random.default_rng(0), 500)
    found = apply("rsqrt.approx.f64", x, result=np.float64)
    right = np.array([exact.rcp(exact.sqrt(float(each), exact.FLOAT64), exact.FLOAT64) for each in x])
    assert (np.abs(found - right) <= np.spacing(right)).all()


@pytest.mark.parametrize("name", ["rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64"])
def test_gross_approximations_in_float64(name):
    """The lower 32 bits are 0: 20 bits of the fraction are right."""
    x = magnitudes(-1000, 1000)(np.random.default_rng(0), 500)
    x = np.abs(x) if "sqrt" in name else x
    found = apply(name, x, result=np.float64)
    right = 1 / np.sqrt(x) if "sqrt" in name else 1 / x
    assert not (found.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()
    assert (np.abs(found - right) <= 2.0**-19 * np.abs(right)).all()
    edges = np.array([0.0, -0.0, np.inf, np.nan, 5e-324])
    expected = [np.inf, -np.inf, 0, np.nan, np.inf]
    np.testing.assert_array_equal(apply(name, edges, result=np.float64), expected)
