"""Plan a training run from its shapes: memory, operations and time. Nothing is allocated or trained for it.

    python scripts/plan.py --config configs/llama2-7b.json --block-size 4096 --processes 8 --fsdp
    python scripts/plan.py --config configs/llama2-7b.json --block-size 4096 --processes 16 --tp 4 --fsdp
    python scripts/plan.py --config configs/llama2-7b.json --block-size 4096 --tp 8 --growth    from 1 to 1024 processes

The flags are train.py's, with defaults of their own for --norm and --dtype. The model runs forward on PyTorch's fake
tensors, which have shapes and dtypes and no memory, so what autograd keeps for the backward is counted on the very
operations that training runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model.cli import Parser, positive, run

TINY = Path(__file__).resolve().parent.parent / "configs/tiny.json"


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--config", help="the model's shape, a config.json (default: configs/tiny.json)")
    add("--processes", type=positive(int), default=1, help="processes that share the run")
    add("--fsdp", action="store_true", help="shard weights and optimizer over the processes")
    add("--tp", type=positive(int), default=1, metavar="N", help="divide each matrix over N of the processes")
    growth_help = (
        "a table of GB in memory + GB sent in a step by each of 1 to 1024 processes, a sequence in each part; "
    )
    growth_help += "--tp adds its rows, and --processes, --batch-size, --grad-accum and --fsdp count for nothing here"
    add("--growth", action="store_true", help=growth_help)
    add("--checkpoint-activations", action="store_true", help="recompute each layer in the backward")
    add("--norm", default="torch", help="what computes RMSNorm, since it decides what the backward keeps")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="precision of the computation")
    add("--steps", type=positive(int), default=100, help="optimizer steps")
    add("--batch-size", type=positive(int), default=16, help="sequences a step, over all processes")
    add("--block-size", type=positive(int), default=128, help="tokens a sequence")
    add("--grad-accum", type=positive(int), default=1, help="parts in which a process computes its sequences of a step")
    add("--vocab-size", type=positive(int), help="rows of the embedding (default: the config's)")
    args = parser.parse_args()
    args.config = args.config or str(TINY)
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch._functorch.config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from kernels import Backend, InputError, kernel_errors, load_backend
from kernels.torch_version import TORCH_2_13
from model.config import LlamaConfig
from model.llama import Llama, checkpoint_layers, summed_loss
from model.norm import RMSNorm
from model.tensor_parallel import parallelize
from model.training.data import check_block, check_shapes
from model.training.flops import PEAK_FLOPS, training_flops
from model.training.traffic import bytes_sent, own_parameters

# Share of the peak that the model's operations reach. Llama 3's training had 38 to 43 % (https://arxiv.org/abs/2407.21783).
PLAN_MFU = 0.4


def saved_bytes(run: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps for the backward of run(): each storage once, and none of the parameters' own.

    They include the copies that autocast makes of weights, and a checkpointed layer's x and residual. They leave out
    the Span, which all checkpointed layers share and whose angles take 4 * head_dim bytes a position.
    """
    own = {local(parameter).untyped_storage()._cdata for parameter in parameters}
    storages = {}  # held until all are counted, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def fake_forward(
    config: LlamaConfig, norm: Backend, dtype: torch.dtype, n_sequences: int, block_size: int,
    checkpoint_activations: bool, fsdp: bool, tp: int = 1,
) -> tuple[Llama, int]:  # fmt: skip
    """A model on fake tensors, and the bytes that it keeps for the backward of n_sequences of block_size tokens.

    With `fsdp` it computes as FSDP has it: in `dtype` throughout, and no copy of a weight is kept. With `tp` the bytes
    are those of one of `tp` processes, whose collectives are fake ones.
    Raises InputError where the norm can't compute with fake tensors.
    """
    # Code that would read a fake tensor's memory gets an error, where by default it would read address 0.
    no_memory = torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False)
    # On the CPU even for a GPU's run: its attention is fused for every dtype, and keeps no matrix of T x T. In bfloat16
    # and with few logits (model/attention.py, LOGITS) it keeps one, which a GPU does not.
    with no_memory, fake_processes(tp) as mesh, FakeTensorMode():
        try:
            RMSNorm(config.hidden_size, config.rms_norm_eps, norm)(*torch.zeros(2, 1, config.hidden_size))
        except kernel_errors() as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
            raise InputError(
                f"the norm {norm.description} cannot be planned, since it fails on tensors without memory "
                f"({type(error).__name__}: {reason}); plan with --norm torch, reference or triton"
            ) from error
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype if fsdp else usual)  # Module.to fails on fake parameters
        model = Llama(config, norm)
        torch.set_default_dtype(usual)
        if checkpoint_activations:
            checkpoint_layers(model)
        batch = torch.zeros(n_sequences, block_size + 1, dtype=torch.long)

        def loss() -> Tensor:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32 and not fsdp):
                return summed_loss(model, batch)

        if mesh:
            parallelize(model, mesh, divide_sequence=True)
        return model, saved_bytes(loss, model.parameters())


