"""A process in which Triton compiles for emulated GPUs."""

from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context

import pytest

from scripts.codegen.targets import TARGETS
from tests.kernels.emulated import elsewhere


@pytest.fixture(scope="session")
def compiled():
    """compiled("sm_90", "module:function", ...) calls a function of this folder for a GPU, in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), elsewhere.prepare) as process:

        def call(gpu, path, *args):
            ours, first = (tuple(map(int, version("triton").split(".")[:2])), TARGETS[gpu].since)
            if ours < first:
                pytest.skip(f"Triton {version('triton')} does not compile for {gpu}")
            return process.submit(elsewhere.call, gpu, f"tests.kernels.emulated.{path}", *args).result()

        yield call
