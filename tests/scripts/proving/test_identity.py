"""Which norm is it? Every planted fault is named, pairs of them too, and no right norm is."""

import re
from functools import partial

import pytest
import torch

import kernels
from kernels import Backend, add_then, reference
from kernels.emulated import emulated_gpu
from kernels.form import FORMS, LLAMA, Form
from scripts import loss_parity
from scripts.proving import variants
from scripts.proving.forward import lost_axis
from scripts.proving.gradients import DWEIGHT, DX, Parts
from scripts.proving.identity import identify
from scripts.proving.telling import UNKNOWN
from scripts.proving.variants import RIGHT, Variant
from tests.helpers import CPU, ROOT, needs_compiler, needs_triton
from tests.kernels import contract, faults
from tests.scripts.proving import norms

FORMED = [LLAMA, *contract.OTHER_FORMS]
NAMED = {
    faults.square_of_the_mean: "square_of_the_mean",
    faults.over_the_batch: "over_the_batch",
    faults.over_the_sequence: "over_the_sequence",
    faults.eps_missing: "missing",
    faults.eps_outside_the_root: "outside",
    faults.eps_of_another_model: "literal_1e-06",
    faults.statistics_in_half_precision: "statistics_in_half_precision",
    faults.weight_dropped: "dropped",
    faults.rounding_in_the_other_order: "rounded_once",
    faults.mean_removed_as_well: "mean_removed",
    faults.nan: "nan",
    faults.strides_ignored: "strides_ignored",
    faults.columns_beyond_a_power_of_two_ignored: "columns_beyond_a_power_of_two",
}
NAMED_GRADIENTS = {
    faults.dx_without_the_mean: "without_the_projection",
    faults.dweight_of_one_block: "first_256_rows",
    faults.dweight_summed_in_half_precision: "summed_in_half_precision",
    faults.dweight_of_the_unrounded_x_hat: "of_the_unrounded_x_hat",
}
NAMED_ADDITIONS = {
    faults.h_not_rounded: "h_not_rounded",
    faults.gradient_of_h_dropped: "without_the_residuals_part",
}
NOT_CLASSIC = {faults.nan, faults.strides_ignored, faults.columns_beyond_a_power_of_two_ignored}
BY_LOOKING = {faults.keepdim_forgotten, faults.dy_overwritten, faults.residual_added_in_place}  # test_fits.py


def of(norm, form=LLAMA, add=None):
    return identify(Backend("a norm", norm, add or add_then(norm), form), CPU, adds=add is not None)


def names(found):
    return [finding.name for finding in found.mistakes()]


def mixed(statistic=RIGHT, eps=RIGHT, weight=RIGHT, once=False):
    """A norm that computes a variant, in the order of rounding that is asked for."""

    def norm(x, w, eps_passed):
        x_hat = variants.normalised(Variant(statistic, eps, weight), x, eps_passed)[0]
        x_hat = x_hat if once else x_hat.to(x.dtype)
        return variants.WEIGHTS[weight].compute(x_hat.double(), w.double(), 0.0).to(x.dtype)

    return norm


def test_every_planted_fault_has_a_name():
    kinds = (NAMED, NAMED_GRADIENTS, NAMED_ADDITIONS, BY_LOOKING)
    known = {fault.__name__ for kind in kinds for fault in kind} | {"rstd", "with_backward", "right_gradients"}
    formed = {name for name in vars(faults) if name.startswith("offset")}
    functions = {name for name, value in vars(faults).items() if getattr(value, "__module__", "") == faults.__name__}
    assert functions == known | formed


@pytest.mark.parametrize("fault", NAMED, ids=lambda fault: fault.__name__)
def test_a_wrong_norm_is_named(fault):
    found = of(fault)
    assert NAMED[fault] in names(found)
    assert UNKNOWN not in names(found)
    on_the_page(fault, next(each.words for each in found.mistakes() if each.name == NAMED[fault]))


def on_the_page(fault, words):
    """docs/rmsnorm.md shows what is said of the classic mistakes, without the measured share of the elements."""
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/rmsnorm.md").read_text("utf-8"), re.MULTILINE))
    if fault not in NOT_CLASSIC:
        assert shown[fault.__name__] == re.sub(r": [\d.]+% of the .*", "", words)


