"""What a training run takes, computed from shapes: memory, operations and time. Nothing is allocated for it.

The model is built and run forward on PyTorch's fake tensors, which have shapes and dtypes and no memory. So what
autograd keeps for the backward is counted on the very operations that training runs, instead of by a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch._functorch.config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import Backend, InputError, kernel_errors
from model.config import LlamaConfig
from model.llama import Llama, checkpoint_layers, summed_loss
from model.norm import RMSNorm
from model.training.flops import PEAK_FLOPS, training_flops

# Share of the peak that the model's operations get. Llama 3's training had 38 to 43 % (https://arxiv.org/abs/2407.21783).
PLAN_MFU = 0.4


def saved_bytes(run: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """What autograd keeps for the backward of run(): each storage once, and none of the parameters' own.

    That includes the copies that autocast makes of weights, and a checkpointed layer's x and residual. It leaves out
    what a checkpointed layer is given as no tensor of its own: the Span, one for all layers, whose angles take
    4 * head_dim bytes a position.
    """
    own = {parameter.untyped_storage()._cdata for parameter in parameters}
    storages = {}  # they are held here until all are counted, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


def fake_forward(
    config: LlamaConfig, norm: Backend, dtype: torch.dtype, n_sequences: int, block_size: int,
    checkpoint_activations: bool, fsdp: bool,
) -> tuple[Llama, int]:  # fmt: skip
    """A model on fake tensors, and the bytes that it keeps for the backward of n_sequences of block_size tokens.

    With `fsdp` it computes as FSDP has it: in `dtype` throughout, and no copy of a weight is kept.
    Raises InputError where the norm can't compute with fake tensors.
    """
    # Code that would read a fake tensor's memory gets an error, where by default it would read address 0.
    no_memory = torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False)
    # On the CPU even for a GPU's run: its attention is fused for every dtype, and keeps no matrix of T x T.
    with no_memory, FakeTensorMode():
        try:
            RMSNorm(config.hidden_size, config.rms_norm_eps, norm)(*torch.zeros(2, 1, config.hidden_size))
        except kernel_errors() as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
            raise InputError(
                f"the norm {norm.description} can't be planned, since it fails on tensors without memory "
                f"({type(error).__name__}: {reason}); plan with --norm torch, reference or triton"
            ) from error
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype if fsdp else usual)  # Module.to fails on fake parameters
        model = Llama(config, norm)
        torch.set_default_dtype(usual)
        if checkpoint_activations:
            checkpoint_layers(model)
        batch = torch.zeros(n_sequences, block_size + 1, dtype=torch.long)

        def loss() -> Tensor:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32 and not fsdp):
                return summed_loss(model, batch)

        return model, saved_bytes(loss, model.parameters())


def plan(
    config: LlamaConfig, norm: Backend, *, dtype: torch.dtype, batch_size: int, block_size: int, grad_accum: int,
    steps: int, n_processes: int, fsdp: bool, checkpoint_activations: bool,
) -> str:  # fmt: skip
    """The lines that say what a run with these settings takes, for train.py to print.

    What is kept for the backward is what PyTorch's operators for a CPU keep, without torch.compile. Layers that the
    backward computes again are work too, about one forward more, but none that MFU counts, and the times are for
    PLAN_MFU.
    Raises InputError for a norm that can't be planned.
    """
    n_sequences = math.ceil(math.ceil(batch_size / n_processes) / grad_accum)
    model, saved = fake_forward(config, norm, dtype, n_sequences, block_size, checkpoint_activations, fsdp)
    n_parameters = sum(p.numel() for p in model.parameters())
    n_in_layers = sum(p.numel() for p in model.layers.parameters())
    n_in_tables = n_parameters - n_in_layers - config.hidden_size  # which the last norm has
    tables = "the embedding" if model.lm_head is None else "the embedding and the head"
    weights = 4 * n_parameters / (n_processes if fsdp else 1)

    kept, temporaries = (
        f"kept for the backward of {n_sequences} x {block_size:,} tokens at once",
        "temporaries come on top",
    )
    if fsdp:  # of the whole weights a layer at a time is here, and what stands outside the layers from the first use on
        whole = dtype.itemsize * (n_in_tables + n_in_layers / config.num_hidden_layers)
        temporaries += f", among them whole weights in {str(dtype).removeprefix('torch.')}: {amount(whole, 'B')}"
    elif dtype == torch.bfloat16 and checkpoint_activations:  # autocast holds them until the forward ends
        temporaries += f", among them bfloat16 copies of the layers' weights: {amount(2 * n_in_layers, 'B')}"
    elif dtype == torch.bfloat16:
        kept += ", with bfloat16 copies of the weights"

    flops = training_flops(model, block_size)
    n_tokens = steps * batch_size * block_size
    rows = [
        ("parameters", f"{n_parameters:,}", f"{n_in_tables:,} of them in {tables}"),
        ("memory of a process", "", f"{n_processes} in all, each with {'a share' if fsdp else 'all'} of the weights"),
        ("  weights", amount(weights, "B"), "float32"),
        ("  gradients", amount(weights, "B"), "float32"),
        ("  Adam's two moments", amount(2 * weights, "B"), "float32"),
        ("  activations", amount(saved, "B"), kept),
        ("  together", amount(4 * weights + saved, "B"), temporaries),
        ("FLOPs of a token", amount(flops, "FLOP"), "forward and backward, counted as three forwards"),
        ("tokens of the run", f"{n_tokens:,}", f"{steps:,} steps of {batch_size:,} x {block_size:,}"),
    ]
    if dtype == torch.bfloat16:
        rows.append((f"time at {PLAN_MFU:.0%} MFU", "", f"{n_processes} x"))
        for peak in sorted(set(PEAK_FLOPS.values())):
            names = ", ".join(name for name in PEAK_FLOPS if PEAK_FLOPS[name] == peak)
            time = duration(flops * n_tokens / (peak * PLAN_MFU * n_processes))
            rows.append((f"  {names}", time, f"{peak / 1e12:,.0f} TFLOP/s"))
    else:
        rows.append(("time", "unknown", "the peaks known here are those of bfloat16"))
    return "\n".join(f"{label:22}{value:>18}  {note}" for label, value, note in rows)


def amount(number: float, unit: str) -> str:
    return f"{number / 1e9:,.2f} G{unit}" if number >= 1e9 else f"{number / 1e6:,.2f} M{unit}"


def duration(seconds: float) -> str:
    """In the largest unit of which it is at least two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} seconds"
