"""Count what a norm keeps for its backward and its peak of memory, alone and in a training step of the model.

    python scripts/bench_memory.py                                  every norm that runs here, and LayerNorm
    python scripts/bench_memory.py --norms torch,layer_norm --dtype bfloat16 --device cuda

Kept is what autograd saves in the forward: bytes of storages, each counted once, whoever looks into it. The formula
needs x, the weight and one number a row (RMSNorm: the root's reciprocal) or two (LayerNorm: the mean too). In the model
the norms' part is what the step keeps beyond the same step with norms that keep nothing; weights are left out there.

The peak is the most that is allocated in forward and backward at a time, beyond what is there before. At the least it
is y, the numbers a row, and the gradients. On a CPU PyTorch's profiler sees every allocation of PyTorch's, also
those within an operator, on a GPU its own statistics are read. What others allocate is not seen, as
the emulated GPU's arrays of NumPy.

A control, LayerNorm of x times a tensor of ones, must be found to keep one x more than LayerNorm. Exit code 0: it is.
1: it is not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import BACKENDS, DTYPES, LAYER_NORMS, USAGE, Backend, InputError, layer_norm_in, load_backend
from model.cli import Parser, emulate_as_asked, names_in, positive, run, say

TINY = ROOT / "configs/tiny.json"


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--norms", help=f"comma-separated: {USAGE} (default: all that run here)")
    add("--rows", type=positive(int), default=2048, help="of x, for a norm alone")
    add("--hidden-size", type=positive(int), default=1024, help="elements of a row")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of x and the weight, for a norm alone; the model's is float32",
    )
    add("--config", type=Path, help="the model's shape, a config.json of a LLaMA (default: configs/tiny.json)")
    add("--batch-size", type=positive(int), default=8, help="sequences of the step")
    add("--block-size", type=positive(int), default=128, help="tokens of a sequence")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    parser.add_emulation()
    args = parser.parse_args()
    emulate_as_asked(args)
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells stderr of each start and stop

import gc
import json
import tempfile

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from kernels import add_then
from kernels.layer_norm import layer_norm
from model.cli import choose_device
from model.config import LlamaConfig
from model.llama import Llama, summed_loss

EPS = 1e-5  # any: it takes no memory
CONTROL = "control"


class Bytes(NamedTuple):
    """What a norm was found to take, and what its formula needs."""

    kept: int
    needed: int
    peak: int
    least: int = 0  # of the peak, where it is known


def doubled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The control: a LayerNorm that keeps a tensor of x's size too much, the ones."""
    return layer_norm(x * torch.ones_like(x), weight, eps)


class KeepsNothing(torch.autograd.Function):
    """In the place of a norm: a new tensor, and nothing for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _keep_nothing(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return KeepsNothing.apply(x)


NOTHING = Backend("nothing", _keep_nothing, add_then(_keep_nothing))


def kept_bytes(forward: Callable[[], Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Bytes that a forward saves for its backward, each storage once, but for those of the tensors `besides`."""
    storages = {}

    def pack(tensor: Tensor) -> None:  # nothing for a backward: a node that held its own output would never be freed
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no other one gets its address

    def unpack(_: object) -> Tensor:
        raise AssertionError("what was counted has no backward")

    with saved_tensors_hooks(pack, unpack):
        forward()
    for tensor in besides:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most bytes that PyTorch has allocated during a step, beyond those that it had before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text("utf-8", "replace"))["traceEvents"]
    events = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in events]  # with what earlier profiles have left
    return max(totals) - (totals[0] - events[0]["args"]["Bytes"]) if events else 0


def needed_bytes(norm: str, rows: int, x_bytes: int) -> int:
    """What the formula keeps of x: x itself, and a float32 a row, or two for LayerNorm."""
    return x_bytes + 4 * rows * (2 if norm == CONTROL or layer_norm_in(norm) else 1)


