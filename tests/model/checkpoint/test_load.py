"""model/checkpoint.py: what is saved comes back, the rest of the world reads it, and damage is named."""

import contextlib
import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import kernels
from kernels import InputError
from model.checkpoint import __main__ as inspection
from model.checkpoint import load as checkpoint
from model.checkpoint import save as saving
from model.checkpoint.load import INDEX, load_checkpoint, to_file_name
from model.checkpoint.save import save_checkpoint
from model.norm import RMSNorm
from tests.helpers import CPU, draw_weights

TOKENIZER = SimpleNamespace(files={"tokenizer.model": b"the bytes of a tokenizer"})
TOKENS = torch.arange(60).view(3, 20)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"


@pytest.fixture
def saved(tmp_path, config, make_model):
    """A model, and the directory where it was saved."""

    def save(dtype=torch.float32, tied=False):
        model = make_model(replace(config, tie_word_embeddings=tied)).to(dtype)
        save_checkpoint(tmp_path / "model", model, TOKENIZER)
        return model, tmp_path / "model"

    return save


def load(folder, **options):
    return load_checkpoint(folder, kernels.load_backend("reference", CPU), CPU, **options)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same_weights(model, other):
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)  # names and dtypes as well


def assert_same_logits(ours, theirs):
    """The bounds of tests/test_llama.py: float32's roundings, and the share that differs in half precision."""
    assert ours.dtype == theirs.dtype
    if ours.dtype == torch.float32:
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    else:
        assert (ours != theirs).float().mean() < 0.25


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_saved_model_comes_back_bit_for_bit_and_in_its_dtype(saved, dtype, tied):
    """A20, A06: also when a loaded model is saved over its own file."""
    model, folder = saved(dtype, tied)
    model.layers[1].feed_forward.up_proj.weight[0, :2] = torch.tensor([1e5, 1e-8])  # inf and 0 in float16
    for _ in range(2):
        save_checkpoint(folder, model, TOKENIZER)
        loaded = load(folder)
        assert_same_weights(model, loaded)
        assert torch.equal(loaded(TOKENS), model(TOKENS))
        assert loaded.config == model.config
        model = loaded
    assert_same_weights(model.float(), load(folder, dtype=torch.float32))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.model"]
    assert (folder / "tokenizer.model").read_bytes() == TOKENIZER.files["tokenizer.model"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_file_is_what_transformers_writes(saved, tmp_path, tied):
    """Names, shapes and metadata; a tied head is stored once, as the embedding."""
    model, folder = saved(tied=tied)
    config = transformers.LlamaConfig(**model.config.to_dict())
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    shapes, metadata = [], []
    for path in (folder, tmp_path / "theirs"):
        with safe_open(path / "model.safetensors", framework="pt") as file:
            shapes.append({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
            metadata.append(file.metadata())
    assert shapes[0] == shapes[1]
    assert ("lm_head.weight" in shapes[0]) == (not tied)
    assert metadata == [{"format": "pt"}] * 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_transformers_loads_it_as_the_same_model(saved, dtype, tied):
    model, folder = saved(dtype, tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert theirs.dtype == dtype
    assert {m.variance_epsilon for m in theirs.modules() if hasattr(m, "variance_epsilon")} == {3e-3}
    assert_same_logits(model(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_model_saved_by_transformers_loads_here(tmp_path, config, dtype, tied):
    torch.manual_seed(0)
    their_config = transformers.LlamaConfig(**config.to_dict() | {"tie_word_embeddings": tied})
    theirs = transformers.AutoModelForCausalLM.from_config(their_config, dtype=dtype).eval()
    for name, weight in theirs.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert ours.config == replace(config, tie_word_embeddings=tied)
    assert_same_logits(ours(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize("difference", [0, 1])
@torch.no_grad()
def test_a_tied_head_in_the_file_gives_way_to_the_embedding(saved, difference, capsys, recwarn):
    """A04: with a stored head the logits are still those of the embedding; another head is worth a warning."""
    model, folder = saved(tied=True)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + difference}))
    loaded = load(folder)
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert_same_weights(model, loaded)
    heard = [capsys.readouterr().err, *(str(warning.message) for warning in recwarn)]
    assert any("lm_head.weight" in text for text in heard) == (difference != 0)


def test_the_eps_of_the_config_reaches_every_norm(saved):
    _, folder = saved()
    for given, eps in [(None, 3e-3), (7e-4, 7e-4)]:
        model = load(folder, rms_norm_eps=given)
        assert [model.config.rms_norm_eps, *(m.eps for m in model.modules() if isinstance(m, RMSNorm))] == [eps] * 8


def test_loading_draws_no_random_numbers(saved):
    _, folder = saved()
    before = torch.get_rng_state()
    load(folder)
    assert torch.equal(torch.get_rng_state(), before)


def assert_refused(folder, *named):
    with pytest.raises(InputError) as refusal:
        load(folder)
    assert [part for part in (str(folder), *named) if part not in str(refusal.value)] == []
    assert len(str(refusal.value).splitlines()) == 1


CHANGES = {
    "model.norm.weight": lambda tensors: tensors.pop("model.norm.weight"),
    "lm_head.weight": lambda tensors: tensors.pop("lm_head.weight"),
    "model.layers.0.foo.weight": lambda tensors: tensors.update({"model.layers.0.foo.weight": torch.ones(2)}),
    "(24, 47)": lambda tensors: tensors.update({"model.layers.2.self_attn.k_proj.weight": torch.ones(24, 47)}),
    "(47,)": lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": torch.ones(47)}),
}


@pytest.mark.parametrize("named", CHANGES)
def test_tensors_that_are_not_those_of_the_config_are_refused_by_name(saved, named):
    _, folder = saved()
    change_tensors(folder, CHANGES[named])
    assert_refused(folder, named)


@pytest.mark.parametrize("damage", [lambda file: file[:-8], lambda _: LFS_POINTER, lambda _: b""])
def test_a_damaged_file_is_refused_with_its_path(saved, damage):
    _, folder = saved()
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))  # cut short, a pointer to it, nothing
    assert_refused(folder, str(path))


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", ""])
def test_a_missing_file_or_directory_is_refused_with_its_path(saved, missing):
    _, folder = saved()
    (folder / missing).rename(folder.parent / "elsewhere")
    assert_refused(folder, str(folder / missing))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: disk full")])
@pytest.mark.parametrize("n_layers", [3, 2], ids=["same shape", "other shape"])
def test_a_failed_save_leaves_the_old_checkpoint_alone(saved, config, make_model, monkeypatch, error, n_layers):
    """D17: the disk is full when half of the new weights are written."""

    def write_half(tensors, path, metadata):
        save_file(tensors, path, metadata)
        path.write_bytes(path.read_bytes()[:5000])
        raise error

    model, folder = saved()
    monkeypatch.setattr(saving, "save_file", write_half)
    with pytest.raises(InputError) as refusal:
        save_checkpoint(folder, make_model(replace(config, num_hidden_layers=n_layers), seed=1), TOKENIZER)
    assert str(folder / "model.safetensors") in str(refusal.value)
    assert_same_weights(model, load(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.model"]


# Published directories


def theirs_of(config, dtype=torch.float32, **changed):
    """A random model of transformers with weights that matter."""
    torch.manual_seed(0)
    values = config.to_dict() | changed
    kind = transformers.MistralConfig if values["model_type"] == "mistral" else transformers.LlamaConfig
    model = transformers.AutoModelForCausalLM.from_config(kind(**values), dtype=dtype).eval()
    draw_weights(model, std=0.1)
    return model


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
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
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_kind_of_model_that_transformers_saves_gives_its_logits(tmp_path, config, kind, cached):
    theirs = theirs_of(config, **KINDS[kind])
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    if not cached:
        assert_same_logits(ours(TOKENS), theirs(TOKENS).logits)
        return
    caches, past = ours.new_cache(3, 20), None
    for start, end in [(0, 9), (9, 13), *((i, i + 1) for i in range(13, 20))]:
        answer = theirs(TOKENS[:, start:end], past_key_values=past, use_cache=True)
        past = answer.past_key_values
        assert_same_logits(ours(TOKENS[:, start:end], caches), answer.logits)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_was_saved_here_is_the_same_to_transformers(tmp_path, config, kind):
    theirs_of(config, **KINDS[kind]).save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    save_checkpoint(tmp_path / "ours", ours, TOKENIZER)
    assert load(tmp_path / "ours").config == ours.config
    states = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("ours", "theirs")
    ]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert_same_logits(ours(TOKENS), reloaded(TOKENS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_shards_load_by_their_index(tmp_path, config, dtype):
    theirs = theirs_of(config, dtype)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (tmp_path / "unrelated.safetensors").write_bytes(b"not listed, so not read")
    ours = load(tmp_path)
    assert ours.embed_tokens.weight.dtype == dtype
    assert_same_logits(ours(TOKENS), theirs(TOKENS).logits)


def reindex(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "model-00002-of-00004.safetensors").unlink(), "model-00002-of-00004.safetensors"),
        (lambda folder: reindex(folder, lambda m: m.update(x="../outside.safetensors")), "'../outside.safetensors'"),
        (lambda folder: reindex(folder, lambda m: m.update(x="/etc/passwd")), "'/etc/passwd'"),
        (lambda folder: reindex(folder, lambda m: m.update(x="..")), "'..'"),
        (lambda folder: reindex(folder, lambda m: m.update(x="")), "''"),
        (lambda folder: reindex(folder, lambda m: m.update(x="a\0.safetensors")), "'a\\x00.safetensors'"),
        (lambda folder: reindex(folder, lambda m: m.update(x=3)), "no weight_map"),
        (lambda folder: reindex(folder, lambda m: m.update(x="n" * 300 + ".safetensors")), "missing"),
        (lambda folder: reindex(folder, lambda m: m.clear()), "tensors are missing"),
        (lambda folder: (folder / INDEX).write_text("[]"), "a list"),
        (lambda folder: (folder / INDEX).write_text("{}"), "no weight_map"),
        (lambda folder: (folder / INDEX).write_text("{"), "JSON"),
    ],
)
def test_an_index_that_misses_files_or_leaves_the_directory_is_refused(tmp_path, config, change, named):
    """A07"""
    theirs_of(config).save_pretrained(tmp_path, max_shard_size="80KB")
    assert (tmp_path / "model-00002-of-00004.safetensors").exists()
    save_file({"x": torch.ones(2)}, tmp_path.parent / "outside.safetensors")
    change(tmp_path)
    assert_refused(tmp_path, named)


def test_a_tensor_in_two_shards_is_refused(tmp_path, config):
    theirs_of(config).save_pretrained(tmp_path, max_shard_size="80KB")
    path = tmp_path / "model-00004-of-00004.safetensors"
    save_file(load_file(path) | {"module.model.norm.weight": torch.ones(48)}, path)
    assert_refused(tmp_path, "norm.weight", "expected it once")


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module.", "model."]
)
@pytest.mark.parametrize("bare", [False, True])
def test_prefixes_of_wrappers_are_stripped(saved, prefix, bare):
    """A24: in any order, with and without the leading `model.`"""
    model, folder = saved()

    def wrap(tensors):
        for name in list(tensors):
            tensors[prefix + (name.removeprefix("model.") if bare else name)] = tensors.pop(name)

    change_tensors(folder, wrap)
    assert_same_weights(model, load(folder))


@pytest.mark.parametrize("inside", ["model.layers.1._orig_mod.", "model.layers.1.module."])
def test_a_prefix_inside_a_name_is_not_stripped(saved, inside):
    _, folder = saved()
    name = "model.layers.1.input_layernorm.weight"
    change_tensors(folder, lambda t: t.update({inside + "input_layernorm.weight": t.pop(name)}))
    assert_refused(folder, name)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rope.freqs", "model.rotary_emb.inv_freq"]
)
def test_stored_rotary_buffers_are_ignored(saved, name):
    """A09"""
    model, folder = saved()
    change_tensors(folder, lambda tensors: tensors.update({name: torch.full((6,), 9.0)}))
    assert_same_weights(model, load(folder))


@pytest.mark.parametrize(
    ("dtype", "called"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8"), (torch.int32, "I32")],
)
def test_quantised_weights_are_refused_by_name(saved, dtype, called):
    _, folder = saved()
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert_refused(folder, name, called)


def test_dtypes_may_differ_in_the_norms_alone(saved):
    model, folder = saved(torch.bfloat16)
    norms = [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]
    change_tensors(folder, lambda t: t.update({to_file_name(name): t[to_file_name(name)].float() for name in norms}))
    logits = load(folder)(TOKENS)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, model(TOKENS))
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].float()}))
    assert_refused(folder, "lm_head.weight is F32", "BF16", "--dtype")
    assert load(folder, dtype=torch.float32).lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *[
            (name, "weights_only=True")
            for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt")
        ],
        ("model.gguf", "gguf_file"),
    ],
)
def test_other_formats_are_named_and_not_opened(saved, name, remedy):
    """The file would write another one if it were unpickled."""
    _, folder = saved()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cposix\nsystem\n(S'touch " + bytes(folder / "opened") + b"'\ntR.")
    assert_refused(folder, name, remedy)
    assert not (folder / "opened").exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file[:-8], "incomplete"),
        (lambda _: LFS_POINTER, "Git LFS pointer"),
        (lambda _: b"", "empty"),
        (lambda file: file[:4], "incomplete"),
        (lambda file: b"\xff" * 8 + file[8:], "incomplete"),
    ],
)
def test_damage_is_told_apart(saved, damage, said):
    """A22"""
    _, folder = saved()
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(folder, str(path), said)


