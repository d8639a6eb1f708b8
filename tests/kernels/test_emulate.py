"""What emulate refuses, and that the contract's tests run on compiled kernels, here on a CPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

from kernels import InputError
from kernels.emulated import emulate, emulated_gpu
from tests.helpers import ROOT, needs_triton


def refused(name, reason):
    before = os.environ.get("TRITON_INTERPRET")
    with pytest.raises(InputError, match=reason) as caught:
        emulate(name)
    assert str(caught.value).startswith(f"--emulate {name}: ")
    assert "\n" not in str(caught.value)
    assert os.environ.get("TRITON_INTERPRET") == before  # or what is decorated later would be of another kind


@pytest.mark.parametrize("name", ["sm_70", "H100", "gfx942", ""])
def test_a_gpu_that_is_not_emulated_is_refused(name):
    refused(name, "expected one of sm_80, sm_90, sm_100, sm_120")


def test_triton_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("kernels.emulated.gpus._chosen", [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("sm_90", r"triton is not installed; pip install triton \(Linux alone has it\)")


def test_a_second_gpu_is_refused(monkeypatch):
    """Triton would go on with the kernels that it has compiled for the first one."""
    monkeypatch.setattr("kernels.emulated.gpus._chosen", ["sm_90"])
    refused("sm_80", "this process has triton, compiled for sm_90, on an emulated one; emulate one GPU in a process")


@needs_triton
@pytest.mark.skipif(emulated_gpu() is not None, reason="this process emulates")
def test_triton_in_its_interpreter_is_named():
    import kernels.triton_rms_norm  # noqa: F401  (imports Triton)

    refused("sm_90", "Triton already runs in its interpreter; emulate before it is imported")


CHECKS = [
    "test_rms_norm[triton-half_precision_rounds_in_the_order_of_the_form-torch.bfloat16]",
    "test_rms_norm[triton-gradients_are_those_of_the_formula-torch.bfloat16-(600, 40)]",
    "test_add_rms_norm[triton-add_rms_norm_is_the_two_steps-torch.bfloat16-torch.bfloat16-(6, 48)]",
]


@needs_triton
def test_the_contract_on_compiled_kernels():
    """A few of its checks, as they are compiled for an H100; pytest tests/kernels --emulate sm_90 runs all of them."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--emulate", "sm_90"]
    command += [f"tests/kernels/test_norm_contract.py::{check}" for check in CHECKS]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nnorm triton: triton, compiled for sm_90, on an emulated one\n" in done.stdout
    assert "= 3 passed in " in done.stdout  # none is skipped
