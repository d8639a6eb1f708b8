"""LLaMA (Hugo Touvron et al., 2023, https://arxiv.org/abs/2302.13971): blocks of attention and feed-forward.

Each sub-layer owns its norm. The residual stream is carried beside the activation, so that adding a
sub-layer's output to it and normalising the sum for the next one can be one kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import Backend, in_form
from model.attention import Attention, KVCache, Span, capped, padded_span, plain_span
from model.config import LlamaConfig
from model.norm import Add, RMSNorm
from model.swiglu import SwiGLU


class Block(nn.Module):
    """A layer, with a norm on the input of each sub-layer, on its output, or on both (model/family.py)."""

    def __init__(self, config: LlamaConfig, norm: Backend) -> None:
        super().__init__()

        def make_norm(side: str) -> RMSNorm | Add:
            if config.family.norms in (side, "both"):
                return RMSNorm(config.hidden_size, config.rms_norm_eps, norm)
            return Add(config.residual_multiplier if side == "output" else None)

        self.attention_norm = make_norm("input")
        self.attention = Attention(config, norm)
        self.attention_output_norm = make_norm("output")
        self.ffn_norm = make_norm("input")
        self.feed_forward = SwiGLU(config)
        self.ffn_output_norm = make_norm("output")

    def forward(self, x: Tensor, residual: Tensor | None, span: Span, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)  # both (B, T, hidden_size)
        x, _ = self.attention_output_norm(self.attention(x, span, cache))
        x, residual = self.ffn_norm(x, residual)
        x, _ = self.ffn_output_norm(self.feed_forward(x))
        return x, residual


class Llama(nn.Module):
    """A LLaMA with freshly drawn weights. `norm` computes all of its norms (kernels.load_backend)."""

    def __init__(self, config: LlamaConfig, norm: Backend) -> None:
        super().__init__()
        self.config, norm = config, in_form(norm, config.family.form)
        self.local_config = config  # of the heads that this process computes (model/tensor_parallel.py)
        rows = torch.empty(config.vocab_size, config.hidden_size)
        if rows.is_meta:  # drawing on the meta device, as nn.Embedding would, makes PyTorch import half a compiler
            self.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
        else:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.kinds = config.layer_kinds()  # of each layer
        self.configs = {kind: config.for_layers(kind) for kind in self.kinds}  # what such layers see of a text
        self.layers = nn.ModuleList(Block(config, norm) for _ in self.kinds)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm)
        # A tied head has no parameter of its own: the embedding is read a second time.
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw weights from a normal distribution (std: initializer_range), set biases to 0, and reset the norms.

        Each layer writes twice into the residual stream, through o_proj and down_proj. These two are drawn smaller by
        sqrt(2 * num_hidden_layers), so that the stream's variance does not grow with depth (GPT-2's rule).
        """
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.reset_parameters()
        std = self.config.initializer_range
        for name, weight in self.named_parameters():
            if weight.is_meta or name.endswith("norm.weight"):
                continue
            if name.endswith(".bias"):
                nn.init.zeros_(weight)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=std / math.sqrt(2 * self.config.num_hidden_layers))
            else:
                nn.init.normal_(weight, std=std)

    def new_cache(self, batch_size: int, capacity: int) -> list[KVCache]:
        """One empty cache per layer, for sequences of up to `capacity` tokens."""
        weight = self.embed_tokens.weight
        return [KVCache(self.local_config, batch_size, capacity, weight.dtype, weight.device) for _ in self.layers]

    def forward(
        self,
        tokens: Tensor,
        caches: list[KVCache] | None = None,
        logits_to_keep: int = 0,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, T) -> logits (B, T, vocab_size), or those of the last `logits_to_keep` positions if not 0.

        With caches the tokens continue the sequences that the caches hold. `padding`, (B,): number of left-padding
        tokens in each sequence, so that sequences of different lengths fit one batch; every call for these sequences
        needs it. Raises ValueError beyond the config's context_length or the caches' capacity.
        """
        start = caches[0].length if caches else 0
        end = start + tokens.size(1)
        if end - (0 if padding is None else int(padding.max())) > self.config.context_length:
            raise ValueError(f"{end} positions, and the model's context length is {self.config.context_length}")
        if caches and end > caches[0].k.size(2):
            raise ValueError(f"the cache holds {caches[0].k.size(2)} positions and is asked to hold {end}")
        dtype = self.embed_tokens.weight.dtype
        spans = {}
        for kind, config in self.configs.items():
            if padding is None:
                spans[kind] = plain_span(config, start, end, dtype, tokens.device)
            else:
                spans[kind] = padded_span(config, start, end, dtype, padding)
        logits = self.run(tokens, spans, caches, logits_to_keep)
        for cache in caches or []:
            cache.length = end
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) -> (B, T, hidden_size), scaled if the family does so."""
        x = self.embed_tokens(tokens)
        factor = self.config.embedding_multiplier
        if self.config.family.scales_embedding:  # by a rounded factor, as Gemma does
            factor = torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)
        return x if factor is None else x * factor

    def logits(self, x: Tensor, residual: Tensor | None, logits_to_keep: int = 0) -> Tensor:
        """The last norm and the head: (B, T, hidden_size) -> (B, T or logits_to_keep, vocab_size)."""
        x, _ = self.norm(x, residual)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(x[:, -logits_to_keep:], head.weight)
        if self.config.logits_scaling is not None:
            logits = logits / self.config.logits_scaling
        return capped(logits, self.config.final_logit_softcapping)

    def run(
        self, tokens: Tensor, spans: dict[str, Span], caches: list[KVCache] | None = None, logits_to_keep: int = 0
    ) -> Tensor:
        """Compute forward for tokens (B, T) at the positions of `spans`, one for each kind of layers."""
        x, residual = self.embed(tokens), None  # (B, T, hidden_size)
        for layer, kind, cache in zip(self.layers, self.kinds, caches or [None] * len(self.layers), strict=True):
            x, residual = layer(x, residual, spans[kind], cache)
        return self.logits(x, residual, logits_to_keep)


def summed_loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Cross-entropy summed over the T targets of each sequence of a batch (B, T + 1), in float32."""
    logits = model(batch[:, :-1])  # (B, T, vocab_size)
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def checkpoint_layers(model: Llama) -> None:
    """Activation checkpointing: keep only each layer's inputs and recompute the rest in backward (1/3 more compute)."""
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
