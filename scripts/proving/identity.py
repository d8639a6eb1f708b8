"""Which norm is it? What a norm computes beside the right formula and each known mistake, and beside pairs of them.

All rows are made to tell the variants apart: random weights, an eps that no model has, rows with a mean, of many sizes,
and widths that are not powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import Backend
from kernels.form import Form
from scripts.proving import gradients, variants
from scripts.proving.apart import about_to
from scripts.proving.smallest import smallest_gradient, smallest_row
from scripts.proving.subject import ERRORS, Subject, load
from scripts.proving.variants import RIGHT, ROUNDINGS, STATISTICS_IN_HALF, Variant

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


@dataclass
class Identity:
    """All that was found of one norm."""

    findings: list[Finding] = field(default_factory=list)
    variant: Variant | None = None  # that its values are; None: none of those known

    def mistakes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.name != RIGHT]

    def values_are_right(self) -> bool:
        """Right but for rounding, so that it may train a model."""
        return not any(finding.part in ("values", "dx", "dweight", "the fused addition") for finding in self.mistakes())


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


def identify(
    backend: Backend, device: torch.device, backward: bool = True, adds: bool = False, interpreted: bool = False
) -> Identity:
    """Run the norm on rows that tell, and name what it is.

    `adds`: it has a fused addition of its own. `interpreted`: its kernels run in Triton's interpreter.
    """
    norm, form = backend.rms_norm, backend.form
    found = Identity()
    dtype = widest_dtype(norm, device, form)
    found.findings, found.variant = of_values(norm, form, device, dtype)
    if found.variant is None:
        return found
    rounded_once = False
    for half in HALF:
        if half == dtype and dtype != torch.float32:
            continue
        about_to(f"rounding of x (64, 256) {name_of(half)}")
        rounding = of_rounding(norm, form, device, half, found.variant)
        if interpreted and rounding and rounding.name.startswith("truncated") and half == torch.bfloat16:
            words = (
                "Triton's interpreter cuts bfloat16 off, so its bits can't be judged here; --emulate sm_90 rounds it"
            )
            rounding = Finding(rounding.part, RIGHT, words)
        rounded_once |= rounding is not None and rounding.name.endswith("once")
        found.findings += [rounding] if rounding else []
    found.findings += of_strides(norm, form, device, dtype)
    if backward:
        found.findings += of_gradients(norm, form, device, dtype, found.variant)
        if not (rounded_once or any(finding.part in ("values", "dweight") for finding in found.mistakes())):
            found.findings += of_dweight_in_half(norm, form, device)
    if adds:
        found.findings += of_addition(backend, device, dtype, backward)
    return found


def identify_apart(subject: Subject, backward: bool, adds: bool, interpreted: bool) -> Identity:
    """The same of a norm by its name, in a process apart."""
    return identify(load(subject), torch.device(subject.device), backward, adds, interpreted)


def widest_dtype(norm: Callable[..., Tensor], device: torch.device, form: Form) -> torch.dtype:
    """The first of float32, float16 and bfloat16 that the norm takes."""
    for dtype in (torch.float32, *HALF):
        x, weight = random(2, 48, seed=0).to(device, dtype), weights(48, form).to(device, dtype)
        try:
            norm(x, weight, EPS)
        except ERRORS:
            continue
        return dtype
    return torch.float32


def of_values(
    norm: Callable[..., Tensor], form: Form, device: torch.device, dtype: torch.dtype
) -> tuple[list[Finding], Variant | None]:
    """The variant that the values are, and its mistakes."""
    shown: list[tuple[Tensor, Tensor, Tensor]] = []
    for x in telling_rows():
        x, weight = x.to(dtype), weights(x.shape[-1], form).to(dtype)
        about_to(f"x {tuple(x.shape)} {name_of(dtype)}")
        try:
            found = norm(x.to(device), weight.to(device), EPS).detach().cpu().double()
        except ERRORS as error:
            return [Finding("values", UNKNOWN, f"it fails at x {tuple(x.shape)}: {one_line(error)}")], None
        if found.isnan().all():
            return [Finding("values", "nan", f"all of y is NaN, for a finite x {tuple(x.shape)}")], None
        shown.append((x, weight, found))
    unit = torch.finfo(dtype).eps / 2
    if all(_is_precise(found, x, weight, form, unit) for x, weight, found in shown):
        return [Finding("values", RIGHT, f"the values are the formula's, to {name_of(dtype)}'s rounding")], Variant()
    worst = furthest_off(*max(shown, key=lambda one: _distance(*one, form)), form)
    loose = max(LOOSE, 4 * unit)
    for variant in variants.variants(form):
        if all(_fits(found, variants.exact(variant, x, weight, EPS, form), loose, dtype) for x, weight, found in shown):
            if variant == Variant():
                words = "the formula, but less precise than its dtype: a sum, a root or a product of fewer bits?"
                return [Finding("values", "imprecise", words, worst)], variant
            example = smallest_row(norm, form, device, dtype, _variant_norm(variant, form)) or worst
            return [Finding("values", *mistake, example) for mistake in variants.words_of(variant)], variant
    example = smallest_row(norm, form, device, dtype, None)
    return [Finding("values", UNKNOWN, f"none of the known mistakes. Furthest off: {worst}", example)], None


def _variant_norm(variant: Variant, form: Form) -> Callable[..., Tensor]:
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = variants.exact(variant, x, weight, eps, form)
        assert y is not None, "small rows have the axes of a variant that fits the telling ones"
        return y.to(x.dtype)

    return norm


def _is_precise(found: Tensor, x: Tensor, weight: Tensor, form: Form, unit: float) -> bool:
    """Within the bound that the contract has for values."""
    expected = variants.exact(Variant(), x, weight, EPS, form)
    bound = (x.shape[-1] / 2 + 8) * 2**-24 + (2.01 * unit if unit > 2**-24 else 0)
    smallest = torch.finfo(x.dtype).smallest_normal
    return expected is not None and bool(((found - expected).abs() <= bound * expected.abs() + smallest).all())


def _fits(found: Tensor, expected: Tensor | None, loose: float, dtype: torch.dtype) -> bool:
    if expected is None or expected.shape != found.shape:
        return False
    bound = loose * expected.abs().amax(-1, keepdim=True) + torch.finfo(dtype).smallest_normal
    return bool(((found - expected).abs() <= bound).all())


def _distance(x: Tensor, weight: Tensor, found: Tensor, form: Form) -> float:
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


def of_rounding(
    norm: Callable[..., Tensor], form: Form, device: torch.device, dtype: torch.dtype, variant: Variant
) -> Finding | None:
    """The order of rounding in half precision. None where the norm does not take the dtype, or nothing can be told."""
    x, weight = (random(64, 256, seed=0) * 0.05).to(dtype), weights(256, form).to(dtype)
    part = f"rounding in {name_of(dtype)}"
    try:
        found = norm(x.to(device), weight.to(device), EPS).detach().cpu()
    except ERRORS as error:
        return Finding(part, UNKNOWN, f"it fails at x (64, 256) {name_of(dtype)}: {one_line(error)}")
    if found.dtype != dtype or found.shape != x.shape:
        return None  # said before, when it was looked whether it fits
    own, *others = variants.roundings(form)
    differing = share(found, ROUNDINGS[own][1](variant, x, weight, EPS, form))
    name = own if differing < FLIPPED else None
    for other in others if name is None else []:
        if share(found, ROUNDINGS[other][1](variant, x, weight, EPS, form)) < FLIPPED:
            name = other
            break
    scaled = variant.weight != "offset_on_x_hat" and _rows_are_scaled(found, x, weight, form, variant)
    if name is None and (scaled or (dtype == torch.float16 and _overflows(norm, device))):
        name = STATISTICS_IN_HALF
    if name == own:
        return _with_a_float32_weight(norm, form, device, dtype, variant) or Finding(
            part, RIGHT, f"{name_of(dtype)} is rounded in the form's order: {differing:.2%} of the elements differ"
        )
    if name is None:
        if variant.mistakes():
            return None  # what follows from a wrong value is no finding of its own
        words = f"{differing:.1%} of the elements differ from the form's order of rounding, as no known mistake does"
        return Finding(part, UNKNOWN, words, smallest_row(norm, form, device, dtype, None))
    wrong = partial(_rounded_norm, name, variant, form)
    large = [(torch.full((1, 2), 300.0, dtype=dtype), torch.ones(2, dtype=dtype))]
    example = smallest_row(norm, form, device, dtype, None, large) if name == STATISTICS_IN_HALF else ""
    example = example or smallest_row(norm, form, device, dtype, wrong)
    words = ROUNDINGS[name][0]
    if name == "truncated":
        words += ", as Triton's interpreter does with bfloat16; a GPU rounds, and so does --emulate sm_90"
    words += f": {differing:.1%} of the {name_of(dtype)} elements differ"
    if share(found, wrong(x, weight, EPS)) < FLIPPED:
        words += ", all of them equal to that variant's"
    return Finding(part, name, words, example)


def _rounded_norm(name: str, variant: Variant, form: Form, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ROUNDINGS[name][1](variant, x, weight, eps, form)


def _with_a_float32_weight(
    norm: Callable[..., Tensor], form: Form, device: torch.device, dtype: torch.dtype, variant: Variant
) -> Finding | None:
    """A mistake that shows beside a float32 weight alone."""
    x, weight = (random(64, 256, seed=0) * 0.05).to(dtype), weights(256, form)
    try:
        found = norm(x.to(device), weight.to(device), EPS).detach().cpu()
    except ERRORS:
        return None  # the contract's own finding
    own, *others = variants.roundings(form)
    if found.dtype != dtype or share(found, ROUNDINGS[own][1](variant, x, weight, EPS, form)) < FLIPPED:
        return None
    for name in others:
        if share(found, ROUNDINGS[name][1](variant, x, weight, EPS, form)) < FLIPPED:
            return Finding(f"rounding in {name_of(dtype)}", name, ROUNDINGS[name][0])
    return None


def share(found: Tensor, expected: Tensor) -> float:
    """Of the elements that differ."""
    return (found != expected).double().mean().item()


def _rows_are_scaled(found: Tensor, x: Tensor, weight: Tensor, form: Form, variant: Variant) -> bool:
    """True if each row is off by a factor of its own, as by a statistic of few bits; rounding cancels out in a row."""
    expected = variants.exact(variant, x, weight, EPS, form)
    assert expected is not None
    off = (found.double() / expected).nanmean(-1) - 1
    unit = torch.finfo(x.dtype).eps / 2
    return bool(0.2 * unit < off.square().mean().sqrt() < 20 * unit)


def _overflows(norm: Callable[..., Tensor], device: torch.device) -> bool:
    """True if a row of 300 in float16 isn't all 1, and one of 100 is."""
    ones = []
    for size in (100.0, 300.0):
        x = torch.full((2, 64), size, dtype=torch.float16, device=device)
        y = norm(x, torch.ones(64, dtype=torch.float16, device=device), EPS).float()
        ones.append(bool(((y - 1).abs() < 0.01).all()))
    return ones == [True, False]


