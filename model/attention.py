"""Grouped-query attention (Joshua Ainslie et al., 2023, https://arxiv.org/abs/2305.13245) and its cache.

Query heads share key/value heads in groups: with 4 query and 2 key/value heads, query heads 0 and 1 read key/value head
0, and 2 and 3 read 1. So the cache holds num_key_value_heads instead of num_attention_heads rows a position. With a
sliding window (Albert Q. Jiang et al., "Mistral 7B", 2023, https://arxiv.org/abs/2310.06825) a query sees the last
`sliding_window` keys up to its own.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import Backend
from model.config import LlamaConfig
from model.norm import RMSNorm
from model.rope import rotary_table, rotate

LOGITS = 2**24  # B * n_heads * T * T, up to which short_attention trains faster than PyTorch's operator


@dataclass
class Span:
    """Positions of the T tokens of a call, and the S keys that they may attend to. Every layer gets the same.

    `mask` is True where a query may attend to a key; None means plain causal attention.
    """

    rope: tuple[Tensor, Tensor]  # cos and sin, (T, head_dim / 2) or (B, 1, T, head_dim / 2)
    slots: Tensor  # (T,): the cache's rows to which keys and values go
    keys: slice  # the cache's rows that are read, S of them
    mask: Tensor | None  # (T, S) or (B, 1, T, S)

    def become(self, other: Span) -> None:
        """Take the values of a span of the same shapes, in the memory of this one's tensors."""
        mine, others = ((*span.rope, span.slots, span.mask) for span in (self, other))
        for tensor, new in zip(mine, others, strict=True):
            if tensor is not None and new is not None:
                tensor.copy_(new)


def plain_span(config: LlamaConfig, start: int, end: int, dtype: torch.dtype, device: torch.device) -> Span:
    """Span of tokens start to end - 1, which follow those in the cache; cos and sin rounded to `dtype`."""
    slots, keys = torch.arange(start, end, device=device), _keys_seen(config, start, end)
    rope = _rounded(config, rotary_table(slots, config, end), dtype)
    if end - start == 1 or end - start == end <= (config.sliding_window or end):
        return Span(rope, slots, keys, None)  # one query that sees all keys, or as many queries as keys
    return Span(rope, slots, keys, _mask(slots, keys, config.sliding_window))


def padded_span(config: LlamaConfig, start: int, end: int, dtype: torch.dtype, padding: Tensor) -> Span:
    """Span of a left-padded batch. `padding`, (B,): number of left-padding tokens in each sequence.

    A sequence's positions count from the end of its padding.
    """
    slots, keys = torch.arange(start, end, device=padding.device), _keys_seen(config, start, end)
    rope = _padded_rope(config, slots, end, dtype, padding)
    return Span(rope, slots, keys, _mask(slots, keys, config.sliding_window, padding))


def step_span(
    config: LlamaConfig, position: int, n_keys: int, dtype: torch.dtype, device: torch.device, padding: Tensor | None
) -> Span:
    """Span of one token a sequence for the compiled step, which always reads the cache's first `n_keys` rows.

    The mask hides the keys that are not there yet, so that few shapes are compiled.
    """
    slots, keys = torch.tensor([position], device=device), slice(0, n_keys)
    if padding is None:
        rope = _rounded(config, rotary_table(slots, config, position + 1), dtype)
    else:
        rope = _padded_rope(config, slots, position + 1, dtype, padding)
    return Span(rope, slots, keys, _mask(slots, keys, config.sliding_window, padding))


def _keys_seen(config: LlamaConfig, start: int, end: int) -> slice:
    """Rows of the cache from the first key that the first query sees."""
    return slice(max(0, start + 1 - (config.sliding_window or end)), end)


def _padded_rope(
    config: LlamaConfig, slots: Tensor, end: int, dtype: torch.dtype, padding: Tensor
) -> tuple[Tensor, Tensor]:
    """cos and sin, (B, 1, T, head_dim / 2), by the positions and (for dynamic RoPE) the length of each sequence."""
    rows = [rotary_table((slots - n).clamp(min=0), config, max(1, end - n)) for n in padding.tolist()]
    cos, sin = (torch.stack(part)[:, None] for part in zip(*rows, strict=True))
    return _rounded(config, (cos, sin), dtype)


