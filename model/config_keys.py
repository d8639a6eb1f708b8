"""What a config.json may say: its keys, their checks, and what is filled in. The rest is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

from kernels import LAYER_NORMS, InputError, layer_norm_in
from model.cli import say
from model.family import FAMILIES, FULL, MULTIPLIERS, OPTIONAL_KEYS, SLIDING, Family
from model.json_file import expect, show

# Keys that transformers reads, or that many published models have, and that change no logits: taken in silence.
# A key in none of these tables is not read by transformers' LLaMA either. It is named on stderr, and changes nothing.
HARMLESS_KEYS = {
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_sliding_window_pattern", "architectures",
    "attn_implementation", "auto_map", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "experts_implementation", "gradient_checkpointing", "id2label", "is_encoder_decoder", "is_llama_config", "label2id",
    "name_or_path", "num_labels", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "tie_last_hidden_states", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id",
    "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip

# Keys that would change the logits, and the values that do not: the usual one first, and always null.
ONLY_VALUES = {
    "attention_chunk_size": [None],
    "compression_config": [None, {}],
    "fusion_config": [None, {}],
    "is_causal": [True],
    "kv_sharing_modes": [None],
    "num_kv_shared_layers": [0],
    "partial_rotary_factor": [1.0],
    "per_layer_config": [None, {}],
    "pruned_heads": [{}],
    "quantization_config": [None, {}],
    "rope_interleaved": [False],
    "transformers_weights": [None],
    "use_bidirectional_attention": [False],
    "use_mrope": [False],
    "use_sliding_window": [False],
}

ORIGINAL_LENGTH = "original_max_position_embeddings"
# The keys that each kind of RoPE scaling needs, and those that it may have. model/rope.py computes them.
ROPE_SCALING_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, {ORIGINAL_LENGTH}),
    "dynamic": ({"factor"}, {ORIGINAL_LENGTH}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH}, set()),
    "yarn": (
        {"factor"},
        {ORIGINAL_LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}

# All keys that transformers reads there. One that belongs to another rope_type is refused.
ROPE_KEYS = {"partial_rotary_factor", "short_factor", "long_factor"}.union(
    *(needed | possible for needed, possible in ROPE_SCALING_KEYS.values())
)

# Values of RoPE's keys that change nothing: transformers takes an mscale of 0 for none.
NEUTRAL_IN_ROPE = {"partial_rotary_factor": 1, "mscale": 0, "mscale_all_dim": 0}

# Far beyond any model, and small enough that a product of three sizes is still that of a tensor.
LARGEST_SIZE = 2**20
LONGEST_TEXT = 2**31 - 1


def is_id(value: Any) -> bool:
    """True for a token id: an integer from 0 to 2^31 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST_TEXT


def as_list(value: Any) -> list[Any]:
    """`value` if it is a list, otherwise a list of it alone."""
    return value if isinstance(value, list) else [value]