def of_strides(norm: Callable[..., Tensor], form: Form, device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """Whether rows are found by x's strides."""
    wide = (random(6, 144, seed=5) * 0.06).to(device, dtype)
    weight = weights(48, form).to(device, dtype)
    for words, x in (
        ("a slice of a fused projection", wide[:, 48:96]),
        ("transposed", wide.flatten()[: 6 * 48].view(48, 6).t()),
    ):
        given = f"x {tuple(x.shape)} with strides {x.stride()}, {words}"
        about_to(given)
        try:
            found = norm(x, weight, EPS).detach().double().cpu()
        except ERRORS as error:
            return [Finding("strides", UNKNOWN, f"it fails at {given}: {one_line(error)}; x.contiguous() takes any")]
        right = norm(x.contiguous(), weight, EPS).detach().double().cpu()
        if _fits(found.reshape(right.shape), right, 2 * torch.finfo(dtype).eps + LOOSE, dtype):
            continue
        storage = torch.empty(0, dtype=dtype, device=device).set_(x.untyped_storage())
        starts = {int(x.storage_offset()), 0}
        for start in starts:
            memory = storage[start : start + x.numel()].view(x.shape)
            expected = norm(memory.clone(), weight, EPS).detach().double().cpu()
            if _fits(found, expected, 2 * torch.finfo(dtype).eps + LOOSE, dtype):
                how = f"strides are ignored: {given} is read as if its rows lay one after another; x.contiguous() helps"
                return [Finding("strides", "strides_ignored", how)]
        return [Finding("strides", UNKNOWN, f"other values for {given} than for x.contiguous()")]
    return [Finding("strides", RIGHT, "slices and transposed rows give the values of a contiguous copy")]


def grads(norm: Callable[..., Any], dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dx and dweight; one that is missing is 0."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    found = torch.autograd.grad(norm(x, weight, eps), (x, weight), dy.clone(), allow_unused=True)
    dx, dweight = (
        torch.zeros_like(t) if gradient is None else gradient for t, gradient in zip((x, weight), found, strict=True)
    )
    return dx, dweight


def of_gradients(
    norm: Callable[..., Tensor], form: Form, device: torch.device, dtype: torch.dtype, variant: Variant
) -> list[Finding]:
    """dx and dweight beside those of the formula that the forward has, those of the right one, and known mistakes."""
    shown = []
    for shape in ((3, 5, 48), (560, 20)):
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


Shown = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dy, x, weight, and the dx and dweight that were found


def _gradient_fits(one: Shown, base: Variant, name: str, index: int, form: Form, loose: float) -> bool:
    dy, x, weight, *found = one
    if name != RIGHT and (base.weight == "dropped" or base.statistic not in (RIGHT, "padded", "not_divided")):
        return False
    try:
        expected = _gradient_of(name, base, index, form, dy, x, weight, EPS)
    except RuntimeError:  # the weight is dropped, and has no gradient
        expected = torch.zeros_like((x, weight)[index])
    error = (found[index] - expected.double()).abs()
    return bool((error <= loose * expected.double().abs().amax(-1, keepdim=True)).all())


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
            return _fits(found.double().cpu(), expected.detach().double().cpu(), loose, dtype)

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


def lost_axis(norm: Callable[..., Tensor], form: Form, device: torch.device) -> str:
    """Words, where a norm fails since a statistic has lost its last axis: as many rows as columns hide it."""
    x = telling_rows()[2]
    weight = weights(12, form)
    try:
        found = norm(x.to(device), weight.to(device), EPS).detach().cpu().double()
    except ERRORS:
        return ""
    fits = (
        variant
        for variant in variants.variants(form, ["keepdim_forgotten"])
        if _fits(found, variants.exact(variant, x, weight, EPS, form), LOOSE, torch.float32)
    )
    return "; ".join(words for _, words in variants.words_of(next(fits, Variant())))


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
