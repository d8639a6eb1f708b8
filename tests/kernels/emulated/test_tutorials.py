"""Triton's own tutorials on every emulated GPU, against torch."""

from importlib.util import find_spec

import pytest
import torch

from kernels.emulated.gpus import GPUS
from kernels.emulated.ptx import EmulationError

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux alone")
every_gpu = pytest.mark.parametrize("gpu", GPUS)
MATRIX_UNITS = {"sm_90": r"wgmma\.fence\.sync\.aligned", "sm_100": r"tcgen05\.alloc\..*"}  # that are not emulated


@every_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vector_add(compiled, gpu, dtype):
    compiled(gpu, "tutorials:add_is_torchs", dtype)


@every_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_softmax(compiled, gpu, dtype):
    compiled(gpu, "tutorials:softmax_is_torchs", dtype)


@every_gpu
@pytest.mark.parametrize("locks", [0, 4], ids=["atomic sums", "locks"])
def test_layer_norm(compiled, gpu, locks):
    compiled(gpu, "tutorials:layer_norm_is_torchs", torch.float16 if locks else torch.float32, locks)


@every_gpu
def test_dropout(compiled, gpu):
    compiled(gpu, "tutorials:dropout_drops_what_philox_says", 0.3)


@every_gpu
def test_sines_of_large_numbers(compiled, gpu):
    compiled(gpu, "tutorials:sines_are_torchs")


@every_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_matrix_product(compiled, gpu, dtype):
    compiled(gpu, "tutorials:matmul_is_torchs", dtype, 32)


@every_gpu
def test_a_matrix_unit_that_is_not_emulated_is_refused_by_name(compiled, gpu):
    """Larger tiles run on wgmma and tcgen05 where there is one; elsewhere mma.sync does all."""
    if gpu not in MATRIX_UNITS:
        compiled(gpu, "tutorials:matmul_is_torchs", torch.float16, 64)
        return
    place = rf"_matmul at tutorials\.py:\d+:\d+ \({MATRIX_UNITS[gpu]}\)"
    with pytest.raises(EmulationError, match=f"^{place}: the emulated GPU does not know this instruction$"):
        compiled(gpu, "tutorials:matmul_is_torchs", torch.float16, 64)
