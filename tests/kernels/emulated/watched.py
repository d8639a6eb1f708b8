"""Triton kernels that do something wrong, or the same right, and ours with a fault planted in their source."""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
import triton.language as tl

from kernels.emulated import driver, ptx
from kernels.emulated.driver import only_blocks
from kernels.emulated.ptx import EmulationError
from kernels.emulated.unwritten import shadow_of
from tests.helpers import ROOT
from tests.kernels.emulated.elsewhere import forget

EPS = 3e-3


def message_of(run, *args):
    """What the machine refuses, or an empty text."""
    try:
        run(*args)
    except EmulationError as error:
        return str(error)
    return ""


# Kernels of nobody's. `wrong` is a constant of theirs, or changes what they are given.


@triton.jit
def add_one(x, y, n, MASKED: tl.constexpr):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    if MASKED:
        tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
    else:
        tl.store(y + i, tl.load(x + i) + 1, mask=i < n)


@triton.jit
def sum_of_row(x, stride, width, y):
    columns = tl.arange(0, 128)
    row = tl.program_id(0)
    tl.store(y + row, tl.sum(tl.load(x + row * stride + columns, mask=columns < width, other=0.0)))


@triton.jit
def claims_to_be_aligned(x, start, y):
    i = tl.max_contiguous(tl.multiple_of(start + tl.arange(0, 512), 16), 512)
    tl.store(y + tl.arange(0, 512), tl.load(x + i))


