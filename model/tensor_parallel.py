"""Tensor parallel: every matrix of the model divided over processes (Mohammad Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053), by PyTorch's parallelize_module.

q, k, v, gate and up are divided by their outputs, o and down by their inputs, so a process computes some of the heads
and some of the feed-forward's width, and each sub-layer ends in one sum over the processes. In training the residual
stream is divided along the sequence (Vijay Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198): a process
normalises T / N of the positions, and the sum is a reduce-scatter, before the next sub-layer an all-gather. In
generation, where T is 1, every process has the whole stream, and the sum is an all-reduce. Embedding and head are
divided by the vocabulary.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from kernels import Backend, InputError
from kernels.split import split_hidden
from model.config import LlamaConfig
from model.llama import Llama
from model.norm import RMSNorm


def check_divisible(config: LlamaConfig, n: int) -> None:
    """Raises InputError where the model cannot be divided over `n` processes."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, key) % n:
            raise InputError(f"--tp {n} does not divide {key} {getattr(config, key)}; use a --tp that does")


def parallelize(model: Llama, mesh: DeviceMesh, divide_sequence: bool) -> None:
    """Leave to this process its share of every matrix. The mesh has one axis; all processes hold the same weights.

    With `divide_sequence`, for training, the number of tokens has to be a multiple of the mesh's size, and the logits
    are a DTensor that is divided by the vocabulary, for loss_parallel. Without it they are whole, for sampling.
    """
    n, config = mesh.size(), model.config
    check_divisible(config, n)
    stream = Shard(1) if divide_sequence else Replicate()  # layout of x and residual, (B, T, hidden_size)
    own_rows = NormWeight(Replicate(), Partial() if divide_sequence else Replicate())
    # OLMo 2 normalises all heads together, and a process has some of them: of the row, and of the weight.
    heads = NormWeight(Shard(0), Shard(0)) if config.family.qk_norm == "all" else NormWeight(Replicate(), Partial())
    plan = {
        "embed_tokens": ArrivedRowwise(input_layouts=Replicate(), output_layouts=stream),
        "norm": own_rows,
    }
    if model.lm_head is not None:
        plan["lm_head"] = ColwiseParallel()
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            plan[name] = heads if name.endswith(("q_norm", "k_norm")) else own_rows
        elif name.endswith("attention"):
            plan[name] = whole_input(stream, 3)
        elif name.endswith("feed_forward"):
            plan[name] = whole_input(stream, 1)
        elif name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            plan[name] = ColwiseParallel()
        elif name.endswith(("o_proj", "down_proj")):
            plan[name] = ArrivedRowwise(output_layouts=stream)
    with warnings.catch_warnings():  # torch 2.6 says that a CPU draws random numbers otherwise; none are drawn
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
        parallelize_module(model, mesh, plan)
    # The head reads the whole of the last norm's output.
    last = PrepareModuleOutput(
        output_layouts=(stream, None), desired_output_layouts=(Replicate(), None), use_local_output=False
    )
    parallelize_module(model.norm, mesh, last)
    if not divide_sequence:
        whole = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate())
        parallelize_module(model, mesh, whole)
    own = {key: getattr(config, key) // n for key in ("num_attention_heads", "num_key_value_heads")}
    model.local_config = replace(config, **own)


def whole_input(stream: Placement, n_inputs: int) -> PrepareModuleInput:
    """Gather the first input of a sub-layer; the others are no tensors."""
    others = (None,) * (n_inputs - 1)
    return PrepareModuleInput(input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others))


class ArrivedRowwise(RowwiseParallel):
    """RowwiseParallel with an output that any kernel can read: PyTorch's own is a tensor that is still on its way."""

    @staticmethod
    def _prepare_output_fn(  # pyright: ignore[reportIncompatibleMethodOverride]
        output_layouts: tuple[Placement, ...], use_local_output: bool, module: nn.Module, output: DTensor,
        mesh: DeviceMesh,
    ) -> Tensor:  # fmt: skip
        return output.redistribute(placements=output_layouts).to_local()


class NormWeight(ParallelStyle):
    """A norm's weight in `layout`, for a backend of any kind, which gets plain tensors.

    Replicate: every process holds the weight, and has whole rows, of its own or of its own heads. Shard: it holds a
    part, and has that part of every row (kernels/split.py). `gradient` is the layout of what a process computes as the
    weight's gradient: Partial, to be summed, where the processes have different rows. distributed.TensorParallel does
    that sum, or FSDP. Raises InputError for a backend that computes no part of a row.
    """

    def __init__(self, layout: Placement, gradient: Placement) -> None:
        super().__init__()
        self.layout, self.gradient = layout, gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        if isinstance(self.layout, Shard):
            module.backend = split_hidden(module.backend, device_mesh.get_group(), module.weight.numel())
        for name, parameter in module.named_parameters():
            own = nn.Parameter(distribute_tensor(parameter.data, device_mesh, [self.layout]))
            module.register_parameter(name, own)
        module.backend = on_plain_tensors(module.backend, self.gradient)
        return module


def on_plain_tensors(backend: Backend, gradient: Placement) -> Backend:
    """The backend with its functions called on this process's own tensors."""

    def local(tensor: Tensor) -> Tensor:
        return tensor.to_local(grad_placements=[gradient]) if isinstance(tensor, DTensor) else tensor

    def rms_norm(x: Tensor, weight: Tensor, eps: float, **bias: Tensor) -> Tensor:
        bias = {name: local(tensor) for name, tensor in bias.items()}
        return backend.rms_norm(x, local(weight), eps, **bias)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, **bias: Tensor) -> tuple[Tensor, Tensor]:
        bias = {name: local(tensor) for name, tensor in bias.items()}
        return backend.add_rms_norm(x, residual, local(weight), eps, **bias)

    return backend._replace(rms_norm=rms_norm, add_rms_norm=add_rms_norm)
