"""mma, with the elements of A, B and C where the manual's formulas put them."""

import numpy as np
import pytest
import torch

from kernels.emulated.ptx import EmulationError
from tests.kernels.emulated.by_hand import launch

HALF = {
    "f16": lambda x: x.astype(np.float16).view(np.uint16),
    "bf16": lambda x: torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16),
}


def place_in_a(i, lane, half, k):
    """Row and column of element i of a thread: two tables of the manual, for 16 and for 32 bits."""
    group, thread = lane >> 2, lane % 4
    if half:
        return group + 8 * (i // 2 % 2), thread * 2 + (i & 1) + 8 * (i >= 4)
    return group + 8 * (i % 2), thread + 4 * (i >= 2)


def place_in_b(i, lane, half, k):
    group, thread = lane >> 2, lane % 4
    return (thread * 2 + (i & 1) + 8 * (i >= 2) if half else thread + 4 * i), group


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
    half, generator = kind != "tf32", np.random.default_rng(0)
    shapes = (2, 16, k), (2, k, 8), (2, 16, 8)
    matrices = [generator.integers(-8, 9, shape).astype(np.float32) / 4 for shape in shapes]
    registers = [[], [], []]
    for warp in range(2):
        for lane in range(32):
            a, b, c = (m[warp] for m in matrices)
            mine = [a[place_in_a(i, lane, half, k)] for i in range(16 * k // 32)]
            mine_b = [b[place_in_b(i, lane, half, k)] for i in range(8 * k // 32)]
            registers[0].append(mine), registers[1].append(mine_b)
            registers[2].append([c[place_in_c(i, lane)] for i in range(4)])
    given = [np.array(each, np.float32) for each in registers]
    if half:
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


@pytest.mark.parametrize(
    "name",
    [
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
        "tcgen05.mma.cta_group::1.kind::f16",
    ],
)
def test_other_products_are_refused_by_name(name):
    registers = "{%r0, %r1, %r2, %r3}"
    with pytest.raises(EmulationError, match=rf"kernel at an unknown line \({name}\): the emulated GPU does not know"):
        launch(f"{name} {registers}, {registers}, {{%r4, %r5}}, {registers};")
