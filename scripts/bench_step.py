"""Time a whole training step of a small model on a CPU with one norm after the other, forward, backward and AdamW.

bench_norm.py times the norm alone, on a cold cache. This says what is left of its differences in a model: the norms'
share of a step is small, and with --compile Inductor makes one graph of the model, whatever the norm is.

Every model has the same first weights and the same random tokens, and the norms take turns, so a drift of the machine
meets all. A ratio is a norm's time over the first norm's in the same turn; medians stand with their quartiles.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import USAGE, InputError
from model.cli import Parser, positive, run

TINY = ROOT / "configs/tiny.json"
WARM_UP = 2  # untimed steps with each norm, which compile and fill the allocator's pools


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--norms", help=f"comma-separated: {USAGE} (default: those of bench_norm.py)")
    add("--config", type=Path, help="the model's shape, a config.json (default: configs/tiny.json)")
    add("--batch-size", type=positive(int), default=16, help="sequences a step")
    add("--block-size", type=positive(int), default=128, help="tokens a sequence")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16 is autocast, as in train.py")
    add("--compile", action="store_true", help="compile each model as a whole, which takes a minute or two")
    add("--repeats", type=positive(int), default=10, help="timed steps with each norm")
    parser.refuse_emulation()
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

import numpy as np
import torch
from tqdm import tqdm

from model.cli import check_compilable
from model.config import LlamaConfig
from model.llama import Llama
from scripts.bench.measuring import cell, describe
from scripts.bench.model_parts import CPU, training_step
from scripts.bench_norm import load_norms


def main() -> None:
    args = parse_args()
    shape = args.config or TINY
    config = LlamaConfig.load(shape)
    if config.norm:
        raise InputError(f"{shape} has norm {config.norm}; expected a shape on RMSNorm, whose place --norms take")
    if args.block_size > config.context_length:
        raise InputError(f"--block-size is {args.block_size}; expected at most {config.context_length}, the model's")
    norms = load_norms(args.norms, CPU, config.family.form)
    torch.manual_seed(0)
    batch = torch.randint(config.vocab_size, (args.batch_size, args.block_size + 1))
    steps = {}
    for name, norm in norms.items():
        if args.compile:
            check_compilable(name, norm, CPU)
        torch.manual_seed(0)
        model = Llama(config, norm)
        steps[name] = training_step(batch, args.dtype, model, torch.compile(model) if args.compile else model)

    order, times = list(steps), {name: [] for name in steps}
    for turn in tqdm(range(WARM_UP + args.repeats), unit="turn", disable=None):
        for name in order:
            took = steps[name]()
            if turn >= WARM_UP:
                times[name].append(took)
        order.append(order.pop(0))  # another one begins each turn

    how = "compiled as a whole" if args.compile else "eager but for the norm"
    print(describe(CPU))
    print(f"{shape.stem}, {args.batch_size} x {args.block_size} tokens, {args.dtype}, {how}")
    first = next(iter(times))
    print(f"{'norm':24}{'a step':>28}   over {first}")
    for name, found in times.items():
        ratio = cell(np.array(found) / np.array(times[first]), ".2f")
        print(f"{name:24}{cell(np.array(found) * 1e3, '.4g', 'ms'):>28}   {ratio}")


if __name__ == "__main__":
    run(main)