@pytest.mark.parametrize("n_layers", [1, 2, 4, 10**6])
def test_another_number_of_layers_is_refused_at_once(saved, n_layers):
    """Also with a tensor of the last of a million layers; building them would take minutes."""
    _, folder = saved()
    if n_layers == 10**6:
        change_tensors(folder, lambda tensors: tensors.update({"model.layers.999999.foo": torch.ones(2)}))
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": n_layers}
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(folder, "tensors")


# Saving in shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_model_above_the_limit_is_saved_in_shards_that_both_load(saved, dtype):
    model, folder = saved(dtype)
    save_checkpoint(folder, model, TOKENIZER, shard_bytes=40_000)
    names = [path.name for path in sorted(folder.iterdir())]
    shards = [name for name in names if name.startswith("model-")]
    assert names == ["config.json", *shards, INDEX, "tokenizer.model"]
    assert len(shards) > 2
    tensors = [load_file(folder / name) for name in shards]
    assert all(sum(t.nbytes for t in part.values()) <= 40_000 for part in tensors)
    assert_same_weights(model, load(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[to_file_name(name)], weight)
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in model.state_dict().values())


def test_saving_again_leaves_one_set_of_weights(saved, make_model, config):
    _, folder = saved()
    for i, shard_bytes in enumerate([40_000, 40_000, 30_000, 10**9, 40_000, 10**9]):
        model = make_model(config, seed=i)
        save_checkpoint(folder, model, TOKENIZER, shard_bytes)
        assert_same_weights(model, load(folder))
        listed = {path.name for path in checkpoint._weight_files(folder)}
        assert {path.name for path in folder.glob("*.safetensors")} == listed
        assert (folder / INDEX).exists() == (len(listed) > 1)
        assert not list(folder.glob("*.partial"))


