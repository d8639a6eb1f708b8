"""What is particular to the Triton kernels; their values are the business of test_norm_contract.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux alone")

from kernels import triton_rms_norm
from tests.test_norm_contract import EPS, rows, weights

ROOT = Path(__file__).parent.parent


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


@pytest.mark.parametrize(
    "weight", [torch.ones(47), torch.ones(1), torch.ones(2, 48)], ids=lambda w: str(tuple(w.shape))
)
def test_a_weight_of_another_shape_is_refused(weight):
    with pytest.raises(ValueError, match=r"expected \(..., D\), \(D,\)"):
        triton_rms_norm.rms_norm(rows(5, 48), weight, EPS)


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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if torch.cuda.is_available():
        assert result.returncode == 0
    else:
        assert "InputError: --norm triton: triton was imported before" in result.stderr


COMPILE_FOR_A_GPU = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import triton_rms_norm as kernels

def compiled(kernel, dtype, width, constants):
    rows, cols, warps = kernels._tile(4096, width)
    constants |= {"D": width, "ROWS": rows, "COLS": cols}
    signature = {name: "constexpr" if name in constants else "i32" if name.startswith("n_") else f"*{dtype}"
                 for name in kernel.arg_names}
    for name in ("rstd_ptr", "partial_ptr"):
        if name in signature:
            signature[name] = "*fp32"
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

assert not kernels.INTERPRETED
for dtype in ("fp32", "bf16", "fp16"):
    for width in (48, 256, 4096):
        for kernel, constants in ((kernels._forward_kernel, {"EPS": 1e-5}), (kernels._backward_kernel, {})):
            ptx = compiled(kernel, dtype, width, constants).asm["ptx"]
            print(json.dumps({"kernel": kernel.__name__, "float64": ".f64" in ptx, "entry": ".visible .entry" in ptx}))
"""


def test_kernels_compile_for_a_gpu_that_is_not_here():
    """What the interpreter accepts a compiler may refuse. No float64 may slip in, through eps or a division."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE_FOR_A_GPU]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(kernels) == 18
    assert all(kernel["entry"] and not kernel["float64"] for kernel in kernels)
