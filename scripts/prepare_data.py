"""Turn a text into the data that train.py reads: a sentencepiece tokenizer and one file of token ids.

    python scripts/prepare_data.py                      the standard library's source of the Python that runs this
    python scripts/prepare_data.py --data PATH          a UTF-8 text file, or a folder of them
    python scripts/prepare_data.py --data shakespeare   tiny Shakespeare, fetched once

train.py does the same where the folder is missing or out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model.cli import Parser, positive, run, say


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--data", default="python", help="python, shakespeare, a UTF-8 text file or a folder of them")
    parser.add_argument("--vocab-size", type=positive(int), default=1024, help="pieces of the tokenizer")
    parser.add_argument("--out", default="out/data", help="folder for the prepared data")
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the import below, which takes a while

from model.training.data_folder import read_prepared
from model.training.prepare import prepare


def main() -> None:
    args = parse_args()
    folder = prepare(args.data, args.vocab_size, Path(args.out))
    meta = read_prepared(folder)
    held_out = meta["n_tokens"] - meta["n_train"]
    say(f"{folder}: {meta['n_tokens']:,} tokens, the last {held_out:,} held out; vocabulary {meta['vocab_size']}")


if __name__ == "__main__":
    run(main)
