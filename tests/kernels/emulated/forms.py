"""The names of all instructions in our kernels and in the tutorials, as compiled for a GPU."""

import importlib
from unittest import mock

import torch
from triton import JITFunction

import kernels
from kernels.emulated import driver, ptx
from tests.kernels.emulated import tutorials

NARROW = torch.bfloat16
CASES = [  # dtypes of x, the residual and the weight, and the width of a row
    (NARROW, NARROW, NARROW, 48), (NARROW, torch.float32, torch.float32, 1000), (NARROW, NARROW, NARROW, 4097),
    (torch.float16, torch.float16, torch.float16, 1000), (torch.float32, torch.float32, torch.float32, 256),
    (torch.float32, torch.float32, torch.float32, 40000), (torch.float64, torch.float64, torch.float64, 48),
]  # fmt: skip


def read_anew(module):
    """Have the next launches of its kernels read their PTX, from Triton's cache of files."""
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, JITFunction):
            value.device_caches.clear()


def names():
    """Of our kernels, and of the tutorials."""
    found = {"ours": set(), "tutorials": set()}
    whose = "ours"

    def parse(text):
        program = ptx.parse(text)
        found[whose] |= {instruction.name for instruction in program.instructions}
        return program

    with mock.patch.object(driver, "parse", parse):
        read_anew("kernels.triton_rms_norm")
        read_anew("tests.kernels.emulated.tutorials")
        backend = kernels.load_backend("triton", torch.device("cpu"))
        for x, residual, weight, width in CASES:
            leaves = [
                torch.ones(shape, dtype=dtype, requires_grad=True)
                for dtype, shape in ((x, (5, width)), (residual, (5, width)), (weight, width))
            ]
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
