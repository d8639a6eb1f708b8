"""Training in several processes, as torchrun starts them: the batch divided, and with FSDP2 the weights as well.

Every process draws the same weights and the same batch, and computes its part of the batch. In one process all of this
does nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kernels import InputError
from model.cli import choose_device, rank, world_size
from model.llama import Llama

# What PyTorch says when a process can't be reached has one of these; other errors, which are ours, mostly none.
LOST = re.compile(r"gloo|nccl|connection|socket|rendezvous|\b(tcp|dist)?store\b", re.IGNORECASE)


def own_device(name: str) -> torch.device:
    """The device that `name` asks for: of several GPUs of a machine, the one that is this process's own."""
    device = choose_device(name)
    if world_size() > 1 and device.type == "cuda":
        device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Connect the processes for as long as the block runs. Raises InputError in the others when one of them ends."""
    if world_size() == 1:
        yield
        return
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        yield
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, InputError) or not LOST.search(text):
            raise
        raise InputError(
            f"another process has ended or can't be reached ({text[:200]}); look for its own message; "
            "--resume goes on from what was saved last"
        ) from error
    dist.destroy_process_group()


def in_turn() -> Iterator[None]:
    """`for _ in in_turn(): work()` lets each process do its work when the one before it has finished."""
    for turn in range(world_size()):
        if turn == rank():
            yield
        wait_for_all()


def wait_for_all() -> None:
    if world_size() > 1:
        dist.barrier()


def divide(model: Llama, device: torch.device, fsdp: bool, dtype: torch.dtype) -> nn.Module:
    """What to call in place of `model`, so that its gradients are those of all processes. Moves it to the device.

    With `fsdp` each process holds its part of every weight, in float32, and a layer's whole weights in `dtype` while
    that layer computes; so the residual stream is in `dtype` too, and gradients are summed in float32. Without it, each
    holds all of them. Gradients come as the mean over the processes. Raises InputError where FSDP can't run.
    """
    if not fsdp:
        model.to(device)
        if world_size() == 1:
            return model
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    if world_size() == 1:
        raise InputError("--fsdp divides the weights among processes; start several: torchrun --nproc-per-node N ...")
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise InputError(f"--fsdp on a CPU doesn't run in torch {torch.__version__}; use torch 2.13, or leave it out")
    mesh = init_device_mesh(device.type, (world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def gradient_sync(module: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """Around a forward and its backward: whether its gradients must go to the other processes, or may wait.

    FSDP sends them always, since what waits there waits whole in every process.
    """
    waits = isinstance(module, DistributedDataParallel) and not wanted
    return module.no_sync() if waits else nullcontext()


def part_of(sequences: np.ndarray) -> np.ndarray:
    """Those that are this process's: equal parts, or nearly. May be none of them."""
    return np.array_split(sequences, world_size())[rank()]


def summed(device: torch.device, *numbers: Tensor | float) -> list[float]:
    """Each number's sum over the processes. Waits for the device, once."""
    if world_size() == 1:
        return [float(number) for number in numbers]
    total = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
    dist.all_reduce(total)
    return total.tolist()


def agreed(value: str) -> bool:
    """Whether all processes have the same value."""
    if world_size() == 1:
        return True
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return len(set(values)) == 1


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which this process may hold a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: Llama) -> dict[str, Tensor]:
    """model.state_dict(), whose tensors the first process gets whole. To be called in all of them."""
    if not isinstance(model, FSDPModule):
        return model.state_dict()
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