def test_a_lost_axis_is_named_where_rows_hide_it():
    said = lost_axis(faults.keepdim_forgotten, LLAMA, CPU)
    assert "use keepdim=True" in said
    on_the_page(faults.keepdim_forgotten, said)
    assert lost_axis(reference.rms_norm, LLAMA, CPU) == ""


@pytest.mark.parametrize("fault", NAMED_GRADIENTS, ids=lambda fault: fault.__name__)
def test_a_wrong_gradient_is_named(fault):
    assert names(of(faults.with_backward(fault))) == [NAMED_GRADIENTS[fault]]
    assert names(of(faults.with_backward(faults.right_gradients))) == []


@pytest.mark.parametrize("fault", NAMED_ADDITIONS, ids=lambda fault: fault.__name__)
def test_a_wrong_addition_is_named(fault):
    assert names(of(reference.rms_norm, add=fault)) == [NAMED_ADDITIONS[fault]]


@pytest.mark.parametrize("form", [form for form in FORMED if form.offset], ids=str)
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (faults.offset_formed_in_half_precision, "offset_in_half_precision"),
        (faults.offset_added_to_x_hat, "offset_on_x_hat"),
        (faults.offset_forgotten, "offset_forgotten"),
        (faults.rounding_in_the_other_order, "rounded_"),
    ],
)
def test_a_wrong_form_is_named(fault, name, form):
    found = names(of(partial(fault, **form._asdict()), form))
    assert any(each.startswith(name) for each in found), found


def tables():
    for kind, table in (("statistic", variants.STATISTICS), ("eps", variants.EPS), ("weight", variants.WEIGHTS)):
        yield from ((kind, name) for name in table if name != RIGHT and not name.startswith("offset"))


@pytest.mark.parametrize(("kind", "name"), list(tables()))
def test_each_mistake_of_the_tables_is_told_from_all_others(kind, name):
    if name == "keepdim_forgotten":
        pytest.skip("it has an input of its own")
    found = of(mixed(**{kind: name}))
    assert names(found) == [name]
    assert found.findings[0].example, "it has a smallest row"


@pytest.mark.parametrize(
    "pair",
    [
        {"statistic": "mean_removed", "eps": "outside"},
        {"statistic": "padded", "eps": "missing"},
        {"eps": "ten_times_too_large", "weight": "dropped"},
        {"statistic": "over_the_sequence", "weight": "plus_one"},
    ],
    ids=lambda pair: "-".join(pair.values()),
)
def test_two_mistakes_are_both_named(pair):
    assert names(of(mixed(**pair))) == list(pair.values())


def test_a_mistake_and_an_order_of_rounding_are_both_named():
    assert names(of(mixed(eps="outside", once=True))) == ["outside", "rounded_once", "rounded_once"]


def test_a_backward_that_follows_from_a_wrong_rstd_is_no_second_mistake():
    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            rstd = 1 / (x.float().square().mean(-1, keepdim=True).sqrt() + eps)
            ctx.save_for_backward(x, weight, rstd)
            return ((x * rstd).to(x.dtype) * weight).to(x.dtype)

        @staticmethod
        def backward(ctx, dy):
            return *faults.right_gradients(dy, *ctx.saved_tensors), None

    assert names(of(Norm.apply)) == ["outside"]


def test_a_mistake_forward_and_one_backward_are_both_named():
    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            ctx.save_for_backward(x, weight, faults.rstd(x, eps))
            return faults.eps_outside_the_root(x, weight, eps).to(x.dtype)

        @staticmethod
        def backward(ctx, dy):
            return *faults.dx_without_the_mean(dy, *ctx.saved_tensors), None

    assert names(of(Norm.apply)) == ["outside", "without_the_projection"]


@pytest.mark.parametrize(
    ("index", "name"), [(0, name) for name in DX if name != RIGHT] + [(1, name) for name in DWEIGHT if name != RIGHT]
)
def test_each_wrong_gradient_of_the_tables_is_told_from_all_others(index, name):
    def backward(dy, x, weight, rstd):
        right = list(faults.right_gradients(dy, x, weight, rstd))
        parts = Parts(*(tensor.double() for tensor in (dy, x, x * rstd, rstd, weight)))
        right[index] = (DX, DWEIGHT)[index][name].compute(parts).to(right[index].dtype)
        return right

    found = of(faults.with_backward(backward)).mistakes()
    assert {finding.part for finding in found} == {("dx", "dweight")[index]}
    assert found[0].name == name
    assert found[0].example


