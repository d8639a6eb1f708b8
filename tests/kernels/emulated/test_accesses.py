"""What moves between registers and memory: every width and every hint, matrices, asynchronous copies, atomics."""

import numpy as np
import pytest
import torch

from kernels.emulated.ptx import EmulationError
from tests.kernels.emulated.by_hand import launch

LOADS = [
    "ld.global.b8", "ld.global.u8", "ld.global.b16", "ld.global.b32", "ld.global.u32", "ld.global.f32", "ld.global.b64",
    "ld.global.v2.b16", "ld.global.v4.b16", "ld.global.v2.b32", "ld.global.v4.b32", "ld.global.v2.b64",
    "ld.global.v2.f32", "ld.global.v4.f32", "ld.global.ca.b16", "ld.global.ca.b32", "ld.global.cg.b16",
    "ld.global.cg.b32", "ld.global.nc.b32", "ld.relaxed.gpu.global.b32", "ld.acquire.gpu.global.b32",
    "ld.volatile.global.b32", "ld.global.L1::evict_last.b32", "ld.global.v4.u32",
]  # fmt: skip
STORES = [
    "st.global.b8", "st.global.b16", "st.global.b32", "st.global.b64", "st.global.v2.b16", "st.global.v4.b16",
    "st.global.v2.b32", "st.global.v4.b32", "st.global.v2.b64", "st.global.cs.b16", "st.global.cs.b32",
    "st.global.wb.b16", "st.global.wb.b32", "st.global.wt.b32", "st.release.gpu.global.b32",
    "st.global.L1::evict_first.b32",
]  # fmt: skip
SHARED = [
    ("st.shared.b8", "ld.shared.b8"), ("st.shared.b16", "ld.shared.b16"), ("st.shared.b32", "ld.shared.b32"),
    ("st.shared.b64", "ld.shared.b64"), ("st.shared.v2.b16", "ld.shared.v2.b16"),
    ("st.shared.v2.b32", "ld.shared.v2.b32"), ("st.shared.v4.b32", "ld.shared.v4.b32"),
    ("st.shared.v2.b64", "ld.shared.v2.b64"),
    ("st.shared.v4.b32", "ld.shared.b32"), ("st.shared.b16", "ld.shared.v4.b32"),
    ("st.shared.u16", "ld.shared.u16"), ("st.shared.b32", "ld.shared.u32"), ("st.shared.b32", "ld.shared.f32"),
    ("st.shared.b64", "ld.shared.u64"), ("st.shared.b64", "ld.shared.f64"), ("st.shared.v4.b16", "ld.shared.v2.u32"),
    ("st.shared.v2.b64", "ld.shared.v2.u64"), ("st.shared.v4.b32", "ld.shared.v4.u32"),
    ("st.shared.v4.b32", "ld.shared.v4.f32"),
]  # fmt: skip
PLACE = "mov.u32 %r30, %tid.x;\n"


def layout(name):
    """The number of registers of an access and the bytes of each."""
    kind = name.rpartition(".")[2]
    vector = next((part for part in name.split(".") if part in ("v2", "v4")), "v1")
    return int(vector[1]), int(kind.lstrip("bufs")) // 8


def registers(count, size, first=0):
    prefix = {1: "h", 2: "h", 4: "r", 8: "l"}[size]
    base = 10 if prefix == "l" else first
    names = [f"%{prefix}{base + i}" for i in range(count)]
    return "{" + ", ".join(names) + "}" if count > 1 else names[0]


def numbers(n_bytes):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, n_bytes, dtype=np.uint8))


@pytest.mark.parametrize("name", LOADS)
def test_loads_from_global_memory(name):
    (count, size), threads = layout(name), 64
    x, out = numbers(threads * count * size), torch.zeros(threads * count * size, dtype=torch.uint8)
    vector = f".v{count}" if count > 1 else ""
    launch(
        f"""{PLACE} mad.wide.u32 %l20, %r30, {count * size}, %l0; mad.wide.u32 %l21, %r30, {count * size}, %l1;
        {name} {registers(count, size)}, [ %l20 + 0 ];
        st.global{vector}.b{8 * size} [%l21], {registers(count, size)};""",
        x, out, threads=threads,
    )  # fmt: skip
    assert out.equal(x)


@pytest.mark.parametrize("name", STORES)
def test_stores_to_global_memory(name):
    (count, size), threads = layout(name), 64
    x, out = numbers(threads * count * size), torch.zeros(threads * count * size, dtype=torch.uint8)
    vector = f".v{count}" if count > 1 else ""
    launch(
        f"""{PLACE} mad.wide.u32 %l20, %r30, {count * size}, %l0; mad.wide.u32 %l21, %r30, {count * size}, %l1;
        add.s64 %l21, %l21, 64;
        ld.global{vector}.b{8 * size} {registers(count, size)}, [%l20];
        {name} [%l21+-64], {registers(count, size)};""",
        x, out, threads=threads,
    )  # fmt: skip
    assert out.equal(x)


