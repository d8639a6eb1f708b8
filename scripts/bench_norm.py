"""Time RMSNorm against the speed of a plain copy: forward and backward, alone and with the residual add.

A norm does so little arithmetic that memory limits it. What any implementation has to move, each tensor once, is

    forward        x, y                  and weight
    backward       x, dy, dx             and weight, dweight
    add_forward    x, residual, h, y     and weight
    add_backward   h, dy, dh, dx         and weight, dweight    (x and residual share one gradient)

rstd and partial sums are left out for everyone alike: they are an implementation's own affair. A copy that moves as
many bytes is timed in turn with the norms, and a norm's share is the copy's time over its own: 100 % is the roofline.

Every call finds a cold cache. The forward is that of training, which keeps what the backward needs, and before each
timed backward runs a forward of its own, untimed. In eager mode a call starts on an idle device, so that Python and
launches count; in graph mode a CUDA graph is replayed right behind other work, so that the kernels alone do.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels import USAGE, Backend, InputError, kernel_errors
from model.cli import Parser, choose_device, make_folder, names_in, positive, run, say, whole_numbers
from scripts import peers

if TYPE_CHECKING:
    import argparse

    import torch
    from torch import Tensor

TENSORS = {"forward": 2, "backward": 3, "add_forward": 4, "add_backward": 4}  # as large as x, moved at least
EPS = 1e-5
WARM_UP = 3  # calls before the first that counts: they compile, tune and fill the allocator's pools
COLD = {"cpu": 2**28, "cuda": 2**29}  # bytes read before each timed call: twice the largest last cache, an MI300X's
SAME = 0.02  # how far y may be from the formula, relative to it; rounding to bfloat16 makes 0.004
INTERPRETER = "triton is not timed here: it runs in Triton's interpreter, which is no measure of Triton"
CPU = {"widths": [256, 1024, 4096], "megabytes": 4, "dtype": "float32", "mode": "eager", "repeats": 10}
GPU = {"widths": [1024, 2048, 4096, 8192, 16384], "megabytes": 64, "dtype": "bfloat16", "mode": "both", "repeats": 50}
DTYPES = ["float32", "bfloat16", "float16"]


class Work(NamedTuple):
    """What is timed, and what has to come before it, untimed. The first of them returns the forward's outputs."""

    timed: Callable[[], Any]
    before: Callable[[], Any] | None = None


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__.split("\n")[0])
    add, names = parser.add_argument, f"{', '.join(peers.PEERS)}, {USAGE}"
    add("--norms", help=f"comma-separated: {names} (default: all that are installed and can be timed here)")
    add("--widths", type=whole_numbers, help="D, comma-separated (default: 256,1024,4096; on a GPU 1024 to 16384)")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--megabytes", type=positive(float), help="size of x, whatever D (default: 4; on a GPU 64)")
    rows.add_argument("--rows", type=whole_numbers, help="rows of x, comma-separated, instead of its size")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    add("--dtype", choices=DTYPES, help="of x (default: float32; on a GPU bfloat16)")
    add("--weight-dtype", choices=DTYPES, help="of the weight (default: that of x)")
    add("--mode", choices=["eager", "graph", "both"], help="graph needs a GPU (default: eager; on a GPU both)")
    add("--repeats", type=positive(int), help="timed calls of each norm and pass (default: 10; on a GPU 50)")
    add("--out", default="out/bench", help="folder for norm.json and norm.png")
    return parser.parse_args()


def load_norms(names: str | None, device: torch.device) -> dict[str, Backend]:
    """The norms to time. One that can't run is an InputError if the user named it, and a line if it is a default."""
    gpu = device.type == "cuda"
    defaults = ["reference", "torch", "compile", *(["triton"] if gpu else []), *peers.installed()]
    norms = {}
    for name in defaults if names is None else names_in(names):
        try:
            norms[name] = peers.load(name, device)
        except InputError as error:
            if names is not None:
                raise
            print(f"{name} is not timed here: {error}")
    in_triton = [name for name in norms if name.partition("@")[0] in ("triton", "kernels.triton_rms_norm:rms_norm")]
    interpreted = in_triton and sys.modules["kernels.triton_rms_norm"].INTERPRETED
    for name in in_triton if interpreted else ():
        del norms[name]
    if not norms:
        raise InputError(INTERPRETER if interpreted else f"--norms is '{names}'; expected norms to time: {USAGE}")
    if interpreted or (names is None and not gpu):
        print(INTERPRETER)
    return norms


