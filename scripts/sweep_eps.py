"""Show what eps does to a trained model: python scripts/sweep_eps.py --ckpt out/tiny

The checkpoint's perplexity (scripts/perplexity.py) is measured with its own eps and with one of every decade. Beside it
stands the share of the norms' input rows that eps reaches: those that it makes smaller by 1 % or more, since their
mean square (in a LayerNorm, their variance) is less than 49.25 times eps. The picture has that share by norm, from the
first layer to the last one.

A wrong eps does nothing as long as all rows are large beside it, and the perplexity turns where it reaches them. Where
that is depends on how large this model's rows are, so a sweep of one model says nothing about another.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model.cli import Parser, emulate_as_asked, make_folder, png, positive, run, say
from scripts.text_arguments import add_text_arguments

SMALLEST, LARGEST = 1e-37, 1e38  # powers of ten among float32's normal numbers

if TYPE_CHECKING:
    from torch import Tensor

    from model.llama import Llama

REACHED = 0.99**2 / (1 - 0.99**2)  # 49.25: a row with a mean square of so many eps becomes 0.99 times what it would be


class Measured(NamedTuple):
    """The model with one eps: mean loss in nats a token, and by norm the share of rows that eps reaches."""

    eps: float
    loss: float
    shares: list[float]


def decades(text: str) -> list[float]:
    """An argparse type: two positive numbers of float32, FROM:TO -> every power of ten between them."""
    ends = [math.log10(positive(float)(part)) for part in text.split(":")]
    if len(ends) != 2 or ends[0] > ends[1]:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not two numbers with a colon between them, the smaller one first"
        )
    powers = [10.0**power for power in range(math.ceil(ends[0] - 1e-9), math.floor(ends[1] + 1e-9) + 1)]
    if not powers:
        raise argparse.ArgumentTypeError(f"'{text}' has no power of ten in it; expected one or more, as in 1e-5:1e-4")
    if powers[0] < SMALLEST or powers[-1] > LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is not within {SMALLEST:g}:{LARGEST:g}, the powers in float32")
    return powers


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add_text_arguments(parser, max_tokens=8192)
    parser.add_argument("--eps", type=decades, default="1e-10:1e2", help="from which decade to which")
    parser.add_argument("--picture", type=png, default=Path("out/eps.png"), help="PNG file")
    args = parser.parse_args()
    emulate_as_asked(args)
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

from model.norm import RMSNorm, norm_names, watched_inputs
from model.training.picture import new_figure, why_not_drawn
from scripts.perplexity import load, mean_loss, perplexity_of


def measure(model: Llama, ids: Tensor, context: int, stride: int, eps: float) -> Measured:
    """The model with another eps in all of its norms; they have their own again afterwards."""
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    reached, seen, own = dict.fromkeys(norms, 0.0), dict.fromkeys(norms, 0), [norm.eps for norm in norms]

    def count(norm: RMSNorm, squares: Tensor) -> None:
        reached[norm] += (squares < REACHED * eps).sum().item()
        seen[norm] += squares.numel()

    try:
        for norm in norms:
            norm.eps = eps
        with watched_inputs(model, count):
            loss = mean_loss(model, ids, context, stride, f"eps {eps:g}")
    finally:
        for norm, before in zip(norms, own, strict=True):
            norm.eps = before
    return Measured(eps, loss, [reached[norm] / seen[norm] for norm in norms])


def table(measured: Iterable[Measured], own: float) -> str:
    """A Markdown table; the checkpoint's own eps is bold."""
    lines = ["| eps | perplexity | rows that it reaches | most in a norm |", "|---|---|---|---|"]
    for eps, loss, shares in measured:
        name = f"**{eps:g}**" if eps == own else f"{eps:g}"
        lines.append(f"| {name} | {perplexity_of(loss, '.4g')} | {sum(shares) / len(shares):.1%} | {max(shares):.1%} |")
    return "\n".join(lines)


def draw(measured: list[Measured], own: float, names: list[str], path: Path) -> None:
    """The perplexity over eps, and below it the share of reached rows by eps and norm."""
    figure = new_figure(7, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 3])
    epss = [each.eps for each in measured]
    above.plot(epss, [math.exp(min(each.loss, 100)) for each in measured], marker="o", markersize=4, color="C0")
    above.axvline(own, color="C3", linestyle="--", linewidth=1, label=f"the checkpoint's eps, {own:g}")
    above.set(xscale="log", yscale="log", ylabel="perplexity", title="What eps does to a trained model")
    above.legend(frameon=False)
    shares = [[each.shares[i] for each in measured] for i in range(len(names))]  # (n_norms, n_eps)
    filled = below.pcolormesh(epss, range(len(names)), shares, vmin=0, vmax=1, cmap="magma_r", shading="nearest")
    below.axvline(own, color="C3", linestyle="--", linewidth=1)
    every = max(1, len(names) // 12)  # names that fit above each other
    below.set_yticks(range(0, len(names), every), names[::every])
    below.invert_yaxis()
    below.set(xlabel="eps", ylabel="norm, from the first to the last")
    figure.colorbar(filled, ax=[above, below], label="share of rows that eps changes by 1 % or more")
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_args()
    make_folder("--picture", args.picture.parent)
    model, ids = load(args)
    own, weight = model.config.rms_norm_eps, model.embed_tokens.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    say(f"norm {model.norm.backend.description}, {dtype} on {weight.device}, {len(ids):,} tokens of the text")
    epss = sorted({*args.eps, own})
    measured = [measure(model, ids, args.context, args.stride, eps) for eps in epss]
    print(table(measured, own))
    undrawn = why_not_drawn(draw, measured, own, norm_names(model), args.picture)
    say(undrawn or f"drawn: {args.picture}")


if __name__ == "__main__":
    run(main)
