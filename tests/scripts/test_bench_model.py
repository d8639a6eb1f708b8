"""The model's benchmark: its rows, its arithmetic, and what it prints without transformers.

Nothing here looks at how long anything took.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

import generate as generate_py
import model.llama
import train
from kernels import InputError, load_backend
from model.config import LlamaConfig
from scripts import bench_model
from scripts.bench import growth, model_parts
from scripts.bench.measuring import HEAD
from scripts.bench.model_parts import Ours, Theirs, decode_greedily, generate
from tests.helpers import CPU, FLOAT32_BOUND, ROOT, relative

TINY = {
    "vocab_size": 512, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = ROOT / "configs"
TINY_CONFIGS = sorted(path.stem for path in CONFIGS.glob("tiny*.json"))
SHORT = ["--repeats", "1", "--prefill", "24", "--tokens", "4", "--contexts", "8,16", "--norm", "torch"]
needs_proc = pytest.mark.skipif("load" not in bench_model.HERE, reason="loading is measured by Linux's /proc")
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Models and a machine that take no time."""
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(json.loads(bench_model.SMOLLM2_135M.read_text()) | TINY))
    monkeypatch.setattr(bench_model, "SMOLLM2_135M", shape)
    monkeypatch.setattr(model_parts, "TRAINED", model_parts.TRAINED | TINY)
    monkeypatch.setattr(model_parts, "BATCH", (2, 16))
    limits = (10e9, dict.fromkeys(bench_model.DTYPES, 100e9))
    monkeypatch.setattr(bench_model, "measure_limits", lambda dtypes: limits)
    model_parts.load_models.cache_clear()


@pytest.fixture
def folder(tmp_path):
    return bench_model.random_checkpoint(tmp_path / "random", LlamaConfig.load(bench_model.SMOLLM2_135M))


@pytest.fixture
def pair(folder):
    """Ours and theirs, from one checkpoint."""
    return model_parts.load_models(folder, load_backend("torch", CPU), "float32")


def test_the_table_has_a_row_for_each_part_and_dtype(command):
    code, out, err = command(bench_model.main, *SHORT, "--parts", "prefill,decode,context,cache,train")
    assert code == 0, err
    table = out.splitlines()
    table = table[table.index(HEAD) + 1 :]
    names = ["prefill, 24 tokens", "decode, a token", "decode, theirs by generate()", "decode, a token at 8"]
    names += ["decode, a token at 16", "KV cache, 24 positions", "training step, 2 x 16"]
    assert [(row[:34].strip(), row[34:46].strip()) for row in table] == [
        (name, dtype) for dtype in bench_model.DTYPES for name in names
    ]
    assert all("]" in row.split("   ")[-1] or "[" in row for row in table)
    assert out.count("4 of 4 tokens are the same") >= 1  # in float32; in bfloat16 a tie may be broken otherwise
    assert "WHICH IS NOT WHAT OURS HOLDS" not in out
    assert model_parts.load_models.cache_info().currsize == 1  # the models of one dtype at a time


def test_a_run_says_what_it_ran_on(command, folder):
    code, out, _ = command(bench_model.main, *SHORT, "--ckpt", folder, "--parts", "cache", "--norm", "auto")
    first, second = out.splitlines()[:2]
    assert (code, first) == (0, f"{folder}; norm torch; 1 pairs, median [quartiles]")
    assert second == bench_model.describe(CPU)


def test_each_way_to_decode_has_its_own_time(command, monkeypatch):
    def greedily(text, ids, n):
        return [1, 2, 3, 4], 3.0 if isinstance(text, Ours) else 6.0

    monkeypatch.setattr(model_parts, "decode_greedily", greedily)
    monkeypatch.setattr(model_parts, "generate", lambda model, ids, n: ([1, 2, 9, 4], 12.0))
    _, out, _ = command(bench_model.main, *SHORT, "--parts", "decode", "--dtypes", "float32")
    loop, by_generate = out.splitlines()[-2:]
    for row, theirs, ratio in ((loop, "2000", "2.00"), (by_generate, "4000", "4.00")):  # three tokens are timed
        ours, theirs, ratio = (f"{number} [{number}, {number}]" for number in ("1000", theirs, ratio))
        assert f"{ours} ms" in row
        assert f"{theirs} ms" in row
        assert f" {ratio} " in row
    assert by_generate.endswith("3 of 4 tokens are the same")


