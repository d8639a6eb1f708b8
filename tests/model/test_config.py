"""model/config.py and config_keys.py: what config.json may say, what is filled in, and what is refused by name."""

import inspect
import json
import re
from dataclasses import replace

import pytest
import transformers
from transformers import PreTrainedConfig, cache_utils, masking_utils, modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from kernels import InputError
from model.config import LlamaConfig
from model.config_keys import CHECKS, HARMLESS_KEYS

VALUES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 3e-3,
}
NORM = "tests.norms:layer_norm"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def test_every_key_reaches_its_field():
    given = VALUES | {"head_dim": 14, "rope_theta": 5000.0, "tie_word_embeddings": True, "initializer_range": 0.03}
    given |= {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3, "attention_dropout": 0.1}
    given |= {"bos_token_id": 1, "eos_token_id": [2, 5]}
    config = LlamaConfig.from_dict(given)
    assert {key: getattr(config, key) for key in given} == given


@pytest.mark.parametrize("absent", [{}, {"head_dim": None, "num_key_value_heads": None}])
def test_what_llama_leaves_out_is_filled_in(absent):
    config = LlamaConfig.from_dict({k: v for k, v in VALUES.items() if k != "num_key_value_heads"} | absent)
    assert (config.head_dim, config.num_key_value_heads) == (12, 4)
    assert (config.rope_theta, config.tie_word_embeddings, config.end_ids()) == (10000.0, False, set())


def test_a_stated_head_dim_needs_no_divisible_hidden_size():
    assert LlamaConfig.from_dict(VALUES | {"hidden_size": 50, "head_dim": 6}).head_dim == 6


@pytest.mark.parametrize(
    ("key", "text", "number"),
    [("rms_norm_eps", "1e-05", 1e-5), ("rope_theta", "500000", 500000.0), ("vocab_size", "61", 61)],
)
def test_a_number_written_as_text_is_converted(key, text, number):
    value = getattr(LlamaConfig.from_dict(VALUES | {key: text}), key)
    assert value == number
    assert type(value) is type(number)


@pytest.mark.parametrize(
    ("found", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5000.0}, 5000.0),
        ({"rope_parameters": None}, 10000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 500000.0),
        ({"rope_parameters": {"rope_theta": "500000"}}, 500000.0),
        ({"rope_parameters": {"rope_theta": 500000.0}, "rope_theta": 500000}, 500000.0),
    ],
)
def test_rope_theta_is_found_where_old_and_new_configs_keep_it(found, theta):
    assert LlamaConfig.from_dict(VALUES | found).rope_theta == theta


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_rope_scaling_is_found_in_both_spellings(key, kind):
    given = {kind: "llama3"} | {name: str(value) for name, value in LLAMA3.items() if name != "rope_type"}
    config = LlamaConfig.from_dict(VALUES | {key: given | {"rope_theta": "500000"}})
    assert (config.rope_scaling, config.rope_theta) == (LLAMA3, 500000.0)
    assert LlamaConfig.from_dict(VALUES | {key: {kind: "default"}}).rope_scaling is None


@pytest.mark.parametrize("key", sorted(LLAMA3.keys() - {"rope_type"}))
def test_a_scaling_without_a_number_that_it_needs_is_refused(key):
    with pytest.raises(InputError, match=f"rope_scaling has no {key};"):
        LlamaConfig.from_dict(VALUES | {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != key}})


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 64),
        (LLAMA3, 64),
        ({"type": "linear", "factor": 4.0}, 64),
        ({"type": "dynamic", "factor": 2.5}, 160),
        ({"type": "yarn", "factor": 4.0}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "finetuned": True}, 128),
        ({"type": "dynamic", "factor": 1e300}, 2**31 - 1),
    ],
)
def test_the_context_is_that_of_the_scaled_positions(scaling, length):
    assert LlamaConfig.from_dict(VALUES | {"rope_scaling": scaling}).context_length == length


