"""Train a small model with each norm in each place, from several seeds, and say what the spread over seeds supports.

    python scripts/stability.py                      RMSNorm, LayerNorm and no norm: minutes on two cores
    python scripts/stability.py --norms torch,layer_norm_bias --placements pre --seeds 10

A norm stands on the input of each sub-layer (pre, as in LLaMA), on its output before that is added to the residual
stream (post, as in OLMo 2), or on both; one more before the head, and none without norms. The model is otherwise
LLaMA's, and one seed gives every model the same matrices and the same batches. Each is trained with each learning rate
as train.py trains, in float32 on one thread. Measured are the loss on held-out text, the gradient's norm by layer at
the first and the last step of one rate, and the smallest rate above the best one that diverges: the loss becomes NaN
or infinite, or ends above that of the unigram distribution.

A difference is called one where the values of all seeds of the one lie below those of the other; elsewhere no
difference is seen. Of two that are alike, n seeds each would be told apart by chance in 2 of (2n over n) cases, with 5
seeds in 1 of 126. A run that is there already is not repeated, so an interrupted command continues; one with a norm of
your own, package.module:function, is repeated, since its code may have changed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import USAGE, InputError
from model.cli import Parser, make_folder, names_in, not_negative, positive, run, say

PLACEMENTS = ("pre", "post", "both")
NONE = "none"  # as a norm, and as its placement
RATES = "3e-3,1e-2,3e-2,3e-1,3"
QUICK = {"steps": 10, "seeds": 2, "lrs": [1e-2, 10.0], "at": 1e-2}
# A run takes seconds. The matrices are as large for their width as LLaMA's 0.02 is for one of 1024, or the norms on the
# outputs would see rows that are small beside eps.
SHAPE = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.08,
}  # fmt: skip
BATCH_SIZE, BLOCK_SIZE = 8, 64  # sequences a step, and their tokens
N_EVALUATIONS = 10  # of the held-out loss, the last one after the last step


class Case(NamedTuple):
    """One training run."""

    norm: str  # as --norm names it, or NONE
    placement: str
    lr: float
    seed: int


class Measured(NamedTuple):
    """What a norm in one place has shown, by seed."""

    best: list[float]  # held-out loss after the last step, of the best rate
    losses: list[float]  # the same, of the rate that --at names
    ratios: list[float]  # the gradient's norm of the first layer over that of the last one, at that step
    rates: list[float]  # first_diverging


def rates(text: str) -> list[float]:
    """An argparse type: comma-separated positive numbers, sorted and each once."""
    return sorted({positive(float)(part) for part in text.split(",")})


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--norms", default="torch,layer_norm,none", help=f"comma-separated: none, {USAGE}")
    add("--placements", default=",".join(PLACEMENTS), help="comma-separated: where the norms stand")
    add("--lrs", type=rates, default=RATES, help="peak learning rates, comma-separated")
    add("--at", type=positive(float), default=3e-3, help="the one of them whose curves and gradients are compared")
    add("--seeds", type=positive(int), default=5, help="runs of each, from 1 on; 2 or more")
    add("--steps", type=positive(int), default=80, help="optimizer steps of a run")
    add("--weight-decay", type=not_negative(float), default=0.1, help="as train.py takes it")
    add("--data", default="python", help="the corpus, as train.py takes it")
    add("--jobs", type=positive(int), default=os.cpu_count() or 1, help="runs at a time, each on one thread")
    add("--out", type=Path, default=Path("out/stability"), help="folder for the runs, stability.json and stability.png")
    quick_help = "2 seeds, 10 steps, 2 rates: shows that it runs, and nothing about norms"
    add("--quick", action="store_true", help=quick_help)
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**dict.fromkeys(QUICK))
        given = vars(parser.parse_args())
        beside = [f"--{name}" for name in QUICK if given[name] is not None]
        if beside:
            raise InputError(f"--quick chooses {', '.join(beside)} itself; leave one of the two out")
        vars(args).update(QUICK)
    if args.seeds < 2:
        raise InputError(f"--seeds is {args.seeds}; expected 2 or more, since differences are told from their spread")
    if args.at not in args.lrs:
        raise InputError(f"--at is {args.at:g}; expected one of --lrs: {', '.join(f'{lr:g}' for lr in args.lrs)}")
    args.norms, args.placements = names_in(args.norms), names_in(args.placements)
    if not args.norms or not args.placements or not set(args.placements) <= set(PLACEMENTS):
        raise InputError(
            f"--norms is {','.join(args.norms) or 'empty'} and --placements {','.join(args.placements) or 'empty'}; "
            f"expected some of each, placements among {', '.join(PLACEMENTS)}"
        )
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

import json
import multiprocessing
import platform
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

from kernels import Backend, load_backend
from model.checkpoint.save import replace_file
from model.config import LlamaConfig
from model.json_file import read_object
from model.llama import Llama
from model.norm import Add, RMSNorm
from model.training.data import batch_starts, load_tokens, windows
from model.training.picture import new_figure, why_not_drawn
from model.training.prepare import prepare
from train import DATA, accumulate_gradients, evaluate, learning_rate, parameter_groups

CPU = torch.device("cpu")


def build(norm: str, placement: str, vocab_size: int) -> Llama:
    """The small model, its matrices drawn from the random state: the same ones for every norm and placement."""
    config = LlamaConfig.from_dict(SHAPE | {"vocab_size": vocab_size})
    backend = load_backend("torch" if norm == NONE else norm, CPU)
    model = Llama(config, backend)
    place(model, placement, backend)
    return model


def place(model: Llama, placement: str, norm: Backend) -> None:
    """Give each sub-layer its norms there. The last norm, before the head, goes only with all others."""

    def norm_or_none(wanted: bool) -> nn.Module:
        return RMSNorm(model.config.hidden_size, model.config.rms_norm_eps, norm) if wanted else Add()

    for layer in model.layers:
        for name in ("attention_norm", "ffn_norm"):
            setattr(layer, name, norm_or_none(placement in ("pre", "both")))
        for name in ("attention_output_norm", "ffn_output_norm"):
            setattr(layer, name, norm_or_none(placement in ("post", "both")))
    model.add_module("norm", norm_or_none(placement != NONE))


def gradient_norms(model: Llama) -> list[float]:
    """Norm of the gradient of each layer's matrices, from the first layer to the last one."""
    return [
        math.sqrt(
            sum(p.grad.double().square().sum().item() for p in layer.parameters() if p.dim() > 1 and p.grad is not None)
        )
        for layer in model.layers
    ]


