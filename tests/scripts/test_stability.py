"""Training runs by norm and placement: what is trained, what is measured of it, and what is called a difference."""

import json
import math
import sys
from concurrent.futures import Future

import pytest
import torch

import train
from model.llama import summed_loss
from model.norm import Add, RMSNorm
from model.training.data import batch_starts, load_tokens, windows
from model.training.prepare import prepare
from scripts import stability
from scripts.stability import NONE, Case, Measured
from tests.helpers import metrics_of

INF = math.inf
SHAPE = {
    "vocab_size": 290, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 3e-3, "initializer_range": 0.08,
}  # fmt: skip


@pytest.fixture
def small(workplace, monkeypatch):
    """A smaller shape, and text.txt prepared for it."""
    monkeypatch.setattr(stability, "SHAPE", SHAPE)
    monkeypatch.setattr(stability, "BATCH_SIZE", 4)
    monkeypatch.setattr(stability, "BLOCK_SIZE", 16)
    return prepare("text.txt", 290, stability.DATA)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [3.0, 4.0], -1),
        ([3.0, 4.0], [1.0, 2.0], 1),
        ([1.0, 3.0], [2.0, 4.0], 0),
        ([1.0, 9.0], [2.0, 3.0], 0),
        ([1.0, 2.0], [2.0, 3.0], 0),  # one value in common is none below
        ([1.0, 2.0], [INF, INF], -1),
        ([1.0, INF], [INF, INF], 0),
        ([INF, INF], [INF, INF], 0),
    ],
)
def test_a_difference_is_one_where_no_seeds_overlap(a, b, expected):
    assert stability.lower(a, b) == expected


def test_compared_is_what_differs_in_one_thing():
    variants = [("r", "pre"), ("r", "post"), ("l", "pre"), ("l", "post"), (NONE, NONE)]
    assert stability.pairs(variants) == [
        (("r", "pre"), ("r", "post")), (("r", "pre"), ("l", "pre")), (("r", "pre"), (NONE, NONE)),
        (("r", "post"), ("l", "post")), (("r", "post"), (NONE, NONE)),
        (("l", "pre"), ("l", "post")), (("l", "pre"), (NONE, NONE)), (("l", "post"), (NONE, NONE)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "rate"),
    [
        ({0.1: 3.0, 1.0: 4.0, 10.0: 5.0}, 10.0),
        ({0.1: 3.0, 1.0: 5.0, 10.0: INF}, 1.0),
        ({0.1: 4.7, 1.0: 3.0, 10.0: 4.0}, INF),  # too small a rate has learnt too little, and has not diverged
        ({0.1: 4.7, 1.0: 3.0, 10.0: 4.7}, 10.0),
        ({0.1: INF, 1.0: INF}, 0.1),
        ({0.1: 4.6, 1.0: INF}, 1.0),  # exactly the unigram distribution
    ],
)
def test_the_rate_that_diverges_is_above_the_best_one(last, rate):
    assert stability.first_diverging(last, 4.6) == rate


def test_the_tables_say_what_was_measured_and_no_more():
    measured = {
        ("torch", "pre"): Measured([1.0, 3.0, 2.0], [1.5, 3.5, 2.5], [5.0, 6.0, 7.0], [1.0, INF, 1.0]),
        ("layer_norm", "pre"): Measured([2.5, 4.0, 5.0], [4.0, 5.0, 6.0], [8.0, 9.0, 10.0], [INF, INF, INF]),
        (NONE, NONE): Measured([0.1, 0.2, 0.3], [INF, 0.5, INF], [1.0, 2.0, INF], [0.1, 0.1, 0.01]),
    }
    assert stability.tables(measured, 3e-3).splitlines()[2:5] == [
        "| torch pre | 2 [1, 3] | 2.5 [1.5, 3.5] | 6 [5, 7] | 1 [1, never] |",
        "| layer_norm pre | 4 [2.5, 5] | 5 [4, 6] | 9 [8, 10] | never [never, never] |",
        "| no norm | 0.2 [0.1, 0.3] | diverged [0.5, diverged] | 2 [1, diverged] | 0.1 [0.01, 0.1] |",
    ]
    none = "no difference seen"
    assert stability.tables(measured, 3e-3).splitlines()[8:11] == [
        f"| torch pre; layer_norm pre | {none} | lower: torch pre | lower: torch pre | {none} |",
        f"| torch pre; no norm | lower: no norm | {none} | {none} | lower: no norm |",
        f"| layer_norm pre; no norm | lower: no norm | {none} | {none} | lower: no norm |",
    ]
    # 12 cells, and 2 of the (6 over 3) = 20 orders of six values have three below the others.
    assert stability.tables(measured, 3e-3).splitlines()[-1] == (
        "12 comparisons of 3 seeds each; were all models alike, 1.2 of them would be called a difference by chance"
    )


