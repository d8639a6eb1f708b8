"""Measure the memory and the time of preparing a text: python scripts/bench_data.py --mb 200

A text of that size is made of invented words: a few are frequent and most are rare, as in a language, new ones keep
coming, and no line repeats but by chance. `scripts/prepare_data.py` then prepares it in a process of its own. Printed
are that process's peak memory, in all and a byte of text, its seconds, and the tokens. Text and data are removed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import InputError
from model.cli import Parser, positive, run, say


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--mb", type=positive(int), default=200, help="size of the text, in millions of bytes")
    parser.add_argument("--vocab-size", type=positive(int), default=1024, help="pieces of the tokenizer")
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the import below, which takes a while

try:
    import resource
except ImportError:  # on Windows
    resource = None

import numpy as np

SYLLABLES = np.array([a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s")])
ENDS = np.array([" "] * 12 + [", ", ". ", "\n"])  # after a word; a line has 15 words on average
BLOCK = 10_000  # words that are made at once


def write_text(path: Path, size: int) -> None:
    """Write ASCII text of at least `size` bytes and at most a block more; the same for the same size."""
    draw = np.random.default_rng(0)
    with path.open("w", encoding="ascii", newline="\n") as out:
        while out.tell() < size:
            # Ranks by Zipf's law. A rank's digits in base 280 choose its syllables: frequent words are short.
            ranks = np.minimum(draw.zipf(1.3, BLOCK), len(SYLLABLES) ** 4) - 1
            words = SYLLABLES[ranks % len(SYLLABLES)]
            while ranks.any():
                ranks //= len(SYLLABLES)
                words = np.char.add(words, np.where(ranks > 0, SYLLABLES[ranks % len(SYLLABLES)], ""))
            out.write("".join(np.char.add(words, draw.choice(ENDS, BLOCK))))


def main() -> None:
    args = parse_args()
    if resource is None:
        raise InputError("peak memory is not measured on Windows; run this on Linux or macOS")
    with tempfile.TemporaryDirectory() as temporary:
        text, data = Path(temporary) / "text.txt", Path(temporary) / "data"
        say(f"making a text of {args.mb} MB")
        write_text(text, args.mb * 10**6)
        command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--data", str(text), "--out", str(data)]
        started = time.perf_counter()
        done = subprocess.run([*command, "--vocab-size", str(args.vocab_size)])
        seconds = time.perf_counter() - started
        if done.returncode:
            raise InputError(f"prepare_data.py ended with exit code {done.returncode}; its message is above")
        # In bytes on macOS, in KiB elsewhere. It counts the fork of this process too, which is smaller.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        size = text.stat().st_size
        [meta_file] = data.glob("*/meta.json")
        tokens = json.loads(meta_file.read_text())["n_tokens"]
    print(f"text {size / 1e6:.1f} MB, {tokens:,} tokens")
    print(f"peak memory {peak / 1e6:.0f} MB, {peak / size:.2f} bytes a byte of text; {seconds:.1f} s")


if __name__ == "__main__":
    run(main)
