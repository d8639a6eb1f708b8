"""What the emulated GPU counts, against counts done by hand."""

import os
import subprocess
import sys

import pytest
import torch

from kernels.emulated.counts import Counts, class_of
from kernels.emulated.machine import Machine
from kernels.emulated.memory import GlobalMemory
from kernels.emulated.ptx import parse
from tests.helpers import ROOT, needs_triton

KERNEL = """
.visible .entry kernel(.param .u64 .ptr .global kernel_param_0)
.reqntid {threads}
{{
    .reg .pred %p<3>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<8>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    {body}
    ret;
}}
"""


def counts_of(body, threads=32, shared=0, counts=None):
    """The counts of one block that runs `body`: %rd1 is the address of tensor x, %r1 the thread's number."""
    x = torch.zeros(4096)
    memory, counts = GlobalMemory(), counts or Counts()
    address = memory.add("x", x)
    machine = Machine(parse(KERNEL.format(threads=threads, body=body)), shared)
    machine.run((1, 1, 1), [address], memory, counts)
    return counts


def at(stride, offset=0):
    """%rd2: x's address + stride * thread + offset, in bytes."""
    return f"mul.wide.u32 %rd2, %r1, {stride}; add.s64 %rd2, %rd1, %rd2; add.s64 %rd2, %rd2, {offset};"


LOAD = "ld.global.b32 %r2, [%rd2];"
LOAD_16 = "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd2];"
FEW = "setp.lt.u32 %p1, %r1, 9; @%p1 "


@pytest.mark.parametrize(
    ("body", "sectors", "asked"),
    [
        (at(4) + LOAD, 4, 128),  # 32 threads of 4 bytes: 128 bytes in 4 sectors of 32
        (at(4, 4) + LOAD, 5, 128),  # the same, begun within a sector
        (at(8) + LOAD, 8, 128),  # every second word
        (at(32) + LOAD, 32, 128),  # a sector for each thread
        (at(512) + LOAD, 32, 128),
        (at(0, 64) + LOAD, 1, 128),  # all threads want one word
        (at(16) + LOAD_16, 16, 512),
        (at(32) + LOAD_16, 32, 512),  # half of each sector
        (at(16, 16) + LOAD_16, 17, 512),
        (at(2) + "ld.global.b16 %r2, [%rd2];", 2, 64),
        (at(4) + FEW + LOAD, 2, 36),  # 9 threads: 36 bytes
        (at(4) + "setp.gt.u32 %p1, %r1, 99; @%p1 " + LOAD, 0, 0),  # nobody
        (at(0) + LOAD + LOAD, 2, 256),  # nothing is remembered between two instructions
    ],
)
def test_sectors_of_a_load(body, sectors, asked):
    counts = counts_of(body)
    assert counts.sectors["x", "load"] == sectors
    assert counts.bytes["x", "load"] == asked
    assert counts.sector_bytes() == counts.sector_bytes("x") == 32 * sectors
    assert counts.sector_bytes("y") == 0
    assert counts.wavefronts == 0


def test_each_warp_moves_its_own_sectors():
    assert counts_of(at(0) + LOAD, threads=96).sectors["x", "load"] == 3
    assert counts_of(at(4) + FEW + LOAD, threads=96).sectors["x", "load"] == 2  # two warps have nobody


def test_stores_and_atomics_are_counted_apart():
    counts = counts_of(at(8) + "st.global.b32 [%rd2], %r1; red.global.add.u32 [%rd2], 1;" + LOAD)
    assert counts.sectors == {("x", "store"): 8, ("x", "atomic"): 8, ("x", "load"): 8}


def both_ways(address, width):
    """A store to shared memory and a load of the same words."""
    registers = {1: "%r2", 4: "%r2", 8: "{%r2, %r3}", 16: "{%r2, %r3, %r4, %r5}"}[width]
    kind = {1: "b8", 4: "b32", 8: "v2.b32", 16: "v4.b32"}[width]
    return f"{address} st.shared.{kind} [%r9], {registers}; bar.sync 0; ld.shared.{kind} {registers}, [%r9];"


@pytest.mark.parametrize(
    ("stride", "width", "wavefronts", "conflicts"),
    [
        (4, 4, 1, 0),  # 32 words in 32 banks
        (8, 4, 2, 1),  # 16 banks, two words in each
        (12, 4, 1, 0),  # an odd number of words reaches every bank
        (64, 4, 16, 15),
        (128, 4, 32, 31),  # one bank
        (132, 4, 1, 0),  # one bank, mended by a word of padding
        (0, 4, 1, 0),  # one word, which all get
        (1, 1, 1, 0),  # four threads share a word
        (8, 8, 2, 0),  # half a warp at a time
        (16, 16, 4, 0),  # a quarter of a warp at a time
        (32, 16, 8, 4),  # every second 16 bytes: 8 threads reach 16 banks, two words in each
    ],
)
def test_bank_conflicts(stride, width, wavefronts, conflicts):
    body = both_ways(f"mul.lo.u32 %r9, %r1, {stride};", width)
    counts = counts_of("mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r4, 0; mov.u32 %r5, 0;" + body, shared=8192)
    assert (counts.wavefronts, counts.conflicts) == (2 * wavefronts, 2 * conflicts)  # the store's, and the load's
    assert not counts.sectors


