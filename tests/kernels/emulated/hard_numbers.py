"""Numbers that are hard on arithmetic."""

import itertools

import numpy as np

from tests.kernels.emulated import exact

FORMATS = {
    "f16": (exact.FLOAT16, np.uint16), "bf16": (exact.BFLOAT16, np.uint16),
    "f32": (exact.FLOAT32, np.uint32), "f64": (exact.FLOAT64, np.uint64),
}  # fmt: skip


def to_values(bits, kind):
    """The numbers that bits stand for, as float64."""
    with np.errstate(invalid="ignore"):  # a signaling NaN
        if kind == "bf16":
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).astype(np.float64)


def to_bits(values, kind):
    """The bits of numbers that the type holds."""
    values = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        if kind == "bf16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).view(FORMATS[kind][1])


def special(kind):
    """Both zeros and infinities, NaN, the ends of the subnormal and of the normal numbers, neighbours of 1 and 2."""
    form = FORMATS[kind][0]
    step, normal = 2.0 ** (1 - form.precision), 2.0**form.smallest
    positive = [
        0.0,
        form.tiny,
        normal - form.tiny,
        normal,
        1 - step / 2,
        1,
        1 + step,
        2 - step,
        3,
        form.maximum,
        np.inf,
    ]
    return to_bits([sign * number for number in positive for sign in (1, -1)] + [np.nan], kind)


def random(kind, n, seed=0):
    """Half of them any bits, half of them near 1, where sums cancel and products tie."""
    generator = np.random.default_rng(seed)
    dtype = FORMATS[kind][1]
    anything = generator.integers(0, np.iinfo(dtype).max, n // 2, dtype, endpoint=True)
    step = 2.0 ** (1 - FORMATS[kind][0].precision)
    near = (1 + generator.integers(0, 64, n - n // 2) * step) * 2.0 ** generator.integers(-3, 4, n - n // 2)
    return np.concatenate([anything, to_bits(near * generator.choice([-1, 1], n - n // 2), kind)])


def operands(kind, count, n):
    """`count` arrays: every pair of special numbers (with others, if there are three), and n random ones."""
    first, second = (each.reshape(-1) for each in np.meshgrid(special(kind), special(kind)))
    columns = [first, second, np.resize(special(kind)[::-1], len(first))][:count]
    if count == 1:
        columns = [special(kind)]
    return [np.concatenate([column, random(kind, n, seed)]) for seed, column in enumerate(columns)]


def assert_same(found, expected, inputs, kind):
    """Fail with the first number that differs, by value or by the sign of zero; every NaN is the same."""
    found, expected = to_values(found, kind), np.asarray(expected, np.float64)
    same = (found == expected) & (np.signbit(found) == np.signbit(expected)) | np.isnan(found) & np.isnan(expected)
    if not same.all():
        at = int(np.argmin(same))
        given = ", ".join(float(each[at]).hex() for each in inputs)
        wrong = f"{(~same).sum()} of {len(same)} differ"
        raise AssertionError(f"of ({given}): found {found[at].hex()}, expected {expected[at].hex()}; {wrong}")


def almost_ties(kind, n=400):
    """a, b, c for which a * b + c lies next to the middle of two numbers, nearer than a second rounding can see."""
    form = FORMATS[kind][0]
    generator = np.random.default_rng(3)
    step = 2.0 ** (1 - form.precision)
    # c is odd, so that a tie would go to the other side. Half of the time it is subnormal, which float64 can't state.
    subnormal = (np.arange(n) % 2 == 0) & (kind != "f64")
    odd = 2.0 * generator.integers(0, 2 ** (form.precision - 3), n) + 1
    scale = 2.0 ** generator.integers(-4, 5, n)
    c = np.where(subnormal, odd * form.tiny, (1 + odd * step) * scale)
    half = np.where(subnormal, form.tiny / 2, step / 2 * scale) * generator.choice([-1, 1], n)
    # (1 + step) * (1 - step) is a little less than 1. Both factors stay in range, if the half is tiny.
    shift = 2.0 ** np.round(np.log2(np.abs(half)) / 2)
    return [to_bits(each, kind) for each in ((1 + step) * shift, (1 - step) * half / shift, c)]


def near_numbers_of(kind, source, n=600):
    """Numbers of the type `source`: those of the narrower `kind`, the middles between, and what is next to these."""
    bits = np.concatenate([special(kind), random(kind, n, seed=7)])
    bits = np.concatenate([bits, special(kind) ^ 1])
    value, neighbour = to_values(bits, kind), to_values(bits ^ 1, kind)
    with np.errstate(all="ignore"):
        middle = np.where(np.isfinite(value) & np.isfinite(neighbour), (value + neighbour) / 2, value)
        dtype = {"f32": np.float32, "f64": np.float64}[source]
        points = np.concatenate([value, middle]).astype(dtype)
        points = np.concatenate([points, np.nextafter(points, dtype(np.inf)), np.nextafter(points, dtype(-np.inf))])
    return points.view(FORMATS[source][1])


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
