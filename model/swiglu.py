"""SwiGLU feed-forward (Noam Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import LlamaConfig
from model.family import SILU


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), (..., hidden_size) -> (..., hidden_size). Gemma takes gelu for silu (GeGLU)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = F.silu if config.family.activation == SILU else partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