@pytest.mark.parametrize("with_theirs", [True, False])
def test_growth_is_a_table_and_a_picture(command, monkeypatch, tmp_path, with_theirs):
    monkeypatch.setattr(growth, "SIZES", [(512, 48, 96, 2, 4, 2)])
    if not with_theirs:
        monkeypatch.setattr(model_parts, "transformers", None)
    picture = tmp_path / "deep/growth.png"
    arguments = [*SHORT[:2], "--contexts", "8,300", "--dtypes", "float32", "--growth", "size,context"]
    code, out, err = command(bench_model.main, *arguments, "--picture", picture)
    assert code == 0, err
    rows = out[out.index(HEAD) :].splitlines()[1:]
    assert [row[:34].strip() for row in rows] == [
        "decode, a token at 8", "decode, a token at 300", "decode, 66288 parameters"
    ]  # fmt: skip
    assert [row.count("[") for row in rows] == [3 if with_theirs else 1] * 3
    assert ["; slopes: ours " in row for row in rows] == [False, True, False]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"drawn: {picture}" in err


def test_growth_alone_is_all_of_it(command, monkeypatch):
    asked = []
    monkeypatch.setattr(growth, "measure", lambda question, setup: asked.append((question, setup.dtype)) or [])
    monkeypatch.setattr(bench_model, "random_checkpoint", None)  # none is needed
    code, _, err = command(bench_model.main, "--growth")
    assert code == 0, err
    assert asked == [(question, dtype) for dtype in bench_model.DTYPES for question in growth.QUESTIONS]


@torch.inference_mode()
def test_all_three_decode_the_same_tokens(pair):
    ours, theirs = pair
    ids = torch.tensor([[1, 5, 9]])
    tokens, _ = decode_greedily(Ours(ours, ours, 9), ids, 6)
    assert decode_greedily(Theirs(theirs), ids, 6)[0] == tokens
    assert generate(theirs, ids, 6)[0] == tokens


@torch.inference_mode()
def test_the_compiled_step_takes_every_token_after_the_prompt(pair):
    ours, taken = pair[0], []

    def one_token(tokens, caches, logits_to_keep):
        taken.append(tokens.tolist())
        return ours(tokens, caches, logits_to_keep=logits_to_keep)

    tokens, _ = decode_greedily(Ours(ours, one_token, 9), torch.tensor([[1, 5, 9]]), 6)
    assert taken == [[[token]] for token in tokens[:-1]]


@torch.inference_mode()
def test_what_is_timed_of_a_decode_is_all_but_its_first_token(pair, monkeypatch):
    ours, theirs = pair
    now = iter(range(100))
    monkeypatch.setattr(model_parts.time, "perf_counter", lambda: next(now))
    ids = torch.tensor([[1]])
    for text in (Ours(ours, ours, 6), Theirs(theirs)):  # the clock is read after each token
        assert decode_greedily(text, ids, 5)[1] == 4
    assert generate(theirs, ids, 5)[1] == 4  # and by generate() at the prompt too


@torch.inference_mode()
def test_the_timed_tokens_are_forgotten(pair):
    ours, theirs = pair
    ids = torch.tensor([[1, 5, 9]])
    for text in (Ours(ours, ours, 4), Theirs(theirs)):
        text.step(ids[:, :2])
        forget = text.mark()
        want = text.step(ids[:, 2:])
        forget()
        for _ in range(2):
            model_parts.time_steps(text, torch.tensor([[3, 4]]))
        assert torch.equal(text.step(ids[:, 2:]), want)


def test_the_training_step_is_that_of_train_py(pair, monkeypatch, command):
    """Its loss and its parameter groups: both models go through them."""
    seen = []
    for name in ("summed_loss", "parameter_groups"):
        original = getattr(model_parts, name)
        assert original in (model.llama.summed_loss, train.parameter_groups)
        monkeypatch.setattr(
            model_parts, name, lambda *given, name=name, original=original: (seen.append(name), original(*given))[1]
        )
    command(bench_model.main, *SHORT, "--parts", "train", "--dtypes", "float32")
    assert [seen.count(name) for name in ("parameter_groups", "summed_loss")] == [2, 4]  # a warm-up and a turn, of both


