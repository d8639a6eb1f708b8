"""What processes do for test_split.py. All of them draw the same tensors; each calls the split norm with its part.

A check fails after all of its collectives, so that the processes stay in step.
"""

from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd.gradcheck import GradcheckError

import kernels
from kernels import add_then, reference, split
from kernels.form import FORMS
from kernels.split import split_hidden, split_rows
from tests.kernels.contract import DEVICE, EPS, F64, assert_within, expect, rows, unit, weights, wide

GEMMA = FORMS["gemma"]
WIDTH = 48
COLUMNS = {1: (48,), 2: (20, 28), 3: (5, 20, 23)}  # by the number of processes
ROWS = {2: (3, 4), 3: (1, 2, 4)}
NAMES = ("y", "dx", "dweight", "y of the addition", "h", "dx of the addition", "dresidual", "dweight of the addition")


def own(tensor, sizes=COLUMNS, axis=-1):
    """This process's part."""
    return tensor.split(sizes[dist.get_world_size()], axis)[dist.get_rank()]


def inputs(dtype, n_rows, form, weight_dtype=None):
    """x, residual, dy, dh and the weight."""
    x, residual = rows(n_rows, WIDTH, dtype=dtype), rows(n_rows, WIDTH, dtype=dtype, seed=3)
    dy, dh = rows(n_rows, WIDTH, dtype=dtype, scale=1.0, seed=4), rows(n_rows, WIDTH, dtype=dtype, scale=1.0, seed=5)
    return x, residual, dy, dh, weights(WIDTH, weight_dtype or dtype, form=form)


def results(norm, x, residual, dy, dh, weight):
    """y and gradients, in the order of NAMES."""
    x, residual, weight = (tensor.detach().requires_grad_() for tensor in (x, residual, weight))
    y = norm.rms_norm(x, weight, EPS)
    added = norm.add_rms_norm(x, residual, weight, EPS)
    alone = torch.autograd.grad(y, (x, weight), dy)
    return y, *alone, *added, *torch.autograd.grad(added, (x, residual, weight), (dy, dh))


def whole_and_split(name, form=GEMMA):
    """The unsplit norm to compare with, and the split one."""
    whole = kernels.load_backend("reference", DEVICE, form)
    return whole, split_hidden(kernels.load_backend(name, DEVICE, form), None, WIDTH)


def is_the_unsplit_norm(name, form, dtype, split_norm=split_hidden):
    """As near as a sum in another order: of 48 squares or products, halved by the root, or of 7 rows."""
    tensors = inputs(dtype, 7, form)
    expected = results(kernels.load_backend("reference", DEVICE, form), *tensors)
    found = results(split_norm(kernels.load_backend(name, DEVICE, form), None, WIDTH), *map(own, tensors))
    for what, part, right in zip(NAMES, found, expected, strict=True):
        expect(part.dtype == right.dtype, f"{what}: found {part.dtype}, expected {right.dtype}")
        try:
            assert_within((WIDTH / 2 + 20) * unit(wide(dtype)) * right.abs().max(), part, own(right))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error


def differing_elements(name, form, dtype, n_rows):
    """The share of elements, of all processes, that differ from the unsplit norm's, by name."""
    whole = kernels.load_backend(name, DEVICE, form)
    tensors = inputs(dtype, n_rows, form, weight_dtype=torch.float32)
    expected = map(own, results(whole, *tensors))
    found = results(split_hidden(whole, None, WIDTH), *map(own, tensors))
    counts = torch.tensor([float((a != b).sum()) for a, b in zip(found, expected, strict=True)])
    dist.all_reduce(counts)
    shares = zip(NAMES, (counts / (n_rows * WIDTH)).tolist(), strict=True)
    return {what: share for what, share in shares if not what.startswith("dweight")}  # which is float32


class Whole(torch.autograd.Function):
    """All columns, of which each process has a part; the loss that is made of them is one and the same everywhere."""

    @staticmethod
    def forward(ctx, part):
        parts = [part.new_zeros(*part.shape[:-1], n) for n in COLUMNS[dist.get_world_size()]]
        parts[dist.get_rank()] = part
        whole = torch.cat(parts, -1)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return own(gradient)