def stop_before_call(monkeypatch, number):
    """KeyboardInterrupt, which nothing here catches, in place of the numberth rename or removal from now on."""
    calls = iter(range(number + 1))

    def counted(function):
        def call(*arguments, **options):
            if next(calls, number) == number:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    for name in ("replace", "unlink"):
        monkeypatch.setattr(saving.Path, name, counted(getattr(saving.Path, name)))


@pytest.mark.parametrize("sizes", [(40_000, 40_000), (10**9, 40_000), (40_000, 10**9), (10**9, 10**9)])
def test_at_every_moment_of_a_save_one_whole_model_is_there(saved, make_model, config, monkeypatch, sizes):
    """D17: the save stops before each rename and each removal in turn; the directory is loaded, and saved to again."""
    models = [make_model(config, seed=seed) for seed in (1, 2)]
    found = []
    while len(found) < 3 or found[-1] == found[-2] == 0 or found[-2] == 0:
        _, folder = saved()
        save_checkpoint(folder, models[0], TOKENIZER, sizes[0])
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            stop_before_call(patch, len(found))
            save_checkpoint(folder, models[1], TOKENIZER, sizes[1])
        weights = [model.state_dict() for model in (load(folder), *models)]
        same = [all(torch.equal(weights[0][name], w[name]) for name in weights[0]) for w in weights[1:]]
        assert sum(same) == 1, f"stopped before call {len(found)}: neither the old model nor the new one"
        found.append(same.index(True))
        save_checkpoint(folder, models[0], TOKENIZER, sizes[0])
        assert_same_weights(models[0], load(folder))
        assert not list(folder.glob("*.partial"))
        shutil.rmtree(folder)
    assert found == sorted(found)  # first the old one, from some moment on the new one