@triton.jit
def reverse_in_memory(x, y, BARRIER: tl.constexpr):
    i = tl.arange(0, 1024)
    tl.store(x + i, i.to(tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.store(y + i, tl.load(x + 1023 - i))


@triton.jit
def add_the_next_block(x, y):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(x + i, tl.full((128,), 1.0, tl.float32))
    tl.store(y + i, tl.load(x + i) + tl.load(x + i + 128))


@triton.jit
def far_rows(x, stride, y, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    columns = tl.arange(0, 64)
    tl.store(y + tl.program_id(0) * 64 + columns, tl.load(x + row * stride + columns))


@triton.jit
def fill(x, n, WIDE: tl.constexpr):
    i = tl.arange(0, 256)
    i += (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * 256
    tl.store(x + i, tl.full((256,), 1, tl.int8), mask=i < n)


@triton.jit
def one_of_two(x, y, out):
    """A tensor for each program, which the compiler turns into one access for both."""
    program = tl.program_id(0)
    source = x if program % 2 == 0 else y
    i = program // 2 * 128 + tl.arange(0, 128)
    tl.store(out + program * 128 + tl.arange(0, 128), tl.load(source + i))


@triton.jit
def count(x, counts, ONE: tl.constexpr):
    numbers = tl.load(x + tl.program_id(0) * 128 + tl.arange(0, 128))
    tl.atomic_add(counts + numbers, tl.full((128,), ONE, counts.dtype.element_ty))


def missing_mask(wrong):
    x, y = torch.randn(1000), torch.empty(1000)
    add_one[(4,)](x, y, 1000, MASKED=not wrong)
    assert y.equal(x + 1)


def row_of_a_view(wrong):
    x, y = torch.randn(7, 128)[:, :100], torch.empty(7)
    sum_of_row[(6,)](x, 128, 128 if wrong else 100, y)  # not the last one, behind which nothing lies
    torch.testing.assert_close(y[:6], x[:6].sum(1))


def row_of_heads(wrong):
    """q, k and v in one tensor: a mask that is too wide reads k's."""
    q, k, _ = torch.randn(5, 3, 100).unbind(1)
    for x in (q, k):
        y = torch.empty(5)
        sum_of_row[(4,)](x, 300, 101 if wrong else 100, y)
        torch.testing.assert_close(y[:4], x[:4].sum(1))


def alignment_that_is_not_there(wrong):
    x, y, start = torch.randn(1024), torch.empty(512), 2 if wrong else 32
    claims_to_be_aligned[(1,)](x, start, y)
    assert y.equal(x[start : start + 512])


def missing_barrier(wrong):
    x, y = torch.empty(1024), torch.empty(1024)
    reverse_in_memory[(1,)](x, y, BARRIER=not wrong)
    assert y.equal(torch.arange(1023.0, -1, -1))


def another_programs_output(wrong):
    x, y = torch.zeros(1024), torch.empty(1024)
    add_the_next_block[(4 if wrong else 1,)](x, y)
    assert y[:128].eq(1).all()


def unwritten_input(wrong):
    x, y = torch.empty(1000), torch.empty(1000)
    assert x.isnan().all()
    add_one[(3 if wrong else 4,)](torch.zeros(1000), x, 1000, MASKED=True)
    add_one[(4,)](x, y, 1000, MASKED=True)
    assert y.eq(2).all()
    assert shadow_of(x) is None


def unwritten_counts(wrong):
    counts = torch.empty(10, dtype=torch.int32) if wrong else torch.zeros(10, dtype=torch.int32)
    x = torch.arange(512) % 10
    count[(4,)](x, counts, ONE=1)
    assert counts.equal(x.bincount().int())


def offsets_of_32_bits(wrong):
    x, y = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((3, 64), (2**30, 1)), torch.empty(3, 64)
    x.copy_(torch.randn(3, 64))
    far_rows[(3,)](x, 2**30, y, WIDE=not wrong)
    assert y.equal(x.float())


def last_program_of_many(wrong):
    """Of a launch whose output is larger than memory."""
    n = 2**31 + 1000
    y = torch.empty(n, dtype=torch.int8)
    with only_blocks(lambda blocks: [0, blocks - 1]):
        fill[(triton.cdiv(n, 256),)](y, n, WIDE=not wrong)
    assert y[:256].eq(1).all()
    assert y[-(n % 256) :].eq(1).all()


def tensors_by_program(wrong):
    x, y, out = torch.randn(256), torch.randn(200 if wrong else 256), torch.empty(4, 128)
    one_of_two[(4,)](x, y, out)
    assert out.equal(torch.stack([x[:128], y[:128], x[128:], y[128:]]))


def atomics_of_bfloat16(wrong):
    """A loop on sm_80, which some threads leave before others; they meet again at the next barrier."""
    counts, x = torch.zeros(256, dtype=torch.bfloat16), torch.arange(512) % (257 if wrong else 256)
    count[(4,)](x, counts, ONE=1)
    assert counts.eq(2).all()


def outcome(name, wrong):
    return message_of(globals()[name], wrong)


# Ours

SOURCE = ROOT / "kernels" / "triton_rms_norm.py"
EDITED = tempfile.TemporaryDirectory()  # Triton 3.2 reads a kernel's file at its first launch


def edited(edits):
    """The module of our kernels with edits of its source: every old text gets a new one."""
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in edits.items():
        assert old in text, f"{old!r} is not in the source any more"
        text = text.replace(old, new)
    name = f"edited_{sum(module.startswith('edited_') for module in sys.modules)}"
    path = Path(EDITED.name) / name / SOURCE.name
    path.parent.mkdir()
    path.write_text(text.replace("rmsllama::", f"{name}::"), encoding="utf-8")  # operators of its own
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(kind, n_rows, width, dtype):
    """x, residual, dy and dh."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    def far(tensor):
        rows = torch.empty(2**31 + width, dtype=dtype)
        return rows.as_strided(tensor.shape, (2**30, 1)).copy_(tensor)

    make = {
        "plain": lambda: randn(n_rows, width),
        "columns of a larger one": lambda: randn(n_rows, 3 * width)[:, width : 2 * width],
        "rows that are not aligned": lambda: randn(n_rows, width + 3)[:, :width],
        "far": lambda: far(randn(n_rows, width)),
        "dh is expanded": lambda: randn(n_rows, width),
    }[kind]
    x, residual, dy, dh = (make() for _ in range(4))
    return x, residual, dy, randn(n_rows, 1).expand(n_rows, width) if kind == "dh is expanded" else dh


def both_passes(norms, kind, n_rows, width, dtype):
    """Forward and backward of the fused norm and of the one alone."""
    x, residual, dy, dh = tensors(kind, n_rows, width, dtype)
    leaves = [x.requires_grad_(), residual.requires_grad_(), torch.ones(width, dtype=dtype, requires_grad=True)]
    torch.autograd.grad(norms.add_rms_norm(*leaves, EPS), leaves, (dy, dh))
    torch.autograd.grad(norms.rms_norm(leaves[0], leaves[2], EPS), leaves[::2], dy)


def huge_outputs(norms):
    """The first and the last program of 2^25 + 5 rows."""
    x, weight = torch.randn(64).half().expand(2**25 + 5, 64), torch.randn(64).half()
    with only_blocks(lambda n_blocks: [0, n_blocks - 1]):
        norms.launch_forward(x, x, weight, EPS, 0.0, False)


def ours(edits, *args):
    norms = edited(edits)
    return message_of(huge_outputs, norms) if args == ("huge",) else message_of(both_passes, norms, *args)


def without_each_barrier(n_rows, width, dtype):
    """What is refused with every bar.sync, and then with each of them in turn taken out of the PTX of both passes."""
    norms, missing, seen = edited({}), None, []

    def parse(text):
        for place in reversed(list(re.finditer(r"bar\.sync\s+0;", text))):
            seen.append(place)
            if len(seen) - 1 == missing:
                text = text[: place.start()] + text[place.end() :]
        return ptx.parse(text)

    def run():
        seen.clear()
        forget(norms)
        return message_of(both_passes, norms, "plain", n_rows, width, dtype)

    with mock.patch.object(driver, "parse", parse):
        found = [run()]
        for missing in range(len(seen)):  # noqa: B007
            found.append(run())
    return found


def with_half_the_threads(n_rows, width, dtype):
    """As if a kernel that was compiled for some warps were launched with another number of them."""

    def parse(text):
        return ptx.parse(re.sub(r"(\.reqntid) (\d+)", lambda found: f"{found[1]} {int(found[2]) // 2}", text))

    with mock.patch.object(driver, "parse", parse):
        return message_of(both_passes, edited({}), "plain", n_rows, width, dtype)


# torch.compile and tensors without memory, where torch.empty and its like are watched


def through_every_fresh_tensor(x):
    parts = torch.empty(4), torch.empty_like(x), torch.empty_strided((4,), (1,))
    parts += x.new_empty(4), x.new_empty_strided((4,), (1,))
    return sum(part.copy_(x) for part in parts) * 2 / len(parts)


def compiles(backend):
    x = torch.randn(4, requires_grad=True)
    y = torch.compile(through_every_fresh_tensor, fullgraph=True, backend=backend)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    return y.equal(through_every_fresh_tensor(x)) and dx.eq(2).all().item()


def fakes_stay_fake():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        return all(type(x) is FakeTensor for x in (torch.empty(3), torch.zeros(3).new_empty(3)))
