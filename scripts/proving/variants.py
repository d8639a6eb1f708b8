"""The right norm and the known mistakes, as data: which statistic, where eps stands, what the weight does, rounding.

Each part of the formula has a table, from a name to what it computes; "right" comes first. A variant takes one of each,
so two mistakes at once are variants too. All is computed in float64, but for what is rounded on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.form import Form

RIGHT = "right"


class Variant(NamedTuple):
    """What a norm computes, whatever it rounds."""

    statistic: str = RIGHT
    eps: str = RIGHT
    weight: str = RIGHT

    def mistakes(self) -> list[str]:
        """Names of the parts that are wrong."""
        return [name for name in self if name != RIGHT]


class Statistic(NamedTuple):
    """Words for a mistake, and (x) -> (what is normalised, its mean square); None where x has not the axes for it."""

    words: str
    compute: Callable[[Tensor], tuple[Tensor, Tensor] | None]


class Eps(NamedTuple):
    """Words for a mistake, and (mean square, eps) -> rstd."""

    words: str
    compute: Callable[[Tensor, float], Tensor]


class Weight(NamedTuple):
    """Words for a mistake, and (x_hat, weight, offset) -> y."""

    words: str
    compute: Callable[[Tensor, Tensor, float], Tensor]


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def _centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _power_of_two(width: int) -> int:
    """The next one, as a kernel's block has it."""
    return 1 << (width - 1).bit_length()