def interrupted(monkeypatch, number, *arguments):
    """A save that stops before its numberth rename or removal; whether it did."""
    with monkeypatch.context() as patch:
        stop_before_call(patch, number)
        try:
            save_checkpoint(*arguments)
        except KeyboardInterrupt:
            return True
    return False


def which(folder, models):
    """The index of the model whose every weight and eps the directory holds; None if it refuses to load."""
    try:
        loaded = load(folder)
    except InputError:
        return None
    same = [
        loaded.config == model.config
        and all(torch.equal(weight, model.state_dict()[name]) for name, weight in loaded.state_dict().items())
        for model in models
    ]
    assert sum(same) == 1, "a mix of models"
    return same.index(True)


@pytest.mark.parametrize("first", range(2, 14, 2))
def test_saves_that_stop_one_after_the_other_mix_nothing(saved, make_model, config, monkeypatch, first):
    models = [make_model(config, seed=seed) for seed in range(4)]
    for second in range(2, 12):
        _, folder = saved()
        save_checkpoint(folder, models[0], TOKENIZER, 40_000)
        save_checkpoint(folder, models[1], TOKENIZER, 40_000)
        interrupted(monkeypatch, first, folder, models[2], TOKENIZER, 40_000)
        assert which(folder, models) in (1, 2)
        interrupted(monkeypatch, second, folder, models[3], TOKENIZER, 40_000)
        assert which(folder, models) in (1, 2, 3)
        shutil.rmtree(folder)