def _converted(kind: type, fits: Callable[[float], bool], expected: str, key: str, value: Any) -> int | float:
    """A number that fits; also from text like "1e-05", which is how some writers of JSON and YAML leave it."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    expect(fits(number) and (kind is float or number.is_integer()), key, value, expected)
    return value if isinstance(value, kind) else kind(number)


def _fitting(fits: Callable[[Any], bool], expected: str, key: str, value: Any) -> Any:
    """A value of the expected type, which Python does not ask for: the text "false" is true."""
    expect(fits(value), key, value, expected)
    return value


_number = partial(_converted, float, lambda number: 0 < number < math.inf, "a positive number")
_share = partial(_converted, float, lambda number: 0 <= number < 1, "a number from 0 to below 1")
_size = partial(_converted, int, lambda number: 0 < number <= LARGEST_SIZE, f"a positive integer up to {LARGEST_SIZE}")
_length = partial(_converted, int, lambda number: 0 < number <= LONGEST_TEXT, "a positive integer below 2^31")
_flag = partial(_fitting, lambda value: isinstance(value, bool), "true or false")
_object = partial(_fitting, lambda value: isinstance(value, dict), "an object")
_end_ids = partial(_fitting, lambda value: all(map(is_id, as_list(value))), "a token id or a list of them")
_norm = partial(
    _fitting,
    lambda value: isinstance(value, str) and (":" in value or layer_norm_in(value) is not None),
    f"{', '.join(LAYER_NORMS)} or package.module:function",
)

CHECKS: dict[str, Callable[[str, Any], Any]] = {  # (key, value) -> the value as the config holds it
    **dict.fromkeys(["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"], _size),
    **dict.fromkeys(["num_attention_heads", "num_key_value_heads", "head_dim"], _size),
    **dict.fromkeys(["max_position_embeddings", "max_sequence_length"], _length),
    **dict.fromkeys(["rms_norm_eps", "rope_theta", "rope_local_base_freq", "initializer_range"], _number),
    **dict.fromkeys(["attn_logit_softcapping", "final_logit_softcapping", *MULTIPLIERS], _number),
    **dict.fromkeys(["attention_bias", "mlp_bias", "tie_word_embeddings"], _flag),
    **dict.fromkeys(["rope_parameters", "rope_scaling"], _object),
    "attention_dropout": _share,
    **dict.fromkeys(["sliding_window", "sliding_window_pattern", "query_pre_attn_scalar"], _length),
    "bos_token_id": partial(_fitting, is_id, "a token id"),
    "eos_token_id": _end_ids,
    "norm": _norm,
}
ROPE_CHECKS = {ORIGINAL_LENGTH: _length, "truncate": _flag}  # the others are numbers


def read_keys(values: dict[str, Any], fields: Collection[str], path: str | Path) -> dict[str, Any]:
    """The values of a config.json by LlamaConfig's `fields`, checked, with what the family's own config leaves out.

    A field without a value is left out. Raises InputError naming key and value. Keys that nobody reads are named on
    stderr, with `path` as their file.
    """
    values = {key: value for key, value in values.items() if key not in HARMLESS_KEYS}
    _take_model_type(values)
    for key, allowed in ONLY_VALUES.items():
        found = values.pop(key, None)
        if found is not None and found not in allowed:
            raise InputError(f"{key} is {show(found)}; only {show(allowed[0])} is computed here")
    for key, check in CHECKS.items():
        if values.get(key) is not None:
            values[key] = check(key, values[key])
    unread = _take_rope(values)
    unread += _take_family(values)
    _take_lengths(values)
    unread += values.keys() - fields
    if unread:
        _say_unread(path, values["model_type"], tuple(sorted(unread)))
    values = {key: value for key, value in values.items() if key in fields and value is not None}
    _fill_in_heads(values)
    return values


def family_of(values: dict[str, Any]) -> Family:
    """The family that the values of a config.json name. Raises InputError for one that is not computed here."""
    model_type = values.get("model_type", "llama")
    # "rms" before a family: its norm is not RMSNorm. Other software does not know such a type, and so refuses it.
    name = model_type.removeprefix("rms") if isinstance(model_type, str) else ""
    if name not in FAMILIES:
        raise InputError(f"model_type is {show(model_type)}; expected one that is computed here: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _take_model_type(values: dict[str, Any]) -> None:
    """Bring model_type to a family's name, and the eps of another norm to rms_norm_eps."""
    family_of(values)  # refuses what is not computed
    model_type, norm = values.get("model_type", "llama"), values.get("norm")
    name = values["model_type"] = model_type.removeprefix("rms")
    if name != model_type:
        if norm is None:
            raise InputError(
                f"norm is missing; model_type {model_type} needs its norm's name or package.module:function"
            )
        eps = values.pop("norm_eps", None)
        if values.get("rms_norm_eps") is None:
            values["rms_norm_eps"] = eps
    elif norm is not None:
        raise InputError(f"norm is {show(norm)}, and model_type {name} has RMSNorm; remove norm, or state rms{name}")