def test_threads_that_take_no_part_have_no_conflicts():
    body = "mul.lo.u32 %r9, %r1, 128; setp.lt.u32 %p1, %r1, 3; @%p1 st.shared.b32 [%r9], %r1;"
    counts = counts_of(body, shared=8192, threads=64)
    assert (counts.wavefronts, counts.conflicts) == (3, 2)


MATRIX = "mul.lo.u32 %r9, %r1, {}; {}matrix.sync.aligned.m8n8.x4.shared.b16 {};"


@pytest.mark.parametrize(
    ("stride", "wavefronts", "conflicts"),
    [(16, 4, 0), (128, 32, 28), (144, 4, 0), (32, 8, 4)],  # 4 matrices of 8 rows of 16 bytes
)
def test_matrix_instructions(stride, wavefronts, conflicts):
    registers, clear = "{%r2, %r3, %r4, %r5}", "mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r4, 0; mov.u32 %r5, 0;"
    body = clear + MATRIX.format(stride, "st", "[%r9], " + registers) + "bar.sync 0;"
    counts = counts_of(body, shared=8192)
    assert (counts.wavefronts, counts.conflicts) == (wavefronts, conflicts)
    counts = counts_of(body + MATRIX.format(stride, "ld", registers + ", [%r9]"), shared=8192)
    assert (counts.wavefronts, counts.conflicts) == (2 * wavefronts, 2 * conflicts)


def test_an_asynchronous_copy_reads_global_and_writes_shared_memory():
    copy = "mul.lo.u32 %r9, %r1, 16; cp.async.cg.shared.global [%r9], [%rd2], 16, {};"
    counts = counts_of(at(16) + copy.format("16"), shared=8192)
    assert counts.sectors == {("x", "load"): 16}
    assert (counts.wavefronts, counts.conflicts) == (4, 0)
    few = "setp.lt.u32 %p1, %r1, 4; selp.b32 %r8, 16, 0, %p1;"  # the others write zeros, and read nothing
    counts = counts_of(at(16) + few + copy.format("%r8"), shared=8192)
    assert counts.sectors == {("x", "load"): 2}
    assert (counts.wavefronts, counts.conflicts) == (4, 0)


def test_instructions_by_class():
    body = """
        mov.b32 %r2, 0f3F800000;
        add.f32 %r3, %r2, %r2;
        cvt.rn.f16.f32 %r4, %r3;
        setp.lt.u32 %p1, %r1, 8;
        @%p1 bra first_eight;
        bra end;
    first_eight:
        shl.b32 %r5, %r1, 2;
        shl.b32 %r5, %r5, 2;
    end:
        bar.sync 0;
    """
    # Without branches. In front: a load of the parameter, and a mov.
    expected = {"memory": 64, "move": 2 * 64, "float": 64, "convert": 64, "integer": 64 + 2 * 8, "together": 64}
    assert counts_of(body, threads=64).executed == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fma.rn.f32", "float"), ("add.rn.bf16x2", "float"), ("setp.lt.f32", "float"), ("ex2.approx.ftz.f32", "float"),
        ("mul.wide.s32", "integer"), ("bfe.u32", "integer"), ("and.b32", "integer"), ("setp.lt.s32", "integer"),
        ("cp.async.cg.shared.global", "memory"), ("cp.async.commit_group", "memory"), ("red.global.add.f32", "memory"),
        ("cvt.rn.bf16x2.f32", "convert"), ("mov.b64", "move"), ("shfl.sync.bfly.b32", "together"),
    ],
)  # fmt: skip
def test_classes(name, kind):
    assert class_of(name) == kind


def test_counts_add_up():
    counts = counts_of(at(4) + LOAD)
    counts_of(at(4) + LOAD, counts=counts)
    assert counts.sectors["x", "load"] == 8
    assert counts.executed["memory"] == 4 * 32


COUNTING = """
import torch
from kernels.emulated import emulate
emulate("sm_90")
import triton, triton.language as tl
from kernels.emulated.driver import counting

@triton.jit
def double(x_ptr, out_ptr, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)

x = torch.ones(1024)
out = torch.empty_like(x)
launch = lambda: double[(4,)](x, out, len(x), SIZE=256)
launch()
with counting() as launches:
    launch()
    with counting() as inner:
        launch()
    launch()
launch()
assert (len(launches), len(inner)) == (2, 1), (len(launches), len(inner))
for counts in launches:
    assert (counts.kernel, counts.grid) == ("double", (4, 1, 1)), (counts.kernel, counts.grid)
    assert counts.tensors == {"x_ptr": ((1024,), 4), "out_ptr": ((1024,), 4)}, counts.tensors
    assert counts.sectors == {("x_ptr", "load"): 128, ("out_ptr", "store"): 128}, counts.sectors
    assert counts.sector_bytes("out_ptr") == 4096
"""


@needs_triton
def test_counting_collects_the_launches_inside(tmp_path):
    script = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    script.write_text(COUNTING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
