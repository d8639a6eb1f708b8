"""How cost grows: what is measured at each point, and what that must cost at the least.

Nothing here looks at how long anything took.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import load_backend
from model.config import LlamaConfig
from scripts.bench import growth, growth_picture, model_parts
from scripts.bench.growth import Point
from scripts.bench.model_parts import Ours, Setup, Theirs
from tests.helpers import CPU, FLOAT32_BOUND, ROOT, relative

CONFIGS = ROOT / "configs"
TINY_CONFIGS = sorted(path.stem for path in CONFIGS.glob("tiny*.json"))
TORCH = load_backend("torch", CPU)
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


@pytest.fixture
def setup(config):
    """One turn of everything on small models, on a machine whose limits are round numbers."""
    args = SimpleNamespace(repeats=1, compile=False, contexts=[8, 200])
    return Setup(args, Path(), replace(config, tie_word_embeddings=True), TORCH, 1e9, {"float32": 1e12}, "float32")


@pytest.mark.parametrize("name", TINY_CONFIGS)
@torch.inference_mode()
def test_both_models_go_on_alike_from_caches_that_were_filled(name):
    """Also beyond a window and the positions of the config, from the same weights in memory."""
    config = replace(LlamaConfig.load(CONFIGS / f"{name}.json"), max_position_embeddings=1024)
    ours, theirs = growth.random_models(config, TORCH, "float32")
    assert ours.embed_tokens.weight.data_ptr() == theirs.get_input_embeddings().weight.data_ptr()
    assert not theirs.training
    texts = {"ours": Ours(ours, ours, 704), "theirs": Theirs(theirs)}
    growth.fill(texts, 700)
    ids = torch.tensor([[3, 5]])
    for token in ids.split(1, dim=1):
        expected = texts["theirs"].step(token)
        assert relative(texts["ours"].step(token) - expected, expected) < FLOAT32_BOUND
    emptied = Ours(ours, ours, 704)
    emptied.step(ids[:, :1])
    assert relative(emptied.step(ids[:, 1:]) - expected, expected) > 1e-2  # the keys count


def test_a_token_is_timed_after_as_many_as_the_point_says(setup, monkeypatch):
    seen = []

    def time_steps(text, ids):
        there = text.caches[0].length if isinstance(text, Ours) else text.cache.get_seq_length()
        seen.append((type(text), there, ids.shape))
        return 1.0

    monkeypatch.setattr(model_parts, "time_steps", time_steps)
    points = list(growth.measure("context", setup))
    each = (1, growth.MORE)
    assert seen == [(side, n, each) for n in (8, 200) for side in (Ours, Theirs, Ours, Theirs)]  # the config has 64
    layer = 48 * 4 * 12 * 2 + 48 * 2 * 12 * 2 + 3 * 48 * 80
    weights = 4 * (61 * 48 + 3 * layer + 7 * 48)
    row = 2 * 3 * 2 * 12 * 4  # keys and values, layers, heads, their size, bytes
    assert [point.least for point in points] == [(weights + n * row) / 1e9 for n in (8, 200)]


def test_a_window_bounds_the_keys_that_a_token_reads(config):
    kinds = {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    models = [growth.random_models(replace(config, **more), TORCH, "bfloat16")[0] for more in ({}, kinds)]
    row = 2 * 2 * 12 * 2  # keys and values, heads, their size, bytes
    assert [growth.cache_bytes(model, 50) for model in models] == [3 * 50 * row, (50 + 2 * 32) * row]
    assert growth.cache_bytes(models[1], 20) == 3 * 20 * row


def test_a_models_size_is_its_parameters(setup, monkeypatch):
    monkeypatch.setattr(growth, "SIZES", [(512, 48, 96, 2, 4, 2), (512, 96, 96, 3, 8, 8)])
    first, second = growth.measure("size", setup)
    assert first.n == 512 * 48 + 2 * (48 * (48 + 24 + 24) + 48 * 48 + 3 * 48 * 96) + 5 * 48
    assert second.n == 512 * 96 + 3 * (4 * 96 * 96 + 3 * 96 * 96) + 7 * 96
    cache = 2 * 2 * 2 * 12 * growth.AFTER
    assert first.least == 4 * (first.n + cache) / 1e9


def test_the_shapes_are_those_of_the_sizes_that_the_documents_name(monkeypatch, setup):
    monkeypatch.setattr(growth, "decoding", lambda *_: ({"ours": [1.0]}, 1.0))
    meta = torch.device("meta")
    original = growth.Llama

    def on_meta(config, norm, dtype):
        with meta:
            return original(config, norm), None

    monkeypatch.setattr(growth, "random_models", on_meta)
    names = [growth_picture.short(point.n) for point in growth.measure("size", setup)]
    assert names == ["15M", "42M", "110M", "362M", "1.2B"]


def test_a_training_step_must_do_its_flops_and_keep_what_its_backward_needs(setup, monkeypatch):
    small = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    small |= {"intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 16}
    monkeypatch.setattr(growth, "TRAINED", growth.TRAINED | small)
    monkeypatch.setattr(growth, "TRAINED_VOCABULARY", 4096)
    monkeypatch.setattr(growth, "BLOCK", 16)
    monkeypatch.setattr(growth, "TOKENS", [32, 128])
    few, peak_few, many, peak_many = growth.measure("tokens", setup)
    assert [point.n for point in (few, peak_few, many, peak_many)] == [32, 32, 128, 128]
    matrices = 2 * (48 * (48 + 24 + 24) + 48 * 48 + 3 * 48 * 96) + 4096 * 48
    attention = 2 * 2 * 48 * (16 + 1) / 2  # layers, q k and p v, width, keys that a token sees
    assert [point.least for point in (few, many)] == [3 * 2 * (matrices + attention) * n / 1e12 for n in (32, 128)]
    kept = 2 * (4 * 48 + 2 * 48 + 2 * 24 + 3 * 96) + 4096
    gradients = 4 * (matrices + 4096 * 48 + 5 * 48)
    assert [point.least for point in (peak_few, peak_many)] == [gradients, 4 * 128 * kept]
    for point in (peak_few, peak_many):
        assert set(point.found) == {"ours", "theirs"}
        for [peak] in point.found.values():
            assert point.least < peak
    assert max(peak_few.found["ours"] + peak_few.found["theirs"]) < 2 * gradients  # AdamW's state would be 2 more


def test_the_layers_change_and_the_tokens_stay(setup, monkeypatch):
    built = []

    def training_calls(setup, config, batch):
        built.append((config.num_hidden_layers, config.vocab_size, batch.shape))
        return SimpleNamespace(config=config, parameters=list), {"ours": lambda: 1.0, "theirs": lambda: 2.0}

    monkeypatch.setattr(model_parts, "training_calls", training_calls)
    monkeypatch.setattr(growth, "training_flops", lambda model, block: 1.0)
    monkeypatch.setattr(growth, "peak_bytes", lambda call, device: call())
    points = list(growth.measure("layers", setup))
    assert built == [(n, 8192, (8, 257)) for n in (2, 4, 8, 16, 32)]
    assert [point.panel for point in points] == ["layers", "layers_memory"] * 5
    assert points[0].found == points[1].found == {"ours": [1.0], "theirs": [2.0]}


def test_a_row_tells_the_powers_by_which_costs_have_grown():
    before = Point("tokens", 100, "float32", {"ours": [0.002, 0.002, 9.0], "theirs": [0.001]}, 0.001)
    row = Point("tokens", 400, "float32", {"ours": [0.016], "theirs": [0.004]}, 0.002).row(before)
    assert (row.what, row.unit) == ("training step, 400 tokens", "ms")
    assert row.note == "8.0 times the least, 2 ms; slopes: ours 1.50, theirs 1.00, least 0.50"
    assert before.row(None).note == "2.0 times the least, 1 ms"


def test_the_picture_has_a_panel_a_question_and_the_tables_numbers(monkeypatch, tmp_path):
    points = [
        point
        for dtype in ("float32", "bfloat16")
        for n in (8, 64)
        for point in (
            Point("context", n, dtype, {"ours": [n * 1e-3, 9.0, 0.0], "theirs": [2.0]}, 5e-4),
            Point("tokens_memory", n, dtype, {"ours": [n * 1e6]}, 1e6),
        )
    ]
    figure = growth_picture.new_figure(9, 3)
    monkeypatch.setattr(growth_picture, "new_figure", lambda *size: figure)
    growth_picture.draw(points, tmp_path / "growth.png")
    context, memory = figure.axes
    assert [line.get_label() for line in context.lines[:4]] == [
        "ours, float32", "transformers, float32", "at the least, float32", "ours, bfloat16"
    ]  # fmt: skip
    assert context.lines[0].get_xydata().tolist() == [[8, 8], [64, 64]]  # milliseconds
    assert context.lines[2].get_xydata().tolist() == [[8, 0.5], [64, 0.5]]
    assert [label.get_text() for label in context.get_xticklabels()] == ["8", "64"]
    assert (context.get_xscale(), context.get_yscale(), context.get_ylabel()) == ("log", "log", "ms")
    assert memory.lines[0].get_xydata().tolist() == [[8, 8], [64, 64]]  # megabytes
    assert (len(memory.lines), memory.get_ylabel(), memory.get_xlabel()) == (4, "MB", "tokens a step")
