"""What the emulated GPU refuses in Triton's kernels: in a few that are wrong, and in ours with faults planted."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch

from tests.helpers import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux alone")

WRONG = {
    "missing_mask": r"add_one at watched.py:\d+:\d+ \(ld.global.*\): block \(3, 0, 0\), thread \d+: "
    r"reads \d+ bytes outside the tensors: 0 bytes behind the end of x \(1000,\) float32",
    "row_of_a_view": r"sum_of_row at .*: reads \d+ bytes between the elements of a view: "
    r"0 bytes behind the element at byte 396 of x \(7, 100\) float32",
    "row_of_heads": r"sum_of_row at .*: reads \d+ bytes between the elements of a view: "
    r"0 bytes behind the element at byte 396 of x \(5, 100\) float32",
    "alignment_that_is_not_there": r"claims_to_be_aligned at .* \(ld.global.v4.b32\): block \(0, 0, 0\), thread 0: "
    r"reads 16 bytes at once at an address that 16 does not divide, byte 8 of x \(1024,\) float32",
    "missing_barrier": r"reverse_in_memory .*: reads what another warp has written since the last barrier: byte \d+",
    "another_programs_output": r"add_the_next_block .*: reads what another block has written: byte \d+ of x \(1024,\)",
    "unwritten_input": r"add_one at .* \(ld.global.*\): block \(3, 0, 0\), thread 0: "
    r"reads global memory that nobody has written: byte 3072 of x \(1000,\) float32",
    "unwritten_counts": r"count at .*: changes global memory that nobody has written: byte 0 of counts \(10,\) int32",
    "offsets_of_32_bits": r"far_rows at .*: block \(2, 0, 0\), thread 0: "
    r"reads \d+ bytes outside the tensors: 4294967296 bytes before x \(3, 64\) float16",
    "last_program_of_many": r"fill at .*: block \(8388611, 0, 0\), thread 0: "
    r"writes \d+ bytes outside the tensors: 2147482880 bytes before x \(2147484648,\) int8",
    "tensors_by_program": r"one_of_two at .*: block \(3, 0, 0\), thread \d+: "
    r"reads \d+ bytes outside the tensors: 0 bytes behind the end of y \(200,\) float32",
    "atomics_of_bfloat16": r"count at .*: "
    r"(reads 4|changes 2) bytes outside the tensors: 0 bytes behind the end of counts",  # sm_80 reads, adds and tries
}


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused_and_the_right_one_passes(compiled, gpu, name):
    if name == "atomics_of_bfloat16" and version("triton").startswith("3.2."):
        pytest.skip("Triton 3.2 has no atomics of bfloat16")
    assert compiled(gpu, "watched:outcome", name, False) == ""
    found = compiled(gpu, "watched:outcome", name, True)
    assert re.match(WRONG[name], found), found
    source = (ROOT / "tests" / "kernels" / "emulated" / "watched.py").read_text(encoding="utf-8").splitlines()
    [line] = re.findall(r"watched\.py:(\d+)", found)
    assert re.search(r"tl\.(load|store|atomic_add)\(", source[int(line) - 1]), found


class Fault(NamedTuple):
    """Edits of our kernels' source, a run in which they show, and what is said."""

    edits: dict[str, str]
    run: tuple
    message: str


