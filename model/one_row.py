"""Inductor for a step of one token on a CPU, with its own sums where a library's product of one row is slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

LONG = 8192  # keys, beyond which the library's attention reads them faster than these sums


def compile_graph(graph: GraphModule, inputs: list[Tensor]) -> Any:
    """Compile with Inductor, which generates its own sums for products of one row, and so one kernel for a layer."""
    aten = torch.ops.aten
    own = {
        aten.mm.default: _mm,
        aten.addmm.default: _addmm,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    }
    # The rounding of a norm's x_hat is kept, as in kernels/compiled.py.
    patches = {"emulate_precision_casts": True, "size_asserts": False}
    return compile_fx(graph, inputs, config_patches=patches, decompositions=select_decomp_table() | own)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Product of (1, K) and (K, N), the transposed weight; NotImplemented leaves more rows to the library."""
    if a.size(0) != 1:
        return NotImplemented
    row = wide(a)
    row = row.as_strided(row.size(), row.stride())  # materialised, so that it is not converted again for every output
    return (wide(b.t()) * row).sum(-1)[None].to(a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    product = _mm(a, b)
    return product if product is NotImplemented else bias + product


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of a token's queries, (B, n_heads, group, head_dim), to S keys, rounded where the operator rounds.

    That is, the weights of the values before they are divided by their sum. Also the logarithm of that sum.
    """
    if dropout_p or is_causal or k.size(2) > LONG:
        return NotImplemented
    logits = (wide(q)[:, :, :, None] * wide(k)[:, :, None]).sum(-1)  # (B, n_heads, group, S)
    logits = logits * (q.size(-1) ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        logits = logits + attn_mask
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp()
    total = weights.sum(-1, keepdim=True)
    y = (wide(weights.to(v.dtype))[..., None] * wide(v)[:, :, None]).sum(-2) / total  # (B, n_heads, group, head_dim)
    return y.to(q.dtype), (largest + total.log()).squeeze(-1)


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it has that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
