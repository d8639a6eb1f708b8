"""model/llama.py against transformers' LLaMA, against itself with a cache, and in its parts."""

import math
from dataclasses import replace

import pytest
import torch
import transformers

import kernels
from model.checkpoint.load import to_file_name
from model.llama import Llama, summed_loss
from model.norm import RMSNorm
from tests.helpers import CPU, FLOAT32_BOUND, draw_weights, needs_triton, relative

# In half precision the same operations give the same bits: 0 % of the logits differ, as measured. An attention kernel
# that sums in another order may flip a last bit, which then reaches the logits of its position and those after it.
# Another order of rounding in the norms flips bits everywhere: 80 %.
SAME_ORDER, OTHER_ORDER = 0.25, 0.7

# Scaled so that 40 tokens lie within the context and beyond the length of training.
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CHANGES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases of attention": {"attention_bias": True},
    "biases of the feed-forward": {"mlp_bias": True},
    "window": {"model_type": "mistral", "sliding_window": 7},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
    "llama3": {"rope_scaling": {"rope_type": "llama3"} | LLAMA3},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 16},
}


@pytest.fixture
def tokens():
    return torch.randint(0, 61, (4, 40), generator=torch.Generator().manual_seed(0))


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, RMSNorm)]


def transformers_logits(model, tokens):
    config = transformers.AutoConfig.for_model(**model.config.to_dict(), attn_implementation="sdpa")
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=model.embed_tokens.weight.dtype).eval()
    weights = {to_file_name(name): weight for name, weight in model.state_dict().items()}
    if model.lm_head is None:
        weights["lm_head.weight"] = model.embed_tokens.weight
    theirs.load_state_dict(weights)
    return theirs(tokens).logits


def share(ours, theirs):
    return (ours != theirs).float().mean().item()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_logits_are_those_of_transformers(config, make_model, tokens, change):
    model = make_model(replace(config, **change))
    theirs = transformers_logits(model, tokens)
    assert relative(model(tokens) - theirs, theirs) < FLOAT32_BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_logits_in_half_precision_are_those_of_transformers(config, make_model, tokens, dtype):
    model = make_model(config).to(dtype)
    logits = model(tokens)
    assert logits.dtype == dtype
    assert share(logits, transformers_logits(model, tokens)) < SAME_ORDER


