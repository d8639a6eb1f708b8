"""A compiler's mistakes, planted in our kernels' PTX: each is found, by the machine's watch or by the result."""

import re
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux alone")
WATCH, RESULT = "EmulationError", "AssertionError"
FORWARD, BACKWARD = "_forward_kernel", "_backward_kernel"
# The checks of the contract that the kernels pass, and which the edited ones must not.
VALUES = ("values_are_the_formula", torch.bfloat16, (7, 48))
ROUNDING = ("half_precision_rounds_in_the_order_of_the_form", torch.bfloat16)
GRADIENTS = ("gradients_are_those_of_the_formula", torch.bfloat16, (1100, 520))  # programs walk over several rows
ADDITION = ("add_rms_norm_is_the_two_steps", torch.bfloat16, torch.bfloat16, (7, 48))


class Mistake(NamedTuple):
    kernel: str
    pattern: str
    replacement: str
    found_by: str
    message: str
    check: tuple
    which: int | None = 0  # of the places; None: all


MISTAKES = {
    "a shuffle reads another lane": Mistake(
        FORWARD, r"(shfl\.sync\.bfly\.b32\s+%\w+, %\w+), 2,", r"\1, 1,", RESULT, "found .* expected", VALUES
    ),
    "a shuffle stays in a part of the warp": Mistake(
        FORWARD, r"(shfl\.sync\.bfly\.b32\s[^;]*), 31,", r"\1, 15,", RESULT, "found .* expected", VALUES, None
    ),
    "a barrier is missing in forward": Mistake(
        FORWARD, r"bar\.sync\s+0;", "", WATCH, "reads shared memory that another warp has written since", VALUES
    ),
    "a barrier is missing before what was copied is read": Mistake(
        BACKWARD, r"(cp\.async\.wait_group\s+\w+;\s+(?://.*\s+)?)bar\.sync\s+0;", r"\1", WATCH,
        "reads shared memory that another warp has written since", GRADIENTS, None
    ),
    "a barrier is missing at the end of backward": Mistake(
        BACKWARD, r"bar\.sync\s+0;", "", WATCH, "shared memory that another warp has", GRADIENTS, -1
    ),
    "a predicate is swapped": Mistake(
        FORWARD, r"@(%\w+) ld\.global", r"@!\1 ld.global", WATCH, "reads 16 bytes outside the tensors", VALUES
    ),
    "a load has lost its mask": Mistake(
        FORWARD, r"@%\w+ (ld\.global\.v4)", r"\1", WATCH, "reads 16 bytes outside the tensors", VALUES
    ),
    "a store has lost its mask": Mistake(
        FORWARD, r"@%\w+ (st\.global\.v4)", r"\1", WATCH, "writes 16 bytes outside the tensors", VALUES
    ),
    "a mask is one vector too long": Mistake(
        FORWARD, r"(setp\.lt\.u32\s+%\w+, %\w+), 48;", r"\1, 56;", WATCH, "bytes outside the tensors", VALUES
    ),
    "a mask lets one more row in": Mistake(
        FORWARD, r"setp\.lt\.s32", "setp.le.s32", WATCH, "bytes outside the tensors", VALUES, None
    ),
    "the operands of a fused multiply-add are swapped": Mistake(
        FORWARD, r"(fma\.rn\.f32\s+%\w+, %\w+), (%\w+), (%\w+);", r"\1, \3, \2;", RESULT, "found", VALUES
    ),
    "a half is rounded towards zero": Mistake(
        FORWARD, r"cvt\.rn\.(bf16(?:x2)?\.f32)", r"cvt.rz.\1", RESULT, "of the elements to differ", ROUNDING, None
    ),
    "halves change places in a register": Mistake(
        FORWARD, r"(mov\.b32\s+%\w+, )\{(%\w+), (%\w+)\}", r"\1{\3, \2}", RESULT, "found", VALUES
    ),
    "numbers change places in a load": Mistake(
        FORWARD, r"(ld\.global\.v4\.b32) \{ (%\w+), (%\w+),", r"\1 { \3, \2,", RESULT, "found", VALUES
    ),
    "an address is off by a vector": Mistake(
        FORWARD, r"(ld\.global\.v4\.b32 [^;]*) \+ 0 \]", r"\1 + 16 ]", WATCH, "outside the tensors", VALUES, None
    ),
    "a sum of halves is left out": Mistake(
        FORWARD, r"add\.(?:bf16x2|f32)\s+(%\w+), (%\w+), %\w+;", r"mov.b32 \1, \2;",
        RESULT, "found .* expected", ADDITION
    ),
    "the mean divides by another number": Mistake(
        FORWARD, r"0f42400000|1111490560", "0f42000000", RESULT, "found .* expected", VALUES
    ),
    "a copy is not waited for": Mistake(
        BACKWARD, r"(cp\.async\.wait_group)\s+\w+;", r"\1 9;", WATCH, "before the asynchronous copy", GRADIENTS
    ),
    "a copy is in no group": Mistake(
        BACKWARD, r"cp\.async\.commit_group\s*;", "", WATCH, "before the asynchronous copy", GRADIENTS, None
    ),
    "the size of a copy is swapped": Mistake(
        BACKWARD, r"(selp\.b32\s+%\w+), 16, 0,", r"\1, 0, 16,", WATCH, "outside the tensors", GRADIENTS, None
    ),
    "shared memory is written beside its place": Mistake(
        BACKWARD, r"(st\.shared(?:::cta)?\.b32\s+\[ ?%\w+ ?\+ ?)(\d+)", r"\g<1>1000\2", WATCH,
        "of shared memory", GRADIENTS
    ),
    "a loop ends after its first step": Mistake(
        BACKWARD, r"@(%\w+) bra\s+(\S+_2;)", r"@!\1 bra \2", RESULT, "found .* expected", GRADIENTS
    ),
    "a sign is lost": Mistake(
        BACKWARD, r"neg\.f32", "mov.b32", RESULT, "found .* expected", GRADIENTS, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_compiled_text_is_found(compiled, name):
    mistake = MISTAKES[name]
    edit = mistake.kernel, mistake.pattern, mistake.replacement, mistake.which
    places, error, text = compiled("sm_90", "miscompiled:outcome", *edit, *mistake.check)
    assert places, "the PTX has no such place; how does this Triton write it?"
    assert error == mistake.found_by, text
    assert re.search(mistake.message, text), text


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("check", [VALUES, ROUNDING, GRADIENTS, ADDITION], ids=lambda check: check[0])
def test_the_text_as_compiled_passes(compiled, gpu, check):
    assert compiled(gpu, "miscompiled:outcome", "no kernel", "", "", None, *check) == (0, None, "")
