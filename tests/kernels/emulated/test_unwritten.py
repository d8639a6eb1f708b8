"""Which memory counts as written by nobody; by kernels written by hand."""

import resource

import pytest
import torch

from kernels.emulated.machine import Machine
from kernels.emulated.memory import GlobalMemory
from kernels.emulated.ptx import EmulationError, parse
from kernels.emulated.unwritten import FRESH, LARGEST, shadow_of, watch_fresh_memory
from tests.kernels.emulated.by_hand import kernel

PLACE = "mov.u32 %r30, %tid.x; mad.wide.s32 %l8, %r30, 4, %l0;"
LOAD = "ld.global.b32 %r0, [%l8];"
STORE = "st.global.b32 [%l8], %r30;"


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """As emulate() leaves torch, and undone after the test."""
    for owner, name in FRESH:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    watch_fresh_memory()


def run(body, *tensors):
    """32 threads, and a launch as the driver makes it. %l8 is a thread's place in the first tensor, 4 bytes each."""
    memory = GlobalMemory()
    arguments = [memory.add(f"argument_{i}", tensor, shadow_of(tensor)) for i, tensor in enumerate(tensors)]
    Machine(parse(kernel(f"{PLACE}\n{body}", len(tensors))), 256).run((1, 1, 1), arguments, memory)


def refused(body, thread, place, *tensors, does="reads"):
    message = rf"thread {thread}: {does} global memory that nobody has written: byte {place} of argument_0"
    with pytest.raises(EmulationError, match=message):
        run(body, *tensors)


