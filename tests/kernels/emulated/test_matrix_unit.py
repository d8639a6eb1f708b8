"""mma, with the elements of A, B and C where the manual's formulas put them."""

import re

import numpy as np
import pytest
import torch

from kernels.emulated.ptx import EmulationError
from tests.kernels.emulated.by_hand import launch

HALF = {
    "f16": lambda x: x.astype(np.float16).view(np.uint16),
    "bf16": lambda x: torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16),
}


def place_in_a(i, lane, bits):
    """Row and column of element i of a thread: the manual's tables for 8, 16, 32 and 64 bits."""
    group, thread = lane >> 2, lane % 4
    if bits == 8:
        return (group if i < 4 or 8 <= i < 12 else group + 8), thread * 4 + (i & 3) + (0 if i < 8 else 16)
    if bits == 16:
        return group + 8 * (i // 2 % 2), thread * 2 + (i & 1) + 8 * (i >= 4)
    if bits == 32:
        return group + 8 * (i % 2), thread + 4 * (i >= 2)
    return group, thread


def place_in_b(i, lane, bits):
    group, thread = lane >> 2, lane % 4
    if bits == 8:
        return thread * 4 + (i & 3) + (0 if i < 4 else 16), group
    return (thread * 2 + (i & 1) + 8 * (i >= 2) if bits == 16 else thread + 4 * i), group


def place_in_c(i, lane):
    return (lane >> 2) + 8 * (i >= 2), lane % 4 * 2 + (i & 1)


@pytest.mark.parametrize("name", [
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32",
])  # fmt: skip
def test_a_product_of_matrices(name):
    """In two warps."""
    shape, kind = name.split(".")[3], name.split(".")[-2]
    k = int(shape.rpartition("k")[2])
    bits, generator = 16 if kind != "tf32" else 32, np.random.default_rng(0)
    shapes = (2, 16, k), (2, k, 8), (2, 16, 8)
    matrices = [generator.integers(-8, 9, shape).astype(np.float32) / 4 for shape in shapes]
    registers = [[], [], []]
    for warp in range(2):
        for lane in range(32):
            a, b, c = (m[warp] for m in matrices)
            mine = [a[place_in_a(i, lane, bits)] for i in range(16 * k // 32)]
            mine_b = [b[place_in_b(i, lane, bits)] for i in range(8 * k // 32)]
            registers[0].append(mine), registers[1].append(mine_b)
            registers[2].append([c[place_in_c(i, lane)] for i in range(4)])
    given = [np.array(each, np.float32) for each in registers]
    if bits == 16:
        given[:2] = [HALF[kind](each) for each in given[:2]]
    else:  # the unit does not look at the lower bits
        given[:2] = [(each.view(np.uint32) | 0x1ABC).view(np.float32) for each in given[:2]]
    n_a, n_b = (each.shape[1] * each.itemsize // 4 for each in given[:2])
    tensors = [torch.from_numpy(each.view(np.uint8)) for each in given]
    out = torch.zeros(64, 4)

    def held(base, n):
        return "{ " + ", ".join(f"%r{base + i}" for i in range(n)) + " }"

    def load(base, n, at):
        loads = (f"ld.global.b32 %r{base + i}, [%l{20 + at} + {4 * i}];" for i in range(n))
        return f"mad.wide.u32 %l{20 + at}, %r30, {4 * n}, %l{at};\n" + "\n".join(loads)

    body = f"""
        mov.u32 %r30, %tid.x;
        {load(0, n_a, 0)}
        {load(4, n_b, 1)}
        {load(8, 4, 2)}
        {name} {held(8, 4)}, {held(0, n_a)}, {held(4, n_b)}, {held(8, 4)};
        mad.wide.u32 %l29, %r30, 16, %l3;
        st.global.v4.b32 [%l29], {held(8, 4)};
    """
    launch(body, *tensors, out, threads=64)
    expected = matrices[0] @ matrices[1] + matrices[2]
    for thread in range(64):
        places = [place_in_c(i, thread % 32) for i in range(4)]
        assert out[thread].tolist() == [expected[thread // 32][place] for place in places]


OTHERS = {  # the types of A's and B's elements, and of C's; registers of A, B and C
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16": (torch.float16, torch.float16, 4, 2, 2),
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": (torch.int8, torch.int32, 4, 2, 4),
    "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32": (torch.int8, torch.int32, 4, 2, 4),
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32": (torch.uint8, torch.int32, 4, 2, 4),
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32": (torch.float8_e4m3fn, torch.float32, 4, 2, 4),
    "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32": (torch.float8_e5m2, torch.float32, 4, 2, 4),
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64": (torch.float64, torch.float64, 1, 1, 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_products_of_other_types(name):
    """Of whole numbers, so that nothing is rounded but s32 at its limits."""
    dtype, wide, *counts = OTHERS[name]
    m, k = (int(part) for part in re.match(r"m(\d+)n8k(\d+)", name.split(".")[3]).groups())
    generator = torch.Generator().manual_seed(0)
    low = 0 if dtype is torch.uint8 else -7
    a, b, c = (torch.randint(low, 8, shape, generator=generator) for shape in ((m, k), (k, 8), (m, 8)))
    if wide is torch.int32:
        a[0], b[:, 0], c[0, 0] = 100, 100, 2**31 - 7  # passes the largest s32
    expected = a @ b + c
    if "satfinite" in name:
        expected = expected.clamp(max=2**31 - 1)
    bits = 8 * dtype.itemsize
    places = [
        [[place(i, lane, bits) for i in range(n * held // bits)] for lane in range(32)]
        for place, n, held in ((place_in_a, counts[0], max(32, bits)), (place_in_b, counts[1], max(32, bits)))
    ]
    places.append([[place_in_c(i, lane) for i in range(m // 4)] for lane in range(32)])
    given = [
        torch.stack([torch.stack([matrix[place] for place in lane]) for lane in whose]).to(kind).view(torch.uint8)
        for matrix, whose, kind in zip((a, b, c), places, (dtype, dtype, wide), strict=True)
    ]
    size = max(4, dtype.itemsize)
    letter, first = ("l", 10) if size == 8 else ("r", 0)
    held = [[f"%{letter}{first + 4 * at + i}" for i in range(n)] for at, n in enumerate(counts)]
    body = "mov.u32 %r30, %tid.x;"
    for at, registers in enumerate(held):
        body += f"mad.wide.u32 %l29, %r30, {size * len(registers)}, %l{at};"
        body += "".join(f"ld.global.b{8 * size} {each}, [%l29 + {size * i}];" for i, each in enumerate(registers))
    sets = ["{" + ", ".join(registers) + "}" for registers in held]
    body += f"{name} {sets[2]}, {sets[0]}, {sets[1]}, {sets[2]}; mad.wide.u32 %l29, %r30, {size * counts[2]}, %l3;"
    body += "".join(f"st.global.b{8 * size} [%l29 + {size * i}], {each};" for i, each in enumerate(held[2]))
    out = torch.zeros(32, m // 4, dtype=wide)
    launch(body, *given, out)
    for lane in range(32):
        assert out[lane].tolist() == [expected[place].to(wide).item() for place in places[2][lane]]


@pytest.mark.parametrize(
    "name",
    [
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32",
        "mma.sync.aligned.m16n8k32.row.col.satfinite.f32.e4m3.e4m3.f32",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
        "tcgen05.mma.cta_group::1.kind::f16",
    ],
)
def test_other_products_are_refused_by_name(name):
    registers = "{%r0, %r1, %r2, %r3}"
    with pytest.raises(EmulationError, match=rf"kernel at an unknown line \({name}\): the emulated GPU does not know"):
        launch(f"{name} {registers}, {registers}, {{%r4, %r5}}, {registers};")
