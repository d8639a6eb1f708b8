"""The shape of a LLaMA, read from config.json. What can't be honoured is refused by name."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kernels import InputError
from model.json_file import read_object, show

# Keys of config.json that change no logits: bookkeeping, training-time settings, hints for other software, defaults
# of sampling that older files keep here.
IRRELEVANT_KEYS = {
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "gradient_checkpointing",
    "neftune_noise_alpha", "pad_token", "_commit_hash", "_name_or_path", "add_cross_attention",
    "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "is_llama_config",
    "label2id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
}  # fmt: skip

# Keys that would change the result: the one value that this model computes.
ONLY_VALUES = {
    "attention_dropout": 0.0,
    "compression_config": None,
    "hidden_act": "silu",
    "layer_types": None,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "quantization_config": None,
    "rope_interleaved": False,
}

# Other ways to write these values.
EQUAL_VALUES = [("hidden_act", "swish"), ("quantization_config", {}), ("compression_config", {})]

# What transformers' MistralConfig means by leaving a key out.
MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}

# The keys of each kind of RoPE scaling: those it needs, and those it may have. model/rope.py computes them.
ROPE_SCALING_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, {"original_max_position_embeddings"}),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor"},
        {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "truncate"},
    ),
}  # fmt: skip

ZERO_MSCALES = [("mscale", 0), ("mscale_all_dim", 0)]

# Far beyond any model, and small enough that a product of three of them still is a tensor's size.
LARGEST_SIZE = 2**20
LONGEST_TEXT = 2**31


@dataclass(frozen=True)
class LlamaConfig:
    """Fields are config.json's keys. Sizes are in elements; rms_norm_eps has no default, since no value is safe.

    `rope_scaling` holds its `rope_type` and the numbers that model/rope.py reads, or is None.
    """

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
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    model_type: str = "llama"

    @classmethod
    def load(cls, path: str | Path, rms_norm_eps: float | None = None) -> LlamaConfig:
        """Read config.json at `path`; `rms_norm_eps` overrides the file's. Raises InputError naming key and value."""
        return cls.from_file_values(path, read_object(path), rms_norm_eps)

    @classmethod
    def from_file_values(cls, path: str | Path, values: dict[str, Any], rms_norm_eps: float | None) -> LlamaConfig:
        """`from_dict` for values that were read at `path`, which an error then names."""
        if rms_norm_eps is not None:
            values = values | {"rms_norm_eps": rms_norm_eps}
        try:
            return cls.from_dict(values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LlamaConfig:
        """Check the keys of a config.json and fill in what LLaMA's and Mistral's own configs leave out."""
        values = dict(values)
        _check_types(values)
        model_type = values.setdefault("model_type", "llama")
        if model_type == "mistral":
            values = MISTRAL_DEFAULTS | values
        elif model_type != "llama":
            raise InputError(f"model_type is {show(model_type)}; expected llama or mistral, which are computed here")
        elif values.get("sliding_window") is not None:
            raise InputError(
                f"sliding_window is {show(values['sliding_window'])}, and a llama has none; "
                "expected null, or model_type mistral"
            )
        _take_rope(values)
        _take_max_sequence_length(values)
        for key, only in ONLY_VALUES.items():
            found = values.pop(key, only)
            if found is not None and found != only and (key, found) not in EQUAL_VALUES:
                raise InputError(f"{key} is {show(found)}; only {json.dumps(only)} is computed here")
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
            raise InputError(
                f"unknown key {show(unknown[0])[1:-1]}: {show(values[unknown[0]])}; remove it if it changes nothing"
            )
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
            elif field.type in ("int", "int | None") and not name.endswith("_id"):
                arguments[name] = _number(name, values, int)
            elif field.type == "float":
                arguments[name] = _number(name, values, float)
            else:
                arguments[name] = values[name]
        config = cls(**arguments)
        config._check_sizes()
        return config

    def _check_sizes(self) -> None:
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                    "num_attention_heads", "num_key_value_heads"):  # fmt: skip
            if getattr(self, key) > LARGEST_SIZE:
                raise InputError(f"{key} is {getattr(self, key)}; expected at most {LARGEST_SIZE}")
        if self.max_position_embeddings >= LONGEST_TEXT:
            raise InputError(f"max_position_embeddings is {self.max_position_embeddings}; expected at most 2^31 - 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads {self.num_attention_heads} isn't divisible by num_key_value_heads "
                f"{self.num_key_value_heads}; every key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim is {self.head_dim}; expected an even number, since RoPE turns pairs")
        kind = (self.rope_scaling or {}).get("rope_type")
        if kind == "dynamic" and self.head_dim == 2:  # both formulas would divide by zero
            raise InputError("head_dim is 2; rope_type dynamic needs more than one pair")
        if kind == "yarn" and self.rope_theta <= 1:
            raise InputError(f"rope_theta is {self.rope_theta}; rope_type yarn needs one above 1")

    @property
    def context_length(self) -> int:
        """The most tokens of a text: max_position_embeddings, or what a scaling makes of the length before it.

        Dynamic scaling does nothing up to max_position_embeddings, and YaRN stretches the original length. For linear
        scaling both readings of max_position_embeddings are in use, and the shorter one is safe.
        """
        scaling = self.rope_scaling or {"rope_type": "default"}
        scaled = 0.0
        if scaling["rope_type"] == "dynamic":
            scaled = self.max_position_embeddings * scaling["factor"]
        elif scaling["rope_type"] == "yarn":
            original = scaling.get("original_max_position_embeddings", self.max_position_embeddings)
            scaled = original * scaling["factor"]
        return int(min(max(self.max_position_embeddings, scaled), LONGEST_TEXT - 1))

    def end_ids(self) -> set[int]:
        """The ids that end a text: eos_token_id may be one, several or none."""
        return set(as_list(self.eos_token_id)) - {None}

    def to_dict(self) -> dict[str, Any]:
        """The keys of a config.json that transformers loads as the same model."""
        values = {
            "architectures": ["MistralForCausalLM" if self.model_type == "mistral" else "LlamaForCausalLM"],
            "hidden_act": "silu",
            **asdict(self),
        }
        if self.rope_scaling is None:
            del values["rope_scaling"]
        if self.model_type == "llama":
            del values["sliding_window"]
        return values


