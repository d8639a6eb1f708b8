"""The perplexity of a text: each token is scored once, with the loss that transformers has on the same windows."""

import math
import re

import pytest
import torch

import kernels
from model.checkpoint.load import load_checkpoint
from model.tokenizer import load_tokenizer
from scripts import perplexity
from tests.helpers import CPU, ROOT


def ids_of(checkpoint):
    text = (checkpoint / "text.txt").read_text(encoding="utf-8")
    return torch.tensor(load_tokenizer(checkpoint).encode(text, bos=True))


def loss_of(output):
    """(perplexity, loss, tokens) of the printed line."""
    return tuple(map(float, re.match(r"perplexity ([\d.]+), loss ([\d.]+) nats a token: (\d+)", output).groups()))


@pytest.mark.parametrize("n_tokens", [2, 3, 63, 64, 65, 200])
@pytest.mark.parametrize(("context", "stride"), [(64, 64), (64, 63), (64, 1), (64, 17), (2, 1), (2, 2)])
def test_each_token_but_the_first_is_scored_once_with_as_much_before_it_as_can_be(n_tokens, context, stride):
    scored = {}
    for start, end, n_scored in perplexity.windows(n_tokens, context, stride):
        assert 1 < end - start <= context + 1
        assert n_scored < end - start  # the first one has nothing before it
        for token in range(end - n_scored, end):
            assert token not in scored
            scored[token] = token - start
    assert list(scored) == list(range(1, n_tokens))
    assert all(before == token if token <= context else before > context - stride for token, before in scored.items())
    assert max(scored.values()) <= context


@pytest.mark.parametrize(("context", "stride"), [(64, 32), (64, 64), (40, 7), (64, 1)])
def test_the_loss_is_that_of_transformers_on_the_same_windows(checkpoint, command, context, stride):
    """In transformers' own way: -100 labels what another window has scored; its model takes a position more."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = ids_of(checkpoint)[:240]
    total, before = 0.0, 1
    for start in range(0, len(ids), stride):
        end = min(start + context + 1, len(ids))
        labels = ids[start:end].clone()
        labels[: before - start] = -100
        with torch.no_grad():
            loss = theirs(ids[None, start:end], labels=labels[None]).loss.double()
        total, before = total + loss.item() * (end - before), end
        if end == len(ids):
            break
    expected = total / (len(ids) - 1)
    done = command(
        perplexity.main, "--ckpt", checkpoint, "--text", checkpoint / "text.txt", "--max-tokens", 240,
        "--context", context, "--stride", stride, "--norm", "torch", "--dtype", "float32",
    )  # fmt: skip
    found = loss_of(done.out)
    assert found[1] == pytest.approx(expected, abs=1e-5)
    assert found[0] == pytest.approx(math.exp(expected), rel=1e-4)
    assert found[2] == 239


def test_the_context_and_stride_of_the_model_and_its_eps(checkpoint, command):
    arguments = "--ckpt", checkpoint, "--text", checkpoint / "text.txt", "--dtype", "float32"
    plain = command(perplexity.main, *arguments)
    assert plain.out.endswith("context 64, stride 32\n")
    assert "eps 0.003, float32 on cpu" in plain.err
    other = command(perplexity.main, *arguments, "--norm-eps", "3")
    assert "eps 3, float32 on cpu" in other.err
    assert loss_of(other.out)[1] != loss_of(plain.out)[1]
    longer = command(perplexity.main, *arguments, "--context", 99, "--stride", 64)
    assert longer.out.endswith("context 64, stride 64\n")
    said = "--context is 99 and the model takes 64 tokens at most, so a window has 64"
    assert said in longer.err
    assert said.partition(" and")[2] not in plain.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_that_is_not_finite_is_refused_and_one_too_large_is_not(checkpoint, monkeypatch, command, dtype):
    arguments = "--ckpt", checkpoint, "--text", checkpoint / "text.txt", "--dtype", dtype

    def of_head(factor):
        def load(*rest):
            model = load_checkpoint(*rest)
            with torch.no_grad():
                model.lm_head.weight *= factor
            return model

        monkeypatch.setattr(perplexity, "load_checkpoint", load)
        return command(perplexity.main, *arguments)

    large = of_head(1e5)
    assert re.fullmatch(r"perplexity above 1e43, loss \d+\.\d+ nats a token: .*\n", large.out)
    assert perplexity.perplexity_of(710.0, ".4f") == "above 1e43"  # math.exp overflows
    nan = of_head(math.nan)
    assert (nan.code, nan.out) == (2, "")
    assert f"error: the loss is nan in {dtype}; expected a finite one" in nan.err
    assert "weights may be NaN or infinite" in nan.err
    assert ("bfloat16 too narrow: try --dtype float32" in nan.err) is (dtype == "bfloat16")


def test_half_precision_is_scored_in_float32(checkpoint):
    """A sum of losses in bfloat16 would be off by 0.4 %; in float32 only the logits' own rounding is left."""
    ids = ids_of(checkpoint)[:60]
    model = load_checkpoint(checkpoint, kernels.load_backend("reference", CPU), CPU, torch.bfloat16)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(ids[None, :-1])[0].double(), ids[1:]).item()
    assert perplexity.mean_loss(model, ids, 64, 32) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--context", "1"], "error: --context is 1 and --stride 1; expected a context of 2 tokens or more"),
        (["--context", "8", "--stride", "9"], "error: --context is 8 and --stride 9; expected"),
        (["--text", "missing.txt"], "error: --text missing.txt cannot be read (No such file or directory)"),
        (["--text", ROOT / "scripts/figures/parity.png"], "is not UTF-8 text"),
        (["--max-tokens", "1"], "error: tokens of the text: 1; expected 2 or more"),
    ],
)
def test_what_is_no_text_or_window_ends_in_one_line(checkpoint, command, change, message):
    done = command(perplexity.main, "--ckpt", checkpoint, "--text", checkpoint / "text.txt", *change)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]


def test_the_default_is_the_held_out_text_of_the_run(trained, command, checkpoint):
    trained("--steps", 2)
    done = command(perplexity.main, "--ckpt", "out/model", "--max-tokens", 50, "--norm", "reference")
    assert loss_of(done.out)[2] == 49
    text = command(perplexity.main, "--ckpt", "out/model", "--max-tokens", 50, "--text", checkpoint / "text.txt")
    assert loss_of(text.out) != loss_of(done.out)
    done = command(perplexity.main, "--ckpt", checkpoint)
    assert done.code == 2
    assert (
        done.err
        == f"error: {checkpoint} holds no run.json of a training run, so no held-out text; name one with --text\n"
    )