FUNCTIONS = {
    "empty": lambda dtype: torch.empty(32, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(4, 8), dtype=dtype),
    "empty_strided": lambda dtype: torch.empty_strided((2, 16), (16, 1), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(3).new_empty((32,), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.zeros(3).new_empty_strided((32,), (1,), dtype=dtype),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_nobody_has_written_is_nan_and_is_not_read(name, dtype):
    x = FUNCTIONS[name](dtype)
    assert x.isnan().all()
    access = f"ld.global.b{8 * min(4, x.itemsize)}"
    refused(f"mad.wide.s32 %l8, %r30, {x.itemsize}, %l0;\n{access} %r0, [%l8];", 0, 0, x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_are_watched_too(dtype):
    refused(LOAD, 0, 0, torch.empty(32, dtype=dtype))


@pytest.mark.parametrize("access", ["atom.global.add.u32 %r0, [%l8], 1;", "red.global.add.u32 [%l8], 1;"])
def test_nor_is_it_changed(access):
    refused("setp.gt.u32 %p0, %r30, 3; @%p0 " + access, 4, 16, torch.empty(32, dtype=torch.int32), does="changes")


def test_nor_copied():
    copy = "shl.b32 %r1, %r30, 2; cp.async.ca.shared.global [%r1], [%l8], 4, {};"
    refused(copy.format(4), 0, 0, torch.empty(32))
    run(copy.format(0), torch.empty(32))


def test_a_launch_writes_what_the_next_one_reads():
    x = torch.empty(32)
    run(STORE, x)
    run(LOAD, x)
    assert shadow_of(x) is None  # nothing is left to watch
    half = torch.empty(32)
    run("setp.lt.u32 %p0, %r30, 20; @%p0 " + STORE, half)
    run("setp.lt.u32 %p0, %r30, 20; @%p0 " + LOAD, half)
    refused(LOAD, 20, 80, half)
    refused("setp.gt.u32 %p0, %r30, 25; @%p0 " + LOAD, 26, 104, half)


def test_a_store_and_a_load_of_one_launch():
    run(f"{STORE}\nbar.sync 0;\n{LOAD}", torch.empty(32))
    refused(f"{LOAD}\n{STORE}", 0, 0, torch.empty(32))
    other = "xor.b32 %r1, %r30, 1; mad.wide.s32 %l9, %r1, 4, %l0;"
    refused(f"{other} setp.lt.u32 %p0, %r30, 31; @%p0 {STORE} ld.global.b32 %r0, [%l9];", 30, 124, torch.empty(32))


def test_vectors_and_halves_of_what_is_written():
    x = torch.empty(128)
    run("setp.ne.s32 %p0, %r30, 6; @%p0 " + STORE, x)
    vector = (
        "mad.wide.s32 %l9, %r30, 16, %l0; setp.lt.u32 %p0, %r30, 8; @%p0 ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%l9];"
    )
    refused(vector, 1, 16, x)
    x[6] = 0
    run(vector, x)
    halves = "ld.global.b16 %h0, [%l8 + 2];"
    run(halves, x)
    refused(halves, 0, 2, torch.empty(32))


WRITERS = {
    "fill_": lambda x: x.fill_(0),
    "copy_": lambda x: x.copy_(torch.randn(32)),
    "a part": lambda x: (x[:10].fill_(1), x[10:].fill_(2)),
    "nan": lambda x: x.fill_(torch.nan),
    "-1, a NaN of ones as a float": lambda x: x.view(torch.int32).fill_(-1),
    "data": lambda x: x.data.normal_(),
    "no_grad": lambda x: torch.nn.init.ones_(x),
    "numpy": lambda x: x.numpy().fill(3),
    "out": lambda x: torch.add(torch.ones(32), 1, out=x),
    "set by bytes": lambda x: x.untyped_storage().copy_(torch.ones(32).untyped_storage()),
    "parameter": lambda x: torch.nn.Parameter(x).data.zero_(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_others_write_counts(name):
    """NumPy, collectives and .data leave no trace in a tensor's version."""
    x = torch.empty(32)
    WRITERS[name](x)
    run(LOAD, x)


def test_what_others_leave_does_not_count():
    x = torch.empty(32)
    x[3:30] = 0
    run("sub.s32 %r1, %r30, 3; setp.lt.u32 %p0, %r1, 27; @%p0 " + LOAD, x)
    refused(LOAD, 0, 0, x)
    refused("setp.gt.u32 %p0, %r30, 5; @%p0 " + LOAD, 30, 120, x)
    copied = torch.empty(32).copy_(torch.empty(32))
    refused(LOAD, 0, 0, copied)


def test_views_share_what_is_known():
    x = torch.empty(64)
    for view in (x[32:], x.view(2, 32), x.detach(), x.data, torch.nn.Parameter(x), x.unsqueeze(0)):
        refused(LOAD, 0, 0, view)
    run(STORE, x[32:])
    run(LOAD, x[32:])
    refused(LOAD, 0, 0, x)
    run(STORE, x)
    for view in (x[32:], x.view(2, 32), x.detach(), x.data):
        run(LOAD, view)


def test_memory_that_is_used_again_is_new():
    """What lies where a dead tensor lay is written, unless it is fresh itself."""
    for _ in range(20):
        x = torch.empty(32)
        del x
        x = torch.zeros(32)  # most likely there
        run(LOAD, x)
        del x
        refused(LOAD, 0, 0, torch.empty(32))


def test_a_storage_that_grows_is_no_longer_watched():
    x = torch.empty(16)
    x.resize_(64)
    run("ld.global.b32 %r0, [%l8 + 128];", x)


def test_integers_of_few_bits_are_not_watched():
    """Any of their numbers may be one that somebody has written unseen."""
    for dtype in (torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn):
        x = torch.empty(128, dtype=dtype)
        assert shadow_of(x) is None
        run(LOAD, x)


def test_inference_mode():
    with torch.inference_mode():
        x = torch.empty(32)
        refused(LOAD, 0, 0, x)
        x.fill_(1)
        run(LOAD, x)


def test_no_page_of_a_huge_tensor_is_touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.empty(LARGEST // 2, dtype=torch.int64)
    run(STORE, x)
    run(LOAD, x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KB


def test_what_has_no_memory_of_its_own_is_left_alone():
    assert torch.empty(3, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(3).device.type == torch.nn.Linear(3, 4).weight.device.type == "meta"
    assert torch.empty(2, 2, layout=torch.sparse_coo).to_dense().eq(0).all()
    assert torch.empty(0).shape == (0,)
    x = torch.ones(4)
    assert torch.empty(4, out=x) is x
    assert x.eq(1).all()


def test_transforms_of_torch_func():
    x = torch.randn(3, 4)

    def twice(x):
        return torch.empty_like(x).copy_(x) + x.new_empty(x.shape).copy_(x)

    for found in (torch.func.vmap(twice)(x), torch.func.vmap(torch.func.vjp(twice, x[0])[1])(x)[0]):
        assert found.equal(2 * x)