def _check_types(values: dict[str, Any]) -> None:
    """Refuse values of another type that Python would take without a word: the text "false" is true."""
    kinds = {
        "model_type": ("a name", lambda value: isinstance(value, str)),
        "tie_word_embeddings": ("true or false", lambda value: isinstance(value, bool)),
        "attention_bias": ("true or false", lambda value: isinstance(value, bool)),
        "mlp_bias": ("true or false", lambda value: isinstance(value, bool)),
        "bos_token_id": ("a token id", is_id),
        "eos_token_id": ("a token id or a list of them", lambda value: all(map(is_id, as_list(value)))),
        "rope_parameters": ("an object", lambda value: isinstance(value, dict)),
        "rope_scaling": ("an object", lambda value: isinstance(value, dict)),
    }
    for key, (expected, fits) in kinds.items():
        if values.get(key) is not None and not fits(values[key]):
            raise InputError(f"{key} is {show(values[key])}; expected {expected}")


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _take_rope(values: dict[str, Any]) -> None:
    """Bring both spellings to one: rope_theta at the top, and rope_scaling with what else there is.

    Newer configs keep both inside rope_parameters. Raises InputError where two places contradict each other, and for
    kinds and keys that aren't computed.
    """
    new, old = values.pop("rope_parameters", None) or {}, values.pop("rope_scaling", None) or {}
    if new and old and new != old:
        raise InputError(f"rope_parameters is {show(new)} and rope_scaling is {show(old)}; remove one of them")
    rope, key = dict(new or old), "rope_parameters" if new else "rope_scaling"

    inner = rope.pop("rope_theta", None)
    if inner is not None:
        inner = _number("rope_theta", {"rope_theta": inner}, float)
        if values.get("rope_theta") is not None and _number("rope_theta", values, float) != inner:
            raise InputError(f"rope_theta is {values['rope_theta']} and {key} has {inner}; remove one of them")
        values["rope_theta"] = inner

    kinds = {rope.pop(name) for name in ("rope_type", "type") if isinstance(rope.get(name), str)} or {"default"}
    kind = kinds.pop()
    if kinds or kind not in ROPE_SCALING_KEYS:
        raise InputError(f"{key} is {show(new or old)}; expected one rope_type of {', '.join(ROPE_SCALING_KEYS)}")
    rope.pop("finetuned", None)  # says how the model came about
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    # transformers takes an mscale of 0 for none
    rope = {name: value for name, value in rope.items() if value is not None and (name, value) not in ZERO_MSCALES}
    needed, possible = ROPE_SCALING_KEYS[kind]
    if missing := sorted(needed - rope.keys()):
        raise InputError(f"{key} has no {missing[0]}; rope_type {kind} needs {', '.join(sorted(needed))}")
    if unknown := sorted(rope.keys() - needed - possible):
        raise InputError(f"{key} has {show(unknown[0])}: {show(rope[unknown[0]])}; rope_type {kind} has no such key")
    for name, value in rope.items():
        if name == "truncate":
            if not isinstance(value, bool):
                raise InputError(f"{key}'s truncate is {show(value)}; expected true or false")
        else:
            rope[name] = _number(name, rope, int if name.startswith("original") else float)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise InputError(
            f"{key}'s low_freq_factor is {rope['low_freq_factor']} and its high_freq_factor "
            f"{rope['high_freq_factor']}; expected the second to be larger"
        )
    if kind != "default":
        values["rope_scaling"] = {"rope_type": kind, **rope}


def _take_max_sequence_length(values: dict[str, Any]) -> None:
    """LLaMA 1's configs say so for max_position_embeddings, and Vicuna's for the length after linear scaling."""
    if values.get("max_sequence_length") is not None:
        longest = _number("max_sequence_length", values, int)
        linear = (values.get("rope_scaling") or {}).get("rope_type") == "linear"
        if values.get("max_position_embeddings") is None or linear:
            values["max_position_embeddings"] = longest
    values.pop("max_sequence_length", None)


def _number(key: str, values: dict[str, Any], kind: type) -> int | float:
    """A positive number; also from text like "1e-05", which is how some writers of JSON and YAML leave it."""
    found = values[key]
    try:
        number = float(found) if not isinstance(found, bool) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not 0 < number < float("inf") or (kind is int and number != int(number)):
        expected = "a whole number above 0" if kind is int else "a number above 0"
        raise InputError(f"{key} is {show(found)}; expected {expected}")
    return found if isinstance(found, kind) else kind(number)
