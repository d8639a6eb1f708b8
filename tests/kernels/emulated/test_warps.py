"""What threads of a warp or a block do together, by the manual's own loops over lanes."""

import itertools

import numpy as np
import pytest
import torch

from kernels.emulated.ptx import EmulationError
from tests.kernels.emulated.by_hand import compute, launch

LANES = np.arange(64, dtype=np.uint32)


def shuffle(mode, value, distance, clamp, segment):
    """The manual's description: what each lane of two warps gets, and whether it came from a lane in range."""
    found, valid = [], []
    for thread in range(64):
        lane, by = thread & 31, int(distance[thread]) & 31
        lowest = lane & segment
        highest = lowest | (clamp & ~segment)
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": lowest | (by & ~segment)}[mode]
        valid.append(source >= highest if mode == "up" else source <= highest)
        found.append(value[thread - lane + (source if valid[-1] else lane)])
    return np.array(found), np.array(valid)


@pytest.mark.parametrize("name", ["shfl.sync.up.b32", "shfl.sync.down.b32", "shfl.sync.bfly.b32", "shfl.sync.idx.b32"])
def test_shuffles(name):
    """In whole warps and in segments of them, by one distance or by each lane's own."""
    mode, value = name.split(".")[2], LANES * 7 + 1000
    mixed = np.random.default_rng(0).integers(0, 40, 64).astype(np.uint32)
    for width, distance in itertools.product((32, 16, 4), (0, 1, 2, 5, 16, 31, mixed)):
        segment, clamp = 32 - width, 0 if mode == "up" else 31
        distance = np.broadcast_to(np.uint32(distance), 64)
        expected, valid = shuffle(mode, value, distance, clamp, segment)
        limits = segment << 8 | clamp
        text = f"{name} %y, %a, %b, {limits}, -1;"
        assert (compute(text, value, distance, result=np.uint32, threads=64) == expected).all(), (width, distance)
        text = f"{name} %r0|%y, %a, %b, {limits}, -1;"
        assert (compute(text, value, distance, result=np.bool_, threads=64) == valid).all(), (width, distance)


def test_a_shuffle_of_what_all_lanes_share():
    assert (compute("mov.b32 %r0, 9; shfl.sync.bfly.b32 %y, %r0, 1, 31, -1;", LANES, result=np.uint32) == 9).all()


def test_votes():
    """Of each warp."""
    generator = np.random.default_rng(0)
    truths = [generator.random(64) < 0.5, np.arange(64) < 32, np.arange(64) >= 32, np.arange(64) == 5]
    modes = {
        "vote.sync.any.pred": np.any,
        "vote.sync.all.pred": np.all,
        "vote.sync.uni.pred": lambda p: p.all() or not p.any(),
    }
    for truth in truths:
        warps = truth.reshape(2, 32)
        for name, of in modes.items():
            found = compute(f"{name} %y, %a, -1;", truth, result=np.bool_, threads=64)
            assert (found.reshape(2, 32) == [[of(warp)] for warp in warps]).all(), name
            found = compute(f"{name} %y, !%a, -1;", truth, result=np.bool_, threads=64)
            assert (found.reshape(2, 32) == [[of(~warp)] for warp in warps]).all(), name
        found = compute("vote.sync.ballot.b32 %y, %a, -1;", truth, result=np.uint32, threads=64)
        expected = [sum(1 << lane for lane in range(32) if warp[lane]) for warp in warps]
        assert (found.reshape(2, 32) == [[each] for each in expected]).all()


@pytest.mark.parametrize(
    "name",
    [
        "redux.sync.add.s32", "redux.sync.add.u32", "redux.sync.min.s32", "redux.sync.max.u32", "redux.sync.and.b32",
        "redux.sync.or.b32", "redux.sync.xor.b32",
    ],
)  # fmt: skip
def test_reductions_of_integers(name):
    _, _, base, kind = name.split(".")
    dtype = np.int32 if kind == "s32" else np.uint32
    x = np.random.default_rng(0).integers(0, 2**32, 64).astype(np.uint32).view(dtype)
    functions = {"add": sum, "min": min, "max": max}
    bits = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}
    expected = []
    for warp in x.reshape(2, 32).tolist():
        value = warp[0]
        for each in warp[1:]:
            value = functions[base]([value, each]) if base in functions else bits[base](value, each)
        expected.append(value & 0xFFFFFFFF)
    found = compute(f"{name} %y, %a, -1;", x, result=dtype, threads=64).view(np.uint32).reshape(2, 32)
    assert (found == np.array(expected)[:, None]).all()


