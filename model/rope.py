"""Rotary position embedding (Jianlin Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864).

Each head's vector is taken as head_dim / 2 points in the plane, and point i at position p is turned by the
angle p * theta^(-2i / head_dim). So the product of a query and a key depends on their distance alone.
Point i is made of elements i and i + head_dim / 2: Hugging Face's layout of a head. (Meta's own files pair
neighbours, 2i and 2i + 1, with the rows of q_proj and k_proj ordered to match.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, (T, head_dim) in float32, for positions (T,).

    Computed for each call and kept in no buffer, so that casting the model can't round the angles: in bfloat16
    positions 4095 and 4096 are one.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    inv_freq = 1.0 / theta**exponents  # (head_dim / 2,)
    angles = positions.float()[:, None] * inv_freq  # (T, head_dim / 2)
    angles = torch.cat((angles, angles), dim=-1)  # both halves of a head turn by the same angles
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x, (B, n_heads, T, head_dim), by the table's angles; the result has x's dtype."""
    cos, sin = (part.to(x.dtype) for part in table)  # (T, head_dim)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
