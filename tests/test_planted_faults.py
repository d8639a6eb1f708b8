"""The classic mistakes in an RMSNorm, each planted and caught by the test that is named beside it."""

import pytest
import torch

import kernels
from model.norm import RMSNorm
from tests import test_norm, test_norm_contract
from tests.conftest import CPU


def rstd(x, eps, axis=-1):
    return torch.rsqrt(x.float().square().mean(axis, keepdim=True) + eps)


def square_of_the_mean(x, weight, eps):
    return x * torch.rsqrt(x.mean(-1, keepdim=True).square() + eps) * weight


def over_the_batch(x, weight, eps):
    return x * rstd(x, eps, axis=0).to(x.dtype) * weight


def over_the_sequence(x, weight, eps):
    return x * rstd(x, eps, axis=-2).to(x.dtype) * weight


def keepdim_forgotten(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1) + eps) * weight


def eps_missing(x, weight, eps):
    return (x * rstd(x, 0.0)).to(x.dtype) * weight


def eps_outside_the_root(x, weight, eps):
    return (x / (x.float().square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype) * weight


def eps_of_another_model(x, weight, eps):
    return (x * rstd(x, 1e-6)).to(x.dtype) * weight


def statistics_in_half_precision(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def weight_dropped(x, weight, eps):
    return (x * rstd(x, eps)).to(x.dtype)


def rounding_in_the_other_order(x, weight, eps):
    return (x * rstd(x, eps) * weight.float()).to(x.dtype)


def mean_removed_as_well(x, weight, eps):
    x = x - x.mean(-1, keepdim=True)
    return (x * rstd(x, eps)).to(x.dtype) * weight


FAULTS = {
    square_of_the_mean: ("test_values_are_the_formula", (torch.float32, (7, 48))),
    over_the_batch: ("test_a_row_depends_on_itself_alone", ()),
    over_the_sequence: ("test_a_row_depends_on_itself_alone", ()),
    keepdim_forgotten: ("test_values_are_the_formula", (torch.float32, (48, 48))),  # a square broadcasts in silence
    eps_missing: ("test_eps_of_the_model_shows_in_small_rows", (1e-5, 0.30151134, torch.float32)),
    eps_outside_the_root: ("test_eps_of_the_model_shows_in_small_rows", (1e-5, 0.30151134, torch.float32)),
    eps_of_another_model: ("test_eps_of_the_model_shows_in_small_rows", (1e-5, 0.30151134, torch.float16)),
    statistics_in_half_precision: ("test_statistics_are_float32_in_half_precision", ()),
    weight_dropped: ("test_values_are_the_formula", (torch.float32, (7, 48))),
    rounding_in_the_other_order: ("test_half_precision_rounds_before_the_weight", (torch.bfloat16,)),
    mean_removed_as_well: ("test_the_mean_is_not_removed", ()),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_norm_is_caught(fault):
    name, arguments = FAULTS[fault]
    check = getattr(test_norm_contract, name)
    check(kernels.load_backend("reference", CPU).rms_norm, *arguments)  # the right norm passes the same test
    with pytest.raises(AssertionError):
        check(fault, *arguments)


def test_one_norm_shared_by_all_layers_is_caught(config, make_model):
    model = make_model(config)
    shared = RMSNorm(config.hidden_size, config.rms_norm_eps, model.norm.backend)
    for layer in model.layers:
        layer.attention_norm = layer.ffn_norm = shared
    model.norm = shared
    with pytest.raises(AssertionError):
        test_norm.test_every_sub_layer_owns_its_norm(config, lambda config: model)
