"""Bytes that a real step sends over gloo, by kind, for test_traffic.py."""

import contextlib

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.cli import world_size
from model.llama import checkpoint_layers, summed_loss
from model.training import distributed
from model.training.traffic import KINDS, bytes_sent
from scripts.plan import saved_bytes
from tests.helpers import CPU
from tests.model.divided import config_of, model_of


class Sent(TorchDispatchMode):
    """Adds up what collectives of two processes send: half of a tensor that is gathered or scattered."""

    def __init__(self):
        super().__init__()
        self.bytes = dict.fromkeys(KINDS, 0.0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # until it has become an operation on this process's own tensors
        name = func.name()
        if name.startswith("_c10d_functional::all_gather_into"):
            self.add("all-gather of activations", args[0].nbytes)
        elif name.startswith("_c10d_functional::reduce_scatter"):
            self.add("reduce-scatter of activations", args[0].nbytes / 2)
        elif name.startswith("_c10d_functional::all_reduce") and args[0].dim() == 1:  # more: of the loss
            self.add("all-reduce of gradients", args[0].nbytes)
        elif name == "c10d::_allgather_base_":
            self.add("all-gather of weights", args[1].nbytes)
        elif name == "c10d::_reduce_scatter_base_":
            self.add("reduce-scatter of gradients", args[1].nbytes / 2)
        elif name == "c10d::allreduce_":
            self.add("all-reduce of gradients", sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **kwargs or {})

    def add(self, kind, n_bytes):
        self.bytes[kind] += n_bytes


def measured(name, more, tp, fsdp, dtype, recomputed, n_parts=2):
    """(bytes sent, bytes planned) by kind."""
    config, n_data = config_of(name, more), world_size() // tp
    model = model_of(config, "reference", torch.float32)
    sizes = 3 * 8 * n_parts, n_parts
    planned = bytes_sent(model, n_data, tp, fsdp, dtype.itemsize, *sizes, recomputed)
    if recomputed:
        checkpoint_layers(model)
    wrapped = distributed.divide(model, CPU, fsdp, tp, dtype)
    autocast = dtype != torch.float32 and not fsdp
    with Sent() as sent:
        for i in range(n_parts):
            with distributed.gradient_sync(wrapped, wanted=i + 1 == n_parts):
                with torch.autocast("cpu", dtype) if autocast else contextlib.nullcontext():
                    loss = summed_loss(wrapped, torch.zeros(3, 9, dtype=torch.long))
                distributed.whole(loss).backward()
    return sent.bytes, planned


def kept(name, dtype, recomputed):
    """Bytes that autograd keeps in this process for the backward of 3 x 8 tokens, with 2 processes a matrix."""
    model = model_of(config_of(name), "torch", torch.float32)
    if recomputed:
        checkpoint_layers(model)
    wrapped = distributed.divide(model, CPU, False, 2, dtype)

    def loss():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return summed_loss(wrapped, torch.zeros(3, 9, dtype=torch.long))

    return saved_bytes(loss, model.parameters())


def cases(arguments, of_memory=()):
    return [measured(*each) for each in arguments], [kept(*each) for each in of_memory]
