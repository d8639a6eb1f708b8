"""model/attention.py: who sees whom, which head reads which, and a cache that holds what its shape says."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model.attention as attention_module
from kernels import load_backend
from model.attention import (
    Attention,
    KVCache,
    capped_attention,
    padded_span,
    plain_span,
    short_attention,
    step_span,
)
from model.rope import rotate
from tests.helpers import CPU


@pytest.fixture
def attention(config):
    torch.manual_seed(0)
    return Attention(config, load_backend("reference", CPU)).double()


@pytest.fixture
def averaging(config):
    """Attention whose queries are zero, so that each position's output is the mean of the inputs it sees."""
    attention = Attention(replace(config, num_key_value_heads=4), load_backend("reference", CPU)).double()
    torch.nn.init.zeros_(attention.q_proj.weight)
    for projection in (attention.v_proj, attention.o_proj):
        torch.nn.init.eye_(projection.weight)
    return attention


@pytest.fixture
def span(config):
    def between(start, end):
        return plain_span(config, start, end, torch.float32, CPU)

    return between


def cache_for(config, capacity=16, n_kv_heads=4):
    return KVCache(replace(config, num_key_value_heads=n_kv_heads), 2, capacity, torch.float64, CPU)


@pytest.mark.parametrize("ends", [[9], [4, 7, 8, 9]])
@torch.no_grad()
def test_attention_is_the_formula_in_float64(config, attention, span, ends):
    """softmax(q k^T / sqrt(head_dim)) v over the keys at or before each query, a head at a time."""
    x = torch.randn(2, 9, 48, dtype=torch.float64)
    q = rotate(attention.q_proj(x).view(2, 9, 4, 12).transpose(1, 2), span(0, 9).rope).numpy()
    k = rotate(attention.k_proj(x).view(2, 9, 2, 12).transpose(1, 2), span(0, 9).rope).numpy()
    v = attention.v_proj(x).view(2, 9, 2, 12).transpose(1, 2).numpy()
    heads = np.zeros((2, 9, 48))
    for head in range(4):
        for i in range(9):
            scores = np.exp(np.einsum("bd,bjd->bj", q[:, head, i], k[:, head // 2, : i + 1]) / np.sqrt(12))
            weights = scores / scores.sum(1, keepdims=True)
            heads[:, i, 12 * head : 12 * head + 12] = np.einsum("bj,bjd->bd", weights, v[:, head // 2, : i + 1])
    expected = heads @ attention.o_proj.weight.T.numpy()
    # float64 throughout, but for the table that both share: sums of 48 terms stay far below 1e-12
    cache = cache_for(config, n_kv_heads=2) if len(ends) > 1 else None
    parts = [attention(x[:, s:e], span(s, e), cache) for s, e in zip([0, *ends], ends, strict=False)]
    np.testing.assert_allclose(torch.cat(parts, 1).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "reads"),
    [(4, 2, [0, 0, 1, 1]), (4, 1, [0, 0, 0, 0]), (4, 4, [0, 1, 2, 3]), (6, 3, [0, 0, 1, 1, 2, 2])],
)
@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_query_heads_read_kv_heads_in_groups(config, n_heads, n_kv_heads, reads, cached, span):
    """With kv head i filled with the value i, a query head's output names the head it read."""
    config = replace(config, num_attention_heads=n_heads, num_key_value_heads=n_kv_heads, hidden_size=12 * n_heads)
    attention = Attention(config, load_backend("reference", CPU)).double()
    torch.nn.init.eye_(attention.o_proj.weight)
    values = torch.arange(n_kv_heads).repeat_interleave(12) / config.hidden_size
    attention.v_proj.weight.copy_(values[:, None].expand_as(attention.v_proj.weight))
    cache = cache_for(config, n_kv_heads=n_kv_heads) if cached else None
    read = attention(torch.ones(2, 5, config.hidden_size, dtype=torch.float64), span(0, 5), cache).unflatten(
        -1, (-1, 12)
    )
    expected = torch.tensor(reads, dtype=torch.float64)[:, None].expand_as(read)
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-6)  # 1 / hidden_size is float32 here


@pytest.mark.parametrize(("before", "new"), [(5, 1), (0, 1), (5, 3), (1, 2), (0, 4), (9, 4)])
@torch.no_grad()
def test_query_i_sees_keys_up_to_its_own_position(config, averaging, before, new, span):
    """With S keys and T queries, query i sees the keys j <= i + S - T, so a single one sees them all."""
    x = torch.randn(2, before + new, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cache = cache_for(config)
    if before:
        averaging(x[:, :before], span(0, before), cache)
    y = averaging(x[:, before:], span(before, before + new), cache)
    seen = [x[:, : i + before + 1].mean(1) for i in range(new)]
    torch.testing.assert_close(y, torch.stack(seen, 1), rtol=0, atol=1e-12)  # means of float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_changing_a_token_changes_no_earlier_output_and_every_later_one(attention, dtype, span):
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = x.clone()
    changed[:, 4] += 1
    before, after = (attention.to(dtype)(each, span(0, 9)) for each in (x, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(6, 6), (1, 6), (3, 6)])
def test_capped_attention_is_the_formula_in_float64(n_queries, n_keys, masked):
    """softmax(cap * tanh(q k^T * scale / cap)) v, a head and a query at a time."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, n_queries, 12, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 2, 2, n_keys, 12, dtype=torch.float64, generator=generator)
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
    if masked:
        seen &= ~torch.eye(n_queries, n_keys, dtype=torch.bool).roll(1, 1)  # some key that lies behind
        seen[:, 0] = True
    found = capped_attention(q, k, v, seen if masked else None, 0.7, 1.5)
    for head in range(4):
        for i in range(n_queries):
            scores = np.einsum("bd,bjd->bj", q[:, head, i], k[:, head // 2, seen[i]]) * 0.7
            weights = np.exp(1.5 * np.tanh(scores / 1.5))
            expected = np.einsum("bj,bjd->bd", weights / weights.sum(1, keepdims=True), v[:, head // 2, seen[i]])
            np.testing.assert_allclose(found[:, head, i], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [None, 0.43])
@pytest.mark.parametrize("n_tokens", [64, 65])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # float16 is the operator's at any length
def test_training_in_half_precision_strays_little_further_than_the_operator(
    config, span, dtype, n_tokens, scale, monkeypatch
):
    """From float64, in its output and in all gradients; up to LOGITS it is computed by short_attention.

    The products round the logits, which the operator keeps in float32. A logit of 4 is rounded by up to 2^-7 in
    bfloat16 and moves its weight by as much, which is 4 roundings of the output; the bound is 5.
    """
    monkeypatch.setattr(attention_module, "LOGITS", 2 * 4 * 64 * 64)  # sequences, heads, tokens
    torch.manual_seed(0)
    config = replace(config, attention_multiplier=scale, model_type="granite") if scale else config
    attention = Attention(config, load_backend("reference", CPU)).to(dtype)
    x = torch.randn(2, n_tokens, 48).to(dtype)
    grad = torch.randn(x.shape)

    def results(module, x, needs_grad=True):
        module.requires_grad_(needs_grad)
        x = x.clone().requires_grad_(needs_grad)
        y = module(x, span(0, n_tokens))
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], grad.to(x.dtype))] if needs_grad else [y]

    found, exact = results(attention, x), results(deepcopy(attention).double(), x.double())
    for mine, truth in zip(found, exact, strict=True):
        assert (mine - truth).norm() < 5 * torch.finfo(dtype).eps * truth.norm()
    # Where nothing is learnt, and beyond LOGITS, it is the operator, whose bits those of transformers are.
    [operators] = results(attention, x, needs_grad=False)
    assert torch.equal(found[0], operators) == (n_tokens > 64 or dtype == torch.float16)


@torch.no_grad()
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_short_attention_is_the_operator_in_float64(n_kv_heads):
    q, k, v = (torch.randn(2, n, 7, 12, dtype=torch.float64) for n in (4, n_kv_heads, n_kv_heads))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.43, enable_gqa=True)
    assert (short_attention(q, k, v, 0.43) - expected).abs().max() < 1e-14


def test_turning_keeps_the_order_in_memory_that_a_projection_gives(span):
    """Or attention's output, which takes that of q, would be copied for o_proj, and kept twice in training."""
    projected = torch.randn(2, 9, 4 * 12)
    turned = rotate(projected.view(2, 9, 4, 12).transpose(1, 2), span(0, 9).rope)
    assert turned.shape == (2, 4, 9, 12)
    assert turned.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_turning_in_float32_narrows_no_float64(config, span, dtype):
    x = torch.randn(2, 4, 9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    assert torch.equal(rotate(x, span(0, 9).rope, in_float32=True), rotate(x.to(wide), span(0, 9).rope).to(dtype))


def test_cache_returns_views_of_all_positions_so_far(config, span):
    cache, parts = cache_for(config, 8, 2), torch.randn(2, 2, 2, 8, 12, dtype=torch.float64)
    for start, end in [(0, 3), (3, 4), (4, 8)]:
        returned = cache.update(*parts[:, :, :, start:end], span(start, end))
        for view, part, whole in zip(returned, parts, (cache.k, cache.v), strict=True):
            assert torch.equal(view, part[:, :, :end])
            assert view.data_ptr() == whole.data_ptr()


def seen_by_formula(start, end, window, padding):
    """Keys that each query sees, written out: at or before it, within the window, of the padding only itself."""
    return [
        [[j <= i and (window is None or i - j < window) and (j >= left or j == i) for j in range(end)]
         for i in range(start, end)]
        for left in padding
    ]  # fmt: skip


@pytest.mark.parametrize("padding", [None, [0, 2, 5]])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize(("start", "end"), [(0, 6), (0, 1), (5, 6), (6, 9), (1, 8)])
def test_a_span_bars_what_lies_ahead_outside_the_window_or_in_the_padding(config, start, end, window, padding):
    config = replace(config, sliding_window=window)
    if padding is None:
        span = plain_span(config, start, end, torch.float32, CPU)
    else:
        span = padded_span(config, start, end, torch.float32, torch.tensor(padding))
    if span.mask is None:  # then every key that is read is seen, but for those ahead of a query
        mask = torch.ones(end - start, span.keys.stop - span.keys.start, dtype=torch.bool)
        mask = mask.tril(span.keys.stop - span.keys.start - (end - start))
    else:
        mask = span.mask
    seen = torch.zeros(len(padding or [0]), 1, end - start, end, dtype=torch.bool)
    seen[..., span.keys] = mask
    assert seen[:, 0].tolist() == seen_by_formula(start, end, window, padding or [0])


@pytest.mark.parametrize("window", [1, 3])
@torch.no_grad()
def test_with_a_window_a_query_reads_the_last_keys_alone(config, averaging, window):
    """Prefill, then one token at a time: each output is the mean of the last `window` inputs."""
    config = replace(config, sliding_window=window)
    x = torch.randn(2, 9, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cache = cache_for(config)
    parts = [
        averaging(x[:, s:e], plain_span(config, s, e, torch.float32, CPU), cache)
        for s, e in [(0, 4), (4, 6), (6, 7), (7, 8)]
    ]
    expected = [x[:, max(0, i + 1 - window) : i + 1].mean(1) for i in range(8)]
    torch.testing.assert_close(torch.cat(parts, 1), torch.stack(expected, 1), rtol=0, atol=1e-12)  # means of float64


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_caches_hold_kv_heads_alone_in_the_dtype_of_the_model(config, make_model, dtype, size):
    caches = make_model(config).to(dtype).new_cache(batch_size=3, capacity=20)
    held = {tensor.data_ptr(): tensor.nbytes for cache in caches for tensor in (cache.k, cache.v)}
    assert len(held) == 2 * config.num_hidden_layers
    assert set(held.values()) == {3 * config.num_key_value_heads * 20 * config.head_dim * size}


SCALINGS = [None, {"rope_type": "dynamic", "factor": 4.0}]  # dynamic: the angles depend on the length of the text


@pytest.mark.parametrize("scaling", SCALINGS)
def test_each_sequence_of_a_padded_span_has_the_angles_that_it_has_alone(config, scaling):
    config = replace(config, max_position_embeddings=8, rope_scaling=scaling)
    padded = padded_span(config, 0, 14, torch.float32, torch.tensor([0, 5]))
    for row, left in enumerate([0, 5]):
        alone = plain_span(config, 0, 14 - left, torch.float32, CPU)
        for got, expected in zip(padded.rope, alone.rope, strict=True):
            torch.testing.assert_close(got[row, 0, left:], expected, rtol=0, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("padding", [None, [0, 5]])
@pytest.mark.parametrize("window", [None, 3])
def test_a_step_span_has_the_angles_and_keys_of_the_other_spans(config, scaling, padding, window):
    config = replace(config, max_position_embeddings=8, rope_scaling=scaling, sliding_window=window)
    left = None if padding is None else torch.tensor(padding)
    step = step_span(config, 13, 32, torch.float32, CPU, left)
    if left is None:
        other = plain_span(config, 13, 14, torch.float32, CPU)
    else:
        other = padded_span(config, 13, 14, torch.float32, left)
    for got, expected in zip(step.rope, other.rope, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert (step.slots.tolist(), step.keys) == ([13], slice(0, 32))
    seen = torch.zeros_like(step.mask)
    seen[..., other.keys] = True if other.mask is None else other.mask
    assert torch.equal(step.mask, seen)
