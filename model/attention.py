"""Grouped-query attention (Joshua Ainslie et al., 2023, https://arxiv.org/abs/2305.13245) and its cache.

Query heads share key/value heads in groups: with 4 query and 2 key/value heads, queries 0 and 1 read 0, and
2 and 3 read 1. The cache then holds num_key_value_heads instead of num_attention_heads rows a position.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import LlamaConfig
from model.rope import rotate


class KVCache:
    """Keys and values of one layer: (B, num_key_value_heads, capacity, head_dim), of which `length` are full."""

    def __init__(
        self, config: LlamaConfig, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (batch_size, config.num_key_value_heads, capacity, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, (B, num_key_value_heads, T, head_dim); returns all positions so far, as views."""
        start, end = self.length, self.length + k.size(2)
        if end > self.k.size(2):
            raise ValueError(f"the cache holds {self.k.size(2)} positions and is asked to hold {end}")
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class Attention(nn.Module):
    """Causal self-attention, (B, T, hidden_size) -> (B, T, hidden_size)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, n_heads, T, head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, num_key_value_heads, S, head_dim): the S - T positions before, and these T

        n_queries, n_keys = q.size(2), k.size(2)
        mask = None
        if 1 < n_queries < n_keys:  # query i stands at position i + S - T; is_causal would take it to stand at i
            mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=x.device).tril(n_keys - n_queries)
        causal = n_queries == n_keys  # else one query that sees every key, or the mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, n_heads * head_dim) -> (B, T, hidden_size)