@contextmanager
def fake_processes(n: int) -> Iterator[DeviceMesh | None]:
    """This process as the first of `n`, of which no other exists; None for 1. Raises InputError where it cannot be."""
    if n == 1:
        yield None
        return
    if not TORCH_2_13:
        raise InputError(
            f"--tp cannot be planned in torch {torch.__version__}, whose fake tensors are not sent; use 2.13"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        with loss_parallel():
            yield init_device_mesh("cpu", (n,))
    finally:
        torch.distributed.destroy_process_group()


@dataclass
class Figures:
    """Counts of a run: parameters, bytes and floating-point operations."""

    n_parameters: int
    n_in_tables: int  # of the embedding and, where it is not tied, the head
    n_in_layers: int
    tied: bool
    n_sequences: int  # that a process computes at once
    weight_bytes: float  # of a process, in float32; gradients take as much, Adam's moments twice as much
    saved_bytes: int
    gathered_bytes: float  # whole weights, which FSDP gathers while a layer computes
    flops_per_token: float
    sent_bytes: dict[str, float]  # by a process in a step, by kind (model/training/traffic.py)


def count(config: LlamaConfig, norm: Backend, args: argparse.Namespace) -> Figures:
    """Count what a run with these arguments takes. Raises InputError for a norm that cannot be planned.

    What is kept for the backward is what PyTorch's operators for a CPU keep, without torch.compile.
    """
    dtype = getattr(torch, args.dtype)
    n_data = args.processes // args.tp
    n_own = math.ceil(args.batch_size / n_data)  # sequences of a step
    n_sequences = math.ceil(n_own / args.grad_accum)
    sizes = n_sequences, args.block_size
    model, saved = fake_forward(config, norm, dtype, *sizes, args.checkpoint_activations, args.fsdp, args.tp)
    n_parameters = sum(p.numel() for p in model.parameters())
    n_in_layers = sum(p.numel() for p in model.layers.parameters())
    n_in_tables = n_parameters - n_in_layers - config.hidden_size  # the last norm's
    return Figures(
        n_parameters=n_parameters,
        n_in_tables=n_in_tables,
        n_in_layers=n_in_layers,
        tied=model.lm_head is None,
        n_sequences=n_sequences,
        weight_bytes=4 * own_parameters(model, args.tp) / (n_data if args.fsdp else 1),
        saved_bytes=saved,
        gathered_bytes=dtype.itemsize * (n_in_tables + n_in_layers / config.num_hidden_layers) / args.tp,
        flops_per_token=training_flops(model, args.block_size),
        sent_bytes=bytes_sent(
            model,
            n_data,
            args.tp,
            args.fsdp,
            dtype.itemsize,
            n_own * args.block_size,
            args.grad_accum,
            args.checkpoint_activations,
        ),
    )


def table(figures: Figures, args: argparse.Namespace) -> str:
    """Lines that show the figures, with the time of the run on each GPU that is known, at PLAN_MFU.

    Recomputed layers are work too, about one forward more, but MFU does not count them.
    """
    kept = f"kept for the backward of {figures.n_sequences} x {args.block_size:,} tokens at once"
    temporaries = "temporaries come on top"
    if args.fsdp:  # a layer's weights at a time, and from their first use on those outside the layers
        temporaries += f", among them whole weights in {args.dtype}: {amount(figures.gathered_bytes, 'B')}"
    elif args.dtype == "bfloat16" and args.checkpoint_activations:  # autocast holds them until the forward ends
        copies = amount(2 * figures.n_in_layers, "B")
        temporaries += f", among them bfloat16 copies of the layers' weights: {copies}"
    elif args.dtype == "bfloat16":
        kept += ", with bfloat16 copies of the weights"

    tables = "the embedding" if figures.tied else "the embedding and the head"
    share, weights, saved = "a share" if args.fsdp or args.tp > 1 else "all", figures.weight_bytes, figures.saved_bytes
    n_tokens = args.steps * args.batch_size * args.block_size
    rows = [
        ("parameters", f"{figures.n_parameters:,}", f"{figures.n_in_tables:,} of them in {tables}"),
        ("memory of a process", "", f"{args.processes} in all, each with {share} of the weights"),
        ("  weights", amount(weights, "B"), "float32"),
        ("  gradients", amount(weights, "B"), "float32"),
        ("  Adam's two moments", amount(2 * weights, "B"), "float32"),
        ("  activations", amount(saved, "B"), kept),
        ("  together", amount(4 * weights + saved, "B"), temporaries),
        (
            "FLOPs of a token",
            amount(figures.flops_per_token, "FLOP"),
            "forward, and backward counted as two forwards",
        ),
        ("tokens of the run", f"{n_tokens:,}", f"{args.steps:,} steps of {args.batch_size:,} x {args.block_size:,}"),
    ]
    if args.processes > 1:
        rows.append(("sent by a process", "", "in a step, at the least; how fast that is no shape tells"))
        rows += [(f"  {kind}", amount(sent, "B"), "") for kind, sent in figures.sent_bytes.items() if sent]
    if args.dtype == "bfloat16":
        rows.append((f"time at {PLAN_MFU:.0%} MFU", "", f"{args.processes} x"))
        for peak in sorted(set(PEAK_FLOPS.values())):
            names = ", ".join(name for name in PEAK_FLOPS if PEAK_FLOPS[name] == peak)
            time = duration(figures.flops_per_token * n_tokens / (peak * PLAN_MFU * args.processes))
            rows.append((f"  {names}", time, f"{peak / 1e12:,.0f} TFLOP/s"))
    else:
        rows.append(("time", "unknown", "the peaks known here are those of bfloat16"))
    return "\n".join(f"{label:32}{value:>18}  {note}".rstrip() for label, value, note in rows)


def growth(config: LlamaConfig, norm: Backend, args: argparse.Namespace) -> str:
    """Markdown table: memory, and bytes sent in a step, of each of 1 to 1024 processes, by layout.

    Each process, or group of --tp processes, computes one sequence.
    """
    tp, dtype, recomputed = args.tp, getattr(torch, args.dtype), args.checkpoint_activations
    layouts = {"data": (1, False), "--fsdp": (1, True)}
    if tp > 1:
        layouts |= {f"--tp {tp}": (tp, False), f"--tp {tp} --fsdp": (tp, True)}
    counts = [1, 8, 16, 64, 256, 1024]
    rows = [["processes", *map(str, counts)], ["---"] * (1 + len(counts))]
    for name, (n, fsdp) in layouts.items():
        check_block(args, config, n)
        model, kept = fake_forward(config, norm, dtype, 1, args.block_size, recomputed, fsdp, n)
        cells = []
        for processes in counts:
            n_data = processes // n
            if processes % n or n_data < (2 if fsdp else 1):
                cells.append("")
                continue
            memory = 16 * own_parameters(model, n) / (n_data if fsdp else 1) + kept
            sent = bytes_sent(model, n_data, n, fsdp, dtype.itemsize, args.block_size, 1, recomputed)
            cells.append(f"{memory / 1e9:,.1f} + {sum(sent.values()) / 1e9:,.1f}")
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def amount(number: float, unit: str) -> str:
    return f"{number / 1e9:,.2f} G{unit}" if number >= 1e9 else f"{number / 1e6:,.2f} M{unit}"


def duration(seconds: float) -> str:
    """A time in the largest unit of which it is at least two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} seconds"


def main() -> None:
    args = parse_args()
    config = LlamaConfig.load(args.config)
    if args.vocab_size:
        config = replace(config, vocab_size=args.vocab_size)
    if not args.growth:
        check_shapes(args, config, args.processes)
    if args.tp > 1 and config.family.qk_norm == "all":
        raise InputError(
            f"{args.config} has a norm over all heads, whose sums over processes are not counted here; leave --tp out, "
            "or name another model"
        )
    if args.fsdp and args.processes == args.tp > 1 and not args.growth:
        raise InputError(
            f"--fsdp divides the weights among processes beside the {args.tp} of --tp; use --processes {2 * args.tp} "
            "or more"
        )
    norm = load_backend(args.norm, torch.device("cpu"))
    print(growth(config, norm, args) if args.growth else table(count(config, norm, args), args))


if __name__ == "__main__":
    run(main)