@pytest.mark.parametrize("sizes", [(40_000, 40_000), (10**9, 40_000), (40_000, 10**9), (10**9, 10**9)])
def test_another_config_or_tokenizer_is_never_read_with_the_old_weights(saved, make_model, config, monkeypatch, sizes):
    models = [make_model(config, seed=1), make_model(replace(config, rms_norm_eps=7e-4), seed=2)]
    found, stopped = [], True
    while stopped:
        _, folder = saved()
        save_checkpoint(folder, models[0], TOKENIZER, sizes[0])
        (folder / "tokenizer.json").write_text("{}")
        stopped = interrupted(monkeypatch, len(found), folder, models[1], TOKENIZER, sizes[1])
        found.append(which(folder, models))
        shutil.rmtree(folder)
    assert found[0] == 0
    assert found[-1] == 1
    assert found == sorted(found, key=lambda model: {0: 0, None: 1, 1: 2}[model])


def test_a_save_removes_another_models_files_and_nobody_elses(saved, make_model, config):
    _, folder = saved()
    theirs = ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
              "chat_template.jinja", "generation_config.json"]  # fmt: skip
    mine = ["metrics.jsonl", "thesis.partial", "weights-a-of-b.safetensors", "model-notes.txt"]
    for name in [*theirs, *mine]:
        (folder / name).write_text("{}")
    (folder / "outside").write_text("kept")
    (folder / "tokenizer.model.partial").symlink_to(folder / "outside")
    save_checkpoint(folder, make_model(config), TOKENIZER)
    kept = ["config.json", "model.safetensors", "outside", "tokenizer.model"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, *mine])
    assert (folder / "outside").read_text() == "kept"


def test_weights_can_be_read_by_whoever_may_read_the_config(saved):
    _, folder = saved()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


@pytest.mark.parametrize("name", ["file/below", "n" * 300])
def test_a_folder_that_cant_be_is_refused_in_one_line(saved, tmp_path, name):
    model, _ = saved()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        save_checkpoint(tmp_path / name, model, TOKENIZER)
    with pytest.raises(InputError, match="no checkpoint directory"):
        load(tmp_path / name)


# Memory, and looking without loading

