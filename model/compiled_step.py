"""One decoding step, compiled: a layer's kernels are fused, and weights stream from memory.

The time of a step for one token is that of reading the weights. On a CPU one layer is compiled and called for all,
which takes seconds where the whole model takes minutes, and the calls of a step are recorded and repeated
(model/replay.py); on a GPU the whole model becomes a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import InputError
from kernels.compiled import check_device
from kernels.torch_version import TORCH_2_13
from model.attention import KVCache, Span, step_span
from model.large_pages import lay_out
from model.llama import Block, Llama
from model.replay import Replay, backend

BLOCK = 64  # keys are read in blocks of this size, so that the mask's shape seldom changes


def compile_step(model: Llama) -> Callable[..., Tensor]:
    """Stand-in for `model` where every sequence gets one more token: (B, 1) -> logits (B, 1, vocab_size).

    It takes the arguments of Llama.forward, caches included. The first call compiles, and so does the first one with
    another batch size, and on a CPU the first one with more than LONG keys. On a CPU it moves the weights (lay_out);
    from then on they may change in place, but no other parameter may take the place of one. Raises InputError where
    compilation is not possible.
    """
    device = model.embed_tokens.weight.device
    check_device(device)
    on_cpu = device.type == "cpu"
    if on_cpu and model.embed_tokens.weight.dtype != torch.float32 and not TORCH_2_13:
        raise InputError(
            f"--compile in half precision ends in an error of torch {torch.__version__}'s compiler on a CPU; use torch "
            "2.13 (no version between was tried), --dtype float32, or leave --compile out"
        )
    run: Callable[..., Tensor]
    if on_cpu:
        lay_out(model)
        run = _layer_by_layer(model)
    else:
        run = torch.compile(model.run, mode="reduce-overhead", dynamic=False)

    def step(tokens: Tensor, caches: list[KVCache], logits_to_keep: int = 1, padding: Tensor | None = None) -> Tensor:
        start, capacity = caches[0].length, caches[0].k.size(2)
        if on_cpu:
            # Leave the last row out while possible: all rows together are another layout, which would compile again.
            n_keys = max(start + 1, min(capacity - 1, (start // BLOCK + 1) * BLOCK))
        else:  # a CUDA graph has one shape, and writes to the memory with which it was recorded
            n_keys = capacity
            for cache in caches:
                torch._dynamo.mark_static_address(cache.k)
                torch._dynamo.mark_static_address(cache.v)
        dtype = model.embed_tokens.weight.dtype
        spans = {
            kind: step_span(config, start, n_keys, dtype, tokens.device, padding)
            for kind, config in model.configs.items()
        }
        logits = run(tokens, spans, caches, n_keys) if on_cpu else run(tokens, spans, caches)
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


def _layer_by_layer(model: Llama) -> Callable[[Tensor, dict[str, Span], list[KVCache], int], Tensor]:
    """Llama.run for one token a sequence, which reads the caches' first `n_keys` rows."""
    replay = Replay()
    block: Callable[..., tuple[Tensor, Tensor]] = torch.compile(Block.forward, backend=backend)
    last: Callable[..., Tensor] = torch.compile(model.logits, backend=backend)
    recorded: list[Any] = []  # what must not change until the recorded calls are made again
    seen: dict[str, Span] = {}  # the spans that these calls read
    owner: weakref.ref[KVCache] | None = None  # of the memory that they hold

    def run(tokens: Tensor, spans: dict[str, Span], caches: list[KVCache], n_keys: int) -> Tensor:
        nonlocal owner
        x = model.embed(tokens)  # (B, 1, hidden_size)
        residual = torch.zeros_like(x)  # also for the first layer, so that the compiler sees all layers alike
        masks = [span.mask.shape for span in spans.values() if span.mask is not None]
        # The recorded calls keep the memory of their caches, so another cache has another address.
        memory = [(cache.k.data_ptr(), cache.v.data_ptr(), cache.k.shape) for cache in caches]
        modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        now = [n_keys, memory, masks, x.shape, x.dtype, modes]
        if replay.calls and now == recorded:
            for kind, span in spans.items():
                seen[kind].become(span)
            return replay.again(x, residual)[0]

        replay.calls, recorded[:] = [], []  # until all of the step is recorded
        seen.update(spans)
        for span in spans.values():
            assert span.mask is not None  # step_span always makes one
            torch._dynamo.mark_dynamic(span.mask, span.mask.dim() - 1)
            span.keys = slice(None)  # the caches are already cut to them
        for layer, kind, cache in zip(model.layers, model.kinds, caches, strict=True):
            read = cache.first(n_keys)
            torch._dynamo.mark_dynamic(read.k, 2)
            torch._dynamo.mark_dynamic(read.v, 2)
            x, residual = replay.record((x, residual), block, layer, x, residual, spans[kind], read)
        logits = replay.record((x, residual), last, x, residual)
        recorded[:] = now
        owner = weakref.ref(caches[0], forget)
        return logits

    def forget(_: object) -> None:
        """Let the memory of the recorded caches go when they do."""
        replay.calls = None
        seen.clear()

    return run
