"""Does it fit? Whether a norm can be called as a model calls it, what it returns, and what it does to its inputs.

Each look is a call of its own in a process apart: what it dies of is a finding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import Backend, InputError
from scripts.proving.apart import about_to
from scripts.proving.forward import lost_axis
from scripts.proving.subject import ERRORS, Subject, how_it_runs, load, watching
from scripts.proving.telling import EPS, HALF, name_of, one_line, random, weights

SHAPES = ((48,), (6, 48), (2, 3, 48), (2, 3, 5, 17), (3, 1), (2, 4097))
STRIDED: dict[str, Callable[[], Tensor]] = {
    "a slice of a fused projection": lambda: random(6, 144, seed=0)[:, 48:96],
    "transposed": lambda: random(48, 6, seed=0).t(),
    "heads, swapped": lambda: random(2, 3, 5, 48, seed=0).transpose(1, 2),
    "every second column": lambda: random(6, 96, seed=0)[:, ::2],
    "one row, expanded": lambda: random(1, 48, seed=0).expand(6, 48),
}
CANT_RUN = "can't be run here"
SIGNATURE = "expected a function (x, weight, eps) -> y"


class Line(NamedTuple):
    """One thing that was looked at. `fix` says what to change; ok is None for what is not claimed."""

    ok: bool | None
    what: str
    found: str
    fix: str = ""


class Traits(NamedTuple):
    """What later stages ask."""

    description: str
    runs: str  # how, in words
    triton: bool
    interpreted: bool
    backward: bool
    adds: bool


class Unusable(Exception):
    """What it returns, or raises, is no norm at all."""


def loads(subject: Subject) -> str:
    """Its description, or an error that begins with "error: "."""
    about_to("its import")
    try:
        return load(subject).description
    except (InputError, *ERRORS) as error:
        return f"error: {error if isinstance(error, InputError) else one_line(error)}"


def inputs(subject: Subject, *shape: int, x: Any = torch.float32, weight: Any = None) -> tuple[Tensor, Tensor]:
    """x and a weight of these dtypes."""
    device = torch.device(subject.device)
    return (
        random(*shape, seed=0).to(device, x),
        weights(shape[-1], subject.form).to(device, x if weight is None else weight),
    )


def said(tensor: Any) -> str:
    """A result in words."""
    if isinstance(tensor, Tensor):
        return f"a tensor {tuple(tensor.shape)} {name_of(tensor.dtype)} on {tensor.device}"
    if isinstance(tensor, (tuple, list)):
        return f"a {type(tensor).__name__} of {len(tensor)}"
    return repr(tensor) if tensor is None else f"a {type(tensor).__name__}"


def call(norm: Callable[..., Any], x: Tensor, weight: Tensor) -> Tensor:
    """y of the norm. Raises Unusable with a line for what is not a result."""
    given = f"x {tuple(x.shape)} {name_of(x.dtype)}, weight {tuple(weight.shape)} {name_of(weight.dtype)}"
    about_to(f"{given}, eps {EPS:g}")
    try:
        y = norm(x, weight, EPS)
    except ERRORS as error:
        raise Unusable(f"{given}: {one_line(error)}") from error
    if not isinstance(y, Tensor):
        raise Unusable(f"{given}: it returns {said(y)}, expected a tensor like x")
    if y.shape != x.shape:
        raise Unusable(f"{given}: it returns {said(y)}, expected x's shape")
    return y


def runs(subject: Subject) -> list[Line]:
    """The plainest call."""
    backend = load(subject)
    norm, (x, weight) = backend.rms_norm, inputs(subject, 6, 48)
    before = x.clone(), weight.clone()
    what = "runs"
    try:
        with watching() as launched:
            y = call(norm, x, weight)
    except Unusable as error:
        if isinstance(error.__cause__, InputError):  # a package or a GPU is missing
            return [Line(False, CANT_RUN, str(error.__cause__))]
        return [Line(False, what, str(error), _advice(error, backend, subject))]
    how = how_it_runs(launched)
    lines = [Line(True, what, f"{said(y)} for x (6, 48), weight (48,) and eps; {how}")]
    lines.append(_unchanged("forward", ("x", "weight"), (x, weight), before))
    return lines


def _advice(error: Unusable, backend: Backend, subject: Subject) -> str:
    """What to change."""
    cause, text = error.__cause__, str(error)
    if "returns None" in text:
        return "return y at its end"
    if "returns a tuple" in text or "returns a list" in text:
        return "return y alone; (y, h) is what add_rms_norm returns"
    if isinstance(cause, TypeError) and _signature_differs(backend.rms_norm):
        return f"{SIGNATURE}; its own is {inspect.signature(backend.rms_norm)}"
    if cause is not None and (words := lost_axis(backend.rms_norm, subject.form, torch.device(subject.device))):
        return words
    if cause is not None and any(word in text for word in ("cuda", "CUDA", "AssertionError", "is_cuda")):
        return "if it asks for a GPU tensor: take that line out; without a GPU an emulated one takes CPU tensors"
    if "outside the tensors" in text:
        return after_death("runs")
    if "expected x's shape" in text:
        return "return y with the shape of x, as torch.empty_like(x) has it"
    return "it must take a float32 x (..., D), a weight (D,) and eps, a number"


def _signature_differs(norm: Callable[..., Any]) -> bool:
    try:
        inspect.signature(norm).bind("x", "weight", "eps")
    except TypeError:
        return True
    except ValueError:  # a builtin
        return False
    return False


def _unchanged(when: str, names: tuple[str, ...], now: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> Line:
    what = f"leaves the inputs of its {when} as they were"
    for name, tensor, copy in zip(names, now, before, strict=True):
        if not torch.equal(tensor, copy):
            n = int((tensor != copy).sum())
            words = f"{name} is overwritten in the {when}: {n} of {copy.numel()} elements"
            return Line(False, what, words, f"write into torch.empty_like({name}); others still need {name}")
    return Line(True, what, "")


def shapes(subject: Subject) -> list[Line]:
    """x of one to four axes, one column, and a row wider than a block."""
    norm = load(subject).rms_norm
    for shape in SHAPES:
        try:
            call(norm, *inputs(subject, *shape))
        except Unusable as error:
            fix = "take any number of axes: x.reshape(-1, D), and y.view(x.shape)"
            fix = "mask columns beyond D, and loop over blocks of wide rows" if shape[-1] in (1, 17, 4097) else fix
            return [Line(False, "keeps x's shape", str(error), fix)]
    return [Line(True, "keeps x's shape", ", ".join(map(str, SHAPES)))]


def dtypes(subject: Subject) -> list[Line]:
    """y has x's dtype and device, in each dtype alone and beside a weight of another."""
    norm, wrong = load(subject).rms_norm, []
    for x_dtype in (torch.float32, *HALF):
        for weight_dtype in (x_dtype, torch.float32):
            x, weight = inputs(subject, 6, 48, x=x_dtype, weight=weight_dtype)
            given = f"x {name_of(x_dtype)}, weight {name_of(weight_dtype)}"
            try:
                y = call(norm, x, weight)
            except Unusable as error:
                wrong.append(str(error))
                continue
            if y.dtype != x.dtype or y.device != x.device:
                wrong.append(f"{given}: it returns {said(y)}, expected {name_of(x_dtype)} on {x.device}")
            elif any(stride == 0 and size > 1 for size, stride in zip(y.shape, y.stride(), strict=True)):
                wrong.append(f"{given}: y has strides {y.stride()}, so that elements share memory")
    what = "keeps x's dtype and device"
    if wrong:
        return [Line(False, what, wrong[0], "give y x's dtype and device: torch.empty_like(x), or y.to(x.dtype)")]
    return [Line(True, what, "float32, float16, bfloat16, and half precision beside a float32 weight")]


