"""Every backend against the contract of kernels/reference.py, check by check.

    pytest tests/kernels/test_norm_contract.py --norm my_kernel:rms_norm --device cuda

runs it on a norm of your own. If that doesn't take float64, leave those tests out with -k "not float64". --form names
the form that it is held to. `python scripts/prove.py my_kernel:rms_norm` says the same in words.
"""

import inspect
from itertools import product

import pytest
import torch

import kernels
from kernels.form import FORMS
from model.cli import names_in
from scripts.judging.claims import load_as_claimed
from tests.helpers import needs_compiler, needs_triton
from tests.kernels import contract
from tests.kernels.contract import BF16, DEVICE, EPS, F16, F32, F64, HALF, OTHER_FORMS, rows, weights

EAGER = ["reference", "torch", pytest.param("triton", marks=needs_triton)]  # compile has shorter lists, at the end


def pytest_generate_tests(metafunc):
    if "norm_name" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--norm")
        metafunc.parametrize("norm_name", names_in(chosen) if chosen else EAGER)
    if metafunc.function is test_rms_norm:
        metafunc.parametrize(("check", "arguments"), cases_of(FORMS[metafunc.config.getoption("--form")]))


@pytest.fixture
def form(request):
    return FORMS[request.config.getoption("--form")]


@pytest.fixture
def backend(norm_name, form, request):
    if norm_name == "compile":
        torch._dynamo.reset()  # the tests show the compiler more dtypes and ranks than its cache holds
    if form == FORMS[request.config.getoption("--form")]:
        return load_as_claimed(norm_name, DEVICE, form)
    try:
        return kernels.load_backend(norm_name, DEVICE, form)
    except kernels.InputError as error:
        if norm_name in kernels.BACKENDS:
            raise
        pytest.skip(str(error))


def cases(check, *choices):
    """A test case for each combination of the check's arguments, named after both."""
    return [
        pytest.param(check, arguments, id="-".join([check.__name__, *map(str, arguments)]))
        for arguments in product(*choices)
    ]


SHAPES = [(7, 48), (2, 3, 17), (600, 40), (3, 1), (5, 4097), (3, 40000)]
RMS_NORM = [
    *cases(contract.values_are_the_formula, [F64, F32, *HALF], [(7, 48), (48, 48), (2, 3, 5, 17), (768,)]),
    *cases(contract.any_width, [1, 3, 17, 768, 1792, 4097, 40000, 70001]),
    *cases(contract.eps_of_the_model_shows_in_small_rows, [F32, *HALF], [(1e-5, 0.30151134), (1e-6, 0.70710678)]),
    *cases(contract.huge_rows, [F32, BF16]),
    *cases(contract.rows_too_large_for_float32_give_zero, [F32, BF16]),
    *cases(contract.subnormal_rows, [F32, *HALF]),
    *cases(contract.half_precision_rounds_in_the_order_of_the_form, HALF),
    *cases(contract.statistics_are_float32_in_half_precision),
    *cases(contract.a_row_depends_on_itself_alone),
    *cases(contract.the_mean_is_not_removed),
    *cases(contract.root_mean_square_is_one_at_unit_weight),
    *cases(contract.zero_row_gives_zero_and_a_finite_gradient),
    *cases(contract.gradients_are_those_of_the_formula, [F64, F32, *HALF], SHAPES),
    *cases(contract.dweight_is_summed_in_float32, HALF),
    *cases(contract.dweight_is_made_of_what_the_weight_multiplies),
    *cases(contract.gradcheck_in_float64),
    *cases(contract.result_and_gradients_keep_their_dtypes, [F32, *HALF], [F32, *HALF]),
    *cases(contract.strides_change_nothing, contract.STRIDED),
    *cases(contract.gradient_of_a_sum_arrives_expanded),
    *cases(contract.nothing_gives_an_empty_tensor, [(0, 48), (3, 0, 48), (3, 0)]),
    *cases(contract.inputs_are_left_as_they_were),
    *cases(contract.a_frozen_weight_changes_no_other_gradient),
    *cases(contract.repeated_runs_have_the_same_bits),
    *cases(contract.autocast_changes_nothing, [F32, BF16], [F32, BF16]),
]
ADD_RMS_NORM = [
    *cases(contract.add_rms_norm_is_the_two_steps, [F32], [F32], [(6, 48), (3, 40000)]),
    *cases(contract.add_rms_norm_is_the_two_steps, [F16], [F16], [(6, 48), (3, 40000)]),
    *cases(contract.add_rms_norm_is_the_two_steps, [BF16], [BF16, F32], [(6, 48), (3, 40000)]),
    *cases(contract.add_rms_norm_takes_any_strides, [48, 20000]),
]


