"""What one norm does: the checks of the contract that it passes, and the bytes that it moves."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import Backend, emulated, kernel_errors, load_backend
from kernels.emulated.counts import Counts
from kernels.form import FORMS, LLAMA, Form
from scripts import peers

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent.parent
FEW_ROWS = 24  # bytes an element of x don't depend on their number
ROWS, WIDTH = 2048, 1024  # of the table: enough rows for the partial sums of dweight to show
PASSES = ("forward", "backward", "add")
EPS = 1e-5


@dataclass
class Verdict:
    """What one norm did in one form."""

    norm: str
    form: str
    version: str = ""
    why_not: str = ""  # it could not be loaded
    backward: bool = True  # it has one
    adds: bool = False  # it has its own kernel for the add and the norm
    passed: dict[str, int] = field(default_factory=dict)  # checks, by pass
    failed: dict[str, list[list[str]]] = field(default_factory=dict)  # by pass: check, arguments, what was found
    moved: dict[str, dict[int, float | str]] = field(
        default_factory=dict
    )  # by pass and width: bytes an element, or why not
    table: dict[str, list[float] | str] = field(
        default_factory=dict
    )  # by pass: moved, the rest, instructions an element


def judge(name: str, form_name: str, gpu: str, widths: list[int]) -> Verdict:
    """All of one norm in one form, in a process of its own."""
    warnings.simplefilter("ignore")
    os.environ |= {"NORM_TEST_DEVICE": "cpu", "TRITON_DEFAULT_FP_FUSION": "1"}
    emulated.emulate(gpu)
    torch.set_num_threads(1)
    verdict, form = Verdict(name, form_name), FORMS[form_name]
    package = peers.PACKAGES.get(name)
    try:
        if package is None:
            backend = load_backend(name, CPU, form)
        else:
            distribution = package.install.split()[0].partition("==")[0]
            if not any(metadata.distributions(name=distribution)):
                verdict.why_not = f"not installed; pip install --no-deps {package.install}"
                return verdict
            verdict.version = metadata.version(distribution)
            backend = peers.load(name, CPU, form if len(package.forms) > 1 else LLAMA)
    except (*kernel_errors(), ImportError) as error:
        verdict.why_not = one_line(error)
        return verdict
    verdict.adds = package is None or package.adds_in(form_name)
    verdict.backward = has_backward(backend.rms_norm)
    for pass_name, check, arguments in checks_of(form, verdict):
        found = outcome(check, backend if pass_name == "add" else backend.rms_norm, arguments, form)
        verdict.passed[pass_name] = verdict.passed.get(pass_name, 0) + (not found)
        if found:
            failures = verdict.failed.setdefault(pass_name, [])
            failures.append([check.__name__, "-".join(map(str, arguments)), found])
    for pass_name in PASSES:
        if (pass_name == "backward" and not verdict.backward) or (pass_name == "add" and not verdict.adds):
            continue
        verdict.moved[pass_name] = {width: tile_bytes(backend, pass_name, FEW_ROWS, width) for width in widths}
        verdict.table[pass_name] = table_figures(backend, pass_name)
    return verdict


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def has_backward(norm: Callable[..., Tensor]) -> bool:
    x, weight = torch.ones(4, 64).requires_grad_(), torch.ones(64)
    try:
        torch.autograd.grad(norm(x, weight, EPS).sum(), x)
    except RuntimeError as error:
        return "does not require grad" not in str(error)
    except kernel_errors():
        return True  # its checks will say what is wrong
    return True


class Case(NamedTuple):
    """One case of the contract's lists."""

    test: str  # the test of test_norm_contract.py that runs it
    id: str  # what that test calls it, after the norm's name
    pass_name: str
    check: Callable[..., None]  # of a norm; where the pass is "add" or "graph", of a backend
    arguments: tuple[Any, ...]


def contract_tests() -> Any:
    """The module of the contract's lists."""
    ours = sys.modules.setdefault("tests", ModuleType("tests"))  # some packages bring a `tests` of their own
    ours.__path__ = [str(ROOT / "tests")]
    from tests.kernels import test_norm_contract

    return test_norm_contract


