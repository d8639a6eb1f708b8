"""Every foreign name: Hugging Face's, and Meta's and Mistral's with their params.json and their rows of q and k."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from kernels import InputError
from model.json_file import show

# (in Hugging Face's files, in the model), applied in this order
NAMES = [
    ("model.", ""),
    (".input_layernorm.", ".attention_norm."),
    (".self_attn.", ".attention."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".mlp.", ".feed_forward."),
]
WRAPPERS = re.compile(r"^((_orig_mod|module|_fsdp_wrapped_module|model)\.)+")  # of torch.compile, DDP and FSDP

# (in Meta's and Mistral's files, in the model); what isn't here has the same name in both
META_NAMES = {
    "tok_embeddings.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "attention.wq": "attention.q_proj",
    "attention.wk": "attention.k_proj",
    "attention.wv": "attention.v_proj",
    "attention.wo": "attention.o_proj",
    "feed_forward.w1": "feed_forward.gate_proj",
    "feed_forward.w2": "feed_forward.down_proj",
    "feed_forward.w3": "feed_forward.up_proj",
}
META_NAME = re.compile(
    r"^(layers\.\d+\.)?(attention\.w[qkvo]|feed_forward\.w[123]|tok_embeddings\.weight|output\.weight)"
)

# (in params.json, in config.json)
KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
# max_seq_len in Meta's own code, and the context of Mistral's first models; their files don't state it.
META_CONTEXT, MISTRAL_CONTEXT = 2048, 32768


def to_file_name(name: str) -> str:
    for theirs, ours in NAMES[1:]:
        name = name.replace(ours, theirs)
    return name if name.startswith("lm_head.") else NAMES[0][0] + name


def to_model_name(name: str) -> str:
    name = WRAPPERS.sub("", name)
    for theirs, ours in NAMES[1:]:
        name = name.replace(theirs, ours)
    match = META_NAME.match(name)
    return name if match is None else (match[1] or "") + META_NAMES[match[2]] + name[match.end() :]


def config_values(params: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """params.json's values under config.json's keys. `vocab_size` is the embedding's, where params.json has -1.

    Raises InputError for what isn't a LLaMA or a Mistral, or can't be told from the file.
    """
    params = {key: value for key, value in params.items() if value is not None}
    # Mistral states the width of the feed-forward, Meta what it is computed from.
    values: dict[str, Any] = {"max_position_embeddings": MISTRAL_CONTEXT if "hidden_dim" in params else META_CONTEXT}
    if params.pop("use_scaled_rope", False):
        raise InputError(
            "use_scaled_rope is true, and the factor isn't stated (8 in Llama 3.1, 32 in 3.2); put the config.json "
            "of the same model in Hugging Face's format beside it, which has it as rope_scaling"
        )
    multiple_of, multiplier = params.pop("multiple_of", None), params.pop("ffn_dim_multiplier", 1.0)
    if params.get("vocab_size") == -1:
        params["vocab_size"] = vocab_size
    if "hidden_dim" not in params and _is_number(params.get("dim")) and _is_number(multiple_of) and multiple_of >= 1:
        if not _is_number(multiplier):
            raise InputError(f"ffn_dim_multiplier is {show(multiplier)}; expected a number")
        # two thirds of 4 dim, since SwiGLU has three matrices where others have two, rounded up (Meta's rule)
        hidden_dim = int(multiplier * int(8 * params["dim"] / 3))
        params["hidden_dim"] = int(multiple_of) * -(-hidden_dim // int(multiple_of))
    if unknown := sorted(params.keys() - KEYS.keys() - {"max_batch_size"}):
        raise InputError(
            f"unknown key {show(unknown[0])}: {show(params[unknown[0]])}; only a plain LLaMA or Mistral is computed"
        )
    values |= {KEYS[key]: value for key, value in params.items() if key in KEYS}
    if "sliding_window" in values:
        values |= {"model_type": "mistral"}
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**31


def halves_from_pairs(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of q or k in Meta's order, (part, pair) neighbours, brought to Hugging Face's; (n_heads * head_dim, ...).

    Meta turns elements 2i and 2i + 1 of a head together, Hugging Face i and i + head_dim / 2. `n_heads` is that of
    the weight itself: num_key_value_heads for k.
    """
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()
