"""One decoding step, compiled: a layer's kernels are fused, and weights stream from memory.

The time of a step for one token is that of reading the weights. On a CPU one layer is compiled and called for all,
which takes seconds where the whole model takes minutes; on a GPU the whole model becomes a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from kernels import InputError
from kernels.compiled import check_device
from kernels.torch_version import TORCH_2_13
from model.attention import KVCache, Span, step_span
from model.llama import Block, Llama

BLOCK = 64  # keys are read in blocks of this size, so that the mask's shape seldom changes


def compile_step(model: Llama) -> Callable[..., Tensor]:
    """Stand-in for `model` where every sequence gets one more token: (B, 1) -> logits (B, 1, vocab_size).

    It takes the arguments of Llama.forward, caches included. The first call compiles, and so does the first one with
    another batch size. Raises InputError where compilation is not possible.
    """
    device = model.embed_tokens.weight.device
    check_device(device)
    on_cpu = device.type == "cpu"
    if on_cpu and model.embed_tokens.weight.dtype != torch.float32 and not TORCH_2_13:
        raise InputError(
            f"--compile in half precision ends in an error of torch {torch.__version__}'s compiler on a CPU; use torch "
            "2.13 (no version between was tried), --dtype float32, or leave --compile out"
        )
    run = _layer_by_layer(model) if on_cpu else torch.compile(model.run, mode="reduce-overhead", dynamic=False)

    def step(tokens: Tensor, caches: list[KVCache], logits_to_keep: int = 1, padding: Tensor | None = None) -> Tensor:
        start, capacity = caches[0].length, caches[0].k.size(2)
        if on_cpu:
            # Leave the last row out while possible: all rows together are another layout, which would compile again.
            n_keys = max(start + 1, min(capacity - 1, (start // BLOCK + 1) * BLOCK))
            read = [cache.first(n_keys) for cache in caches]
        else:  # a CUDA graph has one shape, and writes to the memory with which it was recorded
            n_keys, read = capacity, caches
            for cache in caches:
                torch._dynamo.mark_static_address(cache.k)
                torch._dynamo.mark_static_address(cache.v)
        dtype = model.embed_tokens.weight.dtype
        spans = {
            kind: step_span(config, start, n_keys, dtype, tokens.device, padding)
            for kind, config in model.configs.items()
        }
        logits = run(tokens, spans, read)
        for cache in caches:
            cache.length = start + 1
        return logits

    return step


def warm_up(model: Llama, step: Callable[..., Tensor], batch_size: int, capacity: int, padded: bool) -> None:
    """Make `step` compile now, for a batch whose caches hold `capacity` tokens."""
    device = model.embed_tokens.weight.device
    caches = model.new_cache(batch_size, capacity)
    for cache in caches:
        cache.length = 1
    with torch.inference_mode():
        tokens = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        padding = torch.zeros(batch_size, dtype=torch.long, device=device) if padded else None
        step(tokens, caches, padding=padding)


def _layer_by_layer(model: Llama) -> Callable[[Tensor, dict[str, Span], list[KVCache]], Tensor]:
    block: Callable[..., tuple[Tensor, Tensor]] = torch.compile(Block.forward, backend=_inductor)
    last = torch.compile(model.logits, backend=_inductor)

    def run(tokens: Tensor, spans: dict[str, Span], caches: list[KVCache]) -> Tensor:
        for span in spans.values():
            assert span.mask is not None  # step_span always makes one
            torch._dynamo.mark_dynamic(span.mask, span.mask.dim() - 1)
            span.keys = slice(None)  # the caches are already cut to them
        x = model.embed(tokens)  # (B, 1, hidden_size)
        residual = torch.zeros_like(x)  # also for the first layer, so that the compiler sees all layers alike
        for layer, kind, cache in zip(model.layers, model.kinds, caches, strict=True):
            torch._dynamo.mark_dynamic(cache.k, 2)
            torch._dynamo.mark_dynamic(cache.v, 2)
            x, residual = block(layer, x, residual, spans[kind], cache)
        return last(x, residual)

    return run


def _inductor(graph: GraphModule, inputs: list[Tensor]) -> Any:
    """Compile with Inductor, which generates its own sum for the product of one row and a weight.

    That sum reads a float32 weight about as fast as memory allows; the library's product reaches half of that.
    """
    decompositions = select_decomp_table() | {torch.ops.aten.mm.default: _mm, torch.ops.aten.addmm.default: _addmm}
    # The rounding of a norm's x_hat is kept, as in kernels/compiled.py.
    return compile_fx(graph, inputs, config_patches={"emulate_precision_casts": True}, decompositions=decompositions)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Product of (1, K) and (K, N), the transposed weight; NotImplemented leaves more rows to the library."""
    if a.size(0) != 1:
        return NotImplemented
    row = a.float()
    row = row.as_strided(row.size(), row.stride())  # materialised, so that it is not converted again for every output
    return (b.t().float() * row).sum(-1)[None].to(a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    product = _mm(a, b)
    return product if product is NotImplemented else bias + product