def test_rms_norm(backend, check, arguments, form):
    run_check(check, backend.rms_norm, arguments, form)


def run_check(check, norm, arguments, form):
    """The check, in this form if that makes a difference to it."""
    options = {"form": form} if "form" in inspect.signature(check).parameters else {}
    check(norm, *arguments, **options)


@pytest.mark.parametrize(("check", "arguments"), ADD_RMS_NORM)
def test_add_rms_norm(backend, check, arguments):
    check(backend, *arguments)


every_other_form = pytest.mark.parametrize("form", OTHER_FORMS, ids=str)
# What a form changes; the other checks are of code that all forms share.
FORMED_RMS_NORM = [
    *cases(contract.values_are_the_formula, [F64, F32, *HALF], [(7, 48)]),
    *cases(contract.a_zero_weight_leaves_the_offset, [F32, *HALF]),
    *cases(contract.any_width, [17, 40000]),
    *cases(contract.half_precision_rounds_in_the_order_of_the_form, HALF),
    *cases(contract.zero_row_gives_zero_and_a_finite_gradient),
    *cases(contract.gradients_are_those_of_the_formula, [F64], [(7, 48), (3, 40000)]),
    *cases(contract.gradients_are_those_of_the_formula, [F32, *HALF], [(7, 48)]),
    *cases(contract.dweight_is_made_of_what_the_weight_multiplies),
    *cases(contract.result_and_gradients_keep_their_dtypes, [F32, *HALF], [F32, F16]),
]


@every_other_form
@pytest.mark.parametrize(("check", "arguments"), FORMED_RMS_NORM)
def test_rms_norm_of_another_form(backend, check, arguments, form):
    check(backend.rms_norm, *arguments, form=form)


@every_other_form
@pytest.mark.parametrize("weight_dtype", HALF, ids=str)
def test_the_offset_is_added_in_float32(backend, weight_dtype, form):
    """Beside a float32 x a sum in the weight's half precision shows, forward and backward."""
    contract.result_and_gradients_keep_their_dtypes(backend.rms_norm, F32, weight_dtype, form)
    contract.gradients_are_those_of_the_formula(backend.rms_norm, F32, (7, 48), form, weight_dtype)


FORMED_ALIKE = [
    *cases(contract.rows_too_large_for_float32_give_zero, [F32]),
    *cases(contract.dweight_is_summed_in_float32, [F16]),
    *cases(contract.nothing_gives_an_empty_tensor, [(0, 48), (3, 0)]),
    *cases(contract.autocast_changes_nothing, [F32, BF16], [F32, BF16]),
]


@every_other_form
@pytest.mark.parametrize(("check", "arguments"), FORMED_ALIKE)
def test_rms_norm_of_another_form_is_as_robust(backend, check, arguments):
    check(backend.rms_norm, *arguments)


def cases_of(form):
    """What holds of a norm in this form: the checks that know no offset are left out where there is one."""
    return [*FORMED_RMS_NORM, *FORMED_ALIKE] if form.offset else RMS_NORM


@every_other_form
@pytest.mark.parametrize(
    ("check", "arguments"), cases(contract.add_rms_norm_is_the_two_steps, [F16], [F16, F32], [(6, 48)])
)
def test_add_rms_norm_of_another_form(backend, check, arguments):
    check(backend, *arguments)


