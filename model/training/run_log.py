"""The record of a run as it happens: metrics.jsonl, the progress bar, a line an evaluation, and the curves."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from kernels import InputError
from model.checkpoint.save import replace_file
from model.cli import rank, say, world_size
from model.training.curves import plot_losses, plot_norms
from model.training.distributed import agreed, wait_for_all
from model.training.picture import why_not_drawn
from model.training.run_folder import METRICS, RUN, STATE

PACKAGES = ("triton", "numpy", "sentencepiece", "safetensors")  # run.json names their versions beside torch's


def begin_run(args: argparse.Namespace, done: int, metrics: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write run.json, which says how to repeat the run, and the metrics of earlier steps. Call it in all processes.

    A run that begins, with no step done, clears the folder of what an earlier run left to resume from. Raises
    InputError where --out is not writable, or not one folder for all processes.
    """
    wait_for_all()
    if rank() == 0:
        _write_run(args, done, metrics, about)
    wait_for_all()
    path = args.out / RUN
    if not agreed(path.read_text() if path.exists() else "nothing"):
        raise InputError(f"--out {args.out} is not one folder for all processes; name one on a disk that all share")


def _write_run(args: argparse.Namespace, done: int, metrics: list[dict[str, Any]], about: dict[str, Any]) -> None:
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # triton isn't everywhere
            packages[name] = version(name)
    run = {
        "arguments": {name: value for name, value in vars(args).items() if name not in ("out", "resume")},
        "begins_after_step": done,
        **about,
        "processes": world_size(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **packages},
        "machine": platform.platform(),
    }
    if not done:
        shutil.rmtree(args.out / STATE, ignore_errors=True)
        for picture in ("loss.png", "norms.png"):
            (args.out / picture).unlink(missing_ok=True)
    replace_file(args.out / RUN, (json.dumps(run, indent=2) + "\n").encode())
    replace_file(args.out / METRICS, "".join(json.dumps(line) + "\n" for line in metrics).encode())


class RunLog:
    """Write and show each step's metrics. In all processes but the first, do neither.

    `metrics` are those of the `done` steps before, as far as they are known; each recorded line is added to them.
    `norm_names` and `eps` label norms.png. `peak_speed` is the tokens a second at the device's peak, or None where
    that is not known.
    """

    def __init__(
        self, out: Path, metrics: list[dict[str, Any]], done: int, n_steps: int, unigram_loss: float,
        norm_names: list[str], eps: float, peak_speed: float | None,
    ) -> None:  # fmt: skip
        self.metrics = metrics
        self.val_loss = next((line["val_loss"] for line in reversed(metrics) if "val_loss" in line), None)
        self._out, self._unigram_loss, self._norm_names, self._eps = out, unigram_loss, norm_names, eps
        self._peak_speed = peak_speed
        self._file = open(out / METRICS if rank() == 0 else os.devnull, "a")  # noqa: SIM115
        # A terminal of 80 columns may leave the bar no width, but has room for the rest.
        shown = "{n_fmt}/{total_fmt} {bar} {desc}{remaining} left"
        off = None if rank() == 0 else True  # None: where stderr is not a terminal
        self._bar = tqdm(total=n_steps, initial=done, bar_format=shown, disable=off)
        self._undrawn = ""  # the last reason why a picture is missing

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._file.close()

    def record(self, line: dict[str, Any]) -> None:
        """Add the metrics of a step; where they hold a val_loss, say them and draw the curves."""
        if self._peak_speed:
            line["mfu"] = line["tokens_per_s"] / self._peak_speed
        self.metrics.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.val_loss = line.get("val_loss", self.val_loss)
        speed = f"{line['tokens_per_s']:,.0f} tokens/s"
        if "val_loss" in line:
            mfu = f", MFU {line['mfu']:.1%}" if "mfu" in line else ""
            say(f"step {line['step'] + 1}: {self._losses(line, 'validation loss')}, {speed}{mfu}")
            if rank() == 0:
                self._draw()
        self._bar.set_description_str(f"{self._losses(line, 'val')}, {speed}, ", refresh=False)
        self._bar.update()

    def _losses(self, line: dict[str, Any], name: str) -> str:
        loss = f"loss {line['loss']:.3f}"
        return loss if self.val_loss is None else f"{loss}, {name} {self.val_loss:.3f}"

    def _draw(self) -> None:
        """Draw the curves. Say why one cannot be drawn, unless that was the reason before; the run goes on."""
        losses = why_not_drawn(plot_losses, self.metrics, self._unigram_loss, self._out / "loss.png")
        norms = why_not_drawn(plot_norms, self.metrics, self._norm_names, self._eps, self._out / "norms.png")
        reason = losses or norms
        if reason and reason != self._undrawn:
            say(reason)
        self._undrawn = reason

    def flush_to_disk(self) -> None:
        """Flush metrics.jsonl to the disk, before a state is saved: what --resume continues has its whole curve."""
        if rank() == 0:
            os.fsync(self._file.fileno())
