"""The arguments of a run: those of the run that --resume continues, and numbers that cannot be computed with."""

from __future__ import annotations

import argparse
from pathlib import Path

from kernels import InputError
from model.cli import Parser, say
from model.training.run_folder import RUN, saved_arguments

LARGEST_RATE = 1e6  # of --lr and --weight-decay; their product, and Adam's tenfold first step, fit into float32
LARGEST_STEP = 2**28  # tokens: a step's windows then take 2 GiB


def resumed(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of the run in --out, parsed as flags. Raises InputError."""
    flags = []
    for name, value in saved_arguments(args.out).items():
        flag = name.replace("_", "-")
        if value is None or name not in vars(args).keys() - {"out", "resume"}:  # earlier versions had other flags
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    try:
        return parser.parse_args(flags)
    except InputError as error:
        raise InputError(f"{args.out / RUN}: {error}; or remove that file, and give the run's flags again") from error


def check_numbers(args: argparse.Namespace, saved: argparse.Namespace | None) -> None:
    """Raise InputError for numbers that contradict each other or are too large to compute with.

    What a resumed run has saved is taken as it is: earlier versions refused less.
    """

    def given(*names: str) -> bool:
        return not saved or any(getattr(args, name) != getattr(saved, name) for name in names)

    if given("warmup") and args.warmup is not None and args.warmup >= args.steps:
        raise InputError(
            f"--warmup {args.warmup} leaves none of --steps {args.steps} at the full learning rate; use fewer, "
            "or leave it out for a fifth of --steps"
        )
    if given("lr", "min_lr") and args.min_lr is not None and args.min_lr > args.lr:
        raise InputError(f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}; expected at most that")
    for flag, rate in (("--lr", args.lr), ("--weight-decay", args.weight_decay)):
        if rate > LARGEST_RATE:
            raise InputError(f"{flag} is {rate:g}; expected at most {LARGEST_RATE:g}")
    if args.batch_size * args.block_size > LARGEST_STEP:
        raise InputError(
            f"--batch-size {args.batch_size} sequences of --block-size {args.block_size} tokens are too many for one "
            f"step; expected at most {LARGEST_STEP:,} tokens"
        )


def say_changes(args: argparse.Namespace) -> None:
    """Say which arguments a resumed run had otherwise. Raises InputError where its config is gone."""
    saved, own = saved_arguments(args.out), args.out / "config.json"
    for name, value in saved.items():
        if getattr(args, name, value) != value:
            say(f"resuming with {name.replace('_', '-')} {getattr(args, name)}; the run had {value}")
    if args.config and args.config == saved.get("config") and not Path(args.config).exists() and own.exists():
        raise InputError(
            f"{args.config} is missing, which the run began with; name it by --config, or go on with the config "
            f"that the run saved: --config {own}"
        )
