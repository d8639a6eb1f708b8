"""The parser: PTX as Triton writes it, and what it does not read is named."""

import pytest

from kernels.emulated.ptx import EmulationError, parse, split
from tests.kernels.emulated.by_hand import kernel

TRITONS = """\
.version 8.7
.target sm_90a
.address_size 64

	// .globl	_scale    // -- Begin function _scale
.extern .shared .align 16 .b8 global_smem[];
.shared .align 8 .b8 fixed[24];
                                        // @_scale
.visible .entry _scale(
	.param .u64 .ptr .global .align 1 _scale_param_0,
	.param .f32 _scale_param_1,
	.param .u32 _scale_param_2
)
.reqntid 64, 2, 1
{
	.reg .pred 	%p<3>;
	.reg .b16 	%rs<2>;
	.reg .b32 	%r<4>, %extra;
	.reg .f64 	%fd;
	.loc	1 25 0                          // kernels.py:25:0
$L__func_begin0:
	ld.param.b32 	%r1, [_scale_param_2]; // n; and a comment
	.loc	1 30 35
	.loc	2 216 16, function_name $L__info_string0, inlined_at 1 30 35 // standard.py:216:16
	.loc	2 196 12, function_name $L__info_string0, inlined_at 2 216 16
	@%p1 bra 	$L__BB0_2;
	.loc	1 0 12
	// begin inline asm
	{
		.reg .b32 %t;
		mov.b32 %t, 0;
		@!%p2 st.shared.v2.b32
		[ %r1 + 8 ], { %t, %r2 };
	}
	// end inline asm
	bar.sync 0; cp.async.commit_group;
$L__BB0_2:
	.pragma "nounroll";
	fence.proxy.async::generic;
	ret;
}
	.file	1 "/home/somebody/kernels.py"
	.file	2 "/usr/lib/triton/language/standard.py"
"""


def test_a_kernel_as_triton_writes_it():
    program = parse(TRITONS)
    assert program.name == "_scale"
    assert program.parameters == ("_scale_param_0", "_scale_param_1", "_scale_param_2")
    assert program.threads == 128
    assert program.static_shared == {"fixed": 24}
    assert program.registers == {
        "%p0": 1, "%p1": 1, "%p2": 1, "%rs0": 16, "%rs1": 16, "%r0": 32, "%r1": 32, "%r2": 32, "%r3": 32, "%extra": 32,
        "%fd": 64, "%t": 32,
    }  # fmt: skip
    assert [(i.name, i.operands, i.predicate, i.negated) for i in program.instructions] == [
        ("ld.param.b32", ("%r1", "[_scale_param_2]"), None, False),
        ("bra", ("$L__BB0_2",), "%p1", False),
        ("mov.b32", ("%t", "0"), None, False),
        ("st.shared.v2.b32", ("[ %r1 + 8 ]", "{ %t, %r2 }"), "%p2", True),
        ("bar.sync", ("0",), None, False),
        ("cp.async.commit_group", (), None, False),
        ("fence.proxy.async::generic", (), None, False),
        ("ret", (), None, False),
    ]
    assert program.labels == {"$L__func_begin0": 0, "$L__BB0_2": 6}


def test_the_source_lines():
    """The last .loc counts; line 0 stands for none. Of a function that is called, the line that calls it is named."""
    places = [str(instruction.place) for instruction in parse(TRITONS).instructions]
    inside = "standard.py:196:12, called at kernels.py:30:35"
    assert places == ["kernels.py:25:0", *[inside] * 7]
    assert parse(TRITONS.replace(".loc", "// .loc")).instructions[0].place is None


def test_operands_are_split_at_commas_outside_of_brackets():
    assert split("%r1, {%r2, %r3}, [%rd1 + 8], (a, b), -1") == ["%r1", "{%r2, %r3}", "[%rd1 + 8]", "(a, b)", "-1"]
    assert split("") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((".entry", ".func"), r"the PTX has no \.entry; expected a kernel as Triton compiles it"),
        ((".reqntid 64, 2, 1", ""), r"_scale: the PTX does not say how many threads a block has \(\.reqntid\)"),
        (("ret;\n}", "ret;"), "the PTX ends inside a kernel"),
        ((".param .f32 _scale_param_1", ".param .align 64 .b8 _scale_param_1[128]"), "takes a parameter in memory"),
        (("bar.sync 0;", "BAR 0;"), "can't read the PTX statement 'BAR 0'"),
        (("%fd;", "%fd; .reg .b128 %q;"), r"does not know registers of type \.b128"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_has_another_shape_is_named(change, message):
    old, new = change
    assert old in TRITONS
    with pytest.raises(EmulationError, match=message):
        parse(TRITONS.replace(old, new, 1))


def test_maxntid_gives_the_threads_too():
    assert parse(kernel("", 0).replace(".reqntid 32", ".maxntid 96")).threads == 96


def test_lines_of_inline_assembly_are_not_lines_of_the_source():
    """Triton 3.8 counts them on from the line of the call."""
    body = """
\t.loc 1 12 9
\t// begin inline asm
\t.loc 1 12 9
\tmov.u32 %r1, 0x0;
\t.loc 1 13 9
\tld.global.b32 { %r1 }, [ %l0 + 0 ];
\t// end inline asm
\tadd.s32 %r1, %r1, 1;
\t.loc 1 15 3
\tadd.s32 %r1, %r1, 1;
"""
    places = [str(instruction.place) for instruction in parse(kernel(body, 1)).instructions[1:5]]
    assert places == ["1:12:9", "1:12:9", "1:12:9", "1:15:3"]
