"""model/swiglu.py against the formula in float64 and against transformers' LlamaMLP."""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP

from model.swiglu import SwiGLU


@pytest.fixture
def feed_forward(config):
    torch.manual_seed(0)
    return SwiGLU(config)


@pytest.fixture
def x(config):
    return torch.randn(2, 7, config.hidden_size, generator=torch.Generator().manual_seed(1))


def formula(x, gate, up, down):
    """down(silu(gate(x)) * up(x)) in float64, with silu(z) = z / (1 + e^-z)."""
    x, gate, up, down = (tensor.detach().double().numpy() for tensor in (x, gate, up, down))
    z = x @ gate.T
    return z / (1 + np.exp(-z)) * (x @ up.T) @ down.T


# Two chained sums, of 48 and of 80 terms, whose roundings of 2^-24 add up at random: sqrt(48) + sqrt(80) of them is the
# usual error, and a factor of 4 covers the largest of 672 elements.
TOLERANCE = 4 * (48**0.5 + 80**0.5) * 2**-24


def largest_difference(ours, exact):
    return np.abs(ours.detach().double().numpy() - exact).max() / np.abs(exact).max()


def test_feed_forward_is_the_formula_in_float64(feed_forward, x):
    f = feed_forward
    exact = formula(x, f.gate_proj.weight, f.up_proj.weight, f.down_proj.weight)
    assert largest_difference(f(x), exact) < TOLERANCE


def test_gate_and_up_swapped_would_be_caught(feed_forward, x):
    f = feed_forward
    swapped = formula(x, f.up_proj.weight, f.gate_proj.weight, f.down_proj.weight)
    assert largest_difference(f(x), swapped) > 1000 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_feed_forward_is_transformers_bit_for_bit(config, feed_forward, x, dtype):
    """transformers does the same operations in the same order, so the roundings are the same."""
    theirs = LlamaMLP(transformers.LlamaConfig(**config.to_dict()))
    theirs.load_state_dict(feed_forward.state_dict())
    ours = feed_forward.to(dtype)(x.to(dtype))
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs.to(dtype)(x.to(dtype)))
