"""The promises: each case of the contract belongs to one, and what breaks one comes with the line that repeats it."""

import re
import shlex
import subprocess
import sys
import warnings

import pytest

from kernels.form import FORMS
from scripts.proving import promises
from scripts.proving.apart import Died
from scripts.proving.fits import Traits
from scripts.proving.promises import BROKEN, KEPT, NOT_CLAIMED, NOT_JUDGED, PROMISES
from scripts.proving.subject import Subject
from tests.helpers import ROOT

PLAIN = Traits("a norm", "plain PyTorch", False, False, True, False)
RIGHT = Subject("tests.scripts.proving.norms:right")


class Here:
    """In place of a process apart: this one, which must not die."""

    def __init__(self, deadly=""):
        self.deadly, self.called = deadly, []

    def call(self, function, subject, key):
        self.called.append(key)
        if self.deadly and self.deadly in key.check:
            raise Died("a segmentation fault", "x (6, 48)")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(subject, key)


def kept(subject, traits=PLAIN, float64="", deadly="", only=""):
    keys = [key for key in promises.keys_of(subject) if key.pass_name != "graph" and re.search(only, key.check)]
    here = Here(deadly)
    return {one.words: one for one in promises.keep(subject, traits, float64, [here], lambda words: None, keys)}, here


@pytest.mark.parametrize("form", FORMS)
def test_each_case_belongs_to_a_promise_and_each_promise_has_cases(form):
    keys = promises.keys_of(RIGHT._replace(form_name=form))
    found = {promises.promise_of(key) for key in keys}
    assert found <= PROMISES.keys()
    if form == "llama":
        assert PROMISES.keys() - found == {"offset + weight is formed in float32"}
    checks = [check for checks in PROMISES.values() for check in checks]
    assert len(checks) == len(set(checks))


def test_a_right_norm_keeps_what_it_claims():
    found, here = kept(RIGHT)
    states = {words: promise.state for words, promise in found.items()}
    assert states.pop("the fused addition is the two steps") == NOT_CLAIMED
    assert "offset + weight is formed in float32" not in states  # no check of this form
    assert set(states.values()) == {KEPT}
    assert sum(promise.passed for promise in found.values()) == len(here.called)


def test_a_broken_promise_shows_its_smallest_case():
    found, _ = kept(Subject("tests.kernels.faults:eps_outside_the_root"), only="width|eps|statistics")
    broken = found["any width, from 1 to 70001"]
    assert (broken.state, broken.passed, broken.cases) == (BROKEN, 0, 8)
    assert re.match(r"any width-1: found \S+ at \(\d, 0\), expected \S+ within \S+; 3 of 3 elements", broken.example)
    assert "-any_width-1]'" in broken.pytest
    assert found["eps stands inside the root, as it is passed"].state == BROKEN
    assert found["statistics are float32 in half precision"].state == KEPT


@pytest.mark.parametrize(
    ("subject", "only"),
    [
        (Subject("tests.kernels.faults:eps_outside_the_root"), "eps_of_the_model"),
        (Subject("tests.scripts.proving.norms:right", "gemma"), "a_zero_weight"),
        (Subject("tests.kernels.faults:rounding_in_the_other_order", "gemma"), "half_precision_rounds"),
    ],
)
def test_the_pytest_line_repeats_what_is_shown(subject, only):
    found, _ = kept(subject, only=only)
    (broken,) = (promise for promise in found.values() if promise.state == BROKEN)
    program, *arguments = shlex.split(broken.pytest)
    assert program == "pytest"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    assert f"AssertionError: {broken.example.partition(': ')[2]}" in done.stdout


def test_what_a_norm_does_not_claim_is_not_asked():
    found, here = kept(RIGHT, PLAIN._replace(backward=False), float64="it does not take float64")
    assert (found["gradients are the formula's"].state, found["gradients are the formula's"].why) == (
        NOT_CLAIMED, "it has no backward",
    )  # fmt: skip
    assert found["float64 is computed in float64"].why in ("it does not take float64", "it has no backward")
    assert not any(key.pass_name == "backward" or "float64" in key.id for key in here.called)
    found, _ = kept(RIGHT, PLAIN._replace(backward=False, adds=True), only="add_rms_norm")
    assert found["the fused addition is the two steps"].state == NOT_JUDGED


def test_bfloat16_is_not_judged_in_tritons_interpreter():
    traits = PLAIN._replace(triton=True, interpreted=True)
    found, here = kept(RIGHT, traits, only="order_of_the_form")
    assert [key.id for key in here.called] == ["half_precision_rounds_in_the_order_of_the_form-torch.float16"]
    promise = found["half precision is rounded in the form's order"]
    assert (promise.state, promise.cases) == (KEPT, 1)
    assert "cuts bfloat16 off" in promise.why


def test_a_graph_around_a_users_kernel_is_not_judged_without_a_gpu():
    key = promises.Key("test_runs_inside_a_compiled_graph", "", "graph", "test_runs_inside_a_compiled_graph", 0)
    traits = PLAIN._replace(triton=True)
    assert promises.not_asked(key, RIGHT, traits, "")[0] == NOT_JUDGED
    assert promises.not_asked(key, Subject("triton"), traits, "") in (None, promises.not_asked(key, RIGHT, PLAIN, ""))


def test_after_a_death_the_other_cases_of_its_check_are_left_out():
    found, here = kept(RIGHT, deadly="strides_change", only="strides_change|inputs")
    assert sum("strides" in key.check for key in here.called) == 1
    promise = found["strides change nothing"]
    assert promise.state == BROKEN
    assert promise.example == "strides change nothing-transposed: a segmentation fault at x (6, 48)"
    assert found["inputs are left as they were"].state == KEPT
