"""Sampling against plain Python, generation against uncached greedy decoding, and the command as it is typed."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernels
from generate import generate, main, sample
from model.checkpoint import load_checkpoint, save_checkpoint
from model.config import LlamaConfig
from model.llama import Llama
from model.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.conftest import CPU

PROMPT = "once\n  upon 🙂"
LOGITS = [0.3, -1.0, 2.0, 0.9, -0.2, 1.4, -3.0]
TIED = [1.0, 0.0, 1.0, 0.0, 1.0, -1.0]


def greedy(model: Llama, ids: list[int], n_new: int, n_ids: int | None = None) -> list[int]:
    """Every token from a forward over all tokens before it, without a cache."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(n_new):
            ids.append(model(torch.tensor([ids]))[0, -1, :n_ids].argmax().item())
    return ids[-n_new:]


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def allowed(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The ids that may be drawn, with their probabilities: top-k (ties with the k-th stay), then top-p of the rest."""
    order = sorted(range(len(logits)), key=lambda id: -logits[id])
    kth = logits[order[min(top_k or len(logits), len(logits)) - 1]]
    weights = {id: math.exp(logits[id] / temperature) for id in order if logits[id] >= kth}
    total, kept = sum(weights.values()), {}
    for id, weight in weights.items():
        if sum(kept.values()) < top_p * total:
            kept[id] = weight
    return {id: weight / sum(kept.values()) for id, weight in kept.items()}


@pytest.mark.parametrize(
    ("logits", "temperature", "top_k", "top_p"),
    [
        (LOGITS, 1.0, 0, 1.0),
        (LOGITS, 0.5, 0, 1.0),
        (LOGITS, 1.7, len(LOGITS), 1.0),
        (LOGITS, 1.0, len(LOGITS) + 100, 1.0),
        (LOGITS, 1.0, 1, 1.0),
        (TIED, 1.0, 1, 1.0),
        (TIED, 1.0, 4, 1.0),
        (LOGITS, 1.0, 0, 1e-9),
        (LOGITS, 1.0, 0, 0.6),
        (LOGITS, 0.7, 0, 0.9),
        (LOGITS, 1.0, 4, 0.8),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(logits, temperature, top_k, top_p):
    n = 20_000
    rows = torch.tensor(logits).expand(n, -1)
    drawn = sample(rows, temperature, top_k, top_p, torch.Generator().manual_seed(0))
    assert drawn.shape == (n,)
    counts = torch.bincount(drawn, minlength=len(logits)).tolist()
    expected = allowed(logits, temperature, top_k, top_p)
    for id, count in enumerate(counts):
        p = expected.get(id, 0.0)
        # Five standard deviations of a binomial count; none at all where p is 0 or 1.
        assert abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1e-6


def test_temperature_0_takes_the_likeliest_and_draws_nothing():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    assert sample(logits, 0.0, 3, 0.5, generator).tolist() == [2, 4]
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("temperature", [1e-9, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tiny_temperature_takes_the_likeliest(temperature, dtype):
    logits = torch.tensor([LOGITS, LOGITS[::-1]], dtype=dtype) * 100
    assert sample(logits, temperature, 0, 1.0, torch.Generator().manual_seed(0)).tolist() == [2, 4]


@pytest.mark.parametrize("n_prompt", [1, 9])
def test_generation_is_greedy_decoding_without_a_cache(config, make_model, n_prompt):
    model, prompt = make_model(config), list(range(3, 3 + n_prompt))
    assert list(generate(model, prompt, 20, set(), likeliest)) == greedy(model, prompt, 20)


def test_an_end_id_stops_and_is_not_given_out(config, make_model):
    model = make_model(config)
    ids = greedy(model, [5, 6], 20)
    stop = ids.index(ids[7])
    assert list(generate(model, [5, 6], 20, {ids[stop], 60}, likeliest)) == ids[:stop]


def test_one_call_leaves_nothing_for_the_next(config, make_model):
    model = make_model(config)
    first = list(generate(model, [7], 10, set(), likeliest))
    list(generate(model, list(range(40)), 10, set(), likeliest))
    assert list(generate(model, [7], 10, set(), likeliest)) == first


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small model with weights that matter, which never ends a greedy text of its own, and its tokenizer."""
    tokenizer = train_tokenizer(["once upon a time\n  there was a lily\n" * 20], 300)
    config = LlamaConfig(tokenizer.vocab_size, 32, 48, 2, 4, 2, 8, 64, rms_norm_eps=3e-3, eos_token_id=2)
    torch.manual_seed(0)
    model = Llama(config, kernels.load_backend("reference", CPU))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    torch.nn.init.zeros_(model.lm_head.weight[tokenizer.eos_id])  # never the likeliest
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, model, tokenizer)
    return folder


def load(folder: Path, **options) -> tuple[Llama, Tokenizer]:
    model = load_checkpoint(folder, kernels.load_backend("reference", CPU), CPU, **options)
    return model, load_tokenizer(folder)


def text_of(folder: Path, prompt: str, n_new: int, **options) -> str:
    model, tokenizer = load(folder, **options)
    ids = tokenizer.encode(prompt, bos=True)
    return tokenizer.decode(ids + greedy(model, ids, n_new, tokenizer.vocab_size)) + "\n"


