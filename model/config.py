"""The shape of a LLaMA, read from config.json. What can't be honoured is refused by name."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kernels import InputError

# Keys of config.json that change no result here: bookkeeping, training-time settings, hints for other software.
IRRELEVANT_KEYS = {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
    "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "is_llama_config", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "torch_dtype",
    "transformers.js_config", "transformers_version", "unsloth_version", "use_cache",
}  # fmt: skip

# Keys that would change the result: the one value that this model computes.
ONLY_VALUES = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "quantization_config": None,
    "rope_interleaved": False,
    "rope_scaling": None,
}


@dataclass(frozen=True)
class LlamaConfig:
    """Fields are config.json's keys. Sizes are in elements; rms_norm_eps has no default, since no value is safe."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float = 10000.0  # what config.json means by leaving it out
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def load(cls, path: str | Path, rms_norm_eps: float | None = None) -> LlamaConfig:
        """Read config.json at `path`; `rms_norm_eps` overrides the file's. Raises InputError naming key and value."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(f"no config at {path}; expected a config.json") from error
        except (OSError, ValueError) as error:  # a folder, no permission, not UTF-8, not JSON
            raise InputError(f"{path} can't be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise InputError(f"{path} holds a {type(values).__name__}; expected a JSON object with config.json's keys")
        if rms_norm_eps is not None:
            values["rms_norm_eps"] = rms_norm_eps
        try:
            return cls.from_dict(values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LlamaConfig:
        """Check the keys of a config.json and fill in what LLaMA's own config leaves out."""
        values = dict(values)
        _check_types(values)
        model_type = values.pop("model_type", "llama")
        if model_type != "llama":
            raise InputError(f"model_type is '{model_type}'; expected 'llama', the only model computed here")
        _take_rope_parameters(values)
        for key, only in ONLY_VALUES.items():
            found = values.pop(key, only)
            if found is not None and found != only:
                raise InputError(f"{key} is {json.dumps(found)}; only {json.dumps(only)} is computed here")
        for key in IRRELEVANT_KEYS:
            values.pop(key, None)

        if values.get("num_key_value_heads") is None and "num_attention_heads" in values:
            values["num_key_value_heads"] = values["num_attention_heads"]
        if values.get("head_dim") is None and "hidden_size" in values and "num_attention_heads" in values:
            hidden_size, n_heads = _number("hidden_size", values, int), _number("num_attention_heads", values, int)
            if hidden_size % n_heads:
                raise InputError(
                    f"hidden_size {hidden_size} isn't divisible by num_attention_heads {n_heads}; "
                    "change one of them, or state head_dim"
                )
            values["head_dim"] = hidden_size // n_heads

        known = {field.name: field for field in fields(cls)}
        if unknown := sorted(values.keys() - known.keys()):
            found = json.dumps(values[unknown[0]])
            raise InputError(f"unknown key {unknown[0]}: {found}; remove it if it changes nothing")
        if values.get("rms_norm_eps") is None:
            raise InputError(
                "rms_norm_eps is missing; 1e-5 and 1e-6 are both in use and no default is safe: "
                "add the model's own, or give it to generate.py as --norm-eps"
            )
        arguments = {}
        for name, field in known.items():
            if values.get(name) is None:
                if field.default is MISSING:
                    raise InputError(f"{name} is missing; expected it among config.json's keys")
            elif field.type == "int":
                arguments[name] = _number(name, values, int)
            elif field.type == "float":
                arguments[name] = _number(name, values, float)
            else:
                arguments[name] = values[name]
        config = cls(**arguments)
        config._check_heads()
        return config

    def _check_heads(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads {self.num_attention_heads} isn't divisible by num_key_value_heads "
                f"{self.num_key_value_heads}; every key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim is {self.head_dim}; expected an even number, since RoPE turns pairs")

    def end_ids(self) -> set[int]:
        """The ids that end a text: eos_token_id may be one, several or none."""
        return set(_as_list(self.eos_token_id)) - {None}

    def to_dict(self) -> dict[str, Any]:
        """The keys of a config.json that transformers loads as the same model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            **asdict(self),
        }


def _check_types(values: dict[str, Any]) -> None:
    """Refuse values of another type that Python would take without a word: the text "false" is true."""
    kinds = {
        "tie_word_embeddings": ("true or false", lambda value: isinstance(value, bool)),
        "bos_token_id": ("a token id", _is_id),
        "eos_token_id": ("a token id or a list of them", lambda value: all(map(_is_id, _as_list(value)))),
        "rope_parameters": ("an object", lambda value: isinstance(value, dict)),
    }
    for key, (expected, fits) in kinds.items():
        if values.get(key) is not None and not fits(values[key]):
            raise InputError(f"{key} is {json.dumps(values[key])}; expected {expected}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _take_rope_parameters(values: dict[str, Any]) -> None:
    """Newer configs keep rope_theta inside rope_parameters; move it to the top level."""
    rope = values.pop("rope_parameters", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InputError(f"rope_parameters has rope_type '{kind}'; only 'default' is computed here")
    if rope.get("rope_theta") is None:
        return
    inner = _number("rope_theta", rope, float)
    if values.get("rope_theta") is not None and _number("rope_theta", values, float) != inner:
        raise InputError(f"rope_theta is {values['rope_theta']} and rope_parameters has {inner}; remove one of them")
    values["rope_theta"] = inner


def _number(key: str, values: dict[str, Any], kind: type) -> int | float:
    """A positive number; also from text like "1e-05", which is how some writers of JSON and YAML leave it."""
    found = values[key]
    try:
        number = float(found) if not isinstance(found, bool) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not 0 < number < float("inf") or (kind is int and number != int(number)):
        expected = "a whole number above 0" if kind is int else "a number above 0"
        raise InputError(f"{key} is {json.dumps(found)}; expected {expected}")
    return kind(number)
