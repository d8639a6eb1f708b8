"""The check passes on the kernels as they are, and finds what is planted in a copy of them."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux alone")

import triton

from scripts import check_codegen
from scripts.codegen import assembly, offline_gpu, targets
from scripts.codegen.assembly import Access
from tests.helpers import ROOT

KNOWN = [name for name, gpu in targets.TARGETS.items() if targets.version_of(triton) >= gpu.since]
TARGETS = [name for name in ("sm_90", "gfx942") if name in KNOWN]


def check(root, *arguments):
    """Run the command in a process of its own, since this one has Triton in its interpreter: (exit code, stdout)."""
    command = [sys.executable, str(root / "scripts/check_codegen.py"), "--targets", ",".join(TARGETS), "--jobs", "1"]
    result = subprocess.run([*command, "--cases", "bfloat16", *arguments], capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    return result.returncode, result.stdout


@pytest.mark.long
def test_kernels_pass():
    code, out = check(ROOT, "--widths", "1000,16384,40000")
    assert code == 0, out
    code, gemma = check(ROOT, "--widths", "1000", "--form", "gemma")
    assert (code, gemma.splitlines()[-1]) == (
        0,
        f"{4 * len(TARGETS)} kernels in the form gemma for {', '.join(TARGETS)}: all pass",
    )
    kernels = 4 + 2 * (1 + 1 + 2 + 2)  # a wide row's backward takes two
    assert out.splitlines()[-1] == f"{kernels * len(TARGETS)} kernels for {', '.join(TARGETS)}: all pass"


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Findings on the forward kernel, by target, when these edits are made in a copy of it."""

    def check_copy(width, *edits, step="forward"):
        copy = tmp_path_factory.mktemp("copy")
        for folder in ("kernels", "model", "scripts"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        source = copy / "kernels/triton_rms_norm.py"
        text = source.read_text()
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        source.write_text(text)
        code, out = check(copy, "--passes", step, "--widths", str(width))
        assert code == 1, out
        failures = re.findall(rf"^FAILS (\w+) {step} .*?: (.*)$", out, re.MULTILINE)
        assert [target for target, _ in failures] == TARGETS
        return dict(failures)

    too_large = check_copy(131072, ("if cols > widest:", "if False:"))
    too_much = check_copy(
        1024,
        ("X_COL=x.stride(2)", "X_COL=2 * x.stride(2)"),
        ("out_rows = rows.to(tl.int64) * D", "out_rows = rows.to(tl.int64) * (D + 1)"),
        ("/ D + EPS)", "/ D + tl.full((), EPS, tl.float64)).to(wide)"),
        ("if COLS < D:  # else", "if True:  # else"),
    )
    launch = 'wrap_triton(_forward_kernel)[(triton.cdiv(rstd.numel(), {}tile["ROWS"]),)]'
    half = launch.format(""), launch.format("2 * ")
    too_little = check_copy(1024, half)
    race = check_copy(65536, ("tl.debug_barrier()", "pass"), step="add_forward")
    copies = too_large, too_much, too_little, race
    return {target: "; ".join(findings[target] for findings in copies) for target in TARGETS}


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "finding",
    [
        r"spills \d+ (bytes, \d+ stores and \d+ loads|vector and \d+ scalar registers, \d+ bytes of scratch)",
        r"loads x_ptr by 16 bits \(line \d+\), and 128 are possible",
        r"stores y_ptr by \d\d bits \(line \d+\), and 128 are possible",
        r"has \d+ instructions in float64",
        r"moves 6\.00 bytes an element, and the floor is 4\.00",
        r"moves 2\.00 bytes an element, and the floor is 4\.00",
        "h_ptr is read back with no barrier after it was stored to",
    ],
    ids=["spill", "column stride", "rows not aligned", "float64", "x read twice", "half of the rows", "no barrier"],
)
def test_planted_faults_are_found(findings, target, finding):
    assert re.search(finding, findings[target])


def test_widths_and_positions_are_read_from_ptx():
    code = """
        .extern .shared .align 16 .b8 global_smem[];
        .loc 1 20 7
        // begin inline asm
        .loc 1 20 7
        mov.u32 %r1, %r5;
        .loc 1 21 7
        @%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        // end inline asm
        .loc 1 30 9
        @%p38 cp.async.cg.shared.global [ %r56 + 0 ], [ %rd18 + 0 ], 0x10, %r59;
        .loc 1 0 9
        @%p2 st.global.b16 [ %rd14 + 0 ], { %rs1 };
    """
    found = list(assembly.instructions_of(code))
    assert found == [(False, 128, (20, 7)), (False, 128, (30, 9)), (True, 16, None)]


