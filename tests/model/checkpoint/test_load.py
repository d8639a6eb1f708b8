"""model/checkpoint/load.py: directories of transformers load as the same model, and damage is named."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from kernels import InputError
from model.checkpoint import __main__ as shown
from model.checkpoint.load import INDEX, load_end_ids
from model.checkpoint.names import to_file_name
from model.checkpoint.save import save_checkpoint
from model.norm import RMSNorm
from tests.model.checkpoint.folders import (
    KINDS,
    TOKENIZER,
    TOKENS,
    assert_same_logits,
    assert_same_weights,
    change_tensors,
    load,
    theirs_of,
)

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"


# Directories that load


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


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module.", "model."]
)
@pytest.mark.parametrize("bare", [False, True])
def test_prefixes_of_wrappers_are_stripped(saved, prefix, bare):
    """Prefixes of wrappers, in any order, with and without the leading `model.`"""
    model, folder = saved()

    def wrap(tensors):
        for name in list(tensors):
            tensors[prefix + (name.removeprefix("model.") if bare else name)] = tensors.pop(name)

    change_tensors(folder, wrap)
    assert_same_weights(model, load(folder))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rope.freqs", "model.rotary_emb.inv_freq"]
)
def test_stored_rotary_buffers_are_ignored(saved, name):
    model, folder = saved()
    change_tensors(folder, lambda tensors: tensors.update({name: torch.full((6,), 9.0)}))
    assert_same_weights(model, load(folder))


@pytest.mark.parametrize("difference", [0, 1])
@torch.no_grad()
def test_a_tied_head_in_the_file_gives_way_to_the_embedding(saved, difference, capsys, recwarn):
    """With a stored head the logits are still those of the embedding; another head is worth a warning."""
    model, folder = saved(tied=True)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + difference}))
    loaded = load(folder)
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert_same_weights(model, loaded)
    heard = [capsys.readouterr().err, *(str(warning.message) for warning in recwarn)]
    assert any("lm_head.weight" in text for text in heard) == (difference != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_tied_model_whose_file_holds_the_head_alone_loads_bit_for_bit(tmp_path, config, dtype, command, capsys):
    """safetensors' save_model keeps one name of a tensor that has two, and that is the head's."""
    theirs = theirs_of(config, dtype, tie_word_embeddings=True)
    save_model(theirs, str(tmp_path / "model.safetensors"))
    theirs.config.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    ours = load(tmp_path)
    assert ours.embed_tokens.weight.dtype == dtype
    weights = {to_file_name(name): weight for name, weight in ours.state_dict().items()}
    torch.testing.assert_close(weights | {"lm_head.weight": theirs.lm_head.weight}, theirs.state_dict(), rtol=0, atol=0)
    assert capsys.readouterr().err == ""
    code, out, _ = command(shown.main, tmp_path)
    assert code == 0
    assert f"{sum(p.numel() for p in ours.parameters()):,} parameters" in out


def test_an_untied_model_whose_file_holds_the_head_alone_is_refused(saved):
    _, folder = saved()
    change_tensors(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert_refused(folder, str(folder / "model.safetensors"), "(1), the first is model.embed_tokens.weight")


def test_end_ids_are_those_of_both_files(saved):
    """What one of them lists alone ends a text too."""
    model, folder = saved()
    config = replace(model.config, eos_token_id=2)
    assert load_end_ids(folder, config) == {2}
    for theirs, ids in [(5, {2, 5}), ([7, 5], {2, 5, 7}), (None, {2})]:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": theirs}))
        assert load_end_ids(folder, config) == ids
        assert load_end_ids(folder, model.config) == ids - {2}


# Directories with two candidates


def write_candidates(folder, names):
    """Weights under each name, an index with two shards, instead of model.safetensors; the nth embedding is all n."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for n, name in enumerate(names):
        tensors = weights | {"model.embed_tokens.weight": torch.full((61, 48), float(n))}
        stem = name.partition(".")[0]
        parts = {key: f"{stem}-0000{i % 2 + 1}-of-00002.safetensors" for i, key in enumerate(tensors)}
        if name.endswith(".json"):
            (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": parts}))
        else:
            parts = dict.fromkeys(tensors, name)
        for file in set(parts.values()):
            part = {key: tensor for key, tensor in tensors.items() if parts[key] == file}
            save_file(part, folder / file, {"format": "pt"})


ONE, INDEXED, THEIRS = "model.safetensors", INDEX, "consolidated.safetensors"
THEIRS_INDEXED = f"{THEIRS}.index.json"


@pytest.mark.parametrize(
    "names",
    [(ONE, INDEXED), (ONE, THEIRS), (ONE, THEIRS_INDEXED), (INDEXED, THEIRS), (INDEXED, THEIRS_INDEXED),
     (ONE, INDEXED, THEIRS_INDEXED), (ONE,), (INDEXED,), (THEIRS,)],
)  # fmt: skip
@pytest.mark.parametrize("params", [False, True])
@torch.no_grad()
def test_a_line_says_which_of_two_candidates_is_read(saved, command, names, params):
    """What transformers reads; and nothing is said where there is one candidate."""
    _, folder = saved()
    write_candidates(folder, names)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    left = list(names[1:])
    if params:
        (folder / "params.json").write_text(json.dumps({"dim": 999}))
        left.insert(0, "params.json")
    line = f"{folder}: reading config.json and {names[0]}; ignoring {' and '.join(left)}, which could be read instead\n"
    code, _, err = command(shown.main, folder)
    assert (code, err) == (0, line if left else "")
    assert load(folder).embed_tokens.weight.unique().tolist() == [0]
    if names[0] != THEIRS:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert theirs.model.embed_tokens.weight.unique().tolist() == [0]


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


# Directories that are refused


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


@pytest.mark.parametrize("named", CHANGES)
def test_errors_about_a_tensor_name_its_file(tmp_path, config, named):
    """The index where a tensor is missing, and otherwise the shard that has what should not be there."""
    theirs_of(config).save_pretrained(tmp_path, max_shard_size="80KB")
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    name = {"(24, 47)": "model.layers.2.self_attn.k_proj.weight", "(47,)": "model.layers.2.input_layernorm.weight"}
    path = tmp_path / places.get(name.get(named, named), "model-00002-of-00004.safetensors")
    tensors = load_file(path)
    CHANGES[named](tensors)
    save_file(tensors, path)
    missing = named in places
    assert_refused(tmp_path, f"{tmp_path / INDEX if missing else path}: ", named)


def test_an_error_about_two_dtypes_names_both_files(tmp_path, config):
    theirs_of(config).save_pretrained(tmp_path, max_shard_size="60KB")
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    name = "model.layers.2.mlp.up_proj.weight"
    path, embedding = tmp_path / places[name], places["model.embed_tokens.weight"]
    assert path.name != embedding
    save_file(load_file(path) | {name: load_file(path)[name].half()}, path)
    assert_refused(tmp_path, f"{path}: {name} is F16, model.embed_tokens.weight of {embedding} F32")


@pytest.mark.parametrize("inside", ["model.layers.1._orig_mod.", "model.layers.1.module."])
def test_a_prefix_inside_a_name_is_not_stripped(saved, inside):
    _, folder = saved()
    name = "model.layers.1.input_layernorm.weight"
    change_tensors(folder, lambda t: t.update({inside + "input_layernorm.weight": t.pop(name)}))
    assert_refused(folder, name)


@pytest.mark.parametrize(
    ("dtype", "called"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8"), (torch.int32, "I32")],
)
def test_quantised_weights_are_refused_by_name(saved, dtype, called):
    _, folder = saved()
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert_refused(folder, name, called, "not quantised")


@pytest.mark.parametrize(
    ("n_layers", "named"),
    [(1, "does not have (18)"), (2, "llama does not have (9)"), (4, "3 of 4 layers"), (10**6, "4 of 1000000 layers")],
)
def test_another_number_of_layers_is_refused_at_once(saved, n_layers, named):
    """Also with a tensor of the last of a million layers; listing their tensors would take minutes."""
    _, folder = saved()
    if n_layers == 10**6:
        change_tensors(folder, lambda tensors: tensors.update({"model.layers.999999.foo": torch.ones(2)}))
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": n_layers}
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(folder, f"{folder / 'model.safetensors'}: tensors", named)


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", ""])
def test_a_missing_file_or_directory_is_refused_with_its_path(saved, missing):
    _, folder = saved()
    (folder / missing).rename(folder.parent / "elsewhere")
    assert_refused(folder, str(folder / missing))


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
def test_a_damaged_file_is_refused_with_its_path_and_the_damage(saved, damage, said):
    _, folder = saved()
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(folder, str(path), said)


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
    ("name", "remedy"),
    [
        ("pytorch_model.bin", "weights_only=True"),
        ("consolidated.00.pth", "weights_only=True"),
        ("model.pt", "weights_only=True"),
        ("last.ckpt", "weights_only=True"),
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
        strange = [None, True, -1, 0, 1, 3, 1e-30, 1e300, 2**62, 10**30, "x", "1e400", [], [1], {}, {"a": 0}, "\ud800"]
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
