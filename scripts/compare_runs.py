"""Compare two run folders of train.py: exit code 0 if they hold the same model to the bit, 1 if not.

    python scripts/compare_runs.py out/before out/after

A change that is not numeric must pass: train the same command before and after it, and compare the folders. Compared
are the metrics of every step but its speed, every weight's bits, the config and the tokenizer.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels import InputError
from model.cli import Parser, run
from model.json_file import parse_object, read_file, read_object

SPEED = ("tokens_per_s", "mfu")
FILES = ("model.safetensors", "tokenizer.model")
OBJECTS = ("config.json", "tokenizer_config.json")


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("before", type=Path, help="a folder that train.py has written")
    parser.add_argument("after", type=Path, help="another one")
    return parser.parse_args()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Metrics of each step, without those that depend on the clock. Raises InputError."""
    path = folder / "metrics.jsonl"
    lines = [parse_object(path, line) for line in read_file(path).splitlines()]
    if not lines:
        raise InputError(f"{path} is empty; name a folder in which train.py has trained")
    return [{key: value for key, value in line.items() if key not in SPEED} for line in lines]


def differences(before: Path, after: Path) -> list[str]:
    """One line for each thing that differs, the first differing step of the metrics alone."""
    old, new = metrics_of(before), metrics_of(after)
    found = [] if len(old) == len(new) else [f"metrics.jsonl has {len(old)} steps and {len(new)}"]
    for a, b in zip(old, new, strict=False):
        if keys := sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)):
            found.append(f"step {a.get('step')}: {keys[0]} is {a.get(keys[0])} and {b.get(keys[0])}")
            break
    for name in FILES:
        if missing := [folder / name for folder in (before, after) if not (folder / name).is_file()]:
            raise InputError(f"{missing[0]} is missing; name a folder in which train.py has saved")
        if not filecmp.cmp(before / name, after / name, shallow=False):
            found.append(f"{name} differs")
    for name in OBJECTS:
        a, b = (read_object(folder / name) if (folder / name).exists() else None for folder in (before, after))
        if a != b:
            found.append(f"{name} differs")
    return found


def main() -> None:
    args = parse_args()
    found = differences(args.before, args.after)
    print("\n".join(found) if found else f"the same: {len(metrics_of(args.before))} steps, weights, config, tokenizer")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    run(main)
