"""The check passes on the kernels as they are, and finds what is planted in a copy of them."""

import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is made for Linux alone")

import triton

from scripts import check_codegen
from scripts.codegen import assembly, targets
from tests.helpers import ROOT

KNOWN = [name for name, gpu in targets.TARGETS.items() if targets.version_of(triton) >= gpu.since]
TARGETS = [name for name in ("sm_90", "gfx942") if name in KNOWN]


def check(root, *arguments):
    """Run the command in a process of its own, since this one has Triton in its interpreter: (exit code, stdout)."""
    command = [sys.executable, str(root / "scripts/check_codegen.py"), "--targets", ",".join(TARGETS), "--jobs", "1"]
    result = subprocess.run([*command, "--cases", "bfloat16", *arguments], capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    return result.returncode, result.stdout


def test_kernels_pass():
    code, out = check(ROOT, "--widths", "1000,16384,40000")
    assert code == 0, out
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
    half = ('[(triton.cdiv(rstd.numel(), tile["ROWS"]),)]', '[(triton.cdiv(rstd.numel(), 2 * tile["ROWS"]),)]')
    too_little = check_copy(1024, half)
    race = check_copy(65536, ("tl.debug_barrier()", "pass"), step="add_forward")
    copies = too_large, too_much, too_little, race
    return {target: "; ".join(findings[target] for findings in copies) for target in TARGETS}


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
