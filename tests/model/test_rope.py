"""model/rope.py: the angles, the rotation, and that no cast of the model reaches them."""

from itertools import product

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model.config import LlamaConfig
from model.rope import inverse_frequencies, rotary_table, rotate
from tests.helpers import CPU


def shaped(head_dim, theta, **changed):
    return LlamaConfig(
        vocab_size=3, hidden_size=8, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=head_dim, rms_norm_eps=3e-3, rope_theta=theta,
        **{"max_position_embeddings": 4096} | changed,
    )  # fmt: skip


def table(positions, head_dim, theta):
    return rotary_table(positions, shaped(head_dim, theta), 4096)


def exact_angles(positions, head_dim, theta):
    """p * theta^(-2i / head_dim) in float64, (T, head_dim / 2)."""
    return np.outer(positions, theta ** (-2.0 * np.arange(head_dim // 2) / head_dim))


def assert_exact(table, positions, head_dim, theta, dtype=torch.float32):
    """cos and sin differ from the exact ones by no more than their angle does in float32, and their own rounding."""
    angles = exact_angles(positions, head_dim, theta)
    # float32 rounds the exponent (times ln theta < 16), the power, its inverse and the product: less than 32 steps
    # of 2^-24 of the angle. Then cos and sin round once more, below 1.
    bound = 32 * 2.0**-24 * angles + 2.0**-23 + (dtype == torch.bfloat16) * 2.0**-9
    for part, exact in zip(table, (np.cos(angles), np.sin(angles)), strict=True):
        assert part.dtype == dtype
        assert (np.abs(part.double().numpy() - exact) <= bound).all()


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10000.0), (12, 5000.0), (64, 10000.0), (128, 500000.0)])
def test_cos_and_sin_are_those_of_the_formula_in_float64(head_dim, theta):
    positions = [0, 1, 2, 255, 256, 257, 4095]
    assert_exact(table(torch.tensor(positions), head_dim, theta), positions, head_dim, theta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "theta"), [(12, 5000.0), (128, 500000.0)])
def test_rotation_is_transformers_bit_for_bit(dtype, head_dim, theta):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 300, head_dim, dtype=dtype), torch.randn(2, 2, 300, head_dim, dtype=dtype)
    positions = torch.arange(3900, 4200)
    config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    turns = table(positions, head_dim, theta)
    for x, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        ours = rotate(x, turns)
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_rotation_turns_each_pair_of_halves_by_its_angle():
    """Elements i and i + head_dim / 2 are one complex number, multiplied by e^(i angle)."""
    torch.manual_seed(0)
    positions, x = torch.tensor([0, 1, 7, 63]), torch.randn(2, 3, 4, 12, dtype=torch.float64)
    pairs = x.numpy()[..., :6] + 1j * x.numpy()[..., 6:]
    turned = pairs * np.exp(1j * exact_angles(positions, 12, 5000.0))
    ours = rotate(x, table(positions, 12, 5000.0)).numpy()
    # the table is float32: 32 steps of the angle, as above, times |x| < 5
    np.testing.assert_allclose(ours[..., :6] + 1j * ours[..., 6:], turned, rtol=0, atol=5 * 64 * 32 * 2**-24)


def test_query_times_key_depends_on_their_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)

    def product(p, s):
        at_p, at_s = (table(torch.tensor([position]), 64, 10000.0) for position in (p, s))
        return (rotate(q, at_p) * rotate(k, at_s)).sum().item()

    distances = [0, 1, 5, 40]
    # |q| |k| < 100, times the error of two float32 angles below 200: 2 * 200 * 32 * 2^-24 = 8e-4 at most, and the
    # products of other distances must lie further off than that
    for p in (40, 100, 200):
        assert [product(p, p - d) for d in distances] == pytest.approx(
            [product(40, 40 - d) for d in distances], abs=8e-4
        )
    assert min(abs(product(40, 39) - product(40, s)) for s in (41, 40, 35, 0)) > 0.1


@pytest.fixture
def table_inside_model(make_model):
    """The table that a layer of a model cast to bfloat16 is handed for one token at a position."""
    model = make_model(shaped(128, 10000.0)).to(torch.bfloat16)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[2].rope))

    @torch.no_grad()
    def table(position):
        caches = model.new_cache(1, 4096)
        caches[0].length = position
        model(torch.tensor([[1]]), caches)
        return seen[-1]

    return table


@pytest.mark.parametrize("position", [1, 256, 257, 4095])
def test_angles_in_a_model_cast_to_bfloat16_are_those_of_float32(table_inside_model, position):
    """In bfloat16 position 4095 would be 4096, and 257 would be 256."""
    assert_exact(table_inside_model(position), [position], 128, 10000.0, torch.bfloat16)