def _take_family(values: dict[str, Any]) -> list[str]:
    """Fill in the family's defaults, check the keys that depend on the family, and remove those that it fixes.

    Returns the names of biases that the family does not have: transformers does not read them.
    """
    name = values["model_type"]
    family = FAMILIES[name]
    for key, value in family.defaults.items():
        values.setdefault(key, value)
    for key in ("hidden_act", "hidden_activation"):  # Gemma has had both
        found = values.pop(key, None)
        expected = f"{show(family.activation[0])} for model_type {name}"
        expect(found is None or found in family.activation, key, found, expected)
    if values.pop("use_sliding_window", None) is False:  # Qwen's window, which is not in use; true is refused
        values["sliding_window"] = None
        values.pop("max_window_layers", None)
    for key in OPTIONAL_KEYS:
        found = values.get(key)
        if key not in family.defaults:
            expect(found is None, key, found, f"null, since model_type {name} does not compute it")
        elif key in MULTIPLIERS:
            expect(found is not None, key, found, "a positive number")
    _take_layer_types(values, family)
    strange = {"attention_bias", "mlp_bias"}.difference(family.biases)
    return [key for key in sorted(strange) if values.pop(key, False)]


def _take_layer_types(values: dict[str, Any], family: Family) -> None:
    """Fill in which layers have a window, where not all are alike."""
    pattern, n_layers = family.window_pattern, values.get("num_hidden_layers", 0)
    if "sliding_window_pattern" in family.defaults:
        pattern = values.pop("sliding_window_pattern") or pattern
    kinds, window = values.get("layer_types"), values.get("sliding_window")
    if kinds is None and pattern is not None:
        kinds = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(n_layers)]
    if kinds is None:
        return
    fits = isinstance(kinds, list) and len(kinds) == n_layers and all(kind in (FULL, SLIDING) for kind in kinds)
    expect(fits, "layer_types", kinds, f"{FULL} or {SLIDING} for each of {n_layers} layers")
    expect(window is not None or SLIDING not in kinds, "sliding_window", window, f"a number for layers of {SLIDING}")
    if family.window_pattern is None and len(set(kinds)) == 1:  # with a pattern, leaving it out would mean the pattern
        if SLIDING not in kinds:
            values["sliding_window"] = None
        kinds = None
    values["layer_types"] = kinds


def _take_rope(values: dict[str, Any]) -> list[str]:
    """Bring both spellings to the older one: rope_theta at the top, and the rest, if there is any, in rope_scaling.

    Newer configs keep both in rope_parameters. Returns the names of keys inside them that nobody reads.
    """
    new, old = values.pop("rope_parameters", None) or {}, values.pop("rope_scaling", None) or {}
    unread: list[str] = []
    if new and "rope_local_base_freq" in FAMILIES[values["model_type"]].defaults:  # Gemma 3's, a kind of layer each
        expect(new.keys() <= {FULL, SLIDING}, "rope_parameters", new, f"{FULL} and {SLIDING}, and nothing beside them")
        local, new = (_object(f"rope_parameters's {kind}", new.get(kind) or {}) for kind in (SLIDING, FULL))
        scaling, unread = _read_rope(values, f"rope_parameters's {SLIDING}", local, "rope_local_base_freq")
        expect(scaling is None, f"rope_parameters's {SLIDING}", local, "the default rope_type in layers with a window")
    if new and old and new != old:
        raise InputError(f"rope_parameters is {show(new)} and rope_scaling is {show(old)}; remove one of them")
    key, given = ("rope_parameters", new) if new else ("rope_scaling", old)
    scaling, others = _read_rope(values, key, given, "rope_theta")
    if scaling is not None:
        values["rope_scaling"] = scaling
    return unread + others


