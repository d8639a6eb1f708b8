"""Bytes that a process sends in a training step, by kind, from shapes alone.

Counted is what a ring sends, and no algorithm sends less: of a tensor that n processes gather or reduce-scatter, each
sends (n - 1) / n; an all-reduce is both. Left out are three numbers a token for the loss that is divided by
the vocabulary, and a few a step, the losses and the gradient's norm.
"""

from __future__ import annotations

from torch import nn

from model.llama import Llama
from model.norm import RMSNorm

KINDS = (
    "all-gather of weights", "reduce-scatter of gradients", "all-reduce of gradients",
    "all-gather of activations", "reduce-scatter of activations",
)  # fmt: skip


def bytes_sent(
    model: Llama, n_data: int, tp: int, fsdp: bool, itemsize: int, n_tokens: int, n_parts: int, recomputed: bool
) -> dict[str, float]:
    """Bytes of each kind in a step of `n_tokens` a group of `tp` processes, computed in `n_parts`.

    The model is whole. `itemsize` is that of the dtype that it computes in: with FSDP that of all activations, without
    it (autocast) that of matrix products alone. `recomputed`: with --checkpoint-activations.
    """
    data, tensor = (n_data - 1) / n_data, (tp - 1) / tp
    layers = own_parameters(model.layers, tp)
    everything = own_parameters(model, tp)
    norms = sum(p.numel() for module in model.modules() if isinstance(module, RMSNorm) for p in module.parameters())
    stream = itemsize if fsdp else 4  # bytes of what norms and embedding return
    row = n_tokens * model.config.hidden_size
    n_sublayers, again = 2 * len(model.layers), 2 if recomputed else 1
    sent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    if fsdp:  # a layer's weights for the forward and for the backward, the others once
        sent["all-gather of weights"] = n_parts * data * itemsize * (layers + everything)
        sent["reduce-scatter of gradients"] = n_parts * data * 4 * everything
    else:
        sent["all-reduce of gradients"] = 2 * data * 4 * everything
    # A process has the gradient of a norm's weight from its own rows.
    sent["all-reduce of gradients"] += 2 * tensor * norms * (itemsize * n_parts if fsdp else 4)
    # Each sub-layer gathers its input and scatters its output, and the backward does the opposite. So do the head, with
    # an input alone, and the embedding, with an output alone.
    inputs, outputs = n_sublayers * stream, n_sublayers * itemsize
    sent["all-gather of activations"] = tensor * row * (again * inputs + outputs + 2 * stream)
    # A layer's last product need not be computed again.
    scattered = outputs + (outputs / 2 if recomputed else 0)
    sent["reduce-scatter of activations"] = tensor * row * (scattered + inputs + 2 * stream)
    return sent


def own_parameters(module: nn.Module, tp: int) -> int:
    """Parameters of which a process of tensor parallel holds its share: all but norms and biases of outputs divide."""
    return sum(p.numel() if is_shared(name) else p.numel() // tp for name, p in module.named_parameters())


def is_shared(name: str) -> bool:
    """True for parameters that each process of tensor parallel holds whole."""
    return "norm." in name or name.endswith(("o_proj.bias", "down_proj.bias"))
