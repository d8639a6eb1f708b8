"""The model's benchmark: its rows, its arithmetic, and what it says without transformers.

Nothing here looks at how long anything took.
"""

import functools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers

import model.checkpoint.load
from scripts import bench_model
from scripts.bench_model import Row
from tests.helpers import ROOT

TINY = {
    "vocab_size": 512, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
SHORT = ["--repeats", "1", "--prefill", "24", "--tokens", "4", "--contexts", "8,16", "--norm", "torch"]
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Models and a machine that take no time, and the mode that main() runs in."""
    monkeypatch.setattr(bench_model, "SMOLLM2_135M", bench_model.SMOLLM2_135M | TINY)
    monkeypatch.setattr(bench_model, "TRAINED", bench_model.TRAINED | TINY)
    monkeypatch.setattr(bench_model, "BATCH", (2, 16))
    monkeypatch.setattr(bench_model, "measure_machine", lambda dtypes: (10e9, dict.fromkeys(dtypes, 100e9)))


@pytest.fixture
def folder(tmp_path):
    return bench_model.random_checkpoint(tmp_path / "random")


@pytest.fixture
def pair(folder):
    """Ours and theirs, from one checkpoint."""
    cpu = torch.device("cpu")
    ours = model.checkpoint.load.load_checkpoint(folder, bench_model.load_backend("torch", cpu), cpu)
    return ours, transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def test_the_table_has_a_row_for_each_part_and_dtype(command):
    code, out, err = command(bench_model.main, *SHORT, "--parts", "prefill,decode,context,cache,train")
    assert code == 0, err
    table = out.splitlines()
    table = table[table.index(bench_model.HEAD) + 1 :]
    names = ["prefill, 24 tokens", "decode, a token", "decode, theirs by generate()", "decode, a token at 8"]
    names += ["decode, a token at 16", "KV cache, 24 positions", "training step, 2 x 16"]
    assert [(row[:34].strip(), row[34:46].strip()) for row in table] == [
        (name, dtype) for dtype in bench_model.DTYPES for name in names
    ]
    assert all("]" in row.split("   ")[-1] or "[" in row for row in table)
    assert out.count("4 of 4 tokens are the same") >= 1  # in float32; in bfloat16 a tie may be broken otherwise
    assert "WHICH IT DOESN'T TAKE" not in out


def test_the_ratio_is_theirs_over_ours_of_each_pair():
    row = Row("decode", "float32", "ms", [1.0, 2.0, 4.0], [3.0, 4.0, 4.0], "")
    assert bench_model.ratio(row) == (2.0, 1.5, 2.5)  # of 3, 2 and 1, and not 4 / 2
    assert bench_model.line(row).split("ms")[-1].split() == ["2.00", "[1.50,", "2.50]"]
    assert bench_model.ratio(row._replace(theirs=[])) is None


def test_ours_and_theirs_take_turns_and_the_first_of_each_does_not_count():
    calls, times = [], iter([90.0, 91.0, 1.0, 2.0, 3.0, 4.0])

    def call(name):
        return lambda: (calls.append(name), next(times))[1]

    assert bench_model.in_turn([call("ours"), call("theirs")], repeats=2) == [[1.0, 3.0], [2.0, 4.0]]
    assert calls == ["ours", "theirs"] * 3


@torch.inference_mode()
def test_all_three_decode_the_same_tokens(pair):
    ours, theirs = pair
    ids = torch.tensor([[1, 5, 9]])
    tokens, _ = bench_model.decode_ours(ours, ids, 6, bench_model.eager_step(ours))
    assert bench_model.decode_theirs(theirs, ids, 6)[0] == tokens
    assert bench_model.generate_theirs(theirs, ids, 6)[0] == tokens


@torch.inference_mode()
def test_what_is_timed_of_a_decode_is_all_but_its_first_token(pair, monkeypatch):
    ours, theirs = pair
    now = iter(range(100))
    monkeypatch.setattr(bench_model.time, "perf_counter", lambda: next(now))
    assert bench_model.decode_ours(ours, torch.tensor([[1]]), 5, bench_model.eager_step(ours))[1] == 1
    assert (
        bench_model.decode_theirs(theirs, torch.tensor([[1]]), 5)[1] == 1
    )  # one reading after the first, one at the end
    assert bench_model.generate_theirs(theirs, torch.tensor([[1]]), 5)[1] == 4  # it reads at the prompt and at each


def test_bytes_are_those_of_the_shapes(pair):
    ours, _ = pair
    layer = 48 * (48 + 24 + 24) + 48 * 48 + 3 * 48 * 96
    assert bench_model.weight_bytes(ours) == 4 * (2 * layer + 512 * 48 + 5 * 48)
    untied = type(ours)(replace(ours.config, tie_word_embeddings=False), bench_model.load_backend("torch", "cpu"))
    assert bench_model.weight_bytes(untied) == bench_model.weight_bytes(ours)  # the head is read, the embedding isn't
    assert bench_model.expected_cache_bytes(ours.config, 10, 2) == 2 * 2 * 2 * 12 * 10 * 2


def test_a_cache_that_takes_more_than_it_shows_is_seen(command, monkeypatch):
    arguments = [*SHORT, "--parts", "cache", "--dtypes", "bfloat16"]
    assert "the shapes say 0.004608 MB\n" in command(bench_model.main, *arguments)[1]
    new_cache = model.llama.Llama.new_cache

    def wasteful(self, batch_size, capacity):
        caches = new_cache(self, batch_size, 2 * capacity)
        caches[1].k = caches[1].k[:, :, :capacity]
        return caches

    monkeypatch.setattr(model.llama.Llama, "new_cache", wasteful)
    assert "the shapes say 0.004608 MB, WHICH IT DOESN'T TAKE" in command(bench_model.main, *arguments)[1]


def test_without_transformers_ours_is_measured_alone(command, monkeypatch):
    monkeypatch.setattr(bench_model, "find_spec", lambda name: None)
    arguments = [*SHORT, "--parts", "prefill,decode,context,cache,train", "--dtypes", "float32"]
    code, out, err = command(bench_model.main, *arguments)
    assert code == 0, err
    assert bench_model.ALONE in out.splitlines()
    assert "generate()" not in out
    assert out.count("[") == 1 + 6  # a pair of quartiles a row, and the one of the heading


def test_loading_is_measured_in_fresh_processes(command, folder, monkeypatch):
    in_a_process = bench_model.in_a_process
    once = functools.cache(lambda *arguments: in_a_process(list(arguments)))  # no warm-up: each takes seconds
    monkeypatch.setattr(bench_model, "in_a_process", lambda arguments: once(*arguments))
    arguments = ["--ckpt", folder, "--parts", "load", "--dtypes", "float32", *SHORT]
    code, out, err = command(bench_model.main, *arguments)
    assert code == 0, err
    rows = out.splitlines()[-4:]
    assert [row[:34].strip() for row in rows] == [
        "loading", "loading and a first token", "peak memory of loading", "peak memory with a first token",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--parts", "prefill,speed"], "--parts is 'prefill,speed'; expected some of prefill,"),
        (["--dtypes", "float16"], "--dtypes is 'float16'; expected some of float32,bfloat16"),
        (["--tokens", "1"], "--tokens is 1"),
        (["--ckpt", "nowhere"], "no checkpoint directory at nowhere"),
        (["--parts", "prefill", "--prefill", "129"], "129 positions are asked for and the model has 128"),
    ],
)
def test_bad_arguments_end_in_one_line(command, arguments, wanted):
    code, _, err = command(bench_model.main, *arguments)
    assert code == 2
    assert wanted in err.splitlines()[-1]


def test_help_does_not_wait_for_torch():
    code = "import sys; from scripts import bench_model; sys.argv = ['bench_model', '--help']\n"
    code += "try:\n    bench_model.main()\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