def train_once(case: Case, steps: int, weight_decay: float, data: Path) -> dict[str, Any]:
    """Train one model. Returns its held-out losses, (step, loss), and gradient norms by step, first and last.

    A run whose loss or gradient becomes NaN or infinite ends there, and has no loss after the last step.
    """
    torch.set_num_threads(1)
    train_tokens, held_out, meta = load_tokens(data, BLOCK_SIZE)
    args = argparse.Namespace(
        lr=case.lr, min_lr=None, warmup=steps // 5, steps=steps, batch_size=BATCH_SIZE, block_size=BLOCK_SIZE,
        grad_accum=1, tp=1, grad_clip=1.0, log_norms=None, eval_interval=max(1, steps // N_EVALUATIONS),
    )  # fmt: skip
    torch.manual_seed(case.seed)
    model = build(case.norm, case.placement, meta["vocab_size"])
    groups = parameter_groups(model, weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=case.lr, betas=(0.9, 0.95), fused=True)
    float32 = torch.autocast("cpu", enabled=False)
    losses, gradients = [], {}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        starts = batch_starts(len(train_tokens), step, case.seed, BATCH_SIZE, BLOCK_SIZE)
        loss = accumulate_gradients(model, model, windows(train_tokens, starts, BLOCK_SIZE), args, float32)
        by_layer = gradient_norms(model) if step in (0, steps - 1) else []
        total = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        if not math.isfinite(loss.item() + total.item()):
            break
        if by_layer:
            gradients[str(step + 1)] = by_layer
        optimizer.step()
        optimizer.zero_grad()
        found = evaluate(step, model, model, held_out, args, float32, CPU).get("val_loss")
        if found is not None:
            losses.append((step + 1, found if math.isfinite(found) else None))
    return {"losses": losses, "gradients": gradients, "unigram_loss": meta["unigram_loss"]}


def settings_of(case: Case, args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """All that a run's result follows from, but for a norm's own code."""
    sizes = {"shape": SHAPE, "batch_size": BATCH_SIZE, "block_size": BLOCK_SIZE}
    sha256 = load_tokens(data, BLOCK_SIZE)[2]["sha256"]
    about = {"steps": args.steps, "weight_decay": args.weight_decay, "sha256": sha256, "torch": torch.__version__}
    return {**case._asdict(), **sizes, **about}


def earlier(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What a run with these settings has left there."""
    saved = read_object(path) if path.exists() else {}
    return saved if saved.get("settings") == settings else None


def run_once(case: Case, settings: dict[str, Any], data: Path, path: Path) -> dict[str, Any]:
    """train_once, saved with its settings."""
    result = {"settings": settings, **train_once(case, settings["steps"], settings["weight_decay"], data)}
    replace_file(path, json.dumps(result).encode())
    return result


def run_all(cases: list[Case], args: argparse.Namespace, data: Path) -> dict[Case, dict[str, Any]]:
    """Results of all runs, those that are there already and the others, --jobs at a time in processes of their own."""
    results, jobs = {}, []
    for case in cases:
        name = f"{case.norm.replace(':', '.')}-{case.placement}-{case.lr:g}-{case.seed}.json"
        path, settings = args.out / "runs" / name, settings_of(case, args, data)
        saved = None if ":" in case.norm else earlier(path, settings)  # the settings say nothing of a norm's own code
        if saved:
            results[case] = saved
        else:
            jobs.append((case, settings, data, path))
    say(f"runs: {len(cases)}, there already: {len(results)}, at a time: {args.jobs}, steps of each: {args.steps}")
    bar = tqdm(total=len(jobs), desc="runs", disable=None)
    with bar, ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), _ignore_interrupt) as pool:
        pending = {pool.submit(run_once, *job): job[0] for job in jobs}
        try:
            for done in as_completed(pending):
                results[pending[done]] = done.result()
                bar.update()
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C the runs in progress end, and are there the next time
    return {case: results[case] for case in cases}


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def final_loss(result: dict[str, Any], steps: int) -> float:
    """Held-out loss after the last step; infinite for a run that has ended before, or whose loss is NaN."""
    last = result["losses"][-1:]
    return last[0][1] if last and last[0][0] == steps and last[0][1] is not None else math.inf


def first_diverging(last: dict[float, float], unigram_loss: float) -> float:
    """The smallest rate above the best one that ends with a loss above `unigram_loss`; infinite if none does.

    `last` has the final loss by rate. A rate that is too small to learn anything has not diverged.
    """
    best = min(last, key=lambda lr: (last[lr], lr))
    return min((lr for lr, loss in last.items() if loss > unigram_loss and lr >= best), default=math.inf)


def measure(results: dict[Case, dict[str, Any]], norm: str, placement: str, args: argparse.Namespace) -> Measured:
    """The measures of one norm in one place, a value a seed."""
    measured = Measured([], [], [], [])
    for seed in range(1, args.seeds + 1):
        by_rate = {lr: results[Case(norm, placement, lr, seed)] for lr in args.lrs}
        last = {lr: final_loss(result, args.steps) for lr, result in by_rate.items()}
        by_layer = by_rate[args.at]["gradients"].get(str(args.steps))
        measured.best.append(min(last.values()))
        measured.losses.append(last[args.at])
        measured.ratios.append(by_layer[0] / by_layer[-1] if by_layer and by_layer[-1] else math.inf)
        measured.rates.append(first_diverging(last, by_rate[args.at]["unigram_loss"]))
    return measured


def lower(a: list[float], b: list[float]) -> int:
    """-1 if all values of `a` lie below those of `b`, 1 if all lie above, 0 if no difference is seen."""
    return (max(b) < min(a)) - (max(a) < min(b))


def pairs(variants: list[tuple[str, str]]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Pairs of (norm, placement) that differ in one of the two; a model without norms is beside every placement."""
    found = []
    for i, one in enumerate(variants):
        for other in variants[i + 1 :]:
            if one[0] == other[0] or one[1] == other[1] or NONE in (one[1], other[1]):
                found.append((one, other))
    return found


def tables(measured: dict[tuple[str, str], Measured], at: float) -> str:
    """Two Markdown tables: the measures with their spread over seeds, and what they support."""
    heads = f"loss at the best rate | loss at {at:g} | gradient at {at:g}, first layer over last | diverges at"
    lines = [f"| norm | {heads} |", "|---|---|---|---|---|"]
    for variant, values in measured.items():
        cells = map(_spread, values, ("diverged", "diverged", "diverged", "never"))
        lines.append(f"| {_name(variant)} | " + " | ".join(cells) + " |")
    lines += ["", f"| compared | {heads} |", "|---|---|---|---|---|"]
    compared = pairs(list(measured))
    for one, other in compared:
        cells = []
        for a, b in zip(measured[one], measured[other], strict=True):
            side = lower(a, b)
            cells.append("no difference seen" if side == 0 else f"lower: {_name(one if side < 0 else other)}")
        lines.append(f"| {_name(one)}; {_name(other)} | " + " | ".join(cells) + " |")
    n_seeds, n_cells = len(next(iter(measured.values())).losses), len(Measured._fields) * len(compared)
    chance = n_cells * 2 / math.comb(2 * n_seeds, n_seeds)
    alike = f"were all models alike, {chance:.2g} of them would be called a difference by chance"
    lines += ["", f"{n_cells} comparisons of {n_seeds} seeds each; {alike}"]
    return "\n".join(lines)


def _name(variant: tuple[str, str]) -> str:
    return "no norm" if variant[1] == NONE else " ".join(variant)


def _spread(values: list[float], infinite: str) -> str:
    """Median and extremes, with a word for the infinite ones."""
    shown = [infinite if value == math.inf else f"{value:.4g}" for value in (median(values), min(values), max(values))]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def draw(results: dict[Case, dict[str, Any]], args: argparse.Namespace, path: Path) -> None:
    """Held-out loss over the steps, gradient norm by layer, and last loss over the rate: median and extremes of seeds.

    A rate that diverges for a seed has no upper end there, and none for half of them or more has no median.
    """
    figure = new_figure(14, 4.8)
    by_step, by_layer, by_rate = figure.subplots(1, 3)
    variants = list(dict.fromkeys((case.norm, case.placement) for case in results))
    colors = {norm: f"C{i}" for i, norm in enumerate(dict.fromkeys(norm for norm, _ in variants))}
    styles = {"pre": "-", "post": "--", "both": ":", NONE: "-"}
    for variant in variants:
        look = {"color": colors[variant[0]], "linestyle": styles[variant[1]], "label": _name(variant)}
        seeds = range(1, args.seeds + 1)
        at = [results[Case(*variant, args.at, seed)] for seed in seeds]
        steps = [step for step, _ in max((result["losses"] for result in at), key=len)]
        curves = [[dict(result["losses"]).get(step) for result in at] for step in steps]
        _band(by_step, steps, curves, look)
        for step, alpha in ((1, 0.35), (args.steps, 1.0)):
            rows = [result["gradients"].get(str(step)) or [None] * SHAPE["num_hidden_layers"] for result in at]
            columns = [list(column) for column in zip(*rows, strict=True)]
            _band(by_layer, range(1, len(columns) + 1), columns, look | {"alpha": alpha, "label": None})
        last = [
            [_finite(final_loss(results[Case(*variant, lr, seed)], args.steps)) for seed in seeds] for lr in args.lrs
        ]
        _band(by_rate, args.lrs, last, look | {"label": None, "marker": "o", "markersize": 3})
    unigram = next(iter(results.values()))["unigram_loss"]
    for axes in (by_step, by_rate):
        axes.axhline(unigram, color="0.5", linestyle="-.", linewidth=1)
    by_rate.text(args.lrs[0], unigram, "unigram distribution", color="0.4", fontsize=8, va="bottom")
    by_step.set(xlabel="step", ylabel="held-out loss, nats a token", title=f"learning rate {args.at:g}")
    by_layer.set(xlabel="layer", ylabel="norm of its gradient", yscale="log",
                 title=f"learning rate {args.at:g}; pale: step 1, full: step {args.steps}")  # fmt: skip
    by_layer.set_xticks(range(1, SHAPE["num_hidden_layers"] + 1))
    by_rate.set(xlabel="learning rate", xscale="log", ylabel="held-out loss at the end", title=f"{args.steps} steps")
    by_rate.set_ylim(top=unigram + 1)  # higher ones have diverged, however far
    figure.legend(loc="outside lower center", ncols=len(variants), frameon=False, fontsize=9)
    for axes in (by_step, by_layer, by_rate):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _band(axes: Any, x: Any, values: list[list[float | None]], look: dict[str, Any]) -> None:
    """Draw the median over seeds, and a band from the least to the largest. A None is above all others."""
    infinite = [[math.inf if value is None else value for value in column] for column in values]
    middle = [_finite(median(column)) for column in infinite]
    axes.plot(x, [math.nan if value is None else value for value in middle], linewidth=1.4, **look)
    low, high = ([math.nan if end(column) == math.inf else end(column) for column in infinite] for end in (min, max))
    axes.fill_between(x, low, high, color=look["color"], alpha=0.12 * look.get("alpha", 1), linewidth=0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main() -> None:
    args = parse_args()
    for norm in set(args.norms) - {NONE}:
        load_backend(norm, CPU)  # refuse a wrong name before the first run
    variants = [(norm, placement) for norm in args.norms if norm != NONE for placement in args.placements]
    variants += [(NONE, NONE)] if NONE in args.norms else []
    cases = [Case(*variant, lr, seed) for variant in variants for lr in args.lrs for seed in range(1, args.seeds + 1)]
    make_folder("--out", args.out / "runs")
    data = prepare(args.data, SHAPE["vocab_size"], DATA)
    results = run_all(cases, args, data)
    measured = {variant: measure(results, *variant, args) for variant in variants}
    summary = {
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "measured": [{"norm": norm, "placement": placement, **values._asdict()}
                     for (norm, placement), values in measured.items()],
        "runs": list(results.values()),
    }  # fmt: skip
    replace_file(args.out / "stability.json", json.dumps(summary, indent=1).encode())
    print(tables(measured, args.at))
    undrawn = why_not_drawn(draw, results, args, args.out / "stability.png")
    say(undrawn or f"drawn: {args.out / 'stability.png'}")


if __name__ == "__main__":
    run(main)
