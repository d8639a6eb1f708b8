"""Launches: arguments, grids, and what the GPU is said to be."""

from importlib.util import find_spec

import numpy as np
import pytest

from kernels.emulated.gpus import GPUS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux alone")

# Multiprocessors, and bytes of shared memory for a block: NVIDIA's data sheets, and tables of its programming guide.
KNOWN = {"sm_80": (108, 166912), "sm_90": (132, 232448), "sm_100": (148, 232448), "sm_120": (170, 101376)}


@pytest.mark.parametrize("gpu", GPUS)
def test_the_gpu_is_the_one_that_is_named(compiled, gpu):
    count, shared = KNOWN[gpu]
    assert compiled(gpu, "launched:properties") == ([count, shared, 32], count, (int(gpu[3:]), 32))


@pytest.mark.parametrize("gpu", ["sm_80", "sm_120"])
def test_shared_memory_is_that_of_the_gpu(compiled, gpu):
    assert f"shared memory, Required: 196608, Hardware limit: {KNOWN[gpu][1]}" in compiled(
        gpu, "launched:too_much_shared_memory"
    )


@pytest.mark.parametrize(
    ("i32", "i64", "f32", "truth"),
    [(5, 2**40, 0.1, True), (-(2**31), -(2**63), -1e30, False), (16, 2**32 - 16, np.inf, True), (0, -(2**33), 0, 1)],
)
def test_arguments_arrive(compiled, i32, i64, f32, truth):
    """A float as float32, a None or a 1 as a constant, in the middle and at the end."""
    found = compiled("sm_90", "launched:written", i32, None, i64, 1, float(f32), truth, None)
    assert found == [i32, i64, 1, np.float32(f32), 4 if truth else 0, 5]
    found = compiled("sm_90", "launched:written", i32, 7, i64, 1, float(f32), truth, 7)
    assert found == [i32, i64, 1, np.float32(f32), 4 if truth else 0, 0]


def test_grids(compiled):
    assert compiled("sm_90", "launched:of_a_grid", 3) == [1, 1, 1, 0]
    assert compiled("sm_90", "launched:of_a_grid", 0) == [0, 0, 0, 0]
    assert compiled("sm_90", "launched:of_a_grid", 9, 0) == [0, 0, 0, 0]  # the blocks would write beyond the end
    found = compiled("sm_90", "launched:of_a_grid", 1, 65536)
    assert found == (
        "number_blocks: a grid of 1 x 65536 x 1 blocks, where a GPU takes up to 2147483647 x 65535 x 65535; "
        "put the larger number first"
    )


def test_a_tensor_elsewhere_is_refused(compiled):
    expected = "argument out is on meta; the emulated GPU works on CPU tensors"
    assert compiled("sm_90", "launched:elsewhere") == expected


def test_counts_and_chosen_blocks_end_with_their_context(compiled):
    all_blocks = [1, 1, 1, 1]
    counted, chosen = (all_blocks, 1), (all_blocks, 0)
    assert compiled("sm_90", "launched:states_after_errors") == [counted, chosen] * 2
