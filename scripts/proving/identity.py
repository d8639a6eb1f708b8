"""Which norm is it? What a norm computes beside the right formula and each known mistake, and beside pairs of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import Backend
from kernels.form import Form
from scripts.proving.apart import about_to
from scripts.proving.backward import of_addition, of_dweight_in_half, of_gradients
from scripts.proving.forward import of_rounding, of_strides, of_values
from scripts.proving.subject import ERRORS, Subject, load
from scripts.proving.telling import EPS, HALF, Finding, name_of, random, weights
from scripts.proving.variants import RIGHT, Variant


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
