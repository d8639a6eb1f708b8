"""model/family.py: the families differ from LLaMA as transformers has it, from config.json to the weights' names."""

import inspect
import json
import re
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

import generate
from kernels import InputError, in_form, load_backend, reference
from kernels.form import FORMS, Form
from kernels.probe import is_the_formula
from kernels.torch_version import TORCH_2_13
from model import family as table
from model.checkpoint import names
from model.config import LlamaConfig
from model.config_keys import HARMLESS_KEYS
from model.family import FAMILIES, FULL, MULTIPLIERS, SLIDING
from model.llama import Llama, summed_loss
from model.norm import RMSNorm, input_mean_squares, norm_names
from tests.helpers import CPU, FLOAT32_BOUND, ROOT, needs_triton, relative
from tests.model.checkpoint.folders import KINDS, TOKENS, assert_same_logits, load, theirs_at, theirs_of

VALUES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,  # which every family's default of num_key_value_heads divides
    "max_position_embeddings": 64,
    "rms_norm_eps": 3e-3,
}
ONE_OF_EACH = ["head_dim of its own", "mistral, window", "qwen2", "qwen3", "olmo2", "gemma", "gemma2", "gemma3"]
ONE_OF_EACH += ["granite"]


# Norms on the output or on both sides; windows, caps and two RoPE bases, with layers of both kinds.
DECODED = ["olmo2", "gemma2", "gemma3, linear", "granite, biases"]


def config_of(config, kind):
    """The config that theirs_of has, read by us."""
    changed = KINDS[kind]
    return LlamaConfig.from_dict(replace(config, model_type=changed.get("model_type", "llama")).to_dict() | changed)


def class_of(family):
    return type(transformers.AutoConfig.for_model(family))


def test_one_of_each_family_is_tried():
    assert {KINDS[kind].get("model_type", "llama") for kind in ONE_OF_EACH} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(family):
    ours, theirs = LlamaConfig.from_dict(VALUES | {"model_type": family}), class_of(family)(**VALUES)
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    if ours.rope_local_base_freq is not None:
        assert ours.rope_local_base_freq == rope["sliding_attention"]["rope_theta"]
    keys = ["num_key_value_heads", "tie_word_embeddings", "sliding_window", "query_pre_attn_scalar"]
    for key in [*keys, "attn_logit_softcapping", "final_logit_softcapping", *MULTIPLIERS]:
        assert getattr(ours, key) == getattr(theirs, key, None), key
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    kinds = getattr(theirs, "layer_types", None)
    assert kinds is None or ours.layer_kinds() == kinds
    activation = theirs.hidden_act if hasattr(theirs, "hidden_act") else theirs.hidden_activation
    assert activation == ours.to_dict()["hidden_act"]


