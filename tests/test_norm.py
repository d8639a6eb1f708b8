"""The module around the norm: what it owns, and how the residual passes through it."""

import pytest
import torch

import kernels
from model.norm import RMSNorm
from tests.conftest import CPU


@pytest.fixture
def norm():
    torch.manual_seed(0)
    norm = RMSNorm(48, 3e-3, kernels.load_backend("reference", CPU))
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


def test_weight_starts_at_one():
    norm = RMSNorm(48, 3e-3, kernels.load_backend("reference", CPU))
    assert torch.equal(norm.weight, torch.ones(48))


def test_without_a_residual_the_input_becomes_it(norm):
    x = torch.randn(2, 5, 48)
    y, residual = norm(x)
    assert residual is x
    assert torch.equal(y, norm.backend.rms_norm(x, norm.weight, 3e-3))


def test_residual_is_added_before_the_norm(norm):
    x, residual = torch.randn(2, 5, 48), torch.randn(2, 5, 48)
    y, h = norm(x, residual)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, norm.backend.rms_norm(x + residual, norm.weight, 3e-3))


def test_a_float32_residual_stays_float32_beside_a_bfloat16_activation(norm):
    # What autocast hands over: the sub-layer's output in bfloat16, the stream in float32.
    y, h = norm(torch.randn(5, 48, dtype=torch.bfloat16), torch.randn(5, 48))
    assert (y.dtype, h.dtype) == (torch.float32, torch.float32)


def test_module_prints_what_it_computes(norm):
    assert repr(norm) == "RMSNorm(48, eps=0.003, backend=reference)"


def test_every_sub_layer_owns_its_norm(config, make_model):
    model = make_model(config)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len({norm.weight.data_ptr() for norm in norms}) == 2 * config.num_hidden_layers + 1


def test_every_norm_has_the_eps_of_the_config(config, make_model):
    norms = [module for module in make_model(config).modules() if isinstance(module, RMSNorm)]
    assert {norm.eps for norm in norms} == {config.rms_norm_eps}
