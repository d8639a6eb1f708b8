"""model/generation.py: sampling against plain Python, and generation against greedy decoding without a cache."""

import math
from dataclasses import replace

import pytest
import torch

from kernels import InputError
from model.generation import generate, sample
from model.llama import Llama
from tests.helpers import greedy, likeliest, texts

LOGITS = [0.3, -1.0, 2.0, 0.9, -0.2, 1.4, -3.0]
TIED = [1.0, 0.0, 1.0, 0.0, 1.0, -1.0]


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
        (LOGITS, 1.0, 3, 0.5),  # of three tokens the first has 0.53, of all 0.45
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


class OnMps(torch.Tensor):
    """Stand-in for a tensor on Apple's GPU, which has no float64."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        if function is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        if isinstance(result, cls) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_device_without_float64_draws_what_the_cpu_draws(temperature):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    with pytest.raises(TypeError):
        logits.as_subclass(OnMps).double()
    drawn = [
        sample(x, temperature, 9, 0.9, torch.Generator().manual_seed(0)) for x in (logits.as_subclass(OnMps), logits)
    ]
    assert drawn[0].tolist() == drawn[1].tolist()
    assert isinstance(drawn[0], OnMps) == (temperature == 0)  # the likeliest is found where the logits are


def varied(model: Llama, n_new: int) -> tuple[list[int], list[int]]:
    """A prompt whose first greedy ids are all different, and these ids."""
    found = ((prompt := [p], greedy(model, prompt, n_new)) for p in range(61))
    return next((prompt, new) for prompt, new in found if len(set(new)) == n_new)


@pytest.mark.parametrize("n_prompt", [1, 9])
def test_generation_is_greedy_decoding_without_a_cache(config, make_model, n_prompt):
    model, prompt = make_model(config), list(range(3, 3 + n_prompt))
    assert texts(generate(model, [prompt], 20, set(), likeliest)) == [greedy(model, prompt, 20)]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"sliding_window": 5},
        {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ],
    ids=["plain", "window", "dynamic scaling"],
)
def test_prompts_of_different_lengths_in_a_batch_get_what_each_gets_alone(config, make_model, changed):
    model = make_model(replace(config, **changed))
    prompts = [[3], list(range(10, 21)), [7, 8, 9, 10], list(range(30, 41))]
    alone = [texts(generate(model, [prompt], 30, set(), likeliest))[0] for prompt in prompts]
    assert texts(generate(model, prompts, 30, set(), likeliest)) == alone
    assert len({tuple(text) for text in alone}) == 4  # or the comparison would see no mixed-up rows


def test_a_batch_runs_until_its_last_text_has_ended(config, make_model):
    model, prompts = make_model(config), [[5, 6], [9], [1, 2, 3]]
    alone = [greedy(model, prompt, 25) for prompt in prompts]
    end = alone[1][7]
    expected = [text[: text.index(end)] if end in text else text for text in alone]
    assert len({len(text) for text in expected}) > 1
    assert texts(generate(model, prompts, 25, {end}, likeliest)) == expected


def test_every_text_of_a_batch_may_fill_the_context(config, make_model):
    """The longer prompt leaves room for 4 tokens and one that isn't fed back, the other for 62 and one."""
    model, prompts = make_model(config), [list(range(60)), [4, 5]]
    long, short = texts(generate(model, prompts, 1000, set(), likeliest))
    assert (len(long), len(short)) == (5, 63)
    assert [long, short] == [greedy(model, prompts[0], 5), greedy(model, prompts[1], 63)]
    assert texts(generate(model, [[5] * 64], 9, set(), likeliest)) == [greedy(model, [5] * 64, 1)]
    assert list(generate(model, [[0] * 65], 9, set(), likeliest)) == []


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_a_text_may_fill_the_context_that_scaling_has_stretched(config, make_model, kind):
    scaling = {"rope_type": kind, "factor": 2.5}
    model = make_model(replace(config, max_position_embeddings=8, rope_scaling=scaling))
    [text] = texts(generate(model, [[5, 6, 7]], 99, set(), likeliest))
    assert len(text) == 20 - 3 + 1  # and the last is never fed back


def test_an_end_id_stops_the_text_and_is_not_yielded(config, make_model):
    model = make_model(config)
    prompt, new = varied(model, 5)
    assert texts(generate(model, [prompt], 20, {new[3], 60}, likeliest)) == [new[:3]]
    assert list(generate(model, [prompt], 20, {new[0]}, likeliest)) == []


def test_one_call_leaves_nothing_for_the_next(config, make_model):
    model = make_model(config)
    first = list(generate(model, [[7]], 10, set(), likeliest))
    list(generate(model, [list(range(40))], 10, set(), likeliest))
    assert list(generate(model, [[7]], 10, set(), likeliest)) == first


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_or_infinite_logits_are_named_with_their_step(config, make_model, bad):
    model = make_model(config)
    prompt, new = varied(model, 3)
    model.embed_tokens.weight.data[new[1]] = bad  # read when the second token is fed back
    rows = generate(model, [prompt], 9, set(), likeliest)
    assert [next(rows), next(rows)] == [[new[0]], [new[1]]]
    with pytest.raises(InputError, match="new token 3"):
        next(rows)


def test_the_cache_holds_the_tokens_and_no_more(config, make_model, monkeypatch):
    asked = []
    new_cache = Llama.new_cache
    monkeypatch.setattr(Llama, "new_cache", lambda *arguments: asked.append(arguments[1:]) or new_cache(*arguments))
    list(generate(make_model(config), [[7, 8, 9], [5]], 10, set(), likeliest))
    assert asked == [(2, 13)]
