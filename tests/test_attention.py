"""model/attention.py: who sees whom, which head reads which, and a cache that holds what its shape says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.attention import Attention, KVCache
from model.rope import rotary_table, rotate
from tests.conftest import CPU


@pytest.fixture
def attention(config):
    torch.manual_seed(0)
    return Attention(config).double()


@pytest.fixture
def averaging(config):
    """Attention whose queries are zero, so that each position's output is the mean of the inputs it sees."""
    attention = Attention(replace(config, num_key_value_heads=4)).double()
    torch.nn.init.zeros_(attention.q_proj.weight)
    for projection in (attention.v_proj, attention.o_proj):
        torch.nn.init.eye_(projection.weight)
    return attention


def table(start, end):
    return rotary_table(torch.arange(start, end), 12, 5000.0)


def cache_for(config, capacity=16, n_kv_heads=4):
    return KVCache(replace(config, num_key_value_heads=n_kv_heads), 2, capacity, torch.float64, CPU)


@torch.no_grad()
def test_attention_is_the_formula_in_float64(attention):
    """softmax(q k^T / sqrt(head_dim)) v over the keys at or before each query, a head at a time."""
    x = torch.randn(2, 9, 48, dtype=torch.float64)
    q = rotate(attention.q_proj(x).view(2, 9, 4, 12).transpose(1, 2), table(0, 9)).numpy()
    k = rotate(attention.k_proj(x).view(2, 9, 2, 12).transpose(1, 2), table(0, 9)).numpy()
    v = attention.v_proj(x).view(2, 9, 2, 12).transpose(1, 2).numpy()
    heads = np.zeros((2, 9, 48))
    for head in range(4):
        for i in range(9):
            scores = np.exp(np.einsum("bd,bjd->bj", q[:, head, i], k[:, head // 2, : i + 1]) / np.sqrt(12))
            weights = scores / scores.sum(1, keepdims=True)
            heads[:, i, 12 * head : 12 * head + 12] = np.einsum("bj,bjd->bd", weights, v[:, head // 2, : i + 1])
    expected = heads @ attention.o_proj.weight.T.numpy()
    # float64 throughout, but for the table that both share: sums of 48 terms stay far below 1e-12
    np.testing.assert_allclose(attention(x, table(0, 9)).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "reads"),
    [(4, 2, [0, 0, 1, 1]), (4, 1, [0, 0, 0, 0]), (4, 4, [0, 1, 2, 3]), (6, 3, [0, 0, 1, 1, 2, 2])],
)
@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_query_heads_read_kv_heads_in_groups(config, n_heads, n_kv_heads, reads, cached):
    """C13: with kv head i filled with the value i, a query head's output names the head it read."""
    config = replace(config, num_attention_heads=n_heads, num_key_value_heads=n_kv_heads, hidden_size=12 * n_heads)
    attention = Attention(config).double()
    torch.nn.init.eye_(attention.o_proj.weight)
    values = torch.arange(n_kv_heads).repeat_interleave(12) / config.hidden_size
    attention.v_proj.weight.copy_(values[:, None].expand_as(attention.v_proj.weight))
    cache = cache_for(config, n_kv_heads=n_kv_heads) if cached else None
    read = attention(torch.ones(2, 5, config.hidden_size, dtype=torch.float64), table(0, 5), cache).unflatten(
        -1, (-1, 12)
    )
    expected = torch.tensor(reads, dtype=torch.float64)[:, None].expand_as(read)
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-6)  # 1 / hidden_size is float32 here


@pytest.mark.parametrize(("before", "new"), [(5, 1), (0, 1), (5, 3), (1, 2), (0, 4), (9, 4)])
@torch.no_grad()
def test_query_i_sees_keys_up_to_its_own_position(config, averaging, before, new):
    """C01: of S keys and T queries, query i sees the keys j <= i + S - T, so a single one sees them all."""
    x = torch.randn(2, before + new, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cache = cache_for(config)
    if before:
        averaging(x[:, :before], table(0, before), cache)
    y = averaging(x[:, before:], table(before, before + new), cache)
    seen = [x[:, : i + before + 1].mean(1) for i in range(new)]
    torch.testing.assert_close(y, torch.stack(seen, 1), rtol=0, atol=1e-12)  # means of float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_changing_a_token_changes_no_earlier_output_and_every_later_one(attention, dtype):
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = x.clone()
    changed[:, 4] += 1
    before, after = (attention.to(dtype)(each, table(0, 9)) for each in (x, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_cache_returns_views_of_all_positions_so_far(config):
    cache, parts = cache_for(config, 8, 2), torch.randn(2, 2, 2, 8, 12, dtype=torch.float64)
    for start, end in [(0, 3), (3, 4), (4, 8)]:
        returned = cache.update(*parts[:, :, :, start:end])
        assert cache.length == end
        for view, part, whole in zip(returned, parts, (cache.k, cache.v), strict=True):
            assert torch.equal(view, part[:, :, :end])
            assert view.data_ptr() == whole.data_ptr()


def test_cache_refuses_more_than_it_holds_and_stays_as_it_was(config):
    cache = cache_for(config, 8, 2)
    part = torch.randn(2, 2, 6, 12, dtype=torch.float64)
    cache.update(part, part)
    with pytest.raises(ValueError, match=r"holds 8 .* hold 9"):
        cache.update(part[:, :, :3], part[:, :, :3])
    assert cache.length == 6
    k, v = cache.update(part[:, :, :2], part[:, :, :2])  # what remains is still there to be filled
    assert torch.equal(k, v)
    assert torch.equal(k, torch.cat((part, part[:, :, :2]), 2))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_caches_hold_kv_heads_alone_in_the_dtype_of_the_model(config, make_model, dtype, size):
    caches = make_model(config).to(dtype).new_cache(batch_size=3, capacity=20)
    held = {tensor.data_ptr(): tensor.nbytes for cache in caches for tensor in (cache.k, cache.v)}
    assert len(held) == 2 * config.num_hidden_layers
    assert set(held.values()) == {3 * config.num_key_value_heads * 20 * config.head_dim * size}
