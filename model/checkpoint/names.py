"""Other people's names for the same model: Hugging Face's, Meta's and Mistral's, their params.json and row order."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor

from kernels import InputError
from model.config import LlamaConfig
from model.json_file import expect, show

# Names are compared part by part, between the dots. A part that is not listed is the same everywhere.
# (in Hugging Face's files, in the model); their names begin with PREFIX, all but the head's
PREFIX = "model."
HUGGING_FACE = {"self_attn": "attention", "mlp": "feed_forward"}
# A norm's name depends on where a family has norms: post_attention_layernorm is the norm before the feed-forward in
# LLaMA, and that of attention's output in OLMo 2. All have one shape, so no error would tell them apart.
NORMS = {
    "input": {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    "output": {
        "post_attention_layernorm": "attention_output_norm",
        "post_feedforward_layernorm": "ffn_output_norm",
    },
    "both": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_output_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_output_norm",
    },
}
# (in Meta's and Mistral's files, in the model)
META = {
    "tok_embeddings": "embed_tokens", "output": "lm_head",
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip
# PREFIX, and what torch.compile, DDP and FSDP put before a name
WRAPPERS = re.compile(r"^((_orig_mod|module|_fsdp_wrapped_module|model)\.)+")

# (in params.json, in config.json)
PARAMS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    **{key: key for key in ("head_dim", "vocab_size", "rope_theta", "max_position_embeddings", "sliding_window")},
}


def to_file_name(name: str, norms: str = "input") -> str:
    """Hugging Face's name for a parameter of a model whose family has norms there (model/family.py)."""
    to_file = {ours: theirs for theirs, ours in (HUGGING_FACE | NORMS[norms]).items()}
    theirs = ".".join(to_file.get(part, part) for part in name.split("."))
    return theirs if theirs.startswith("lm_head.") else PREFIX + theirs


def to_model_name(name: str, norms: str = "input") -> str:
    """The model's name for a tensor of anyone's file, for a family that has norms there."""
    to_model = HUGGING_FACE | META | NORMS[norms]
    return ".".join(to_model.get(part, part) for part in WRAPPERS.sub("", name).split("."))


def to_model_rows(name: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    """`weight` with its rows in the model's order, which is Hugging Face's; `name` is its name in the file."""
    n_heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads}
    part = name.split(".")[-2]
    return halves_from_pairs(weight, n_heads[part]) if part in n_heads else weight


def halves_from_pairs(weight: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of Meta's q or k, (n_heads * head_dim, ...), to Hugging Face's order.

    RoPE rotates elements 2i and 2i + 1 of a head together in Meta's order, i and i + head_dim / 2 in Hugging Face's.
    For k, `n_heads` is num_key_value_heads.
    """
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()


def config_values(params: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """The values of params.json under config.json's keys. `vocab_size`, the embedding's, replaces a -1.

    Raises InputError if the model is not a plain LLaMA or Mistral, or params.json leaves out what is needed.
    """
    params = {key: value for key, value in params.items() if value is not None}
    if params.pop("use_scaled_rope", False):
        raise InputError(
            "use_scaled_rope is true, and the factor is not stated (8 in Llama 3.1, 32 in 3.2); put the config.json "
            "of the same model in Hugging Face's format beside it, which has it as rope_scaling"
        )
    if params.get("vocab_size") == -1:
        params["vocab_size"] = vocab_size
    # Mistral states the width of the feed-forward; Meta states what it is computed from. Neither needs to state the
    # context: it is 32768 in Mistral's first models, and the default of max_seq_len in Meta's code.
    values: dict[str, Any] = {"max_position_embeddings": 32768 if "hidden_dim" in params else 2048}
    multiple_of, multiplier = params.pop("multiple_of", None), params.pop("ffn_dim_multiplier", 1.0)
    if "hidden_dim" not in params and _is_number(params.get("dim")) and _is_number(multiple_of) and multiple_of >= 1:
        expect(_is_number(multiplier), "ffn_dim_multiplier", multiplier, "a number")
        # Meta's rule: two thirds of 4 dim, since SwiGLU has three matrices where others have two, rounded up
        width, multiple_of = int(multiplier * int(8 * params["dim"] / 3)), int(multiple_of)
        params["hidden_dim"] = math.ceil(width / multiple_of) * multiple_of
    params.pop("max_batch_size", None)
    for key, value in params.items():
        if key not in PARAMS:
            raise InputError(f"unknown key {show(key)}: {show(value)}; only a plain LLaMA or Mistral is computed")
        values[PARAMS[key]] = value
    if "sliding_window" in values:
        values["model_type"] = "mistral"
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**31