def alone(name: str, norm: Backend, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Bytes:
    """A norm on its own, on rows that nobody else keeps."""
    x, dy = (torch.randn(rows, size, device=device, dtype=dtype) for _ in range(2))
    vectors = [torch.ones(size, device=device, dtype=dtype).requires_grad_() for _ in range(1 + norm.has_bias)]
    bias = {"bias": vectors[1]} if norm.has_bias else {}
    x.requires_grad_()

    def forward() -> Tensor:
        return norm.rms_norm(x, vectors[0], EPS, **bias)

    def step() -> None:
        for tensor in (x, *vectors):
            tensor.grad = None
        forward().backward(dy)

    step()  # compile what is compiled
    needed = needed_bytes(name, rows, x.nbytes) + vectors[0].nbytes
    for tensor in (x, *vectors):
        tensor.grad = None
    least = needed_bytes(name, rows, 2 * x.nbytes) + sum(vector.nbytes for vector in vectors)  # y and dx
    return Bytes(kept_bytes(forward), needed, peak_bytes(step, device), least)


def in_model(name: str, norm: Backend, config: LlamaConfig, batch: Tensor) -> Bytes:
    """A norm in forward and backward of the model for a batch (B, T + 1): of `kept`, all that the step keeps."""
    torch.manual_seed(0)
    model = Llama(config, norm).to(batch.device)

    def forward() -> Tensor:
        return summed_loss(model, batch)

    def step() -> None:
        model.zero_grad()
        forward().backward()

    step()
    model.zero_grad()
    rows = batch.shape[0] * (batch.shape[1] - 1)
    n_norms = 2 * config.num_hidden_layers + 1
    needed = n_norms * needed_bytes(name, rows, 4 * rows * config.hidden_size)
    return Bytes(kept_bytes(forward, model.parameters()), needed, peak_bytes(step, batch.device))


def load_norms(names: str | None, device: torch.device) -> dict[str, Backend]:
    """The norms asked for, or all that run here, with the control. Raises InputError for a wrong name, and for none."""
    norms = {}
    for name in [*BACKENDS, *LAYER_NORMS] if names is None else names_in(names):
        try:
            norms[name] = load_backend(name, device)
        except InputError as error:
            if names is not None:
                raise
            say(f"left out: {error}")
    if not norms:
        raise InputError(f"--norms is '{names}'; expected norms to count here: {USAGE}")
    return norms | {CONTROL: Backend(CONTROL, doubled, add_then(doubled))}


def _mb(*counts: int) -> str:
    return " | ".join(f"{count / 1e6:.2f}" for count in counts)


def main() -> None:
    args = parse_args()
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    shape = args.config or TINY
    config = LlamaConfig.load(shape)
    if config.model_type != "llama":
        raise InputError(f"{shape} has model_type {config.model_type}; expected llama, whose norms are counted here")
    if config.norm:
        raise InputError(f"{shape} has norm {config.norm}; expected a shape on RMSNorm, whose place --norms take")
    if args.block_size > config.context_length:
        raise InputError(f"--block-size is {args.block_size}; expected at most {config.context_length}, the model's")
    norms = load_norms(args.norms, device)
    batch = torch.randint(config.vocab_size, (args.batch_size, args.block_size + 1), device=device)

    found, found_in_model = {}, {}
    for name, norm in tqdm(norms.items(), "norms", disable=None, leave=False):
        found[name] = alone(name, norm, args.rows, args.hidden_size, dtype, device)
        found_in_model[name] = in_model(name, norm, config, batch)
    plain = alone("layer_norm", load_backend("layer_norm", device), args.rows, args.hidden_size, dtype, device)
    without = in_model("nothing", NOTHING, config, batch)

    x_bytes = args.rows * args.hidden_size * dtype.itemsize
    print(f"A norm alone, x ({args.rows}, {args.hidden_size}) in {args.dtype}, {_mb(x_bytes)} MB, on {device}; in MB")
    print("| norm | kept | formula | times | peak | at the least | times |\n|---|---|---|---|---|---|---|")
    for name, each in found.items():
        kept, peak = each.kept / each.needed, each.peak / each.least
        print(f"| {name} | {_mb(each.kept, each.needed)} | {kept:.2f} | {_mb(each.peak, each.least)} | {peak:.2f} |")
    print(f"\nA training step of {args.batch_size} times {args.block_size} tokens, {config.num_hidden_layers} layers, "
          f"hidden size {config.hidden_size}, float32; in MB")  # fmt: skip
    print("| norm | kept | by the norms | formula | times | peak |\n|---|---|---|---|---|---|")
    for name, each in found_in_model.items():
        own = each.kept - without.kept
        print(f"| {name} | {_mb(each.kept, own, each.needed)} | {own / each.needed:.2f} | {_mb(each.peak)} |")
    print(f"| without | {_mb(without.kept)} | | | | {_mb(without.peak)} |")
    if found[CONTROL].kept != plain.kept + x_bytes:
        print("the control is not found to keep one x more, so these counts are wrong")
        sys.exit(1)


if __name__ == "__main__":
    run(main)
