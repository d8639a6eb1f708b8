"""What the emulated GPU refuses, by kernels written by hand that do it wrong; and the same done right, which passes."""

import resource
from contextlib import suppress

import numpy as np
import pytest
import torch

from kernels.emulated.ptx import EmulationError
from tests.kernels.emulated.by_hand import launch

# Two blocks of 64 threads, which is two warps each. %r30 is the thread, %r29 the block, %r28 the thread's number in the
# grid, %r27 the thread's place in shared memory; %l8 and %l9 are its places in the first two tensors, 4 bytes each.
PLACE = """mov.u32 %r30, %tid.x; mov.u32 %r29, %ctaid.x; mad.lo.s32 %r28, %r29, 64, %r30; shl.b32 %r27, %r30, 2;
    mad.wide.s32 %l8, %r28, 4, %l0; mad.wide.s32 %l9, %r28, 4, %l1;"""
SHARED = 256  # bytes of a block: a place for each thread


def run(body, *tensors, blocks=2):
    """The body's lines, a text or a list, are numbered from 1 as in a source."""
    body = body.strip().splitlines() if isinstance(body, str) else body
    lines = [f".loc 1 {number} 1\n{line}" for number, line in enumerate(body, 1)]
    launch("\n".join([PLACE, *lines]), *tensors, threads=64, blocks=blocks, shared=SHARED)


def refused(body, where, what, *tensors, blocks=2):
    """Refused in one line: in which line of the body, where, and what was done."""
    with pytest.raises(EmulationError) as caught:
        run(body, *tensors, blocks=blocks)
    line, instruction, block, thread = where
    place = f"kernel at 1:{line}:1 ({instruction}): block ({block}, 0, 0), thread {thread}: "
    assert str(caught.value) == place + what


# Global memory: bounds

ACCESSES = {
    "ld.global.b32": ("reads", "ld.global.b32 %r0, [%l8"),
    "st.global.b32": ("writes", "st.global.b32 [%l8"),
    "atom.global.add.u32": ("changes", "atom.global.add.u32 %r0, [%l8"),
    "cp.async.ca.shared.global": ("reads", "cp.async.ca.shared.global [%r27], [%l8"),
}
OPERANDS = {"st.global.b32": ", %r0", "atom.global.add.u32": ", 1", "cp.async.ca.shared.global": ", 4"}
LARGER = torch.zeros(300)
TENSORS = {  # of 120 elements where 128 are needed, some with memory of others around them
    "alone": lambda: torch.zeros(120),
    "a part of a larger one": lambda: LARGER[40:160],
    "one of several in a storage": lambda: torch.zeros(3, 120)[1],
}


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", ACCESSES)
def test_what_lies_outside_a_tensor(name, tensor):
    does, access = ACCESSES[name]
    x = TENSORS[tensor]()
    behind = access + "]" + OPERANDS.get(name, "") + ";"
    what = f"{does} 4 bytes outside the tensors: 0 bytes behind the end of argument_0 (120,) float32"
    refused(behind, (1, name, 1, 56), what, x)
    further = access + " + 160]" + OPERANDS.get(name, "") + ";"  # the first threads of the block, too, from 16 on
    refused(further, (1, name, 1, 16), what, x)
    before = access + " + -12]" + OPERANDS.get(name, "") + ";"
    what = f"{does} 4 bytes outside the tensors: 12 bytes before argument_0 (120,) float32"
    refused(before, (1, name, 0, 0), what, x)
    masked = "setp.lt.u32 %p0, %r28, 120;\n@%p0 " + behind
    run(masked, x)
    one_too_many = "setp.lt.u32 %p0, %r28, 121;\n@%p0 " + behind
    what = f"{does} 4 bytes outside the tensors: 0 bytes behind the end of argument_0 (120,) float32"
    refused(one_too_many, (2, name, 1, 56), what, x)


def test_another_tensor_of_the_same_storage_is_outside():
    """As the keys are where a missing mask reads them as queries; each of them is an argument, too."""
    q, k = torch.zeros(2, 120)
    outside = "reads 4 bytes outside the tensors: "
    end = "0 bytes behind the end of argument_0 (120,) float32"
    refused("ld.global.b32 %r0, [%l8];", (1, "ld.global.b32", 1, 56), outside + end, q, k)
    end = "20 bytes before argument_1 (120,) float32"
    refused("ld.global.b32 %r0, [%l9 + -20];", (1, "ld.global.b32", 0, 0), outside + end, q, k)
    run("ld.global.b32 %r0, [%l9];", q, torch.zeros(128))


