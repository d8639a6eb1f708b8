"""Rotary position embedding (Jianlin Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864).

Each head's vector is taken as head_dim / 2 points in the plane, and point i at position p is turned by the
angle p * theta^(-2i / head_dim). So the product of a query and a key depends only on their distance.
Point i is made of elements i and i + head_dim / 2, which is Hugging Face's layout of a head. (Meta's own files pair
neighbours, 2i and 2i + 1, with the rows of q_proj and k_proj ordered to match.)

RoPE scaling turns points more slowly, so that positions beyond the trained length stay within the trained angles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import LlamaConfig


def rotary_table(positions: Tensor, config: LlamaConfig, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, (..., T, head_dim / 2) in float32, for positions (..., T) in a text of `length`.

    Computed at each call instead of kept in a buffer, so that casting the model cannot round the angles: in bfloat16
    positions 4095 and 4096 are the same number.
    """
    inv_freq, amplitude = inverse_frequencies(config, length, positions.device)
    angles = positions.float()[..., None] * inv_freq  # (..., T, head_dim / 2)
    return angles.cos() * amplitude, angles.sin() * amplitude


def inverse_frequencies(config: LlamaConfig, length: int, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position, (head_dim / 2,) in float32, and the factor of cos and sin.

    `length` is that of the whole text, on which dynamic scaling depends.
    """
    scaling = config.rope_scaling or {"rope_type": "default"}
    kind, factor, theta = scaling["rope_type"], scaling.get("factor", 1.0), config.rope_theta
    dim, trained = config.head_dim, config.max_position_embeddings
    if kind == "dynamic" and length > trained:
        # "NTK-aware", by u/bloc97 and u/emozilla: another theta, by which the slowest point turns `factor` times slower
        theta *= (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
    if kind == "linear":  # position interpolation, Shouyuan Chen et al., 2023, https://arxiv.org/abs/2306.15595
        return inv_freq / factor, 1.0
    if kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, scaling, config)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, scaling: dict[str, float]) -> Tensor:
    """Llama 3.1's scaling (https://arxiv.org/abs/2407.21783): slow points that turn seldom within the trained length.

    Points that turn at least high_freq_factor times keep their speed, those that turn at most low_freq_factor times
    are slowed by `factor`, and those between are interpolated.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / scaling["factor"]


def _yarn(inv_freq: Tensor, scaling: dict[str, float], config: LlamaConfig) -> tuple[Tensor, float]:
    """YaRN (Bowen Peng et al., 2023, https://arxiv.org/abs/2309.00071), section 3.2: linear in the point's number.

    The paper's attention temperature becomes a factor of cos and sin (section 3.4).
    """
    factor, dim = scaling["factor"], config.head_dim
    trained = scaling.get("original_max_position_embeddings", config.max_position_embeddings)

    def point(turns: float) -> float:
        """Number of the point, between two whole ones, that turns this often within the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    fast, slow = point(scaling.get("beta_fast", 32.0)), point(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, dim - 1)
    if fast == slow:
        slow += 0.001
    points = torch.arange(dim // 2, device=inv_freq.device).float()
    slowed = ((points - fast) / (slow - fast)).clamp(0, 1)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        amplitude = temperature(1.0)
        if "mscale" in scaling and "mscale_all_dim" in scaling:
            amplitude = temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return slowed * inv_freq / factor + (1 - slowed) * inv_freq, amplitude


def rotate(x: Tensor, table: tuple[Tensor, Tensor], in_float32: bool = False) -> Tensor:
    """Rotate x, (B, n_heads, T, head_dim), by the table's angles, in its dtype or at least in float32; returns x's."""
    dtype = torch.promote_types(x.dtype, torch.float32) if in_float32 else x.dtype
    cos, sin = (part.to(dtype) for part in table)  # (T, head_dim / 2), or (B, 1, T, head_dim / 2)
    a, b = x.to(dtype).chunk(2, dim=-1)
    # Joined in the projection's order in memory, (B, T, n_heads, head_dim): attention's output takes that over from q,
    # and o_proj then reads it without a copy.
    halves = (half.transpose(1, 2) for half in (a * cos - b * sin, b * cos + a * sin))
    return torch.cat(tuple(halves), dim=-1).transpose(1, 2).to(x.dtype)
