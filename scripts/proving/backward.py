"""The gradients of a norm and its fused addition, beside the right ones and those of each known mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import Backend
from kernels.form import Form
from scripts.proving import gradients, variants
from scripts.proving.apart import about_to
from scripts.proving.smallest import smallest_gradient
from scripts.proving.subject import ERRORS
from scripts.proving.telling import (
    EPS,
    FLIPPED,
    LOOSE,
    UNKNOWN,
    Finding,
    fits,
    name_of,
    one_line,
    random,
    share,
    weights,
)
from scripts.proving.variants import RIGHT, Variant


def grads(norm: Callable[..., Any], dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dx and dweight; one that is missing is 0."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    found = torch.autograd.grad(norm(x, weight, eps), (x, weight), dy.clone(), allow_unused=True)
    dx, dweight = (
        torch.zeros_like(t) if gradient is None else gradient for t, gradient in zip((x, weight), found, strict=True)
    )
    return dx, dweight


Shown = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dy, x, weight, and the dx and dweight that were found


def of_gradients(
    norm: Callable[..., Tensor], form: Form, device: torch.device, dtype: torch.dtype, variant: Variant
) -> list[Finding]:
    """dx and dweight beside those of the formula that the forward has, those of the right one, and known mistakes."""
    shown = []
    # 503 is 111110111 in binary: the last block of rows is another one for each of its sizes
    for shape in ((3, 5, 48), (504, 20)):
        x, dy = ((random(*shape, seed=seed) + 0.3).to(dtype) for seed in (6, 7))
        weight = weights(shape[-1], form).to(dtype)
        about_to(f"the backward of x {shape} {name_of(dtype)}")
        try:
            dx, dweight = grads(norm, dy.to(device), (0.1 * x).to(device), weight.to(device), EPS)
        except ERRORS as error:
            return [Finding("dx", UNKNOWN, f"the backward fails at x {shape}: {one_line(error)}")]
        shown.append((dy, 0.1 * x, weight, dx.cpu().double(), dweight.cpu().double()))
    bases = [variant] if variant == Variant() else [variant, Variant()]
    loose = max(LOOSE, 8 * torch.finfo(dtype).eps)
    findings = []
    for part, table, index in (("dx", gradients.DX, 0), ("dweight", gradients.DWEIGHT, 1)):
        name = next(
            (
                name
                for name in table
                for base in bases
                if all(_gradient_fits(one, base, name, index, form, loose) for one in shown)
            ),
            UNKNOWN,
        )
        if name == RIGHT:
            findings.append(Finding(part, RIGHT, f"{part} is the formula's"))
        elif name == UNKNOWN:
            worst = _worst_gradient(shown, variant, index, form)
            findings.append(Finding(part, UNKNOWN, f"{part} is that of no known mistake. Furthest off: {worst}"))
        else:
            example = smallest_gradient(
                partial(_gradient_on, norm, device, index),
                partial(_gradient_of, RIGHT, Variant(), index, form),
                partial(_gradient_of, name, Variant(), index, form),
            )
            example = example or _worst_gradient(shown, variant, index, form)
            findings.append(Finding(part, name, table[name].words, example))
    return findings


def _gradient_on(
    norm: Callable[..., Tensor], device: torch.device, index: int, dy: Tensor, x: Tensor, weight: Tensor, eps: float
) -> Tensor:
    return grads(norm, dy.to(device), x.to(device), weight.to(device), eps)[index].cpu()


def _gradient_of(
    name: str, base: Variant, index: int, form: Form, dy: Tensor, x: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """dx (index 0) or dweight (1) of a formula, by autograd, or with a mistake in it."""
    if name == RIGHT:
        exact = partial(variants.exact, base, form=form)
        return grads(exact, dy.double(), x.double(), weight.double(), eps)[index].to(x.dtype)
    parts = variants.normalised(base, x, eps)
    assert parts is not None
    table = (gradients.DX, gradients.DWEIGHT)[index]
    found = table[name].compute(gradients.Parts(dy.double(), x.double(), *parts, weight.double() + form.offset))
    return found.to(x.dtype)


def _gradient_fits(one: Shown, base: Variant, name: str, index: int, form: Form, loose: float) -> bool:
    """Right is the gradient of the forward, and also what the right backward makes of the forward's rstd."""
    dy, x, weight, *found = one
    expected = [_by_formula(base, name, index, form, dy, x, weight)]
    if name == RIGHT:
        try:
            expected.append(_gradient_of(name, base, index, form, dy, x, weight, EPS))
        except RuntimeError:  # the weight is dropped, and has no gradient
            expected.append(torch.zeros_like((x, weight)[index]))
    for gradient in (each.double() for each in expected if each is not None):
        error = (found[index] - gradient).abs()
        if bool((error <= loose * gradient.abs().amax(-1, keepdim=True)).all()):
            return True
    return False