@needs_compiler
@pytest.mark.parametrize("form", [FORMS["gemma"]], ids=str)
def test_a_form_is_compiled_with_the_graph_around_it(backend):
    torch._dynamo.reset()
    norm, x, weight = backend.rms_norm, rows(6, 48), weights(48)
    compiled = torch.compile(lambda x, weight: norm(x * 2, weight, EPS), fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), norm(x * 2, weight, EPS), rtol=1e-5, atol=1e-6)


@needs_compiler
def test_runs_inside_a_compiled_graph(backend):
    torch._dynamo.reset()
    norm = backend.rms_norm
    compiled = torch.compile(lambda x, weight: norm(x * 2, weight, EPS) + 1, fullgraph=True)
    x, weight = rows(6, 48).requires_grad_(), weights(48).requires_grad_()
    found, expected = compiled(x, weight), norm(x * 2, weight, EPS) + 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(y.sum(), (x, weight)) for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


# Each case costs seconds of compilation, so these are the ones that a compiler could get wrong.
COMPILED_RMS_NORM = [
    *cases(contract.values_are_the_formula, [F32, F64], [(7, 48)]),
    *cases(contract.rows_too_large_for_float32_give_zero, [F32]),
    *cases(contract.half_precision_rounds_in_the_order_of_the_form, HALF),
    *cases(contract.statistics_are_float32_in_half_precision),
    *cases(contract.gradients_are_those_of_the_formula, [F32, BF16], [(7, 48)]),
    *cases(contract.result_and_gradients_keep_their_dtypes, [BF16], [F32]),
    *cases(contract.zero_row_gives_zero_and_a_finite_gradient),
    *cases(contract.dweight_is_summed_in_float32, [BF16]),
    *cases(contract.nothing_gives_an_empty_tensor, [(0, 48)]),
    *cases(contract.strides_change_nothing, ["slice of a fused projection"]),
]
COMPILED_ADD = [
    *cases(contract.add_rms_norm_is_the_two_steps, [F32], [F32], [(7, 48)]),
    *cases(contract.add_rms_norm_is_the_two_steps, [BF16], [BF16], [(7, 48)]),
]


@pytest.fixture
def compiled(form):
    torch._dynamo.reset()  # together the tests show the compiler more dtypes than its cache holds
    return kernels.load_backend("compile", DEVICE, form)


@needs_compiler
@pytest.mark.parametrize(("check", "arguments"), COMPILED_RMS_NORM)
def test_compile_backend(compiled, check, arguments):
    check(compiled.rms_norm, *arguments)


@needs_compiler
@every_other_form
def test_compile_backend_of_another_form(compiled, form):
    contract.half_precision_rounds_in_the_order_of_the_form(compiled.rms_norm, F16, form)


@needs_compiler
@pytest.mark.parametrize("form", [FORMS["gemma"]], ids=str)
def test_compile_backend_adds_the_offset_in_float32(compiled, form):
    contract.gradients_are_those_of_the_formula(compiled.rms_norm, F32, (7, 48), form, BF16)


@needs_compiler
def test_compile_backend_never_falls_back_to_eager(compiled):
    """One graph more than Dynamo's cache holds is an error, and so is the first one where the cache holds none."""
    x, weight = rows(2, 48), weights(48)
    with torch._dynamo.config.patch(accumulated_cache_size_limit=0):
        for norm, inputs in ((compiled.rms_norm, (x, weight)), (compiled.add_rms_norm, (x, x, weight))):
            with pytest.raises(Exception, match=r"limit|fullgraph"):  # the class differs between versions of PyTorch
                norm(*inputs, EPS)


@needs_compiler
@pytest.mark.parametrize(("check", "arguments"), COMPILED_ADD)
def test_compile_backend_adds(compiled, check, arguments):
    check(compiled, *arguments)
