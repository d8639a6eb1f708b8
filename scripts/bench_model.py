"""Time the whole model on a CPU, against transformers' model of the same family and the limits of the machine.

Both models have the same weights, but for training, and run in turn: ours, theirs, ours, theirs. So a drift of the
machine meets both. A ratio is theirs over ours within one turn, in time or in bytes: above 1, ours is faster or
smaller. Medians stand with their quartiles. Decoding is greedy, with a batch of 1, and its first token isn't counted.
transformers decodes twice: with generate(), and with a bare loop over its forward, which is the model alone.

The limits are measured in the same run: the bandwidth of reading 256 MB, and the rate of a matrix product. To decode a
token, every weight is read once, so the share of the bandwidth says how far from the fastest possible that is.

Without --ckpt the weights are random, in the shape of SmolLM2-135M or --config, and saved in a temporary folder. The
training step is that of a small model of the same family.

With --growth, how cost grows is measured instead: the time of a decoded token with the context and with the model's
size, and time and memory of a training step with its tokens and with the layers, beside what each must cost at the
least. All weights and cached keys are random there, and of --ckpt only the shape counts.

    python scripts/bench_model.py --growth --dtypes bfloat16 --repeats 3 --picture out/growth.png    takes minutes
    python scripts/bench_model.py --growth context --contexts 128,1024 --dtypes float32
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import USAGE, InputError
from model.cli import Parser, make_folder, names_in, png, positive, run, say, whole_numbers

IN_EACH_DTYPE = ["prefill", "decode", "context", "cache", "train"]
PARTS = [*IN_EACH_DTYPE, "load", "start"]
HERE = [part for part in PARTS if part != "load" or Path("/proc/self/clear_refs").exists()]  # it reads Linux's /proc
GROWTH = ["context", "size", "tokens", "layers"]
DTYPES = ["float32", "bfloat16"]
CONTEXTS = [128, 512, 2048]
GROWTH_CONTEXTS = [128, 512, 2048, 8192, 32768]
SMOLLM2_135M = ROOT / "configs/smollm2-135m.json"


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--ckpt", type=Path, help="checkpoint directory (default: random weights)")
    config_help = "shape of the random weights, a config.json (default: configs/smollm2-135m.json)"
    model.add_argument("--config", type=Path, help=config_help)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--parts", type=names_in, default=",".join(HERE), help="what to measure, comma-separated")
    every = ",".join(GROWTH)
    growth_help = f"measure how cost grows with these, in place of the parts (alone: {every})"
    measured.add_argument("--growth", type=names_in, nargs="?", const=every, metavar="WITH", help=growth_help)
    add("--picture", type=png, help="PNG file for --growth")
    add("--dtypes", type=names_in, default=",".join(DTYPES), help="comma-separated; in training, bfloat16 is autocast")
    add("--norm", default="auto", help=f"what computes our RMSNorm: {USAGE}")
    add("--compile", action="store_true", help="compile our decoding step, and both models in training")
    add("--prefill", type=positive(int), default=512, help="tokens of the prefill")
    add("--tokens", type=positive(int), default=64, help="tokens to decode")
    contexts_help = "time a token after so many others (default: 128,512,2048; of --growth on to 32768)"
    add("--contexts", type=whole_numbers, help=contexts_help)
    add("--repeats", type=positive(int), default=5, help="turns of ours and theirs")
    add("--threads", type=positive(int), help="threads of PyTorch (default: its own choice)")
    parser.refuse_emulation()
    args = parser.parse_args()
    flags = [("--parts", args.parts, PARTS), ("--dtypes", args.dtypes, DTYPES)]
    if args.growth is not None:
        flags.append(("--growth", args.growth, GROWTH))
    elif args.picture:
        raise InputError("--picture is of --growth, which is not asked for; add it, or leave --picture out")
    for flag, names, known in flags:
        if not names or set(names) - set(known):
            raise InputError(f"{flag} is '{','.join(names)}'; expected some of {','.join(known)}")
    args.contexts = args.contexts or (GROWTH_CONTEXTS if args.growth else CONTEXTS)
    if args.tokens < 2:
        raise InputError("--tokens is 1, and the first isn't counted; expected 2 or more")
    if "load" in args.parts and not Path("/proc/self/clear_refs").exists():
        raise InputError("--parts load reads Linux's /proc, which isn't here; name the other parts")
    if args.ckpt is not None and not args.ckpt.is_dir():
        raise InputError(f"no checkpoint directory at {args.ckpt}; name one, or leave --ckpt out")
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # of transformers, between the rows; read when it is imported
import torch

from kernels import load_backend
from model.checkpoint.save import save_checkpoint
from model.config import LlamaConfig
from model.llama import Llama
from model.tokenizer.sentencepiece_model import train_tokenizer
from model.training.picture import why_not_drawn
from scripts.bench import growth, growth_picture, model_parts
from scripts.bench.measuring import HEAD, describe, line, measure_limits
from scripts.bench.model_parts import CPU, Setup


def random_checkpoint(folder: Path, config: LlamaConfig) -> Path:
    torch.manual_seed(0)
    model = Llama(config, load_backend("reference", CPU))
    save_checkpoint(folder, model, train_tokenizer([Path(__file__).read_text(encoding="utf-8")], 400))
    return folder


def measure_parts(args: argparse.Namespace, setup: Setup) -> None:
    jobs = [(part, dtype) for dtype in args.dtypes for part in IN_EACH_DTYPE] + [("load", ""), ("start", "")]
    for part, dtype in jobs:
        if part in args.parts:
            say(f"{part} {dtype}")
            for row in getattr(model_parts, part)(setup._replace(dtype=dtype)):
                print(line(row), flush=True)


def measure_growth(args: argparse.Namespace, setup: Setup) -> None:
    points, before = [], {}
    for dtype in args.dtypes:
        for question in filter(args.growth.__contains__, GROWTH):
            say(f"{question} {dtype}")
            for point in growth.measure(question, setup._replace(dtype=dtype)):
                print(line(point.row(before.get((point.panel, dtype)))), flush=True)
                points.append(point)
                before[point.panel, dtype] = point
    if args.picture:
        say(why_not_drawn(growth_picture.draw, points, args.picture) or f"drawn: {args.picture}")


def main() -> None:
    args = parse_args()
    if args.picture:
        make_folder("--picture", args.picture.parent)
    norm = load_backend(args.norm, CPU)
    shape = args.config or SMOLLM2_135M
    path = args.ckpt / "config.json" if args.ckpt else shape
    config = LlamaConfig.load(path)
    if config.norm:
        raise InputError(f"{path} has the norm {config.norm}, and transformers RMSNorm alone; name a model with that")
    warnings.filterwarnings("ignore", message=".past_key_values. is deprecated")  # its successor is new in 5.24
    if args.threads:
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the processes started here
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.ckpt.resolve() if args.ckpt else Path(temporary) / "random"
        if not args.ckpt and not args.growth:
            random_checkpoint(folder, config)
        checkpoint = args.ckpt or f"{shape.stem}, random weights"
        print(f"{checkpoint}; norm {norm.description}; {args.repeats} pairs, median [quartiles]\n{describe(CPU)}")
        say("machine")
        bandwidth, products = measure_limits(args.dtypes)
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in products.items())
        print(f"the machine reads {bandwidth / 1e9:.1f} GB/s and multiplies matrices at {rates}")
        if not model_parts.transformers:
            print("transformers is not installed (pip install transformers): ours alone, without ratios")
        print(HEAD, flush=True)
        measure = measure_growth if args.growth else measure_parts
        measure(args, Setup(args, folder, config, norm, bandwidth, products, ""))


if __name__ == "__main__":
    run(main)