def test_a_run_that_ended_early_or_in_nan_has_no_final_loss():
    assert stability.final_loss({"losses": [(4, 2.0), (8, 1.0)]}, 8) == 1.0
    for losses in ([], [(4, 2.0)], [(4, 2.0), (8, None)]):
        assert stability.final_loss({"losses": losses}, 8) == INF


@torch.no_grad()
@pytest.mark.parametrize("norm", ["reference", "layer_norm_bias"])
def test_the_norms_stand_where_they_are_placed(norm, small):
    """A layer by hand, from its sub-layers."""
    x = torch.randn(2, 5, 32)
    matrices = []
    for placement in ("pre", "post", "both", NONE):
        torch.manual_seed(3)
        model = stability.build(norm, placement, 290)
        matrices.append([p.clone() for p in model.parameters() if p.dim() > 1])
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        layer, tokens = model.layers[0], torch.zeros(2, 5, dtype=torch.int64)
        spans = []
        layer.register_forward_pre_hook(lambda _, inputs, spans=spans: spans.append(inputs[2]))
        model(tokens)
        found = sum(layer(x, None, spans[0], None))
        before = placement in ("pre", "both")
        after = placement in ("post", "both")

        def normed(name, h, wanted, layer=layer):
            module = getattr(layer, name)
            assert isinstance(module, RMSNorm if wanted else Add)
            bias = {} if not wanted or module.bias is None else {"bias": module.bias}
            return module.backend.rms_norm(h, module.weight, 3e-3, **bias) if wanted else h

        h = layer.attention(normed("attention_norm", x, before), spans[0], None)
        h = x + normed("attention_output_norm", h, after)
        expected = h + normed("ffn_output_norm", layer.feed_forward(normed("ffn_norm", h, before)), after)
        torch.testing.assert_close(found, expected)
        assert isinstance(model.norm, Add if placement == NONE else RMSNorm)
        n_norms = {"pre": 5, "post": 5, "both": 9, NONE: 0}[placement]
        assert sum(isinstance(module, RMSNorm) for module in model.modules()) == n_norms
    for other in matrices[1:]:
        assert all(torch.equal(a, b) for a, b in zip(matrices[0], other, strict=True))


def test_a_run_is_train_pys(small, workplace, command):
    """RMSNorm on the inputs is a LLaMA, so train.py itself gives the same held-out losses, to the bit."""
    (workplace / "shape.json").write_text(json.dumps(SHAPE))
    done = command(
        train.main, "--config", "shape.json", "--data", "text.txt", "--norm", "torch", "--dtype", "float32",
        "--steps", 20, "--batch-size", 4, "--block-size", 16, "--lr", "1e-2", "--seed", 7, "--eval-interval", 2,
    )  # fmt: skip
    assert done.code == 0, done.err
    metrics = metrics_of(workplace / "out/tiny")
    expected = [(line["step"] + 1, line["val_loss"]) for line in metrics if "val_loss" in line]
    found = stability.train_once(Case("torch", "pre", 1e-2, 7), 20, 0.1, small)
    assert found["losses"] == expected
    # The gradients are those before they are clipped, here of the first step's batch.
    torch.manual_seed(7)
    model, (tokens, _, meta) = stability.build("torch", "pre", 290), load_tokens(small, 16)
    batch = windows(tokens, batch_starts(len(tokens), 0, 7, 4, 16), 16)
    (summed_loss(model, batch) / 64).backward()
    assert metrics[0]["grad_norm"] > 1
    assert found["gradients"]["1"] == pytest.approx(stability.gradient_norms(model), rel=1e-5)
    assert found["unigram_loss"] == meta["unigram_loss"]


