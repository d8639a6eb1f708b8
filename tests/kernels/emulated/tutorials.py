"""The kernels of Triton's tutorials, written anew, each with a comparison with torch; test_tutorials.py calls these."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    total = tl.load(x_ptr + offsets, mask=inside) + tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, total, mask=inside)


def add(x, y):
    out = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
    return out


@triton.jit
def _softmax(x_ptr, out_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    """Every program takes every n-th row; loads run ahead of the arithmetic."""
    cols = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=3):
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        exponentials = tl.exp(x - tl.max(x, axis=0))
        softmax = exponentials / tl.sum(exponentials, axis=0)
        tl.store(out_ptr + row * n_cols + cols, softmax, mask=cols < n_cols)


def softmax(x):
    out = torch.empty_like(x)
    _softmax[(4,)](x, out, *x.shape, BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


@triton.jit
def _layer_norm_forward(x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, n_cols, eps, BLOCK: tl.constexpr):
    """A row wider than BLOCK is walked over three times."""
    row = tl.program_id(0)
    x_ptr += row * n_cols
    y_ptr += row * n_cols
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n_cols
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        x = tl.where(cols < n_cols, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / n_cols + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < n_cols
        weight, bias = tl.load(weight_ptr + cols, mask=inside), tl.load(bias_ptr + cols, mask=inside)
        x_hat = (tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        tl.store(y_ptr + cols, x_hat * weight + bias, mask=inside)


@triton.jit
def _layer_norm_backward(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, lock_ptr, n_cols,
    LOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of a row. Its share of dweight and dbias is in one of LOCKS partial sums or, with 0, is added atomically."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * n_cols + cols, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside).to(tl.float32)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    x_hat = tl.where(inside, (x - mean) * rstd, 0.0)
    weighted = tl.where(inside, dy * weight, 0.0)
    projection = tl.sum(x_hat * weighted, axis=0) / n_cols
    dx = (weighted - (x_hat * projection + tl.sum(weighted, axis=0) / n_cols)) * rstd
    tl.store(dx_ptr + row * n_cols + cols, dx, mask=inside)
    dweight, dbias = (dy * x_hat).to(weight.dtype), dy.to(weight.dtype)
    if LOCKS == 0:
        tl.atomic_add(dweight_ptr + cols, dweight, mask=inside)
        tl.atomic_add(dbias_ptr + cols, dbias, mask=inside)
    else:
        share = row % LOCKS
        lock_ptr += share
        count_ptr = lock_ptr + LOCKS
        dweight_ptr += share * n_cols
        dbias_ptr += share * n_cols
        while tl.atomic_cas(lock_ptr, 0, 1) == 1:
            pass
        if tl.load(count_ptr) == 0:  # nobody has written yet
            tl.atomic_xchg(count_ptr, 1)
        else:
            dweight += tl.load(dweight_ptr + cols, mask=inside)
            dbias += tl.load(dbias_ptr + cols, mask=inside)
        tl.store(dweight_ptr + cols, dweight, mask=inside)
        tl.store(dbias_ptr + cols, dbias, mask=inside)
        tl.debug_barrier()  # all threads have stored before the lock goes to another program
        tl.atomic_xchg(lock_ptr, 0)


def layer_norm(x, weight, bias, eps, dy, locks):
    """y, dx, dweight and dbias."""
    (n_rows, n_cols), y, dx = x.shape, torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(n_rows), torch.empty(n_rows)
    _layer_norm_forward[(n_rows,)](x, y, weight, bias, mean, rstd, n_cols, eps, BLOCK=128)
    partial = torch.zeros(2, max(1, locks), n_cols)
    lock = torch.zeros(2 * max(1, locks), dtype=torch.int32)
    block = triton.next_power_of_2(n_cols)
    _layer_norm_backward[(n_rows,)](
        dy, x, weight, mean, rstd, dx, partial[0], partial[1], lock, n_cols, LOCKS=locks, BLOCK=block
    )
    return y, dx, *partial.sum(1)


@triton.jit
def _dropout(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    kept = tl.rand(seed, offsets) > p
    tl.store(out_ptr + offsets, tl.where(kept, x / (1 - p), 0.0), mask=offsets < n)


def dropout(x, p, seed):
    out = torch.empty_like(x)
    _dropout[(triton.cdiv(x.numel(), 512),)](x, out, x.numel(), p, seed, BLOCK=512)
    return out


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, cols = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        a = tl.load(a_ptr + rows[:, None] * k + inner, mask=(rows[:, None] < m) & (inner < k), other=0.0)
        b = tl.load(b_ptr + inner[:, None] * n + cols, mask=(inner[:, None] < k) & (cols < n), other=0.0)
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * n + cols, total, mask=(rows[:, None] < m) & (cols < n))


def matmul(a, b, tile):
    c = torch.empty(a.shape[0], b.shape[1])
    grid = triton.cdiv(a.shape[0], tile), triton.cdiv(b.shape[1], tile)
    _matmul[grid](a, b, c, *a.shape[:1], b.shape[1], a.shape[1], M=tile, N=tile, K=32)
    return c


# Each function below compares a tutorial's result with torch's.


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def add_is_torchs(dtype):
    x, y = random(1000, dtype=dtype), random(1000, dtype=dtype, seed=1)
    torch.testing.assert_close(add(x, y), x + y, rtol=0, atol=0)


def softmax_is_torchs(dtype):
    x = random(13, 781, dtype=dtype) * 4
    # Of each element: the exponential, its argument's product with log2(e), and the sum, a few units each.
    tolerance = max(1e-5, torch.finfo(dtype).eps)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(softmax(x), x.double().softmax(1).to(dtype), rtol=tolerance, atol=smallest)


def layer_norm_is_torchs(dtype, locks):
    shape, eps = (19, 300), 3e-3
    x, dy = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight, bias = random(300, seed=2) + 1, random(300, seed=3)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.nn.functional.layer_norm(exact[0], (300,), *exact[1:], eps)
    expected = expected, *torch.autograd.grad(expected, exact, dy.double())
    found = layer_norm(x, weight, bias, eps, dy, locks)
    for ours, right in zip(found, expected, strict=True):
        narrow = torch.finfo(ours.dtype).eps / 2
        torch.testing.assert_close(ours.double(), right.detach(), rtol=narrow, atol=2e-5 * right.abs().max().item())


def philox(seed, offsets):
    """The first word of Philox 4x32-10 (J. Salmon et al., 2011) with counters (offset, 0, 0, 0)."""
    words = [offsets.tolist(), *[[0] * len(offsets)] * 3]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, third = ([word * factor for word in words[i]] for i, factor in ((0, 0xD2511F53), (2, 0xCD9E8D57)))
        words = [
            [(p >> 32) ^ w ^ key[0] for p, w in zip(third, words[1], strict=True)],
            [p & 0xFFFFFFFF for p in third],
            [(p >> 32) ^ w ^ key[1] for p, w in zip(first, words[3], strict=True)],
            [p & 0xFFFFFFFF for p in first],
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return torch.tensor(words[0])


def dropout_drops_what_philox_says(p):
    x, seed = random(1300), 123456789
    word = philox(seed, torch.arange(len(x)))
    signed = torch.where(word >= 2**31, word - 2**32, word)
    uniform = torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10  # as tl.rand makes it
    expected = torch.where(uniform > p, x / (1 - p), 0.0)
    torch.testing.assert_close(dropout(x, p, seed), expected, rtol=1e-6, atol=0)
    assert abs((expected == 0).float().mean().item() - p) < 0.05


@triton.jit
def _sine_and_cosine(x_ptr, sine_ptr, cosine_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(sine_ptr + offsets, tl.sin(x))
    tl.store(cosine_ptr + offsets, tl.cos(x))


def sines_are_torchs():
    """Of no tutorial, but of rotary embeddings: large numbers take local memory, a table and carries."""
    x = random(1024) * 10.0 ** (torch.arange(1024) % 37)
    sine, cosine = torch.empty(1024), torch.empty(1024)
    _sine_and_cosine[(4,)](x, sine, cosine, BLOCK=256)
    torch.testing.assert_close(sine.double(), x.double().sin(), rtol=0, atol=2e-7)
    torch.testing.assert_close(cosine.double(), x.double().cos(), rtol=0, atol=2e-7)


def matmul_is_torchs(dtype, tile):
    a, b = random(70, 100, dtype=dtype), random(100, 50, dtype=dtype, seed=1)
    if dtype == torch.float32:  # as TF32: the unit takes no notice of the lower 13 bits
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    expected = a.double() @ b.double()
    torch.testing.assert_close(matmul(a, b, tile).double(), expected, rtol=0, atol=1e-5)
