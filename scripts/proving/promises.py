"""The contract as promises in words. Each stands for cases of tests/kernels/test_norm_contract.py, which run here."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import NamedTuple

from scripts.judging import judge
from scripts.proving.apart import Apart, Died, about_to
from scripts.proving.fits import Traits
from scripts.proving.subject import Subject, load

# Promises in words, and the checks whose cases they stand for. Those in float64 stand for the last one.
PROMISES = {
    "values are the formula's, in each dtype": (
        "values_are_the_formula", "the_mean_is_not_removed", "root_mean_square_is_one_at_unit_weight",
    ),
    "eps stands inside the root, as it is passed": ("eps_of_the_model_shows_in_small_rows",),
    "statistics are float32 in half precision": ("statistics_are_float32_in_half_precision",),
    "half precision is rounded in the form's order": ("half_precision_rounds_in_the_order_of_the_form",),
    "offset + weight is formed in float32": ("a_zero_weight_leaves_the_offset",),
    "any width, from 1 to 70001": ("any_width",),
    "a row depends on itself alone": ("a_row_depends_on_itself_alone",),
    "rows of zeros and subnormal numbers": (
        "zero_row_gives_zero_and_a_finite_gradient", "subnormal_rows",
    ),
    "huge rows, and those whose squares overflow": ("huge_rows", "rows_too_large_for_float32_give_zero"),
    "gradients are the formula's": ("gradients_are_those_of_the_formula",),
    "dweight is summed in float32, of what the weight multiplies": (
        "dweight_is_summed_in_float32", "dweight_is_made_of_what_the_weight_multiplies",
    ),
    "results keep their dtypes, mixed ones too": ("result_and_gradients_keep_their_dtypes",),
    "strides change nothing": ("strides_change_nothing", "gradient_of_a_sum_arrives_expanded"),
    "no rows give an empty tensor": ("nothing_gives_an_empty_tensor",),
    "inputs are left as they were": ("inputs_are_left_as_they_were",),
    "repeated runs have the same bits, with a frozen weight too": (
        "repeated_runs_have_the_same_bits", "a_frozen_weight_changes_no_other_gradient",
    ),
    "autocast changes nothing": ("autocast_changes_nothing",),
    "the fused addition is the two steps": ("add_rms_norm_is_the_two_steps", "add_rms_norm_takes_any_strides"),
    "it runs inside of a compiled graph": ("test_runs_inside_a_compiled_graph",),
    "float64 is computed in float64": ("gradcheck_in_float64",),
}  # fmt: skip
FLOAT64 = "float64 is computed in float64"
KEPT, BROKEN, NOT_CLAIMED, NOT_JUDGED = "kept", "broken", "not claimed", "not judged"


class Key(NamedTuple):
    """A case by its names; the process apart looks it up."""

    test: str
    id: str
    pass_name: str
    check: str
    size: int  # of what it shows, to find the smallest


@dataclass
class Promise:
    """What became of one promise."""

    words: str
    state: str = KEPT
    why: str = ""  # it is not claimed, or not judged
    passed: int = 0
    cases: int = 0
    example: str = ""  # the smallest case that broke it, and what was found there
    pytest: str = ""  # repeats that case
    failed: list[tuple[str, str]] = field(default_factory=list)  # pytest's name of each case, and what was found


def promise_of(key: Key) -> str:
    """The promise that a case belongs to."""
    if "float64" in key.id:
        return FLOAT64
    return next(words for words, checks in PROMISES.items() if key.check in checks)


def keys_of(subject: Subject) -> list[Key]:
    """All cases of a norm in this form, in a process apart."""
    load(subject)  # settles how Triton runs, and the device of the checks
    keys = [
        Key(case.test, case.id, case.pass_name, case.check.__name__, _size(case.arguments))
        for case in judge.cases_of(subject.form)
    ]
    graph = "test_runs_inside_a_compiled_graph"
    return [Key(graph, "", "graph", graph, 0), *keys]  # it takes longest


def _size(arguments: tuple[object, ...]) -> int:
    """Elements of what a case shows, as far as its arguments tell."""
    size = 1
    for argument in arguments:
        for number in argument if isinstance(argument, tuple) else (argument,):
            size *= number if isinstance(number, int) else 1
    return size


def outcome(subject: Subject, key: Key) -> str:
    """What went wrong in one case, in a process apart; nothing if it passed."""
    backend = load(subject)
    about_to(" ".join([key.check.replace("_", " "), key.id.removeprefix(key.check).lstrip("-")]).strip())
    if key.pass_name == "graph":
        return judge.outcome(judge.contract_tests().test_runs_inside_a_compiled_graph, backend, (), subject.form)
    case = next(case for case in judge.cases_of(subject.form) if (case.test, case.id) == (key.test, key.id))
    norm = backend if key.pass_name == "add" else backend.rms_norm
    return judge.outcome(case.check, norm, case.arguments, subject.form)


def not_asked(key: Key, subject: Subject, traits: Traits, float64: str) -> tuple[str, str] | None:
    """(state, why) of a case that says nothing about this norm."""
    ours = ":" not in subject.name
    if not traits.backward and key.pass_name in ("backward", "graph"):
        return NOT_CLAIMED, "it has no backward"
    if "float64" in key.id and float64:
        return NOT_CLAIMED, float64
    if key.pass_name == "add" and not traits.adds:
        return NOT_CLAIMED, "it has no add_rms_norm of its own"
    if key.pass_name == "add" and not traits.backward:
        return NOT_JUDGED, "the check needs a backward"
    if key.pass_name == "graph" and traits.triton and not ours and subject.device == "cpu":
        return NOT_JUDGED, "PyTorch would compile it for the CPU, where its kernels have no compiler"
    if key.pass_name == "graph" and subject.device == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        return NOT_JUDGED, "torch.compile needs a C++ compiler on a CPU"
    if traits.interpreted and not ours and "bfloat16" in key.id:
        return NOT_JUDGED, "Triton's interpreter cuts bfloat16 off; --emulate sm_90 rounds it"
    return None


def pytest_line(subject: Subject, key: Key) -> str:
    """The command that runs one case, from the current folder."""
    path = os.path.relpath(judge.ROOT / "tests/kernels/test_norm_contract.py")
    name = "-".join(filter(None, (subject.name, key.id)))
    line = f"pytest {shlex.quote(f'{path}::{key.test}[{name}]')} --norm {shlex.quote(subject.name)}"
    for option, value, default in (
        ("--form", subject.form_name, "llama"), ("--emulate", subject.gpu, "none"), ("--device", subject.device, "cpu"),
    ):  # fmt: skip
        line += f" {option} {value}" if value != default else ""
    return line


def keep(
    subject: Subject, traits: Traits, float64: str, apart: list[Apart], tick: Callable[[str], None], keys: list[Key]
) -> list[Promise]:
    """Run all cases, in as many processes as there are, and say what became of each promise.

    `float64` says why the norm does not take it, if it doesn't. After a case has ended its process the others of its
    check are left out: each would cost a process.
    """
    promises = {words: Promise(words) for words in PROMISES}
    asked: list[Key] = []
    for key in keys:
        promise = promises[promise_of(key)]
        if refused := not_asked(key, subject, traits, float64):
            promise.why = promise.why or f"{refused[0]}: {refused[1]}"
        else:
            asked.append(key)
    free: Queue[Apart] = Queue()
    for one in apart:
        free.put(one)
    deadly: set[str] = set()

    def run(key: Key) -> str | None:
        one = free.get()
        try:
            if key.check in deadly:
                return None
            return one.call(outcome, subject, key)
        except Died as death:
            deadly.add(key.check)
            return f"{death.how} at {death.doing}" if death.doing else death.how
        finally:
            free.put(one)
            tick(key.check.replace("_", " "))

    threads = ThreadPoolExecutor(len(apart))
    try:
        results = list(zip(asked, threads.map(run, asked), strict=True))
    finally:
        threads.shutdown(cancel_futures=True)  # after Ctrl-C
    broken: dict[str, list[tuple[Key, str]]] = {}
    for key, found in results:
        promise = promises[promise_of(key)]
        promise.cases += 1
        promise.passed += found == ""
        if found:
            broken.setdefault(promise.words, []).append((key, found))
            promise.failed.append((f"{key.test}[{key.id}]", found))
    for words, failures in broken.items():
        key, found = min(failures, key=lambda failure: failure[0].size)  # the first of them as the lists go
        case = key.id.replace("torch.", "").replace("_", " ") or "a graph around it"
        promises[words].state, promises[words].example = BROKEN, f"{case}: {found.removeprefix('AssertionError: ')}"
        promises[words].pytest = pytest_line(subject, key)
    for promise in promises.values():
        if promise.state == KEPT and not promise.cases:
            promise.state, _, promise.why = (promise.why or f"{NOT_CLAIMED}: no check of this form").partition(": ")
    return [promise for promise in promises.values() if promise.cases or promise.why != "no check of this form"]