NARROW, ODD = ("plain", 5, 64, torch.float32), ("plain", 5, 1000, torch.float32)
VIEW = ("columns of a larger one", 5, 1000, torch.bfloat16)
WIDE, WIDER = ("plain", 3, 10000, torch.bfloat16), ("plain", 2, 17000, torch.float32)  # tiles backward, and forward
MASK = "in_tile = (rows < n_rows) & (cols < D)"
OUTPUT_ROWS = "rows.to(tl.int64) * D"
# As compiled, the barrier of the sum lies between the stores of h and the loads, and each thread reads what it has
# stored itself. Neither is so where h is stored again right before it is read, and read in another order.
LATE_H = {
    "h = tl.load(h_ptr + out_rows + cols": """tl.store(
                    h_ptr + out_rows + tl.arange(0, COLS)[None, :], tl.full((ROWS, COLS), 1.0, wide), mask=rows < n_rows
                )
                tl.debug_barrier()
                h = tl.load(h_ptr + out_rows + (D - 1 - cols)""",
}
OURS = {
    "columns have no mask": Fault(
        {MASK: "in_tile = (rows < n_rows) & (cols < COLS)"}, ODD,
        r"_forward_kernel at triton_rms_norm.py:\d+:\d+ \(ld.global.v4.b32\): block \(2, 0, 0\), thread 122: "
        r"reads 16 bytes outside the tensors: 0 bytes behind the end of x_ptr \(5, 1, 1000\) float32",
    ),
    "columns have no mask, and memory lies behind them": Fault(
        {MASK: "in_tile = (rows < n_rows) & (cols < COLS)"}, VIEW,
        r"_forward_kernel .*: reads 16 bytes outside the tensors: 0 bytes behind the end of x_ptr \(5, 1, 1000\) bf",
    ),
    "rows have no mask": Fault(
        {MASK: "in_tile = (rows >= 0) & (cols < D)"}, NARROW,
        r"_forward_kernel .* thread 80: reads 16 bytes outside the tensors: 0 bytes behind the end of x_ptr",
    ),
    "rstd is stored for rows that are none": Fault(
        {"tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)": "tl.store(rstd_ptr + rows, rstd)"}, NARROW,
        r"_forward_kernel .* thread 5: writes 4 bytes outside the tensors: 0 bytes behind the end of rstd_ptr \(5,\)",
    ),
    "rstd is read for rows that are none": Fault(
        {"rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)": "rstd = tl.load(rstd_ptr + rows)"}, NARROW,
        r"_backward_kernel .*: reads 4 bytes outside the tensors: 0 bytes behind the end of rstd_ptr \(5,\) float32",
    ),
    "the weight has no mask": Fault(
        {"weight_ptr + cols, mask=cols < D, other=0.0": "weight_ptr + cols"}, ODD,
        r"_forward_kernel .*: reads 16 bytes outside the tensors: 0 bytes behind the end of weight_ptr \(1000,\)",
    ),
    "sums for dweight have no mask": Fault(
        {"cols, total, mask=cols < D": "cols, total"}, ODD,
        r"_backward_kernel .*: writes \d+ bytes outside the tensors: 0 bytes behind the end of partial_ptr",
    ),
    "rows claim to be aligned": Fault(
        {"math.gcd(16, *(t.stride(i) for t in rows for i in (0, 1) if t.shape[i] > 1))": "16"},
        ("rows that are not aligned", 5, 100, torch.float32),
        r"_forward_kernel .*: reads 16 bytes between the elements of a view: 0 bytes behind the element at byte 396",
    ),
    "dh is read with the last stride of dy": Fault(
        {"DH_COL=g.stride(2)": "DH_COL=dy_rows.stride(2)"}, ("dh is expanded", 5, 100, torch.float32),
        r"_backward_kernel .*: reads \d+ bytes outside the tensors: \d+ bytes behind the end of dh_ptr \(5, 1, 100\)",
    ),
    "offsets of inputs in 32 bits": Fault(
        {"(rows // n_inner).to(tl.int64), (rows % n_inner).to(tl.int64)": "rows // n_inner, rows % n_inner"},
        ("far", 3, 48, torch.float16),
        r"_forward_kernel .*: reads 16 bytes outside the tensors: 4294967296 bytes before x_ptr \(3, 1, 48\) float16",
    ),
    "offsets of outputs in 32 bits": Fault(
        {OUTPUT_ROWS: "rows * D"}, ("huge",),
        r"_forward_kernel .*: block \(1048576, 0, 0\), thread 0: "
        r"writes 16 bytes outside the tensors: 4294967296 bytes before h_ptr \(33554437, 64\) float16",
    ),
    "rstd is not stored": Fault(
        {"rstd, mask=rows < n_rows": "rstd, mask=rows < n_rows - 1"}, NARROW,
        r"_backward_kernel .*: reads global memory that nobody has written: byte 16 of rstd_ptr \(5,\) float32",
    ),
    "the last column of h is not stored": Fault(
        {"h, mask=in_tile": "h, mask=in_tile & (cols < D - 1)"}, ODD,
        r"_backward_kernel .*: reads global memory that nobody has written: byte 3984 of h_ptr \(5, 1, 1000\) float32",
    ),
    "the projection is not stored": Fault(
        {"projection, mask=rows < n_rows": "projection, mask=rows < 0"}, WIDE,
        r"_backward_kernel .*: reads global memory that nobody has written: byte 0 of projection_ptr \(3,\) float32",
    ),
    "no barrier before h is read again": Fault(
        {**LATE_H, "tl.debug_barrier()": "pass"}, WIDER,
        r"_forward_kernel .*: reads what another warp has written since the last barrier: byte \d+ of h_ptr",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_a_fault_in_our_kernels_is_found(compiled, name):
    fault = OURS[name]
    found = compiled("sm_90", "watched:ours", fault.edits, *fault.run)
    assert re.match(fault.message, found), found


@pytest.mark.parametrize("gpu", ["sm_90", *(pytest.param(f"sm_{n}", marks=pytest.mark.long) for n in (80, 100, 120))])
def test_our_kernels_pass(compiled, gpu):
    for run in {fault.run for fault in OURS.values()} if gpu == "sm_90" else {ODD, WIDE}:
        assert compiled(gpu, "watched:ours", {}, *run) == ""
    assert compiled(gpu, "watched:ours", LATE_H, *WIDER) == ""


@pytest.mark.parametrize(("n_rows", "width", "dtype"), [(3, 4096, torch.bfloat16), (37, 48, torch.float16)])
def test_each_barrier_of_our_kernels_is_needed(compiled, n_rows, width, dtype):
    complete, *found = compiled("sm_90", "watched:without_each_barrier", n_rows, width, dtype)
    assert complete == ""
    assert len(found) >= 4
    for message in found:
        assert re.search(
            "(writes|reads) shared memory that another warp has (written|read) since the last barrier", message
        )


def test_another_number_of_warps_is_found(compiled):
    found = compiled("sm_90", "watched:with_half_the_threads", 5, 1000, torch.float32)
    assert re.match(
        r"_forward_kernel at standard.py:.*: reads shared memory that nobody has written, byte \d+", found
    ), found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_goes_on_where_fresh_memory_is_watched(compiled, backend):
    assert compiled("sm_90", "watched:compiles", backend)


def test_fake_tensors_stay_fake(compiled):
    assert compiled("sm_90", "watched:fakes_stay_fake")