def strides(subject: Subject) -> list[Line]:
    """x whose rows do not lie one after another; here only that it survives them."""
    norm = load(subject).rms_norm
    for name, make in STRIDED.items():
        x = make().to(subject.device)
        about_to(f"x {tuple(x.shape)} with strides {x.stride()}: {name}")
        try:
            y = norm(x, weights(48, subject.form).to(subject.device), EPS)
        except ERRORS as error:
            words = f"x {tuple(x.shape)} with strides {x.stride()}, {name}: {one_line(error)}"
            return [Line(False, "takes strides", words, "x = x.contiguous() first, or pass x's strides to the kernel")]
        if y.shape != x.shape:
            return [Line(False, "takes strides", f"{name}: it returns {said(y)}", "return y with the shape of x")]
    return [Line(True, "takes strides", ", ".join(STRIDED))]


def empty(subject: Subject) -> list[Line]:
    """No rows, as a process without sequences has."""
    norm, what = load(subject).rms_norm, "takes x without rows"
    try:
        call(norm, *inputs(subject, 0, 48))
    except Unusable as error:
        return [Line(False, what, str(error), "return torch.empty_like(x) before a launch of no blocks")]
    return [Line(True, what, "(0, 48)")]


def backward(subject: Subject) -> list[Line]:
    """dx and dweight exist, with the right shapes and dtypes, and dy is left alone."""
    norm, what = load(subject).rms_norm, "has a backward"
    x, weight = inputs(subject, 6, 48)
    dy = random(6, 48, seed=1).to(x.device)
    before = x.clone(), weight.clone(), dy.clone()
    x.requires_grad_()
    weight.requires_grad_()
    about_to("the backward of x (6, 48) float32")
    try:
        y = norm(x, weight, EPS)
        if not y.requires_grad:
            fix = "wrap it in a torch.autograd.Function with a backward, to train with it"
            return [Line(None, what, "y has no gradient: forward alone", fix)]
        dx, dweight = torch.autograd.grad(y, (x, weight), dy, allow_unused=True)
    except ERRORS as error:
        return [
            Line(False, what, f"the backward of x (6, 48): {one_line(error)}", "return dx, dweight and None for eps")
        ]
    for name, gradient, of in (("dx", dx, x), ("dweight", dweight, weight)):
        if gradient is None:
            fix = f"its backward returns None for {name}, or {name[1:]} is not saved in the graph"
            return [Line(False, what, f"{name} is missing", fix)]
        if gradient.shape != of.shape or gradient.dtype != of.dtype:
            words = f"{name} is {said(gradient)}, expected {tuple(of.shape)} {name_of(of.dtype)}"
            return [Line(False, what, words, f"give {name} the shape and the dtype of {name[1:]}")]
    lines = [Line(True, what, "dx and dweight")]
    now = x.detach(), weight.detach(), dy
    return [*lines, _unchanged("backward", ("x", "weight", "dy"), now, before)]