def test_widths_and_positions_are_read_from_amd_assembly():
    code = """
        .loc 1 161 13 is_stmt 0 ; triton_rms_norm.py:161:13
        buffer_load_dwordx2 v[10:11], v4, s[36:39], 0 offen
        s_load_dwordx4 s[0:3], s[0:1], 0x0
        global_load_ushort v1, v[2:3], off
        .loc 1 182 9
        global_store_dwordx4 v[0:1], v[6:9], off
    """
    found = list(assembly.instructions_of(code))
    assert found == [(False, 64, (161, 13)), (False, 16, (161, 13)), (True, 128, (182, 9))]


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [("--targets", "sm_90,sm_91", "no target is called 'sm_91'"), ("--widths", "0", "'0' is not a positive integer")],
)
def test_bad_input_is_one_line(command, option, value, found):
    code, _, err = command(check_codegen.main, option, value)
    assert code == 2
    assert err.count("\n") == 1
    assert found in err


class Inline:
    """In the place of a pool of processes: calls at once."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_):
        pass


@pytest.mark.parametrize("bad", [None, "gfx942"])
def test_the_verdict_is_that_of_every_kernel(command, monkeypatch, tmp_path, bad):
    def compile_and_check(target, case, width, steps, form):
        faults = ["is slow"] if target == bad else []
        return [check_codegen.Kernel(target, step, case, width, "k", faults=faults) for step in steps]

    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))  # which main changes
    monkeypatch.setattr(check_codegen, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(check_codegen, "compile_and_check", compile_and_check)
    arguments = ["--targets", ",".join(TARGETS), "--cases", "mixed,frozen", "--widths", "512", "--passes", "forward"]
    code, out, _ = command(check_codegen.main, *arguments, "--json", tmp_path / "found.json")
    kernels = json.loads((tmp_path / "found.json").read_text())["kernels"]
    keys = [tuple(kernel[key] for key in ("case", "target", "width", "step")) for kernel in kernels]
    assert keys == [(case, target, 512, "forward") for case in ("mixed", "frozen") for target in TARGETS]
    failing = bad in TARGETS
    assert code == failing
    assert out.splitlines()[-1].endswith(
        "2 fail" if failing else f"{len(keys)} kernels for {', '.join(TARGETS)}: all pass"
    )
    assert (
        out.count("FAILS gfx942 forward mixed D=512 k") == out.count("FAILS gfx942 forward frozen D=512 k") == failing
    )


@pytest.mark.parametrize(
    ("width", "moved", "passes"),
    [
        (8192, 4.03, True), (8192, 4.05, False), (8192, 3.95, False), (16384, 6.05, True), (16384, 6.07, False),
        (4097, 6.05, True), (4095, 6.0, False),
    ],
)  # fmt: skip
def test_rows_are_read_once_up_to_a_width_and_twice_beyond(monkeypatch, width, moved, passes):
    """A floor of 4 bytes an element, and 2 that may come again: within 1 %."""
    monkeypatch.setattr(check_codegen, "launches_of", lambda *_: ([1, 2], 4.0, 2.0))
    halves = lambda _, floor, **call: check_codegen.Kernel(**call, moved=moved / 2)  # noqa: E731
    monkeypatch.setattr(check_codegen, "inspect", halves)
    kernels = check_codegen.compile_and_check("sm_90", "bfloat16", width, ["forward"], None)
    assert [bool(kernel.faults) for kernel in kernels] == [False, not passes]
    monkeypatch.setattr(check_codegen, "launches_of", lambda *_: ([], 4.0, 2.0))
    assert check_codegen.compile_and_check("sm_90", "bfloat16", width, ["forward"], None)[
        0
    ].faults  # nothing was launched


@pytest.mark.parametrize(
    ("step", "case", "floor", "again"),
    [
        ("forward", "bfloat16", 4, 2),
        ("forward", "autocast", 4, 2),
        ("add_forward", "autocast", 2 + 3 * 4, 4),
        ("backward", "float32", 3 * 4, 8),
        ("add_backward", "autocast", 4 * 4, 8),
        ("add_backward", "frozen", 4 * 2, 4),
        ("backward", "no-weight", 3 * 2, 4),
    ],
)
def test_the_floor_is_each_tensor_once_and_rstd(monkeypatch, step, case, floor, again):
    calls = []
    launchers = SimpleNamespace(
        launch_forward=lambda *arguments: calls.append(arguments),
        launch_backward=lambda *arguments: calls.append(arguments),
    )
    monkeypatch.setattr(offline_gpu, "kernels_for", lambda target: launchers)
    assert offline_gpu.launches_of(step, "sm_90", targets.CASES[case], 512) == ([], floor + 4 / 512, again)
    if step.endswith("backward"):
        assert calls[0][-1] == (case not in ("frozen", "no-weight"))  # somebody wants dweight


@pytest.mark.parametrize(
    ("case", "named", "form"),
    [
        ("bfloat16", None, (0.0, False)),
        ("gemma", None, (1.0, True)),
        ("bfloat16", "torch", (0.0, True)),
        ("gemma", "llama", (0.0, False)),
    ],
)
def test_launchers_are_given_the_form(monkeypatch, case, named, form):
    calls = []
    launchers = SimpleNamespace(
        launch_forward=lambda *arguments: calls.append(arguments[4:]),
        launch_backward=lambda *arguments: calls.append(arguments[5:-1]),
    )
    monkeypatch.setattr(offline_gpu, "kernels_for", lambda target: launchers)
    check_codegen.compile_and_check("sm_90", case, 512, list(check_codegen.PASSES), named)
    assert calls == [form] * 4


PTX = """
    .loc 1 10 1
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    .loc 1 11 1
    ld.global.b32 { %r1 }, [ %rd2 + 0 ];
    .loc 1 12 1
    st.global.v4.b32 [ %rd3 + 0 ], { %r1, %r2, %r3, %r4 };