@pytest.mark.parametrize(
    ("address", "where"),
    [
        ("mov.b64 %l10, 0;", "address 0x0, in no tensor"),
        ("mov.b64 %l10, %l15;", "address -0x1, in no tensor"),  # of a register that nobody has written
        ("add.s64 %l10, %l0, 4096;", "3584 bytes behind the end of argument_0 (128,) float32"),
        ("add.s64 %l10, %l1, 1099511000000;", "1099510999000 bytes behind the end of argument_1 (250,) float32"),
        ("add.s64 %l10, %l0, 1099511000000;", "627776 bytes before argument_1 (250,) float32"),
    ],
)
def test_wild_addresses(address, where):
    what = f"reads 4 bytes outside the tensors: {where}"
    wrong = f"{address}\nld.global.b32 %r0, [%l10];"
    refused(wrong, (2, "ld.global.b32", 0, 0), what, torch.zeros(128), torch.zeros(250))


def test_vectors_that_end_outside():
    body = "mad.wide.s32 %l10, %r28, 16, %l0;\nld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%l10];"
    what = "reads 16 bytes outside the tensors: 0 bytes behind the end of argument_0 (510,) float32"
    refused(body, (2, "ld.global.v4.b32", 1, 63), what, torch.zeros(510))
    run(body, torch.zeros(512))


def test_the_gaps_of_a_view():
    """Rows of 30 in a matrix of 40 columns: 0.0 is read where a kernel forgets to ask how wide the rows are."""
    view = torch.zeros(4, 40)[:, :30]
    what = "{} 4 bytes between the elements of a view: {} of argument_0 (4, 30) float32"
    place = "0 bytes behind the element at byte 116"
    refused("ld.global.b32 %r0, [%l8];", (1, "ld.global.b32", 0, 30), what.format("reads", place), view)
    refused("st.global.b32 [%l8], 0;", (1, "st.global.b32", 0, 30), what.format("writes", place), view)
    place = "8 bytes behind the element at byte 276"
    body = "setp.eq.s32 %p0, %r28, 72;\n@%p0 ld.global.b32 %r0, [%l8];"
    refused(body, (2, "ld.global.b32", 1, 8), what.format("reads", place), view)
    right = """
        div.u32 %r1, %r28, 30; mul.lo.s32 %r2, %r1, 30; sub.s32 %r2, %r28, %r2; mad.lo.s32 %r2, %r1, 40, %r2;
        mad.wide.s32 %l10, %r2, 4, %l0; setp.lt.u32 %p0, %r28, 120; @%p0 st.global.b32 [%l10], 0f3F800000;
    """
    run(right, view)
    assert view.eq(1).all()
    # A vector whose last part lies in the gap; of halves, so that the gap begins within a word.
    halves = torch.zeros(8, 34, dtype=torch.float16)[:, :31]
    body = "mad.wide.s32 %l10, %r28, 4, %l0;\nld.global.b32 %r0, [%l10];"
    what = "reads 4 bytes between the elements of a view: 0 bytes behind the element at byte 60 of "
    refused(body, (2, "ld.global.b32", 0, 15), what + "argument_0 (8, 31) float16", halves)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4).t(),
        lambda: torch.zeros(1).expand(128),
        lambda: torch.zeros(1, 3).expand(4, 3),
        lambda: torch.zeros(2, 3, 2, 4, dtype=torch.int16)[:, 1].transpose(0, 2),
        lambda: torch.zeros(40, dtype=torch.int16).as_strided((4, 8), (4, 1)),  # elements that overlap
        lambda: torch.zeros(50, dtype=torch.int16).as_strided((2, 3, 2), (24, 7, 2)),
        lambda: torch.zeros(3, 5, dtype=torch.float64)[1:, ::3],
        lambda: torch.zeros(()),
    ],
)
def test_exactly_the_elements_of_a_tensor_may_be_touched(make):
    """Each byte of its storage, before it and behind it is tried alone."""
    x = make()
    bytes_of_storage = torch.arange(x.untyped_storage().nbytes())
    elements = bytes_of_storage.as_strided(
        (*x.shape, x.element_size()), (*(stride * x.element_size() for stride in x.stride()), 1),
        x.storage_offset() * x.element_size(),
    )  # fmt: skip
    found, start = set(), x.storage_offset() * x.element_size()
    for byte in range(-4, x.untyped_storage().nbytes() + 4):
        with suppress(EmulationError):
            run(f"ld.global.b8 %r0, [%l0 + {byte - start}];", x, blocks=1)
            found.add(byte)
    assert found == set(elements.unique().tolist())