def keys_of(family):
    """Keys that a family's config takes, and that its code asks a config for."""
    kind = class_of(family)
    module = inspect.getmodule(transformers.AutoModelForCausalLM._model_mapping[kind])
    keys = set(inspect.signature(kind).parameters) | set(inspect.signature(PreTrainedConfig).parameters)
    for source in (inspect.getsource(kind), inspect.getsource(module)):
        keys.update(re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', source))
    return sorted(keys - {"kwargs", *STANDARD})


STANDARD = {"position_ids", "num_items_in_batch", "token_type_ids"}  # arguments of a forward


@pytest.mark.parametrize(("family", "key"), [(family, key) for family in FAMILIES for key in keys_of(family)])
def test_a_key_that_transformers_reads_is_harmless_or_checked(family, key):
    if key not in HARMLESS_KEYS and key != "max_window_layers":  # of a window that is not in use
        with pytest.raises(InputError, match=f'^{key} is "strange"; '):
            LlamaConfig.from_dict(VALUES | {"model_type": family, key: "strange"})


PUBLISHED = {
    "deepseek-ai/deepseek-llm-7b-base": (
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 30,
         "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
         "rope_theta": 10000.0, "rope_scaling": None, "vocab_size": 102400, "pretraining_tp": 1},
        6_910_365_696,
    ),
    "Qwen/Qwen2.5-0.5B": (
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000.0, "vocab_size": 151936, "tie_word_embeddings": True, "max_window_layers": 24,
         "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False, "hidden_act": "silu"},
        494_032_768,
    ),
    "Qwen/Qwen3-0.6B": (
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
         "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "vocab_size": 151936,
         "tie_word_embeddings": True, "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False,
         "attention_bias": False},
        596_049_920,
    ),
    "allenai/OLMo-2-0425-1B": (
        {"model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
         "rope_theta": 500000, "rope_scaling": None, "vocab_size": 100352, "attention_bias": False,
         "tie_word_embeddings": False},
        1_484_916_736,
    ),
    "google/gemma-2b": (
        {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
         "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 256000, "hidden_act": "gelu",
         "hidden_activation": None},
        2_506_172_416,
    ),
    "google/gemma-2-2b": (
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 256000, "sliding_window": 4096,
         "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
         "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
        2_614_341_888,
    ),
    "google/gemma-3-1b-it": (
        {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
         "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
         "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
         "vocab_size": 262144, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
         "attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
         "cache_implementation": "hybrid"},
        999_885_952,
    ),
    "ibm-granite/granite-3.1-2b-instruct": (
        {"model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "rope_theta": 5000000.0, "rope_scaling": None, "vocab_size": 49155, "tie_word_embeddings": True,
         "attention_bias": False, "attention_dropout": 0.1, "mlp_bias": False, "hidden_act": "silu",
         "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
         "residual_multiplier": 0.22, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
        2_533_531_648,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_load_in_silence_with_their_number_of_parameters(name, capsys):
    values, count = PUBLISHED[name]
    config = LlamaConfig.from_dict(values, path=name)  # the keys that nobody reads are named once for a path
    with torch.device("meta"):
        model = Llama(config, load_backend("reference", CPU))
    assert sum(p.numel() for p in model.parameters()) == count
    assert capsys.readouterr().err == ""
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("kind", ONE_OF_EACH)
@torch.no_grad()
def test_bfloat16_logits_are_those_of_transformers(tmp_path, config, kind):
    theirs = theirs_of(config, torch.bfloat16, **KINDS[kind])
    theirs.save_pretrained(tmp_path)
    found, expected = load(tmp_path)(TOKENS), theirs(TOKENS).logits
    if TORCH_2_13:  # transformers 5.20 gives torch 2.6 masks of another kind, and so another attention
        assert (found != expected).float().mean() < 0.02  # none here; another CPU may sum in another order
    exact = theirs.double()(TOKENS).logits
    assert (found - exact).norm() < 1.25 * (expected - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gemma2", "granite", "granite, biases"])
@torch.no_grad()
def test_embedding_and_head_have_the_bits_of_transformers(tmp_path, config, kind, dtype):
    """Their factors act on the same sums here, whatever the CPU: a reciprocal in place of a division shows."""
    theirs, seen = theirs_of(config, dtype, **KINDS[kind]), []
    theirs.save_pretrained(tmp_path)
    for module in (theirs.model.layers[0].input_layernorm, theirs.model.norm):
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    logits, ours = theirs(TOKENS).logits, load(tmp_path)
    first, last = seen
    assert torch.equal(ours.embed(TOKENS), first)
    assert torch.equal(ours.logits(last, None), logits)


@pytest.mark.parametrize(
    ("kind", "layer_types"),
    [
        ("gemma2", [FULL] * 3),
        ("gemma2", [SLIDING] * 3),
        ("mistral, window", [FULL] * 3),
        ("mistral, window", [FULL, SLIDING, FULL]),
    ],
)
@torch.no_grad()
def test_layer_types_are_honoured_and_kept_where_they_are_not_what_a_family_takes(tmp_path, config, kind, layer_types):
    theirs_of(config, **KINDS[kind], layer_types=layer_types).save_pretrained(tmp_path)
    theirs = theirs_at(tmp_path)  # takes such a Mistral for a Ministral
    model = load(tmp_path)
    assert model.config.layer_kinds() == layer_types
    assert_same_logits(model(TOKENS), theirs(TOKENS).logits)
    values = model.config.to_dict()
    assert LlamaConfig.from_dict(values) == model.config
    assert class_of(values["model_type"])(**values).to_dict().get("layer_types", layer_types) == layer_types


@pytest.mark.parametrize("kind", ["olmo2", "gemma2", "gemma3"])
@torch.no_grad()
def test_names_of_norms_that_are_swapped_are_noticed(tmp_path, config, kind, monkeypatch):
    """The trap: all norms have one shape, so LLaMA's reading of the names loads without an error."""
    theirs = theirs_of(config, **KINDS[kind])
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load(tmp_path)(TOKENS), theirs(TOKENS).logits)
    side = FAMILIES[theirs.config.model_type].norms
    (first, ours), (second, others) = list(names.NORMS[side].items())[-2:]
    monkeypatch.setitem(names.NORMS, side, names.NORMS[side] | {first: others, second: ours})
    with pytest.raises(AssertionError):
        assert_same_logits(load(tmp_path)(TOKENS), theirs(TOKENS).logits)


def test_tensors_of_another_family_are_refused_by_the_name_of_the_one_that_was_read(tmp_path, config):
    theirs_of(config, model_type="qwen2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"qwen2"', '"mistral"'))
    with pytest.raises(InputError, match=r"model_type mistral does not have \(9\), .*layers.0.self_attn.k_proj.bias"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_the_norms_of_a_fresh_model_scale_by_1(tmp_path, config, kind):
    theirs_of(config, **KINDS[kind]).save_pretrained(tmp_path)
    model = Llama(load(tmp_path).config, load_backend("reference", CPU))
    form, parameters = model.config.family.form, dict(model.named_parameters())
    weights = [parameters[name] for name in parameters if name.endswith("norm.weight")]
    assert len(weights) == len(norm_names(model))
    assert all((weight == 1 - form.offset).all() for weight in weights)
    assert is_the_formula(model.norm.backend, 48, 3e-3, CPU, form)


@pytest.mark.parametrize("norm", ["reference", "torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("form", [*FORMS.values(), Form(0.3, False)], ids=str)
@pytest.mark.parametrize("axes", [48, (6, 8), (2, 3, 8)])
def test_a_norm_on_its_own_starts_as_a_scale_of_1(axes, form, norm):
    """In every form, whoever builds it, and again once its weight is reset."""
    module, x = RMSNorm(axes, 3e-3, load_backend(norm, CPU, form)), torch.randn(5, 48, dtype=torch.float64)
    expected = x * (x.square().mean(-1, keepdim=True) + 3e-3).rsqrt()
    rows = x.float().view(5, *(axes if isinstance(axes, tuple) else [axes]))
    for _ in range(2):
        assert relative(module(rows)[0].flatten(1) - expected, expected) < 1e-6  # 0.7 + 0.3 is 1 within 2^-24
        torch.nn.init.uniform_(module.weight, 0.5, 1.5)
        module.reset_parameters()


def test_a_backend_is_bound_to_a_form_once():
    gemma = load_backend("reference", CPU, FORMS["gemma"])
    assert in_form(gemma, FORMS["gemma"]) is gemma
    for other in (FORMS["llama"], FORMS["torch"]):
        with pytest.raises(AssertionError, match="once"):
            in_form(gemma, other)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
@pytest.mark.parametrize("norm", ["torch", pytest.param("triton", marks=needs_triton)])
def test_every_backend_gives_the_logits_and_gradients_of_the_reference(config, make_model, kind, norm):
    expected, found = (make_model(config_of(config, kind), each) for each in ("reference", norm))
    logits = expected(TOKENS)
    assert relative(found(TOKENS) - logits, logits) < FLOAT32_BOUND
    for model in (expected, found):
        summed_loss(model, TOKENS).sum().backward()
    for (name, ours), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert relative(ours.grad - theirs.grad, theirs.grad) < 2 * FLOAT32_BOUND, name  # forward and backward


@pytest.mark.parametrize("kind", DECODED)
@torch.no_grad()
def test_a_padded_row_has_the_logits_that_it_has_alone(config, make_model, kind):
    """At once and in pieces with a cache; paddings that are shorter and longer than the window of 5."""
    model, padding = make_model(config_of(config, kind)).double(), torch.tensor([0, 3, 9])
    tokens = TOKENS.masked_fill(torch.arange(20) < padding[:, None], 0)
    for pieces in ([20], [12, 5, 1, 1, 1]):
        caches = model.new_cache(3, 20) if len(pieces) > 1 else None
        together = torch.cat([model(part, caches, padding=padding) for part in tokens.split(pieces, 1)], 1)
        for row, left in enumerate(padding.tolist()):
            alone = model(tokens[row : row + 1, left:])[0]
            assert relative(together[row, left:] - alone, alone) < 1e-12  # float64, with the same angles


@pytest.mark.parametrize("kind", DECODED)
@torch.no_grad()
def test_decoding_with_a_cache_equals_decoding_without_at_every_split(config, make_model, kind):
    model, tokens = make_model(config_of(config, kind)).double(), TOKENS[:2, :12]
    expected = model(tokens)
    for split in range(1, 12):
        for rest in (tokens[:, split:].split(1, 1), (tokens[:, split:],)):
            caches = model.new_cache(2, 12)
            pieces = [model(piece, caches) for piece in (tokens[:, :split], *rest)]
            assert relative(torch.cat(pieces, 1) - expected, expected) < 1e-12


@pytest.mark.parametrize("kind", ["qwen3", "olmo2", "gemma", "gemma3, linear"])
def test_norms_are_named_and_measured_in_the_order_in_which_they_are_applied(config, make_model, kind):
    model, seen = make_model(config_of(config, kind)), []
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            # the second result is h, which the norm saw
            module.register_forward_hook(lambda *found, name=name: seen.append((name, found[-1][1])))
    with torch.no_grad():
        model(TOKENS)
    assert [name.removeprefix("layers.") for name, _ in seen] == norm_names(model)
    squares = [h.square().mean(-1) for _, h in seen]
    expected = torch.stack([torch.stack([rows.mean(), rows.min(), rows.max()]) for rows in squares], 1)
    assert torch.equal(input_mean_squares(model, TOKENS)[:3], expected)


def test_gemma3_names_every_norm_by_its_module(config, make_model):
    names = ["attention_norm", "attention.q_norm", "attention.k_norm", "attention_output_norm"]
    names += ["ffn_norm", "ffn_output_norm"]
    expected = [f"{i}.{name}" for i in range(3) for name in names] + ["norm"]
    assert norm_names(make_model(config_of(config, "gemma3"))) == expected


def test_a_norm_of_ones_own_that_has_no_form_is_refused_by_name(config):
    norm = load_backend("scripts.peers:layer_norm", CPU)
    with pytest.raises(InputError, match="layer_norm"):
        in_form(norm, FAMILIES["gemma"].form)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmo2", "gemma", "gemma2", "gemma3", "granite"])
def test_each_family_trains_generates_and_loads_in_transformers(name, trained, workplace, command):
    values = json.loads((ROOT / f"configs/tiny-{name}.json").read_text())
    small = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 290, "head_dim": 8, "rms_norm_eps": 3e-3}
    if "sliding_window" in values:
        small["sliding_window"] = 5
    (workplace / "config.json").write_text(json.dumps(values | small))
    metrics, _, _ = trained("--steps", 3, "--lr", "1e-2", "--dtype", "float32", "--log-norms", 2)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    logged = json.loads((workplace / "out/model/run.json").read_text())["norm_names"]
    assert logged == norm_names(load(workplace / "out/model"))
    assert len(logged) == len(metrics[-1]["norm_mean_square"])
    theirs = theirs_at("out/model")
    assert type(theirs).__name__.startswith(name.capitalize())
    with torch.no_grad():
        assert_same_logits(load(workplace / "out/model")(TOKENS), theirs(TOKENS).logits)
    code, text, _ = command(generate.main, "--ckpt", "out/model", "--prompt", "def", "--temperature", 0)
    assert code == 0
    assert text.startswith("def")


def table_of_the_three_questions():
    """The families by the form of their norm, where it stands, and which have one for q and k."""
    lines = ["| | input of each sub-layer | its output | both |", "|---|---|---|---|"]
    for form in dict.fromkeys(family.form for family in FAMILIES.values()):
        weight = f"{form.offset:g} + weight" if form.offset else "weight"
        cells = [f"x_hat {'' if form.round_once else 'rounded, '}times {weight}, rounded"]
        for side in ("input", "output", "both"):
            shown = {name: family for name, family in FAMILIES.items() if (family.form, family.norms) == (form, side)}
            cells.append(
                ", ".join(f"{name}{f' (q, k: {f.qk_norm})' if f.qk_norm else ''}" for name, f in shown.items())
            )
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def test_the_readme_shows_the_families_as_the_code_has_them():
    assert table_of_the_three_questions() in (ROOT / "kernels/README.md").read_text(encoding="utf-8")


def besides(family):
    """What a family has beside its norms, as the table of model/family.py says it."""
    pattern, defaults = family.window_pattern, family.defaults
    window = f"a window in {pattern - 1} of {pattern} layers" if pattern else "a window"
    told = {
        "biases of q, k and v": family.qkv_bias,
        "RoPE in float32": family.rotates_in_float32,
        "GeGLU": family.activation[0] == "gelu_pytorch_tanh",
        "scaled embedding": family.scales_embedding,
        "soft caps": {"attn_logit_softcapping", "final_logit_softcapping"} <= defaults.keys(),
        window: "sliding_window" in defaults,
        "with own RoPE": "rope_local_base_freq" in defaults,
        "four multipliers": set(MULTIPLIERS) <= defaults.keys(),
    }
    text = ", ".join(words for words, holds in told.items() if holds)
    return text.replace("GeGLU, scaled embedding, ", "and ")  # besides what the line above says


def table_of_the_differences():
    rows = [("family", "norm of a sub-layer's", "q and k norm", "form of the norm", "besides")]
    for name, family in FAMILIES.items():
        heads = {None: "", "head": "of each head", "all": "of all heads"}[family.qk_norm]
        form = f"rounds {'once' if family.form.round_once else 'twice'}"
        form += f", {family.form.offset:g} + w" if family.form.offset else ""
        rows.append((name, family.norms, heads, form, besides(family)))
    assert len({row[1:] for row in rows}) == len(rows), "two families without a difference"
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def test_the_table_in_the_docstring_is_that_of_the_families():
    assert table_of_the_differences() in table.__doc__


def test_one_plus_a_small_weight_is_lost_in_bfloat16():
    """The smallest number of kernels/README.md that shows Gemma's form: 1 + 1/256 has no place in bfloat16."""
    x, weight = torch.ones(1, 8, dtype=torch.bfloat16), torch.full((8,), 2.0**-8, dtype=torch.bfloat16)
    assert (1 + weight == 1).all()
    wide = reference.rms_norm(x.float(), weight, 1e-6, offset=1.0, round_once=True)
    assert wide[0, 0].item() == pytest.approx(1.00390625, abs=1e-6)


LINEAR, OLD_LINEAR = ({key: "linear", "factor": 8.0} for key in ("rope_type", "type"))


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3_text", {"layer_types": [["a"]] * 6}, "layer_types"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 5}}, "full_attention"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}, "sliding_attention": [1]}}, "sliding_attention"),
        # transformers reads of Gemma 3's rope_parameters nothing but the two kinds
        ("gemma3_text", {"rope_parameters": LINEAR}, "rope_parameters.* full_attention and sliding_attention"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.*500000.* full_attention"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}} | LINEAR}, "rope_parameters.* nothing beside"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}, "global": {}}}, "rope_parameters.* nothing beside"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": LINEAR}}, "sliding_attention is .*linear"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": OLD_LINEAR}}, "sliding_attention is .*linear"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"factor": 2.0}}}, "sliding_attention has .*factor"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}, "rope_local_base_freq": 7.0},
            "rope_local_base_freq is 7.0 .* sliding_attention has 5.0",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "50.0; .* gemma3_text does not compute it"),
        ("olmo2", {"sliding_window": 5}, "sliding_window is 5; .* model_type olmo2 does not compute it"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act.* model_type olmo2"),
        *[("granite", {key: bad}, key) for key in MULTIPLIERS for bad in (None, 0, -0.5, "many", True)],
        *[(family, {key: 1.0}, key) for key in MULTIPLIERS for family in FAMILIES if family != "granite"],
    ],
)
def test_what_a_family_means_otherwise_is_refused_by_key(family, changed, named):
    with pytest.raises(InputError, match=named):
        LlamaConfig.from_dict(VALUES | {"model_type": family} | changed)


def test_a_rope_of_each_kind_of_layer_is_gemma3s_alone(capsys):
    """To transformers' LLaMA those are keys like any that it does not have."""
    rope = {"rope_theta": 5000.0, "full_attention": LINEAR, "sliding_attention": {"rope_theta": 100.0}}
    found = LlamaConfig.from_dict(VALUES | {"rope_parameters": rope}, path="kinds.json")
    assert found == LlamaConfig.from_dict(VALUES | {"rope_theta": 5000.0})
    assert "rope_parameters's full_attention" in capsys.readouterr().err
    del rope["rope_theta"]
    found = LlamaConfig.from_dict(VALUES | {"rope_parameters": rope, "model_type": "gemma3_text"})
    assert (found.rope_scaling, found.rope_theta, found.rope_local_base_freq) == (LINEAR, 1e6, 100.0)
    rope["sliding_attention"] |= {"strange": 1}
    LlamaConfig.from_dict(VALUES | {"rope_parameters": rope, "model_type": "gemma3_text"}, path="strange.json")
    assert "rope_parameters's sliding_attention's strange" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_are_those_that_transformers_reads(family, capsys):
    """The keys of others are named, and add nothing here either."""
    both = {"attention_bias": True, "mlp_bias": True}
    config = LlamaConfig.from_dict(VALUES | {"model_type": family} | both, path=f"{family}.json")
    read, said = inspect.signature(class_of(family)).parameters, capsys.readouterr().err
    for key in both:
        assert getattr(config, key) == (key in read)
        assert (f'"{key}"' in said) == (key not in read)
    assert not said or f"keys that model_type {family} does not have" in said


def test_the_pattern_of_windows_is_a_key_of_gemma3_alone():
    for pattern, kinds in ((3, [SLIDING, SLIDING, FULL] * 2), (None, [SLIDING] * 5 + [FULL])):
        values = VALUES | {"model_type": "gemma3_text", "sliding_window_pattern": pattern}
        assert LlamaConfig.from_dict(values).layer_kinds() == kinds
    values = VALUES | {"model_type": "gemma2", "sliding_window_pattern": 3}
    assert LlamaConfig.from_dict(values).layer_kinds() == [SLIDING, FULL] * 3


def test_a_window_that_no_layer_has_is_kept_for_transformers():
    values = VALUES | {"model_type": "gemma2", "layer_types": [FULL] * 6, "sliding_window": 5}
    config = LlamaConfig.from_dict(values)
    assert (config.sliding_window, set(config.layer_kinds())) == (5, {FULL})
