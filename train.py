"""Train a LLaMA on a text: python train.py --norm triton

Everything has a default: the tiny model of configs/tiny.json, on the source of Python's standard library, in a few
minutes on two CPU cores. The result is a checkpoint directory that generate.py and transformers load.

    python train.py --norm triton --emulate sm_80       run the Triton kernels as compiled for an A100, without one
    python train.py --resume                            continue the run in --out; on a CPU, bit for bit
    torchrun --nproc-per-node 2 train.py                train in two processes; --fsdp shards the weights as well
    torchrun --nproc-per-node 4 train.py --tp 2         two of them divide each matrix between them (tensor parallel)
    python scripts/plan.py --config configs/llama2-7b.json --processes 8     what such a run needs

Ctrl-C and SIGTERM finish the step, save, and end with exit code 130 and 143 (torchrun's own is 1). Bad input, a full
disk, and a NaN or infinite loss or gradient end with 2; the last save is unchanged.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from pathlib import Path

from kernels import InputError
from model.cli import Parser, emulate_as_asked, not_negative, positive, rank, run, say, seed, world_size
from model.training.arguments import check_numbers, resumed, say_changes
from model.training.run_folder import (
    METRICS,
    STATE,
    check_folder,
    earlier_metrics,
    locked,
    newest_step,
    saved_data,
)

# Of --log-norms: what input_mean_squares returns of each norm.
NORM_METRICS = ("norm_mean_square", "norm_least_square", "norm_largest_square", "norm_share_below_eps")
EVAL_SEQUENCES = 32  # held-out windows that a validation loss is the mean of
NORM_SEQUENCES = 4  # of them, those that --log-norms looks at
WARMUP = 20  # steps, unless a run is shorter than five times that
DATA = Path("out/data")  # prepared texts
TINY = Path(__file__).parent / "configs/tiny.json"


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--config", help="the model's shape, a config.json (default: configs/tiny.json)")
    add("--data", default="python", help="python (its standard library's source), shakespeare, a text file or a folder")
    out_help = "folder for the checkpoint, the state for --resume, metrics and curves"
    add("--out", type=Path, default=Path("out/tiny"), help=out_help)
    add("--resume", action="store_true", help="continue the run in --out with its arguments; flags given here win")
    parser.add_backend_arguments(["float32", "bfloat16"])
    add("--compile", action=argparse.BooleanOptionalAction, help="compile the model (default: on a GPU, without --tp)")
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    add("--fsdp", **switch, help="shard weights and optimizer over the processes of torchrun (FSDP2)")
    add(
        "--tp", type=positive(int), default=1, metavar="N", help="divide each matrix over N processes (tensor parallel)"
    )
    add("--checkpoint-activations", **switch, help="save memory: recompute each layer in the backward")
    add("--steps", type=positive(int), default=100, help="optimizer steps")
    add("--batch-size", type=positive(int), default=16, help="sequences a step, over all processes")
    add("--block-size", type=positive(int), default=128, help="tokens a sequence")
    add("--grad-accum", type=positive(int), default=1, help="parts in which a process computes its sequences of a step")
    add("--vocab-size", type=positive(int), help="pieces of the tokenizer (default: the config's)")
    add("--lr", type=positive(float), default=2e-3, help="peak learning rate")
    add("--min-lr", type=not_negative(float), help="learning rate at the end of the cosine (default: --lr / 20)")
    warmup_help = f"steps of linearly rising learning rate (default: {WARMUP}, or a fifth of --steps if that is less)"
    add("--warmup", type=not_negative(int), help=warmup_help)
    add("--weight-decay", type=not_negative(float), default=0.1, help="decay of matrices; norms have none")
    add("--grad-clip", type=positive(float), default=1.0, help="largest norm of the gradient")
    add("--seed", type=seed, default=1337, help="seed of the weights, the order of the data and the sample")
    add("--eval-interval", type=positive(int), default=25, help="steps between validation losses")
    add("--save-interval", type=positive(int), default=50, help="steps between checkpoints, besides the last")
    add("--log-norms", type=positive(int), metavar="N", help="every N steps, log the norms' inputs and draw norms.png")
    args = parser.parse_args()
    saved = resumed(parser, args) if args.resume else None
    if saved:
        args = parser.parse_args(namespace=argparse.Namespace(**vars(saved)))
    check_numbers(args, saved)
    emulate_as_asked(args)
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kernels import Backend, in_form, load_backend
from kernels.probe import is_the_formula
from model.checkpoint.load import load_checkpoint
from model.checkpoint.save import save_checkpoint
from model.cli import caught_signals, check_compilable, choose_autocast_dtype
from model.config import LlamaConfig
from model.generation import generate, sample
from model.llama import Llama, checkpoint_layers, summed_loss
from model.norm import input_mean_squares, norm_names
from model.tokenizer import load_tokenizer
from model.tokenizer.base import Tokenizer
from model.training import distributed
from model.training.data import batch_starts, check_shapes, load_tokens, step_seed, windows
from model.training.flops import peak_tokens_per_s, training_flops
from model.training.prepare import prepare
from model.training.run_log import RunLog, begin_run
from model.training.state import keep_newest, load_state, save_state


def main() -> None:
    args = parse_args()
    if args.resume:
        say_changes(args)
    if args.warmup is None:
        args.warmup = min(WARMUP, args.steps // 5)
        if args.warmup < WARMUP:
            say(f"the learning rate warms up for {args.warmup} steps, a fifth of --steps {args.steps}")
    config = LlamaConfig.load(args.config or TINY)
    if args.vocab_size:
        config = replace(config, vocab_size=args.vocab_size)
    check_shapes(args, config, world_size())
    device = distributed.own_device(args.device)
    with distributed.process_group(device), locked(args.out):
        signal_number = train(args, config, device)
    if signal_number:
        sys.exit(128 + signal_number)


def train(args: argparse.Namespace, config: LlamaConfig, device: torch.device) -> int:
    """Run the training. Returns the number of the signal that stopped it, or 0."""
    # Check what was asked for, before anything is written.
    dtype = choose_autocast_dtype(args.dtype, device)
    norm = load_backend(args.norm, device)
    compiled = device.type == "cuda" and args.tp == 1 if args.compile is None else args.compile
    if compiled:
        check_compilable(args.norm, norm, device)

    # Load data and tokenizer, and find where to begin.
    train_tokens, held_out, meta, tokenizer = load_data(args, config)
    config = complete_config(config, tokenizer, args.norm, norm, device)
    check_folder(args.out, config, tokenizer, meta, args.resume)
    done = newest_step(args.out / STATE) if args.resume else 0
    if done >= args.steps:
        say(f"the run in {args.out} has {done} steps behind it; --steps N takes it further")
        keep_newest(args.out / STATE)  # which a kill after the last save may have left undone
        return 0
    metrics = earlier_metrics(args.out / METRICS, done)

    # Build model and optimizer.
    torch.manual_seed(args.seed)
    model = Llama(config, norm)
    about = describe(args, model, len(train_tokens), done, dtype, device, compiled)
    peak_speed = peak_tokens_per_s(about["device_name"], dtype, training_flops(model, args.block_size))
    if args.checkpoint_activations:
        checkpoint_layers(model)
    wrapped = distributed.divide(model, device, args.fsdp, args.tp, dtype)
    forward = torch.compile(wrapped) if compiled else wrapped
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95), fused=True
    )  # fmt: skip
    if done:
        load_state(args.out / STATE, done, model, optimizer)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32 and not args.fsdp)
    begin_run(args, done, metrics, {**about, "data": meta})

    names, unigram_loss = about["norm_names"], meta["unigram_loss"]
    with (
        RunLog(args.out, metrics, done, args.steps, unigram_loss, names, config.rms_norm_eps, peak_speed) as log,
        caught_signals() as caught,
    ):
        for step in range(done, args.steps):
            # Update the weights.
            started = time.perf_counter()
            torch.manual_seed(step_seed(args.seed, step, rank()))
            lr = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = lr
            starts = batch_starts(len(train_tokens), step, args.seed, args.batch_size, args.block_size)
            batch = windows(train_tokens, distributed.part_of(starts, args.tp), args.block_size).to(device)
            own_loss = accumulate_gradients(wrapped, forward, batch, args, autocast)
            grad_norm = distributed.whole(nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)).item()
            loss, stopping = distributed.summed(device, own_loss, bool(caught), copies=args.tp)
            if not math.isfinite(loss + grad_norm):  # clipping by it would write NaN into every weight
                raise InputError(
                    f"step {step + 1}: the loss is {loss:g} and the gradient's norm {grad_norm:g}; "
                    "stopped before the update; the last checkpoint is unchanged; try a lower --lr"
                )
            optimizer.step()
            optimizer.zero_grad()
            speed = args.batch_size * args.block_size / (time.perf_counter() - started)

            # Evaluate and record.
            last = step + 1 == args.steps
            saving = last or stopping or (step + 1) % args.save_interval == 0
            line = {"step": step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_s": speed}
            line |= evaluate(step, model, forward, held_out, args, autocast, device)
            if not math.isfinite(line.get("val_loss", 0)) or (saving and not distributed.finite(model, device)):
                raise InputError(
                    f"step {step + 1} has left NaN or infinite weights or validation loss; stopped before a save; "
                    "the last checkpoint is unchanged; try a lower --lr"
                )
            log.record(line)

            # Save and stop.
            if saving:
                log.flush_to_disk()
                save(args.out, step + 1, model, optimizer, tokenizer)
            if stopping and not last:
                return stopped_by(caught, step, args)

    say(f"validation loss {log.val_loss:.3f} nats a token; the unigram distribution has {meta['unigram_loss']:.3f}")
    command = f"python generate.py --ckpt {args.out}" + (f" --norm {config.norm}" if config.norm else "")
    say(f"saved {args.out}; `{command}` writes more than this, after 16 held-out tokens:")
    if rank() == 0:
        del forward, wrapped, optimizer, model  # make room for the whole model, of which this process may hold a shard
        print(sample_text(args.out, norm, tokenizer, held_out[: min(16, args.block_size)].tolist(), args.seed, device))
    return 0


def load_data(
    args: argparse.Namespace, config: LlamaConfig
) -> tuple[np.ndarray, np.ndarray, dict[str, Any], Tokenizer]:
    """Training and held-out tokens, their meta.json and tokenizer, prepared now if need be.

    The vocabulary may be smaller than the config's, for a short text.
    """
    wanted = saved_data(args.out) if args.resume else None
    folder = distributed.in_turn(lambda: prepare(args.data, config.vocab_size, DATA, wanted))
    train_tokens, held_out, meta = load_tokens(folder, args.block_size)
    if not distributed.agreed(meta["sha256"]):
        raise InputError(f"--data {args.data} is not the same for all processes; give each machine the same {DATA}")
    return train_tokens, held_out, meta, load_tokenizer(folder)


def complete_config(
    config: LlamaConfig, tokenizer: Tokenizer, norm_name: str, norm: Backend, device: torch.device
) -> LlamaConfig:
    """The config with the tokenizer's vocabulary, and with the norm's name if that does not compute its RMSNorm."""
    form = config.family.form
    right = is_the_formula(in_form(norm, form), config.hidden_size, config.rms_norm_eps, device, form)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return replace(config, vocab_size=tokenizer.vocab_size, **ids, norm=None if right else norm_name)


def describe(
    args: argparse.Namespace, model: Llama, n_tokens: int, done: int, dtype: torch.dtype, device: torch.device,
    compiled: bool,
) -> dict[str, Any]:  # fmt: skip
    """Say what will run, and return it for run.json."""
    config, norm, dtype_name = model.config, model.norm.backend.description, str(dtype).removeprefix("torch.")
    n_parameters = sum(p.numel() for p in model.parameters())
    mode = f"{dtype_name} on {device}, compiled" if compiled else f"{dtype_name} on {device}"
    say(f"{n_parameters / 1e6:.2f} M parameters, vocabulary {config.vocab_size}, {n_tokens:,} training tokens")
    say(f"norm {norm}, eps {config.rms_norm_eps:g}, {mode}")
    if config.attention_dropout:
        say(f"{args.config or TINY.name} has attention_dropout {config.attention_dropout:g}, which is not computed")
    if config.norm:
        wrong = f"{config.norm} is not the RMSNorm of a {config.model_type}"
        say(f"{wrong}: the checkpoint says so, and other software will refuse it")
    if world_size() > 1:
        how = "FSDP2: each holds a shard of the weights" if args.fsdp else "data parallel"
        if args.tp > 1:
            how = f"{args.tp} divide each matrix (tensor parallel)" + (f", {how}" if world_size() > args.tp else "")
        say(f"{world_size()} processes, {how}")
    if args.resume:
        begins = f"resumes after step {done}" if done else "has saved nothing yet: the run begins at step 0"
        say(f"{args.out} {begins}")
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about = {"norm": norm, "dtype": dtype_name, "device": str(device), "device_name": device_name}
    return {**about, "compiled": compiled, "norm_names": norm_names(model)}


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Learning rate of step 0, 1, ...: a linear warm-up, then a half cosine that reaches --min-lr at the last step."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    min_lr = args.lr / 20 if args.min_lr is None else args.min_lr
    progress = (step - args.warmup) / max(1, args.steps - 1 - args.warmup)
    return min_lr + (args.lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices, which multiply; leave norm weights and other vectors alone, which only scale."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def accumulate_gradients(
    wrapped: nn.Module, forward: Callable[[Tensor], Tensor], batch: Tensor, args: argparse.Namespace,
    autocast: torch.autocast,
) -> Tensor:  # fmt: skip
    """Add the gradients of the step's mean loss; return the part of that loss from this process's batch (B, T + 1).

    Each part's summed loss is divided by the targets of the whole step, so parts of unequal size weigh right.
    """
    n_targets = args.batch_size * args.block_size
    loss = torch.zeros((), device=batch.device)
    parts = batch.tensor_split(args.grad_accum)
    for i, part in enumerate(parts):
        with distributed.gradient_sync(wrapped, wanted=i + 1 == len(parts)):
            with autocast:
                part_loss = distributed.whole(summed_loss(forward, part)) / n_targets
            (part_loss * (world_size() // args.tp)).backward()  # the all-reduce averages over parts of the batch
        loss += part_loss.detach()
    return loss


@torch.no_grad()
def evaluate(
    step: int, model: Llama, forward: Callable[[Tensor], Tensor], held_out: np.ndarray, args: argparse.Namespace,
    autocast: torch.autocast, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Metrics on held-out windows, where an interval asks for them: val_loss in nats a token, and the norms' inputs."""
    found: dict[str, Any] = {}
    starts = np.linspace(0, len(held_out) - args.block_size - 1, EVAL_SEQUENCES, dtype=np.int64)
    last = step + 1 == args.steps
    if args.log_norms and (last or step % args.log_norms == 0):
        with autocast:
            seen = windows(held_out, starts[:NORM_SEQUENCES], args.block_size)[:, :-1]  # the last is a target alone
            squares = input_mean_squares(model, seen.to(device))
        found |= zip(NORM_METRICS, distributed.of_all_rows(squares, args.tp).tolist(), strict=True)
    if last or (step + 1) % args.eval_interval == 0:
        total = torch.zeros((), device=device)
        for some in np.array_split(starts, math.ceil(EVAL_SEQUENCES / args.batch_size)):
            batch = windows(held_out, distributed.part_of(some, args.tp), args.block_size).to(device)
            with autocast:
                total += distributed.whole(summed_loss(forward, batch))
        found["val_loss"] = distributed.summed(device, total, copies=args.tp)[0] / (EVAL_SEQUENCES * args.block_size)
    return found