def test_a_seed_repeats_a_run_and_another_one_does_not(small):
    first, again, other = (
        stability.train_once(Case("layer_norm", "post", 1e-2, seed), 6, 0.1, small) for seed in (1, 1, 2)
    )
    assert first == again
    assert first["losses"] != other["losses"]
    assert first["gradients"]["1"] != other["gradients"]["1"]
    assert list(first["gradients"]) == ["1", "6"]


def test_gradients_are_those_of_each_layers_matrices():
    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    model = Tiny()
    model.layers[0].weight.grad, model.layers[1].weight.grad = torch.tensor([[3.0, 0], [0, 4]]), torch.ones(2, 2)
    for layer in model.layers:
        layer.bias.grad = torch.full((2,), 100.0)
    assert stability.gradient_norms(model) == [5, 2]


def test_a_run_that_diverges_is_seen(small):
    wild = stability.train_once(Case(NONE, NONE, 1e4, 1), 10, 0.1, small)
    assert stability.final_loss(wild, 10) == INF
    json.dumps(wild, allow_nan=False)
    high = stability.train_once(Case("torch", "pre", 1e4, 1), 10, 0.1, small)
    assert high["unigram_loss"] < stability.final_loss(high, 10)
    calm = stability.train_once(Case("torch", "pre", 1e-2, 1), 60, 0.1, small)
    assert stability.final_loss(calm, 60) < calm["unigram_loss"]


def test_a_run_counts_as_there_only_with_the_same_settings(small, tmp_path, monkeypatch):
    case, args, path = Case("a.b:c", "pre", 1e-2, 1), arguments(monkeypatch), tmp_path / "run.json"
    settings = stability.settings_of(case, args, small)
    assert stability.earlier(path, settings) is None
    monkeypatch.setattr(stability, "train_once", lambda *_: {"losses": [[3, 1.0]]})
    result = stability.run_once(case, settings, small, path)
    assert stability.earlier(path, settings) == result
    args.weight_decay = 0.0
    assert stability.earlier(path, stability.settings_of(case, args, small)) is None
    args = arguments(monkeypatch)
    assert stability.earlier(path, stability.settings_of(case._replace(lr=2e-2), args, small)) is None
    monkeypatch.setattr(stability, "BATCH_SIZE", 5)
    assert stability.earlier(path, stability.settings_of(case, args, small)) is None


class Inline:
    """A pool of processes that is this one."""

    def __init__(self, *_):
        self.shutdown = lambda **_: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *rest):
        future = Future()
        future.set_result(function(*rest))
        return future


def test_a_run_of_ones_own_norm_is_repeated_as_its_code_may_have_changed(small, tmp_path, monkeypatch, capsys):
    trained, args = [], arguments(monkeypatch, "--out", str(tmp_path))
    monkeypatch.setattr(stability, "train_once", lambda case, *_: trained.append(case.norm) or {"losses": []})
    monkeypatch.setattr(stability, "ProcessPoolExecutor", Inline)
    (tmp_path / "runs").mkdir()
    cases = [Case(norm, "pre", 0.1, seed) for norm in ("torch", "a.b:c", "a.b:c@float16") for seed in (1, 2)]
    assert list(stability.run_all(cases, args, small)) == cases
    assert trained == ["torch"] * 2 + ["a.b:c"] * 2 + ["a.b:c@float16"] * 2
    assert list(stability.run_all(cases, args, small)) == cases
    assert trained[6:] == trained[2:6]
    assert "runs: 6, there already: 2," in capsys.readouterr().err


def results_of(losses):
    """Results of runs whose last losses are given by (norm, placement, rate, seed)."""
    found = {}
    for case, loss in losses.items():
        curve = [[4, 5.0], [8, loss if loss < INF else None]]
        found[Case(*case)] = {"losses": curve, "gradients": {"1": [2.0, 1.0], "8": [loss, 1.0]}, "unigram_loss": 4.5}
    return found