@pytest.mark.parametrize("space", ["shared", "shared::cta"])  # a block's own memory; Triton 3.8 and 3.9 differ in it
@pytest.mark.parametrize(("store", "load"), SHARED, ids=" ".join)
def test_shared_memory(store, load, space):
    """Each thread reads what the thread 32 away from it has written, or a part of that, or several."""
    store, load = store.replace("shared", space), load.replace("shared", space)
    (count, size), (load_count, load_size), threads = layout(store), layout(load), 64
    total = threads * count * size
    readers = min(threads, total // (load_count * load_size))
    x, out = numbers(total), torch.zeros(readers * load_count * load_size, dtype=torch.uint8)
    vectors = [f".v{n}" if n > 1 else "" for n in (count, load_count)]
    launch(
        f"""{PLACE} mad.wide.u32 %l20, %r30, {count * size}, %l0; mov.b32 %r28, global_smem;
        mad.lo.s32 %r29, %r30, {count * size}, %r28;
        ld.global{vectors[0]}.b{8 * size} {registers(count, size)}, [%l20];
        {store} [%r29], {registers(count, size)};
        bar.sync 0;
        setp.ge.u32 %p0, %r30, {readers};
        @%p0 ret;
        xor.b32 %r29, %r30, {readers // 2};
        mad.lo.s32 %r29, %r29, {load_count * load_size}, %r28;
        {load} {registers(load_count, load_size, 8)}, [%r29];
        mad.wide.u32 %l20, %r30, {load_count * load_size}, %l1;
        st.global{vectors[1]}.b{8 * load_size} [%l20], {registers(load_count, load_size, 8)};""",
        x, out, threads=threads, shared=total,
    )  # fmt: skip
    pieces = x[: out.numel()].view(readers, -1)
    assert out.view(readers, -1).equal(pieces[np.arange(readers) ^ readers // 2])


def test_parameters_are_read_as_the_bits_that_an_instruction_names():
    """The lower half of an address, that with its sign, all of it."""
    x, out = torch.zeros(4), torch.zeros(5, dtype=torch.int64)
    body = """
        ld.param.b32 %r0, [kernel_param_0];
        ld.param.s32 %l8, [kernel_param_0];
        ld.param.u64 %l9, [kernel_param_0];
        cvt.u64.u32 %l10, %r0;
        ld.param.u32 %r1, [kernel_param_0]; cvt.u64.u32 %l11, %r1;
        ld.param.f32 %r2, [kernel_param_0]; cvt.u64.u32 %l12, %r2;
        st.global.b64 [%l1], %l10; st.global.b64 [%l1 + 8], %l8; st.global.b64 [%l1 + 16], %l9;
        st.global.b64 [%l1 + 24], %l11; st.global.b64 [%l1 + 32], %l12;
    """
    launch(body, x, out)
    lower = out[2] & 0xFFFFFFFF
    assert out.tolist() == [lower, (lower ^ 0x80000000) - 0x80000000, out[2], lower, lower]


LOCAL = ".local .align 8 .b8 __local_depot0[32]; .reg .b32 %SPL; mov.b32 %SPL, __local_depot0;"


def test_local_memory_is_each_threads_own():
    """A thread reads what it has written itself, also at an address that its 32 bits come round to."""
    out = torch.zeros(64, 4, dtype=torch.int32)
    body = f"""{LOCAL} {PLACE} mad.wide.u32 %l20, %r30, 16, %l0; and.b32 %r0, %r30, 3;
        mad.lo.s32 %r1, %r0, 8, %SPL; add.s32 %r2, %r30, 1000;
        st.local.v2.b32 [%r1], {{%r30, %r2}};
        setp.lt.u32 %p0, %r30, 40; @%p0 st.local.b32 [%r1+4], 7;
        sub.s32 %r3, %r1, 32;
        ld.local.b32 %r4, [%r1]; ld.local.u32 %r5, [%r3+36];
        mov.b64 %l21, __local_depot0; ld.local.b64 %l22, [%l21]; mov.b64 {{%r6, %r7}}, %l22;
        st.global.v4.b32 [%l20], {{%r4, %r5, %r6, %r7}};"""
    launch(body, out, threads=32, blocks=1)
    launch(body, out, threads=64)
    thread = torch.arange(64)
    assert out[:, 0].equal(thread.int())
    assert out[:, 1].equal(torch.where(thread < 40, 7, thread + 1000).int())
    assert out[thread % 4 == 0, 2].equal(thread[::4].int())  # nobody else has written there
    assert out[thread % 4 != 0, 2].eq(-1).all()


@pytest.mark.parametrize("address", [32, 28, -8, 4])
def test_local_memory_is_watched(address):
    found = address % 2**32 if address < 0 else address
    with pytest.raises(EmulationError, match=rf"thread 0: reads 8 bytes at byte -?{abs(address)} of its local memory"):
        launch(f"{LOCAL} add.s32 %r0, %SPL, {address}; ld.local.b64 %l10, [%r0];")
    with pytest.raises(EmulationError, match="writes 8 bytes at byte"):
        launch(f"{LOCAL} add.s32 %r0, %SPL, {found}; st.local.b64 [%r0], %l10;")


def test_a_kernels_own_table_is_read():
    out = torch.zeros(32, dtype=torch.int32)
    body = f"""{PLACE} .global .align 4 .b8 table[12] = {{1, 0, 0, 0, 2, 1, 0, 0, 3, 0, 0, 255}}; mov.b64 %l9, table;
        rem.u32 %r0, %r30, 3; mad.wide.u32 %l10, %r0, 4, %l9; ld.global.nc.b32 %r1, [%l10];
        mad.wide.u32 %l11, %r30, 4, %l0; st.global.b32 [%l11], %r1;"""
    launch(body, out)
    assert out.tolist() == ([1, 258, 3 - 2**24] * 11)[:32]
    with pytest.raises(
        EmulationError, match=r"reads 4 bytes outside the tensors: 0 bytes behind the end of table \(12"
    ):
        launch(body.replace("rem.u32 %r0, %r30, 3", "mov.b32 %r0, 3"), out)


# Matrices in shared memory


MATRICES = [
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b16", "stmatrix.sync.aligned.m8n8.x1.shared.b16"),
    ("ldmatrix.sync.aligned.m8n8.x2.shared.b16", "stmatrix.sync.aligned.m8n8.x2.shared.b16"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "stmatrix.sync.aligned.m8n8.x4.shared.b16"),
    ("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16", "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16"),
    ("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16", "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16"),
    ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"),
]


@pytest.mark.parametrize(("load", "store"), MATRICES)
def test_matrices_of_16_bit_numbers(load, store):
    """Thread 8 * i + j names row j of matrix i; thread t gets elements (t / 4, 2 * (t % 4) + {0, 1}) of each."""
    count, trans = int(load[load.index(".x") + 2]), ".trans" in load
    matrices = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8) * 7 + 3
    expected = np.zeros((32, count, 2), np.uint16)
    for lane in range(32):
        for matrix in range(count):
            m = matrices[matrix].T if trans else matrices[matrix]
            expected[lane, matrix] = m[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
    x = torch.from_numpy(matrices.view(np.uint8).reshape(-1))
    out = torch.zeros(32 * count * 4, dtype=torch.uint8)
    held = "{" + ", ".join(f"%r{i}" for i in range(count)) + "}"
    stores = "\n".join(f"st.global.b32 [%l21 + {4 * i}], %r{i};" for i in range(count))
    rows = "mov.b32 %r28, global_smem; mad.lo.s32 %r29, %r30, 16, %r28;"
    launch(
        f"""{PLACE} {rows} mad.wide.u32 %l20, %r30, 16, %l0; mad.wide.u32 %l21, %r30, {4 * count}, %l1;
        ld.global.v4.b32 {{%r8, %r9, %r10, %r11}}, [%l20];
        st.shared.v4.b32 [%r29], {{%r8, %r9, %r10, %r11}};
        bar.sync 0;
        {load} {held}, [%r29];
        {stores}""",
        x, out, shared=512,
    )  # fmt: skip
    np.testing.assert_array_equal(out.numpy().view(np.uint16).reshape(32, count, 2), expected)

    back = torch.zeros(512, dtype=torch.uint8)
    loads = "\n".join(f"ld.global.b32 %r{i}, [%l20 + {4 * i}];" for i in range(count))
    launch(
        f"""{PLACE} {rows} mad.wide.u32 %l20, %r30, {4 * count}, %l0; mad.wide.u32 %l21, %r30, 16, %l1;
        {loads}
        st.shared.v4.b32 [%r29], {{0, 0, 0, 0}};
        bar.sync 0;
        {store} [%r29], {held};
        bar.sync 0;
        ld.shared.v4.b32 {{%r8, %r9, %r10, %r11}}, [%r29];
        st.global.v4.b32 [%l21], {{%r8, %r9, %r10, %r11}};""",
        out, back, shared=512,
    )  # fmt: skip
    found = back.numpy().view(np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(found[:count], matrices[:count])
    assert not found[count:].any()


# Asynchronous copies


@pytest.mark.parametrize(
    ("name", "width"),
    [("cp.async.ca.shared.global", width) for width in (4, 8, 16)] + [("cp.async.cg.shared.global", 16)],
)
def test_asynchronous_copies(name, width):
    """A smaller size, or none, leaves zeros behind what is copied."""
    x, out = numbers(32 * width), torch.zeros(32 * width, dtype=torch.uint8)
    body = f"""{PLACE} mad.wide.u32 %l20, %r30, {width}, %l0; mad.wide.u32 %l21, %r30, {width}, %l1;
        mov.b32 %r28, global_smem; mad.lo.s32 %r29, %r30, {width}, %r28;
        setp.lt.u32 %p0, %r30, 20; selp.b32 %r27, {width}, 0, %p0;
        setp.eq.u32 %p1, %r30, 5; selp.b32 %r27, 2, %r27, %p1;
        setp.ne.u32 %p2, %r30, 9;
        st.shared.b32 [%r29], 0;
        bar.sync 0;
        @%p2 {name} [ %r29 + 0 ], [ %l20 + 0 ], 0x{width:x}, %r27;
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.sync 0;
        ld.shared.b32 %r0, [%r29];
        st.global.b32 [%l21], %r0;"""
    launch(body, x, out, shared=32 * width)
    expected = torch.zeros(32, 4, dtype=torch.uint8)
    expected[:20] = x.view(32, width)[:20, :4]
    expected[5, 2:] = 0
    expected[9] = 0
    assert out.view(32, width)[:, :4].equal(expected)
    whole = body.replace(", %r27;", ";")
    launch(whole, x, out, shared=32 * width)
    expected = x.view(32, width)[:, :4].clone()
    expected[9] = 0
    assert out.view(32, width)[:, :4].equal(expected)
    for wait in ("", "cp.async.wait_group 1;"):
        with pytest.raises(EmulationError, match="before the asynchronous copy to it was waited for"):
            launch(whole.replace("cp.async.wait_group 0;", wait), x, out, shared=32 * width)
    launch(whole.replace("cp.async.wait_group 0;", "cp.async.wait_all;"), x, out, shared=32 * width)


def test_a_copy_of_more_than_its_width_is_refused():
    x = torch.zeros(64)
    body = f"""{PLACE} mad.wide.u32 %l20, %r30, 4, %l0; mov.b32 %r28, global_smem; mad.lo.s32 %r29, %r30, 4, %r28;
        add.s32 %r27, %r30, -3; max.s32 %r27, %r27, 0; cp.async.ca.shared.global [%r29], [%l20], 4, %r27;"""
    with pytest.raises(EmulationError, match="thread 8: copies 5 bytes where 4 are the most"):
        launch(body, x, shared=128)


# Atomic instructions

ATOMICS = {
    "atom.global.gpu.acq_rel.add.f32": np.float32, "atom.global.gpu.relaxed.add.f64": np.float64,
    "atom.global.gpu.acq_rel.add.u32": np.uint32, "atom.global.gpu.acq_rel.add.u64": np.uint64,
    "atom.global.gpu.acq_rel.min.s32": np.int32, "atom.global.gpu.acq_rel.max.s32": np.int32,
    "atom.global.gpu.acq_rel.max.u32": np.uint32, "atom.global.gpu.acq_rel.and.b32": np.uint32,
    "atom.global.gpu.acq_rel.or.b32": np.uint32, "atom.global.gpu.acq_rel.xor.b32": np.uint32,
    "atom.global.gpu.acq_rel.add.noftz.f16": np.float16,
}  # fmt: skip


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_let_threads_take_turns(name):
    """40 of 64 threads change two words; each gets the word as it was before its own turn."""
    dtype = np.dtype(ATOMICS[name])
    size, base = dtype.itemsize, next(p for p in name.split(".") if p in ("add", "min", "max", "and", "or", "xor"))
    x = np.random.default_rng(0).integers(1, 30, 64).astype(dtype)
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    function = function.get(base, np.bitwise_xor)
    words, before = np.array([5, 9], dtype), []
    expected = words.copy()
    for thread in range(40):
        before.append(expected[thread % 2])
        expected[thread % 2] = function(expected[thread % 2], x[thread])
    memory, out = torch.from_numpy(words.view(np.uint8)), torch.zeros(64 * size, dtype=torch.uint8)
    register = {2: "%h0", 4: "%r0", 8: "%l10"}[size]
    body = f"""{PLACE} mad.wide.u32 %l20, %r30, {size}, %l0; mad.wide.u32 %l21, %r30, {size}, %l2;
        and.b32 %r29, %r30, 1; mad.wide.u32 %l22, %r29, {size}, %l1;
        setp.lt.u32 %p0, %r30, 40;
        ld.global.b{8 * size} {register}, [%l20];
        @%p0 ATOM
        @%p0 st.global.b{8 * size} [%l21], {register};"""
    given = torch.from_numpy(x.view(np.uint8))
    launch(body.replace("ATOM", f"{name} {register}, [%l22], {register};"), given, memory, out, threads=64)
    np.testing.assert_array_equal(memory.numpy().view(dtype), expected)
    np.testing.assert_array_equal(out.numpy().view(dtype)[:40], before)
    assert not out.numpy().view(dtype)[40:].any()
    memory.copy_(torch.from_numpy(np.array([5, 9], dtype).view(np.uint8)))
    launch(body.replace("ATOM", f"{name.replace('atom', 'red')} [%l22], {register};"), given, memory, out, threads=64)
    np.testing.assert_array_equal(memory.numpy().view(dtype), expected)


def test_atomics_of_bfloat16_and_of_pairs():
    names = {
        "atom.global.gpu.acq_rel.add.noftz.bf16": torch.bfloat16,
        "red.global.gpu.acq_rel.add.noftz.bf16x2": torch.bfloat16,
        "red.global.gpu.acq_rel.add.noftz.f16x2": torch.float16,
    }
    for name, dtype in names.items():
        memory, addend = torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([0.5, 0.25], dtype=dtype)
        size, value = (4, "%r0") if "x2" in name else (2, "%h0")
        given = f"{value}, [%l1], {value}" if name.startswith("atom") else f"[%l1], {value}"
        launch(f"ld.global.b{8 * size} {value}, [%l0]; {name} {given};", addend, memory)
        assert memory.tolist() == [1 + 32 * 0.5, 2 + (32 * 0.25 if "x2" in name else 0)]


def test_atomics_on_neighbours():
    """Of sm_90: two numbers of each thread, and what they were before."""
    memory, out = torch.arange(8.0), torch.zeros(64)
    body = f"""{PLACE} and.b32 %r29, %r30, 3; mad.wide.u32 %l20, %r29, 8, %l0; mad.wide.u32 %l21, %r30, 8, %l1;
        mov.b32 %r0, 0f3F800000; mov.b32 %r1, 0f40000000;
        atom.global.gpu.acq_rel.add.v2.f32 {{%r2, %r3}}, [ %l20 + 0 ], {{%r0, %r1}};
        st.global.v2.b32 [%l21], {{%r2, %r3}};"""
    launch(body, memory, out)
    assert memory.tolist() == [n + 8 * (1 + n % 2) for n in range(8)]
    turn = torch.arange(32) // 4
    first = torch.arange(32) % 4 * 2
    assert out.view(32, 2).equal(torch.stack([first + turn, first + 1 + 2 * turn], 1).float())


def test_a_lock_is_taken_by_one_thread_at_a_time():
    for cas in ("atom.global.acq_rel.gpu.cas.b32", "atom.relaxed.gpu.global.cas.b32"):
        lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        body = f"""
            mov.u32 %r0, %tid.x; setp.ne.b32 %p0, %r0, 0; @%p0 ret;
        $L__wait:
            {cas} %r1, [%l0], 0, 1;
            setp.ne.b32 %p1, %r1, 0;
            @%p1 bra $L__wait;
            ld.global.b32 %r2, [%l1]; add.s32 %r2, %r2, 1; st.global.b32 [%l1], %r2;
            atom.global.gpu.acq_rel.exch.b32 %r3, [%l0], 0;
        """
        launch(body, lock, count, blocks=20)
        assert (lock.item(), count.item()) == (0, 20)


def test_hints_to_the_cache_change_nothing():
    x, out = torch.arange(32.0), torch.zeros(32)
    body = f"""{PLACE} mad.wide.u32 %l20, %r30, 4, %l0; mad.wide.u32 %l21, %r30, 4, %l1;
        createpolicy.fractional.L2::evict_last.b64 %l22, 1.0;
        ld.global.L1::evict_last.L2::cache_hint.b32 {{ %r0 }}, [ %l20 + 0 ], %l22;
        st.global.L1::evict_first.L2::cache_hint.b32 [ %l21 + 0 ], {{ %r0 }}, %l22;"""
    launch(body, x, out)
    assert out.equal(x)
