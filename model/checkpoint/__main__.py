"""Show what a checkpoint directory holds: its config, and the shape and dtype of every tensor."""

from __future__ import annotations

import json
import math
import re
from contextlib import ExitStack
from pathlib import Path

import torch

from kernels import InputError
from model.checkpoint.load import open_checkpoint
from model.cli import Parser, run


def main() -> None:
    parser = Parser("What a checkpoint directory holds: its config, and the shape and dtype of every tensor.")
    parser.add_argument("dir", help="directory with config.json and safetensors")
    parser.add_argument("--finite", action="store_true", help="read every weight, and refuse NaN and infinity")
    args = parser.parse_args()
    folder = Path(args.dir)
    with ExitStack() as opened:
        config, stored = open_checkpoint(folder, opened, torch.device("cpu"), None)
        groups: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
        for tensor in stored.values():  # one line for the same tensor of every layer
            name = re.sub(r"(^|\.)layers\.\d+\.", r"\1layers.*.", tensor.name)
            groups.setdefault((name, tensor.dtype, tensor.shape), []).append(tensor.name)
            if args.finite and not tensor.read().isfinite().all():
                raise InputError(f"{tensor.path}: {tensor.name} has NaN or infinite elements; fetch or train it again")
    for (name, dtype, shape), names in groups.items():
        print(f"{len(names):4} x {name:45} {dtype:5} {' x '.join(map(str, shape))}")
    for key, value in config.to_dict().items():
        print(f"{key}: {json.dumps(value)}")
    counted = [t for name, t in stored.items() if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    print(f"{sum(math.prod(tensor.shape) for tensor in counted):,} parameters, rms_norm_eps {config.rms_norm_eps:g}")


if __name__ == "__main__":
    run(main)