def test_bytes_are_those_of_the_shapes(pair):
    ours, _ = pair
    layer = 48 * (48 + 24 + 24) + 48 * 48 + 3 * 48 * 96
    assert model_parts.bytes_per_token(ours) == 4 * (2 * layer + 512 * 48 + 5 * 48)
    untied = type(ours)(replace(ours.config, tie_word_embeddings=False), load_backend("torch", CPU))
    # of the two tables, the head is read and the embedding is not
    assert model_parts.bytes_per_token(untied) == model_parts.bytes_per_token(ours)


def test_a_cache_that_takes_more_than_it_shows_is_seen(command, monkeypatch):
    arguments = [*SHORT, "--parts", "cache", "--dtypes", "bfloat16"]
    assert 2 * 2 * 2 * 12 * 24 * 2 == 4608  # keys and values, layers, heads, their size, positions, bytes
    assert "   0.004608 MB by the shapes\n" in command(bench_model.main, *arguments)[1]
    new_cache = model.llama.Llama.new_cache

    def wasteful(self, batch_size, capacity):
        caches = new_cache(self, batch_size, 2 * capacity)
        return [cache.first(capacity) for cache in caches]  # of twice the memory

    monkeypatch.setattr(model.llama.Llama, "new_cache", wasteful)
    assert "0.004608 MB by the shapes, WHICH IS NOT WHAT OURS HOLDS" in command(bench_model.main, *arguments)[1]


@pytest.mark.parametrize("name", TINY_CONFIGS)
@torch.inference_mode()
def test_both_models_have_the_same_logits_in_every_family(name, tmp_path):
    """Also of tokens beyond a window, after the timed ones, and as the training step makes its model."""
    config = LlamaConfig.load(CONFIGS / f"{name}.json")
    folder = bench_model.random_checkpoint(tmp_path / "random", config)
    ours, theirs = model_parts.load_models(folder, load_backend("torch", CPU), "float32")
    ids = model_parts.random_ids(ours, 72)  # a window has 64
    expected = ours(ids)
    fresh = model_parts.fresh_theirs(config).eval()
    fresh.load_state_dict(theirs.state_dict())
    for other in (theirs, fresh):
        assert relative(other(ids).logits - expected, expected) < FLOAT32_BOUND
    for text in (Ours(ours, ours, 72), Theirs(theirs)):
        text.step(ids[:, :65])
        for _ in range(2):
            model_parts.time_steps(text, ids[:, :4])
        assert relative(text.step(ids[:, 65:]) - expected[:, -1:], expected) < FLOAT32_BOUND


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_the_training_step_is_that_of_the_family(name, command, monkeypatch):
    path, trained, usual = CONFIGS / f"{name}.json", [], model_parts.fresh_theirs
    three = {"num_hidden_layers": 3}  # not the config's 2, for whose layers it may list kinds
    monkeypatch.setattr(model_parts, "TRAINED", model_parts.TRAINED | three)
    monkeypatch.setattr(model_parts, "fresh_theirs", lambda config: (trained.append(usual(config)), trained[-1])[1])
    code, out, err = command(bench_model.main, *SHORT, "--config", path, "--parts", "train", "--dtypes", "float32")
    assert code == 0, err
    assert out.startswith(f"{name}, random weights; norm torch;")
    [model] = trained
    assert model.config.model_type == LlamaConfig.load(path).model_type
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (3, TINY["hidden_size"])


def test_a_norm_that_is_not_rmsnorm_is_refused_in_one_line(command, folder):
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": "rmsllama", "norm": "scripts.peers:layer_norm", "norm_eps": values.pop("rms_norm_eps")}
    (folder / "config.json").write_text(json.dumps(values))
    for flag in (("--ckpt", folder), ("--config", folder / "config.json")):
        code, out, err = command(bench_model.main, *SHORT, *flag, "--parts", "cache")
        assert (code, out) == (2, "")
        assert err.splitlines() == [
            f"error: {folder / 'config.json'} has the norm scripts.peers:layer_norm, and transformers RMSNorm alone; "
            "name a model with that"
        ]


def test_without_transformers_ours_is_measured_alone(command, monkeypatch):
    monkeypatch.setattr(model_parts, "transformers", None)
    arguments = [*SHORT, "--parts", "prefill,decode,context,cache,train", "--dtypes", "float32"]
    code, out, err = command(bench_model.main, *arguments)
    assert code == 0, err
    assert "transformers is not installed (pip install transformers): ours alone, without ratios" in out.splitlines()
    assert "generate()" not in out
    assert out.count("[") == 1 + 6  # a pair of quartiles a row, and the one of the heading