def save(out: Path, steps: int, model: Llama, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer) -> None:
    """Save checkpoint and state: the state last, so that a crash before it repeats steps from the older one."""
    weights = distributed.whole_weights(model)
    if rank() == 0:
        save_checkpoint(out, model, tokenizer, weights=weights)
    save_state(out / STATE, steps, model, optimizer)


def stopped_by(caught: list[int], step: int, args: argparse.Namespace) -> int:
    """Say which signal ended the run after a save, and return its number."""
    number = caught[0] if caught else signal.SIGTERM  # another process may have got the signal
    say(f"{signal.Signals(number).name}: saved after step {step + 1}; continue with --resume --out {args.out}")
    return number


def sample_text(
    out: Path, norm: Backend, tokenizer: Tokenizer, prompt_ids: list[int], seed: int, device: torch.device
) -> str:
    """Prompt and up to 100 new tokens from the checkpoint just saved."""
    model = load_checkpoint(out, norm, device)
    generator = torch.Generator().manual_seed(seed)  # sampling is done on the CPU
    n_new = min(100, model.config.max_position_embeddings - len(prompt_ids))
    rows = generate(
        model, [prompt_ids], n_new, model.config.end_ids(), lambda logits: sample(logits, 0.8, 0, 1.0, generator)
    )
    return tokenizer.decode(prompt_ids + [id for [id] in rows if id is not None])


if __name__ == "__main__":
    run(main)