def test_none_of_the_known_mistakes_shows_the_worst_element():
    def norm(x, weight, eps):
        y = reference.rms_norm(x, weight, eps)
        return torch.where(torch.arange(x.shape[-1]) == 7, y * 2, y)

    found = of(norm)
    (finding,) = found.mistakes()
    assert (finding.part, finding.name, found.variant) == ("values", UNKNOWN, None)
    assert "Furthest off: y[" in finding.words
    assert ", 7] of x (" in finding.words
    for word in ("x is ", "the weight ", "its row's mean square ", "found ", "right "):
        assert word in finding.words
    assert finding.example.startswith("x (1, 2, 3, 4, 5, 6, 7, 8), weight 1")  # the narrowest that has a column 7


def test_a_backward_of_no_known_mistake_says_where_it_is_furthest_off():
    def backward(dy, x, weight, rstd):
        dx, dweight = faults.right_gradients(dy, x, weight, rstd)
        return dx * 1.01, dweight

    (finding,) = of(faults.with_backward(backward)).mistakes()
    assert (finding.part, finding.name) == ("dx", UNKNOWN)
    assert "Furthest off: dx[" in finding.words


def test_a_norm_of_few_bits_is_called_imprecise():
    def norm(x, weight, eps):
        y = reference.rms_norm(x, weight, eps)
        return y * (1 + 2e-5) if x.dtype == torch.float32 else y

    assert names(of(norm))[:1] == ["imprecise"]


@pytest.mark.parametrize("form", FORMED, ids=str)
@pytest.mark.parametrize("name", ["reference", "torch", pytest.param("triton", marks=needs_triton)])
def test_a_right_norm_is_never_named(name, form):
    backend = kernels.load_backend(name, CPU, form)
    interpreted = name == "triton" and emulated_gpu() is None and "interpreter" in backend.description
    found = identify(backend, CPU, adds=True, interpreted=interpreted)
    assert found.mistakes() == []
    assert found.values_are_right()
    parts = {finding.part for finding in found.findings}
    assert parts >= {"values", "rounding in float16", "rounding in bfloat16", "strides", "dx", "dweight"}


@pytest.mark.long
@needs_compiler
def test_a_right_norm_that_is_compiled_is_not_named():
    torch._dynamo.reset()
    assert identify(kernels.load_backend("compile", CPU), CPU, backward=False).mistakes() == []


def test_another_right_norm_is_not_named():
    assert names(of(norms.right)) == []
    for control in loss_parity.CONTROLS:
        assert names(of(getattr(loss_parity, control))) == []


def test_bfloat16_that_is_cut_off_is_a_mistake_but_in_the_interpreter():
    def norm(x, weight, eps):
        return variants.ROUNDINGS["truncated"][1](Variant(), x, weight, eps, LLAMA)

    backend = Backend("a norm", norm, add_then(norm))
    found = identify(backend, CPU, backward=False)
    assert names(found) == ["truncated"]
    assert identify(backend, CPU, backward=False, interpreted=True).mistakes() == []


def test_a_weight_rounded_to_half_precision_is_named():
    def norm(x, weight, eps):
        return reference.rms_norm(x, weight.to(x.dtype), eps)

    assert names(of(norm))[:2] == ["weight_in_half_precision"] * 2


def test_the_smallest_row_of_each_order_of_rounding():
    found = of(faults.rounding_in_the_other_order).mistakes()
    assert "25.3% of the float16 elements differ, all of them equal to that variant's" in found[0].words
    example = "x (3, 4), bfloat16, weight 3, eps 1e-05: found (2.547, 3.391), right (2.547, 3.406)"
    assert found[1].example == example  # as in the table of kernels/README.md


def test_a_form_of_nobodys_is_told_too():
    form = Form(0.3, False)
    assert names(of(partial(reference.rms_norm, **form._asdict()), form)) == []
    assert names(of(partial(reference.rms_norm, **FORMS["torch"]._asdict()))) == ["rounded_once", "rounded_once"]
