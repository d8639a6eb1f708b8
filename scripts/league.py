"""Hold Triton norms of other packages to the contract, on an emulated GPU, and count what they move.

Each norm of scripts/peers.py runs as compiled for one GPU, in the form that it claims (kernels/form.py). It meets
the checks of tests/kernels/test_norm_contract.py that this form has, forward and backward, and those of the add and the
norm together if it has a kernel for both. Then its sectors of global memory are counted, 32 bytes each, in bfloat16:
for x of 2048 x 1024 in the table, which is printed, and over a row of widths in the picture. It is no measure of time.
What a package computes with PyTorch's operators beside its kernels is not counted.

The table's bytes an element are those of tensors of x's size + those of all others (the weight, as often as programs
load it, partial sums, a value for each row); behind them stand instructions an element. After each kind of failed check
stands the number of its cases, and * where the emulated GPU found an access outside of the tensors.

A package that is missing is a line that says how to install it. Exit code 0, whatever the norms do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels import InputError
from kernels.emulated.gpus import GPUS
from kernels.form import FORMS
from model.cli import Parser, make_folder, names_in, positive, run, whole_numbers

WIDTHS = "64,256,1024,4096,16384,65536,131072"


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--norms", help="comma-separated, of scripts/peers.py, and triton for our own (default: triton and all of them)"
    )
    add("--emulate", default="sm_90", choices=GPUS, help="GPU that kernels are compiled for")
    add("--widths", type=whole_numbers, default=WIDTHS, help="D whose bytes are counted")
    add("--jobs", type=positive(int), default=os.cpu_count(), help="processes")
    add("--json", type=Path, help="file for all that was found")
    add("--picture", type=Path, help="PNG file for the bytes moved over the floor, by width")
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

from tqdm import tqdm

from scripts.judging.judge import Verdict, judge
from scripts.judging.report import draw, table
from scripts.peers import PACKAGES


def judge_apart(*task: Any) -> Verdict:
    """judge, in a process of its own: packages patch what they find, and a compiler may take its process down."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(judge, *task).result()
        except BrokenProcessPool:
            return Verdict(*task[:2], why_not="it takes its process down")


def entries(names: str | None) -> list[tuple[str, str]]:
    """(norm, form) for each norm named and each form that it claims."""
    claims = {"triton": tuple(FORMS)} | {name: peer.forms for name, peer in PACKAGES.items() if name != "quack"}
    chosen = list(claims) if names is None else names_in(names)
    for name in chosen:
        if name not in claims:
            raise InputError(f"--norms: no Triton norm is called '{name}'; expected some of {', '.join(claims)}")
    return [(name, form) for name in chosen for form in claims[name]]


def main() -> None:
    args = parse_args()
    for option in ("json", "picture"):
        if path := getattr(args, option):
            make_folder(f"--{option}", path.parent)
    tasks = [(name, form, args.emulate, args.widths) for name, form in entries(args.norms)]
    with ThreadPoolExecutor(args.jobs) as threads:
        verdicts = list(tqdm(threads.map(lambda task: judge_apart(*task), tasks), total=len(tasks), disable=None))
    if args.json:
        args.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    if args.picture:
        draw(verdicts, args.picture)
    print(table(verdicts))


if __name__ == "__main__":
    run(main)
