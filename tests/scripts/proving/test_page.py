"""What is said of a norm: the sentence that names it, the verdict, and the page."""

import pytest

from scripts.proving import page
from scripts.proving.telling import UNKNOWN
from scripts.proving.variants import RIGHT

VALUES = {"part": "values", "name": RIGHT, "words": "the values are the formula's", "example": ""}
OUTSIDE = {"part": "values", "name": "outside", "words": "eps stands outside the root, x / (rms + eps)", "example": ""}
STRANGE = {"part": "values", "name": UNKNOWN, "words": "none of the known mistakes", "example": ""}
ONCE = {"part": "rounding in float16", "name": "rounded_once", "words": "x_hat is not rounded", "example": ""}
TWICE = ONCE | {"name": "rounded_twice"}
STRIDES = {"part": "strides", "name": UNKNOWN, "words": "it fails", "example": ""}
DX = {"part": "dx", "name": "without_the_projection", "words": "dx lacks the projection: it is", "example": ""}


@pytest.mark.parametrize(
    ("findings", "form", "sentence"),
    [
        ([VALUES], "llama", "It is LLaMA's norm (rounded twice)."),
        ([VALUES], "gemma", "It is Gemma's norm (weight + 1, rounded once)."),
        ([VALUES, ONCE], "llama", "It is LLaMA's norm with the rounding order of nn.RMSNorm."),
        ([VALUES, TWICE], "torch", "It is nn.RMSNorm's form with the rounding order of LLaMA."),
        ([OUTSIDE, ONCE], "llama", "It is not LLaMA's norm: eps stands outside the root; x_hat is not rounded."),
        ([STRANGE], "llama", "It is not LLaMA's norm, and none of the known mistakes."),
        ([VALUES, STRIDES], "llama", "It is LLaMA's norm for a contiguous x alone."),
        ([VALUES, STRIDES, DX], "llama", "It is LLaMA's norm, but for this: strides; dx lacks the projection."),
    ],
)
def test_the_sentence_names_the_norm(findings, form, sentence):
    assert page.sentence(findings, form) == sentence


def result(**stages):
    promises = [{"words": "any width", "state": "kept"}, {"words": "strides", "state": "not claimed"}]
    return {"norm": "a:b", "form": "llama", "stages": {"identity": [VALUES], "promises": promises, **stages}}


def test_the_verdict_counts_what_was_claimed():
    assert page.verdict(result()) == "a:b: it is LLaMA's norm (rounded twice); 1 of 1 promises kept"
    assert page.broken(result()) == []


@pytest.mark.parametrize(
    "stages",
    [
        {"fits": [{"ok": False, "what": "takes strides", "found": "a segmentation fault"}]},
        {"identity": [VALUES, ONCE]},
        {"promises": [{"words": "any width", "state": "broken"}]},
        {"parity": {"failures": ["in float32 its loss differs"], "dtypes": {}}},
    ],
)
def test_each_stage_can_break_a_promise(stages):
    assert page.broken(result(**stages))


def test_what_is_not_claimed_breaks_nothing():
    fits = [{"ok": None, "what": "computes float64", "found": "it does not take it"}]
    assert page.broken(result(fits=fits, parity={"failures": [], "notes": ["nothing can be told"], "dtypes": {}})) == []


VERDICTS = dict.fromkeys(("a:b", "control_columns", "control_blocks", "control_division", "impostor"))
VERDICTS |= {name: {"passes": name != "impostor", "largest_difference": 1e-6} for name in VERDICTS}


@pytest.mark.parametrize(
    ("failures", "notes", "mark", "verdict"),
    [
        ([], [], "yes", "; trains as the reference does in float32"),
        (["in float32 its loss differs"], [], "NO ", "; in float32 its loss differs"),
        ([], ["nothing can be told in float32: the impostor passes"], "-- ", "1 of 1 promises kept"),
    ],
)
def test_a_run_that_shows_nothing_is_not_said_to_train(failures, notes, mark, verdict):
    verdicts = VERDICTS | {"a:b": {"passes": not failures, "largest_difference": 1e-6}}
    one = {"verdicts": verdicts, "picture": None, "losses": {"a:b": [6.0]}}
    parity = {"failures": failures, "notes": notes, "dtypes": {"float32": one}}
    assert page.parity(parity, "a:b")[2].startswith(f"   {mark} float32: ")
    assert page.verdict(result(parity=parity)).endswith(verdict)