class Everywhere(torch.autograd.Function):
    """A tensor of which each process uses a part: its gradient is the sum."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


def gradients_are_the_numerical_ones(name, form, fast):
    norm = split_hidden(kernels.load_backend(name, DEVICE, form), None, WIDTH)

    def of_whole_rows(x, residual, weight):
        x, residual, weight = (own(Everywhere.apply(tensor)) for tensor in (x, residual, weight))
        return tuple(map(Whole.apply, (norm.rms_norm(x, weight, EPS), *norm.add_rms_norm(x, residual, weight, EPS))))

    x, residual, _, _, weight = (tensor.requires_grad_() for tensor in inputs(F64, 2, form))
    torch.manual_seed(0)  # of fast_mode's random directions
    try:
        torch.autograd.gradcheck(of_whole_rows, (x, residual, weight), fast_mode=fast)
    except GradcheckError as error:
        raise AssertionError(f"not the numerical gradient: {' '.join(str(error).split())[:200]}") from error


def small_rows_and_zero_rows(name, dtype):
    """eps is added once, to the mean of the whole row; a process may also have zeros alone, or no rows."""
    whole, norm = whole_and_split(name)
    x, _, dy, _, weight = inputs(dtype, 4, whole.form)
    x = x * torch.tensor([[1e-3], [0.0], [1.0], [1.0]]).to(x)
    x[2, :20] = 0
    x[3] *= 1e25  # too long for float32: 0
    expected = results(whole, x, x, dy, dy, weight)
    found = results(norm, *map(own, (x, x, dy, dy, weight)))
    empty = results(norm, *(own(tensor[:0]) for tensor in (x, x, dy, dy)), own(weight))
    for part, right in zip(found, expected, strict=True):
        bound = (WIDTH / 2 + 20) * unit(dtype) * right.abs().amax(-1, keepdim=True)
        assert_within(own(bound.expand_as(right)), part, own(right))
    for part, right in zip(empty, expected, strict=True):
        expect(part.numel() == 0 or bool((part == 0).all() and part.dim() == right.dim()), "no rows give no gradient")


def a_process_without_columns_takes_part(name):
    whole, norm = whole_and_split(name)
    tensors = inputs(F64, 7, whole.form)
    expected = results(whole, *tensors)
    sizes = {2: (48, 0), 3: (20, 0, 28)}
    found = results(norm, *(own(tensor, sizes) for tensor in tensors))
    for part, right in zip(found, expected, strict=True):
        assert_within((WIDTH / 2 + 20) * unit(F64) * right.abs().max(), part, own(right, sizes))


def frozen_parameters_change_no_other_gradient(name):
    """Without dx there is no second all-reduce, and the next one is not mistaken for it."""
    _, norm = whole_and_split(name)
    x, _, dy, _, weight = map(own, inputs(F64, 7, norm.form))
    dx, dweight = torch.autograd.grad(norm.rms_norm(x.requires_grad_(), weight.requires_grad_(), EPS), (x, weight), dy)
    (dx_alone,) = torch.autograd.grad(norm.rms_norm(x, weight.detach(), EPS), x, dy)
    (dweight_alone,) = torch.autograd.grad(norm.rms_norm(x.detach(), weight, EPS), weight, dy)
    _, h = norm.add_rms_norm(x, x, weight, EPS)
    (of_h,) = torch.autograd.grad(h, x, dy)
    assert_within(0, dx_alone, dx)
    assert_within(0, dweight_alone, dweight)
    assert_within(0, of_h, 2 * dy)


def all_reduced_dtypes(name, dtype):
    """The dtype of each all-reduce, forward and backward."""
    norm = split_hidden(kernels.load_backend(name, DEVICE), None, WIDTH)
    seen, all_reduce = [], dist.all_reduce

    def watched(tensor, *args, **options):
        seen.append((str(tensor.dtype), tensor.numel()))
        return all_reduce(tensor, *args, **options)

    x, residual, dy, _, weight = map(own, inputs(dtype, 7, norm.form))
    with mock.patch.object(dist, "all_reduce", watched):
        y, _ = norm.add_rms_norm(x.requires_grad_(), residual, weight.requires_grad_(), EPS)
        torch.autograd.grad(y, (x, weight), dy)
    return seen


# Planted faults, each in the place of split_hidden.


def gather_without_gradient(backend, group, width):
    """The sums are right, and arrive as constants: dist.all_gather is nothing that autograd knows of."""

    def rms_norm(x, weight, eps):
        sums = [torch.zeros_like(x[..., :1]) for _ in range(dist.get_world_size())]
        dist.all_gather(sums, x.detach().square().sum(-1, keepdim=True))
        x_hat = x * torch.rsqrt(torch.stack(sums).sum(0) / width + eps)
        return reference.scale(x_hat, x.dtype, weight, *backend.form)

    return backend._replace(rms_norm=rms_norm, add_rms_norm=add_then(rms_norm))


def mean_of_means(backend, group, width):
    """Every process's mean counts alike, as if their parts were equal."""

    def rms_norm(x, weight, eps):
        mean_square = split._Sum.apply(x.square().mean(-1, keepdim=True), group) / dist.get_world_size()
        return reference.scale(x * torch.rsqrt(mean_square + eps), x.dtype, weight, *backend.form)

    return backend._replace(rms_norm=rms_norm, add_rms_norm=add_then(rms_norm))


