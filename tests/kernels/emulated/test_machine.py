"""The order in which instructions run: branches, loops, predicates; and what the machine does not know is named."""

import numpy as np
import pytest
import torch

from kernels.emulated.ptx import EmulationError
from tests.kernels.emulated.by_hand import compute, launch

NUMBERS = np.arange(100, dtype=np.uint32)


def test_threads_take_different_branches_and_meet_again():
    """bra, bra.uni: after the branch all lanes are there, or the shuffle would be refused."""
    body = """
        setp.lt.u32 %p0, %a, 40;
        @%p0 bra $L__low;
        add.s32 %r0, %a, 1000;
        bra.uni $L__join;
    $L__low:
        setp.eq.u32 %p1, %a, 7;
        mul.lo.s32 %r0, %a, 2;
        @%p1 bra $L__join;
        add.s32 %r0, %r0, 1;
    $L__join:
        shfl.sync.idx.b32 %y, %r0, %a, 31, -1;
    """
    x = np.arange(96, dtype=np.uint32)
    expected = np.where(x < 40, np.where(x == 7, 14, 2 * x + 1), x + 1000)
    assert (compute(body, x, result=np.uint32) == expected).all()


def test_a_loop_that_each_thread_leaves_at_its_own_time():
    """Steps of Collatz's sequence from each number down to 1."""
    body = """
        mov.b32 %r0, 0;
        mov.b32 %r1, %a;
    $L__loop:
        setp.le.u32 %p0, %r1, 1;
        @%p0 bra $L__end;
        and.b32 %r2, %r1, 1;
        setp.eq.b32 %p1, %r2, 0;
        @%p1 shr.u32 %r1, %r1, 1;
        @!%p1 mad.lo.s32 %r1, %r1, 3, 1;
        add.s32 %r0, %r0, 1;
        bra.uni $L__loop;
    $L__end:
        mov.b32 %y, %r0;
    """

    def steps(n):
        count = 0
        while n > 1:
            n, count = (n // 2 if n % 2 == 0 else 3 * n + 1), count + 1
        return count

    assert compute(body, NUMBERS, result=np.uint32).tolist() == [steps(n) for n in range(100)]


def test_a_loop_that_all_threads_leave_together():
    body = """
        mov.b32 %y, 0;
        mov.b32 %r0, 10;
    $L__loop:
        add.s32 %y, %y, %a;
        add.s32 %r0, %r0, -1;
        setp.ne.b32 %p0, %r0, 0;
        @%p0 bra $L__loop;
    """
    assert (compute(body, NUMBERS, result=np.uint32) == 10 * NUMBERS).all()


def test_a_predicate_lets_some_threads_write():
    """@%p and @!%p, on arithmetic, on moves that take registers apart, on comparisons, loads and stores."""
    odd = NUMBERS % 2 == 1
    choose = "and.b32 %r0, %a, 1; setp.ne.b32 %p0, %r0, 0; mov.b32 %y, 5;"
    found = compute(f"{choose} @%p0 add.s32 %y, %a, 1;", NUMBERS, result=np.uint32)
    assert (found == np.where(odd, NUMBERS + 1, 5)).all()
    assert (compute(f"{choose} @!%p0 mov.b32 %y, %a;", NUMBERS, result=np.uint32) == np.where(odd, 5, NUMBERS)).all()
    apart = f"{choose} mov.b32 %h1, 0; mov.b16 %h2, 3; @%p0 mov.b32 {{%h1, %h2}}, %a; cvt.u32.u16 %y, %h2;"
    assert (compute(apart.replace("mov.b32 %h1, 0; ", ""), NUMBERS, result=np.uint32) == np.where(odd, 0, 3)).all()
    compare = f"{choose} mov.pred %p1, 0; @%p0 setp.gt.u32 %p1, %a, 50; selp.b32 %y, 1, 0, %p1;"
    assert (compute(compare, NUMBERS, result=np.uint32) == (odd & (NUMBERS > 50))).all()
    never = f"{choose} setp.lt.u32 %p1, %a, 0; @%p1 mov.b32 %y, 9;"
    assert (compute(never, NUMBERS, result=np.uint32) == 5).all()

    x, out = torch.arange(64, dtype=torch.int32), torch.full((64,), -1, dtype=torch.int32)
    body = """
        mov.u32 %r0, %tid.x;
        mad.wide.u32 %l8, %r0, 4, %l0;
        mad.wide.u32 %l9, %r0, 4, %l1;
        setp.lt.u32 %p0, %r0, 20;
        mov.b32 %r1, 7;
        @%p0 ld.global.b32 %r1, [%l8];
        setp.lt.u32 %p1, %r0, 40;
        @%p1 st.global.b32 [%l9], %r1;
    """
    launch(body, x, out, threads=64)
    thread = torch.arange(64)
    assert out.equal(torch.where(thread < 20, thread, torch.where(thread < 40, 7, -1)).int())


def test_a_predicate_narrows_a_branch():
    """In threads that a branch left behind, a predicate that holds changes nothing."""
    body = """
        setp.lt.u32 %p0, %a, 10;
        setp.lt.u32 %p1, %a, 50;
        mov.b32 %y, 0;
        @%p0 bra $L__end;
        @%p1 add.s32 %y, %y, 1;
        add.s32 %y, %y, 10;
    $L__end:
    """
    expected = np.where(NUMBERS < 10, 0, np.where(NUMBERS < 50, 11, 10))
    assert (compute(body, NUMBERS, result=np.uint32) == expected).all()


def test_threads_that_return_do_nothing_more():
    """ret with a predicate; and exit."""
    for end in ("ret", "exit"):
        out = torch.zeros(64, dtype=torch.int32)
        body = f"""
            mov.u32 %r0, %tid.x;
            setp.ge.u32 %p0, %r0, 20;
            @%p0 {end};
            mad.wide.u32 %l8, %r0, 4, %l0;
            st.global.b32 [%l8], 1;
        """
        launch(body, out, threads=64)
        assert out.tolist() == [1] * 20 + [0] * 44


def test_a_kernel_knows_its_thread_and_block():
    """%tid, %ntid, %ctaid, %nctaid, %laneid and %warpid, of three blocks of 64 threads."""
    out = torch.zeros(192, 6, dtype=torch.int32)
    names = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid", "%warpid")
    stores = "\n".join(f"mov.u32 %r1, {name}; st.global.b32 [%l8 + {4 * i}], %r1;" for i, name in enumerate(names))
    place = "mov.u32 %r0, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r0, %r2, 64, %r0; mad.wide.u32 %l8, %r0, 24, %l0;"
    launch(f"{place} {stores}", out, threads=64, blocks=3)
    every = torch.arange(192, dtype=torch.int32)
    thread, block, three = every % 64, every // 64, torch.full((192,), 3)
    expected = torch.stack([thread, torch.full((192,), 64), block, three, thread % 32, thread // 32], 1)
    assert out.equal(expected.int())


def test_blocks_that_run_side_by_side_give_what_each_gives_alone():
    """More blocks than run at once, a loop whose length depends on the block, shared memory of each block's own."""
    body = """
        mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
        mov.b32 %r2, %r1;
        mov.b32 %r3, 0;
    $L__loop:
        setp.eq.b32 %p0, %r2, 0;
        @%p0 bra $L__end;
        add.s32 %r3, %r3, %r2;
        add.s32 %r2, %r2, -1;
        bra.uni $L__loop;
    $L__end:
        shl.b32 %r4, %r0, 2;
        st.shared.b32 [%r4], %r3;
        bar.sync 0;
        xor.b32 %r4, %r4, 64;
        ld.shared.b32 %r5, [%r4];
        mad.lo.s32 %r6, %r1, 32, %r0;
        mad.wide.u32 %l8, %r6, 4, %l0;
        st.global.b32 [%l8], %r5;
    """
    out = torch.zeros(700, 32, dtype=torch.int32)
    launch(body, out, blocks=700, shared=128)
    block = torch.arange(700)
    assert out.equal((block * (block + 1) // 2).int()[:, None].expand(700, 32))


def test_registers_are_packed_and_taken_apart():
    """mov.b32 and mov.b64 with {...} on either side; the first part is in the lowest bits, and _ takes nothing."""
    a, b = (np.arange(5, dtype=np.uint16) * 771 + at for at in (1, 40000))
    word = a.astype(np.uint32) | b.astype(np.uint32) << 16
    assert (compute("mov.b32 %y, {%a, %b};", a, b, result=np.uint32) == word).all()
    assert (compute("mov.b32 {%y, %h1}, %a;", word, result=np.uint16) == a).all()
    assert (compute("mov.b32 {_, %y}, %a;", word, result=np.uint16) == b).all()
    double = word.astype(np.uint64) | (word[::-1].astype(np.uint64) << np.uint64(32))
    assert (compute("mov.b64 %y, {%a, %b};", word, word[::-1].copy(), result=np.uint64) == double).all()
    assert (compute("mov.b64 {%r0, %y}, %a;", double, result=np.uint32) == word[::-1]).all()
    assert (compute("mov.b64 {%h0, %h1, %h2, %y}, %a;", double, result=np.uint16) == b[::-1]).all()
    small = "cvt.u8.u32 %h0, %a; cvt.u8.u32 %h1, %b; mov.b16 %y, {%h0, %h1};"
    assert (compute(small, np.uint32([0x1FE]), np.uint32([0x2A5]), result=np.uint16) == 0xA5FE).all()


def test_immediate_numbers():
    """Decimal, hexadecimal, negative and floating-point ones, of any size of register."""
    nothing = np.zeros(1, np.uint32)
    for text, result, expected in [
        ("mov.b32 %y, -1;", np.uint32, 2**32 - 1),
        ("mov.u32 %y, 0xff;", np.uint32, 255),
        ("mov.b16 %y, -3;", np.int16, -3),
        ("mov.u16 %y, 7;", np.uint16, 7),
        ("mov.b64 %y, -5;", np.int64, -5),
        ("mov.u64 %y, 0x8000000000000000;", np.uint64, 2**63),
        ("mov.s32 %y, 12;", np.int32, 12),
        ("mov.b32 %y, 0f3F800000;", np.float32, 1.0),
        ("mov.f32 %y, 0fBF000000;", np.float32, -0.5),
        ("mov.f64 %y, 0d3FF8000000000000;", np.float64, 1.5),
        ("mov.b32 %r0, 0f40000000; add.f32 %y, %r0, 0f3F800000;", np.float32, 3.0),
    ]:
        assert compute(text, nothing, result=result).tolist() == [expected], text


def test_a_narrow_result_fills_a_wide_register():
    """With zeros, or with the sign; a narrow read takes the lower bits."""
    assert compute("cvt.s8.s32 %r0, %a; mov.b32 %y, %r0;", np.int32([-2, 127]), result=np.int32).tolist() == [-2, 127]
    assert compute("cvt.u8.u32 %r0, %a; mov.b32 %y, %r0;", np.uint32([0x1FE]), result=np.uint32).tolist() == [0xFE]
    assert compute("cvt.u32.u16 %y, %a;", np.uint32([0x12345]), result=np.uint32).tolist() == [0x2345]


# What is not known


@pytest.mark.parametrize(
    ("instruction", "name"),
    [
        ("add.rz.f64 %l1, %l1, %l1;", "add.rz.f64"),
        ("add.ftz.f16 %h1, %h1, %h1;", "add.ftz.f16"),
        ("add.f32 %r1, %r1, %r1, %r1;", "add.f32"),
        ("add.cc.s64 %l1, %l1, %l1;", "add.cc.s64"),
        ("mul.wide.u64 %l1, %l1, %l1;", "mul.wide.u64"),
        ("mul24.lo.u32 %r1, %r1, %r1;", "mul24.lo.u32"),
        ("dp4a.s32.s32 %r1, %r1, %r1, %r1;", "dp4a.s32.s32"),
        ("prmt.b32.f4e %r1, %r1, %r1, %r1;", "prmt.b32.f4e"),
        ("ex2.approx.f16 %h1, %h1;", "ex2.approx.f16"),
        ("sqrt.approx.f64 %l1, %l1;", "sqrt.approx.f64"),
        ("rcp.f32 %r1, %r1;", "rcp.f32"),
        ("cvt.rn.f16.f32.f32 %h1, %r1;", "cvt.rn.f16.f32.f32"),
        ("cvt.rs.f16x2.f32 %r1, %r1, %r1, %r1;", "cvt.rs.f16x2.f32"),
        ("cvt.rz.f64.s64 %l1, %l1;", "cvt.rz.f64.s64"),
        ("cvt.rn.satfinite.e2m1x2.f32 %h1, %r1, %r1;", "cvt.rn.satfinite.e2m1x2.f32"),
        ("setp.lt.s32 %p1|%p2, %r1, %r2;", "setp.lt.s32"),
        ("setp.lt.f16x2 %p1, %r1, %r2;", "setp.lt.f16x2"),
        ("set.lt.u32.f32 %r1, %r1, %r1;", "set.lt.u32.f32"),
        ("slct.s32.s32 %r1, %r1, %r1, %r1;", "slct.s32.s32"),
        ("mov.b128 %l1, {%l2, %l3};", "mov.b128"),
        ("ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%l1];", "ld.global.v8.b32"),
        ("ld.const.b32 %r1, [%l1];", "ld.const.b32"),
        ("atom.shared.add.u32 %r1, [%r2], %r3;", "atom.shared.add.u32"),
        ("mbarrier.init.shared::cta.b64 [%r1], 1;", "mbarrier.init.shared::cta.b64"),
        ("cp.async.bulk.commit_group;", "cp.async.bulk.commit_group"),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r1}, [%r2];", "ldmatrix.sync.aligned.m8n16.x1.shared.b8"),
        ("call.uni (%r1), vprintf, (%l1, %l2);", "call.uni"),
        ("trap;", "trap"),
        ("activemask.b32 %r1;", "activemask.b32"),
    ],
    ids=lambda value: value if ";" not in value else "",
)
def test_an_instruction_that_is_not_known_is_named(instruction, name):
    """One line: the kernel, the source line, the instruction; before anything runs."""
    out = torch.zeros(1)
    body = f"""
        .loc 1 12 5
        st.global.b32 [%l0], 1;
        .loc 1 30 12
        {instruction}
    """
    place = r"kernel at 1:30:12 \(" + name.replace(".", r"\.") + r"\)"
    with pytest.raises(EmulationError, match=f"^{place}: the emulated GPU does not know this instruction$"):
        launch(body, out)
    assert not out


@pytest.mark.parametrize(
    ("instruction", "operand"),
    [
        ("mov.u32 %r1, %smid;", "operand '%smid'"),
        ("mov.u64 %l1, %globaltimer;", "operand '%globaltimer'"),
        ("mov.b64 %l1, assertFunc_0;", "operand 'assertFunc_0'"),
        ("add.s32 %undeclared, %r1, %r1;", "operand '%undeclared'"),
        ("add.s32 %r1, %undeclared, %r1;", "operand '%undeclared'"),
    ],
)
def test_an_operand_that_is_not_known_is_named(instruction, operand):
    message = rf"kernel at an unknown line \(.*\): the emulated GPU does not know {operand}$"
    with pytest.raises(EmulationError, match=message):
        launch(instruction)


def test_a_jump_to_nowhere_and_an_endless_loop_are_named(monkeypatch):
    with pytest.raises(EmulationError, match=r"\(bra\): label \$L__gone stands nowhere or at several places"):
        launch("bra $L__gone;")
    with pytest.raises(EmulationError, match=r"\(bra\): label again stands nowhere or at several places"):
        launch("{\nagain:\nbra again;\n}\n{\nagain:\nbra again;\n}")
    monkeypatch.setattr("kernels.emulated.machine.PATIENCE", 1000)
    with pytest.raises(EmulationError, match="kernel: waits for ever, or runs a loop a million times"):
        launch("$L__again:\nbra $L__again;")


def test_a_register_that_nobody_has_written_is_nan_or_an_address_of_nothing():
    found = compute("add.f32 %y, %r7, 0f3F800000;", np.zeros(1, np.uint32), result=np.float32)
    assert np.isnan(found).all()
    with pytest.raises(EmulationError, match="reads 4 bytes outside the tensors"):
        launch("ld.global.b32 %r0, [%l9];", torch.zeros(4))
