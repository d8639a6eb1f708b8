"""model/checkpoint/save.py: what is saved comes back, transformers reads it, and a save that dies mixes nothing."""

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import kernels
from kernels import InputError
from model.checkpoint import save as saving
from model.checkpoint.load import INDEX, _weight_files, load_checkpoint
from model.checkpoint.names import to_file_name
from model.checkpoint.save import replace_file, save_checkpoint
from model.norm import RMSNorm
from tests.helpers import CPU
from tests.model.checkpoint.folders import (
    KINDS,
    TOKENIZER,
    TOKENS,
    assert_same_logits,
    assert_same_weights,
    load,
    theirs_at,
    theirs_of,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_saved_model_comes_back_bit_for_bit_and_in_its_dtype(saved, dtype, tied):
    """Also when a loaded model is saved over its own file."""
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


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_was_saved_here_is_the_same_to_transformers(tmp_path, config, kind):
    theirs_of(config, **KINDS[kind]).save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    save_checkpoint(tmp_path / "ours", ours, TOKENIZER)
    assert load(tmp_path / "ours").config == ours.config
    reloaded, first = theirs_at(tmp_path / "ours"), theirs_at(tmp_path / "theirs")
    assert type(reloaded) is type(first)
    torch.testing.assert_close(reloaded.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert_same_logits(ours(TOKENS), reloaded(TOKENS).logits)


@pytest.mark.parametrize("changed", [{}, {"model_type": "mistral", "sliding_window": 5}])
@torch.no_grad()
def test_a_model_with_another_norm_loads_here_and_is_refused_by_transformers(
    tmp_path, config, make_model, capsys, changed
):
    """LlamaForCausalLM would compute RMSNorm in its place, and its logits would be off without a word."""
    model = make_model(replace(config, norm="tests.norms:layer_norm", **changed))
    save_checkpoint(tmp_path, model, TOKENIZER)
    loaded = load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert load(tmp_path, rms_norm_eps=7e-4).config.rms_norm_eps == 7e-4
    assert "rms_norm_eps 0.0007 overrides 0.003 of" in capsys.readouterr().err
    for kind in ("AutoConfig", "AutoModel", "AutoModelForCausalLM"):
        with pytest.raises(ValueError, match="does not recognize this architecture"):
            getattr(transformers, kind).from_pretrained(tmp_path)
    for kind in ("LlamaForCausalLM", "LlamaModel", "MistralForCausalLM", "MistralModel"):
        with pytest.raises(StrictDataclassError, match="rms_norm_eps"):
            getattr(transformers, kind).from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_layer_norms_bias_is_saved_under_the_name_of_its_norm(tmp_path, config, make_model, dtype):
    norm = kernels.load_backend("layer_norm_bias", CPU)
    model = make_model(replace(config, norm="layer_norm_bias"), "layer_norm_bias").to(dtype)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert all(module.bias.any() for module in norms)
    norms[1].float()  # as some files have them
    save_checkpoint(tmp_path, model, TOKENIZER)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"model.norm.bias", "model.layers.2.post_attention_layernorm.bias"} < names
    assert sum(name.endswith(".bias") for name in names) == 7
    loaded = load_checkpoint(tmp_path, norm, CPU)
    assert_same_weights(model, loaded)
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    with pytest.raises(InputError, match=r"--norm is torch; expected layer_norm_bias, the norm of .*: one of the two"):
        load_checkpoint(tmp_path, kernels.load_backend("torch", CPU), CPU)
    save_checkpoint(tmp_path, make_model(config), TOKENIZER)
    with pytest.raises(InputError, match=r"--norm is layer_norm_bias; expected RMSNorm, which .* has: one of the two"):
        load_checkpoint(tmp_path, norm, CPU)


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


def test_every_tensor_above_the_limit_is_a_shard_of_its_own(saved):
    model, folder = saved()
    save_checkpoint(folder, model, TOKENIZER, shard_bytes=100)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 20
    assert [path.name for path in shards if not load_file(path)] == []
    assert f"model-00001-of-{len(shards):05}.safetensors" == shards[0].name
    assert_same_weights(model, load(folder))


def test_saving_again_leaves_one_set_of_weights(saved, make_model, config):
    _, folder = saved()
    for i, shard_bytes in enumerate([40_000, 40_000, 30_000, 10**9, 40_000, 10**9]):
        model = make_model(config, seed=i)
        save_checkpoint(folder, model, TOKENIZER, shard_bytes)
        assert_same_weights(model, load(folder))
        listed = {path.name for path in _weight_files(folder)[1]}
        assert {path.name for path in folder.glob("*.safetensors")} == listed
        assert (folder / INDEX).exists() == (len(listed) > 1)
        assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, step):
    replace_file(tmp_path / "file", b"old")

    def full(path, *arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving.Path, step, full)
        with pytest.raises(InputError, match="file cannot be written \\(No space left on device\\)"):
            replace_file(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]
    replace_file(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: disk full")])
@pytest.mark.parametrize("n_layers", [3, 2], ids=["same shape", "other shape"])
def test_a_failed_save_leaves_the_old_checkpoint_alone(saved, config, make_model, monkeypatch, error, n_layers):
    """The disk is full when half of the new weights are written."""

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


@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_every_file_is_flushed_before_the_first_is_renamed(tmp_path, make_model, config, monkeypatch, shard_bytes):
    calls = []
    for module, name in ((saving.os, "fsync"), (saving.Path, "replace")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=original, n=name: (calls.append(n), f(*args))[1])
    save_checkpoint(tmp_path, make_model(config), TOKENIZER, shard_bytes)
    n_files = len(list(tmp_path.iterdir()))
    assert calls == ["fsync"] * n_files + ["replace"] * n_files


@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_files_are_flushed_where_a_descriptor_for_reading_cannot_be(
    tmp_path, make_model, config, monkeypatch, shard_bytes
):
    """As on Windows, whose os.fsync raises EBADF for it."""
    fcntl = pytest.importorskip("fcntl", reason="Windows has no fcntl, and is what this imitates")
    flushed = []

    def fsync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flushed.append(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    model = make_model(config)
    save_checkpoint(tmp_path, model, TOKENIZER, shard_bytes)
    assert len(flushed) == len(list(tmp_path.iterdir()))
    assert_same_weights(model, load(tmp_path))
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("step", "name"),
    [("replace", "tokenizer.model"), ("replace", "model.safetensors"), ("unlink", "model.safetensors")],
)
def test_a_file_that_is_in_use_ends_in_one_line_that_names_it(saved, config, make_model, monkeypatch, step, name):
    """Windows neither replaces nor removes a file that is open or memory-mapped."""
    model, folder = saved()
    usual = getattr(saving.Path, step)

    def refuse(path, *arguments, **options):
        if name in (path.name, *(target.name for target in arguments)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, *arguments, **options)

    other = replace(config, rms_norm_eps=7e-4) if step == "unlink" else config  # the old weights go first
    with monkeypatch.context() as patch:
        patch.setattr(saving.Path, step, refuse)
        with pytest.raises(InputError) as refusal:
            save_checkpoint(folder, make_model(other, seed=1), TOKENIZER, 40_000 if step == "unlink" else 10**9)
    assert str(refusal.value).startswith(f"{folder / name} cannot be written (Permission denied)")
    assert_same_weights(model, load(folder))
    assert load(folder).config == model.config
    assert not list(folder.glob("*.partial"))


def test_of_what_is_left_over_model_safetensors_goes_first(saved, monkeypatch):
    """It beats an index: until it is gone, the old weights are read. So it goes before an old index's shards."""
    model, folder = saved()
    old = ["a-note.safetensors", "model-00001-of-00009.safetensors", "model-00009-of-00009.safetensors"]
    for name in old:
        (folder / name).write_bytes(b"")
    removed = []
    usual = saving.Path.unlink
    monkeypatch.setattr(
        saving.Path, "unlink", lambda path, **options: (removed.append(path.name), usual(path, **options))[1]
    )
    save_checkpoint(folder, model, TOKENIZER, 40_000)
    removed = [name for name in removed if not name.endswith(".partial")]
    assert (removed[0], sorted(removed)) == ("model.safetensors", sorted(["model.safetensors", *old[1:]]))


def stop_before_call(monkeypatch, number):
    """Raise KeyboardInterrupt, which save.py does not catch, instead of the numberth rename or removal from now on."""
    calls = iter(range(number + 1))

    def counted(function):
        def call(*arguments, **options):
            if next(calls, number) == number:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    for name in ("replace", "unlink"):
        monkeypatch.setattr(saving.Path, name, counted(getattr(saving.Path, name)))


def interrupted(monkeypatch, number, *arguments):
    """Save, but stop before the numberth rename or removal. False if there are fewer."""
    with monkeypatch.context() as patch:
        stop_before_call(patch, number)
        try:
            save_checkpoint(*arguments)
        except KeyboardInterrupt:
            return True
    return False


def which(folder, models):
    """The index of the model that the directory holds, eps and weights; None if it refuses to load."""
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
@pytest.mark.parametrize("same_config", [True, False])
def test_a_save_stopped_at_any_moment_leaves_one_whole_model(
    saved, make_model, config, monkeypatch, same_config, sizes
):
    """Or none, if the new one has another config and tokenizer: those are never read with the old weights."""
    other = config if same_config else replace(config, rms_norm_eps=7e-4)
    models = [make_model(config, seed=1), make_model(other, seed=2)]
    found, stopped = [], True
    while stopped:
        _, folder = saved()
        save_checkpoint(folder, models[0], TOKENIZER, sizes[0])
        if not same_config:
            (folder / "tokenizer.json").write_text("{}")
        stopped = interrupted(monkeypatch, len(found), folder, models[1], TOKENIZER, sizes[1])
        found.append(which(folder, models))
        save_checkpoint(folder, models[0], TOKENIZER, sizes[0])
        assert which(folder, models) == 0
        assert not list(folder.glob("*.partial"))
        shutil.rmtree(folder)
    assert (found[0], found[-1]) == (0, 1)
    assert found == sorted(found, key=[0, None, 1].index)
    assert (None in found) == (not same_config)


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
def test_a_folder_that_cannot_be_made_is_refused(saved, tmp_path, name):
    model, _ = saved()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        save_checkpoint(tmp_path / name, model, TOKENIZER)
    with pytest.raises(InputError, match="no checkpoint directory"):
        load(tmp_path / name)
