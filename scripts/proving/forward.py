"""The values of a norm, its rounding and its strides, beside the right ones and those of each known mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.form import Form
from scripts.proving import variants
from scripts.proving.apart import about_to
from scripts.proving.smallest import smallest_row
from scripts.proving.subject import ERRORS
from scripts.proving.telling import (
    EPS,
    FLIPPED,
    LOOSE,
    UNKNOWN,
    Finding,
    distance,
    fits,
    furthest_off,
    is_precise,
    name_of,
    one_line,
    random,
    share,
    telling_rows,
    weights,
)
from scripts.proving.variants import RIGHT, ROUNDINGS, STATISTICS_IN_HALF, Variant


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
    if all(is_precise(found, x, weight, form, unit) for x, weight, found in shown):
        return [Finding("values", RIGHT, f"the values are the formula's, to {name_of(dtype)}'s rounding")], Variant()
    worst = furthest_off(*max(shown, key=lambda one: distance(*one, form)), form)
    loose = max(LOOSE, 4 * unit)
    for variant in variants.variants(form):
        if all(fits(found, variants.exact(variant, x, weight, EPS, form), loose, dtype) for x, weight, found in shown):
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
            # the emulated GPU's words for memory that a view leaves out, and for memory behind the last element
            strays = any(words in str(error) for words in ("between the elements", "outside the tensors"))
            name, what = ("strides_ignored", "strides are ignored") if strays else (UNKNOWN, "it fails")
            return [Finding("strides", name, f"{what}: {given}: {one_line(error)}; x.contiguous() helps")]
        right = norm(x.contiguous(), weight, EPS).detach().double().cpu()
        if fits(found.reshape(right.shape), right, 2 * torch.finfo(dtype).eps + LOOSE, dtype):
            continue
        storage = torch.empty(0, dtype=dtype, device=device).set_(x.untyped_storage())
        starts = {int(x.storage_offset()), 0}
        for start in starts:
            memory = storage[start : start + x.numel()].view(x.shape)
            expected = norm(memory.clone(), weight, EPS).detach().double().cpu()
            if fits(found, expected, 2 * torch.finfo(dtype).eps + LOOSE, dtype):
                how = f"strides are ignored: {given} is read as if its rows lay one after another; x.contiguous() helps"
                return [Finding("strides", "strides_ignored", how)]
        return [Finding("strides", UNKNOWN, f"other values for {given} than for x.contiguous()")]
    return [Finding("strides", RIGHT, "slices and transposed rows give the values of a contiguous copy")]


def lost_axis(norm: Callable[..., Tensor], form: Form, device: torch.device) -> str:
    """Words, where a norm fails since a statistic has lost its last axis: as many rows as columns hide it."""
    x = telling_rows()[2]
    weight = weights(12, form)
    try:
        found = norm(x.to(device), weight.to(device), EPS).detach().cpu().double()
    except ERRORS:
        return ""
    fitting = (
        variant
        for variant in variants.variants(form, ["keepdim_forgotten"])
        if fits(found, variants.exact(variant, x, weight, EPS, form), LOOSE, torch.float32)
    )
    return "; ".join(words for _, words in variants.words_of(next(fitting, Variant())))
