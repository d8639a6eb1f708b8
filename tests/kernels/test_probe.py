"""is_the_formula tells norms of another kind from the formula, and takes every right one, whatever its rounding."""

import pytest
import torch

import kernels
from kernels import Backend, InputError, add_then, reference
from kernels.probe import is_the_formula
from tests.helpers import CPU, needs_compiler, needs_triton
from tests.kernels import faults
from tests.kernels.contract import OTHER_FORMS

SIZES = pytest.mark.parametrize(("hidden_size", "eps"), [(48, 3e-3), (288, 1e-5), (768, 1e-6)])
TRITON = [pytest.param(name, marks=needs_triton) for name in ("triton", "triton@float16", "triton@bfloat16")]
RIGHT_NAMES = [
    "reference",
    "torch",
    pytest.param("compile", marks=needs_compiler),
    *TRITON,
    *(f"{name}@{dtype}" for name in ("reference", "torch") for dtype in ("float16", "bfloat16")),
    "scripts.peers:torch_fused",
    "scripts.peers:torch_fused@bfloat16",
    "tests.norms:noisy",
]


def backend_of(norm):
    return Backend(norm.__name__, norm, add_then(norm))


def layer_norm(x, weight, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, eps)


def over_all_elements(x, weight, eps):
    return x * torch.rsqrt(x.square().mean() + eps) * weight


def weight_plus_one(x, weight, eps):
    return reference.rms_norm(x, 1 + weight, eps)


def eps_ten_times_larger(x, weight, eps):
    return reference.rms_norm(x, weight, 10 * eps)


def eps_ten_times_smaller(x, weight, eps):
    return reference.rms_norm(x, weight, eps / 10)


def one_element_wrong(x, weight, eps):
    return reference.rms_norm(x, weight, eps).index_fill(-1, torch.tensor([x.shape[-1] - 1]), 0)


def of_another_shape(x, weight, eps):
    return reference.rms_norm(x, weight, eps)[..., :1]


OTHERS = [
    faults.square_of_the_mean,
    faults.over_the_batch,
    faults.over_the_sequence,
    faults.eps_missing,
    faults.eps_outside_the_root,
    faults.weight_dropped,
    faults.mean_removed_as_well,
    layer_norm,
    over_all_elements,
    weight_plus_one,
    eps_ten_times_larger,
    eps_ten_times_smaller,
    faults.nan,
    one_element_wrong,
]
# Faults in what float32 rows with plain strides don't show: half precision, strides, gradients, what h is rounded to.
RIGHT_FUNCTIONS = [
    faults.rounding_in_the_other_order,
    faults.statistics_in_half_precision,
    faults.strides_ignored,
    faults.with_backward(faults.dx_without_the_mean),
]


@SIZES
@pytest.mark.parametrize("name", RIGHT_NAMES)
def test_a_right_norm_is_the_formula(name, hidden_size, eps):
    assert is_the_formula(kernels.load_backend(name, CPU), hidden_size, eps, CPU)


@SIZES
@pytest.mark.parametrize("norm", RIGHT_FUNCTIONS)
def test_another_rounding_is_the_formula(norm, hidden_size, eps):
    assert is_the_formula(Backend("", norm, add_then(norm)), hidden_size, eps, CPU)


@SIZES
@pytest.mark.parametrize("norm", OTHERS, ids=lambda norm: norm.__name__)
def test_another_norm_is_not_the_formula(norm, hidden_size, eps):
    assert not is_the_formula(backend_of(norm), hidden_size, eps, CPU)
    right = backend_of(reference.rms_norm)
    assert not is_the_formula(right._replace(add_rms_norm=add_then(norm)), hidden_size, eps, CPU)


@pytest.mark.parametrize(("hidden_size", "eps"), [(48, 3e-3), (768, 1e-6), (16384, 1e-5)])
def test_the_layer_norm_among_the_peers_is_not_the_formula(hidden_size, eps):
    """In rows as wide as the last, random numbers alone have next to no mean."""
    assert not is_the_formula(kernels.load_backend("scripts.peers:layer_norm", CPU), hidden_size, eps, CPU)


@pytest.mark.parametrize("form", OTHER_FORMS, ids=str)
@pytest.mark.parametrize("name", [*RIGHT_NAMES[:4], "tests.norms:noisy@bfloat16"])
def test_the_formula_is_that_of_the_form(name, form):
    norm = kernels.load_backend(name, CPU, form)
    assert is_the_formula(norm, 48, 3e-3, CPU, form)
    assert is_the_formula(norm, 48, 3e-3, CPU) == (not form.offset)  # in float32 the order of rounding is nothing
    assert is_the_formula(kernels.load_backend(name, CPU), 48, 3e-3, CPU, form) == (not form.offset)


def test_faults_that_depend_on_eps_or_on_the_width_are_seen_where_they_are_one():
    norm = backend_of(faults.eps_of_another_model)
    assert is_the_formula(norm, 48, 1e-6, CPU)  # the eps that it has inside
    assert not is_the_formula(norm, 48, 1e-5, CPU)
    norm = backend_of(faults.columns_beyond_a_power_of_two_ignored)
    assert is_the_formula(norm, 64, 1e-5, CPU)
    assert not is_the_formula(norm, 48, 1e-5, CPU)


def test_an_addition_that_adds_nothing_is_not_the_formula():
    norm = backend_of(reference.rms_norm)
    for fault in (
        lambda x, residual, weight, eps: (reference.rms_norm(x, weight, eps), x + residual),
        lambda x, residual, weight, eps: (reference.rms_norm(x + residual, weight, eps), residual),
    ):
        assert not is_the_formula(norm._replace(add_rms_norm=fault), 48, 1e-5, CPU)
    for right in (faults.h_not_rounded, faults.gradient_of_h_dropped):  # its float32 values are right
        assert is_the_formula(norm._replace(add_rms_norm=right), 48, 1e-5, CPU)


def refused(x, weight, eps):
    raise InputError("this kernel wants another machine")


@pytest.mark.parametrize(
    ("norm", "error"), [(refused, InputError), (faults.keepdim_forgotten, RuntimeError), (len, TypeError)]
)
def test_a_norm_that_raises_is_not_judged(norm, error):
    with pytest.raises(error):
        is_the_formula(backend_of(norm), 48, 1e-5, CPU)


def test_the_random_state_and_the_compiler_are_left_alone():
    """A norm that draws must train with the same bits, and one that compiles must not begin with other shapes."""
    torch._dynamo.reset()
    shapes = []

    def compiler(graph, inputs):
        shapes.append(tuple(inputs[0].shape))
        return graph.forward

    compiled = torch.compile(reference.rms_norm, backend=compiler)
    for norm in (kernels.load_backend("tests.norms:noisy", CPU), backend_of(compiled)):
        before = torch.get_rng_state()
        assert is_the_formula(norm, 48, 1e-5, CPU)
        assert torch.equal(torch.get_rng_state(), before)
    assert shapes == []
    compiled(torch.ones(5, 48), torch.ones(48), 1e-5)
    assert shapes == [(5, 48)]


def test_a_norm_of_another_shape_is_refused():
    norm = kernels.Backend("my:norm", of_another_shape, kernels.add_then(of_another_shape))
    with pytest.raises(kernels.InputError, match=r"the norm my:norm returns shapes .*; expected x's"):
        is_the_formula(norm, 48, 3e-3, CPU)