MEASURE = """
import sys, torch, kernels
from model.checkpoint.load import load_checkpoint
def resident():
    with open("/proc/self/status") as status:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status if line.startswith("Vm")}
norm = kernels.load_backend("torch", torch.device("cpu"))
load_checkpoint(sys.argv[1], norm, torch.device("cpu"))  # what the first call imports and allocates
before = resident()["VmRSS"]
model = load_checkpoint(sys.argv[2], norm, torch.device("cpu"))
total = sum(weight.sum() for weight in model.parameters())  # every page is read
print(resident()["VmHWM"] - before, "torch._dynamo" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_takes_no_more_memory_than_the_file_and_no_compiler(tmp_path, config, make_model):
    small, large = make_model(config), make_model(replace(config, vocab_size=400_000))  # 2 x 77 MB
    save_checkpoint(tmp_path / "small", small, TOKENIZER)
    save_checkpoint(tmp_path / "large", large, TOKENIZER)
    n_bytes = (tmp_path / "large" / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    peak, compiler = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert 0.9 * n_bytes < int(peak) < 1.15 * n_bytes
    assert compiler == "False"  # importing it would take longer than the rest, and drawing on the meta device does


def test_inspection_shows_shapes_eps_and_count_and_reads_no_weight(saved, command, monkeypatch):
    model, folder = saved(torch.bfloat16)
    monkeypatch.setattr(checkpoint.Stored, "read", None)
    code, out, _ = command(inspection.main, folder)
    assert code == 0
    assert "   1 x model.embed_tokens.weight                     BF16  61 x 48" in out
    assert "   3 x model.layers.*.self_attn.k_proj.weight        BF16  24 x 48" in out
    assert "rms_norm_eps: 0.003" in out
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters, rms_norm_eps 0.003" in out


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inspection_finds_weights_that_are_no_numbers_on_request(saved, command, bad):
    _, folder = saved()
    assert command(inspection.main, folder, "--finite")[0] == 0

    def spoil(tensors):
        tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = bad

    change_tensors(folder, spoil)
    assert command(inspection.main, folder)[0] == 0
    code, _, err = command(inspection.main, folder, "--finite")
    assert code == 2
    assert "model.layers.2.mlp.down_proj.weight has NaN or infinite" in err


# Damage at random


def mutate(draw, folder):
    """One change of a directory that a broken download, disk or script might make."""
    path = draw.choice([folder / "config.json", *folder.glob("*.safetensors*")])
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else len(content)
    kind = draw.randrange(6)
    if kind == 0:
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(min(header, len(content)))] = draw.randrange(256)
    elif kind == 1:
        del content[draw.randrange(len(content)) :]
    elif kind == 2:
        start = draw.randrange(min(header, len(content)))
        del content[start : start + draw.randrange(1, 9)]
    elif kind == 3:
        start = draw.randrange(min(header, len(content)))
        content[start:start] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
    elif kind == 4:  # another value for a key, still JSON
        config = json.loads((folder / "config.json").read_text())
        strange = [
            None,
            True,
            -1,
            0,
            1,
            3,
            1e-30,
            1e300,
            2**62,
            10**30,
            "x",
            "1e400",
            [],
            [1],
            {},
            {"a": None},
            "\ud800",
        ]
        config[draw.choice([*config, "rope_scaling", "rope_parameters"])] = draw.choice(strange)
        path, content = folder / "config.json", json.dumps(config).encode()
    else:  # digits of the header's shapes and offsets
        digits = [i for i in range(8, min(header, len(content))) if chr(content[i]).isdigit()]
        for i in draw.sample(digits, min(2, len(digits))):
            content[i] = ord(draw.choice("0123456789"))
    path.write_bytes(content)


@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_a_directory_damaged_at_random_loads_or_ends_in_one_line(saved, tmp_path, shard_bytes):
    """No other exception, no crash, no hang. Most changes are noticed; some are to a value that may be another."""
    model, folder = saved()
    save_checkpoint(folder, model, TOKENIZER, shard_bytes)
    draw, messages = random.Random(shard_bytes), []
    for _ in range(150):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        mutate(draw, copy)
        try:
            load(copy)
        except InputError as error:
            messages.append(str(error))
        shutil.rmtree(copy)
    assert 75 < len(messages) < 150
    assert [message for message in messages if len(message.splitlines()) > 1 or len(message) > 1000] == []