def make_tensors(rows: int, width: int, dtypes: list[torch.dtype], device: torch.device) -> tuple[Tensor, ...]:
    """x, residual, weight, dy and dh, all of one dtype but the weight."""
    import torch

    torch.manual_seed(0)
    random = [torch.randn(rows, width, device=device).to(dtypes[0]) for _ in range(4)]
    x, residual = random[0] + 1, random[1] + 1  # with a mean of 0, LayerNorm would pass for RMSNorm
    weight = torch.rand(width, device=device).to(dtypes[1])
    return x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_(), *random[2:]


def floor_bytes(pass_name: str, x: Tensor, weight: Tensor) -> int:
    """What the pass has to move."""
    return TENSORS[pass_name] * x.nbytes + (2 if pass_name.endswith("backward") else 1) * weight.nbytes


def make_work(norm: Backend, pass_name: str, tensors: tuple[Tensor, ...]) -> Work:
    import torch

    x, residual, weight, dy, dh = tensors
    add, outputs = pass_name.startswith("add"), []

    def forward() -> tuple[Tensor, ...]:
        return norm.add_rms_norm(x, residual, weight, EPS) if add else (norm.rms_norm(x, weight, EPS),)

    def before() -> tuple[Tensor, ...]:
        outputs.append(forward())
        return outputs[-1]

    def backward() -> tuple[Tensor, ...]:  # raises where one of the gradients is missing
        inputs, gradients = ((x, residual, weight), (dy, dh)) if add else ((x, weight), (dy,))
        return torch.autograd.grad(outputs.pop(), inputs, gradients)

    return Work(backward, before) if pass_name.endswith("backward") else Work(forward)


