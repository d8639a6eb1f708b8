"""What the other process of conftest.py does: it compiles with Triton, which may be in its interpreter in pytest's."""

import importlib
from contextlib import contextmanager
from unittest import mock

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


@contextmanager
def parsed_by(parse, *modules):
    """Within it, kernels of the modules are read anew, from Triton's cache of files, and `parse` gets their text."""
    from kernels.emulated import driver

    with mock.patch.object(driver, "parse", parse):
        forget(*modules)
        try:
            yield
        finally:
            forget(*modules)


def forget(*modules):
    """Let the kernels of the modules be read anew at their next launch."""
    from triton import JITFunction

    for value in (value for module in modules for value in vars(module).values()):
        if isinstance(value, JITFunction):
            vars(value)["device_caches" if hasattr(value, "device_caches") else "cache"].clear()  # Triton 3.2: cache
