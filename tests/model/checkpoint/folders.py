"""Shared by the tests of checkpoint directories: kinds of models, loading, and bounds for what is the same."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import transformers
from safetensors.torch import load_file, save_file

import kernels
from model.checkpoint.load import load_checkpoint
from tests.helpers import CPU, draw_weights

TOKENIZER = SimpleNamespace(files={"tokenizer.model": b"the bytes of a tokenizer"})
TOKENS = torch.arange(60).view(3, 20)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
BOTH_SIDES = {"head_dim": 20, "sliding_window": 5, "query_pre_attn_scalar": 24}
GRANITE = {"model_type": "granite", "embedding_multiplier": 2.7, "attention_multiplier": 0.43,
           "residual_multiplier": 0.61, "logits_scaling": 1.3}  # fmt: skip
KINDS = {
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "head_dim of its own": {"head_dim": 20},
    "no groups": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 12},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, window": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 20},
    "olmo2": {"model_type": "olmo2"},
    "gemma": {"model_type": "gemma", "head_dim": 20},
    "gemma2": {"model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0} | BOTH_SIDES,
    "granite": GRANITE | {"head_dim": 20},
    "granite, biases": GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", "rope_local_base_freq": 100.0, "rope_theta": 5000.0} | BOTH_SIDES,
    "gemma3, linear": {
        "model_type": "gemma3_text",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 100.0,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "final_logit_softcapping": 3.0,
    }
    | BOTH_SIDES,
}


def load(folder, **options):
    return load_checkpoint(folder, kernels.load_backend("reference", CPU), CPU, **options)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same_weights(model, other):
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)  # names and dtypes as well


def assert_same_logits(ours, theirs):
    """The bounds of tests/model/test_llama.py: float32's roundings; in half precision, the share that differs."""
    assert ours.dtype == theirs.dtype
    if ours.dtype == torch.float32:
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    else:
        assert (ours != theirs).float().mean() < 0.25


def theirs_of(config, dtype=torch.float32, **changed):
    """A model of transformers whose every weight matters."""
    torch.manual_seed(0)
    values = replace(config, model_type=changed.get("model_type", "llama")).to_dict() | changed
    kind = transformers.AutoConfig.for_model(**{key: value for key, value in values.items() if value is not None})
    model = transformers.AutoModelForCausalLM.from_config(kind, dtype=dtype, **attention_of(kind)).eval()
    draw_weights(model, std=0.1)
    return model


def attention_of(kind):
    """Options for transformers, whose SDPA attention before 5.24 leaves out Gemma 2's soft cap."""
    return {"attn_implementation": "eager"} if kind.model_type == "gemma2" else {}


def theirs_at(folder):
    """transformers' model of a directory."""
    options = attention_of(transformers.AutoConfig.from_pretrained(folder))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
