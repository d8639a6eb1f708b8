"""Bytes as a kernel's text tells them, and as the emulated GPU counts them."""

import json
from collections import Counter

import pytest

from scripts import check_codegen
from scripts.codegen.assembly import kind_of
from scripts.codegen.counting import disagreements
from scripts.codegen.targets import CASES
from tests.helpers import needs_triton

TOLD = Counter({"tile": 8192, "row": 1024, "sums": 4096})


@needs_triton
def test_text_and_count_agree(command, tmp_path):
    path = tmp_path / "counts.json"
    options = "--count --widths 256,1001 --passes forward,backward --cases bfloat16 --jobs 1"
    code, stdout, stderr = command(check_codegen.main, *options.split(), "--json", path)
    assert code == 0, stderr + stdout
    assert "4 passes as compiled for sm_90: all agree" in stdout
    found = {(one["step"], one["width"]): one for one in json.loads(path.read_text())["counted"]}
    backward = found["backward", 256]
    assert backward["told"] == pytest.approx({"tile": 6.0, "row": 0.5, "sums": 1.0})  # 2 programs for 8 rows
    assert backward["counted"]["tile"] == 6.0
    assert backward["counted"]["sums"] == 1.0
    assert backward["counted"]["column"] > 0
    assert backward["conflicts"] == 0
    assert {"float", "integer", "memory", "convert", "move", "together"} == set(backward["instructions"])
    # Rows of 1001 elements share sectors and are read element by element.
    assert found["forward", 1001]["told"]["tile"] == pytest.approx(4.0)
    assert found["forward", 1001]["counted"]["tile"] > 5


@pytest.mark.parametrize(
    ("step", "case", "width", "change", "wrong"),
    [
        ("forward", "bfloat16", 1024, {}, []),
        ("forward", "bfloat16", 1024, {"row": 4096}, []),  # several warps load it for themselves
        ("forward", "bfloat16", 1024, {"row": 512}, ["row"]),
        ("forward", "bfloat16", 1024, {"tile": 8224}, ["tile"]),
        ("forward", "bfloat16", 1024, {"tile": 8160, "sums": 0}, ["tile", "sums"]),
        ("forward", "bfloat16", 1001, {"tile": 12000}, []),  # rows are not made of whole sectors
        ("forward", "float32", 1000, {"tile": 12000}, ["tile"]),
        ("add_forward", "autocast", 1024, {"tile": 10240}, []),  # float32 beside half precision
        ("add_forward", "autocast", 1024, {"tile": 8000}, ["tile"]),
        ("forward", "autocast", 1024, {"tile": 10240}, ["tile"]),
    ],
)
def test_disagreements(step, case, width, change, wrong):
    found = disagreements(step, CASES[case], width, TOLD, Counter({**TOLD, **change}))
    assert [fault.partition(":")[0] for fault in found] == wrong


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("x_ptr", (8, 2048, 2048), "tile"),
        ("weight_ptr", (2048,), "row"),
        ("rstd_ptr", (8, 2048), "column"),  # of as many rows as D
        ("dh_ptr", (16384, 1, 1), "column"),  # nothing is added: rstd stands there
        ("partial_ptr", (132, 2048), "sums"),
        ("partial_ptr", (8, 2048), "sums"),
    ],
)
def test_kinds_of_tensors(name, shape, kind):
    assert kind_of(name, shape, 2048) == kind