def small_example(split_norm):
    """y and dx of the row (4, 1, 1), of which the first process has the 4, for dy = (1, 0, 0), by process."""
    norm = split_norm(kernels.load_backend("reference", DEVICE), None, 3)
    x, dy = (torch.tensor([row]).split((1, 2), -1)[dist.get_rank()] for row in ([4.0, 1.0, 1.0], [1.0, 0.0, 0.0]))
    y = norm.rms_norm(x.requires_grad_(), torch.ones_like(x[0]), 1e-5)
    return y[0].tolist(), torch.autograd.grad(y, x, dy)[0][0].tolist()


def rows_split(name, dtype, norm_of_rows=split_rows):
    """Sequence parallel: y and dx are those of the rows, and dweight and dbias those of all rows."""
    whole = kernels.load_backend(name, DEVICE)
    bias = {"bias": rows(WIDTH, dtype=dtype, scale=1.0, seed=6)} if whole.has_bias else {}
    x, residual, dy, dh, weight = inputs(dtype, 7, whole.form)

    def run(norm, *tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in (*tensors[:2], weight, *bias.values())]
        options = dict(zip(bias, leaves[3:], strict=True))
        y = norm.rms_norm(leaves[0], leaves[2], EPS, **options)
        added = norm.add_rms_norm(*leaves[:3], EPS, **options)
        alone = torch.autograd.grad(y, leaves[2:], tensors[2])
        dx, dresidual, *gradients = torch.autograd.grad(added, leaves, tensors[2:])
        return (y, *added, dx, dresidual), (*alone, *gradients)

    def own_rows(tensor):
        return own(tensor, ROWS, 0)

    expected = run(whole, x, residual, dy, dh)
    found = run(norm_of_rows(whole, None), *map(own_rows, (x, residual, dy, dh)))
    for part, right in zip(found[0], expected[0], strict=True):
        assert_within(16 * unit(dtype) * right.abs().max(), part, own_rows(right))
    for total, right in zip(found[1], expected[1], strict=True):
        assert_within(20 * unit(dtype) * right.abs().max(), total, right)


def not_summed(backend, group):
    return backend


def dweight_is_summed_in_float32(name):
    """256 + 3 - 2 in bfloat16 is 257 before it is rounded, to 256; in steps of bfloat16 it may be 260 - 2."""
    norm = split_rows(kernels.load_backend(name, DEVICE), None)
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16).to(DEVICE)
    weight = torch.ones(WIDTH, dtype=torch.bfloat16).to(DEVICE).requires_grad_()
    parts = torch.tensor([256.0, 3.0, -2.0])  # in every order, since a column may be summed in any
    dy = torch.stack([parts.roll(column)[dist.get_rank()] for column in range(WIDTH)])[None].to(x)
    (dweight,) = torch.autograd.grad(norm.rms_norm(x, weight, 1e-9), weight, dy)
    expect((dweight == 256).all(), f"found {dweight.unique().tolist()}, expected 256")
