"""Hold every address that a kernel reads or writes to the elements of the tensors that it was launched with.

This is for Triton's interpreter (TRITON_INTERPRET=1 pytest ...). An emulated GPU does it in every launch.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from kernels import triton_rms_norm
from kernels.emulated import emulated_gpu
from kernels.emulated.machine import Machine


def check_addresses(monkeypatch, last_program=False):
    """From now on a launch raises InterpreterError at an address that is no element of its tensors.

    It raises AssertionError if a tensor that was stored to was not stored to wholly, each element once. With
    `last_program` the first axis of the grid is its last index alone, so that outputs may be larger than memory.
    """
    if not emulated_gpu():
        monkeypatch.setattr(triton_rms_norm, "wrap_triton", lambda kernel: _Checked(kernel, last_program))
    elif last_program:
        monkeypatch.setattr(Machine, "run", functools.partialmethod(_run_last_program, Machine.run))


def _run_last_program(self, run, grid, *arguments, **options):
    ids = np.arange(math.prod(grid))
    run(self, grid, *arguments, **{**options, "only": ids[ids % grid[0] == grid[0] - 1]})


class _Checked:
    def __init__(self, kernel, last_program):
        self.kernel, self.last_program = kernel, last_program

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *args, **options):
        names = {id(arg): name for name, arg in zip(self.kernel.arg_names, args, strict=False)}
        tensors = {names[id(arg)]: arg for arg in args if isinstance(arg, torch.Tensor) and arg.numel()}
        stored = {name: [] for name in tensors}
        first = grid[0] - 1 if self.last_program else 0
        builder: Any = InterpreterBuilder
        load, store, program_id = builder.create_masked_load, builder.create_masked_store, builder.create_get_program_id

        def checked_load(self, ptrs, mask, *rest):
            owner(ptrs.data[mask.data])
            return load(self, ptrs, mask, *rest)

        def checked_store(self, ptrs, value, mask, *rest):
            addresses = ptrs.data[mask.data]
            if len(addresses):
                stored[owner(addresses)].append(addresses)
            return store(self, ptrs, value, mask, *rest)

        def shifted_id(self, axis):
            handle = program_id(self, axis)
            handle.data += first if axis == 0 else 0
            return handle

        def owner(addresses):
            """Name of the tensor with all of these elements."""
            for name, tensor in tensors.items():
                if _are_elements(addresses, tensor):
                    return name
            raise AssertionError(f"a kernel touched an address outside {', '.join(tensors)}")

        try:
            builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
            builder.create_get_program_id = shifted_id
            # One element each: Triton takes the pointers alone, and 3.2 would copy the tensors.
            pointers = [arg.as_strided((1,), (1,)) if names.get(id(arg)) in tensors else arg for arg in args]
            self.kernel[(grid[0] - first, *grid[1:])](*pointers, **options)
        finally:
            builder.create_masked_load, builder.create_masked_store = load, store
            builder.create_get_program_id = program_id
        for name, parts in stored.items():
            if parts and not self.last_program:
                found, expected = np.sort(np.concatenate(parts)), np.sort(_elements(tensors[name]))
                assert np.array_equal(found, expected), f"{name} was not stored to wholly, each element once"


def _are_elements(addresses, tensor):
    if tensor.numel() < 2**24:
        return bool(np.isin(addresses, _elements(tensor)).all())
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.itemsize * steps
    return not len(addresses) or bool(first <= addresses.min() and addresses.max() <= last)


def _elements(tensor):
    """Addresses of all elements, as the interpreter's pointers have them."""
    offsets = np.zeros(1, np.uint64)
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(n, dtype=np.uint64) * np.uint64(stride * tensor.itemsize))
    return np.uint64(tensor.data_ptr()) + offsets.ravel()
