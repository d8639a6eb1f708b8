"""model/checkpoint.py: what is saved comes back, the rest of the world reads it, and damage is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import kernels
from kernels import InputError
from model import checkpoint
from model.checkpoint import load_checkpoint, save_checkpoint
from model.norm import RMSNorm
from tests.conftest import CPU

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
    monkeypatch.setattr(checkpoint, "save_file", write_half)
    with pytest.raises(InputError) as refusal:
        save_checkpoint(folder, make_model(replace(config, num_hidden_layers=n_layers), seed=1), TOKENIZER)
    assert str(folder / "model.safetensors") in str(refusal.value)
    assert_same_weights(model, load(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.model"]
