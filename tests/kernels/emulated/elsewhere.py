"""What the other process of conftest.py does: it compiles with Triton, which may be in its interpreter in pytest's."""

import importlib

import torch

from kernels.emulated import emulate, emulated_gpu, gpus


def prepare():
    torch.set_num_threads(1)


def call(gpu, path, *args):
    """module:function, which may import Triton, with an emulated GPU; another one than before is made in its place."""
    if emulated_gpu() is None:
        emulate(gpu)
    from triton.runtime import driver

    from kernels.emulated.driver import EmulatedDriver

    gpus.choose(gpu)
    driver.set_active(EmulatedDriver(gpu))
    module, function = path.split(":")
    return getattr(importlib.import_module(module), function)(*args)