def _by_formula(
    base: Variant, name: str, index: int, form: Form, dy: Tensor, x: Tensor, weight: Tensor
) -> Tensor | None:
    """A backward written by hand, for a forward that a row's rstd describes."""
    if base.weight == "dropped" or base.statistic not in (RIGHT, "padded", "not_divided"):
        return None
    parts = variants.normalised(base, x, EPS)
    assert parts is not None, "a row's statistic takes any axes"
    table = (gradients.DX, gradients.DWEIGHT)[index]
    return table[name].compute(gradients.Parts(dy.double(), x.double(), *parts, weight.double() + form.offset))


def _worst_gradient(shown: list[Shown], variant: Variant, index: int, form: Form) -> str:
    dy, x, weight, *found = shown[0]
    expected = _gradient_of(RIGHT, Variant(), index, form, dy, x, weight, EPS).double()
    error = (found[index] - expected).abs().nan_to_num(1e30, 1e30)
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    part = ("dx", "dweight")[index]
    inputs = f"where x is {x[at].item():.6g} and dy {dy[at].item():.6g}: " if index == 0 else ""
    return (
        f"{part}{list(at)} of x {tuple(x.shape)}, {inputs}found {found[index][at].item():.6g}, "
        f"right {expected[at].item():.6g}"
    )


def of_dweight_in_half(norm: Callable[..., Tensor], form: Form, device: torch.device) -> list[Finding]:
    """What dweight sums in half precision, and in what."""
    about_to("dweight of x (128, 16) float16")
    x = torch.full((128, 16), 2.0, dtype=torch.float16, device=device)
    dy = torch.full_like(x, 0.9)
    dy[0] = 2048  # numbers from here on are 2 apart
    weight = weights(16, form).to(device)
    try:
        _, dweight = grads(norm, dy, x, weight.half(), EPS)
        row = (random(1, 48, seed=8) * 0.05).to(device, torch.float16)
        _, of_one = grads(norm, torch.ones_like(row), row, weights(48, form).to(device), EPS)
    except ERRORS:
        return []  # the contract's own finding
    expected = dy[:, 0].double().sum().item() * 2 / (4 + EPS) ** 0.5
    worst = dweight.double().sub(expected).abs().max().item()
    if not worst < 0.01 * expected:
        words = "dweight is summed in half precision, where 2048 + 0.9 is 2048; float32 is wanted"
        example = f"x (128, 16) of 2 and dy of 2048, 0.9, 0.9, ..., float16: found {dweight[0].item():g}, "
        example += f"right {expected:.1f}"
        return [Finding("dweight", "summed_in_half_precision", words, example)]
    if not form.round_once and not torch.equal(of_one, of_one.half().float()):
        words = "dweight is made of the unrounded x_hat; the weight multiplies the rounded one"
        return [Finding("dweight in half precision", "of_the_unrounded_x_hat", words)]
    return []