def test_reductions_of_floats():
    """Of sm_100. NaN are left out, unless .NaN."""
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    x[40] = np.nan
    modes = {
        "redux.sync.min.f32": np.fmin.reduce, "redux.sync.min.NaN.f32": np.minimum.reduce,
        "redux.sync.max.f32": np.fmax.reduce, "redux.sync.max.NaN.f32": np.maximum.reduce,
        "redux.sync.max.abs.f32": lambda x: np.fmax.reduce(np.abs(x)),
    }  # fmt: skip
    for name, of in modes.items():
        found = compute(f"{name} %y, %a, -1;", x, result=np.float32, threads=64).reshape(2, 32)
        np.testing.assert_array_equal(found, [[of(warp)] * 32 for warp in x.reshape(2, 32)], name)


def test_one_lane_is_elected():
    found = compute("elect.sync %r0|%y, -1;", LANES, result=np.bool_, threads=64)
    assert (found == (LANES % 32 == 0)).all()


def test_what_says_no_value_changes_none():
    quiet = "fence.acq_rel.gpu; fence.proxy.async.shared::cta; membar.gl; griddepcontrol.wait; nanosleep.u32 100;"
    assert (compute(f"{quiet} mov.b32 %y, %a;", LANES, result=np.uint32) == LANES).all()


def test_barriers_let_warps_see_each_other():
    """Without one, or with one of each warp only, the second warp's read is refused."""
    out = torch.zeros(64, dtype=torch.int32)
    body = """
        mov.u32 %r0, %tid.x;
        shl.b32 %r1, %r0, 2;
        st.shared.b32 [%r1], %r0;
        BARRIER
        xor.b32 %r2, %r1, 128;
        ld.shared.b32 %r3, [%r2];
        mad.wide.u32 %l8, %r0, 4, %l0;
        st.global.b32 [%l8], %r3;
    """
    for barrier in ("bar.sync 0;", "barrier.sync 0;", "bar.warp.sync -1; bar.sync 0;"):
        launch(body.replace("BARRIER", barrier), out, threads=64, shared=256)
        assert (out == torch.arange(64) ^ 32).all()
    for barrier in ("", "bar.warp.sync -1;"):
        with pytest.raises(EmulationError, match="that another warp has written since the last barrier"):
            launch(body.replace("BARRIER", barrier), out, threads=64, shared=256)


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("shfl.sync.bfly.b32 %r3, %r0, 1, 31, -1;", "a shuffle"),
        ("vote.sync.any.pred %p3, %p0, -1;", "a vote"),
        ("redux.sync.add.s32 %r3, %r0, -1;", "a reduction"),
        ("bar.warp.sync -1;", "a barrier of its warp"),
        ("bar.sync 0;", "a barrier"),
    ],
)
def test_what_a_part_of_the_threads_does_not_reach_is_refused(instruction, what):
    body = f"mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 40; @!%p0 bra $L__end; {instruction}\n$L__end:\n"
    with pytest.raises(EmulationError, match=rf"kernel at .*thread 40: does not reach {what} that others reach"):
        launch(body, threads=64)
    launch(body.replace("40", "64"), threads=64)


@pytest.mark.parametrize("name", ["match.any.sync.b32 %r1, %r0, -1;", "bar.arrive 1, 64;", "bar.sync 1, 64;"])
def test_what_is_not_known_is_named(name):
    """A barrier for a part of the block could not be told from one that a part does not reach."""
    with pytest.raises(
        EmulationError, match=rf"\({name.split()[0]}\): the emulated GPU does not know this instruction"
    ):
        launch(f"mov.u32 %r0, %tid.x; {name}", threads=64)
