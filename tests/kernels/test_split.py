"""Norms that are divided over processes, beside the undivided ones, and the classic mistakes in them."""

import pytest
import torch
import torch.distributed as dist

import kernels
from kernels import InputError
from kernels.emulated.gpus import chosen_gpu
from kernels.form import FORMS, LLAMA
from kernels.split import split_hidden, split_rows
from model.norm import RMSNorm
from tests.helpers import CPU, ROOT, needs_compiler, needs_triton
from tests.kernels import split_checks
from tests.kernels.contract import BF16, DEVICE, EPS, F16, F32, F64, HALF, OTHER_FORMS, STRIDED, rows, unit, weights
from tests.processes import Processes

TRITON = pytest.param("triton", marks=needs_triton)
eager = pytest.mark.parametrize("name", ["reference", TRITON])
ALL_FORMS, GEMMA = [LLAMA, *OTHER_FORMS], FORMS["gemma"]


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """processes(n) are n connected processes, which all tests share."""
    started = {}

    def connected(n):
        if n not in started:
            gpu = chosen_gpu()
            started[n] = Processes(n, tmp_path_factory.mktemp("store"), f"sm_{gpu.arch}" if gpu else None)
        return started[n]

    yield connected
    for each in started.values():
        each.close()


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Of Triton each form, dtype and width is another kernel to compile, in every process: a few stand for all.
UNSPLIT = [
    *((n, "reference", form, F64) for n in (2, 3) for form in ALL_FORMS),
    (2, "reference", LLAMA, F32),
    pytest.param(2, "triton", GEMMA, F64, marks=needs_triton),
    pytest.param(3, "triton", LLAMA, F32, marks=[pytest.mark.long, needs_triton]),
    pytest.param(2, "triton", OTHER_FORMS[-1], F32, marks=[pytest.mark.long, needs_triton]),
    pytest.param(2, "compile", LLAMA, F32, marks=[pytest.mark.long, needs_compiler]),
]


@pytest.mark.parametrize(("n", "name", "form", "dtype"), UNSPLIT, ids=str)
def test_a_split_norm_is_the_unsplit_one(processes, n, name, form, dtype):
    processes(n)(split_checks.is_the_unsplit_norm, name, form, dtype)


@pytest.mark.parametrize(
    ("n", "name", "fast"),
    [
        (2, "reference", True),
        (3, "reference", True),
        pytest.param(2, "triton", True, marks=needs_triton),
        pytest.param(2, "reference", False, marks=pytest.mark.long),
    ],
)
def test_gradients_of_a_split_norm_are_the_numerical_ones(processes, n, name, fast):
    processes(n)(split_checks.gradients_are_the_numerical_ones, name, GEMMA, fast)


HALF_PRECISION = [
    *(("reference", form, dtype) for form in ALL_FORMS for dtype in HALF),
    pytest.param("triton", LLAMA, BF16, marks=needs_triton),
    pytest.param("triton", OTHER_FORMS[-1], F16, marks=[pytest.mark.long, needs_triton]),
    pytest.param("compile", LLAMA, BF16, marks=[pytest.mark.long, needs_compiler]),
]


@pytest.mark.parametrize(("name", "form", "dtype"), HALF_PRECISION, ids=str)
def test_few_elements_change_in_half_precision(processes, name, form, dtype):
    """Only the order of a float32 sum differs, which moves rstd, and so y, by 4 units of 2^-24 or less.

    That is 2^-11 of float16's spacing, so 0.05 % of the elements cross a rounding boundary; of dx, whose terms cancel,
    up to twice as many, and of bfloat16 an eighth.
    """
    n_rows = 100 if name == "triton" else 400
    shares = processes(2)(split_checks.differing_elements, name, form, dtype, n_rows)[0]
    assert max(shares.values()) < 0.001, shares


@pytest.mark.parametrize(("name", "dtype"), [("reference", F32), pytest.param("triton", F64, marks=needs_triton)])
def test_small_rows_and_zero_rows(processes, name, dtype):
    processes(2)(split_checks.small_rows_and_zero_rows, name, dtype)


@pytest.mark.parametrize(
    ("n", "name"), [(2, "reference"), (3, "reference"), pytest.param(2, "triton", marks=needs_triton)]
)
def test_a_process_without_columns_takes_part(processes, n, name):
    processes(n)(split_checks.a_process_without_columns_takes_part, name)


@eager
def test_frozen_parameters_change_no_other_gradient(processes, name):
    processes(2)(split_checks.frozen_parameters_change_no_other_gradient, name)


@pytest.mark.parametrize(
    ("name", "dtype", "wide"),
    [("reference", BF16, F32), ("reference", F64, F64), pytest.param("triton", BF16, F32, marks=needs_triton)],
)
def test_one_number_a_row_is_all_reduced_each_way_and_in_the_dtype_of_statistics(processes, name, dtype, wide):
    for seen in processes(2)(split_checks.all_reduced_dtypes, name, dtype):
        assert seen == [(str(wide), 7)] * 2


