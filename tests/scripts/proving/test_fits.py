"""Does it fit? Each thing that a norm may do wrong when it is called is a line that says what was found."""

import pytest

from kernels.emulated import emulated_gpu
from scripts.proving import fits
from scripts.proving.subject import Subject
from tests.helpers import needs_triton


def subject(name):
    return Subject(name if ":" in name or name in ("reference", "triton") else f"tests.scripts.proving.norms:{name}")


def looked(look, name):
    return look(subject(name))


@pytest.mark.parametrize("look", fits.LOOKS, ids=lambda look: look.__name__)
@pytest.mark.parametrize("name", ["right", "reference", pytest.param("triton", marks=needs_triton)])
def test_a_right_norm_fits(look, name):
    assert not fits.loads(subject(name)).startswith("error")
    lines = looked(look, name)
    assert all(line.ok or (name == "right" and line.what == "has a fused addition") for line in lines), lines


@pytest.mark.parametrize(
    ("look", "name", "found", "fix"),
    [
        (fits.runs, "nothing", "it returns None, expected a tensor like x", "return y at its end"),
        (fits.runs, "pair", "it returns a tuple of 2", "return y alone"),
        (fits.runs, "flat", "it returns a tensor (288,) float32 on cpu, expected x's shape", "with the shape of x"),
        (fits.runs, "other_arguments", "TypeError", "(x, weight, eps) -> y; its own is (x, eps)"),
        (fits.runs, "needs_a_gpu", "AssertionError", "take that line out"),
        (fits.runs, "in_place", "x is overwritten in the forward: 288 of 288 elements", "torch.empty_like(x)"),
        (fits.runs, "tests.kernels.faults:keepdim_forgotten", "RuntimeError", "use keepdim=True"),
        (fits.dtypes, "wide_result", "it returns a tensor (6, 48) float32 on cpu, expected float16", "y.to(x.dtype)"),
        (fits.backward, "dy_overwritten", "dy is overwritten in the backward", "torch.empty_like(dy)"),
        (fits.backward, "tests.kernels.faults:weight_dropped", "dweight is missing", "weight is not saved"),
        (fits.addition, "residual_overwritten", "residual is overwritten in the addition", "empty_like(residual)"),
        (fits.empty, "fails_without_rows", "ZeroDivisionError", "no blocks"),
    ],
)
def test_what_does_not_fit_is_said_with_what_to_change(look, name, found, fix):
    line = next(line for line in looked(look, name) if not line.ok)
    assert line.ok is False
    assert found in line.found
    assert fix in line.fix


@pytest.mark.parametrize(
    ("look", "name", "found"),
    [
        (fits.backward, "forward_alone", "y has no gradient"),
        (fits.addition, "right", "a step of its own"),
        (fits.float64, "in_float32", "computes in float32"),
        (fits.float64, "wide_result", "it returns a tensor (6, 48) float32"),
    ],
)
def test_what_a_norm_does_not_claim_is_no_mistake(look, name, found):
    (line,) = looked(look, name)
    assert line.ok is None
    assert found in line.found


def test_traits_are_those_of_the_norm():
    traits = fits.traits(subject("forward_alone"))
    assert (traits.backward, traits.adds, traits.triton) == (False, False, False)
    assert traits.runs == "plain PyTorch: it launches no Triton kernel"
    traits = fits.traits(subject("residual_overwritten"))
    assert (traits.backward, traits.adds) == (True, True)


@needs_triton
def test_it_is_said_how_triton_kernels_run():
    traits = fits.traits(subject("triton"))
    assert traits.triton
    assert traits.interpreted == (emulated_gpu() is None and "interpreter" in traits.description)
    assert "Triton kernels (_forward_kernel" in traits.runs


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere:norm", "can't import 'nowhere'"), ("tests.scripts.proving.norms:nobody", "has no function 'nobody'")],
)
def test_a_norm_that_is_not_there_is_an_error(name, words):
    assert words in fits.loads(Subject(name)).removeprefix("error: ")
