"""LLaMA (Hugo Touvron et al., 2023, https://arxiv.org/abs/2302.13971): blocks of attention and feed-forward.

Each sub-layer owns its norm. The residual stream is carried beside the activation, so that adding a
sub-layer's output to it and normalising the sum for the next one can be one kernel.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import Backend
from model.attention import Attention, KVCache
from model.config import LlamaConfig
from model.norm import RMSNorm
from model.rope import rotary_table
from model.swiglu import SwiGLU


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, norm: Backend) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm)
        self.feed_forward = SwiGLU(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: tuple[Tensor, Tensor], cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)  # both (B, T, hidden_size)
        x = self.attention(x, rope, cache)
        x, residual = self.ffn_norm(x, residual)
        return self.feed_forward(x), residual


class Llama(nn.Module):
    """A LLaMA with freshly drawn weights. `norm` computes all of its norms: see kernels.load_backend."""

    def __init__(self, config: LlamaConfig, norm: Backend) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, norm) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm)
        # A tied head is no parameter of its own: the embedding is read a second time.
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Normal with standard deviation initializer_range; norms at 1.

        Each layer writes twice into the residual stream, through o_proj and down_proj. Those are drawn smaller
        by sqrt(2 * num_hidden_layers), so that the stream's variance doesn't grow with depth (GPT-2's rule).
        """
        std = self.config.initializer_range
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(weight)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=std / math.sqrt(2 * self.config.num_hidden_layers))
            else:
                nn.init.normal_(weight, std=std)

    def new_cache(self, batch_size: int, capacity: int) -> list[KVCache]:
        """An empty cache a layer, for sequences of up to `capacity` tokens."""
        weight = self.embed_tokens.weight
        return [KVCache(self.config, batch_size, capacity, weight.dtype, weight.device) for _ in self.layers]

    def forward(self, tokens: Tensor, caches: list[KVCache] | None = None, logits_to_keep: int = 0) -> Tensor:
        """Token ids (B, T) -> logits (B, T, vocab_size), of the last `logits_to_keep` positions if that isn't 0.

        With caches the tokens continue the sequence that the caches hold. Raises ValueError where it would pass
        max_position_embeddings.
        """
        start = caches[0].length if caches else 0
        end = start + tokens.size(1)
        if end > self.config.max_position_embeddings:
            raise ValueError(f"{end} positions, and max_position_embeddings is {self.config.max_position_embeddings}")
        positions = torch.arange(start, end, device=tokens.device)
        rope = rotary_table(positions, self.config.head_dim, self.config.rope_theta)

        x, residual = self.embed_tokens(tokens), None  # (B, T, hidden_size)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, residual = layer(x, residual, rope, cache)
        x, _ = self.norm(x, residual)
        head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(x[:, -logits_to_keep:], head)
