"""The Triton kernels' own promises; their values are tested by test_norm_contract.py."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual

pytest.importorskip("triton", reason="triton is made for Linux alone")

from kernels import reference, triton_rms_norm
from kernels.emulated import GPUS, emulated_gpu
from kernels.form import LLAMA
from kernels.torch_version import TORCH_2_13
from tests.kernels.addresses import check_addresses
from tests.kernels.contract import DEVICE, EPS, OTHER_FORMS, STRIDED, assert_equal, formula, rows, weights

FOUND_BY_STRIDES = ["heads of a fused projection", "swapped axes", "expanded columns"]
on_a_gpu = not triton_rms_norm.INTERPRETED and not emulated_gpu()
watched = pytest.mark.skipif(on_a_gpu, reason="a GPU does not say which addresses its kernels touch")
emulated = pytest.mark.skipif(emulated_gpu() is None, reason="needs kernels as compiled, on CPU tensors: --emulate")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 17), (0, 48), (48,)], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "add"])
def test_forward_operator_passes_opcheck(shape, dtype, residual):
    x, weight = rows(*shape, dtype=dtype).requires_grad_(), weights(shape[-1], dtype).requires_grad_()
    residual = rows(*shape, dtype=dtype, seed=3).requires_grad_() if residual else None
    arguments = (x, residual, weight, EPS, *LLAMA)
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
    arguments = (x.requires_grad_(), residual, weight, EPS, *LLAMA)
    assert set(torch.library.opcheck(torch.ops.rmsllama.rms_norm.default, arguments).values()) == {"SUCCESS"}
    with torch.no_grad():
        y, h, rstd = torch.ops.rmsllama.rms_norm(*arguments)
    arguments = (torch.ones_like(y), None, x.detach() if residual is None else h, weight, rstd, *LLAMA, True)
    assert set(torch.library.opcheck(torch.ops.rmsllama.rms_norm_backward.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("wants_dweight", [False, True])
@pytest.mark.parametrize("with_dh", [False, True])
def test_backward_operator_passes_opcheck(with_dh, wants_dweight):
    x, weight, dy = rows(5, 48), weights(48), rows(5, 48, seed=2)
    _, _, rstd = torch.ops.rmsllama.rms_norm(x, None, weight, EPS, *LLAMA)
    arguments = (dy, dy * 2 if with_dh else None, x, weight, rstd, *LLAMA, wants_dweight)
    assert set(torch.library.opcheck(torch.ops.rmsllama.rms_norm_backward.default, arguments).values()) == {"SUCCESS"}


@emulated
@pytest.mark.skipif(not TORCH_2_13, reason="the operators are triton_ops from this version on")
def test_torch_compile_may_look_into_the_launchers(monkeypatch):
    """They are triton_ops on a GPU. aot_eager traces them as Inductor does, and launches the kernels of its graph."""
    monkeypatch.setattr(triton_rms_norm, "wrap_triton", torch.library.wrap_triton)
    launchers = triton_rms_norm.launch_forward, triton_rms_norm.launch_backward
    looked_into = [
        torch.library.triton_op(f"tests::{launch.__name__}", mutates_args=())(launch) for launch in launchers
    ]
    for layout in ("slice of a fused projection", "swapped axes", "heads of a fused projection"):
        x = STRIDED[layout]()
        weight, dy, residual, dh = weights(48), *(rows(*x.shape, seed=seed) for seed in (2, 3, 4))
        _, h, rstd = launchers[0](x, residual, weight, EPS, *LLAMA)
        for number, arguments in (
            (0, (x, None, weight, EPS, *LLAMA)),
            (0, (x, residual, weight, EPS, *LLAMA)),
            (1, (dy, None, x, weight, rstd, *LLAMA, False)),
            (1, (dy, dh, h, weight, rstd, *LLAMA, True)),
        ):
            torch._dynamo.reset()
            compiled = torch.compile(looked_into[number], backend="aot_eager", fullgraph=True)
            for found, expected in zip(compiled(*arguments), launchers[number](*arguments), strict=True):
                assert_equal(found, expected)


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
        (rows(5, 48).to(torch.float8_e4m3fn), None, weights(48)),
        (rows(5, 48), rows(5, 48).to(torch.float8_e5m2), weights(48)),
        (rows(5, 48), None, weights(48).to(torch.float8_e5m2)),
        (rows(5, 48), None, weights(48).to(torch.complex64)),
    ],
    ids=["47", "1", "2 x 48", "residual", "integers", "no axis", "device", *["float8"] * 3, "complex"],
)
def test_what_does_not_fit_is_refused(x, residual, weight):
    inputs = (x, weight) if residual is None else (x, residual, weight)
    norm = triton_rms_norm.rms_norm if residual is None else triton_rms_norm.add_rms_norm
    with pytest.raises(ValueError, match=r"expected \(..., D\) and a weight \(D,\), of 16 to 64-bit floating"):
        norm(*inputs, EPS)


@pytest.mark.parametrize("eps", [0, -1e-5, float("nan"), float("inf")])
def test_an_eps_that_is_not_positive_and_finite_is_refused(eps):
    x, weight = rows(5, 48), weights(48)
    for norm, inputs in ((triton_rms_norm.rms_norm, (x,)), (triton_rms_norm.add_rms_norm, (x, x))):
        with pytest.raises(ValueError, match=f"got eps {eps}; expected a positive, finite number"):
            norm(*inputs, weight, eps)


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


def use_tile(monkeypatch, tile):
    """Tiles as on a GPU: they have few rows, a program takes several of them, and a wide row has several tiles."""
    options = {"ROWS": tile[0], "COLS": tile[1], "num_warps": max(1, tile[0] * tile[1] // 512)}
    monkeypatch.setattr(triton_rms_norm, "_tile", lambda *_, **__: options)
    monkeypatch.setattr(triton_rms_norm, "_persistent_programs", lambda n_tiles, *_: (2, -(-n_tiles // 2)))


@pytest.mark.parametrize(
    "tile", [(1, 64), (2, 64), (8, 64), (1, 16), (4, 32)], ids=lambda tile: f"{tile[0]} rows, {tile[1]} columns"
)
def test_any_tile_gives_the_same(monkeypatch, tile):
    expected = run_both((13, 48))
    use_tile(monkeypatch, tile)
    for got, one_tile in zip(run_both((13, 48)), expected, strict=True):
        torch.testing.assert_close(got, one_tile, rtol=1e-5, atol=2e-6)  # sums run in another order


@watched
@pytest.mark.parametrize("columns", [64, 32], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("layout", ["one column", "plain", *FOUND_BY_STRIDES])
def test_only_elements_of_the_tensors_are_touched(monkeypatch, layout, columns):
    """Each output element is stored once, nothing beside a tensor is read, and strides change no value."""
    plain = {"one column": lambda: rows(9, 1), "plain": lambda: rows(9, 47)}
    x = (plain | STRIDED)[layout]()
    leaves = x, rows(*x.shape, seed=3), weights(x.shape[-1])
    leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    # Each of the gradients with strides of its own: dy as x has them, dh expanded.
    dy, dh = x.detach(), rows(*x.shape[:-1], 1, seed=5).expand(x.shape)

    def run(norms):
        y, added = norms.rms_norm(leaves[0], leaves[2], EPS), norms.add_rms_norm(*leaves, EPS)
        alone = torch.autograd.grad(y, (leaves[0], leaves[2]), dy)
        return y, *added, *alone, *torch.autograd.grad(added, leaves, (dy, dh))

    expected = run(reference)
    use_tile(monkeypatch, (8, columns))
    check_addresses(monkeypatch)
    for got, right in zip(run(triton_rms_norm), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@watched
@pytest.mark.parametrize("columns", [64, 32], ids=["one tile", "two tiles"])
def test_offsets_of_outputs_pass_32_bits(monkeypatch, columns):
    """The last program of 2^25 + 5 rows, of as many as there are tiles: only the pages that it touches are there."""
    row, residual, dy = (rows(1, 64, dtype=torch.float16, seed=seed) for seed in range(3))
    weight = weights(64, torch.float16)
    monkeypatch.setattr(triton_rms_norm, "_tile", lambda *_, **__: {"ROWS": 8, "COLS": columns, "num_warps": 1})
    monkeypatch.setattr(triton_rms_norm, "_persistent_programs", lambda n_tiles, *_: (n_tiles, 1))

    def run(n_rows):
        x, r, g = (tensor.expand(n_rows, 64) for tensor in (row, residual, dy))
        y, h, rstd = triton_rms_norm.launch_forward(x, r, weight, EPS, *LLAMA)
        dx, _ = triton_rms_norm.launch_backward(g, None, h[-1:].expand(n_rows, 64), weight, rstd, *LLAMA, False)
        return y[-5:].clone(), h[-5:].clone(), dx[-5:].clone()

    expected = run(5)
    check_addresses(monkeypatch, last_program=True)
    for got, right in zip(run(2**25 + 5), expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize(("n_tiles", "warps"), [(1, 4), (527, 4), (529, 4), (4096, 16), (10**6, 32)])
def test_persistent_programs_cover_every_tile_once(monkeypatch, n_tiles, warps):
    monkeypatch.setattr(triton_rms_norm, "_gpu", lambda device: GPUS["sm_90"])  # of 132 multiprocessors
    n_programs, n_steps = triton_rms_norm._persistent_programs(n_tiles, warps, DEVICE)
    assert n_tiles <= n_programs * n_steps < n_tiles + n_steps  # all of them, and no program without one
    assert n_programs <= max(1, 16 // warps) * 132


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_h_has_the_dtype_of_the_sum(dtype, residual_dtype):
    x, residual, weight = rows(2, 48, dtype=dtype), rows(2, 48, dtype=residual_dtype, seed=3), weights(48)
    for norms in (triton_rms_norm, reference):
        y, h = norms.add_rms_norm(x, residual, weight, EPS)
        assert y.dtype == h.dtype == torch.promote_types(dtype, residual_dtype)


def test_rows_that_are_not_aligned_have_smaller_tiles(monkeypatch):
    """They need an address an element, and registers for it."""
    monkeypatch.setattr(triton_rms_norm, "_gpu", lambda device: GPUS["sm_90"])
    x = torch.empty(4, 16384, dtype=torch.float16, device="meta")
    aligned, other = (triton_rms_norm._tile(x, 2048, 32768, part=4096, aligned=aligned) for aligned in (True, False))
    assert (aligned["COLS"], other["COLS"]) == (16384, 4096)


@pytest.mark.parametrize("shape", [(6, 48), (3, 10000)], ids=str)
def test_without_a_weight(shape):
    x, dy = rows(*shape).requires_grad_(), rows(*shape, scale=1.0, seed=2)
    y = triton_rms_norm.rms_norm(x, None, EPS)
    expected = formula(x, 1.0, EPS)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)
    (dx,), (expected_dx,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", [LLAMA, *OTHER_FORMS], ids=str)
@pytest.mark.parametrize("columns", [64, 32], ids=["one tile", "two tiles"])
def test_dx_is_rounded_once(monkeypatch, columns, form):
    """Half precision's dx is float64's, rounded: whatever backward rounds before, as offset + weight, shows."""
    use_tile(monkeypatch, (64, columns))
    dtype = torch.bfloat16
    x, residual, dy, dh = (rows(64, 48, dtype=dtype, scale=1.0, seed=seed) for seed in range(4))
    weight = weights(48, dtype, form=form)
    h = (x + residual).double().requires_grad_()
    y = formula(h, weight.double(), EPS, form)
    (expected,) = torch.autograd.grad((y, h), h, (dy.double(), dh.double()))
    leaf = x.clone().requires_grad_()
    outputs = triton_rms_norm.add_rms_norm(leaf, residual, weight, EPS, *form)
    (dx,) = torch.autograd.grad(outputs, leaf, (dy, dh))
    differing = (dx != expected.to(dx.dtype)).double().mean().item()
    assert differing < 0.005, f"found {differing:.2%} of the elements to differ, expected less than 0.5 %"


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


def test_no_strided_tensor_is_copied_for_another_ones_sake():
    """The breaks between axes are those of all tensors together."""
    plain, middle, swapped = rows(5, 3, 48), rows(5, 3, 144)[..., 48:96], rows(3, 5, 48).transpose(0, 1)
    expanded = rows(3, 48).expand(5, 3, 48)
    for given in permutations((plain, middle, swapped, expanded), 2):
        seen, _ = triton_rms_norm._as_rows(*given)
        for view, tensor in zip(seen, given, strict=True):
            assert torch.equal(view.reshape(tensor.shape), tensor)
            assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


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

    def record(dy, dh, h, weight, rstd, offset, round_once, wants_dweight):
        calls.append({"dh": dh, "wants_dweight": wants_dweight})
        return operator(dy, dh, h, weight, rstd, offset, round_once, wants_dweight)

    monkeypatch.setattr(triton_rms_norm, "_rms_norm_backward", record)
    return calls


@pytest.mark.parametrize("wants", ["x", "residual", "weight", "nothing"])
def test_outputs_require_grad_as_the_references_do(wants):
    x, residual, weight = rows(5, 48), rows(5, 48, seed=3), weights(48)
    {"x": x, "residual": residual, "weight": weight}.get(wants, rows(1)).requires_grad_()
    for norms in (reference, triton_rms_norm):
        y, h = norms.add_rms_norm(x, residual, weight, EPS)
        assert (y.requires_grad, h.requires_grad) == (wants != "nothing", wants in ("x", "residual"))
        assert norms.rms_norm(x, weight, EPS).requires_grad == (wants in ("x", "weight"))


def test_a_weight_learns_from_an_x_of_inference_mode():
    """A frozen model before the norm, as for a probe on its features."""
    with torch.inference_mode():
        x = rows(5, 48)
    weight = weights(48).requires_grad_()
    for run in (lambda norms: norms.rms_norm(x, weight, EPS), lambda norms: norms.add_rms_norm(x, x, weight, EPS)[0]):
        found, expected = (torch.autograd.grad(run(norms).sum(), weight) for norms in (triton_rms_norm, reference))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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


def is_the_references(transform, *inputs):
    """transform(norms), a function of torch.func, gives the same of both."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap calls the kernels in a loop
        found, expected = (transform(norms)(*inputs) for norms in (triton_rms_norm, reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def squares(norms):
    return lambda x, weight: norms.rms_norm(x, weight, EPS).square().sum()


def both_outputs(norms):
    def loss(x, residual, weight):
        y, h = norms.add_rms_norm(x, residual, weight, EPS)
        return (y.square() + h.sin()).sum()

    return loss


def test_gradients_of_torch_func():
    x, residual, weight = rows(4, 17), rows(4, 17, seed=3), weights(17)
    is_the_references(lambda norms: torch.func.grad_and_value(squares(norms), (0, 1)), x, weight)
    is_the_references(lambda norms: torch.func.grad(both_outputs(norms), (0, 1, 2)), x, residual, weight)
    is_the_references(lambda norms: torch.func.grad(both_outputs(norms), 2), x, residual, weight)
    is_the_references(
        lambda norms: lambda dy: torch.func.vjp(lambda x: norms.rms_norm(x, weight, EPS), x)[1](dy), residual
    )
    is_the_references(lambda norms: torch.func.jacrev(lambda x: norms.rms_norm(x, weight, EPS)), x[0])


def test_vmap_and_gradients_of_each_sample():
    x, residual, weight = rows(3, 4, 17), rows(3, 4, 17, seed=3), weights(17)
    is_the_references(lambda norms: torch.func.vmap(lambda x: norms.rms_norm(x, weight, EPS), 1, 1), x)
    each_weight = torch.stack([weight, 2 * weight, 3 * weight])
    is_the_references(lambda norms: torch.func.vmap(lambda x, w: norms.rms_norm(x, w, EPS)), x, each_weight)
    is_the_references(lambda norms: torch.func.vmap(torch.func.grad(squares(norms), (0, 1)), (0, None)), x, weight)
    each = torch.func.vmap
    is_the_references(
        lambda norms: each(torch.func.grad(both_outputs(norms), (0, 1, 2)), (0, 0, None)), x, residual, weight
    )


@watched
def test_threads_may_call_at_once():
    x, weight = rows(5, 48), weights(48).requires_grad_()
    expected = triton_rms_norm.rms_norm(x, weight, EPS)

    def call(_):
        y = triton_rms_norm.rms_norm(x, weight, EPS)
        return torch.equal(y, expected) and len(torch.autograd.grad(y.sum(), weight)) == 1

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(call, range(30)))


def test_what_is_not_supported_names_the_backend_that_does_it():
    x, weight = rows(3, 5, dtype=torch.float64).requires_grad_(), weights(5, torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad(triton_rms_norm.rms_norm(x, weight, EPS).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="can't be differentiated twice; use --norm reference"):
        dx.sum().backward()
    assert torch.autograd.gradgradcheck(lambda x, weight: reference.rms_norm(x, weight, EPS), (x, weight))

    with pytest.raises(NotImplementedError, match="no forward-mode derivative; use --norm reference"):
        torch.func.jvp(lambda x: triton_rms_norm.rms_norm(x, weight, EPS), (x,), (x,))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative; use --norm reference"):
        torch.func.hessian(squares(triton_rms_norm))(x, weight)
    with dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative; use --norm reference"):
        triton_rms_norm.add_rms_norm(make_dual(x, x), x, weight, EPS)
    with pytest.raises(NotImplementedError, match="can't be differentiated twice; use --norm reference"):
        torch.func.jacrev(torch.func.grad(squares(triton_rms_norm)))(x, weight)
    with pytest.raises(ValueError, match="offset is added to a weight, and there is none"):
        triton_rms_norm.rms_norm(x, None, EPS, offset=1.0)
    assert torch.func.jvp(lambda x: reference.rms_norm(x, weight, EPS), (x,), (x,))[1].abs().max() > 0
