"""Time RMSNorm against the speed of a plain copy: forward and backward, alone and with the residual add.

A norm does so little arithmetic that memory limits it. What any implementation has to move, each tensor once, is

    forward        x, y                  and weight
    backward       x, dy, dx             and weight, dweight
    add_forward    x, residual, h, y     and weight
    add_backward   h, dy, dh, dx         and weight, dweight    (x and residual share one gradient)

rstd and partial sums are left out for everyone alike: they are an implementation's own affair. So is a LayerNorm's
bias, of the weight's size. A copy that moves as
many bytes is timed in turn with the norms, and a norm's share is the copy's time over its own: 100 % is the roofline.

Every call finds a cold cache. The forward is that of training, which keeps what the backward needs, and each timed
backward follows a forward of its own, untimed. In eager mode a call starts on an idle device, so that Python and
launches count; in graph mode a CUDA graph is replayed right behind other work, so that only the kernels count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import BACKENDS, DTYPES, LAYER_NORMS, USAGE, Backend, InputError, kernel_errors
from kernels.form import FORMS, LLAMA, Form
from model.cli import Parser, choose_device, make_folder, names_in, positive, run, say, whole_numbers

PEERS = ["torch_fused", "layer_norm", "liger", "quack"]  # of scripts/peers.py, which imports torch
CPU = {"widths": [256, 1024, 4096], "megabytes": 4, "dtype": "float32", "mode": "eager", "repeats": 10}
GPU = {"widths": [1024, 2048, 4096, 8192, 16384], "megabytes": 64, "dtype": "bfloat16", "mode": "both", "repeats": 50}


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    others = ", ".join(name for name in PEERS if name not in LAYER_NORMS)  # USAGE names those
    add("--norms", help=f"comma-separated: {others}, {USAGE} (default: all that can be timed here)")
    add("--form", choices=FORMS, default="llama", help="form of the norm; torch is nn.RMSNorm's")
    add("--widths", type=whole_numbers, help="D, comma-separated (default: 256,1024,4096; on a GPU 1024 to 16384)")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--megabytes", type=positive(float), help="size of x, whatever D (default: 4; on a GPU 64)")
    rows.add_argument("--rows", type=whole_numbers, help="rows of x, comma-separated, instead of its size")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    add("--dtype", choices=DTYPES, help="dtype of x (default: float32; on a GPU bfloat16)")
    add("--weight-dtype", choices=DTYPES, help="dtype of the weight (default: that of x)")
    add("--frozen", action="store_true", help="the weight is not trained: backward gives dx alone")
    add("--mode", choices=["eager", "graph", "both"], help="graph needs a GPU (default: eager; on a GPU both)")
    add("--repeats", type=positive(int), help="timed calls of each norm and pass (default: 10; on a GPU 50)")
    add("--out", type=Path, default=Path("out/bench"), help="folder for norm.json and norm.png")
    parser.refuse_emulation()
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kernels import reference
from kernels.emulated import runs_emulated
from model.config import LlamaConfig
from model.training.picture import why_not_drawn
from scripts import peers
from scripts.bench.measuring import describe
from scripts.bench.norm_report import Result, plot, report

EPS = LlamaConfig.load(ROOT / "configs/tiny.json").rms_norm_eps
# What each pass has to move at least: tensors of x's size, and of the weight's.
FLOOR = {"forward": (2, 1), "backward": (3, 2), "add_forward": (4, 1), "add_backward": (4, 2)}
WARM_UP = 3  # untimed calls, which compile, tune and fill the allocator's pools
COLD = {"cpu": 2**28, "cuda": 2**29}  # bytes read before each timed call: twice the largest last cache, an MI300X's
SAME = 0.02  # how far y may be from the formula, relative to it; rounding to bfloat16 gives 0.004

Norms = dict[str, Backend]
Tensors = tuple[Tensor, ...]  # x, residual, weight, dy, dh and bias
Steps = list[Callable[[], Any]]  # the last is timed, one before it isn't; the first returns the forward's outputs


def load_norms(names: str | None, device: torch.device, form: Form = LLAMA) -> Norms:
    """The norms to time, by name. A default that can't run is left out with a line, and so is Triton without a GPU.

    Raises InputError for a norm that the user names and that can't run, and if none is left.
    """
    norms = {}
    for name in [*BACKENDS, *peers.installed()] if names is None else names_in(names):
        try:
            norm = peers.load(name, device, form)
        except InputError as error:
            if names is not None:
                raise
            print(f"{name} is not timed here: {error}")
            continue
        if "interpreter" in norm.description or runs_emulated(norm):
            print(f"{name} is not timed here: without a GPU its time says nothing about Triton's speed")
        else:
            norms[name] = norm
    if not norms:
        raise InputError(f"--norms is '{names}'; expected norms to time here: {USAGE}")
    return norms


def make_tensors(rows: int, width: int, dtypes: list[torch.dtype], device: torch.device) -> Tensors:
    """`dtypes`: first that of all but the weight and the bias, then theirs."""
    torch.manual_seed(0)
    x, residual, dy, dh = (torch.randn(rows, width, device=device).to(dtypes[0]) for _ in range(4))
    weight, bias = (torch.rand(width, device=device).to(dtypes[1]) for _ in range(2))
    x, residual = x + 1, residual + 1  # with a mean of 0, LayerNorm would pass for RMSNorm
    return x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_(), dy, dh, bias.requires_grad_()


def make_steps(norm: Backend, pass_name: str, tensors: Tensors) -> Steps:
    """The forward, or the forward to run before the backward, and that."""
    x, residual, weight, dy, dh, bias = tensors
    add, outputs = pass_name.startswith("add"), []
    inputs, gradients = ((x, residual, weight), (dy, dh)) if add else ((x, weight), (dy,))
    more = {"bias": bias} if norm.has_bias else {}

    def forward() -> Tensors:
        return norm.add_rms_norm(x, residual, weight, EPS, **more) if add else (norm.rms_norm(x, weight, EPS, **more),)

    def before() -> Tensors:
        outputs.append(forward())
        return outputs[-1]

    wanted = tuple(tensor for tensor in (*inputs, *more.values()) if tensor.requires_grad)

    def backward() -> Tensors:  # raises where one of the gradients is missing
        return torch.autograd.grad(outputs.pop(), wanted, gradients)

    return [before, backward] if pass_name.endswith("backward") else [forward]


def warm_up(steps: Steps, tensors: Tensors, form: Form) -> Result:
    """Run the steps untimed. Returns the distance of their y and h from the formula and, on a GPU, the peak of memory.

    The distance is relative, to the formula in float64, and taken over about 64 of the rows; the peak is in bytes,
    beside what was allocated before.
    """
    x, residual, weight = (tensor.detach() for tensor in tensors[:3])
    there = 0
    for _ in range(WARM_UP):
        outputs = _gradients = None  # frees those of the turn before
        if x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            there = torch.cuda.memory_allocated()
        outputs, *_gradients = [step() for step in steps]
    result = {"peak_bytes": torch.cuda.max_memory_allocated() - there} if x.is_cuda else {}
    some = slice(None, None, max(1, len(x) // 64))
    h = (x if len(outputs) == 1 else x + residual)[some].double()
    pairs = zip(outputs, (reference.rms_norm(h, weight.double(), EPS, *form), h), strict=False)
    distance = torch.stack([(y[some] - wanted).norm() / wanted.norm() for y, wanted in pairs]).max().item()
    return result | {"distance": distance, "same_function": distance < SAME}


def capture(steps: Steps) -> Steps:
    """These steps as CUDA graphs. They share their memory, so they are made in the order of their replay."""
    graphs, pool = [torch.cuda.CUDAGraph() for _ in steps], torch.cuda.graph_pool_handle()
    for graph, step in zip(graphs, steps, strict=True):
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            step()
    return [graph.replay for graph in graphs]


def time_last(steps: Steps, mode: str, other: Tensor) -> float:
    """Microseconds that the last step takes on a cold cache: `other` is read before it, and fills the cache."""
    for step in steps[:-1]:
        step()
    other.sum()  # read and not written, or the step would pay for writing it back
    if not other.is_cuda:
        start = time.perf_counter()
        _result = steps[-1]()  # kept, so that freeing it isn't timed
        return (time.perf_counter() - start) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if mode == "eager":
        torch.cuda.synchronize()
    start.record()
    _result = steps[-1]()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def measure(
    pass_name: str, mode: str, norms: Norms, tensors: Tensors, other: Tensor, repeats: int, form: Form = LLAMA
) -> list[Result]:
    """One pass over one size: a row of results for the copy, and one for each norm."""
    x, _, weight, *_ = tensors
    n_x, n_weight = FLOOR[pass_name]
    n_weight -= pass_name.endswith("backward") and not weight.requires_grad  # there is no dweight
    floor = n_x * x.nbytes + n_weight * weight.nbytes
    source, target = (torch.ones(floor // 2, dtype=torch.uint8, device=x.device) for _ in range(2))
    copy = [lambda: target.copy_(source)]
    copy[0]()
    ready, results = {"copy": capture(copy) if mode == "graph" else copy}, {"copy": {}}
    for name, norm in norms.items():
        steps = make_steps(norm, pass_name, tensors)
        try:
            results[name] = warm_up(steps, tensors, form)
            ready[name] = capture(steps) if mode == "graph" else steps
        except kernel_errors() as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            results[name] = {"refused": f"{type(error).__name__}: {reason}"}

    order, times = list(ready), {name: [] for name in ready}
    for _ in range(repeats):
        for name in order:
            times[name].append(time_last(ready[name], mode, other))
        order.append(order.pop(0))  # another one begins each turn, so that a drift of the machine meets all alike
    for name in ready:
        low, median, high = np.percentile(times[name], [25, 50, 75]).tolist()
        results[name] |= {"median_us": median, "quartiles_us": [low, high]}
        results[name] |= {"gb_per_s": floor / median / 1e3, "share": results["copy"]["median_us"] / median}
    where = {"pass": pass_name, "mode": mode, "width": x.shape[1], "rows": x.shape[0], "floor_bytes": floor}
    return [where | {"norm": name} | result for name, result in results.items()]


def measure_all(args: argparse.Namespace, norms: Norms, device: torch.device) -> list[Result]:
    """Every size, pass and mode."""
    dtypes = [getattr(torch, args.dtype), getattr(torch, args.weight_dtype)]
    x_numbers = args.megabytes * 2**20 / dtypes[0].itemsize
    sizes = [(width, rows) for width in args.widths for rows in args.rows or [max(1, int(x_numbers / width))]]
    calls = list(product(FLOOR, ["eager", "graph"] if args.mode == "both" else [args.mode]))
    # A graph can't be captured on the default stream, and autograd runs a backward on its forward's stream.
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    results = []
    with stream, tqdm(total=len(sizes) * len(calls), unit="cell", disable=None) as bar:
        torch.empty(2**25 - 2**16, dtype=torch.uint8)  # once it is freed, glibc stops giving memory back to Linux
        other = torch.ones(COLD[device.type] // 4, device=device)  # not zeros: Linux would back them with one page
        for width, rows in sizes:
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # or the second width would be compiled for any width, and be slower for it
            tensors = make_tensors(rows, width, dtypes, device)
            for vector in (tensors[2], tensors[5]):  # weight and bias
                vector.requires_grad_(not args.frozen)
            for pass_name, mode in calls:
                bar.set_description(f"{pass_name}, {mode}, {rows} x {width}")
                results += measure(pass_name, mode, norms, tensors, other, args.repeats, FORMS[args.form])
                bar.update()
    return results


def main() -> None:
    args = parse_args()
    device = choose_device(args.device)
    if device.type not in COLD:
        raise InputError(f"--device {device}: this script knows how to time a CPU and CUDA or ROCm; use cpu or cuda")
    for name, value in (GPU if device.type == "cuda" else CPU).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.weight_dtype = args.weight_dtype or args.dtype
    if args.mode != "eager" and device.type != "cuda":
        raise InputError(f"--mode {args.mode}: a CUDA graph needs a GPU and the device is {device}; use --mode eager")
    norms = load_norms(args.norms, device, FORMS[args.form])
    make_folder("--out", args.out)
    results = measure_all(args, norms, device)

    machine = f"{describe(device)}, triton {getattr(sys.modules.get('triton'), '__version__', 'not imported')}"
    arguments = {name: str(value) for name, value in vars(args).items()}
    result = {"machine": machine, "arguments": arguments, "results": results}
    (args.out / "norm.json").write_text(json.dumps(result, indent=1) + "\n")
    form = "" if args.form == "llama" else f", form {args.form}"
    undrawn = why_not_drawn(plot, results, args.out / "norm.png")
    print(machine, f"x in {args.dtype}, weight in {args.weight_dtype}{form}", *report(results), sep="\n")
    say(f"wrote {args.out / 'norm.json'}")
    say(undrawn or f"drew {args.out / 'norm.png'}")


if __name__ == "__main__":
    run(main)
