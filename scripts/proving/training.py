"""Does it train? Short parity runs of scripts/loss_parity.py, in float32 and with the norms in half precision."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kernels import InputError
from model.training.picture import why_not_drawn
from scripts import loss_parity
from scripts.proving.subject import Subject, load

ROOT = Path(__file__).resolve().parent.parent.parent
# Small, but rounding shows in it, and the impostor is found at once.
CONFIG = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-3,
}  # fmt: skip
FAMILY = {"llama": "llama", "torch": "olmo2", "gemma": "gemma"}  # whose norms have the form
RUN = {"steps": 20, "batch_size": 8, "block_size": 32, "seed": 1337, "dtype": "float32", "emulate": "none"}
# Of the norms' inputs. In bfloat16 so few roundings flip in a run as short that the controls give no scale.
DTYPES = ("float32", "float16")
CONTROLS = (*loss_parity.CONTROLS, "impostor")


def form_is_bound(subject: Subject) -> bool:
    """True if train.py may name the norm as it is: it takes the form of the model. In a process apart."""
    return subject.form_name == "llama" or isinstance(load(subject).rms_norm, partial)


def runs_of(subject: Subject, bound: bool) -> dict[tuple[str, str], str]:
    """(dtype, name) -> what train.py calls the norm of that run."""
    name = subject.name if bound else f"scripts.judging.claims:{subject.name}"
    norms = {"reference": "reference", subject.name: name}
    norms |= {control: f"scripts.loss_parity:{control}" for control in CONTROLS}
    return {
        (dtype, run): norm + ("" if dtype == "float32" else f"@{dtype}")
        for dtype in DTYPES
        for run, norm in norms.items()
    }


def parity(subject: Subject, bound: bool, out: Path, tick: Callable[[str], None]) -> dict[str, Any]:
    """Train with the norm, the reference, the controls and the impostor, two at a time, and judge the losses.

    Its figures by dtype, and in words what failed. Runs, config and pictures go to `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = out / "config.json"
    config.write_text(json.dumps({"model_type": FAMILY[subject.form_name], **CONFIG}))
    runs = runs_of(subject, bound)

    def train(run: tuple[str, str]) -> list[float] | str:
        dtype, name = run
        args = Namespace(**RUN, device=subject.device, data=str(ROOT / "model/llama.py"), config=str(config))
        args.emulate = subject.gpu if name == subject.name else "none"
        folder = out / dtype / name.replace(":", ".")
        try:
            return loss_parity.train_with(runs[run], folder, args, SimpleNamespace(n=0, refresh=lambda: None))
        except InputError as error:
            return str(error)
        finally:
            tick(f"{name} in {dtype}")

    first, *others = runs  # the first one prepares the data
    threads = ThreadPoolExecutor(2)
    try:
        found = {first: train(first), **dict(zip(others, threads.map(train, others), strict=True))}
    finally:
        threads.shutdown(cancel_futures=True)  # after Ctrl-C
    result: dict[str, Any] = {"failures": [], "notes": [], "dtypes": {}}
    for dtype in DTYPES:
        losses = {name: losses for (of, name), losses in found.items() if of == dtype}
        _judge(subject, dtype, losses, out, result)
    return result


def _judge(subject: Subject, dtype: str, losses: dict[str, Any], out: Path, result: dict[str, Any]) -> None:
    """Add what one dtype shows to the result."""
    if failed := {name: text for name, text in losses.items() if isinstance(text, str)}:
        if set(failed) == {subject.name}:
            result["failures"].append(f"it does not train in {dtype}: {failed[subject.name]}")
        else:
            result["notes"].append(f"no parity run in {dtype}: {next(iter(failed.values()))}")
        return
    verdicts = loss_parity.judge(losses)
    undrawn = why_not_drawn(loss_parity.plot, losses, out / f"{dtype}.png")
    picture = None if undrawn else f"{out.name}/{dtype}.png"
    result["dtypes"][dtype] = {"verdicts": verdicts, "picture": picture, "losses": losses}
    refused = [name for name in loss_parity.CONTROLS if not verdicts[name]["passes"]]
    if verdicts["impostor"]["passes"] or refused:
        why = "the impostor passes" if not refused else f"controls refuse each other: {', '.join(refused)}"
        result["notes"].append(f"nothing can be told in {dtype}: {why}; scripts/loss_parity.py runs longer")
    elif not verdicts[subject.name]["passes"]:
        step = verdicts[subject.name]["first_step_over"]
        words = f"in {dtype} its loss differs from the reference's by more than rounding explains, from step {step} on"
        result["failures"].append(words)