LOSSES = {
    ("torch", "pre", 0.1, 1): 2.0, ("torch", "pre", 0.1, 2): 3.0, ("torch", "pre", 0.1, 3): 2.5,
    ("torch", "pre", 1.0, 1): 5.0, ("torch", "pre", 1.0, 2): INF, ("torch", "pre", 1.0, 3): 4.0,
}  # fmt: skip


def arguments(monkeypatch, *more):
    monkeypatch.setattr(
        sys, "argv", ["stability.py", "--seeds", "3", "--steps", "8", "--lrs", "1,0.1", "--at", "0.1", *more]
    )
    return stability.parse_args()


def test_measures_are_by_seed(monkeypatch):
    found = stability.measure(results_of(LOSSES), "torch", "pre", arguments(monkeypatch))
    assert found == Measured([2.0, 3.0, 2.5], [2.0, 3.0, 2.5], [2.0, 3.0, 2.5], [1.0, 1.0, INF])


def test_the_panels_show_what_was_measured(monkeypatch, tmp_path):
    figure = stability.new_figure(14, 5)
    monkeypatch.setattr(stability, "new_figure", lambda *_: figure)
    stability.draw(results_of(LOSSES), arguments(monkeypatch), tmp_path / "picture.png")
    by_step, by_layer, by_rate = (
        [list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()] for axes in figure.axes
    )
    assert by_step[0] == [(4, 5.0), (8, 2.5)]
    assert by_layer == [[(1, 2.0), (2, 1.0)], [(1, 2.5), (2, 1.0)]]
    assert by_rate[0] == [(0.1, 2.5), (1.0, 5.0)]
    assert list(by_step[1][0])[1] == 4.5  # the unigram distribution
    bands = [axes.collections[-1].get_paths()[0].vertices for axes in figure.axes]
    assert {tuple(point) for point in bands[0]} >= {(8.0, 2.0), (8.0, 3.0)}
    assert {tuple(point) for point in bands[1]} >= {(1.0, 2.0), (1.0, 3.0)}
    assert {tuple(point) for point in bands[2]} >= {(0.1, 2.0), (0.1, 3.0)}
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--at", "0.2"], "--at is 0.2; expected one of --lrs: 0.1, 1"),
        (["--placements", "pre,middle"], "expected some of each, placements among pre, post, both"),
        (["--norms", ","], "--norms is empty"),
        (["--lrs", "0.1,x"], "'x' is not a positive number"),
        (["--seeds", "1"], "--seeds is 1; expected 2 or more"),
        (["--quick"], "--quick chooses --steps, --seeds, --lrs, --at itself; leave one of the two out"),
    ],
)
def test_bad_input_is_one_line(more, said, monkeypatch):
    with pytest.raises(stability.InputError, match=said):
        arguments(monkeypatch, *more)


def test_a_norm_that_is_not_there_is_refused_before_the_first_run(workplace, command):
    done = command(stability.main, "--quick", "--norms", "torch,nobody", "--data", "text.txt")
    assert (done.code, done.out) == (2, "")
    assert "no norm backend is called 'nobody'" in done.err
    assert not (workplace / "out").exists()


@pytest.mark.long
def test_the_command_trains_in_processes_and_continues(workplace, command):
    run = ["--quick", "--norms", "torch,none", "--placements", "pre", "--data", "text.txt", "--jobs", 2]
    done = command(stability.main, *run)
    assert done.code == 0, done.err
    folder = workplace / "out/stability"
    files = {path.name: path.stat().st_mtime_ns for path in (folder / "runs").iterdir()}
    assert len(files) == 2 * 2 * 2
    assert [line.split(" | ")[0] for line in done.out.splitlines() if " [" in line] == ["| torch pre", "| no norm"]
    assert (folder / "stability.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((folder / "stability.json").read_text())
    assert [len(each["losses"]) for each in summary["measured"]] == [2, 2]
    again = command(stability.main, *run)
    assert again.out == done.out
    assert "runs: 8, there already: 8," in again.err
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "runs").iterdir()} == files
