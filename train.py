"""Train a LLaMA on a text: python train.py --norm triton

Everything has a default: the tiny model of configs/tiny.json, on the source of Python's standard library, in a few
minutes on two CPU cores. The result is a checkpoint directory that generate.py and transformers load.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import InputError
from model.command import Parser, choose_autocast_dtype, choose_device, not_negative, positive, run, say

if TYPE_CHECKING:
    import argparse

    import numpy as np
    import torch

    from model.config import LlamaConfig
    from model.llama import Llama
    from model.tokenizer import Tokenizer

EVAL_SEQUENCES = 32  # held-out windows that a validation loss is the mean of


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__.split(":")[0])
    add = parser.add_argument
    add("--config", default=Path(__file__).parent / "configs/tiny.json", help="the model's shape, a config.json")
    add("--data", default="python", help="python (its standard library's source), shakespeare, a text file or a folder")
    add("--out", default="out/tiny", help="checkpoint directory, metrics and loss plot go here")
    parser.add_backend_arguments(["float32", "bfloat16"])
    add("--compile", action="store_true", help="run the whole model under torch.compile")
    add("--steps", type=positive(int), default=100, help="optimiser steps")
    add("--batch-size", type=positive(int), default=16, help="sequences a step")
    add("--block-size", type=positive(int), default=128, help="tokens a sequence")
    add("--grad-accum", type=positive(int), default=1, help="parts that a step's sequences are computed in")
    add("--vocab-size", type=positive(int), help="pieces of the tokenizer; the config's, if left out")
    add("--lr", type=positive(float), default=2e-3, help="learning rate at its peak")
    add("--min-lr", type=not_negative(float), help="learning rate at the end of the cosine; if left out, --lr / 20")
    add("--warmup", type=not_negative(int), default=20, help="steps of rising learning rate")
    add("--weight-decay", type=not_negative(float), default=0.1, help="of matrices; norms have none")
    add("--grad-clip", type=positive(float), default=1.0, help="largest norm of the gradient")
    add("--seed", type=not_negative(int), default=1337, help="of the weights, the order of the data and the sample")
    add("--eval-interval", type=positive(int), default=25, help="steps between validation losses")
    add("--save-interval", type=positive(int), default=50, help="steps between checkpoints, besides the last")
    args = parser.parse_args()
    if args.min_lr is None:
        args.min_lr = args.lr / 20
    return args


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Of step 0, 1, ...: a linear warm-up, then a half cosine that reaches --min-lr at the last step."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - 1 - args.warmup)
    return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def parameter_groups(model: Llama, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices, which multiply; leave norm weights and other vectors alone, which only scale."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def load_tokens(folder: Path, block_size: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Memory-mapped training and held-out tokens, and meta.json. Raises InputError where one has no whole window."""
    import numpy as np

    meta = json.loads((folder / "meta.json").read_text())
    tokens = np.memmap(folder / "tokens.bin", meta["dtype"], mode="r")
    train, held_out = tokens[: meta["n_train"]], tokens[meta["n_train"] :]
    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) < block_size + 1:
            raise InputError(
                f"the {name} part of --data has {len(part)} tokens; --block-size {block_size} needs {block_size + 1} "
                "for one window and its next token; use a longer text or a smaller block"
            )
    return train, held_out, meta


def windows(tokens: np.ndarray, starts: np.ndarray, block_size: int) -> torch.Tensor:
    """Token windows with the token after each, (len(starts), block_size + 1), as int64."""
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([tokens[s : s + block_size + 1] for s in starts]).astype(np.int64))


def batch_starts(n_tokens: int, step: int, args: argparse.Namespace) -> np.ndarray:
    """Where the step's windows start. They follow from seed and step alone, so a run can begin at any step."""
    import numpy as np

    return np.random.default_rng((args.seed, step)).integers(n_tokens - args.block_size, size=args.batch_size)


def summed_loss(model: Llama, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the targets of a batch (B, block_size + 1), in float32."""
    import torch.nn.functional as F

    logits = model(batch[:, :-1])  # (B, block_size, vocab_size)
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def check_out(folder: Path, config: LlamaConfig, tokenizer: Tokenizer) -> None:
    """Raises InputError when the folder can't take this run's checkpoint without destroying another model."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file; expected a folder, or a name that is free")
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    if not weights and not (folder / "config.json").exists():
        return
    try:
        same = type(config).load(folder / "config.json") == config
        same = same and all((folder / name).read_bytes() == content for name, content in tokenizer.files.items())
    except (OSError, InputError):
        same = False
    if not same:
        raise InputError(
            f"--out {folder} holds another model; its config or tokenizer is not this run's; name another folder"
        )
    say(f"{folder} holds an earlier run of this model; its checkpoint is replaced at the first save")


