"""Train a LLaMA on a text: python train.py --norm triton

Everything has a default: the tiny model of configs/tiny.json, on the source of Python's standard library, in a few
minutes on two CPU cores. The result is a checkpoint directory that generate.py and transformers load.

    python train.py --resume                            goes on where the run of --out stopped, on a CPU to the bit
    torchrun --nproc-per-node 2 train.py                in two processes; with --fsdp the weights are divided too
    python train.py --config configs/llama2-7b.json --plan 8    what a run in 8 processes needs; trains nothing

Ctrl-C and SIGTERM finish the step, save, and end with exit code 130 and 143 (torchrun's own is 1). Bad input, a full
disk, and a loss or gradient that is no number end with 2; what was saved before stands.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import InputError
from model.cli import (
    Parser,
    caught_signals,
    choose_autocast_dtype,
    not_negative,
    positive,
    rank,
    run,
    say,
    world_size,
)
from model.training.run_folder import (
    METRICS,
    RUN,
    STATE,
    begin_run,
    check_folder,
    earlier_metrics,
    newest_step,
    saved_arguments,
)

if TYPE_CHECKING:
    import torch

    from model.config import LlamaConfig
    from model.llama import Llama

EVAL_SEQUENCES = 32  # held-out windows that a validation loss is the mean of
NORM_SEQUENCES = 4  # of them, those that --log-norms looks at


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--config", default=str(Path(__file__).parent / "configs/tiny.json"), help="the model's shape, a config.json")
    add("--data", default="python", help="python (its standard library's source), shakespeare, a text file or a folder")
    add("--out", default="out/tiny", help="folder for the checkpoint, what --resume needs, metrics and curves")
    add("--resume", action="store_true", help="go on with the run in --out; its arguments hold unless given anew")
    parser.add_backend_arguments(["float32", "bfloat16"])
    add("--compile", action=argparse.BooleanOptionalAction, help="compile the model; if left out, on a GPU alone")
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    add("--fsdp", **switch, help="divide weights and optimiser among the processes of torchrun (FSDP2)")
    add("--checkpoint-activations", **switch, help="less memory: compute each layer again for its backward")
    add("--steps", type=positive(int), default=100, help="optimiser steps")
    add("--batch-size", type=positive(int), default=16, help="sequences a step, over all processes")
    add("--block-size", type=positive(int), default=128, help="tokens a sequence")
    add(
        "--grad-accum", type=positive(int), default=1, help="parts into which a process divides its sequences of a step"
    )
    add("--vocab-size", type=positive(int), help="pieces of the tokenizer; the config's, if left out")
    add("--lr", type=positive(float), default=2e-3, help="learning rate at its peak")
    add("--min-lr", type=not_negative(float), help="learning rate at the end of the cosine; if left out, --lr / 20")
    add("--warmup", type=not_negative(int), default=20, help="steps of rising learning rate")
    add("--weight-decay", type=not_negative(float), default=0.1, help="of matrices; norms have none")
    add("--grad-clip", type=positive(float), default=1.0, help="largest norm of the gradient")
    add("--seed", type=not_negative(int), default=1337, help="of the weights, the order of the data and the sample")
    add("--eval-interval", type=positive(int), default=25, help="steps between validation losses")
    add("--save-interval", type=positive(int), default=50, help="steps between checkpoints, besides the last")
    add("--log-norms", type=positive(int), metavar="N", help="every N steps, what the norms see: metrics and norms.png")
    plan_help = "print what a run in N processes (1 if left out) needs, and end; --dtype auto is bfloat16 then"
    add("--plan", type=positive(int), nargs="?", const=1, metavar="N", help=plan_help)
    args = parser.parse_args()
    if args.resume:
        before = saved_arguments(Path(args.out))
        parser.set_defaults(**before)
        args = parser.parse_args()
        for name, value in before.items():
            if getattr(args, name, value) != value:
                say(f"going on with {name.replace('_', '-')} {getattr(args, name)} in place of the run's {value}")
    return args


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Of step 0, 1, ...: a linear warm-up, then a half cosine that reaches --min-lr at the last step."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    min_lr = args.lr / 20 if args.min_lr is None else args.min_lr
    progress = (step - args.warmup) / max(1, args.steps - 1 - args.warmup)
    return min_lr + (args.lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


def parameter_groups(model: Llama, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices, which multiply; leave norm weights and other vectors alone, which only scale."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def main() -> None:
    args = parse_args()
    from model.config import LlamaConfig

    config = LlamaConfig.load(args.config)
    if args.vocab_size:
        config = replace(config, vocab_size=args.vocab_size)
    if args.block_size > config.max_position_embeddings:
        raise InputError(
            f"--block-size is {args.block_size} and {args.config} has max_position_embeddings "
            f"{config.max_position_embeddings}; use a block of at most that"
        )
    processes = args.plan or world_size()
    if args.grad_accum > args.batch_size // processes:
        shared = f" in each of {processes} processes" if processes > 1 else ""
        raise InputError(
            f"--batch-size {args.batch_size} has too few sequences for --grad-accum {args.grad_accum} parts{shared}; "
            "expected at least one a part"
        )
    from model.training.distributed import own_device, process_group

    device = own_device(args.device)
    if args.plan:
        import torch

        from kernels import load_backend
        from scripts.plan import plan

        names = ("batch_size", "block_size", "grad_accum", "steps", "fsdp", "checkpoint_activations")
        settings = {name: getattr(args, name) for name in names}
        # What is planned runs on other machines than this one, as a rule, and those compute bfloat16.
        dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
        print(plan(config, load_backend(args.norm, device), dtype=dtype, n_processes=args.plan, **settings))
        return
    with process_group(device):
        stopped_by = train(args, config, device)
    if stopped_by:
        sys.exit(128 + stopped_by)


def train(args: argparse.Namespace, config: LlamaConfig, device: torch.device) -> int:
    """The run. Returns the number of the signal that stopped it, or 0."""
    import numpy as np
    import torch
    from tqdm import tqdm

    from kernels import load_backend
    from model.checkpoint.load import load_checkpoint
    from model.checkpoint.save import save_checkpoint
    from model.generation import generate, sample
    from model.llama import Llama, checkpoint_layers, summed_loss
    from model.norm import input_mean_squares
    from model.tokenizer import load_tokenizer
    from model.training import distributed as processes
    from model.training.curves import plot_losses, plot_norms
    from model.training.data import batch_starts, load_tokens, step_seed, windows
    from model.training.flops import peak_flops, training_flops
    from model.training.prepare import prepare
    from model.training.state import keep_newest, load_state, save_state

    # What was asked for, checked before anything is written.
    dtype = choose_autocast_dtype(args.dtype, device)
    norm = load_backend(args.norm, device)
    compiled = device.type == "cuda" if args.compile is None else args.compile
    if compiled:
        from kernels.compiled import check_device

        check_device(device)

    # Data and tokenizer; the vocabulary is the tokenizer's, which a short text can make smaller than asked for.
    for _ in processes.in_turn():
        data_folder = prepare(args.data, config.vocab_size, Path("out/data"), renew=not args.resume)
    train_tokens, held_out, meta = load_tokens(data_folder, args.block_size)
    if not processes.agreed(meta["sha256"]):
        raise InputError(f"--data {args.data} is not the same for all processes; give each machine the same out/data")
    tokenizer = load_tokenizer(data_folder)
    config = replace(
        config, vocab_size=tokenizer.vocab_size, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id
    )
    out = Path(args.out)
    check_folder(out, config, tokenizer, meta, args.resume)
    done = newest_step(out / STATE) if args.resume else 0
    if done and rank() == 0:
        keep_newest(out / STATE)
    if done >= args.steps:
        say(f"the run in {out} has {done} steps behind it; --steps N takes it further")
        return 0
    metrics = earlier_metrics(out / METRICS, done)

    torch.manual_seed(args.seed)
    model = Llama(config, norm)
    n_parameters = sum(p.numel() for p in model.parameters())
    flops = training_flops(model, args.block_size)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = peak_flops(device_name) if dtype == torch.bfloat16 else None
    if args.checkpoint_activations:
        checkpoint_layers(model)
    wrapped = processes.divide(model, device, args.fsdp, dtype)
    forward = torch.compile(wrapped) if compiled else wrapped
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    if done:
        load_state(out / STATE, done, model, optimizer)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32 and not args.fsdp)
    eval_starts = np.linspace(0, len(held_out) - args.block_size - 1, EVAL_SEQUENCES, dtype=np.int64)

    dtype_name = str(dtype).removeprefix("torch.")
    say(f"{n_parameters / 1e6:.2f} M parameters, vocabulary {config.vocab_size}, {len(train_tokens):,} training tokens")
    say(f"norm {norm.description}, eps {config.rms_norm_eps:g}, {dtype_name} on {device}{', compiled' * compiled}")
    if world_size() > 1:
        say(f"{world_size()} processes, {'FSDP2: each has its part of the weights' if args.fsdp else 'data parallel'}")
    if args.resume:
        say(f"{out} goes on after step {done}")

    @torch.no_grad()
    def validation_loss() -> float:
        total = torch.zeros((), device=device)
        for starts in np.array_split(eval_starts, math.ceil(EVAL_SEQUENCES / args.batch_size)):
            with autocast:
                total += summed_loss(forward, windows(held_out, processes.part_of(starts), args.block_size).to(device))
        return processes.summed(device, total)[0] / (EVAL_SEQUENCES * args.block_size)

    def save(steps: int) -> None:
        weights = processes.whole_weights(model)
        if rank() == 0:
            save_checkpoint(out, model, tokenizer, weights=weights)
        # Last, since --resume begins from it: what it does again, it does to the bit.
        save_state(out / STATE, steps, model, optimizer)

    processes.wait_for_all()
    if rank() == 0:
        about = {"norm": norm.description, "dtype": dtype_name, "device": str(device), "device_name": device_name}
        begin_run(out, args, metrics, {**about, "compiled": compiled, "data": meta})
    processes.wait_for_all()
    if not processes.agreed((out / RUN).read_text() if (out / RUN).exists() else "nothing"):
        raise InputError(f"--out {out} is not one folder for all processes; name one on a disk that all of them see")
    n_targets = args.batch_size * args.block_size
    val_loss = next((line["val_loss"] for line in reversed(metrics) if "val_loss" in line), None)
    with (
        open(out / METRICS if rank() == 0 else os.devnull, "a") as metrics_file,
        tqdm(total=args.steps, initial=done, unit="step", disable=None if rank() == 0 else True) as bar,
        caught_signals() as caught,
    ):
        for step in range(done, args.steps):
            started = time.perf_counter()
            torch.manual_seed(step_seed(args.seed, step, rank()))
            lr = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = lr

            starts = processes.part_of(
                batch_starts(len(train_tokens), step, args.seed, args.batch_size, args.block_size)
            )
            parts = windows(train_tokens, starts, args.block_size).to(device).tensor_split(args.grad_accum)
            loss = torch.zeros((), device=device)
            for i, part in enumerate(parts):
                # Each part's sum over the step's count: parts of unequal size weigh as their targets do.
                with processes.gradient_sync(wrapped, i + 1 == len(parts)):
                    with autocast:
                        part_loss = summed_loss(forward, part) / n_targets
                    (part_loss * world_size()).backward()  # whose gradients are averaged over the processes
                loss += part_loss.detach()
            grad_norm = processes.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)).item()
            total_loss, stopping = processes.summed(device, loss, bool(caught))
            if not math.isfinite(total_loss + grad_norm):  # clipping by it would write NaN into every weight
                raise InputError(
                    f"step {step + 1}: the loss is {total_loss:g} and the gradient's norm {grad_norm:g}; "
                    "stopped before the weights took it, and the last checkpoint stands; try a lower --lr"
                )
            optimizer.step()
            optimizer.zero_grad()

            line = {"step": step, "loss": total_loss, "lr": lr, "grad_norm": grad_norm}
            line["tokens_per_s"] = n_targets / (time.perf_counter() - started)
            if peak:
                line["mfu"] = flops * line["tokens_per_s"] / (peak * world_size())
            last = step + 1 == args.steps
            if args.log_norms and (last or step % args.log_norms == 0):
                seen = windows(held_out, eval_starts[:NORM_SEQUENCES], args.block_size).to(device)
                with autocast:
                    squares = input_mean_squares(model, seen)
                line["norm_mean_square"], line["norm_least_square"] = squares.tolist()
            saving = last or stopping or (step + 1) % args.save_interval == 0
            evaluated = last or (step + 1) % args.eval_interval == 0
            if evaluated or saving:  # before saving too: weights that the step has ruined must not replace good ones
                new_val_loss = validation_loss()
                if not math.isfinite(new_val_loss):
                    raise InputError(
                        f"step {step + 1} has left weights whose validation loss is {new_val_loss:g}; stopped before "
                        "they were saved, and the last checkpoint stands; try a lower --lr"
                    )
            if evaluated:
                line["val_loss"] = val_loss = new_val_loss
            shown = [f"loss {total_loss:.3f}", f"{line['tokens_per_s']:,.0f} tokens/s"]
            if val_loss is not None:
                shown.insert(1, f"validation loss {val_loss:.3f}")
            if peak:
                shown.append(f"MFU {line['mfu']:.1%}")
            if evaluated:
                say(f"step {step + 1}: {', '.join(shown)}")
            metrics.append(line)
            metrics_file.write(json.dumps(line) + "\n")
            metrics_file.flush()
            if evaluated and rank() == 0:
                plot_losses(metrics, meta["unigram_loss"], out / "loss.png")
                if args.log_norms:
                    plot_norms(metrics, config.rms_norm_eps, out / "norms.png")
            if saving:
                if rank() == 0:
                    os.fsync(metrics_file.fileno())  # --resume asks for the line of every step
                save(step + 1)
            bar.set_postfix_str(", ".join(shown))
            bar.update()
            if stopping and not last:
                number = caught[0] if caught else signal.SIGTERM  # which another process has got
                say(f"{signal.Signals(number).name}: saved after step {step + 1}; --resume --out {out} goes on")
                return number

    say(f"validation loss {val_loss:.3f} nats a token; the unigram distribution has {meta['unigram_loss']:.3f}")
    say(f"saved {out}; `python generate.py --ckpt {out}` writes more than this, which follows 16 held-out tokens:")
    if rank() == 0:
        del forward, wrapped, optimizer, model  # room for the whole model, of which this process may have had a part
        model = load_checkpoint(out, norm, device)
        prompt_ids = held_out[: min(16, args.block_size)].tolist()
        n_new = min(100, config.max_position_embeddings - len(prompt_ids))
        generator = torch.Generator(device).manual_seed(args.seed)
        rows = generate(
            model, [prompt_ids], n_new, config.end_ids(), lambda logits: sample(logits, 0.8, 0, 1.0, generator)
        )
        print(tokenizer.decode([*prompt_ids, *(id for [id] in rows)]))
    return 0


if __name__ == "__main__":
    run(main)
