"""Correctly rounded arithmetic on fractions, in Python's integers: what IEEE 754 says, for formats of any size."""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """Significant bits, the exponents of the smallest normal and of the largest number, and the largest one."""

    precision: int
    smallest: int
    largest: int
    maximum: float

    @property
    def tiny(self):
        """The smallest number, and the distance of subnormal ones."""
        return math.ldexp(1.0, self.smallest - self.precision + 1)


def _format(precision, largest):
    return Format(precision, 1 - largest, largest, (2 - 2.0 ** (1 - precision)) * 2.0**largest)


FLOAT64, FLOAT32, FLOAT16, BFLOAT16, TF32 = (
    _format(*each) for each in ((53, 1023), (24, 127), (11, 15), (8, 127), (11, 127))
)
E5M2, E4M3 = _format(3, 15), Format(4, -6, 8, 448.0)  # the largest mantissa of e4m3 is a NaN


def rounded(value, form, mode="rn"):
    """The float nearest to a fraction that isn't 0. rna: ties away from zero."""
    magnitude, sign = abs(value), 1 if value > 0 else -1
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, form.smallest) - form.precision + 1)
    steps, rest = divmod(magnitude, step)
    rest /= step
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": rest and value < 0,
        "rp": rest and value > 0,
    }[mode]
    result = (steps + bool(up)) * step
    if result > form.maximum:
        inward = {"rz": True, "rm": value > 0, "rp": value < 0}.get(mode, False)
        return sign * (form.maximum if inward else math.inf)
    return sign * float(result)


def convert(x, form, mode="rn"):
    return rounded(Fraction(x), form, mode) if math.isfinite(x) and x else x


def fma(a, b, c, form, mode="rn"):
    if not all(map(math.isfinite, (a, b, c))):
        return c if math.isfinite(a) and math.isfinite(b) else a * b + c
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value:
        return rounded(value, form, mode)
    product = math.copysign(1, a) * math.copysign(1, b)
    if not (a and b) and not c and product == math.copysign(1, c):
        return c  # both zeros have this sign
    return -0.0 if mode == "rm" else 0.0


def add(a, b, form, mode="rn"):
    return fma(a, 1.0, b, form, mode)


def sub(a, b, form, mode="rn"):
    return fma(a, 1.0, -b, form, mode)


def mul(a, b, form, mode="rn"):
    if not (math.isfinite(a) and math.isfinite(b) and a and b):
        return a * b
    return rounded(Fraction(a) * Fraction(b), form, mode)


def div(a, b, form, mode="rn"):
    if not (math.isfinite(a) and math.isfinite(b) and a and b):
        with np.errstate(all="ignore"):
            return float(np.float64(a) / np.float64(b))
    return rounded(Fraction(a) / Fraction(b), form, mode)


def rcp(a, form, mode="rn"):
    return div(1.0, a, form, mode)


def sqrt(a, form, mode="rn"):
    if not (math.isfinite(a) and a > 0):
        return a if a == 0 or a > 0 else math.nan
    scaled = Fraction(a) * 4**1200  # a whole number, with more bits than any format after the root
    root = math.isqrt(int(scaled))
    inexact = root * root != scaled
    return rounded(Fraction(2 * root + inexact, 2 * 2**1200), form, mode)