def _read_rope(
    values: dict[str, Any], key: str, given: dict[str, Any], theta_key: str
) -> tuple[dict[str, Any] | None, list[str]]:
    """Check what is `given` under `key`, and bring its rope_theta to `theta_key` of `values`.

    Returns the rest as rope_scaling has it, and the names of keys that nobody reads.
    """
    rope = {name: value for name, value in given.items() if value not in (None, NEUTRAL_IN_ROPE.get(name))}
    rope.pop("finetuned", None)  # tells how the model was made

    if "rope_theta" in rope:
        theta = _number("rope_theta", rope.pop("rope_theta"))
        if values.get(theta_key) not in (None, theta):
            raise InputError(f"{theta_key} is {values[theta_key]} and {key} has {theta}; remove one of them")
        values[theta_key] = theta

    kind = rope.pop("rope_type", rope.get("type", "default"))
    if rope.pop("type", kind) != kind or kind not in list(ROPE_SCALING_KEYS):
        raise InputError(f"{key} is {show(given)}; expected one rope_type of {', '.join(ROPE_SCALING_KEYS)}")
    needed, possible = ROPE_SCALING_KEYS[kind]
    if kind in ("llama3", "yarn"):  # transformers takes sometimes the one, sometimes the other
        outside = values.pop(ORIGINAL_LENGTH, None)
        same = outside in (None, rope.get(ORIGINAL_LENGTH))
        expect(same, ORIGINAL_LENGTH, outside, f"it inside {key}, or the same in both")
    if missing := sorted(needed - rope.keys()):
        raise InputError(f"{key} has no {missing[0]}; rope_type {kind} needs {', '.join(sorted(needed))}")
    unread = [name for name in rope if name not in ROPE_KEYS]
    rope = {name: value for name, value in rope.items() if name in ROPE_KEYS}
    if foreign := sorted(rope.keys() - needed - possible):
        raise InputError(f"{key} has {show(foreign[0])}: {show(rope[foreign[0]])}; rope_type {kind} has no such key")
    rope = {name: ROPE_CHECKS.get(name, _number)(f"{key}'s {name}", value) for name, value in rope.items()}
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise InputError(f"{key} is {show(given)}; expected low_freq_factor to be below high_freq_factor")
    return {"rope_type": kind, **rope} if kind != "default" else None, [f"{key}'s {name}" for name in unread]


def _take_lengths(values: dict[str, Any]) -> None:
    """LLaMA 1's configs call max_position_embeddings max_sequence_length; Vicuna's mean the linearly scaled length."""
    longest = values.pop("max_sequence_length", None)
    linear = (values.get("rope_scaling") or {}).get("rope_type") == "linear"
    if longest is not None and (linear or values.get("max_position_embeddings") is None):
        values["max_position_embeddings"] = longest


def _fill_in_heads(values: dict[str, Any]) -> None:
    """Without num_key_value_heads each query head has its own; without head_dim the heads share hidden_size."""
    width, n_heads = values.get("hidden_size"), values.get("num_attention_heads")
    if width is None or n_heads is None:
        return
    if "head_dim" not in values and width % n_heads:
        raise InputError(f"hidden_size {width} is not divisible by num_attention_heads {n_heads}; add a head_dim")
    values.setdefault("num_key_value_heads", n_heads)
    values.setdefault("head_dim", width // n_heads)


@cache  # a command may read the same config more than once
def _say_unread(path: str | Path, model_type: str, keys: tuple[str, ...]) -> None:
    known = [*CHECKS, *ONLY_VALUES, "layer_types", "model_type"]
    near = {key: get_close_matches(key, known, 1, cutoff=0.75) for key in keys}
    names = [f"{show(key)} (is {near[key][0]} meant?)" if near[key] else show(key) for key in keys]
    say(f"{path}: ignored keys that model_type {model_type} does not have: {', '.join(names)}")