def round_once(x, weight, eps):
    """The norm in the order of nn.RMSNorm: times the weight in float32, then rounded."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_another_order_of_rounding_would_be_caught(config, make_model, tokens, dtype):
    model = make_model(config).to(dtype)
    theirs = transformers_logits(model, tokens)
    for norm in norms_of(model):
        norm.backend = kernels.Backend("round once", round_once, lambda x, r, *rest: (round_once(x + r, *rest), x + r))
    assert share(model(tokens), theirs) > OTHER_ORDER


@pytest.mark.parametrize("norm", ["torch", pytest.param("triton", marks=needs_triton)])
@torch.no_grad()
def test_every_backend_gives_the_logits_of_the_reference(config, make_model, tokens, norm):
    expected = make_model(config)(tokens)
    assert relative(make_model(config, norm)(tokens) - expected, expected) < FLOAT32_BOUND


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32_BOUND), (torch.float64, 1e-13)])
@torch.no_grad()
def test_decoding_with_a_cache_equals_decoding_without(config, make_model, dtype, bound):
    """At every split of a sequence into a prefill and a rest, taken token by token or as one more piece."""
    model, tokens = make_model(config).to(dtype), torch.arange(14).view(2, 7)
    expected = model(tokens)
    for split in range(1, 7):
        for rest in (tokens[:, split:].split(1, 1), (tokens[:, split:],)):
            caches = model.new_cache(2, 7)
            pieces = [model(piece, caches) for piece in (tokens[:, :split], *rest)]
            assert [cache.length for cache in caches] == [7, 7, 7]
            assert relative(torch.cat(pieces, 1) - expected, expected) < bound


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_padded_row_has_the_logits_that_it_has_alone(config, make_model, tokens, change):
    """At once and in pieces with a cache, for rows that end below the length of training, at it and beyond."""
    model, padding = make_model(replace(config, **change)).double(), torch.tensor([0, 13, 24, 31])
    tokens = tokens.masked_fill(torch.arange(40) < padding[:, None], 0)
    for pieces in ([40], [34, 3, 1, 1, 1]):
        caches = model.new_cache(4, 40) if len(pieces) > 1 else None
        together = torch.cat([model(part, caches, padding=padding) for part in tokens.split(pieces, 1)], 1)
        for row, left in enumerate(padding.tolist()):
            caches = model.new_cache(1, 40) if len(pieces) > 1 else None
            parts = tokens[row : row + 1, left:].split([pieces[0] - left, *pieces[1:]], 1)
            alone = torch.cat([model(part, caches) for part in parts], 1)[0]
            assert relative(together[row, left:] - alone, alone) < 1e-12  # float64, with the same angles


@torch.no_grad()
def test_a_cache_costs_no_precision_in_bfloat16(config, make_model, tokens):
    """Sums in another order round otherwise, but stray no further from the float64 model than those without a cache."""
    model, tokens = make_model(config).to(torch.bfloat16), tokens[:, :20]
    caches = model.new_cache(4, 20)
    cached = torch.cat([model(token, caches) for token in tokens.split(1, 1)], 1)
    uncached, exact = model(tokens).double(), model.double()(tokens)
    # norms of 4880 errors: two draws of the same size agree within a few per cent
    assert (cached - exact).norm() < 1.1 * (uncached - exact).norm()


@pytest.mark.parametrize("kept", [1, 3, 40])
@torch.no_grad()
def test_logits_to_keep_are_the_last_ones(config, make_model, tokens, kept):
    model = make_model(config)
    expected = model(tokens)[:, -kept:]
    logits = model(tokens, logits_to_keep=kept)
    assert logits.shape == (4, kept, 61)
    assert relative(logits - expected, expected) < FLOAT32_BOUND


@torch.no_grad()
def test_positions_end_at_max_position_embeddings(config, make_model):
    model, tokens = make_model(config), torch.zeros(1, 65, dtype=torch.long)
    assert model(tokens[:, :64]).shape == (1, 64, 61)
    with pytest.raises(ValueError, match=r"65 .* 64"):
        model(tokens)
    caches = model.new_cache(1, 80)
    model(tokens[:, :63], caches)
    model(tokens[:, 63:64], caches)
    with pytest.raises(ValueError, match=r"65 .* 64"):
        model(tokens[:, 64:], caches)
    caches = model.new_cache(1, 3)
    model(tokens[:, :2], caches)
    with pytest.raises(ValueError, match="holds 3 positions and is asked to hold 4"):
        model(tokens[:, :2], caches)
    assert model(tokens[:, :1], caches).shape == (1, 1, 61)


@pytest.mark.parametrize("anew", [False, True])
def test_fresh_weights_are_normal_and_what_writes_to_the_residual_stream_shrinks_with_depth(config, anew):
    config = replace(config, initializer_range=0.03, attention_bias=True, mlp_bias=True)
    torch.manual_seed(0)
    model = Llama(config, kernels.load_backend("reference", CPU))
    if anew:  # nothing of the weights before is left
        draw_weights(model, std=1)
        model.init_weights()
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            assert (weight == name.endswith("norm.weight")).all(), name
            continue
        std = 0.03 / math.sqrt(2 * 3) if "o_proj" in name or "down_proj" in name else 0.03
        # a sample of n has mean 0 within std / sqrt(n), and its std is right within a share of 1 / sqrt(2 n)
        n = weight.numel()
        assert abs(weight.std().item() / std - 1) < 5 / math.sqrt(2 * n), name
        assert abs(weight.mean().item()) < 5 * std / math.sqrt(n), name


def test_nothing_is_drawn_on_the_meta_device(config, monkeypatch):
    """PyTorch's random operators for it import half a compiler."""
    monkeypatch.setattr(torch.nn.init, "normal_", None)
    with torch.device("meta"):
        model = Llama(config, kernels.load_backend("reference", CPU))
    assert all(weight.is_meta and weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_is_summed_in_float32_over_the_next_tokens(tokens, dtype):
    logits, seen = (torch.randn(4, 39, 61) * 10).to(dtype), []
    loss = summed_loss(lambda inputs: (seen.append(inputs), logits)[1], tokens)
    assert torch.equal(seen[0], tokens[:, :-1])
    assert loss.dtype == torch.float32
    exact = -sum(logits.double().log_softmax(-1)[i, j, tokens[i, j + 1]] for i in range(4) for j in range(39))
    # a term below 64, off by a rounding of it or two, and the sum of 156 by one of each partial sum at most
    assert loss.item() == pytest.approx(exact.item(), rel=156 * 2**-24)


@torch.no_grad()
def test_every_norm_has_a_weight_of_its_own_that_reaches_the_logits(config, make_model, tokens):
    model = make_model(config)
    weights, before = [norm.weight for norm in norms_of(model)], model(tokens)
    assert len({weight.data_ptr() for weight in weights}) == 2 * config.num_hidden_layers + 1
    for weight in weights:
        kept = weight.clone()
        weight[5] += 0.5
        assert relative(model(tokens) - before, before) > 100 * FLOAT32_BOUND
        weight.copy_(kept)
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("eps", [3e-3, 1e-5])
@torch.no_grad()
def test_every_norm_has_the_eps_of_the_config_and_it_reaches_the_logits(config, make_model, tokens, eps):
    model = make_model(replace(config, rms_norm_eps=eps))
    assert [norm.eps for norm in norms_of(model)] == [eps] * (2 * config.num_hidden_layers + 1)
    before = model(tokens)
    for norm in norms_of(model):
        norm.eps = 2e-3
        assert relative(model(tokens) - before, before) > 10 * FLOAT32_BOUND
        norm.eps = eps


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_one_storage_counted_once(config, tied):
    model = Llama(replace(config, tie_word_embeddings=tied), kernels.load_backend("reference", CPU))
    layer = 48 * (48 + 24 + 24 + 48) + 3 * 48 * 80 + 2 * 48
    assert sum(p.numel() for p in model.parameters()) == 61 * 48 * (1 if tied else 2) + 3 * layer + 48
    logits = model(torch.tensor([[1, 2, 3]]))
    logits.sum().backward()
    # token 60 is never read: its row has a gradient only as a row of the head
    assert (model.embed_tokens.weight.grad[60] != 0).any() == tied
