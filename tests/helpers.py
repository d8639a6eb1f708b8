"""Helpers that tests share: a text, a small config, weights worth testing, and a run's metrics."""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from model.llama import Llama

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TEXT = "".join(f"def f{i % 7}(x):\n    return x + {i % 10}\n\n" for i in range(400))
TRAINED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 3e-3,
    "vocab_size": 290,
}

# float32 logits lie at the end of 3 layers of 7 products and the head, each a sum of up to 80 terms whose roundings
# add up at random: 22 * sqrt(80) * 2^-24 of the largest logit.
FLOAT32_BOUND = 22 * 80**0.5 * 2**-24
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux alone")


def draw_weights(model: torch.nn.Module, std: float) -> None:
    """Weights that all matter, for a model of ours or of transformers: norms away from 1, no bias at 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=std)


def train_dtype():
    """The name of the dtype that training runs compute in."""
    return os.environ["TRAIN_DTYPE"]


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(metrics):
    return [line["loss"] for line in metrics]


def greedy(model: Llama, ids: list[int], n_new: int, n_ids: int | None = None) -> list[int]:
    """Every token from a forward over all tokens before it, without a cache."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(n_new):
            ids.append(model(torch.tensor([ids]))[0, -1, :n_ids].argmax().item())
    return ids[-n_new:]


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def texts(rows) -> list[list[int]]:
    """New ids of each prompt, from the rows that generate yields."""
    columns = zip(*rows, strict=True)
    return [[id for id in column if id is not None] for column in columns]


def relative(difference, logits):
    return (difference.abs().max() / logits.abs().max()).item()
