"""model/checkpoint/names.py: Meta's and Mistral's own files load as the same model in Hugging Face's format."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from kernels import InputError
from model.checkpoint.names import config_values, halves_from_pairs, to_file_name, to_model_name
from tests.model.checkpoint.folders import TOKENS, assert_same_weights, load

PARAMS = {"dim": 48, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "hidden_dim": 80, "vocab_size": 61,
          "norm_eps": 3e-3, "rope_theta": 5000.0, "max_position_embeddings": 64, "max_batch_size": 32}  # fmt: skip
THEIRS = {"attention.q_proj": "attention.wq", "attention.k_proj": "attention.wk", "attention.v_proj": "attention.wv",
          "attention.o_proj": "attention.wo", "feed_forward.gate_proj": "feed_forward.w1",
          "feed_forward.down_proj": "feed_forward.w2", "feed_forward.up_proj": "feed_forward.w3",
          "embed_tokens": "tok_embeddings", "lm_head": "output"}  # fmt: skip


def pairs_from_halves(weight, n_heads):
    """Row by row, the other way: element j of half h of a head becomes element 2 j + h."""
    head_dim = weight.size(0) // n_heads
    rows = [
        weight[head * head_dim + h * head_dim // 2 + j]
        for head in range(n_heads)
        for j in range(head_dim // 2)
        for h in range(2)
    ]
    return torch.stack(rows)


def published(model, rotary=True):
    tensors = {"rope.freqs": torch.ones(6)}
    for name, weight in model.state_dict().items():
        if rotary and ".q_proj." in name:
            weight = pairs_from_halves(weight, 4)
        if rotary and ".k_proj." in name:
            weight = pairs_from_halves(weight, 2)
        for ours, theirs in THEIRS.items():
            name = name.replace(ours, theirs)
        tensors[name] = weight.contiguous()
    return tensors


def write(folder, tensors, params, n_files=1):
    names = sorted(tensors)
    for i in range(n_files):
        name = "consolidated.safetensors" if n_files == 1 else f"consolidated-{i + 1:05}-of-{n_files:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::n_files]}, folder / name)
    (folder / "params.json").write_text(json.dumps(params))


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_metas_names_and_rows_give_the_same_model_bit_for_bit(tmp_path, config, make_model, dtype, n_files):
    """Rows of q and k are reordered by their own number of heads."""
    model = make_model(config).to(dtype)
    write(tmp_path, published(model), PARAMS, n_files)
    loaded = load(tmp_path)
    assert loaded.config == config
    assert_same_weights(model, loaded)


@pytest.mark.parametrize("position", [0, 1])
@torch.no_grad()
def test_rows_in_the_wrong_order_show_from_the_second_token_on(tmp_path, config, make_model, position):
    model = make_model(config)
    write(tmp_path, published(model, rotary=False), PARAMS)
    ours, theirs = load(tmp_path)(TOKENS)[:, position], model(TOKENS)[:, position]
    assert ((ours - theirs).abs().max() > 1e-3 * theirs.abs().max()) == (position > 0)


@pytest.mark.parametrize("kept", ["tok_embeddings.weight", "output.weight"])
def test_a_window_makes_it_a_mistral_and_one_table_instead_of_two_a_tied_model(tmp_path, config, make_model, kept):
    model = make_model(replace(config, tie_word_embeddings=True, sliding_window=7, model_type="mistral"))
    tensors = published(model)
    tensors[kept] = tensors.pop("tok_embeddings.weight")
    write(tmp_path, tensors, PARAMS | {"sliding_window": 7, "vocab_size": -1})
    loaded = load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_a_config_json_beside_it_comes_first(tmp_path, config, make_model):
    """It may state biases, whose elements are reordered as the rows are."""
    model = make_model(replace(config, attention_bias=True))
    write(tmp_path, published(model), {"use_scaled_rope": True})
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    loaded = load(tmp_path)
    assert loaded.config == model.config
    assert_same_weights(model, loaded)


@pytest.mark.parametrize(
    ("dim", "params", "width"),
    [  # the sizes that Meta's and Hugging Face's configs state for these models
        (4096, {"multiple_of": 256}, 11008),  # Llama 2 7B
        (8192, {"multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),  # Llama 2 70B
        (4096, {"multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),  # Llama 3 8B
        (2048, {"multiple_of": 256, "ffn_dim_multiplier": 1.5}, 8192),  # Llama 3.2 1B
        (4096, {"multiple_of": 1, "ffn_dim_multiplier": 1.3}, 14198),  # int(1.3 * 10922), both cut off
    ],
)
def test_the_width_of_the_feed_forward_is_metas(dim, params, width):
    assert config_values({"dim": dim, **params}, None)["intermediate_size"] == width


def test_a_vocabulary_of_minus_one_is_that_of_the_embedding():
    assert config_values({"dim": 48, "vocab_size": -1}, 61)["vocab_size"] == 61


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"norm_eps": None}, ["rms_norm_eps is missing"]),
        ({"norm_eps": -1}, ["rms_norm_eps is -1"]),
        ({"use_scaled_rope": True}, ["use_scaled_rope is true", "config.json"]),
        ({"moe": {"num_experts": 8}}, ["moe", "num_experts"]),
        ({"n_heads": "many"}, ["num_attention_heads", "many"]),
        ({"hidden_dim": None, "multiple_of": 16, "ffn_dim_multiplier": "x"}, ["ffn_dim_multiplier", "x"]),
        ({"hidden_dim": None}, ["intermediate_size is missing"]),
        ({"hidden_dim": None, "multiple_of": 0.5}, ["intermediate_size is missing"]),
        ({"dim": True}, ["hidden_size is true"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_files_path(tmp_path, config, make_model, changed, named):
    write(tmp_path, published(make_model(config)), PARAMS | changed)
    with pytest.raises(InputError) as refusal:
        load(tmp_path)
    assert [part for part in [str(tmp_path / "params.json"), *named] if part not in str(refusal.value)] == []


def test_a_given_eps_takes_the_place_of_a_missing_one(tmp_path, config, make_model):
    write(tmp_path, published(make_model(config)), PARAMS | {"norm_eps": None})
    assert load(tmp_path, rms_norm_eps=7e-4).config.rms_norm_eps == 7e-4


@pytest.mark.parametrize(("params", "context"), [({"multiple_of": 8}, 2048), ({"hidden_dim": 80}, 32768)])
def test_a_context_that_is_not_stated_is_metas_or_mistrals(params, context):
    assert config_values({"dim": 48, **params}, None)["max_position_embeddings"] == context
    assert config_values({"dim": 48, "max_seq_len": 99, **params}, None)["max_position_embeddings"] == 99


def test_pairs_become_halves():
    weight = torch.arange(2 * 6).float()[:, None]
    assert halves_from_pairs(weight, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_names_of_hugging_face_are_read_in_both_directions(config, make_model):
    names = list(make_model(replace(config, attention_bias=True, mlp_bias=True)).state_dict())
    theirs = [to_file_name(name) for name in names]
    assert {"model.embed_tokens.weight", "model.layers.2.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.weight",
            "model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight",
            "model.norm.weight", "lm_head.weight"} < set(theirs)  # fmt: skip
    assert [to_model_name(name) for name in theirs] == names
