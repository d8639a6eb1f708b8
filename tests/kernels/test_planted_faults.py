"""Each of the classic mistakes is caught by the check that is named beside it."""

from functools import partial

import pytest
import torch

import kernels
from kernels import reference
from kernels.form import FORMS
from model.config import LlamaConfig
from model.llama import Block, Llama
from model.norm import Add, RMSNorm, norm_names
from tests.helpers import CPU, ROOT
from tests.kernels import contract, faults
from tests.model.checkpoint.folders import TOKENS, assert_same_logits, load, theirs_of

SHOWS_EPS = (1e-5, 0.30151134)
WRONG_NORMS = {
    faults.square_of_the_mean: (contract.values_are_the_formula, torch.float32, (7, 48)),
    faults.over_the_batch: (contract.a_row_depends_on_itself_alone,),
    faults.over_the_sequence: (contract.a_row_depends_on_itself_alone,),
    # where the batch is as large as D, a missing axis broadcasts without an error
    faults.keepdim_forgotten: (contract.values_are_the_formula, torch.float32, (48, 48)),
    faults.eps_missing: (contract.eps_of_the_model_shows_in_small_rows, torch.float32, SHOWS_EPS),
    faults.eps_outside_the_root: (contract.eps_of_the_model_shows_in_small_rows, torch.float32, SHOWS_EPS),
    faults.eps_of_another_model: (contract.eps_of_the_model_shows_in_small_rows, torch.float16, SHOWS_EPS),
    faults.statistics_in_half_precision: (contract.statistics_are_float32_in_half_precision,),
    faults.weight_dropped: (contract.values_are_the_formula, torch.float32, (7, 48)),
    faults.rounding_in_the_other_order: (contract.half_precision_rounds_in_the_order_of_the_form, torch.bfloat16),
    faults.mean_removed_as_well: (contract.the_mean_is_not_removed,),
    faults.strides_ignored: (contract.strides_change_nothing, "slice of a fused projection"),
    faults.nan: (contract.values_are_the_formula, torch.float32, (7, 48)),
    faults.columns_beyond_a_power_of_two_ignored: (contract.any_width, 4097),
}
WRONG_GRADIENTS = {
    faults.dx_without_the_mean: (contract.gradients_are_those_of_the_formula, torch.float32, (7, 48)),
    faults.dweight_of_one_block: (contract.gradients_are_those_of_the_formula, torch.float32, (600, 40)),
    faults.dweight_summed_in_half_precision: (contract.dweight_is_summed_in_float32, torch.float16),
    faults.dweight_of_the_unrounded_x_hat: (contract.dweight_is_made_of_what_the_weight_multiplies,),
    faults.dy_overwritten: (contract.inputs_are_left_as_they_were,),
}
WRONG_ADDITIONS = {
    faults.h_not_rounded: (torch.float16, torch.float16, (6, 48)),
    faults.gradient_of_h_dropped: (torch.float32, torch.float32, (6, 48)),
    faults.residual_added_in_place: (torch.float32, torch.float32, (6, 48)),
}
WITH_OFFSET = [form for form in contract.OTHER_FORMS if form.offset]
WRONG_FORMS = {
    faults.rounding_in_the_other_order: (contract.half_precision_rounds_in_the_order_of_the_form, torch.float16),
    faults.offset_formed_in_half_precision: (contract.half_precision_rounds_in_the_order_of_the_form, torch.float16),
    faults.offset_added_to_x_hat: (contract.values_are_the_formula, torch.float32, (7, 48)),
    faults.offset_forgotten: (contract.a_zero_weight_leaves_the_offset, torch.float32),
}


SAID = r"^(found .+, expected .+|read beyond the end)$"  # one line: what was found and what was expected


@pytest.mark.parametrize("fault", WRONG_NORMS, ids=lambda fault: fault.__name__)
def test_a_wrong_norm_is_caught(fault):
    check, *arguments = WRONG_NORMS[fault]
    check(kernels.load_backend("reference", CPU).rms_norm, *arguments)  # the right norm passes the same check
    with pytest.raises(AssertionError, match=SAID):
        check(fault, *arguments)


