"""Every instruction that our kernels and Triton's tutorials are compiled to is tested on its own."""

import ast
import re
from importlib.util import find_spec

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux alone")
FOLDER = ROOT / "tests" / "kernels" / "emulated"


def names_in(path):
    """All words in the strings of a test file that are no docstrings: instructions are among them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from re.findall(r"(?<![\w.:%$])[a-z][\w.:]*", node.value)


TESTED = {name for path in [*FOLDER.glob("test_*.py"), FOLDER / "by_hand.py"] for name in names_in(path)}


@pytest.mark.parametrize("gpu", ["sm_80", pytest.param("sm_100", marks=pytest.mark.long)])
def test_every_instruction_of_our_kernels_and_the_tutorials_is_tested(compiled, gpu):
    found = compiled(gpu, "forms:names")
    assert len(found["ours"]) > 80
    # shared::cta is shared memory by its full name; test_accesses.py has both spellings of each access.
    plain = {whose: {name.replace("shared::cta", "shared") for name in names} for whose, names in found.items()}
    assert not {whose: names - TESTED for whose, names in plain.items() if names - TESTED}


# Liger's kernels (0.8.5, as Triton 3.9 compiles them for sm_80 and sm_100) have these besides.
LIGERS = [
    "abs.bf16", "abs.bf16x2", "abs.f32", "abs.ftz.f32", "add.bf16", "add.rn.f32.bf16", "and.b64",
    "atom.global.gpu.acq_rel.add.noftz.bf16", "atom.relaxed.gpu.global.cas.b32", "cvt.rn.f32.u32", "cvt.u32.u16",
    "div.s32", "ex2.approx.ftz.f32", "fence.acq_rel.gpu", "fma.rn.ftz.f32", "ld.global.ca.b16", "ld.global.ca.b32",
    "ld.global.cg.b16", "ld.global.cg.b32", "ld.relaxed.gpu.global.b32", "ld.shared.b16", "max.bf16", "max.s32",
    "min.s64", "not.b32", "rcp.approx.ftz.f32", "redux.sync.add.s32", "rem.s32", "selp.b16", "setp.eq.bf16",
    "setp.eq.f32", "setp.ge.f32", "setp.ge.s64", "setp.gt.bf16", "setp.gt.u32", "setp.le.s64", "setp.lt.f32",
    "setp.lt.s64", "setp.ne.b64", "shfl.sync.up.b32", "st.global.cs.b16", "st.global.cs.b32", "st.global.wb.b16",
    "st.global.wb.b32", "sub.bf16", "sub.bf16x2", "sub.rn.f32.bf16", "sub.s64", "xor.b16",
]  # fmt: skip


def test_every_instruction_of_ligers_kernels_is_tested():
    assert not set(LIGERS) - TESTED
