"""Batches of a training run: windows of memory-mapped tokens, which follow from the seed and the step alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels import InputError
from model.config import LlamaConfig
from model.tensor_parallel import check_divisible
from model.training.data_folder import TOKENS, read_prepared


def check_shapes(args: argparse.Namespace, config: LlamaConfig, n_processes: int) -> None:
    """Raises InputError where --tp, --block-size, --batch-size and --grad-accum fit neither model nor processes."""
    if n_processes % args.tp:
        raise InputError(
            f"--tp {args.tp} divides each matrix among {args.tp} processes, and {n_processes} run; "
            f"start a multiple of {args.tp}: torchrun --nproc-per-node {args.tp} ..., or use another --tp"
        )
    if args.tp > 1 and getattr(args, "compile", False):
        raise InputError(f"--compile and --tp {args.tp}: PyTorch compiles a divided model for minutes; leave one out")
    check_block(args, config, args.tp)
    n_data = n_processes // args.tp
    if args.grad_accum > args.batch_size // n_data:
        shared = f" in each of {n_data} processes" if n_data > 1 else ""
        raise InputError(
            f"--batch-size {args.batch_size} has too few sequences for --grad-accum {args.grad_accum} parts{shared}; "
            "expected at least one a part"
        )


def check_block(args: argparse.Namespace, config: LlamaConfig, tp: int) -> None:
    """Raises InputError where `tp` processes cannot divide the model and the block, or the block is too long."""
    check_divisible(config, tp)
    if args.block_size % tp:
        raise InputError(f"--tp {tp} does not divide --block-size {args.block_size}; use a block that it divides")
    if args.block_size > config.max_position_embeddings:
        raise InputError(
            f"--block-size is {args.block_size} and {args.config or 'the default config'} has max_position_embeddings "
            f"{config.max_position_embeddings}; use a block of at most that"
        )


def load_tokens(folder: Path, block_size: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Memory-mapped training and held-out tokens, and meta.json.

    Raises InputError where the folder is damaged, or a part of the tokens holds no whole window.
    """
    meta = read_prepared(folder)
    tokens = np.memmap(folder / TOKENS, meta["dtype"], mode="r")
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
    return torch.from_numpy(tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64))


def batch_starts(n_tokens: int, step: int, seed: int, batch_size: int, block_size: int) -> np.ndarray:
    """Starts of a step's windows, (batch_size,): they follow from seed and step alone, so a run can resume anywhere."""
    return np.random.default_rng((seed, step)).integers(n_tokens - block_size, size=batch_size)


def step_seed(seed: int, step: int, process: int) -> int:
    """Seed of the random numbers that a step may draw, as a user's norm can: it follows from the step alone."""
    return int(np.random.default_rng((seed, step, process)).integers(2**63))
