"""Launches whose arguments, grid or memory are out of the ordinary; test_driver.py calls these."""

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from kernels.emulated import emulated_gpu
from kernels.emulated.driver import counting, only_blocks
from kernels.emulated.ptx import EmulationError


@triton.jit
def write_all(out, i32, nothing, i64, one, f32, truth, last):
    tl.store(out, i32.to(tl.float64))
    tl.store(out + 1, i64.to(tl.float64))
    tl.store(out + 2, tl.full((), one, tl.float64))
    tl.store(out + 3, f32.to(tl.float64))
    if truth:
        tl.store(out + 4, 4.0)
    if nothing is None and last is None:
        tl.store(out + 5, 5.0)


@triton.jit
def number_blocks(out):
    tl.store(out + tl.program_id(0) + tl.program_id(1), 1.0)


@triton.jit
def product_of_many_tiles(a, b, c, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Stages of two tiles of 32 KB."""
    i, total = tl.arange(0, SIZE), tl.zeros((SIZE, SIZE), tl.float32)
    for start in tl.range(0, 4 * SIZE, SIZE, num_stages=STAGES):
        left = tl.load(a + i[:, None] * 4 * SIZE + start + i[None, :])
        total += tl.dot(left, tl.load(b + (start + i)[:, None] * SIZE + i[None, :]))
    tl.store(c + i[:, None] * SIZE + i[None, :], total)


def written(*arguments):
    out = torch.zeros(6, dtype=torch.float64)
    write_all[(1,)](out, *arguments)
    return out.tolist()


def properties():
    """What Triton's launchers and ours are told of the GPU."""
    device = driver.active.get_current_device()
    told = driver.active.utils.get_device_properties(device)
    target = driver.active.get_current_target()
    names = "multiprocessor_count", "max_shared_mem", "warpSize"
    return [told[name] for name in names], emulated_gpu().multi_processor_count, (target.arch, target.warp_size)


def of_a_grid(*grid):
    """What is written to four numbers, or what is refused."""
    out = torch.zeros(4)
    try:
        number_blocks[grid](out)
    except EmulationError as error:
        return str(error)
    return out.tolist()


def elsewhere():
    try:
        number_blocks[(1,)](torch.zeros(4, device="meta"))
    except EmulationError as error:
        return str(error)


def too_much_shared_memory():
    a, b, c = torch.zeros(128, 512).half(), torch.zeros(512, 128).half(), torch.zeros(128, 128)
    try:
        product_of_many_tiles[(1,)](a, b, c, SIZE=128, STAGES=4, num_warps=8)
    except OutOfResources as error:
        return str(error)


def states_after_errors():
    """Launches that are counted, and blocks that run, after a context that ended well and one that didn't."""
    found = []
    for fails in (False, True):
        for context in (counting(), only_blocks(lambda blocks: [0])):
            try:
                with context as counted:
                    number_blocks[(4,)](torch.zeros(4))
                    if fails:
                        raise KeyError
            except KeyError:
                pass
            out = torch.zeros(4)
            number_blocks[(4,)](out)
            found.append((out.tolist(), len(counted or [])))
    return found