def test_max_sequence_length_is_llama_1s_context_and_vicunas():
    bare = {key: value for key, value in VALUES.items() if key != "max_position_embeddings"}
    assert LlamaConfig.from_dict(bare | {"max_sequence_length": 96}).context_length == 96
    assert LlamaConfig.from_dict(VALUES | {"max_sequence_length": 96}).context_length == 64
    linear = {"max_sequence_length": 256, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert LlamaConfig.from_dict(VALUES | linear).context_length == 256


@pytest.mark.parametrize(
    "harmless",
    [
        {"hidden_act": "swish"},
        {"quantization_config": {}},
        {"torch_dtype": "float16", "transformers_version": "4.31.0", "pretraining_tp": 2, "pad_token_id": -1},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0, "mscale_all_dim": 0.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8192},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        {"attention_dropout": 0, "per_layer_config": None, "use_cache": False, "gradient_checkpointing": True},
        {"attention_dropout": "0.5"},
    ],
)
def test_what_changes_no_result_is_taken_in_silence(harmless, capsys):
    assert LlamaConfig.from_dict(VALUES | harmless).hidden_size == 48
    assert capsys.readouterr().err == ""


# Keys of published models, besides those of VALUES, whose values are their own
PUBLISHED = {
    "Llama 1, converted": {"max_sequence_length": 2048, "pad_token_id": 0, "torch_dtype": "float16",
        "transformers_version": "4.27.0.dev0", "use_cache": True, "bos_token_id": 1, "eos_token_id": 2},
    "Llama 2": {"_name_or_path": "meta-llama/Llama-2-7b-hf", "pretraining_tp": 1, "rope_scaling": None},
    "Llama 3.1": {"attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [8, 9], "mlp_bias": False},
    "unsloth's Llama 3.2": {"unsloth_fixed": True, "unsloth_version": "2025.1.1", "_attn_implementation_autoset": True},
    "SmolLM2": {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "transformers.js_config":
        {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    "Vicuna, 16k": {"max_sequence_length": 256, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 1e4},
    "Yarn-Llama-2": {"auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"}, "rope_scaling": {"factor": 16.0,
        "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}},
    "a classifier": {"id2label": {"0": "a"}, "label2id": {"a": 0}, "num_labels": 1, "problem_type": "regression"},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_load_in_silence(name, capsys):
    LlamaConfig.from_dict(VALUES | {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"} | PUBLISHED[name])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", [transformers.LlamaConfig, transformers.MistralConfig])
def test_all_that_transformers_writes_loads_in_silence(kind, capsys):
    values = kind(**VALUES, name_or_path="somewhere", dtype="bfloat16").to_dict()
    assert LlamaConfig.from_dict(json.loads(json.dumps(values))).model_type == kind.model_type
    assert capsys.readouterr().err == ""


def keys_of_transformers():
    """Keys that transformers' configs take, and that the code of its LLaMA and Mistral asks a config for."""
    kinds = (transformers.LlamaConfig, transformers.MistralConfig, PreTrainedConfig)
    keys = {key for kind in kinds for key in inspect.signature(kind).parameters}
    keys.update(re.findall(r"^ {8}(\w+) \(`", PreTrainedConfig.__doc__, re.MULTILINE))
    for taker in (PreTrainedConfig.__post_init__, modeling_rope_utils):
        keys.update(re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', inspect.getsource(taker)))
    for module in (modeling_llama, modeling_mistral, masking_utils, cache_utils, modeling_rope_utils):
        asked = r'(?:get|has)attr\((?:\w+[._])?config, "(\w+)"|[._]config\.([a-z]\w+)(?!\w*\()'
        keys.update(key for pair in re.findall(asked, inspect.getsource(module)) for key in pair if key)
    return keys - NOT_A_KEY


# Asked for by other models' caches, methods, and what **kwargs means to Python
NOT_A_KEY = {"number_of_conv_states", "kwargs", "get_text_config"}


@pytest.mark.parametrize("key", sorted(keys_of_transformers()))
def test_a_key_that_transformers_reads_changes_no_logits_or_is_checked(key):
    if key not in HARMLESS_KEYS:
        with pytest.raises(InputError, match=f'^{key} is "strange"; '):
            LlamaConfig.from_dict(VALUES | {key: "strange"})


def test_keys_that_nobody_reads_are_named_once_in_one_line(tmp_path, capsys):
    theirs = {"internal_version": "7.1", "_model_name_or_path": "a.gguf", "rope_tetha": 5e5, "num_kv_heads": None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(VALUES | theirs | {"rope_scaling": LLAMA3 | {"two\nlines": 3, "finetuned": True}}))
    for _ in range(2):
        assert LlamaConfig.load(path) == LlamaConfig.from_dict(VALUES | {"rope_scaling": LLAMA3})
    assert capsys.readouterr().err == (
        f'{path}: ignored keys that model_type llama does not have: "_model_name_or_path", "internal_version", '
        '"num_kv_heads" (is num_key_value_heads meant?), "rope_scaling\'s two\\nlines", '
        '"rope_tetha" (is rope_theta meant?)\n'
    )


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + 400 * "0", "-1" + 400 * "0", "1" + 5000 * "0"])
@pytest.mark.parametrize("key", [*sorted(CHECKS.keys() - {"rope_parameters", "rope_scaling", "norm"}), "rope's factor"])
def test_a_number_too_large_is_refused(tmp_path, key, number):
    path = tmp_path / "config.json"
    change = f'"{key}": {number}' if key in CHECKS else f'"rope_scaling": {{"type": "yarn", "factor": {number}}}'
    path.write_text(json.dumps(VALUES | {"model_type": "mistral"})[:-1] + f", {change}}}")
    with pytest.raises(InputError, match=f"{re.escape(str(path))}( is not JSON|.*{key.split()[-1]} is .*; expected)"):
        LlamaConfig.load(path)


def test_mistral_has_a_window_and_its_own_defaults():
    mistral = VALUES | {"model_type": "mistral", "num_attention_heads": 8}
    assert LlamaConfig.from_dict(mistral | {"sliding_window": None}).sliding_window is None
    assert LlamaConfig.from_dict(mistral | {"sliding_window": 24}).sliding_window == 24
    del mistral["num_key_value_heads"]
    config = LlamaConfig.from_dict(mistral)
    theirs = transformers.MistralConfig(**mistral)
    found = (config.sliding_window, config.num_key_value_heads)
    assert found == (theirs.sliding_window, theirs.num_key_value_heads) == (4096, 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("rms_norm_eps", bad) for bad in (0, -1e-5, "abc", "", True, [1e-5], float("nan"), float("inf"))],
        *[("rope_theta", bad) for bad in (0, -1.0, "abc", True)],
        *[("vocab_size", bad) for bad in (0, -61, 61.5, True, "many")],
        *[("vocab_size", bad) for bad in (2**20 + 1, 10**40)],
        ("max_position_embeddings", 2**31),
        *[(key, bad) for key in ("attention_bias", "mlp_bias") for bad in ("false", 0)],
        *[("num_hidden_layers", bad) for bad in (0, False, {})],
        *[("initializer_range", bad) for bad in (-0.02, "wide")],
        *[("head_dim", bad) for bad in (0, 13)],
        ("hidden_act", "gelu"),
        *[("attention_dropout", bad) for bad in (1, -0.1, "some", True, float("nan"))],
        ("per_layer_config", {"0": {"num_key_value_heads": 1}}),
        ("is_causal", False),
        ("quantization_config", {"quant_method": "gptq"}),
        ("model_type", "gpt2"),
        ("model_type", ["llama"]),
        *[("rope_parameters", bad) for bad in ("default", {"rope_type": "longrope", "factor": 2.0})],
        *[("rope_scaling", bad) for bad in ([2.0], {"type": "mrope"}, {"type": "linear", "rope_type": "yarn"})],
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["full_attention"]),
        ("sliding_window", 4096),
        ("tie_word_embeddings", "false"),
        ("eos_token_id", "2"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_key_and_value(key, value):
    with pytest.raises(InputError) as refusal:
        LlamaConfig.from_dict(VALUES | {key: value})
    assert key in str(refusal.value)
    assert (value if isinstance(value, str) else json.dumps(value)) in str(refusal.value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hidden_size": 50}, ["hidden_size 50", "num_attention_heads 4"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"rope_parameters": {"rope_theta": 500000.0}, "rope_theta": 10000.0}, ["rope_theta", "10000.0", "500000.0"]),
        ({"rope_parameters": {"factor": 2.0}, "rope_scaling": {"factor": 4.0}}, ["rope_parameters", "2.0", "4.0"]),
        ({"rope_parameters": {"factor": 2.0}}, ["rope_parameters", "factor", "2.0", "default"]),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 32}}, ["rope_scaling", "beta_fast", "32", "llama3"]),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, ["low_freq_factor", "4", "high_freq_factor", "4.0"]),
        ({"rope_scaling": LLAMA3 | {"factor": "many"}}, ["factor", '"many"']),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16.5}}, ["16.5", "positive integer"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, ["truncate", "1"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 0.5}, ["rope_theta", "0.5", "yarn"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, ["head_dim", "2", "dynamic"]),
        ({"sliding_window": 4096, "model_type": "llama"}, ["sliding_window", "4096", "llama"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["rope_parameters", "partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "long_factor": [1.5]}}, ["long_factor", "1.5", "linear"]),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}, ["original_max_position_embeddings is 64"]),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_key_and_value(changed, named):
    with pytest.raises(InputError) as refusal:
        LlamaConfig.from_dict(VALUES | changed)
    assert [part for part in named if part not in str(refusal.value)] == []


@pytest.mark.parametrize("key", sorted(VALUES.keys() - {"num_key_value_heads"}))
@pytest.mark.parametrize("value", ["missing", None])
def test_a_missing_or_null_key_is_refused_by_name(key, value):
    values = {k: v for k, v in VALUES.items() if k != key} | ({} if value == "missing" else {key: value})
    with pytest.raises(InputError, match=f"^{key} is (missing|null);"):
        LlamaConfig.from_dict(values)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is missing; expected a file"),
        (b"", "is not JSON"),
        (b"{'vocab_size': 61}", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[1, 2]", "holds a list"),
        (b"null", "holds a NoneType"),
        (json.dumps(VALUES | {"rms_norm_eps": None}).encode(), "rms_norm_eps is missing"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused_with_its_path(tmp_path, content, reason):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as refusal:
        LlamaConfig.load(path)
    assert str(path) in str(refusal.value)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("in_file", [{}, {"rms_norm_eps": None}, {"rms_norm_eps": 1e-5}])
def test_rms_norm_eps_of_the_caller_overrides_the_file(tmp_path, in_file):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in VALUES.items() if k != "rms_norm_eps"} | in_file))
    assert LlamaConfig.load(path, rms_norm_eps=7e-4).rms_norm_eps == 7e-4
    with pytest.raises(InputError, match="rms_norm_eps is 0;"):
        LlamaConfig.load(path, rms_norm_eps=0)


@pytest.mark.parametrize(("eos", "ids"), [(None, set()), (2, {2}), (0, {0}), ([2, 5], {2, 5}), ([], set())])
def test_end_ids_are_one_several_or_none(eos, ids):
    assert LlamaConfig.from_dict(VALUES | {"eos_token_id": eos}).end_ids() == ids


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rope_scaling": LLAMA3},
        {"attention_bias": True, "mlp_bias": True},
        {"eos_token_id": 2},
        {"attention_dropout": 0.1},
        {"eos_token_id": [2, 5], "tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 24, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    ],
)
def test_to_dict_comes_back_equal_by_json_and_by_transformers(config, changed):
    config = LlamaConfig.from_dict(config.to_dict() | changed)
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    kind = transformers.MistralConfig if config.model_type == "mistral" else transformers.LlamaConfig
    assert config.to_dict()["architectures"] == [kind.__name__.replace("Config", "ForCausalLM")]
    theirs = kind(**config.to_dict())
    assert theirs.attention_dropout == config.attention_dropout
    assert (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"]) == (config.rms_norm_eps, config.rope_theta)
    assert (theirs.num_key_value_heads, theirs.head_dim) == (config.num_key_value_heads, config.head_dim)
    back = LlamaConfig.from_dict(theirs.to_dict())
    scaling = back.rope_scaling
    if scaling and scaling["rope_type"] == "yarn":  # transformers fills in the length, as it is understood here
        assert scaling.pop("original_max_position_embeddings") == config.max_position_embeddings
    assert back == config


# A norm that is not RMSNorm (tests/model/checkpoint/test_save.py shows that transformers refuses it)


@pytest.mark.parametrize(
    ("changed", "model_type", "architecture"),
    [
        ({}, "rmsllama", "RmsllamaForCausalLM"),
        ({"model_type": "mistral", "sliding_window": None}, "rmsmistral", "RmsmistralForCausalLM"),
        ({"model_type": "mistral", "sliding_window": 24}, "rmsmistral", "RmsmistralForCausalLM"),
    ],
)
def test_another_norm_has_a_model_type_of_its_own_and_comes_back_equal(config, changed, model_type, architecture):
    config = replace(config, norm=NORM, **changed)
    values = config.to_dict()
    assert (values["model_type"], values["architectures"], values["norm"]) == (model_type, [architecture], NORM)
    assert (values["rms_norm_eps"], values["norm_eps"]) == (None, config.rms_norm_eps)
    assert LlamaConfig.from_dict(json.loads(json.dumps(values))) == config


def test_a_llama_has_no_key_for_its_norm(config):
    assert config.norm is None
    assert config.to_dict().keys() & {"norm", "norm_eps"} == set()


def test_the_callers_eps_overrides_that_of_another_norm(config, tmp_path):
    config = replace(config, norm=NORM)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert LlamaConfig.load(path, rms_norm_eps=7e-4) == replace(config, rms_norm_eps=7e-4)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "rmsllama"}, ["norm is missing", "rmsllama"]),
        ({"model_type": "rmsmistral", "norm": None}, ["norm is missing", "rmsmistral"]),
        ({"norm": NORM}, [NORM, "llama", "rmsllama"]),
        ({"norm": NORM, "model_type": "mistral"}, [NORM, "mistral", "rmsmistral"]),
        (
            {"norm": "batch_norm", "model_type": "rmsllama"},
            ['norm is "batch_norm"', "layer_norm", "package.module:function"],
        ),
        ({"norm": "layer_norm"}, ["layer_norm", "llama", "rmsllama"]),
        ({"norm": 3, "model_type": "rmsllama"}, ["norm is 3", "package.module:function"]),
        ({"norm": "torch", "model_type": "rmsllama"}, ['norm is "torch"', "package.module:function"]),
        ({"norm": NORM, "model_type": "rmsllama", "norm_eps": 0}, ["rms_norm_eps is 0"]),
        ({"norm": NORM, "model_type": "rmsllama", "sliding_window": 24}, ["sliding_window is 24"]),
        ({"norm_eps": 1e-5}, ["rms_norm_eps is missing"]),
    ],
)
def test_a_norm_that_the_model_type_contradicts_is_refused(changed, named):
    values = VALUES | {"rms_norm_eps": None} if "norm_eps" in changed else VALUES
    with pytest.raises(InputError) as refusal:
        LlamaConfig.from_dict(values | changed)
    assert [part for part in named if part not in str(refusal.value)] == []
