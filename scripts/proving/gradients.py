"""The known mistakes in a backward, as data: a table for dx and one for dweight, from a name to what it computes.

Each takes what a backward has (in float64): dy, x, x_hat and rstd of the forward, and the weight with its offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

RIGHT = "right"


class Parts(NamedTuple):
    """What a backward is made of: dy, x and x_hat (..., D), rstd (..., 1), weight (D,)."""

    dy: Tensor
    x: Tensor
    x_hat: Tensor
    rstd: Tensor
    weight: Tensor

    @property
    def weighted(self) -> Tensor:
        return self.dy * self.weight

    @property
    def projection(self) -> Tensor:
        return (self.x_hat * self.weighted).mean(-1, keepdim=True)


Gradient = Callable[[Parts], Tensor]


class Mistake(NamedTuple):
    words: str
    compute: Gradient


def _right_dx(p: Parts) -> Tensor:
    return p.rstd * (p.weighted - p.x_hat * p.projection)


DX = {
    RIGHT: Mistake("", _right_dx),
    "without_the_projection": Mistake(
        "dx lacks the projection: it is rstd * weight * dy, and right is "
        "rstd * (weight * dy - x_hat * mean(weight * dy * x_hat))", lambda p: p.rstd * p.weighted,
    ),
    "projection_not_divided": Mistake(
        "the projection in dx is a sum; the mean over D is wanted",
        lambda p: p.rstd * (p.weighted - p.x_hat * p.projection * p.x.shape[-1]),
    ),
    "projection_added": Mistake(
        "the projection in dx has the wrong sign", lambda p: p.rstd * (p.weighted + p.x_hat * p.projection)
    ),
    "projection_without_the_weight": Mistake(
        "the projection in dx lacks the weight: mean(dy * x_hat); mean(weight * dy * x_hat) is right",
        lambda p: p.rstd * (p.weighted - p.x_hat * (p.x_hat * p.dy).mean(-1, keepdim=True)),
    ),
    "projection_with_x": Mistake(
        "the projection in dx has x in place of one of its x_hat", lambda p: p.rstd * (p.weighted - p.x * p.projection)
    ),
    "without_the_weight": Mistake(
        "dx lacks the weight",
        lambda p: p.rstd * (p.dy - p.x_hat * (p.x_hat * p.dy).mean(-1, keepdim=True)),
    ),
    "without_rstd": Mistake("dx lacks the factor rstd", lambda p: _right_dx(p) / p.rstd),
    "rstd_twice": Mistake("dx has the factor rstd twice", lambda p: _right_dx(p) * p.rstd),
    "mean_removed": Mistake(
        "dx has its mean removed, as LayerNorm's", lambda p: _right_dx(p) - _right_dx(p).mean(-1, keepdim=True)
    ),
    "zero": Mistake("dx is 0", lambda p: torch.zeros_like(p.x)),
    "dy": Mistake("dx is dy itself", lambda p: p.dy),
}  # fmt: skip


def _sum(rows: Tensor) -> Tensor:
    return rows.flatten(0, -2).sum(0)


def _of_rows(which: slice) -> Gradient:
    def compute(p: Parts) -> Tensor:
        return (p.dy * p.x_hat).flatten(0, -2)[which].sum(0)

    return compute


DWEIGHT = {
    RIGHT: Mistake("", lambda p: _sum(p.dy * p.x_hat)),
    "without_rstd": Mistake(
        "dweight lacks rstd: it sums dy * x, and dy * x_hat is right", lambda p: _sum(p.dy * p.x)
    ),
    "last_row": Mistake("dweight is that of the last row alone: rows overwrite each other", _of_rows(slice(-1, None))),
    "first_row": Mistake("dweight is that of the first row alone", _of_rows(slice(0, 1))),
    "last_batch": Mistake(
        "dweight is that of the last batch alone; all rows are summed", lambda p: _sum((p.dy * p.x_hat)[-1:])
    ),
    "first_batch": Mistake(
        "dweight is that of the first batch alone; all rows are summed", lambda p: _sum((p.dy * p.x_hat)[:1])
    ),
    "mean": Mistake(
        "dweight is a mean over the rows; their sum is wanted",
        lambda p: _sum(p.dy * p.x_hat) / (p.x.numel() // p.x.shape[-1]),
    ),
    "with_the_weight": Mistake(
        "dweight has the weight as a factor: it sums dy * y, and dy * x_hat is right",
        lambda p: _sum(p.dy * p.x_hat) * p.weight,
    ),
    "of_a_bias": Mistake("dweight is a bias's: it sums dy, and dy * x_hat is right", lambda p: _sum(p.dy)),
    "zero": Mistake("dweight is 0", lambda p: torch.zeros_like(p.weight)),
    **{
        f"first_{n}_rows": Mistake(
            f"dweight is that of the first {n} rows alone: are the partial sums of one block all that is summed?",
            _of_rows(slice(0, n)),
        )
        for n in (16, 32, 64, 128, 256)
    },
    **{
        f"last_{n}_rows": Mistake(
            f"dweight is that of the last {n} rows alone: do blocks overwrite each other's sums?",
            lambda p, n=n: (p.dy * p.x_hat).flatten(0, -2)[(p.x.numel() // p.x.shape[-1] - 1) // n * n :].sum(0),
        )
        for n in (16, 32, 64, 128, 256)
    },
}  # fmt: skip
