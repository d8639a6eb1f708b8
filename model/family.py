"""What tells one family of models from another, as data: where its norms stand, which form they have, and the rest.

family       norm of a sub-layer's  q and k norm  form of the norm    besides
llama        input                                rounds twice
mistral      input                                rounds twice        a window
qwen2        input                                rounds twice        biases of q, k and v
qwen3        input                  of each head  rounds twice
olmo2        output                 of all heads  rounds once         RoPE in float32
gemma        input                                rounds once, 1 + w  GeGLU, scaled embedding
gemma2       both                                 rounds once, 1 + w  and soft caps, a window in 1 of 2 layers
gemma3_text  both                   of each head  rounds once, 1 + w  and a window in 5 of 6 layers, with own RoPE
granite      input                                rounds twice        four multipliers
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.form import LLAMA, Form

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)  # config.json's names


class Family(NamedTuple):
    """A family's answers. `defaults` are the values that transformers takes for keys that a config.json leaves out.

    A key of OPTIONAL_KEYS that is not in `defaults` is one that the family does not have.
    """

    norms: str = "input"  # of each sub-layer: "input", "output" or "both"
    qk_norm: str | None = None  # over "head", each on its own, or over "all" together
    form: Form = LLAMA
    biases: tuple[str, ...] = ("attention_bias",)  # the keys of config.json that add some
    qkv_bias: bool = False  # always
    rotates_in_float32: bool = False  # q and k of half precision, rounded after RoPE
    scales_embedding: bool = False  # by sqrt(hidden_size), rounded to the embedding's dtype
    activation: tuple[str, ...] = SILU
    window_pattern: int | None = None  # one layer of so many has no window, unless layer_types says otherwise
    defaults: dict[str, Any] = {}  # noqa: RUF012


MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
OPTIONAL_KEYS = (
    "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "rope_local_base_freq", *MULTIPLIERS,
)  # fmt: skip
GEMMA = Family(
    form=Form(offset=1.0, round_once=True),
    scales_embedding=True,
    activation=(*GELU, "gelu"),  # published Gemmas say the second and mean the first
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
)
TWO_SIDES = GEMMA._replace(
    norms="both",
    activation=GELU,
    defaults={**GEMMA.defaults, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256},
)
QWEN = {"num_key_value_heads": 32, "use_sliding_window": False}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
BASES = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "final_logit_softcapping": None}
FAMILIES = {
    "llama": Family(biases=("attention_bias", "mlp_bias")),
    "mistral": Family(biases=(), defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(biases=(), qkv_bias=True, defaults=QWEN),
    "qwen3": Family(qk_norm="head", defaults=QWEN | {"head_dim": 128}),
    "olmo2": Family(norms="output", qk_norm="all", form=Form(round_once=True), rotates_in_float32=True),
    "gemma": GEMMA,
    "gemma2": TWO_SIDES._replace(window_pattern=2, defaults=TWO_SIDES.defaults | CAPS),
    "gemma3_text": TWO_SIDES._replace(window_pattern=6, qk_norm="head", defaults=TWO_SIDES.defaults | BASES),
    "granite": Family(biases=("attention_bias", "mlp_bias"), defaults=dict.fromkeys(MULTIPLIERS, 1.0)),
}