def cases_of(form: Form) -> list[Case]:
    """Those that a norm in this form has."""
    contract, cases = contract_tests(), []
    for case in contract.cases_of(form):
        check, arguments = case.values
        backward = bool({"gradients", "grad", "backward", "gradcheck"} & set(check.__code__.co_names))
        cases.append(Case("test_rms_norm", case.id, "backward" if backward else "forward", check, arguments))
    return cases + [Case("test_add_rms_norm", case.id, "add", *case.values) for case in contract.ADD_RMS_NORM]


def checks_of(form: Form, verdict: Verdict) -> Iterator[tuple[str, Callable[..., None], tuple[Any, ...]]]:
    """(pass, check, arguments): those of the contract that this form and this norm have."""
    claimed = {"forward": True, "backward": verdict.backward, "add": verdict.adds and verdict.backward}
    for case in cases_of(form):
        if claimed[case.pass_name]:
            yield case.pass_name, case.check, case.arguments
    if verdict.adds and not verdict.backward:
        contract = contract_tests()
        for dtype in (contract.F32, contract.F16, contract.BF16):
            yield "add", adds_in_forward, (dtype,)


def adds_in_forward(backend: Backend, dtype: Any) -> None:
    """Of add_rms_norm_is_the_two_steps what a norm without a backward can do."""
    from tests.kernels.contract import EPS, assert_equal, rows, weights

    x, residual, weight = rows(6, 48, dtype=dtype), rows(6, 48, dtype=dtype, seed=3), weights(48, dtype)
    y, h = backend.add_rms_norm(x, residual, weight, EPS)
    assert_equal(h, x + residual)
    assert_equal(y, backend.rms_norm(h, weight, EPS))


def outcome(check: Callable[..., None], norm: Any, arguments: tuple[Any, ...], form: Form) -> str:
    """What went wrong; nothing if the check passed."""
    try:
        contract_tests().run_check(check, norm, arguments, form)
    except kernel_errors() as error:
        return one_line(error)
    return ""


def counts_of(backend: Backend, pass_name: str, rows: int, width: int) -> tuple[list[Counts], Tensor]:
    """The launches of a pass in bfloat16, and x."""
    from kernels.emulated.driver import counting

    torch.manual_seed(0)
    x, residual, dy = (torch.randn(rows, width).to(torch.bfloat16) for _ in range(3))
    weight = torch.rand(width).to(torch.bfloat16)
    if pass_name == "backward":
        x, weight = x.requires_grad_(), weight.requires_grad_()
        y = backend.rms_norm(x, weight, EPS)
        with counting() as launches:
            y.backward(dy)
    else:
        with counting() as launches:
            if pass_name == "add":
                backend.add_rms_norm(x, residual, weight, EPS)
            else:
                backend.rms_norm(x, weight, EPS)
    return launches, x


def split(launches: list[Counts], x: Tensor) -> tuple[float, float]:
    """Bytes of sectors an element of x: of tensors of x's size, and of all others."""
    tiles = [
        counts.sector_bytes(*names)
        for counts in launches
        if (names := [n for n, (shape, size) in counts.tensors.items() if (math.prod(shape), size) == (x.numel(), 2)])
    ]
    every = sum(counts.sector_bytes() for counts in launches)
    return sum(tiles) / x.numel(), (every - sum(tiles)) / x.numel()


def tile_bytes(backend: Backend, pass_name: str, rows: int, width: int) -> float | str:
    try:
        return split(*counts_of(backend, pass_name, rows, width))[0]
    except kernel_errors() as error:
        return one_line(error)


def table_figures(backend: Backend, pass_name: str) -> list[float] | str:
    """Bytes moved and the rest, and instructions, an element."""
    try:
        launches, x = counts_of(backend, pass_name, ROWS, WIDTH)
    except kernel_errors() as error:
        return one_line(error)
    return [*split(launches, x), sum(sum(counts.executed.values()) for counts in launches) / x.numel()]
