"""The smallest row that shows a mistake: simple numbers, narrow rows first, until the norm's own result is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from kernels import reference
from kernels.form import Form
from scripts.proving.subject import ERRORS

EPS = 1e-5  # of a LLaMA, so that readers can check the numbers
ROWS = {
    1: ([[1.0]], [[0.0]], [[1e-3]], [[1.0], [3.0]]),
    2: (
        [[1.0, 1.0]], [[1.0, -1.0]], [[1.0, 3.0]], [[3.0, 4.0]], [[0.0, 0.0]], [[1e-3, 1e-3]], [[300.0, 300.0]],
        [[1.0, 1.0], [3.0, 3.0]],
    ),
    3: ([[1.0, 1.0, 1.0]], [[1.0, 2.0, 3.0]], [[1e-3, 1e-3, 1e-3]]),
    4: ([[1.0, 2.0, 3.0, 4.0]],),
    5: ([[1.0, 2.0, 3.0, 4.0, 5.0]],),
    8: ([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]],),
}  # fmt: skip
Norm = Callable[[Tensor, Tensor, float], Tensor]


def candidates(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """x and weight, the simplest first."""
    for width, choices in ROWS.items():
        for weights in (1.0, 2.0, 3.0):
            for rows in choices:
                yield torch.tensor(rows, dtype=dtype), torch.full((width,), weights, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for width in (17, 48):
        yield torch.randn(2, width, generator=generator).to(dtype), torch.full((width,), 2.0, dtype=dtype)


def smallest_row(
    norm: Norm,
    form: Form,
    device: torch.device,
    dtype: torch.dtype,
    mistake: Norm | None,
    among: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> str:
    """In words: the first candidate where the norm is not right; with a `mistake`, where that agrees with the norm."""
    for x, weight in candidates(dtype) if among is None else among:
        right = reference.rms_norm(x, weight, EPS, *form)
        if mistake is not None:
            expected = mistake(x, weight, EPS)
            if not _differ(expected, right):
                continue
        try:
            found = norm(x.to(device), weight.to(device), EPS).detach().cpu()
        except ERRORS:
            continue
        if found.shape == right.shape and _differ(found, right) and (mistake is None or not _differ(found, expected)):
            return f"{_given(x, weight)}: found {numbers(found)}, right {numbers(right)}"
    return ""


def smallest_gradient(
    gradient: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    right: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    mistake: Callable[[Tensor, Tensor, Tensor, float], Tensor],
) -> str:
    """The same of dx or dweight, functions of dy, x, weight and eps, for a known mistake."""
    for x, weight in candidates(torch.float32):
        for dy in (torch.ones_like(x), torch.arange(1.0, x.numel() + 1).view_as(x)):
            expected, wrong = right(dy, x, weight, EPS), mistake(dy, x, weight, EPS)
            if not _differ(wrong, expected):
                continue
            try:
                found = gradient(dy, x, weight, EPS)
            except ERRORS:
                continue
            if _differ(found, expected) and not _differ(found, wrong):
                dy_words = f"dy {numbers(dy)}"
                return f"{_given(x, weight)}, {dy_words}: found {numbers(found)}, right {numbers(expected)}"
    return ""


def _differ(found: Tensor, expected: Tensor) -> bool:
    """In half precision by a bit, in float32 by more than its rounding."""
    found, wide = found.double().cpu(), expected.double().cpu()
    tolerance = 1e-4 * wide.abs().amax() if expected.dtype in (torch.float32, torch.float64) else 0.0
    same = ((found - wide).abs() <= tolerance) | (found.isnan() & wide.isnan()) | (found == wide)
    return not bool(same.all())


def _given(x: Tensor, weight: Tensor) -> str:
    words = [f"x {numbers(x)}"]
    if x.dtype != torch.float32:
        words.append(str(x.dtype).removeprefix("torch."))
    words.append(f"weight {weight[0].item():g}")
    return ", ".join([*words, f"eps {EPS:g}"])


def numbers(values: Tensor) -> str:
    """Rows in parentheses, shortened where they are long."""
    rows = values.detach().reshape(-1, values.shape[-1]).tolist()
    shown = [", ".join(f"{value:.4g}" for value in row[:8]) + (", ..." if len(row) > 8 else "") for row in rows]
    return ", ".join(f"({row})" for row in shown)
