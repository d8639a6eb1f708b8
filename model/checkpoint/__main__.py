"""Show what a checkpoint directory holds: its config, and the shape and dtype of every tensor.

python -m model.checkpoint DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from model.cli import Parser, run


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.prog = "python -m model.checkpoint"
    parser.add_argument("dir", type=Path, help="directory with config.json and safetensors")
    parser.add_argument("--finite", action="store_true", help="read every weight, and refuse NaN and infinity")
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

import json
import math
import re
from collections import Counter
from contextlib import ExitStack

import torch

from kernels import InputError
from model.checkpoint.load import open_checkpoint


def main() -> None:
    args = parse_args()
    groups = Counter()
    n_parameters = 0
    with ExitStack() as opened:
        config, stored = open_checkpoint(args.dir, opened, torch.device("cpu"), None)
        for name, tensor in stored.items():
            if args.finite and not tensor.read().isfinite().all():
                raise InputError(f"{tensor.path}: {tensor.name} has NaN or infinite elements; fetch or train it again")
            group = re.sub(r"(^|\.)layers\.\d+\.", r"\1layers.*.", tensor.name), tensor.dtype, tensor.shape
            groups[group] += 1  # one line for the same tensor of every layer
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                n_parameters += math.prod(tensor.shape)
    for (name, dtype, shape), count in groups.items():
        print(f"{count:4} x {name:45} {dtype:5} {' x '.join(map(str, shape))}")
    for key, value in config.to_dict().items():
        print(f"{key}: {json.dumps(value)}")
    print(f"{n_parameters:,} parameters, rms_norm_eps {config.rms_norm_eps:g}")


if __name__ == "__main__":
    run(main)
