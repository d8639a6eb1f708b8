"""Kernels written by hand, in PTX, run on the emulated GPU: what the compiler emits isn't needed, nor Triton."""

import numpy as np
import torch

from kernels.emulated.machine import Machine
from kernels.emulated.memory import GlobalMemory
from kernels.emulated.ptx import parse

REGISTERS = ".reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<32>; .reg .b64 %l<32>;"
SHARED = ".extern .shared .align 16 .b8 global_smem[];"


def kernel(body, n_parameters, threads=32, head=SHARED):
    """The text of a kernel whose parameters are addresses, in %l0, %l1, ..."""
    parameters = ",\n".join(f"\t.param .u64 .ptr .global .align 1 kernel_param_{i}" for i in range(n_parameters))
    loads = "\n".join(f"\tld.param.b64 %l{i}, [kernel_param_{i}];" for i in range(n_parameters))
    return (
        f".version 8.7\n.target sm_90a\n.address_size 64\n{head}\n"
        f".visible .entry kernel(\n{parameters}\n)\n.reqntid {threads}\n{{\n{REGISTERS}\n{loads}\n{body}\n\tret;\n}}\n"
    )


def launch(body, *tensors, threads=32, blocks=1, shared=0, counts=None):
    """Run the kernel on tensors, whose addresses are in %l0, %l1, ..."""
    memory = GlobalMemory()
    arguments = [memory.add(f"argument_{i}", tensor) for i, tensor in enumerate(tensors)]
    machine = Machine(parse(kernel(body, len(tensors), threads)), shared)
    machine.run((blocks, 1, 1), arguments, memory, counts)


def compute(instructions, *inputs, result, threads=32):
    """What the instructions leave in %y, with the inputs in %a, %b, ...: NumPy arrays, one element a thread.

    A bool is a predicate. A number of 8 bits is in a register of 16.
    """
    inputs = np.broadcast_arrays(*(np.atleast_1d(each) for each in inputs))
    n, result = inputs[0].size, np.dtype(result)
    blocks = -(-n // threads)
    tensors, body = [], ["mov.u32 %r31, %tid.x;", "mov.u32 %r30, %ctaid.x;", f"mad.lo.s32 %r31, %r30, {threads}, %r31;"]
    for number, (name, array) in enumerate(zip("abcd", inputs, strict=False)):
        size = array.dtype.itemsize
        padded = np.resize(array.reshape(-1), blocks * threads)
        tensors.append(torch.from_numpy(padded.view(np.uint8)))
        body += [f".reg .b{max(16, 8 * size)} %{name};", f"mad.wide.u32 %l31, %r31, {size}, %l{number};"]
        loaded = f"ld.global.{'u' if size == 1 else 'b'}{8 * size}"
        if array.dtype == np.bool_:
            body[-2:] = [f".reg .pred %{name};", body[-1], f"{loaded} %h0, [%l31];", f"setp.ne.b16 %{name}, %h0, 0;"]
        else:
            body.append(f"{loaded} %{name}, [%l31];")
    size = result.itemsize
    out = torch.zeros(blocks * threads * size, dtype=torch.uint8)
    if result == np.bool_:
        body += [".reg .pred %y;", instructions, "selp.b16 %h0, 1, 0, %y;"]
    else:
        body += [f".reg .b{max(16, 8 * size)} %y;", instructions]
    value = "%h0" if result == np.bool_ else "%y"
    body += [f"mad.wide.u32 %l31, %r31, {size}, %l{len(tensors)};"]
    body += [f"st.global.{'u' if size == 1 else 'b'}{8 * size} [%l31], {value};"]
    launch("\n".join(body), *tensors, out, threads=threads, blocks=blocks)
    return out.numpy().view(result)[:n].reshape(inputs[0].shape)