@pytest.mark.parametrize("fault", WRONG_GRADIENTS, ids=lambda fault: fault.__name__)
def test_a_wrong_gradient_is_caught(fault):
    check, *arguments = WRONG_GRADIENTS[fault]
    check(faults.with_backward(faults.right_gradients), *arguments)
    with pytest.raises(AssertionError, match=SAID):
        check(faults.with_backward(fault), *arguments)


@pytest.mark.parametrize("fault", WRONG_ADDITIONS, ids=lambda fault: fault.__name__)
def test_a_wrong_addition_is_caught(fault):
    right = kernels.load_backend("reference", CPU)
    contract.add_rms_norm_is_the_two_steps(right, *WRONG_ADDITIONS[fault])
    with pytest.raises(AssertionError, match=SAID):
        contract.add_rms_norm_is_the_two_steps(right._replace(add_rms_norm=fault), *WRONG_ADDITIONS[fault])


@pytest.mark.parametrize("form", WITH_OFFSET, ids=str)
@pytest.mark.parametrize("fault", WRONG_FORMS, ids=lambda fault: fault.__name__)
def test_a_wrong_form_is_caught(fault, form):
    check, *arguments = WRONG_FORMS[fault]
    check(kernels.load_backend("reference", CPU, form).rms_norm, *arguments, form=form)
    with pytest.raises(AssertionError):
        check(partial(fault, **form._asdict()), *arguments, form=form)


def test_a_failure_says_where_and_by_how_much():
    for check, *arguments in (
        (contract.eps_of_the_model_shows_in_small_rows, torch.float32, SHOWS_EPS),  # absolute bounds
        (contract.the_mean_is_not_removed,),  # torch's relative ones
    ):
        with pytest.raises(
            AssertionError, match=r"^found \S+ at \(0, \d+\), expected \S+ within \S+; \d+ of 1\d\d elements"
        ):
            check(faults.eps_outside_the_root, *arguments)
    with pytest.raises(AssertionError, match=r"the first at \(\d+, \d+\): found \S+, expected \S+$"):
        contract.half_precision_rounds_in_the_order_of_the_form(faults.rounding_in_the_other_order, torch.float16)
    with pytest.raises(AssertionError, match=r"^found dtype float32, expected dtype float16$"):
        contract.values_are_the_formula(lambda x, weight, eps: x.float(), torch.float16, (7, 48))
    with pytest.raises(AssertionError, match=r"^found NoneType, expected a tensor$"):
        contract.values_are_the_formula(lambda x, weight, eps: None, torch.float32, (7, 48))
    with pytest.raises(
        AssertionError, match=r"^found a gradient that is not the numerical one, expected it: Jacobian mismatch"
    ):
        contract.gradcheck_in_float64(faults.with_backward(faults.dx_without_the_mean))


def test_rounding_twice_is_caught_where_the_form_rounds_once():
    test_a_wrong_form_is_caught(faults.rounding_in_the_other_order, FORMS["torch"])


@pytest.mark.parametrize("form", WITH_OFFSET, ids=str)
def test_an_offset_forgotten_in_backward_is_caught(form):
    def with_the_offset(dy, x, weight, rstd):
        return faults.right_gradients(dy, x, weight + form.offset, rstd)

    def check(backward):
        norm = faults.with_backward(backward, **form._asdict())
        contract.gradients_are_those_of_the_formula(norm, torch.float32, (7, 48), form)

    check(with_the_offset)
    with pytest.raises(AssertionError):
        check(faults.right_gradients)


def test_the_other_order_changes_a_quarter_of_the_elements():
    for dtype in contract.HALF:
        with pytest.raises(AssertionError, match=r"found 2[56]\.\d\d% of the elements"):
            contract.half_precision_rounds_in_the_order_of_the_form(faults.rounding_in_the_other_order, dtype)


def share_one_norm(model):
    for layer in model.layers:
        layer.attention_norm = layer.ffn_norm = model.norm
    return model