"""


def inspected(monkeypatch, target="sm_90", ptx=PTX, warps=4, shared=0):
    """A kernel of made-up code: two rows a program, in 3 steps each, and a partial sum."""
    width, meta = 1024, {"device": "meta", "dtype": torch.bfloat16}
    args = {"ROWS": 2, "COLS": width, "x": torch.empty(*targets.SHAPE, width, **meta), "w": torch.empty(width, **meta)}
    args |= {
        "y": args["x"],
        "rstd": torch.empty(targets.SHAPE, device="meta"),
        "partial_ptr": torch.empty(8, width, device="meta"),
    }
    accesses = [
        Access(False, "x", 16, (2, width), 3, 1, (10, 1)),
        Access(False, "w", 16, (1, width), 1, 1, (11, 1)),
        Access(True, "y", 16, (2, width), 3, 1, (12, 1)),
        Access(True, "rstd", 32, (2, 1), 3, 1, None),
        Access(True, "partial_ptr", 32, (1, width), 1, 1, None),
    ]
    monkeypatch.setattr(check_codegen, "accesses_of", lambda launch: accesses)
    monkeypatch.setattr(check_codegen, "registers_of", lambda compiled: (32, ""))
    metadata = SimpleNamespace(num_warps=warps, shared=shared)
    compiled = SimpleNamespace(asm={"ptx": ptx, "amdgcn": ""}, metadata=metadata)
    launch = offline_gpu.Launch("kernel", compiled, (100,), args)
    return check_codegen.inspect(launch, target, "forward", "bfloat16", width, 4.0)


def test_bytes_are_counted_by_programs_and_steps(monkeypatch):
    kernel, elements = inspected(monkeypatch), targets.N_ROWS * 1024
    rows = 100 * 3 * 2
    moved = 2 * 2 * rows * 1024 + 2 * 1024 + 4 * rows
    assert kernel.moved == pytest.approx(moved / elements)
    assert kernel.asked == pytest.approx((moved + 2 * 1024 * 99) / elements)
    assert kernel.sums == pytest.approx(2 * 4 * 1024 * 100 / elements)  # written, and read back
    assert (kernel.bits, kernel.row_bits) == (128, 32)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, "loads w by 32 bits (line 11), and 128 are possible"),
        ({"shared": 227 * 1024 + 1}, "needs 232449 bytes of shared memory, and a block may have 232448"),
        ({"warps": 64}, "needs 2048 threads, and a block may have 1024"),
        ({"target": "gfx942", "warps": 17}, "needs 1088 threads, and a block may have 1024"),
        ({"ptx": PTX.partition(".loc 1 12")[0]}, "no instruction was found that accesses y"),
        ({"ptx": PTX + "add.f64 %fd1, %fd2, %fd3;"}, "has 1 instructions in float64"),
    ],
)
def test_what_a_block_can_not_have_is_a_fault(monkeypatch, change, fault):
    assert fault in inspected(monkeypatch, **change).faults
    wide = PTX.replace("ld.global.b32", "ld.global.v4.b32")
    most = {"shared": 227 * 1024, "warps": 32, "ptx": wide}
    assert inspected(monkeypatch, **most).faults == []


@pytest.mark.parametrize(
    ("counts", "spills"),
    [((40, 0, 0, 0), False), ((40, 0, 3, 0), False), ((40, 0, 0, 16), True), ((40, 2, 0, 0), True)],
)
def test_amd_spills_to_memory_alone_count(counts, spills):
    keys = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    text = "\n".join(f"    .{key}:     {count}" for key, count in zip(keys, counts, strict=True))
    registers, words = assembly.registers_of(SimpleNamespace(asm={"amdgcn": text}))
    assert (registers, bool(words)) == (40, spills)