def plot_losses(metrics: list[dict[str, Any]], unigram_loss: float, path: Path) -> None:
    """Training and validation loss over the steps, and the loss of predicting by frequency alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], color="0.7", linewidth=1, label="training")
    evaluated = [m for m in metrics if "val_loss" in m]
    axes.plot([m["step"] for m in evaluated], [m["val_loss"] for m in evaluated], "o-", color="C0", label="validation")
    axes.axhline(unigram_loss, color="C3", linestyle="--", linewidth=1, label="unigram distribution")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{path.parent.name}: loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    args = parse_args()
    import numpy as np
    import torch
    from tqdm import tqdm

    from kernels import load_backend
    from model.config import LlamaConfig
    from model.generation import generate, sample
    from model.llama import Llama
    from model.saving import save_checkpoint
    from model.tokenizer import load_tokenizer
    from scripts.prepare_data import prepare

    # What was asked for, checked before anything is written.
    config = LlamaConfig.load(args.config)
    if args.block_size > config.max_position_embeddings:
        raise InputError(
            f"--block-size is {args.block_size} and {args.config} has max_position_embeddings "
            f"{config.max_position_embeddings}; use a block of at most that"
        )
    if args.grad_accum > args.batch_size:
        raise InputError(f"--grad-accum {args.grad_accum} parts can't share --batch-size {args.batch_size} sequences")
    device = choose_device(args.device)
    dtype = choose_autocast_dtype(args.dtype, device)
    norm = load_backend(args.norm, device)
    if args.compile:
        from kernels.compiled import check_device

        check_device(device)

    # Data and tokenizer; the vocabulary is the tokenizer's, which a short text can make smaller than asked for.
    data_folder = prepare(args.data, args.vocab_size or config.vocab_size, Path("out/data"))
    train_tokens, held_out, meta = load_tokens(data_folder, args.block_size)
    tokenizer = load_tokenizer(data_folder)
    config = replace(
        config, vocab_size=tokenizer.vocab_size, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id
    )
    out = Path(args.out)
    check_out(out, config, tokenizer)

    torch.manual_seed(args.seed)
    model = Llama(config, norm).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    forward = torch.compile(model) if args.compile else model
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    eval_starts = np.linspace(0, len(held_out) - args.block_size - 1, EVAL_SEQUENCES, dtype=np.int64)

    n_parameters = sum(p.numel() for p in model.parameters())
    say(f"{n_parameters / 1e6:.2f} M parameters, vocabulary {config.vocab_size}, {len(train_tokens):,} training tokens")
    say(f"norm {norm.description}, eps {config.rms_norm_eps:g}, {str(dtype).removeprefix('torch.')} on {device}")

    @torch.no_grad()
    def validation_loss() -> float:
        total = 0.0
        for starts in np.array_split(eval_starts, math.ceil(EVAL_SEQUENCES / args.batch_size)):
            with autocast:
                total += summed_loss(forward, windows(held_out, starts, args.block_size).to(device)).item()
        return total / (EVAL_SEQUENCES * args.block_size)

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out} can't be made ({error.strerror}); name a folder that can") from error
    metrics = []
    with (out / "metrics.jsonl").open("w") as metrics_file, tqdm(total=args.steps, unit="step", disable=None) as bar:
        for step in range(args.steps):
            started = time.perf_counter()
            lr = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = lr

            batch = windows(train_tokens, batch_starts(len(train_tokens), step, args), args.block_size).to(device)
            n_targets = batch[:, 1:].numel()
            loss = torch.zeros((), device=device)
            for part in batch.tensor_split(args.grad_accum):
                # Each part's sum over the step's count: parts of unequal size weigh as their targets do.
                with autocast:
                    part_loss = summed_loss(forward, part) / n_targets
                part_loss.backward()
                loss += part_loss.detach()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            if not torch.isfinite(grad_norm):  # clipping by it would write NaN into every weight
                raise InputError(
                    f"step {step}: the loss is {loss.item():g} and the gradient's norm {grad_norm.item():g}; "
                    "stopped before the weights took it, and the last checkpoint stands; try a lower --lr"
                )
            optimizer.step()
            optimizer.zero_grad()

            line = {"step": step, "loss": loss.item(), "lr": lr}
            line["tokens_per_s"] = n_targets / (time.perf_counter() - started)
            last = step + 1 == args.steps
            if last or (step + 1) % args.eval_interval == 0:
                line["val_loss"] = validation_loss()
                say(f"step {step + 1}: training loss {line['loss']:.3f}, validation loss {line['val_loss']:.3f}")
            metrics.append(line)
            metrics_file.write(json.dumps(line) + "\n")
            metrics_file.flush()
            if last or (step + 1) % args.save_interval == 0:
                save_checkpoint(out, model, tokenizer)
            bar.set_postfix_str(f"loss {line['loss']:.3f}, {line['tokens_per_s']:,.0f} tokens/s")
            bar.update()

    plot_losses(metrics, meta["unigram_loss"], out / "loss.png")
    val_loss, unigram_loss = metrics[-1]["val_loss"], meta["unigram_loss"]
    say(f"validation loss {val_loss:.3f} nats a token; the unigram distribution has {unigram_loss:.3f}")
    say(f"saved {out}; `python generate.py --ckpt {out}` writes more than this, which follows 16 held-out tokens:")
    prompt_ids = held_out[: min(16, args.block_size)].tolist()
    n_new = min(100, config.max_position_embeddings - len(prompt_ids))
    generator = torch.Generator(device).manual_seed(args.seed)
    rows = generate(model, [prompt_ids], n_new, config.end_ids(), lambda logits: sample(logits, 0.8, 0, 1.0, generator))
    print(tokenizer.decode([*prompt_ids, *(id for [id] in rows)]))


if __name__ == "__main__":
    run(main)