def of_addition(backend: Backend, device: torch.device, dtype: torch.dtype, backward: bool) -> list[Finding]:
    """The fused addition beside the two steps, of which the norm is the norm's own."""
    part, form = "the fused addition", backend.form
    x, residual = ((random(6, 48, seed=seed) * 0.06).to(device, dtype) for seed in (9, 10))
    weight = weights(48, form).to(device, dtype)
    about_to(f"add_rms_norm of x (6, 48) {name_of(dtype)}")
    try:
        y, h = (output.detach() for output in backend.add_rms_norm(x.clone(), residual.clone(), weight, EPS))
        loose = max(LOOSE, 4 * torch.finfo(dtype).eps)

        def same(found: Tensor, expected: Tensor) -> bool:
            return fits(found.double().cpu(), expected.detach().double().cpu(), loose, dtype)

        if not same(h, x + residual):
            known = {"x itself": x, "the residual itself": residual, "y": y}
            what = next((name for name, tensor in known.items() if same(h, tensor)), None)
            words = f"h is {what}; x + residual is wanted" if what else "h is not x + residual"
            return [Finding(part, "wrong_h" if what else UNKNOWN, words)]
        if not same(y, backend.rms_norm(h, weight, EPS)):
            known = {"x": x, "the residual": residual}
            what = next((name for name, t in known.items() if same(y, backend.rms_norm(t, weight, EPS))), None)
            words = f"y is the norm of {what}; that of x + residual is wanted" if what else "y is not the norm of h"
            return [Finding(part, "wrong_y" if what else UNKNOWN, words)]
        findings = _addition_in_half(backend, device)
        return findings + (_addition_backward(backend, x, residual, weight, same) if backward else [])
    except (*ERRORS, StopIteration) as error:
        return [Finding(part, UNKNOWN, f"add_rms_norm fails at x (6, 48) {name_of(dtype)}: {one_line(error)}")]


def _addition_in_half(backend: Backend, device: torch.device) -> list[Finding]:
    x, residual = ((random(64, 256, seed=seed) * 0.05).to(device, torch.float16) for seed in (11, 12))
    weight = weights(256, backend.form).to(device, torch.float16)
    y, h = (output.detach() for output in backend.add_rms_norm(x, residual, weight, EPS))
    if share(y, backend.rms_norm(h, weight, EPS).detach()) < FLIPPED:
        return []
    unrounded = x.cpu().double() + residual.cpu().double()
    x_hat = unrounded * (unrounded.square().mean(-1, keepdim=True) + EPS).rsqrt()
    for wide in (x_hat, x_hat.half().double()):
        if share(y.cpu(), (wide * (weight.cpu().double() + backend.form.offset)).half()) < FLIPPED:
            words = "y is the norm of x + residual before its rounding; that of h, which is rounded, is wanted"
            return [Finding("the fused addition in half precision", "h_not_rounded", words)]
    return [Finding("the fused addition in half precision", UNKNOWN, "y is not the norm of h to the bit")]


def _addition_backward(
    backend: Backend, x: Tensor, residual: Tensor, weight: Tensor, same: Callable[[Tensor, Tensor], bool]
) -> list[Finding]:
    dy, dh = (random(6, 48, seed=seed).to(x.device, x.dtype) for seed in (13, 14))
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, residual, weight)]
    outputs = backend.add_rms_norm(leaves[0], leaves[1], leaves[2], EPS)
    found = torch.autograd.grad(outputs, leaves, (dy, dh), allow_unused=True)
    through_norm = grads(backend.rms_norm, dy, x + residual, weight, EPS)[0]
    for name, gradient in (("dx", found[0]), ("dresidual", found[1])):
        if gradient is not None and same(gradient, through_norm + dh):
            continue
        if gradient is None:
            return [Finding("the fused addition", "no_gradient", f"{name} of add_rms_norm is None")]
        known = {
            "without_the_residuals_part": ("lacks the residual's part, the gradient of h", through_norm),
            "without_the_norms_part": ("is the gradient of h alone, and lacks that through the norm", dh),
            "zero": ("is 0", torch.zeros_like(dh)),
        }
        for key, (words, expected) in known.items():
            if same(gradient, expected):
                return [Finding("the fused addition", key, f"{name} of add_rms_norm {words}; both are added")]
        return [Finding("the fused addition", UNKNOWN, f"{name} of add_rms_norm is not that of the two steps")]
    return [Finding("the fused addition", RIGHT, "add_rms_norm is the two steps, in values and gradients")]