def test_one_norm_shared_by_all_layers_is_caught(config, make_model):
    model = make_model(config)
    contract.every_sub_layer_owns_its_norm(model)
    with pytest.raises(AssertionError):
        contract.every_sub_layer_owns_its_norm(share_one_norm(model))


def post_norm_of_2017(block, x, residual, span, cache):
    """Add, then norm (Vaswani et al.): the norm's result is the stream itself."""
    x, _ = block.attention_output_norm(block.attention(x, span, cache), x)
    x, _ = block.ffn_output_norm(block.feed_forward(x), x)
    return x, None


@torch.no_grad()
def test_the_post_norm_of_2017_is_caught(tmp_path, config, monkeypatch):
    theirs = theirs_of(config, model_type="olmo2")
    theirs.save_pretrained(tmp_path)
    model, expected = load(tmp_path), theirs(TOKENS).logits
    assert_same_logits(model(TOKENS), expected)
    monkeypatch.setattr(Block, "forward", post_norm_of_2017)
    with pytest.raises(AssertionError):
        assert_same_logits(model(TOKENS), expected)


# The table of kernels/README.md: an x that shows the mistake (float32 and weight 1 where nothing else is said).
SMALLEST = {
    faults.square_of_the_mean: ([[1, -1]], "float32", 1),
    faults.over_the_batch: ([[1, 1], [3, 3]], "float32", 1),
    faults.over_the_sequence: ([[1, 1], [3, 3]], "float32", 1),
    faults.keepdim_forgotten: ([[1, 1], [3, 3]], "float32", 1),
    faults.eps_missing: ([[0, 0]], "float32", 1),
    faults.eps_outside_the_root: ([[1e-3, 1e-3]], "float32", 1),
    faults.eps_of_another_model: ([[1e-3, 1e-3]], "float32", 1),
    faults.statistics_in_half_precision: ([[300, 300]], "float16", 1),
    faults.weight_dropped: ([[1, 1]], "float32", 2),
    faults.rounding_in_the_other_order: ([[3, 4]], "bfloat16", 3),
    faults.mean_removed_as_well: ([[1, 3]], "float32", 1),
}


def show(rows):
    return ", ".join(f"({', '.join(f'{value:.4g}' for value in row)})" for row in rows.tolist())


def table_of_the_mistakes():
    lines = []
    for fault, (values, dtype, scale) in SMALLEST.items():
        x = torch.tensor(values, dtype=getattr(torch, dtype))
        weight = torch.full((2,), scale, dtype=x.dtype)
        said = ([dtype] if dtype != "float32" else []) + ([f"weight {scale}"] if scale != 1 else [])
        found = (show(norm(x, weight, 1e-5)) for norm in (fault, reference.rms_norm))
        lines.append([fault.__name__, ", ".join([show(x), *said]), *found])

    norm = RMSNorm(2, 1e-5, kernels.load_backend("reference", CPU))
    x, stream = torch.ones(1, 2), torch.full((1, 2), 3.0)
    with torch.no_grad():
        found = (show(result[0]) for result in (norm(x, stream), Add()(norm(x)[0], stream)))
    lines.append(["post_norm_of_2017", f"{show(x)}, added to {show(stream)}", *found])

    with torch.device("meta"):
        model = Llama(LlamaConfig.load(ROOT / "configs/llama2-7b.json"), norm.backend)
    right, wrong = len(norm_names(model)), len(norm_names(share_one_norm(model)))
    lines.append(["one_norm_shared", "LLaMA 2 7B", f"{wrong} weight", f"{right} weights"])
    rows = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in lines]
    return "\n".join(["| planted | x | wrong | right |", "|---|---|---|---|", *rows])


def test_the_readme_shows_a_small_input_of_each_mistake():
    assert SMALLEST.keys() <= WRONG_NORMS.keys()  # so that -k NAME finds a test
    assert table_of_the_mistakes() in (ROOT / "kernels/README.md").read_text(encoding="utf-8")
