"""Operations of a model, counted from its shapes, and what a GPU can do of them."""

from __future__ import annotations

import torch

from model.cli import world_size
from model.llama import Llama

# Dense products in bfloat16, accumulated in float32, operations a second. From NVIDIA's data sheets, which since Hopper
# state the sparse figure, twice as large; for the RTX 4090 from the white paper of its Ada architecture.
PEAK_FLOPS = {
    "L4": 121e12,
    "RTX 4090": 165e12,
    "A100": 312e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_tokens_per_s(device_name: str, dtype: torch.dtype, flops: float) -> float | None:
    """Tokens a second that all processes would train at the GPUs' peak in bfloat16, with `flops` a token; else None."""
    peak = peak_flops(device_name)
    return peak * world_size() / flops if peak and dtype == torch.bfloat16 else None


def peak_flops(device_name: str) -> float | None:
    """Peak of a GPU as torch.cuda.get_device_name calls it; None for those that PEAK_FLOPS does not list."""
    words = f" {device_name.replace('-', ' ')} "
    if " MIG " in words or " Laptop " in words:  # a slice of the GPU, or a smaller one
        return None
    known = [name for name in PEAK_FLOPS if f" {name} " in words]  # whole words: an L40S is no L4
    return PEAK_FLOPS[max(known, key=len)] if known else None


def forward_flops(model: Llama, n_tokens: int, n_sequences: int, n_logits: int) -> int:
    """Multiplications and additions of a forward's matrix products, with the causal half of attention's."""
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("layers."))
    head = config.vocab_size * config.hidden_size * n_logits
    width = config.num_attention_heads * config.head_dim
    attention = config.num_hidden_layers * 2 * width * n_tokens * (n_tokens + 1) // 2
    return 2 * n_sequences * (matrices * n_tokens + head + attention)


def training_flops(model: Llama, block_size: int) -> float:
    """Operations of training on one token: a forward, and a backward that counts as two forwards."""
    return 3 * forward_flops(model, block_size, 1, block_size) / block_size
