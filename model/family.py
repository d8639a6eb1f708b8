"""What tells one family of models from another, as data: where its norms stand, which form they have, and the rest.

    family    norm of a sub-layer's  q and k norm     form of the norm       besides
    llama     input                                   rounds twice           Mistral: a sliding window
    qwen2     input                                   rounds twice           biases on q, k and v
    qwen3     input                  of each head     rounds twice
    olmo2     output                 of all heads     rounds once            turns q and k in float32
    gemma     input                                   rounds once, 1 + w     GeGLU, scaled embedding
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kernels.form import LLAMA, Form

SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu")  # config.json's names; published Gemmas mean the first


class Family(NamedTuple):
    """A family's answers. `defaults` are keys that transformers fills in otherwise than LLaMA's config does."""

    norms: str = "input"  # of each sub-layer: "input", "output" or "both"
    qk_norm: str | None = None  # over "head", each on its own, or over "all" together
    form: Form = LLAMA
    qkv_bias: bool = False  # also where attention_bias is false
    rotates_in_float32: bool = False  # q and k of half precision, rounded after RoPE
    scales_embedding: bool = False  # by sqrt(hidden_size), rounded to the embedding's dtype
    activation: tuple[str, ...] = SILU
    has_window: bool = False
    defaults: Mapping[str, Any] = MappingProxyType({})

    @property
    def takes_input(self) -> bool:
        """True if a norm stands before each sub-layer."""
        return self.norms != "output"

    @property
    def takes_output(self) -> bool:
        """True if a norm stands behind each sub-layer."""
        return self.norms != "input"


FAMILIES = {
    "llama": Family(),
    "mistral": Family(has_window=True, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "qwen3": Family(qk_norm="head", defaults={"num_key_value_heads": 32, "head_dim": 128}),
    "olmo2": Family(norms="output", qk_norm="all", form=Form(round_once=True), rotates_in_float32=True),
    "gemma": Family(
        form=Form(offset=1.0, round_once=True),
        scales_embedding=True,
        activation=GELU,
        defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    ),
}
