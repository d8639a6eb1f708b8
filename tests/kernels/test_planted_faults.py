"""Each of the classic mistakes is caught by the check that is named beside it."""

import pytest
import torch

import kernels
from model.norm import RMSNorm
from tests.helpers import CPU
from tests.kernels import contract, faults

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
    faults.rounding_in_the_other_order: (contract.half_precision_rounds_before_the_weight, torch.bfloat16),
    faults.mean_removed_as_well: (contract.the_mean_is_not_removed,),
    faults.strides_ignored: (contract.strides_change_nothing, "slice of a fused projection"),
    faults.nan: (contract.values_are_the_formula, torch.float32, (7, 48)),
    faults.columns_beyond_a_power_of_two_ignored: (contract.any_width, 4097),
}
WRONG_GRADIENTS = {
    faults.dx_without_the_mean: (contract.gradients_are_those_of_the_formula, torch.float32, (7, 48)),
    faults.dweight_of_one_block: (contract.gradients_are_those_of_the_formula, torch.float32, (600, 40)),
    faults.dweight_summed_in_half_precision: (contract.dweight_is_summed_in_float32, torch.float16),
    faults.dweight_of_the_unrounded_x_hat: (contract.dweight_is_made_of_the_rounded_x_hat,),
    faults.dy_overwritten: (contract.inputs_are_left_as_they_were,),
}
WRONG_ADDITIONS = {
    faults.h_not_rounded: (torch.float16, torch.float16, (6, 48)),
    faults.gradient_of_h_dropped: (torch.float32, torch.float32, (6, 48)),
    faults.residual_added_in_place: (torch.float32, torch.float32, (6, 48)),
}


@pytest.mark.parametrize("fault", WRONG_NORMS, ids=lambda fault: fault.__name__)
def test_a_wrong_norm_is_caught(fault):
    check, *arguments = WRONG_NORMS[fault]
    check(kernels.load_backend("reference", CPU).rms_norm, *arguments)  # the right norm passes the same check
    with pytest.raises(AssertionError):
        check(fault, *arguments)


@pytest.mark.parametrize("fault", WRONG_GRADIENTS, ids=lambda fault: fault.__name__)
def test_a_wrong_gradient_is_caught(fault):
    check, *arguments = WRONG_GRADIENTS[fault]
    check(faults.with_backward(faults.right_gradients), *arguments)
    with pytest.raises(AssertionError):
        check(faults.with_backward(fault), *arguments)


@pytest.mark.parametrize("fault", WRONG_ADDITIONS, ids=lambda fault: fault.__name__)
def test_a_wrong_addition_is_caught(fault):
    right = kernels.load_backend("reference", CPU)
    contract.add_rms_norm_is_the_two_steps(right, *WRONG_ADDITIONS[fault])
    with pytest.raises(AssertionError):
        contract.add_rms_norm_is_the_two_steps(right._replace(add_rms_norm=fault), *WRONG_ADDITIONS[fault])


def test_a_unit_offset_formed_in_half_precision_is_caught():
    """1 + 2^-12 is 1 in float16."""
    pytest.importorskip("triton", reason="triton is made for Linux alone")
    from kernels.triton_rms_norm import rms_norm

    contract.is_gemmas_norm(rms_norm, torch.float16)
    with pytest.raises(AssertionError):
        contract.is_gemmas_norm(
            lambda x, weight, eps, **options: rms_norm(x, 1 + weight, eps, round_once=True), torch.float16
        )


def test_one_norm_shared_by_all_layers_is_caught(config, make_model):
    model = make_model(config)
    contract.every_sub_layer_owns_its_norm(model)
    shared = RMSNorm(config.hidden_size, config.rms_norm_eps, model.norm.backend)
    for layer in model.layers:
        layer.attention_norm = layer.ffn_norm = shared
    model.norm = shared
    with pytest.raises(AssertionError):
        contract.every_sub_layer_owns_its_norm(model)
