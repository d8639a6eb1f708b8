"""Atomic instructions of the emulated GPU: turns at a word, and vectors."""

import numpy as np
import pytest
import torch

from kernels.emulated.machine import Machine
from kernels.emulated.memory import GlobalMemory
from kernels.emulated.ptx import parse

KERNEL = """
.visible .entry kernel(.param .u64 .ptr .global kernel_param_0, .param .u64 .ptr .global kernel_param_1)
.reqntid 32
{{
    .reg .b32 %r<20>;
    .reg .b64 %rd<8>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 3;
    mul.wide.u32 %rd3, %r2, {stride};
    add.s64 %rd3, %rd1, %rd3;
    mul.wide.u32 %rd4, %r1, {stride};
    add.s64 %rd4, %rd2, %rd4;
    add.s32 %r3, %r1, 100;
    cvt.rn.f32.s32 %r4, %r1;
    cvt.rn.f32.s32 %r5, %r3;
    {body}
    ret;
}}
"""


def run(body, memory_words, stride=4):
    """Two blocks of 32 threads; %rd3: word number thread % 4, %rd4: word number thread of the second tensor."""
    words, seen = memory_words, torch.zeros(64, dtype=memory_words.dtype)
    memory = GlobalMemory()
    addresses = [memory.add("words", words), memory.add("seen", seen)]
    Machine(parse(KERNEL.format(body=body, stride=stride)), 0).run((2, 1, 1), addresses, memory)
    return words, seen


def test_threads_take_turns_at_a_word():
    words, seen = run("atom.global.add.u32 %r6, [%rd3], %r1; st.global.b32 [%rd4], %r6;", torch.zeros(4).int())
    each = np.arange(32).reshape(8, 4)  # threads of a word in a column
    assert words.tolist() == (2 * each.sum(0)).tolist()
    # What the second block finds: all of the first, and those before each thread in its own.
    before = each.cumsum(0) - each + each.sum(0)
    assert seen[:32].tolist() == before.reshape(-1).tolist()


def test_one_thread_wins_a_comparison():
    words, seen = run("atom.global.cas.b32 %r6, [%rd3], 0, %r3; st.global.b32 [%rd4], %r6;", torch.zeros(4).int())
    assert words.tolist() == [100, 101, 102, 103]  # of each word the first thread; the others find its number
    assert seen[:32].tolist() == [100, 101, 102, 103] * 8


@pytest.mark.parametrize("name", ["red", "atom"])
def test_a_vector_is_changed_element_by_element(name):
    target = "" if name == "red" else "{%r6, %r7}, "
    body = f"{name}.global.gpu.acq_rel.add.v2.f32 {target}[%rd3], {{%r4, %r5}};"
    if target:
        body += "st.global.v2.b32 [%rd4], {%r6, %r7};"
    words, seen = run(body, torch.zeros(8), stride=8)
    each = np.arange(32).reshape(8, 4)
    expected = np.stack([2 * each.sum(0), 2 * (each + 100).sum(0)], axis=-1)
    assert words.tolist() == expected.reshape(-1).tolist()
    if target:
        before = np.stack(
            [each.cumsum(0) - each + each.sum(0), (each + 100).cumsum(0) - each - 100 + (each + 100).sum(0)], -1
        )
        assert seen.tolist() == before.reshape(-1).tolist()
