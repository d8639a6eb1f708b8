"""What is particular to the Triton kernels; their values are the business of test_norm_contract.py."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux alone")

from kernels import triton_rms_norm
from tests.test_norm_contract import EPS, rows, weights


@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 17), (0, 48), (48,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_forward_operator_passes_opcheck(shape, dtype):
    x, weight = rows(*shape, dtype=dtype).requires_grad_(), weights(shape[-1], dtype).requires_grad_()
    results = torch.library.opcheck(torch.ops.rmsllama.rms_norm.default, (x, weight, EPS))
    assert set(results.values()) == {"SUCCESS"}


def test_backward_operator_passes_opcheck():
    x, weight, dy = rows(5, 48), weights(48), rows(5, 48, seed=2)
    _, rstd = torch.ops.rmsllama.rms_norm(x, weight, EPS)
    results = torch.library.opcheck(torch.ops.rmsllama.rms_norm_backward.default, (dy, x, weight, rstd))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("tile_rows", [1, 2, 8])
def test_tiles_of_any_height_give_the_same(monkeypatch, tile_rows):
    """On a GPU a tile has few rows, and a program takes several tiles."""
    x, weight, dy = rows(13, 48), weights(48), rows(13, 48, seed=2)

    def run():
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = triton_rms_norm.rms_norm(*leaves, EPS)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    expected = run()
    monkeypatch.setattr(triton_rms_norm, "_tile", lambda n_rows, width: (tile_rows, 64, 1))
    for got, one_tile in zip(run(), expected, strict=True):
        torch.testing.assert_close(got, one_tile, rtol=1e-5, atol=1e-6)  # only dweight is summed in another order


def test_a_triton_imported_too_early_is_named():
    """An optimiser or torch.compile may import it before the kernels can ask for the interpreter."""
    code = "import os; os.environ.pop('TRITON_INTERPRET', None); import triton.language; import kernels.triton_rms_norm"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if torch.cuda.is_available():
        assert result.returncode == 0
    else:
        assert "InputError: --norm triton: triton was imported before" in result.stderr
