"""Rows that tell variants of a norm apart, and what is said of a norm that has seen them.

They have random weights, an eps that no model has, rows with a mean, many sizes, and widths that are no powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.form import Form
from scripts.proving import variants
from scripts.proving.variants import Variant

EPS = 3e-3
HALF = (torch.float16, torch.bfloat16)
FLIPPED = 0.005  # of the elements in half precision: so many change with the order of a float32 sum (tests/kernels)
LOOSE = 1e-4  # of the largest element of a row: no two variants are closer to each other on the rows below
UNKNOWN = "unknown"


@dataclass
class Finding:
    """What is right or wrong about one part of a norm."""

    part: str  # values, rounding in float16, dx, dweight, ...
    name: str  # of a mistake in the tables, UNKNOWN, or RIGHT
    words: str
    example: str = ""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(width: int, form: Form) -> Tensor:
    """offset + weight is between 0.5 and 1.5."""
    return torch.rand(width, generator=torch.Generator().manual_seed(1)) + 0.5 - form.offset


def telling_rows() -> list[Tensor]:
    """Rows with a mean, whose sizes are around the roots of our eps and of those that a code may hold literally."""
    sizes = torch.tensor([[1e-6, 1e-4, 1e-3, 4e-3], [3e-2, 6e-2, 0.3, 3.0]])[..., None]
    return [
        (random(2, 4, 48, seed=0) + 0.5) * sizes,
        (random(3, 5, 17, seed=2) + 0.5) * 0.06,
        (random(12, 12, seed=3) + 0.5) * 0.06 * torch.arange(1, 13)[:, None],
        (random(2, 5000, seed=4) + 0.5) * 0.06 * torch.linspace(0.2, 2, 5000),
    ]


def is_precise(found: Tensor, x: Tensor, weight: Tensor, form: Form, unit: float) -> bool:
    """Within the bound that the contract has for values."""
    expected = variants.exact(Variant(), x, weight, EPS, form)
    bound = (x.shape[-1] / 2 + 8) * 2**-24 + (2.01 * unit if unit > 2**-24 else 0)
    smallest = torch.finfo(x.dtype).smallest_normal
    return expected is not None and bool(((found - expected).abs() <= bound * expected.abs() + smallest).all())


def fits(found: Tensor, expected: Tensor | None, loose: float, dtype: torch.dtype) -> bool:
    if expected is None or expected.shape != found.shape:
        return False
    bound = loose * expected.abs().amax(-1, keepdim=True) + torch.finfo(dtype).smallest_normal
    return bool(((found - expected).abs() <= bound).all())


def distance(x: Tensor, weight: Tensor, found: Tensor, form: Form) -> float:
    expected = variants.exact(Variant(), x, weight, EPS, form)
    assert expected is not None
    return ((found - expected).abs() / expected.abs().amax(-1, keepdim=True)).nan_to_num(1e30, 1e30).max().item()


def furthest_off(x: Tensor, weight: Tensor, found: Tensor, form: Form) -> str:
    """The element that is furthest off, measured against its row: its inputs, its value and the right one."""
    expected = variants.exact(Variant(), x, weight, EPS, form)
    assert expected is not None
    error = ((found - expected).abs() / expected.abs().amax(-1, keepdim=True)).nan_to_num(1e30, 1e30)
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    mean_square = x.double().square().mean(-1)[at[:-1]].item()
    return (
        f"y{list(at)} of x {tuple(x.shape)} {name_of(x.dtype)}, where x is {x[at].item():.6g}, the weight "
        f"{weight[at[-1]].item():.6g}, its row's mean square {mean_square:.6g} and eps {EPS:g}: found "
        f"{found[at].item():.6g}, right {expected[at].item():.6g}"
    )


def share(found: Tensor, expected: Tensor) -> float:
    """Of the elements that differ."""
    return (found != expected).double().mean().item()


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