def _divided_by(count: Callable[[int], float]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda x: (x, x.square().sum(-1, keepdim=True) / count(x.shape[-1]))


def _first(columns: Callable[[int], int], whole: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The squares of the first columns alone, divided by the number of all of them, or of those."""

    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        n = min(columns(x.shape[-1]), x.shape[-1])
        return x, x[..., :n].square().sum(-1, keepdim=True) / (x.shape[-1] if whole else n)

    return compute


def _over(axis: int | None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The mean over another axis; None: over all of x."""

    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.square().mean() if axis is None else x.square().mean(axis, keepdim=True)

    return compute


def _without_keepdim(x: Tensor) -> tuple[Tensor, Tensor] | None:
    return (x, x.square().mean(-1)) if x.dim() == 2 and x.shape[0] == x.shape[1] else None


STATISTICS = {
    RIGHT: Statistic("", lambda x: (x, _mean_square(x))),
    "mean_removed": Statistic(
        "the mean is removed as well, as in LayerNorm; RMSNorm divides x itself by its root mean square",
        lambda x: (_centered(x), _mean_square(_centered(x))),
    ),
    "variance": Statistic(
        "the statistic is the variance, x's mean removed; RMSNorm's is the mean of the squares of x itself",
        lambda x: (x, _mean_square(_centered(x))),
    ),
    "square_of_the_mean": Statistic(
        "it squares the mean; the mean of the squares is wanted", lambda x: (x, x.mean(-1, keepdim=True).square())
    ),
    "mean_of_absolutes": Statistic(
        "the statistic is the mean of |x|; the root of the mean of the squares is wanted",
        lambda x: (x, x.abs().mean(-1, keepdim=True).square()),
    ),
    "not_divided": Statistic("the squares are summed and not divided by D", _divided_by(lambda width: 1)),
    "one_less": Statistic("the sum of squares is divided by D - 1; D is wanted", _divided_by(lambda width: width - 1)),
    "padded": Statistic(
        "the sum of squares is divided by the next power of two, the block's size; D, the row's, is wanted",
        _divided_by(_power_of_two),
    ),
    "columns_beyond_a_power_of_two": Statistic(
        "columns beyond the last power of two below D are left out of the sum of squares",
        _first(lambda width: 1 << (width.bit_length() - 1), True),
    ),
    "mean_up_to_a_power_of_two": Statistic(
        "the statistic is that of the columns up to the last power of two below D; that of all D is wanted",
        _first(lambda width: 1 << (width.bit_length() - 1), False),
    ),
    "over_the_sequence": Statistic("the mean runs over the axis before the last; the last is wanted", _over(-2)),
    "over_the_batch": Statistic("the mean runs over the first axis, the batch; the last is wanted", _over(0)),
    "over_everything": Statistic("the mean runs over all of x; each row has its own", _over(None)),
    "keepdim_forgotten": Statistic(
        "the statistic has lost its last axis, so row i is divided by the root of another row; use keepdim=True",
        _without_keepdim,
    ),
    **{
        f"first_{n}_columns": Statistic(
            f"columns beyond the first {n} are left out of the sum of squares: is the block smaller than D?",
            _first(lambda width, n=n: n, True),
        )
        for n in (512, 1024, 2048, 4096)
    },
}  # fmt: skip


def _literal(value: float) -> Eps:
    return Eps(
        f"eps is {value:g} whatever is passed: a literal in the code; it comes from the checkpoint",
        lambda mean_square, eps: (mean_square + value).rsqrt(),
    )


EPS = {
    RIGHT: Eps("", lambda mean_square, eps: (mean_square + eps).rsqrt()),
    "outside": Eps(
        "eps stands outside the root, x / (sqrt(mean(x^2)) + eps); inside is right, x / sqrt(mean(x^2) + eps)",
        lambda mean_square, eps: 1 / (mean_square.sqrt() + eps),
    ),
    "missing": Eps(
        "eps is left out: x / sqrt(mean(x^2)); a row of zeros becomes NaN", lambda mean_square, eps: mean_square.rsqrt()
    ),
    "ten_times_too_large": Eps(
        "eps is ten times too large", lambda mean_square, eps: (mean_square + 10 * eps).rsqrt()
    ),
    "ten_times_too_small": Eps(
        "eps is ten times too small", lambda mean_square, eps: (mean_square + eps / 10).rsqrt()
    ),
    "squared": Eps(
        "eps is squared: sqrt(mean(x^2) + eps^2); sqrt(mean(x^2) + eps) is right",
        lambda mean_square, eps: (mean_square + eps**2).rsqrt(),
    ),
    "clamped": Eps(
        "eps is the least that the root may be, max(sqrt(mean(x^2)), eps); it is added under the root",
        lambda mean_square, eps: 1 / mean_square.sqrt().clamp_min(eps),
    ),
    "clamped_inside": Eps(
        "eps is the least that the mean square may be, sqrt(max(mean(x^2), eps)); it is added to it",
        lambda mean_square, eps: mean_square.clamp_min(eps).rsqrt(),
    ),
    **{f"literal_{value:g}": _literal(value) for value in (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)},
}  # fmt: skip
WEIGHTS = {
    RIGHT: Weight("", lambda x_hat, weight, offset: x_hat * (weight + offset)),
    "dropped": Weight("the weight is dropped: y is x_hat alone", lambda x_hat, weight, offset: x_hat),
    "plus_one": Weight(
        "the weight is offset by one, x_hat * (1 + weight), as in Gemma's norm; --form gemma holds it to that",
        lambda x_hat, weight, offset: x_hat * (weight + offset + 1),
    ),
    "offset_forgotten": Weight(
        "the offset of the form is forgotten: x_hat * weight", lambda x_hat, weight, offset: x_hat * weight
    ),
    "offset_on_x_hat": Weight(
        "the offset of the form is added to x_hat; it belongs to the weight",
        lambda x_hat, weight, offset: (x_hat + offset) * weight,
    ),
    "squared": Weight(
        "the weight is applied twice", lambda x_hat, weight, offset: x_hat * (weight + offset).square()
    ),
}  # fmt: skip


def variants(form: Form, statistics: list[str] | None = None) -> list[Variant]:
    """All combinations that tell themselves apart in this form, those with the fewest mistakes first."""
    weights = [name for name in WEIGHTS if form.offset or not name.startswith("offset")]
    if form.offset == 1:
        weights.remove("plus_one")
        weights.insert(2, "plus_one")
    every = [Variant(*names) for names in product(statistics or STATISTICS, EPS, weights)]
    return sorted(every, key=lambda variant: len(variant.mistakes()))


def words_of(variant: Variant) -> list[tuple[str, str]]:
    """(name, words) of each mistake."""
    tables = (STATISTICS, EPS, WEIGHTS)
    return [(name, table[name].words) for name, table in zip(variant, tables, strict=True) if name != RIGHT]


def normalised(variant: Variant, x: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """x_hat and rstd in float64, without rounding."""
    parts = STATISTICS[variant.statistic].compute(x.double())
    if parts is None:
        return None
    numerator, mean_square = parts
    rstd = EPS[variant.eps].compute(mean_square, eps)
    return numerator * rstd, rstd


def exact(variant: Variant, x: Tensor, weight: Tensor, eps: float, form: Form) -> Tensor | None:
    """y in float64, differentiable; None where x has not the axes for this variant."""
    parts = normalised(variant, x, eps)
    return None if parts is None else WEIGHTS[variant.weight].compute(parts[0], weight.double(), form.offset)


# In half precision: (variant, x, weight, eps, form) -> y. What is not rounded on purpose is float64.
Rounding = Callable[[Variant, Tensor, Tensor, float, Form], Tensor]


def _truncated(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Cut off what does not fit."""
    if dtype != torch.bfloat16:
        return wide.to(dtype)
    return (wide.float().view(torch.int32) & -65536).view(torch.float32).to(dtype)


def _rounded(
    once: bool,
    to: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    rstd_too: bool = False,
    sum_too: bool = False,
    weight_too: bool = False,
) -> Rounding:
    def compute(variant: Variant, x: Tensor, weight: Tensor, eps: float, form: Form) -> Tensor:
        parts = normalised(variant, x, eps)
        assert parts is not None, "the rows that show the rounding have the axes for it"
        x_hat, rstd = parts
        if rstd_too:
            x_hat = x.double() * rstd.to(x.dtype).double()
        x_hat = x_hat if once else to(x_hat, x.dtype).double()
        offset, wide = form.offset, (weight.to(x.dtype) if weight_too else weight).double()
        if sum_too:
            offset, wide = 0.0, (weight + offset).double()
        return to(WEIGHTS[variant.weight].compute(x_hat, wide, offset), x.dtype)

    return compute


def _statistics_in_half(variant: Variant, x: Tensor, weight: Tensor, eps: float, form: Form) -> Tensor:
    """As PyTorch computes it for a half precision x that nobody has widened."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return WEIGHTS[variant.weight].compute(y, weight, form.offset).to(x.dtype)


TWICE, ONCE = "rounded_twice", "rounded_once"
STATISTICS_IN_HALF = "statistics_in_half_precision"
ROUNDINGS: dict[str, tuple[str, Rounding]] = {
    TWICE: (
        "x_hat is rounded before the weight multiplies it, and again after it: LLaMA's order of rounding",
        _rounded(once=False),
    ),
    ONCE: (
        "x_hat is not rounded before the weight multiplies it: the rounding order of nn.RMSNorm",
        _rounded(once=True),
    ),
    "offset_in_half_precision": (
        "offset + weight is rounded to half precision; float32 is wanted", _rounded(once=True, sum_too=True)
    ),
    "offset_in_half_precision_rounded_twice": (
        "offset + weight is rounded to half precision, float32 is wanted, and so is x_hat",
        _rounded(once=False, sum_too=True),
    ),
    "rstd_in_half_precision": (
        "rstd is rounded to half precision before it multiplies x", _rounded(once=False, rstd_too=True)
    ),
    "rstd_in_half_precision_rounded_once": (
        "rstd is rounded to half precision before it multiplies x, and x_hat isn't", _rounded(once=True, rstd_too=True)
    ),
    STATISTICS_IN_HALF: (
        "the statistics are in half precision: 300 squared is more than float16 can hold; float32 is wanted",
        _statistics_in_half,
    ),
    "weight_in_half_precision": (
        "a float32 weight is rounded to half precision before it multiplies x_hat",
        _rounded(once=False, weight_too=True),
    ),
    "weight_in_half_precision_rounded_once": (
        "a float32 weight is rounded to half precision before it multiplies x_hat, which isn't rounded",
        _rounded(once=True, weight_too=True),
    ),
    "truncated": ("bits are cut off and not rounded", _rounded(once=False, to=_truncated)),
    "truncated_once": (
        "bits are cut off and not rounded, once, after the weight", _rounded(once=True, to=_truncated)
    ),
}  # fmt: skip


def roundings(form: Form) -> list[str]:
    """Names that make sense in a form; the right one comes first."""
    own = ONCE if form.round_once else TWICE
    return [own, *(name for name in ROUNDINGS if name != own and (form.offset or not name.startswith("offset")))]