@pytest.fixture
def write(command, checkpoint):
    """Run the command: up to 20 tokens from the checkpoint, unless the arguments say otherwise."""
    return lambda *arguments: command(main, "--ckpt", checkpoint, "--max-new-tokens", 20, *arguments)


def changed(checkpoint: Path, folder: Path, **values) -> Path:
    """A copy whose config.json has other values; None leaves a key out."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("norm", ["reference", "torch", "triton"])
@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_every_norm_writes_prompt_and_greedy_text_to_stdout_alone(write, checkpoint, prompt, norm):
    code, out, err = write("--prompt", prompt, "--temperature", 0, "--norm", norm)
    # Along these texts the likeliest token leads by 0.003 or more; norms differ by float32 rounding, below 1e-5.
    assert (code, out) == (0, text_of(checkpoint, prompt, 20))
    assert out.startswith(prompt)
    assert f"norm {norm}" in err
    assert re.search(r"20 tokens at [\d.]+ tokens/s", err)
    assert out.strip() not in err


@pytest.mark.parametrize("seed", [0, 1337])
def test_a_seed_repeats_the_text(write, seed):
    first, again, other = (write("--seed", s)[:2] for s in (seed, seed, seed + 1))
    assert first == again
    assert first != other


def test_the_printed_seed_repeats_a_run_without_one(write):
    code, out, err = write()
    assert write("--seed", re.search(r"seed (\d+)", err)[1])[:2] == (code, out)
    assert write()[1] != out


def test_no_new_tokens_leave_the_prompt(write):
    assert write("--prompt", PROMPT, "--max-new-tokens", 0)[:2] == (0, PROMPT + "\n")


def test_the_configs_end_ids_stop_the_text_and_are_not_shown(write, checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    new = greedy(model, [tokenizer.bos_id], 20)
    n_new = new.index(new[5])
    folder = changed(checkpoint, tmp_path, eos_token_id=[2, new[n_new]])
    _, out, err = write("--ckpt", folder, "--temperature", 0)
    assert out == tokenizer.decode(new[:n_new]) + "\n"
    assert f"{n_new} tokens" in err


def test_norm_eps_takes_the_place_of_the_checkpoints(write, checkpoint, tmp_path):
    arguments = ["--ckpt", changed(checkpoint, tmp_path, rms_norm_eps=None), "--temperature", 0]
    code, _, err = write(*arguments)
    assert code == 2
    assert "rms_norm_eps is missing" in err
    assert "--norm-eps" in err
    texts = [write(*arguments, "--norm-eps", eps)[1] for eps in (3e-3, 1.0)]
    assert texts == [text_of(checkpoint, "", 20, rms_norm_eps=eps) for eps in (3e-3, 1.0)]
    assert texts[0] == text_of(checkpoint, "", 20) != texts[1]


def test_ids_beyond_the_tokenizer_are_never_drawn(write, checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    padded = Llama(replace(model.config, vocab_size=tokenizer.vocab_size + 50), kernels.load_backend("reference", CPU))
    state, generator = model.state_dict(), torch.Generator().manual_seed(0)
    for name in ("embed_tokens.weight", "lm_head.weight"):  # with rows that make the new ids by far the likeliest
        state[name] = torch.cat([state[name], 10 * torch.randn(50, 32, generator=generator)])
    padded.load_state_dict(state)
    save_checkpoint(tmp_path, padded, tokenizer)
    assert write("--ckpt", tmp_path, "--seed", 5)[:2] == write("--seed", 5)[:2]


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(write, checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    small = Llama(replace(model.config, vocab_size=tokenizer.vocab_size - 1), kernels.load_backend("reference", CPU))
    save_checkpoint(tmp_path, small, tokenizer)
    code, _, err = write("--ckpt", tmp_path)
    assert code == 2
    assert f"{tokenizer.vocab_size} pieces" in err
    assert f"{tokenizer.vocab_size - 1} rows" in err


def test_the_context_can_be_filled_but_not_passed(write, checkpoint):
    n_prompt = len(load_tokenizer(checkpoint).encode(PROMPT, bos=True))
    arguments = ["--prompt", PROMPT, "--temperature", 0, "--max-new-tokens"]
    assert write(*arguments, 64 - n_prompt)[1] == text_of(checkpoint, PROMPT, 64 - n_prompt)
    code, _, err = write(*arguments, 65 - n_prompt)
    assert code == 2
    assert {str(n_prompt), str(65 - n_prompt), "64"} <= set(re.findall(r"\d+", err))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--temperature", "-1"], "argument --temperature: '-1'"),
        (["--temperature", "nan"], "argument --temperature: 'nan'"),
        (["--top-k", "-5"], "argument --top-k: '-5'"),
        (["--top-p", "0"], "argument --top-p: '0'"),
        (["--top-p", "1.5"], "--top-p is 1.5"),
        (["--max-new-tokens", "-1"], "argument --max-new-tokens: '-1'"),
        (["--norm-eps", "0"], "argument --norm-eps: '0'"),
        (["--norm", "layer"], "'layer'; use one of: reference, torch, compile, triton, auto"),
        (["--ckpt", "no/such/folder"], "no/such/folder"),
        (["--prompt", "\udcff"], "UTF-8"),  # how Python hands on an argument that isn't UTF-8
    ],
)
def test_what_cant_be_done_is_refused_in_one_line(write, arguments, found):
    code, out, err = write(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert found in err
