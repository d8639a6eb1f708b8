"""The Triton kernels' own promises; their values are tested by test_norm_contract.py."""

import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux alone")

from kernels import reference, triton_rms_norm
from tests.helpers import ROOT
from tests.kernels.contract import DEVICE, EPS, formula, is_gemmas_norm, oracle, rows, unit, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 17), (0, 48), (48,)], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "add"])
def test_forward_operator_passes_opcheck(shape, dtype, residual):
    x, weight = rows(*shape, dtype=dtype).requires_grad_(), weights(shape[-1], dtype).requires_grad_()
    residual = rows(*shape, dtype=dtype, seed=3).requires_grad_() if residual else None
    arguments = (x, residual, weight, EPS, False, False)
    assert set(torch.library.opcheck(torch.ops.rmsllama.rms_norm.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("x", "residual"),
    [
        (rows(48, 5).t(), None),
        (rows(5, 48, dtype=torch.float64), None),
        (rows(5, 48, dtype=torch.float16), rows(5, 48, seed=3)),
        (rows(3, 5, 48).transpose(0, 1), rows(5, 3, 48, seed=3)),
    ],
    ids=["transposed", "float64", "mixed", "swapped"],
)
def test_operators_say_the_right_strides_and_dtypes(x, residual):
    """Properties that a compiler learns before anything runs."""
    weight = weights(48, x.dtype)
    arguments = (x.requires_grad_(), residual, weight, EPS, False, False)
    assert set(torch.library.opcheck(torch.ops.rmsllama.rms_norm.default, arguments).values()) == {"SUCCESS"}
    with torch.no_grad():
        y, h, rstd = torch.ops.rmsllama.rms_norm(*arguments)
    arguments = (torch.ones_like(y), None, x.detach() if residual is None else h, weight, rstd, False, False, True)
    assert set(torch.library.opcheck(torch.ops.rmsllama.rms_norm_backward.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("wants_dweight", [False, True])
@pytest.mark.parametrize("with_dh", [False, True])
def test_backward_operator_passes_opcheck(with_dh, wants_dweight):
    x, weight, dy = rows(5, 48), weights(48), rows(5, 48, seed=2)
    _, _, rstd = torch.ops.rmsllama.rms_norm(x, None, weight, EPS, False, False)
    arguments = (dy, dy * 2 if with_dh else None, x, weight, rstd, False, False, wants_dweight)
    assert set(torch.library.opcheck(torch.ops.rmsllama.rms_norm_backward.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("x", "residual", "weight"),
    [
        (rows(5, 48), None, weights(47)),
        (rows(5, 48), None, weights(1)),
        (rows(5, 48), None, weights(96).view(2, 48)),
        (rows(5, 48), rows(48), weights(48)),  # addition would broadcast it
        (rows(5, 48).long(), None, weights(48)),
        (rows(1)[0], None, weights(1)),
        (rows(5, 48), None, weights(48).to("meta")),
    ],
    ids=["47", "1", "2 x 48", "residual", "integers", "no axis", "device"],
)
def test_what_does_not_fit_is_refused(x, residual, weight):
    inputs = (x, weight) if residual is None else (x, residual, weight)
    norm = triton_rms_norm.rms_norm if residual is None else triton_rms_norm.add_rms_norm
    with pytest.raises(ValueError, match=r"expected floating-point \(..., D\) and a weight \(D,\) on one device"):
        norm(*inputs, EPS)


def run_both(shape, **options):
    """y, dx, dweight of rms_norm, and y, h, dx, dresidual, dweight of add_rms_norm."""
    x, residual, weight = rows(*shape), rows(*shape, seed=3), weights(shape[-1])
    dy, dh = rows(*shape, scale=1.0, seed=4), rows(*shape, scale=1.0, seed=5)
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weight)]
    y = triton_rms_norm.rms_norm(x, weight, EPS, **options)
    added = triton_rms_norm.add_rms_norm(*leaves, EPS, **options)
    return (
        y.detach(),
        *torch.autograd.grad(y, (x, weight), dy),
        *(out.detach() for out in added),
        *torch.autograd.grad(added, leaves, (dy, dh)),
    )


@pytest.mark.parametrize(
    "tile", [(1, 64), (2, 64), (8, 64), (1, 16), (4, 32)], ids=lambda tile: f"{tile[0]} rows, {tile[1]} columns"
)
def test_any_tile_gives_the_same(monkeypatch, tile):
    """On a GPU a tile has few rows, a program takes several of them, and a wide row has several tiles."""
    expected = run_both((13, 48))
    count = np.int32 if triton_rms_norm.INTERPRETED else int
    monkeypatch.setattr(triton_rms_norm, "_tile", lambda *_, **__: {"ROWS": tile[0], "COLS": tile[1], "num_warps": 1})
    monkeypatch.setattr(triton_rms_norm, "_persistent_programs", lambda n_tiles, *_: (2, count(-(-n_tiles // 2))))
    for got, one_tile in zip(run_both((13, 48)), expected, strict=True):
        torch.testing.assert_close(got, one_tile, rtol=1e-5, atol=2e-6)  # sums run in another order


@pytest.mark.parametrize(("n_tiles", "warps"), [(1, 4), (527, 4), (529, 4), (4096, 16), (10**6, 32)])
def test_persistent_programs_cover_every_tile_once(monkeypatch, n_tiles, warps):
    monkeypatch.setattr(triton_rms_norm, "INTERPRETED", False)
    properties = type("Properties", (), {"multi_processor_count": 132, "warp_size": 32})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    n_programs, n_steps = triton_rms_norm._persistent_programs(n_tiles, warps, DEVICE)
    assert n_tiles <= n_programs * n_steps < n_tiles + n_steps  # all of them, and no program without one
    assert n_programs <= max(1, 16 // warps) * 132


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_unit_offset_and_one_rounding_are_gemmas_norm(dtype):
    is_gemmas_norm(triton_rms_norm.rms_norm, dtype)


def test_round_once_multiplies_before_it_rounds():
    x, weight = rows(64, 48, dtype=torch.float16), weights(48, torch.float16)
    expected = torch.from_numpy(oracle(x, weight)).to(torch.float16)
    once = (triton_rms_norm.rms_norm(x, weight, EPS, round_once=True).cpu() != expected).double().mean().item()
    twice = (triton_rms_norm.rms_norm(x, weight, EPS).cpu() != expected).double().mean().item()
    assert once < 0.005  # as in the contract's test of the other order
    assert twice > 0.1

    weight = weight.float().requires_grad_()  # whose gradient is then made of an x_hat that was never rounded
    triton_rms_norm.rms_norm(x[:1], weight, EPS, round_once=True).sum().backward()
    x_hat = torch.from_numpy(oracle(x[0], torch.ones(48))).float()
    torch.testing.assert_close(weight.grad.cpu(), x_hat, rtol=8 * unit(torch.float32), atol=0)


@pytest.mark.parametrize("shape", [(6, 48), (3, 10000)], ids=str)
def test_without_a_weight(shape):
    x, dy = rows(*shape).requires_grad_(), rows(*shape, scale=1.0, seed=2)
    y = triton_rms_norm.rms_norm(x, None, EPS)
    expected = formula(x, 1.0, EPS)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)
    (dx,), (expected_dx,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("options", [{"unit_offset": True}, {"round_once": True}], ids=str)
@pytest.mark.parametrize("shape", [(6, 48), (3, 10000)], ids=str)
def test_gradients_of_the_options(shape, options):
    """In float64, where the order of rounding makes no difference, for rows of one tile and of several."""
    x, weight, dy = (t.double() for t in (rows(*shape), weights(shape[-1]), rows(*shape, scale=1.0, seed=2)))
    x.requires_grad_(), weight.requires_grad_()
    y = triton_rms_norm.rms_norm(x, weight, EPS, **options)
    expected = formula(x, weight + options.get("unit_offset", 0), EPS)
    for got, exact in zip(
        (y, *torch.autograd.grad(y, (x, weight), dy)),
        (expected, *torch.autograd.grad(expected, (x, weight), dy)),
        strict=True,
    ):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        (lambda: rows(6, 144)[:, 48:96], False),
        (lambda: rows(2, 3, 144)[..., 48:96], False),
        (lambda: rows(3, 5, 48).transpose(0, 1), False),
        (lambda: rows(2, 3, 7, 48)[:, :, 2:5], False),
        (lambda: rows(1).expand(2, 3, 48), False),
        (lambda: rows(2, 1, 48).expand(2, 3, 48), False),
        (lambda: rows(2, 3, 7, 48)[:, :-1, :], False),
        (lambda: rows(2, 7, 3, 96)[:, 1:, :, :48], False),
        (lambda: rows(48), False),
        (lambda: rows(48, 6).t(), True),
        (lambda: rows(6, 96)[:, ::2], True),
        (lambda: rows(2, 3, 5, 48).transpose(1, 2), True),  # three strides; the kernels take two
    ],
)
def test_what_is_copied(make, copied):
    x = make()
    (seen,), _ = triton_rms_norm._as_rows(x)
    assert torch.equal(seen.reshape(x.shape), x)
    assert (seen.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()) == copied


@pytest.mark.parametrize("width", [48, 10000])
def test_offsets_pass_32_bits(width):
    """Three rows, 2^30 elements apart: only the pages that hold them are ever touched."""

    def far_apart(tensor):
        far = torch.empty(2**31 + width, dtype=tensor.dtype, device=DEVICE).as_strided(tensor.shape, (2**30, 1))
        return far.copy_(tensor)

    x, residual, dy, dh = (rows(3, width, dtype=torch.float16, seed=seed) for seed in range(4))
    weight = weights(width, torch.float16)

    def run(place):
        leaves = [place(tensor).requires_grad_() for tensor in (x, residual)] + [weight.clone().requires_grad_()]
        outputs = triton_rms_norm.add_rms_norm(*leaves, EPS)
        alone = triton_rms_norm.rms_norm(leaves[0], leaves[2], EPS)
        gradients = torch.autograd.grad(outputs, leaves, (place(dy), place(dh)))
        return *outputs, *gradients, *torch.autograd.grad(alone, (leaves[0], leaves[2]), place(dy))

    for got, expected in zip(run(far_apart), run(torch.clone), strict=True):
        assert torch.equal(got, expected)


@pytest.fixture
def backward_calls(monkeypatch):
    """The arguments that the backward operator is called with."""
    calls, operator = [], triton_rms_norm._rms_norm_backward

    def record(dy, dh, h, weight, rstd, unit_offset, round_once, wants_dweight):
        calls.append({"dh": dh, "wants_dweight": wants_dweight})
        return operator(dy, dh, h, weight, rstd, unit_offset, round_once, wants_dweight)

    monkeypatch.setattr(triton_rms_norm, "_rms_norm_backward", record)
    return calls


def test_only_what_is_wanted_is_computed(backward_calls):
    x, residual, weight = rows(5, 48).requires_grad_(), rows(5, 48, seed=3).requires_grad_(), weights(48)
    y, h = triton_rms_norm.add_rms_norm(x, residual, weight, EPS)
    y.sum().backward(retain_graph=True)
    assert backward_calls == [{"dh": None, "wants_dweight": False}]  # no zeros for h, no sums for a frozen weight
    h.sum().backward(retain_graph=True)
    assert len(backward_calls) == 1  # h's gradient passes through as it is
    weight.requires_grad_()
    y, h = triton_rms_norm.add_rms_norm(x, residual, weight, EPS)
    (y.sum() + h.sum()).backward()
    assert backward_calls[1]["dh"] is not None
    assert backward_calls[1]["wants_dweight"]


def test_what_is_not_supported_names_the_backend_that_does_it():
    x, weight = rows(3, 5, dtype=torch.float64).requires_grad_(), weights(5, torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad(triton_rms_norm.rms_norm(x, weight, EPS).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="can't be differentiated twice; use --norm reference"):
        dx.sum().backward()
    assert torch.autograd.gradgradcheck(lambda x, weight: reference.rms_norm(x, weight, EPS), (x, weight))

    with pytest.raises(NotImplementedError, match="no forward-mode derivative; use --norm reference"):
        torch.func.jvp(lambda x: triton_rms_norm.rms_norm(x, weight, EPS), (x,), (x,))
    with pytest.raises(ValueError, match="unit_offset adds 1 to a weight, and there is none"):
        triton_rms_norm.rms_norm(x, None, EPS, unit_offset=True)
    assert torch.func.jvp(lambda x: reference.rms_norm(x, weight, EPS), (x,), (x,))[1].abs().max() > 0


def test_a_triton_imported_too_early_is_named():
    """An optimizer or torch.compile may import it before the kernels can ask for the interpreter."""
    code = "import os; os.environ.pop('TRITON_INTERPRET', None); import triton.language; import kernels.triton_rms_norm"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if torch.cuda.is_available():
        assert result.returncode == 0
    else:
        assert "InputError: --norm triton: triton was imported before" in result.stderr
