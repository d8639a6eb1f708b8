"""Kernels written by hand, in PTX, run on the emulated GPU: neither Triton nor its compiler is needed."""

import numpy as np
import torch

from kernels.emulated.machine import Machine
from kernels.emulated.memory import GlobalMemory
from kernels.emulated.ptx import parse

REGISTERS = ".reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<32>; .reg .b64 %l<32>;"


def kernel(body, n_parameters, threads=32):
    """The text of a kernel whose parameters are addresses, in %l0, %l1, ..."""
    parameters = ",\n".join(f"\t.param .u64 .ptr .global .align 1 kernel_param_{i}" for i in range(n_parameters))
    loads = "\n".join(f"\tld.param.b64 %l{i}, [kernel_param_{i}];" for i in range(n_parameters))
    return (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 global_smem[];\n"
        f".visible .entry kernel(\n{parameters}\n)\n.reqntid {threads}\n{{\n{REGISTERS}\n{loads}\n{body}\n\tret;\n}}\n"
    )


def launch(body, *tensors, threads=32, blocks=1, shared=0):
    """Run the kernel on tensors, whose addresses are in %l0, %l1, ..."""
    memory = GlobalMemory()
    arguments = [memory.add(f"argument_{i}", tensor) for i, tensor in enumerate(tensors)]
    Machine(parse(kernel(body, len(tensors), threads)), shared).run((blocks, 1, 1), arguments, memory)


def apply(name, *inputs, result, threads=32):
    """What one instruction gives of the inputs: NumPy arrays, one element a thread."""
    operands = ", ".join(["%y", "%a", "%b", "%c", "%d"][: len(inputs) + 1])
    return compute(f"{name} {operands};", *inputs, result=result, threads=threads)


def compute(instructions, *inputs, result, threads=32):
    """What the instructions leave in %y, of NumPy type `result`, with the inputs in %a, %b, ...: one element a thread.

    A bool is a predicate. A number of 8 bits is in a register of 16.
    """
    inputs, result = np.broadcast_arrays(*map(np.atleast_1d, inputs)), np.dtype(result)
    n_threads = -(-inputs[0].size // threads) * threads
    tensors = [torch.from_numpy(np.resize(array, n_threads).view(np.uint8)) for array in inputs]
    tensors.append(torch.zeros(n_threads * result.itemsize, dtype=torch.uint8))
    body = [f"mov.u32 %r31, %tid.x; mov.u32 %r30, %ctaid.x; mad.lo.s32 %r31, %r30, {threads}, %r31;"]
    for number, (name, array) in enumerate(zip(["%a", "%b", "%c", "%d"], inputs, strict=False)):
        loaded = "%h0" if array.dtype == np.bool_ else name
        body += [declaration(name, array.dtype), f"mad.wide.u32 %l31, %r31, {array.itemsize}, %l{number};"]
        body += [f"ld.global.{'u' if array.itemsize == 1 else 'b'}{8 * array.itemsize} {loaded}, [%l31];"]
        body += [f"setp.ne.b16 {name}, %h0, 0;"] if loaded != name else []
    body += [declaration("%y", result), instructions, f"mad.wide.u32 %l31, %r31, {result.itemsize}, %l{len(inputs)};"]
    if result == np.bool_:
        body += ["selp.b16 %h0, 1, 0, %y; st.global.b8 [%l31], %h0;"]
    else:
        body += [f"st.global.b{8 * result.itemsize} [%l31], %y;"]
    launch("\n".join(body), *tensors, threads=threads, blocks=n_threads // threads)
    return tensors[-1].numpy().view(result)[: inputs[0].size].reshape(inputs[0].shape)


def declaration(register, dtype):
    return f".reg .{'pred' if dtype == np.bool_ else f'b{max(16, 8 * dtype.itemsize)}'} {register};"