def addition(subject: Subject) -> list[Line]:
    """add_rms_norm, where it has one of its own."""
    backend, what = load(subject), "has a fused addition"
    if not adds(backend, subject.name):
        name = subject.name.partition(":")[2] or "rms_norm"
        return [
            Line(None, what, "the addition is a step of its own", f"add_{name}(x, residual, weight, eps) -> (y, h)")
        ]
    (x, weight), residual = inputs(subject, 6, 48), random(6, 48, seed=2).to(subject.device)
    before = x.clone(), residual.clone(), weight.clone()
    about_to("add_rms_norm of x (6, 48) float32")
    try:
        found: Any = backend.add_rms_norm(x, residual, weight, EPS)
    except ERRORS as error:
        return [Line(False, what, one_line(error), "expected a function (x, residual, weight, eps) -> (y, h)")]
    good = isinstance(found, (tuple, list)) and len(found) == 2
    if not good or any(not isinstance(t, Tensor) or t.shape != x.shape for t in found):
        return [Line(False, what, f"it returns {said(found)}", "return (y, h), both with the shape of x")]
    unchanged = _unchanged("addition", ("x", "residual", "weight"), (x, residual, weight), before)
    return [Line(True, what, "(y, h)"), unchanged]


def float64(subject: Subject) -> list[Line]:
    """Whether it computes float64 in float64, as gradcheck wants it; a norm that does not has claimed nothing."""
    norm, what = load(subject).rms_norm, "computes float64"
    x, weight = (tensor.requires_grad_() for tensor in inputs(subject, 6, 48, x=torch.float64))
    try:
        y = call(norm, x, weight)
    except Unusable as error:
        return [Line(None, what, f"it does not take it: {error}")]
    if y.dtype != torch.float64:
        return [Line(None, what, f"it returns {said(y)} for a float64 x")]
    if torch.equal(y, y.float().double()):
        return [Line(None, what, "it takes it and computes in float32")]
    try:
        if y.requires_grad:
            y.sum().backward()
    except ERRORS as error:
        return [Line(None, what, f"its backward does not take it: {one_line(error)}")]
    return [Line(True, what, "")]


# In this order. After one of the first three has failed nothing else makes sense.
LOOKS = (runs, shapes, dtypes, backward, addition, strides, empty, float64)
ESSENTIAL = (runs,)
AFTER_DEATH = {
    "strides": "x = x.contiguous() first, or pass x's strides to the kernel",
    "empty": "return torch.empty_like(x) before a launch of no blocks",
    "backward": "dy comes with strides of its own: dy.contiguous(), and mask columns beyond D",
}


def after_death(look: str) -> str:
    """What to change where a look has ended its process."""
    return AFTER_DEATH.get(look, "mask columns beyond D, and rows beyond the last: it reads or writes outside of them")


def adds(backend: Backend, name: str) -> bool:
    """True for a norm with an addition of its own."""
    return ":" not in name or getattr(backend.add_rms_norm, "__qualname__", "") != "add_then.<locals>.add_rms_norm"


def traits(subject: Subject) -> Traits:
    """What later stages ask of a norm that fits."""
    backend = load(subject)
    x, weight = inputs(subject, 6, 48)
    with watching() as launched:
        y = backend.rms_norm(x.requires_grad_(), weight, EPS)
    return Traits(
        backend.description, how_it_runs(launched), bool(launched), bool(launched.interpreted), y.requires_grad,
        adds(backend, subject.name),
    )  # fmt: skip
