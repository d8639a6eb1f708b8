"""Measure the perplexity of a text under a checkpoint: python scripts/perplexity.py --ckpt out/tiny

Perplexity is e to the mean of -ln p(token | the tokens before it), over all tokens but the first. A model sees at most
--context tokens, so the text is read in windows that begin --stride tokens apart. A window scores only the tokens that
the one before it has not reached, so each token is scored once, and all but those of the first window have more than
context - stride tokens before them. A small stride gives a lower and truer figure, and takes context / stride times as
long. The same windows in transformers give the same loss. Figures of two models are comparable only with one tokenizer.

The text is a UTF-8 file, or else the held-out part of what the checkpoint's own run of train.py was given.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels import InputError
from model.cli import Parser, emulate_as_asked, positive, run, say
from scripts.text_arguments import add_text_arguments

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from model.llama import Llama


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add_text_arguments(parser)
    parser.add_argument("--norm-eps", type=positive(float), help="override the checkpoint's rms_norm_eps")
    args = parser.parse_args()
    emulate_as_asked(args)
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

import torch
import torch.nn.functional as F
from tqdm import tqdm

from kernels import load_backend
from model.checkpoint.load import check_norm, load_checkpoint
from model.cli import choose_device
from model.json_file import read_object
from model.tokenizer import load_tokenizer
from model.training.data import load_tokens
from model.training.prepare import prepare
from model.training.run_folder import RUN
from train import DATA


def load(args: argparse.Namespace, eps: float | None = None) -> tuple[Llama, Tensor]:
    """The model, and the ids of the text (n_tokens,). Fill in args.context and args.stride. Raises InputError."""
    device = choose_device(args.device)
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    model = load_checkpoint(args.ckpt, load_backend(args.norm, device), device, dtype, eps).eval()
    check_norm(args.ckpt, model.config, args.norm)
    most = model.config.context_length
    if args.context and args.context > most:
        say(f"--context is {args.context} and the model takes {most} tokens at most, so a window has {most}")
    args.context = min(args.context or most, most)
    args.stride = args.stride or max(1, args.context // 2)
    if args.context < 2 or args.stride > args.context:
        raise InputError(
            f"--context is {args.context} and --stride {args.stride}; expected a context of 2 tokens or more and a "
            "stride that is not longer, or tokens between the windows would not be scored"
        )
    ids = read_ids(args)
    if len(ids) < 2:
        raise InputError(f"tokens of the text: {len(ids)}; expected 2 or more, since the first has nothing before it")
    if int(ids.max()) >= model.config.vocab_size:
        raise InputError(f"{args.ckpt}: the text has token {int(ids.max())}, the model {model.config.vocab_size} rows")
    return model, ids.to(device)


def read_ids(args: argparse.Namespace) -> Tensor:
    """Token ids of the text, as many as args.max_tokens, on the CPU. Raises InputError."""
    if args.text is None:
        return torch.from_numpy(held_out_of(Path(args.ckpt))[: args.max_tokens].astype("int64"))
    try:
        text = args.text.read_text("utf-8-sig")
    except OSError as error:
        raise InputError(f"--text {args.text} cannot be read ({error.strerror}); name a UTF-8 file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--text {args.text} is not UTF-8 text ({error}); convert it") from error
    tokenizer = load_tokenizer(args.ckpt)
    return torch.tensor(tokenizer.encode(text, bos=tokenizer.adds_bos)[: args.max_tokens])


def held_out_of(folder: Path) -> np.ndarray:
    """Held-out tokens of the data that train.py's run in a folder was given. Raises InputError where they are lost."""
    if not (folder / RUN).is_file():
        raise InputError(f"{folder} holds no {RUN} of a training run, so no held-out text; name one with --text")
    data = read_object(folder / RUN).get("data", {})
    _, held_out, meta = load_tokens(prepare(data["source"], data["vocab_size"], DATA, data["sha256"]), 1)
    if meta["sha256"] != data["sha256"]:
        raise InputError(f"--data {data['source']} is not what {folder} was trained on any more; name a --text")
    return held_out


def windows(n_tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, tokens to score at its end) of each window over a text: what the model sees, and a token more."""
    scored = 1  # nothing comes before the first token
    for start in range(0, n_tokens, stride):
        end = min(start + context + 1, n_tokens)
        yield start, end, end - scored
        scored = end
        if end == n_tokens:
            return


@torch.inference_mode()
def mean_loss(model: Llama, ids: Tensor, context: int, stride: int, progress: str = "windows") -> float:
    """-ln p of a token of `ids` (n_tokens,) but the first, in nats: the mean over tokens, in float64.

    Raises InputError where it is NaN or infinite.
    """
    spans = list(windows(len(ids), context, stride))
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    for start, end, n_scored in tqdm(spans, progress, disable=None, leave=False):
        logits = model(ids[None, start : end - 1], logits_to_keep=n_scored)[0]  # (n_scored, vocab_size)
        total += F.cross_entropy(logits.float(), ids[end - n_scored : end], reduction="sum")
    loss = total.item() / (len(ids) - 1)
    if not math.isfinite(loss):
        dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
        wider = "" if dtype == "float32" else f", or {dtype} too narrow: try --dtype float32"
        raise InputError(
            f"the loss is {loss:g} in {dtype}; expected a finite one; weights may be NaN or infinite{wider}"
        )
    return loss


def perplexity_of(loss: float, digits: str) -> str:
    """The perplexity of a mean loss, in a format like .4f; above e^100 only that it is there."""
    return format(math.exp(loss), digits) if loss < 100 else "above 1e43"


def main() -> None:
    args = parse_args()
    model, ids = load(args, args.norm_eps)
    config, weight = model.config, model.embed_tokens.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    say(f"norm {model.norm.backend.description}, eps {config.rms_norm_eps:g}, {dtype} on {weight.device}")
    loss = mean_loss(model, ids, args.context, args.stride)
    print(
        f"perplexity {perplexity_of(loss, '.4f')}, loss {loss:.6f} nats a token: {len(ids) - 1:,} tokens, "
        f"context {args.context}, stride {args.stride}"
    )


if __name__ == "__main__":
    run(main)
