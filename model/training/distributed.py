"""Training in several processes, as torchrun starts them: the batch is divided, with FSDP2 or --tp the weights as well.

Every process draws the same weights and the same batch, and computes its part of the batch. With --tp N, N neighbours
compute one part together (model/tensor_parallel.py): processes are a grid of data x tensor, in the order of their
ranks. In one process all of this does nothing.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from kernels import InputError
from model.cli import choose_device, rank, world_size
from model.llama import Llama
from model.tensor_parallel import parallelize

T = TypeVar("T")
# PyTorch's errors about a process that cannot be reached hold one of these words; our own errors mostly hold none.
LOST = re.compile(r"gloo|nccl|connection|socket|rendezvous|\b(tcp|dist)?store\b", re.IGNORECASE)


def own_device(name: str) -> torch.device:
    """The device that `name` asks for; with several GPUs in a machine, this process's own."""
    device = choose_device(name)
    if world_size() > 1 and device.type == "cuda":
        device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(device: torch.device, remedy: str = "--resume continues from the last save") -> Iterator[None]:
    """Connect the processes for as long as the block runs. Raises InputError in the others when one of them ends.

    The error ends in `remedy`, what to do then.
    """
    if world_size() == 1:
        yield
        return
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        with loss_parallel():  # where logits are divided by the vocabulary, as with --tp; others it leaves alone
            yield
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, InputError) or not LOST.search(text):
            raise
        raise InputError(
            f"another process has ended or cannot be reached ({text[:200]}); look for its own message; {remedy}"
        ) from error
    dist.destroy_process_group()


def in_turn(work: Callable[[], T]) -> T:
    """Call `work` in one process after the other, and return this one's result."""
    for _ in range(rank()):
        wait_for_all()
    result = work()
    for _ in range(rank(), world_size()):
        wait_for_all()
    return result


def from_first(work: Callable[[], T]) -> T:
    """Call `work` in the first process alone, and return its result in all."""
    if world_size() == 1:
        return work()
    result = [work() if rank() == 0 else None]
    dist.broadcast_object_list(result)
    return cast(T, result[0])


def wait_for_all() -> None:
    if world_size() > 1:
        dist.barrier()


def divide(model: Llama, device: torch.device, fsdp: bool, tp: int, dtype: torch.dtype) -> nn.Module:
    """Move `model` to the device and return the module to call in its place, whose gradients are means over the data.

    With `tp` each process holds a share of every matrix, and computes with it. With `fsdp` each process holds a float32
    shard of every weight, and gathers a layer's weights in `dtype` while that layer computes. The residual stream is in
    `dtype` then, and gradients are reduced in float32, but for a norm's over the processes of `tp`, in `dtype`. Without
    either, each process holds all weights. Raises InputError where the model cannot be divided, or FSDP cannot run.
    """
    n_data = world_size() // tp
    if fsdp:
        check_fsdp(device, n_data, tp)
    elif tp == 1:
        model.to(device)
        if world_size() == 1:
            return model
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    _quiet()
    mesh = init_device_mesh(device.type, (n_data, tp), mesh_dim_names=("data", "tensor"))
    if tp > 1:
        parallelize(model, mesh["tensor"], divide_sequence=True)  # before the device gets more than its share
        model.to(device)
    if not fsdp:
        return TensorParallel(model, mesh["data"])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    return model


def check_fsdp(device: torch.device, n_data: int, tp: int) -> None:
    """Raises InputError where --fsdp has no processes to divide the weights among, or does not run."""
    if n_data == 1:
        beside = f", beside the {tp} of --tp" if tp > 1 else ""
        raise InputError(
            f"--fsdp divides the weights among processes{beside}; start several: torchrun --nproc-per-node N ..."
        )
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise InputError(f"--fsdp on a CPU does not run in torch {torch.__version__}; use torch 2.13, or leave it out")


def _quiet() -> None:
    """Silence PyTorch's warnings of what we do not do, or do on purpose with a few numbers, in every process."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # an operation in place on its output
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two collectives for one


class TensorParallel(nn.Module):
    """A divided model in place of DistributedDataParallel, which takes no DTensors."""

    def __init__(self, model: Llama, data: DeviceMesh) -> None:
        super().__init__()
        self.model, self.data = model, data

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Afterwards add up gradients of which each process has those of its rows, and take means over the data."""
        yield
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            if self.data.size() > 1:
                own = parameter.grad.to_local()
                dist.all_reduce(own, group=self.data.get_group())
                own /= self.data.size()


def gradient_sync(module: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """Context for one forward and backward: skip the gradient all-reduce unless `wanted`.

    FSDP always reduces, since gradients that wait are whole ones in every process.
    """
    if isinstance(module, DistributedDataParallel) and not wanted:
        return module.no_sync()
    if isinstance(module, TensorParallel) and wanted:
        return module.reducing()
    return nullcontext()


def part_of(sequences: np.ndarray, tp: int) -> np.ndarray:
    """This process's share of the sequences, as equal as they divide. It may be empty; `tp` processes have the same."""
    return np.array_split(sequences, world_size() // tp)[rank() // tp]


def summed(device: torch.device, *numbers: Tensor | float, copies: int = 1) -> list[float]:
    """Sum of each number over the processes, of which `copies` hold the same. Waits for the device, once."""
    if world_size() == 1:
        return [float(number) for number in numbers]
    total = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
    dist.all_reduce(total)
    return (total / copies).tolist()


def agreed(value: str) -> bool:
    """True if all processes hold the same value."""
    if world_size() == 1:
        return True
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return len(set(values)) == 1


def finite(model: Llama, device: torch.device) -> bool:
    """True if no weight of any process's shard is NaN or infinite."""
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    damaged = torch.stack([~shard.isfinite().all() for shard in shards]).any()
    return summed(device, damaged)[0] == 0


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which this process may hold a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def of_all_rows(squares: Tensor, tp: int) -> Tensor:
    """What input_mean_squares finds, (4, n_norms), over the rows of all processes."""
    if tp == 1:
        return squares
    parts = [torch.empty_like(squares) for _ in range(world_size())]
    dist.all_gather(parts, squares)
    mean, least, largest, share = torch.stack(parts, dim=1)  # each (n_processes, n_norms)
    return torch.stack([mean.mean(0), least.amin(0), largest.amax(0), share.mean(0)])


def whole_weights(model: Llama) -> dict[str, Any]:
    """model.state_dict() with whole tensors in the first process. Call it in all processes."""
    if not isinstance(model, FSDPModule) and not isinstance(model.norm.weight, DTensor):
        return model.state_dict()
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