def test_tensors_with_nothing_in_them():
    what = "reads 4 bytes outside the tensors: 0 bytes behind the end of argument_0 (0, 5) float32"
    for empty in (torch.zeros(0, 5), torch.zeros(4, 5)[:0]):
        refused("ld.global.b32 %r0, [%l0];", (1, "ld.global.b32", 0, 0), what, empty)
        run("st.global.b32 [%l9], %r0;", empty, torch.zeros(128))


def test_a_storage_that_is_smaller_than_a_word():
    byte = torch.tensor([7], dtype=torch.uint8)
    what = "reads 4 bytes outside the tensors: 0 bytes behind the end of argument_0 (1,) uint8"
    refused("ld.global.b32 %r0, [%l0];", (1, "ld.global.b32", 0, 0), what, byte)
    run("ld.global.b8 %h0, [%l0];\nst.global.b8 [%l0], %h0;", byte, blocks=1)


def test_threads_of_one_instruction_may_touch_several_tensors():
    """Even threads the first one, odd ones the second; and so do blocks."""
    body = """
        and.b32 %r0, {which}, 1; setp.eq.s32 %p0, %r0, 0; selp.b64 %l10, %l8, %l9, %p0;
        {mask} ld.global.b32 %r1, [%l10];
        add.s32 %r1, %r1, 1000;
        {mask} st.global.b32 [%l10], %r1;
    """
    numbers = torch.arange(128, dtype=torch.int32)
    for mask, upper in (("", 0), ("setp.ne.s32 %p1, %r30, 9;\n@%p1", 9)):
        for which, chosen in (("%r28", numbers % 2), ("%r29", numbers // 64)):
            a, b = numbers.clone(), numbers.clone()
            run(body.format(which=which, mask=mask), a, b)
            changed = 1000 * (numbers % 64 != upper if upper else torch.ones(128)).int()
            assert a.equal(numbers + changed * (chosen == 0))
            assert b.equal(numbers + changed * (chosen == 1))
    what = "reads 4 bytes outside the tensors: 0 bytes behind the end of argument_1 (125,) int32"
    wrong = body.format(which="%r28", mask="")
    refused(wrong, (2, "ld.global.b32", 1, 61), what, numbers, numbers[:125].clone())


# Alignment


def test_misaligned_vectors_of_global_memory():
    x = torch.zeros(132)
    what = "{} {} bytes at once at an address that {} does not divide, byte {} of argument_0 (132,) float32"
    for access, does, width in (
        ("ld.global.v2.b32 {%r0, %r1}, [%l8]", "reads", 8),
        ("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%l8]", "reads", 16),
        ("ld.global.b64 %l10, [%l8]", "reads", 8),
        ("st.global.v2.b32 [%l8], {%r0, %r1}", "writes", 8),
        ("cp.async.cg.shared.global [%r25], [%l8], 16", "reads", 16),
    ):
        aligned = f"and.b32 %r25, %r27, 0xF0; setp.lt.u32 %p0, %r30, 1;\n@%p0 {access};"
        run(aligned, x)
        wrong = f"and.b32 %r25, %r27, 0xF0; setp.lt.u32 %p0, %r30, 2;\n@%p0 {access};"
        refused(wrong, (2, access.split()[0], 0, 1), what.format(does, width, width, 4), x)
    off_by_one = "ld.global.b32 %r0, [%l8 + 1];"
    refused(off_by_one, (1, "ld.global.b32", 0, 0), what.format("reads", 4, 4, 1), x)


def test_alignment_is_that_of_the_memory_on_this_machine():
    """Triton looks at real addresses: in a storage that begins 4 bytes past a multiple of 16, element 3 is aligned."""
    raw = np.zeros(1000, np.uint8)
    start = -raw.ctypes.data % 16 + 4
    odd = torch.from_numpy(raw[start : start + 800].view(np.float32))
    assert odd.data_ptr() % 16 == 4
    vectors = "mad.wide.s32 %l10, %r30, 16, %l0; setp.lt.u32 %p0, %r30, 40;\n"
    vectors += "@%p0 st.global.v4.b32 [%l10], {5, 6, 7, 8};"
    view = odd[3:]
    run(vectors, view, blocks=1)
    assert view.view(torch.int32)[:160].view(40, 4).eq(torch.tensor([5, 6, 7, 8])).all()
    assert not odd[:3].any()
    what = "writes 16 bytes at once at an address that 16 does not divide, byte 0 of argument_0 (200,) float32"
    refused(vectors, (2, "st.global.v4.b32", 0, 0), what, odd)
    before = "reads 4 bytes outside the tensors: 4 bytes before argument_0 (200,) float32"
    refused("ld.global.b32 %r0, [%l0 + -4];", (1, "ld.global.b32", 0, 0), before, odd)


# Addresses of 64 bits


def test_offsets_of_32_bits_are_found_without_the_memory():
    """64 rows, 2^26 bytes apart: 4 GB, of which the machine that runs this test needs the pages of 64 bytes."""
    far = torch.empty(63 * 2**26 + 1, dtype=torch.uint8).as_strided((64,), (2**26,))
    far.zero_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    right = "shl.b32 %r0, %r30, 6; mad.wide.u32 %l10, %r0, 1048576, %l0;\nst.global.b8 [%l10], %r30;"
    run(right, far, blocks=1)
    assert far.tolist() == list(range(64))
    wrong = "shl.b32 %r0, %r30, 26; cvt.s64.s32 %l10, %r0; add.s64 %l10, %l10, %l0;\nst.global.b8 [%l10], %r30;"
    what = "writes 1 bytes outside the tensors: 2147483648 bytes before argument_0 (64,) uint8"
    refused(wrong, (2, "st.global.b8", 0, 32), what, far, blocks=1)
    unsigned = wrong.replace("cvt.s64.s32", "cvt.u64.u32").replace("26;", "27;")  # wraps to the rows again, unseen
    run(unsigned, far, blocks=1)
    between = "shl.b32 %r0, %r30, 25; cvt.u64.u32 %l10, %r0; add.s64 %l10, %l10, %l0;\nst.global.b8 [%l10], %r30;"
    what = "writes 1 bytes between the elements of a view: 33554431 bytes behind the element at byte 0 of "
    refused(between, (2, "st.global.b8", 0, 1), what + "argument_0 (64,) uint8", far, blocks=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KB


# Global memory: what others write

OTHER = "xor.b32 %r1, %r28, {}; mad.wide.s32 %l10, %r1, 4, {}; "


def test_reads_of_what_another_warp_has_just_written_to_global_memory():
    out = torch.zeros(128, dtype=torch.int32)
    body = "st.global.b32 [%l8], %r28;\n{}\n" + OTHER.format("{}", "{}") + "\nld.global.b32 %r2, [%l10];"
    what = "reads what another warp has written since the last barrier: byte 128 of argument_0 (128,) int32"
    refused(body.format("", 32, "%l0"), (4, "ld.global.b32", 0, 0), what, out)
    refused(body.format("bar.warp.sync -1;", 32, "%l0"), (4, "ld.global.b32", 0, 0), what, out)
    run(body.format("bar.sync 0;", 32, "%l0"), out)
    run(body.format("", 1, "%l0"), out)  # of the same warp
    # Through another argument for the same memory, or a part of it.
    twice = what.replace("argument_0", "argument_1")
    refused(body.format("", 32, "%l1"), (4, "ld.global.b32", 0, 0), twice, out, out)
    part = "reads what another warp has written since the last barrier: byte 0 of argument_1 (96,) int32"
    refused(body.format("", 32, "%l0").replace("ld", "setp.eq.s32 %p0, %r30, 0; @%p0 ld").replace("%l10];", "%l1];"),
            (4, "ld.global.b32", 0, 0), part, out, out[32:])  # fmt: skip
    copied = "cp.async.ca.shared.global [%r27], [%l10], 4;"
    name = "cp.async.ca.shared.global"
    refused(body.format("", 32, "%l0").replace("ld.global.b32 %r2, [%l10];", copied), (4, name, 0, 0), what, out)


def test_the_thread_that_reads_what_another_one_has_written_is_named():
    """Where all threads give one address, and where a few of them read."""
    out = torch.zeros(128, dtype=torch.int32)
    what = "reads what another warp has written since the last barrier: byte 0 of argument_0 (128,) int32"
    store = "setp.lt.u32 %p0, %r28, 8; @%p0 st.global.b32 [%l8], 1;"
    refused([store, "ld.global.b32 %r0, [%l0];"], (2, "ld.global.b32", 0, 32), what, out)
    few = "setp.gt.u32 %p1, %r30, 40; @%p1 ld.global.b32 %r0, [%l0];"
    refused([store, few], (2, "ld.global.b32", 0, 41), what, out)


@pytest.mark.parametrize("side_by_side", [64, 2**14])
def test_reads_of_what_another_block_has_written(monkeypatch, side_by_side):
    monkeypatch.setattr("kernels.emulated.machine.SIDE_BY_SIDE", side_by_side)
    out = torch.zeros(128, dtype=torch.int32)
    body = "{}\nst.global.b32 [%l8], %r28;\nbar.sync 0;\n" + OTHER.format(64, "%l0") + "\nld.global.b32 %r2, [%l10];"
    what = "reads what another block has written: byte {} of argument_0 (128,) int32"
    block, byte = (1, 0) if side_by_side == 64 else (0, 256)
    refused(body.format(""), (4, "ld.global.b32", block, 0), what.format(byte), out)
    run(body.format("").replace("xor.b32 %r1, %r28, 64", "xor.b32 %r1, %r28, 63"), out)
    run(body.format("red.global.add.u32 [%l1], 1;"), out, torch.zeros(1, dtype=torch.int32))  # a lock, perhaps


# Shared memory

STORE, LOAD, SYNC = "st.shared.b32 [%r27], 1;", "ld.shared.b32 %r0, [%r27];", "bar.sync 0;"
LOAD_OTHER = "xor.b32 %r26, %r27, 128; ld.shared.b32 %r0, [%r26];"  # of the other warp
FIRST_WARP, FIRST_THREAD = "setp.lt.u32 %p0, %r30, 32;", "setp.eq.s32 %p1, %r30, 0;"
HALVES = "st.shared.b16 [%r27], 1; st.shared.b16 [%r27 + 2], 1;"
MATRIX = "ldmatrix.sync.aligned.m8n8.x1.shared.b16"
UNWRITTEN = "reads shared memory that nobody has written, byte {}"
READ_OF_WRITTEN = "reads shared memory that another warp has written since the last barrier, byte {}"
WRITE_OF_READ = "writes shared memory that another warp has read since the last barrier, byte {}"
BEHIND = "writes 4 bytes at byte {} of shared memory, and the block has 256"
MISALIGNED = "{0} {1} bytes of shared memory at once at an address that {1} does not divide, byte {2}"


@pytest.mark.parametrize(
    ("wrong", "where", "what", "right"),
    [
        ([LOAD], (1, "ld.shared.b32", 0, 0), UNWRITTEN.format(0), [STORE, LOAD]),
        (
            [FIRST_WARP, f"@%p0 {STORE}", SYNC, LOAD], (4, "ld.shared.b32", 0, 32), UNWRITTEN.format(128),
            [FIRST_WARP, f"@%p0 {STORE}", SYNC, f"@%p0 {LOAD}"],
        ),
        (
            [STORE, LOAD_OTHER], (2, "ld.shared.b32", 0, 0), READ_OF_WRITTEN.format(128),
            [STORE, SYNC, LOAD_OTHER],
        ),
        (
            [STORE, "bar.warp.sync -1;", LOAD_OTHER], (3, "ld.shared.b32", 0, 0), READ_OF_WRITTEN.format(128),
            [STORE, "bar.warp.sync -1;", LOAD_OTHER.replace("128", "64")],
        ),
        (
            [STORE, SYNC, LOAD_OTHER, STORE], (4, "st.shared.b32", 0, 0), WRITE_OF_READ.format(0),
            [STORE, SYNC, LOAD_OTHER, SYNC, STORE],
        ),
        (  # a place that all threads have read, its writer among them
            [STORE, SYNC, "ld.shared.b32 %r0, [0];", FIRST_THREAD, f"@%p1 {STORE}"],
            (5, "st.shared.b32", 0, 0), WRITE_OF_READ.format(0),
            [STORE, SYNC, "ld.shared.b32 %r0, [0];", SYNC, STORE],
        ),
        (  # a place that one warp has read, and after it the one that writes to it
            [STORE, SYNC, FIRST_WARP, f"@!%p0 {LOAD_OTHER.replace('ld', '@!%p0 ld')}", f"@%p0 {LOAD}", STORE],
            (6, "st.shared.b32", 0, 0), WRITE_OF_READ.format(0),
            [STORE, SYNC, FIRST_WARP, f"@!%p0 {LOAD}", f"@%p0 {LOAD}", STORE],
        ),
        (  # half a word of another warp's
            [HALVES, SYNC, "st.shared.b16 [%r27 + 2], 1;", LOAD_OTHER],
            (4, "ld.shared.b32", 0, 0), READ_OF_WRITTEN.format(130),
            [HALVES, SYNC, "st.shared.b16 [%r27 + 2], 1;", LOAD_OTHER.replace("b32 %r0", "b16 %h0")],
        ),
        (
            ["st.shared.b32 [%r27 + 4], 1;"], (1, "st.shared.b32", 0, 63), BEHIND.format(256),
            [STORE],
        ),
        (
            ["st.shared.b32 [%r27 + -4], 1;"], (1, "st.shared.b32", 0, 0), BEHIND.format(-4),
            [FIRST_THREAD, "@!%p1 st.shared.b32 [%r27 + -4], 1;"],
        ),
        (
            ["and.b32 %r0, %r27, 0x78;", "st.shared.v2.b32 [%r0 + 4], {1, 1};"],
            (2, "st.shared.v2.b32", 0, 0), MISALIGNED.format("writes", 8, 4),
            ["and.b32 %r0, %r27, 0x78;", "st.shared.v2.b32 [%r0 + 8], {1, 1};"],
        ),
        (
            [STORE, SYNC, "and.b32 %r0, %r30, 7; mul.lo.s32 %r0, %r0, 8;", MATRIX + " {%r1}, [%r0];"],
            (4, MATRIX, 0, 1), MISALIGNED.format("reads", 16, 8),
            [STORE, SYNC, "and.b32 %r0, %r30, 7; mul.lo.s32 %r0, %r0, 16;", MATRIX + " {%r1}, [%r0];"],
        ),
        (
            [STORE, "and.b32 %r0, %r30, 7; mul.lo.s32 %r0, %r0, 16;", MATRIX + " {%r1}, [%r0];"],
            (3, MATRIX, 0, 32), READ_OF_WRITTEN.format(0),
            [STORE, "and.b32 %r0, %r27, 0xF0;", MATRIX + " {%r1}, [%r0];"],
        ),
    ],
)  # fmt: skip
def test_shared_memory(wrong, where, what, right):
    run(right)
    refused(wrong, where, what)


def test_threads_may_leave_one_value_in_one_place():
    """As where a layout holds numbers several times: after a barrier each reads it, whoever has written last."""
    out = torch.zeros(128, dtype=torch.int32)
    right = """
        and.b32 %r0, %r27, 0x7C; st.shared.b32 [%r0], %r0;
        bar.sync 0;
        ld.shared.b32 %r1, [%r0];
        st.global.b32 [%l8], %r1;
    """
    run(right, out)
    assert out.equal(4 * (torch.arange(128) % 32).int())


BARRIERS = """
    mov.b32 %r20, {count};
$L__again:
    st.shared.b32 [%r27], %r20;
    bar.sync 0;
    xor.b32 %r26, %r27, 128; ld.shared.b32 %r0, [%r26];
    {second}
    add.s32 %r20, %r20, -1; setp.gt.s32 %p0, %r20, 0; @%p0 bra $L__again;
    st.global.b32 [%l8], %r0;
    {after}
"""


def test_a_loop_with_more_barriers_than_a_mark_counts():
    out, race = torch.zeros(128, dtype=torch.int32), f"{STORE}\n{LOAD_OTHER}"
    run(BARRIERS.format(count=700, second="bar.sync 0;", after=""), out)
    assert out.eq(1).all()
    for count in (1, 2, 254, 255, 256, 700):
        wrong = BARRIERS.format(count=count, second="bar.sync 0;", after=race)
        refused(wrong, (10, "ld.shared.b32", 0, 0), READ_OF_WRITTEN.format(128), out)
    refused(BARRIERS.format(count=700, second="", after=""), (3, "st.shared.b32", 0, 0), WRITE_OF_READ.format(0), out)


def test_blocks_that_pass_different_numbers_of_barriers():
    """Side by side: the second one runs on when the first one has left the loop."""
    out = torch.zeros(128, dtype=torch.int32)
    loop = BARRIERS.replace("mov.b32 %r20, {count};", "mad.lo.s32 %r20, %r29, 4, 1;")
    run(loop.format(second="bar.sync 0;", after=""), out)
    assert out.eq(1).all()
    refused(loop.format(second="", after=""), (3, "st.shared.b32", 1, 0), WRITE_OF_READ.format(0), out)
    wrong = loop.format(second=SYNC, after=f"{SYNC}\n{STORE}\n{LOAD_OTHER}")
    refused(wrong, (11, "ld.shared.b32", 0, 0), READ_OF_WRITTEN.format(128), out)


# Asynchronous copies

COPY = "cp.async.ca.shared.global [%r27], [%l8], 4;"
WAIT, COMMIT = "cp.async.wait_group 0;", "cp.async.commit_group;"
TOO_EARLY = "reads shared memory before the asynchronous copy to it was waited for, byte {}"
UNDER_WAY = "writes shared memory to which an asynchronous copy is on its way, byte {}"


@pytest.mark.parametrize(
    ("wrong", "where", "what", "right"),
    [
        (
            [COPY, COMMIT, LOAD], (3, "ld.shared.b32", 0, 0), TOO_EARLY.format(0),
            [COPY, COMMIT, WAIT, LOAD],
        ),
        (
            [COPY, COMMIT, WAIT.replace("0", "1"), LOAD], (4, "ld.shared.b32", 0, 0), TOO_EARLY.format(0),
            [COPY, COMMIT, COMMIT, WAIT.replace("0", "1"), LOAD],  # an empty group counts
        ),
        (
            [COPY, WAIT, LOAD], (3, "ld.shared.b32", 0, 0), TOO_EARLY.format(0),
            [COPY, "cp.async.wait_all;", LOAD],
        ),
        (
            [COPY, COMMIT, WAIT, LOAD_OTHER], (4, "ld.shared.b32", 0, 0),
            READ_OF_WRITTEN.format(128),
            [COPY, COMMIT, WAIT, SYNC, LOAD_OTHER],
        ),
        (
            [COPY, COMMIT, SYNC, WAIT, LOAD_OTHER], (5, "ld.shared.b32", 0, 0),
            READ_OF_WRITTEN.format(128),
            [COPY, COMMIT, SYNC, WAIT, LOAD],
        ),
        (  # half of the threads wait
            [COPY, COMMIT, FIRST_WARP, "@%p0 " + WAIT, LOAD],
            (5, "ld.shared.b32", 0, 32), TOO_EARLY.format(128),
            [COPY, COMMIT, FIRST_WARP, "@%p0 " + WAIT, "@%p0 " + LOAD],
        ),
        (
            [COPY, COMMIT, STORE], (3, "st.shared.b32", 0, 0), UNDER_WAY.format(0),
            [COPY, COMMIT, WAIT, STORE],
        ),
        (
            [COPY, COMMIT, COPY], (3, "cp.async.ca.shared.global", 0, 0), UNDER_WAY.format(0),
            [COPY, COMMIT, WAIT, COPY],
        ),
        (
            [STORE, SYNC, LOAD_OTHER, COPY], (4, "cp.async.ca.shared.global", 0, 0),
            WRITE_OF_READ.format(0),
            [STORE, SYNC, LOAD_OTHER, SYNC, COPY],
        ),
        (
            [COPY.replace("%r27", "%r27 + 8")], (1, "cp.async.ca.shared.global", 0, 62),
            BEHIND.format(256),
            ["setp.lt.u32 %p0, %r30, 62;", "@%p0 " + COPY.replace("%r27", "%r27 + 8")],
        ),
    ],
)  # fmt: skip
def test_asynchronous_copies(wrong, where, what, right):
    x = torch.zeros(128)
    run(right, x)
    refused(wrong, where, what, x)


def test_the_older_of_two_groups_arrives_first():
    """Pipelined: one place ahead."""
    x, out = torch.arange(256, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    body = """
        setp.lt.u32 %p0, %r30, 32;
        @%p0 cp.async.ca.shared.global [%r27], [%l8], 4; cp.async.commit_group;
        @!%p0 cp.async.ca.shared.global [%r27], [%l8 + 512], 4; cp.async.commit_group;
        cp.async.wait_group 1;
        @{} ld.shared.b32 %r0, [%r27]; st.global.b32 [%l9], %r0;
    """
    refused(body.format("!%p0"), (5, "ld.shared.b32", 0, 32), TOO_EARLY.format(128), x, out)
    run(body.format("%p0"), x, out)
    assert out.view(2, 64)[:, :32].equal(x[:128].view(2, 64)[:, :32])


def test_a_copy_of_no_bytes_reads_nothing():
    """Where the mask is off, its source may lie anywhere, and zeros arrive."""
    x, out = torch.ones(120), torch.full((128,), 5.0)
    body = """
        setp.lt.u32 %p0, %r28, {}; selp.b32 %r1, 4, 0, %p0;
        cp.async.ca.shared.global [%r27], [%l8], 4, %r1;
        cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.b32 %r0, [%r27]; st.global.b32 [%l9], %r0;
    """
    run(body.format(120), x, out)
    assert out.equal(torch.cat([torch.ones(120), torch.zeros(8)]))
    what = "reads 4 bytes outside the tensors: 0 bytes behind the end of argument_0 (120,) float32"
    refused(body.format(122), (2, "cp.async.ca.shared.global", 1, 56), what, x, out)


# What threads do together


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("bar.sync 0;", "a barrier"),
        ("shfl.sync.bfly.b32 %r0, %r30, 1, 31, -1;", "a shuffle"),
        ("cp.async.commit_group;", "a commit of asynchronous copies"),
    ],
)
def test_what_a_part_of_the_threads_does_not_reach(instruction, what):
    name = instruction.rstrip(";").split()[0]
    jump = f"setp.eq.s32 %p0, %r28, 70; @%p0 bra $L__end;\n{instruction}\n$L__end:\nst.global.b32 [%l8], 1;"
    out = torch.zeros(128)
    refused(jump, (2, name, 1, 6), f"does not reach {what} that others reach", out)
    refused(jump.replace("bra $L__end", "ret"), (2, name, 1, 6), f"does not reach {what} that others reach", out)
    predicated = f"setp.ne.s32 %p0, %r28, 70;\n@%p0 {instruction}"
    refused(predicated, (2, name, 1, 6), f"does not reach {what} that others reach", out)
    run(jump.replace("eq.s32 %p0, %r28, 70", "eq.s32 %p0, %r29, 1"), out)  # none of a block's threads does


@pytest.mark.parametrize("instruction", ["bar.sync 0;", "shfl.sync.bfly.b32 %r0, %r30, 1, 31, -1;"])
def test_threads_wait_for_those_that_come_later(instruction):
    """A detour of some threads, or of whole warps, whose code lies behind the place where they all meet."""
    detour = f"""
        mov.b32 %r0, -1; mov.b32 %r1, 0;
        {{}}
        @%p0 bra $L__detour;
    $L__meet:
        {instruction}
        add.s32 %r1, %r1, %r30;
        st.global.b32 [%l8], %r1;
        ret;
    $L__detour:
        add.s32 %r1, %r1, 1000;
        setp.lt.s32 %p1, %r1, 3000; @%p1 bra $L__detour;
        bra $L__meet;
    """
    numbers = torch.arange(128)
    for condition, those in (
        ("setp.eq.s32 %p0, %r30, 5;", numbers % 64 == 5),
        ("setp.lt.u32 %p0, %r28, 47;", numbers < 47),
        ("setp.ge.u32 %p0, %r30, 32;", numbers % 64 >= 32),
    ):
        out = torch.zeros(128, dtype=torch.int32)
        run(detour.format(condition), out)
        assert out.equal((numbers % 64 + 3000 * those).int())


def test_barriers_at_two_places_are_refused():
    """PTX would count them as one barrier; the threads would not have met."""
    body = """
        setp.lt.u32 %p0, %r30, 32; @%p0 bra $L__other;
        bar.sync 0;
        ret;
    $L__other:
        bar.sync 0;
        ret;
    """
    refused(body, (2, "bar.sync", 0, 0), "does not reach a barrier that others reach")