def _rounded(config: LlamaConfig, table: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin in `dtype`, unless the model's family rotates in float32."""
    return table if config.family.rotates_in_float32 else (table[0].to(dtype), table[1].to(dtype))


def _mask(slots: Tensor, keys: slice, window: int | None, padding: Tensor | None = None) -> Tensor:
    """True where the query at a slot, (T,), may attend to a key: (T, S), or (B, 1, T, S) with padding."""
    query, key = slots[:, None], torch.arange(keys.start, keys.stop, device=slots.device)
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if padding is not None:  # a padding token sees itself, since a softmax over nothing is NaN
        seen = seen & (key >= padding[:, None, None, None]) | (key == query)
    return seen


class KVCache:
    """Keys and values of one layer, (B, num_key_value_heads, capacity, head_dim), of which `length` rows are filled."""

    def __init__(
        self, config: LlamaConfig, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (batch_size, config.num_key_value_heads, capacity, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    def update(self, k: Tensor, v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Put k and v, (B, num_key_value_heads, T, head_dim), into the span's slots; return views of its keys' rows."""
        self.k.index_copy_(2, span.slots, k)
        self.v.index_copy_(2, span.slots, v)
        return self.k[:, :, span.keys], self.v[:, :, span.keys]

    def first(self, n_keys: int) -> KVCache:
        """A cache of the first `n_keys` rows, in the same memory."""
        part = copy(self)
        part.k, part.v = self.k[:, :, :n_keys], self.v[:, :, :n_keys]
        return part


class Attention(nn.Module):
    """Causal self-attention, (B, T, hidden_size) -> (B, T, hidden_size)."""

    def __init__(self, config: LlamaConfig, norm: Backend) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        family, bias = config.family, config.attention_bias or config.family.qkv_bias
        self.rotates_in_float32 = family.rotates_in_float32
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        scalar = config.query_pre_attn_scalar
        self.scale = config.attention_multiplier if scalar is None else scalar**-0.5
        self.cap = config.attn_logit_softcapping
        self.q_norm = self.k_norm = None
        if family.qk_norm is not None:
            each = family.qk_norm == "head"
            self.q_norm = RMSNorm(config.head_dim if each else query_size, config.rms_norm_eps, norm)
            self.k_norm = RMSNorm(config.head_dim if each else kv_size, config.rms_norm_eps, norm)

    def forward(self, x: Tensor, span: Span, cache: KVCache | None = None) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # (B, T, n_heads * head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = normalize_heads(q, self.q_norm), normalize_heads(k, self.k_norm)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        wide = self.rotates_in_float32
        q, k = rotate(q, span.rope, wide), rotate(k, span.rope, wide)  # (B, n_heads, T, head_dim)
        if cache is not None:
            k, v = cache.update(k, v, span)  # (B, num_key_value_heads, S, head_dim)

        if self.cap is not None:
            y = capped_attention(q, k, v, span.mask, self.scale or self.head_dim**-0.5, self.cap)
        elif q.size(2) == 1:
            # The queries of a group take the place of a sequence, (B, num_key_value_heads, group, head_dim): each
            # reads its keys where they are, and none is copied for every query head.
            group = q.reshape(*k.shape[:2], -1, self.head_dim)
            y = F.scaled_dot_product_attention(group, k, v, attn_mask=span.mask, scale=self.scale).view(q.shape)
        elif span.mask is None and learns_from_few_logits(q, v):
            y = short_attention(q.to(v.dtype), k.to(v.dtype), v, self.scale or self.head_dim**-0.5)
        else:
            mask = {"attn_mask": span.mask, "is_causal": span.mask is None}
            y = F.scaled_dot_product_attention(q, k, v, **mask, scale=self.scale, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, n_heads * head_dim) -> (B, T, hidden_size)


def normalize_heads(x: Tensor, norm: RMSNorm) -> Tensor:
    """q or k, (B, T, n_heads * head_dim): each head on its own or all together, as wide as the norm's weight is.

    In tensor parallel x holds this process's heads, and may be a part of a row that is all of them.
    """
    rows = x.unflatten(-1, (-1, min(norm.weight.numel(), x.size(-1))))
    return norm(rows)[0].flatten(-2)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """x drawn smoothly into -cap to cap (Gemma 2's soft cap); None leaves it as it is."""
    return x if cap is None else torch.tanh(x / cap) * cap


def learns_from_few_logits(q: Tensor, v: Tensor) -> bool:
    """Whether training is faster by short_attention than by PyTorch's operator: in bfloat16 on a CPU.

    The operator's backward takes several times as long as two products do, until their logits are more than what a
    CPU's memory gives quickly. The two round differently, and a batch in parts may be computed by the other one.
    Sizes as in short_attention. In float16 the products could overflow, where the operator does not.
    """
    bfloat16 = v.device.type == "cpu" and v.dtype == torch.bfloat16
    return bfloat16 and v.requires_grad and q.shape[:3].numel() * q.size(2) <= LOGITS


def short_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention by two products, with all T x T logits in memory, in the dtype of all three.

    q, (B, n_heads, T, head_dim), k and v, (B, num_key_value_heads, T, head_dim) -> q's shape.
    """
    n_tokens = q.size(2)
    rows = (q * scale).reshape(*k.shape[:2], -1, q.size(-1))  # the queries of a group one below another
    logits = (rows @ k.mT).unflatten(2, (-1, n_tokens))  # (B, num_key_value_heads, group, T, T)
    ahead = torch.full((n_tokens, n_tokens), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = (logits + ahead).softmax(-1)  # which is computed in float32
    return (weights.flatten(2, 3) @ v).view(q.shape)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """Attention with a soft cap on its logits, which PyTorch's operator does not have; the softmax is float32 or wider.

    q, (B, n_heads, T, head_dim), k and v, (B, num_key_value_heads, S, head_dim) -> q's shape. `mask` as in Span.
    """
    groups = q.unflatten(1, (k.size(1), -1))  # (B, num_key_value_heads, group, T, head_dim)
    logits = capped(groups @ k.unsqueeze(2).mT * scale, cap)  # (B, num_key_value_heads, group, T, S)
    if mask is None:
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril(k.size(2) - q.size(2))
    logits = logits.masked_fill(~mask.unsqueeze(-3), -torch.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    return (logits.softmax(-1, dtype=wide).to(q.dtype) @ v.unsqueeze(2)).flatten(1, 2)