def warm_up(work: Work, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """Run the work untimed. On a GPU, says how much memory it takes beside what is there already.

    Says also how far y (and h) are from the formula in float64, relative to it, in about 64 of the rows.
    """
    import torch

    from kernels import reference

    for _ in range(WARM_UP):
        outputs = last = None  # of the turn before, freed
        if tensors[0].is_cuda:
            torch.cuda.reset_peak_memory_stats()
            there = torch.cuda.memory_allocated()
        outputs = work.before() if work.before else None
        last = work.timed()
    result = {"peak_bytes": torch.cuda.max_memory_allocated() - there} if tensors[0].is_cuda else {}
    outputs = outputs or last
    x, residual, weight = (tensor.detach() for tensor in tensors[:3])
    some = slice(None, None, max(1, len(x) // 64))
    h = (x if len(outputs) == 1 else x + residual)[some].double()
    pairs = zip(outputs, (reference.rms_norm(h, weight.double(), EPS), h), strict=False)
    off = torch.stack([(y[some] - wanted).norm() / wanted.norm() for y, wanted in pairs]).max().item()
    return result | {"distance": off, "same_function": off < SAME}


def capture(work: Work) -> Work:
    """The same as CUDA graphs. They share their memory, so they are made in the order in which they'll be replayed."""
    import torch

    pool = torch.cuda.graph_pool_handle()

    def graph(step: Callable[[], Any]) -> Callable[[], None]:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=pool, stream=torch.cuda.current_stream()):
            step()
        return captured.replay

    before = graph(work.before) if work.before else None
    return Work(graph(work.timed), before)


def time_once(work: Work, mode: str, other: Tensor) -> float:
    """Microseconds that the work takes on a cold cache: `other` is read before it, and fills the cache."""
    import torch

    if work.before:
        work.before()
    other.sum()  # read and not written, or the work would pay for writing it back
    if not other.is_cuda:
        start = time.perf_counter()
        _result = work.timed()  # kept, so that freeing it isn't timed
        return (time.perf_counter() - start) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if mode == "eager":
        torch.cuda.synchronize()
    start.record()
    _result = work.timed()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def measure(
    pass_name: str, mode: str, norms: dict[str, Backend], tensors: tuple[Tensor, ...], other: Tensor, repeats: int
) -> list[dict[str, Any]]:
    """One pass over one size: a row of results for the copy, and one for each norm."""
    import numpy as np
    import torch

    x, _, weight, *_ = tensors
    floor = floor_bytes(pass_name, x, weight)
    source, target = (torch.ones(floor // 2, dtype=torch.uint8, device=x.device) for _ in range(2))
    copy = Work(lambda: target.copy_(source))
    copy.timed()
    ready, results = {"copy": capture(copy) if mode == "graph" else copy}, {"copy": {}}
    for name, norm in norms.items():
        work = make_work(norm, pass_name, tensors)
        try:
            results[name] = warm_up(work, tensors)
            ready[name] = capture(work) if mode == "graph" else work
        except kernel_errors() as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            results[name] = {"refused": f"{type(error).__name__}: {reason}"}

    order, times = list(ready), {name: [] for name in ready}
    for turn in range(repeats):  # another one begins each time, so that a drift of the machine meets all alike
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            times[name].append(time_once(ready[name], mode, other))
    for name in ready:
        low, median, high = np.percentile(times[name], [25, 50, 75]).tolist()
        results[name] |= {"median_us": median, "quartiles_us": [low, high]}
        results[name] |= {"gb_per_s": floor / median / 1e3, "share": float(np.median(times["copy"])) / median}
    where = {"pass": pass_name, "mode": mode, "width": x.shape[1], "rows": x.shape[0], "floor_bytes": floor}
    return [where | {"norm": name} | result for name, result in results.items()]


def size_of(row: dict[str, Any]) -> tuple[int, int]:
    return row["width"], row["rows"]


def table(title: str, names: list[str], rows: list[dict[str, Any]], show: Callable[[dict], str]) -> list[str]:
    """Lines of text: D and the rows down, norms across. A star marks what computes another function."""
    others = {row["norm"] for row in rows if not row.get("same_function", True)}
    rows = [row for row in rows if row["norm"] in names]
    cells = {(*size_of(row), row["norm"]): show(row) if "share" in row else "refused" for row in rows}
    wide = 3 + max(map(len, [*names, *cells.values()]))
    lines = ["", title, "     D     rows" + "".join((name + "*" * (name in others)).rjust(wide) for name in names)]
    for size in dict.fromkeys(map(size_of, rows)):
        lines.append(f"{size[0]:>6}{size[1]:>9}" + "".join(cells[(*size, name)].rjust(wide) for name in names))
    return lines


def report(rows: list[dict[str, Any]]) -> list[str]:
    """What the run found, as lines of text."""

    def share_and_time(row: dict[str, Any]) -> str:
        low, high = row["quartiles_us"]
        share = f"{row['share']:.0%}" if row["norm"] != "copy" else f"{row['gb_per_s']:.1f} GB/s"
        return f"{share}{row['median_us']:>9.1f} ±{(high - low) / 2 / row['median_us']:>3.0%}"

    lines = ["share of the copy's bandwidth, median time in us, ± half the distance between its quartiles"]
    names = list(dict.fromkeys(row["norm"] for row in rows if row["norm"] != "copy"))
    ours = "triton" if "triton" in names else names[0]
    for mode, pass_name in dict.fromkeys((row["mode"], row["pass"]) for row in rows):
        part = [row for row in rows if (row["mode"], row["pass"]) == (mode, pass_name)]
        base = {size_of(row): row.get("median_us", math.nan) for row in part if row["norm"] == ours}
        lines += table(f"{pass_name}, {mode}", ["copy", *names], part, share_and_time)
        title = f"{pass_name}, {mode}: time over that of {ours}"
        lines += table(title, names, part, lambda row, base=base: f"{row['median_us'] / base[size_of(row)]:.2f}")
        if pass_name == "backward" and mode == rows[0]["mode"] and any("peak_bytes" in row for row in part):
            title = "forward and backward: MB at the peak beside x, weight and dy"
            lines += table(title, names, part, lambda row: f"{row['peak_bytes'] / 2**20:.1f}")
    far = {row["norm"]: row["distance"] for row in rows if not row.get("same_function", True)}
    lines += ["", *(f"* {name} is another function: its y is {error:.0%} off" for name, error in far.items())]
    for row in (row for row in rows if "refused" in row):
        lines.append(
            f"{row['norm']} refused {row['pass']}, {row['mode']}, {row['rows']} x {row['width']}: {row['refused']}"
        )
    return lines


def plot(rows: list[dict[str, Any]], names: list[str], path: Path) -> None:
    """The share over D, a panel a pass, a line a norm; of CUDA graphs where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mode, most = rows[-1]["mode"], {row["width"]: row["rows"] for row in rows}  # the last of a width is its longest
    rows = [row for row in rows if row["rows"] == most[row["width"]]]
    figure, panels = plt.subplots(2, 2, sharex=True, sharey=True, figsize=(9, 6.4), layout="constrained")
    for axes, pass_name in zip(panels.flat, TENSORS, strict=True):
        for i, name in enumerate(names):
            line = [row for row in rows if (row["pass"], row["mode"], row["norm"]) == (pass_name, mode, name)]
            ticks, shares = [row["width"] for row in line], [row.get("share", math.nan) for row in line]
            axes.semilogx(ticks, shares, f"C{i % 10}{'os^Dv'[i % 5]}-", base=2, label=name, markersize=4)
        axes.axhline(1, color="0.6", linewidth=1, linestyle=":")
        axes.set_title(pass_name.replace("add_", "add + norm, "), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set(xticks=ticks, xticklabels=ticks, ylim=(0, None))
    figure.supxlabel("D", fontsize=10)
    figure.supylabel(f"share of the copy's bandwidth ({mode})", fontsize=10)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    args = parse_args()
    device = choose_device(args.device)
    if device.type not in COLD:
        raise InputError(f"--device {device}: this script knows how to time a CPU and CUDA or ROCm; use cpu or cuda")
    for name, value in (GPU if device.type == "cuda" else CPU).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.mode != "eager" and device.type != "cuda":
        raise InputError(f"--mode {args.mode}: a CUDA graph needs a GPU and the device is {device}; use --mode eager")
    norms = load_norms(args.norms, device)
    out = Path(args.out)
    make_folder("--out", out)
    import torch
    from tqdm import tqdm

    dtypes = [getattr(torch, args.dtype), getattr(torch, args.weight_dtype or args.dtype)]
    modes = ["eager", "graph"] if args.mode == "both" else [args.mode]
    # A graph can't be captured on the default stream, and autograd runs a backward on its forward's stream.
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    results = []
    with (
        stream,
        tqdm(
            total=len(args.widths) * len(args.rows or [0]) * len(TENSORS) * len(modes), unit="cell", disable=None
        ) as bar,
    ):
        torch.empty(2**25 - 2**16, dtype=torch.uint8)  # once it is freed, glibc stops giving memory back to Linux
        other = torch.ones(
            COLD[device.type] // 4, device=device
        )  # of zeros, Linux would show one page of memory again and again
        for width, n_rows in product(args.widths, args.rows or [None]):
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # or the second width would be compiled for any width, and be slower for it
            n_rows = n_rows or max(1, int(args.megabytes * 2**20 / (width * dtypes[0].itemsize)))
            tensors = make_tensors(n_rows, width, dtypes, device)
            for pass_name, mode in product(TENSORS, modes):
                bar.set_description(f"{pass_name}, {mode}, {n_rows} x {width}")
                results += measure(pass_name, mode, norms, tensors, other, args.repeats)
                bar.update()

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    triton = getattr(sys.modules.get("triton"), "__version__", "not imported")
    result = {
        "machine": f"{name}, {platform.machine()}, torch {torch.__version__}, triton {triton}",
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "results": results,
    }
    (out / "norm.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(results, list(norms), out / "norm.png")
    print(result["machine"], *report(results), sep="\n")
    say(f"wrote {out / 'norm.json'} and {out / 'norm.png'}")


if __name__ == "__main__":
    run(main)