@pytest.mark.parametrize(("p", "s"), [(256, 257), (4095, 4094)])
def test_neighbouring_positions_stay_apart_in_bfloat16(table_inside_model, p, s):
    x = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16)
    turned, other = (rotate(x, table_inside_model(position)) for position in (p, s))
    # pair 0 turns by one radian: 2 sin(1/2) |(1, 1)| = 1.36 between the two points, and x has bfloat16's 2^-8
    assert (turned - other)[..., [0, 64]].norm().item() == pytest.approx(2**1.5 * np.sin(0.5), abs=4 * 2**-8)


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 128},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, all keys": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 100, "beta_fast": 20.0,
                       "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 1.3, "truncate": False},
    "yarn, attention_factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                               "attention_factor": 1.7},
    "yarn, no length": {"rope_type": "yarn", "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("length", [100, 512, 700])
@pytest.mark.parametrize("head_dim", [12, 64])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_angles_are_those_of_transformers(name, head_dim, length):
    config = shaped(head_dim, 5000.0, max_position_embeddings=512, rope_scaling=SCALINGS[name])
    theirs = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=512, rope_parameters=SCALINGS[name] | {"rope_theta": 5000.0}
    )
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    # both are float32: an angle differs by its own roundings, 32 steps as above, and YaRN's factor is below 2
    bound = 2 * (32 * 2.0**-24 * length + 2.0**-23)
    for ours, their in zip(rotary_table(positions, config, length), (cos[0], sin[0]), strict=True):
        torch.testing.assert_close(ours, their[:, : head_dim // 2], rtol=0, atol=bound)  # theirs has them twice
    plain = rotary_table(positions, shaped(head_dim, 5000.0), length)
    changed = (rotary_table(positions, config, length)[0] - plain[0]).abs().max()
    assert (changed > 100 * bound) == (name != "dynamic" or length > 512)


def grid(**values):
    return [dict(zip(values, row, strict=True)) for row in product(*values.values())]


# The ends of YaRN's ramp: apart, the same (0/0 at a point, or between two), swapped, and beyond either end of a head.
TURNS = [{}, {"beta_fast": 4.0, "beta_slow": 4.0}, {"beta_fast": 1.5}, {"beta_fast": 1.0, "beta_slow": 32.0}]
MSCALES = [{"mscale": 0.8}, {"mscale_all_dim": 1.3}, {"mscale": 0.8, "mscale_all_dim": 1.3}]
GRIDS = {
    "linear": grid(factor=[0.5, 4.0]),
    "dynamic": grid(factor=[1.0, 2.5]),
    "llama3": grid(
        factor=[1.0, 8.0], low_freq_factor=[0.5, 1.0], high_freq_factor=[2.0, 40.0],
        original_max_position_embeddings=[4, 128, 8192],
    ),
    "yarn": [
        {"factor": factor, "original_max_position_embeddings": original, **truncate, **rest}
        for factor, original in product([0.5, 16.0], [5, 128, 4096, 10**7])
        for rest, truncate in [*product(TURNS, ({}, {"truncate": False})), *product(MSCALES, [{}])]
    ],
}  # fmt: skip


@pytest.mark.parametrize("theta", [20.0, 5000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [4, 12, 64])
@pytest.mark.parametrize("kind", GRIDS)
def test_frequencies_are_those_of_transformers_for_all_settings(kind, head_dim, theta):
    rope = {"rope_type": "default", "rope_theta": theta}
    theirs = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=512, rope_parameters=rope)
    plain, _ = inverse_frequencies(shaped(head_dim, theta), 1, CPU)
    for settings in GRIDS[kind]:
        theirs.rope_parameters = {"rope_type": kind, "rope_theta": theta, **settings}
        ours = shaped(head_dim, theta, max_position_embeddings=512, rope_scaling={"rope_type": kind, **settings})
        for length in (511, 512, 513, 2000) if kind == "dynamic" else (2000,):
            inv_freq, amplitude = inverse_frequencies(ours, length, CPU)
            expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, CPU, seq_len=length)
            assert amplitude == factor, settings
            # as above, of the unscaled frequency, by which both are blended; a factor of 0.5 doubles it
            assert ((inv_freq - expected).abs() <= 2 * 32 * 2.0**-24 * plain).all(), (settings, length)


def test_llama_3_2_leaves_fast_pairs_slows_slow_ones_and_blends_three():
    """Meta's Llama 3.2: 32 times slower, by the published frequencies."""
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    inv_freq, amplitude = inverse_frequencies(shaped(64, 500000.0, rope_scaling=scaling), 1, CPU)
    plain, _ = inverse_frequencies(shaped(64, 500000.0), 1, CPU)
    assert amplitude == 1
    assert torch.equal(inv_freq[:15], plain[:15])
    assert torch.equal(inv_freq[18:], plain[18:] / 32)
    assert inv_freq[[15, 16, 17, 31]].tolist() == pytest.approx(
        [1.290548e-3, 4.295568e-4, 9.708288e-5, 9.418307e-8], rel=1e-6
    )
