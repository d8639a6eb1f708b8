"""The names of all instructions in our kernels and in the tutorials, as compiled for a GPU."""

import torch

import kernels
from kernels import triton_rms_norm
from kernels.emulated import ptx
from tests.kernels.emulated import tutorials
from tests.kernels.emulated.elsewhere import parsed_by

NARROW = torch.bfloat16
CASES = [  # dtypes of x, the residual and the weight, and the width of a row
    (NARROW, NARROW, NARROW, 48), (NARROW, torch.float32, torch.float32, 1000), (NARROW, NARROW, NARROW, 4097),
    (torch.float16, torch.float16, torch.float16, 1000), (torch.float32, torch.float32, torch.float32, 256),
    (torch.float32, torch.float32, torch.float32, 40000), (torch.float64, torch.float64, torch.float64, 48),
]  # fmt: skip


def names():
    """Of our kernels, and of the tutorials."""
    found = {"ours": set(), "tutorials": set()}
    whose = "ours"

    def parse(text):
        program = ptx.parse(text)
        found[whose] |= {instruction.name for instruction in program.instructions}
        return program

    with parsed_by(parse, triton_rms_norm, tutorials):
        backend = kernels.load_backend("triton", torch.device("cpu"))
        for x, residual, weight, width in CASES:
            shapes = (x, (5, width)), (residual, (5, width)), (weight, (width,))
            leaves = [torch.ones(shape, dtype=dtype, requires_grad=True) for dtype, shape in shapes]
            y, h = backend.add_rms_norm(*leaves, 1e-5)
            (y.sum() + h.sum()).backward()
        backend.rms_norm(leaves[0], leaves[2], 1e-5).sum().backward()
        whose = "tutorials"
        for dtype in (torch.float32, torch.float16):
            tutorials.add_is_torchs(dtype)
            tutorials.softmax_is_torchs(dtype)
            tutorials.matmul_is_torchs(dtype, 32)
        tutorials.layer_norm_is_torchs(torch.float16, 4)
        tutorials.layer_norm_is_torchs(torch.float32, 0)
        tutorials.dropout_drops_what_philox_says(0.3)
    return found