@pytest.mark.long
@needs_proc
def test_loading_is_measured_in_fresh_processes(command, tmp_path, monkeypatch):
    """Of a Gemma 2, whose class and attention are not LLaMA's."""
    folder = bench_model.random_checkpoint(tmp_path / "gemma2", LlamaConfig.load(CONFIGS / "tiny-gemma2.json"))
    monkeypatch.setattr(  # no warm-up: each takes seconds
        model_parts, "in_turn", lambda calls, repeats: {side: [call()] for side, call in calls.items()}
    )
    code, out, err = command(bench_model.main, "--ckpt", folder, "--parts", "load", "--dtypes", "float32", *SHORT)
    assert code == 0, err
    rows = out.splitlines()[-4:]
    assert [(row[:34].strip(), row[34:46].strip()) for row in rows] == [
        ("loading", "file's F32"), ("loading and a first token", "file's F32"),
        ("peak memory of loading", "file's F32"), ("peak memory with a first token", "file's F32"),
    ]  # fmt: skip
    assert all(row.count("[") == 3 for row in rows)
    assert [row.count(" ms ") for row in rows] == [2, 2, 0, 0]
    assert [row.count(" MB ") for row in rows] == [0, 0, 2, 2]
    assert [row.endswith(" times the file of 9 MB") for row in rows] == [False, False, True, True]


@needs_proc
def test_what_is_loaded_is_of_the_family(tmp_path, monkeypatch):
    config, loaded = LlamaConfig.load(CONFIGS / "tiny-gemma2.json"), []
    folder = bench_model.random_checkpoint(tmp_path / "gemma2", config)
    usual = transformers.PreTrainedModel.from_pretrained.__func__
    watched = classmethod(lambda kind, *a, **k: (loaded.append(kind), usual(kind, *a, **k))[1])
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", watched)
    model_parts.load_once("theirs", folder, config, "torch")
    assert loaded == [transformers.Gemma2ForCausalLM]


def test_generate_py_starts_on_the_cpu(command, folder, monkeypatch):
    commands, done = [], SimpleNamespace(returncode=0)
    monkeypatch.setattr(model_parts.subprocess, "run", lambda command, **_: (commands.append(command), done)[1])
    arguments = ["--ckpt", folder, *SHORT, "--parts", "start"]
    code, out, err = command(bench_model.main, *arguments)
    assert code == 0, err
    assert out.splitlines()[-1].split("   ")[0] == "generate.py, one token"
    monkeypatch.setattr(generate_py.sys, "argv", [*map(str, commands[0][1:])])
    args = generate_py.parse_args()
    assert (args.device, args.norm, str(args.ckpt), args.max_new_tokens) == ("cpu", "torch", str(folder), 1)

    done.returncode, done.stderr = 2, "first\nlast line\n"
    code, _, err = command(bench_model.main, *arguments)
    assert (code, err.splitlines()[-1]) == (2, "error: generate.py failed: last line")


def test_a_load_that_fails_is_one_line(tmp_path, config):
    with pytest.raises(InputError, match=r"^no weights at .*$"):
        model_parts.load_once("ours", tmp_path, config, "torch")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--parts", "prefill,speed"], "--parts is 'prefill,speed'; expected some of prefill,"),
        (["--dtypes", "float16"], "--dtypes is 'float16'; expected some of float32,bfloat16"),
        (["--tokens", "1"], "--tokens is 1"),
        (["--growth", "context,width"], "--growth is 'context,width'; expected some of context,size,tokens,layers"),
        (["--growth", "--parts", "decode"], "--parts: not allowed with argument --growth"),
        (["--picture", "growth.png"], "--picture is of --growth, which is not asked for"),
        (["--growth", "--picture", "growth.jpg"], "'growth.jpg' does not end in .png"),
        (["--ckpt", ".", "--config", "tiny.json"], "--config: not allowed with argument --ckpt"),
        (["--config", "nowhere.json"], "nowhere.json is missing"),
        (["--ckpt", "nowhere"], "no checkpoint directory at nowhere"),
        (["--parts", "prefill", "--prefill", "129"], "129 positions are asked for and the model has 128"),
    ],
)
def test_bad_arguments_end_in_one_line(command, arguments, wanted):
    code, _, err = command(bench_model.main, *arguments)
    assert code == 2
    assert wanted in err.splitlines()[-1]