def test_a_gather_without_gradient_is_caught(processes):
    check = split_checks.is_the_unsplit_norm, "reference", LLAMA, F64
    with pytest.raises(AssertionError, match=r"^process 0: dx: found \S+ at .*, expected"):  # y is right
        processes(2)(*check, split_checks.gather_without_gradient)


def test_a_mean_of_means_is_caught(processes):
    check = split_checks.is_the_unsplit_norm, "reference", LLAMA, F64
    with pytest.raises(AssertionError, match=r"^process 0: y: found \S+ at .*, expected"):
        processes(2)(*check, split_checks.mean_of_means)


def show(by_process):
    return f"({'; '.join(', '.join(f'{number:.4g}' for number in part) for part in by_process)})"


def test_the_readme_shows_a_small_example_of_both_mistakes(processes):
    text = (ROOT / "kernels/README.md").read_text(encoding="utf-8")
    for norm in (split_hidden, split_checks.gather_without_gradient, split_checks.mean_of_means):
        y, dx = zip(*processes(2)(split_checks.small_example, norm), strict=True)
        found = f"| `{norm.__name__}` | {show(y)} | {show(dx)} |"
        assert found in text, found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("reference", F64),
        ("reference", F32),
        ("torch", F64),
        ("layer_norm_bias", F64),
        pytest.param("triton", F32, marks=needs_triton),
    ],
    ids=str,
)
def test_rows_are_split_as_in_sequence_parallel(processes, name, dtype):
    processes(2)(split_checks.rows_split, name, dtype)


def test_rows_are_split_over_three(processes):
    processes(3)(split_checks.rows_split, "reference", F64)


def test_a_forgotten_all_reduce_of_dweight_is_caught(processes):
    with pytest.raises(AssertionError, match=r"^process 0: found \S+ at \(\d+,\), expected"):
        processes(2)(split_checks.rows_split, "reference", F64, split_checks.not_summed)


def test_dweight_is_summed_over_processes_in_float32(processes):
    processes(3)(split_checks.dweight_is_summed_in_float32, "reference")


@pytest.mark.parametrize("name", ["torch", "layer_norm", "reference@bfloat16", "scripts.peers:torch_fused"])
def test_a_norm_that_takes_no_statistics_is_refused(name):
    backend = kernels.load_backend(name, CPU)
    with pytest.raises(InputError) as error:
        split_hidden(backend, None, 48)
    assert str(error.value) == (
        f"norm '{backend.description}' can't be split over processes, since it computes a row's statistics and its "
        "result in one; use --norm reference or compile or triton"
    )


def test_rows_of_a_split_hidden_axis_can_be_split_and_not_the_other_way_round(alone):
    norm = split_hidden(kernels.load_backend("reference", CPU, GEMMA), None, 48)
    assert split_rows(norm, None).form == norm.form == GEMMA
    with pytest.raises(InputError, match="can't be split over processes"):
        split_hidden(split_rows(kernels.load_backend("reference", CPU), None), None, 48)


def test_a_module_holds_its_part_of_the_weight(alone):
    """Several axes, as q_norm of all heads has them, and the weight where it scales by 1."""
    norm = RMSNorm((4, 12), EPS, split_hidden(kernels.load_backend("reference", CPU, GEMMA), None, 48))
    whole = RMSNorm((4, 12), EPS, kernels.load_backend("reference", CPU, GEMMA))
    x = rows(3, 4, 12).cpu()
    assert torch.equal(norm(x)[0], whole(x)[0])
    assert all(torch.equal(a, b) for a, b in zip(norm(x, 2 * x), whole(x, 2 * x), strict=True))
    assert "hidden axis split over 1 processes" in repr(norm)


@needs_triton
@pytest.mark.parametrize(
    "layout", ["wide", "transposed", "heads of a fused projection", "some rows of each batch, at odd addresses"]
)
def test_tritons_kernels_take_any_strides_and_widths(alone, layout):
    x = {"wide": lambda: rows(2, 40000), **STRIDED}[layout]()
    weight = weights(x.shape[-1])
    dy, dh = (rows(*x.shape, scale=1.0, seed=seed).to(x) for seed in (4, 5))
    whole = kernels.load_backend("reference", DEVICE)
    norm = split_hidden(kernels.load_backend("triton", DEVICE), None, x.shape[-1])
    found, expected = (split_checks.results(each, x, 2 * x, dy, dh, weight) for each in (norm, whole))
    for part, right in zip(found, expected, strict=True):
        split_checks.assert_within((x.shape[-1] ** 0.5 + 40) * unit(F32) * right.abs().max(), part, right)


@needs_triton
def test_triton_is_differentiated_once(alone):
    norm = split_hidden(kernels.load_backend("triton", DEVICE), None, 48)
    x = rows(3, 48).requires_grad_()
    y = norm.rms_norm(x, weights(48), EPS)
    with pytest.raises(NotImplementedError, match="can't be differentiated twice; use --norm reference"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
