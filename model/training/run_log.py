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
from model.cli import make_folder, rank, say, world_size
from model.training.curves import plot_losses, plot_norms
from model.training.distributed import agreed, wait_for_all
from model.training.run_folder import METRICS, RUN, STATE

PACKAGES = ("triton", "numpy", "sentencepiece", "safetensors")  # run.json names their versions beside torch's


def begin_run(args: argparse.Namespace, metrics: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write run.json, which says how to repeat the run, and the metrics of earlier steps. Call it in all processes.

    Where there are none, clear the folder of what an earlier run left to resume from. Raises InputError where --out
    is not writable, or not one folder for all processes.
    """
    wait_for_all()
    if rank() == 0:
        _write_run(args, metrics, about)
    wait_for_all()
    path = args.out / RUN
    if not agreed(path.read_text() if path.exists() else "nothing"):
        raise InputError(f"--out {args.out} is not one folder for all processes; name one on a disk that all share")


def _write_run(args: argparse.Namespace, metrics: list[dict[str, Any]], about: dict[str, Any]) -> None:
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # triton isn't everywhere
            packages[name] = version(name)
    run = {
        "arguments": {name: value for name, value in vars(args).items() if name not in ("out", "resume")},
        "begins_after_step": len(metrics),
        **about,
        "processes": world_size(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **packages},
        "machine": platform.platform(),
    }
    make_folder("--out", args.out)
    if not metrics:
        shutil.rmtree(args.out / STATE, ignore_errors=True)
        for picture in ("loss.png", "norms.png"):
            (args.out / picture).unlink(missing_ok=True)
    replace_file(args.out / RUN, (json.dumps(run, indent=2) + "\n").encode())
    replace_file(args.out / METRICS, "".join(json.dumps(line) + "\n" for line in metrics).encode())


class RunLog:
    """Write and show each step's metrics. In all processes but the first, do neither.

    `metrics` are those of earlier steps, to which each recorded line is added. `norm_names` and `eps` label norms.png.
    `peak_speed` is the tokens a second at the device's peak, or None where that is not known.
    """

    def __init__(
        self, out: Path, metrics: list[dict[str, Any]], n_steps: int, unigram_loss: float, norm_names: list[str],
        eps: float, peak_speed: float | None,
    ) -> None:  # fmt: skip
        self.metrics = metrics
        self.val_loss = next((line["val_loss"] for line in reversed(metrics) if "val_loss" in line), None)
        self._out, self._unigram_loss, self._norm_names, self._eps = out, unigram_loss, norm_names, eps
        self._peak_speed = peak_speed
        self._file = open(out / METRICS if rank() == 0 else os.devnull, "a")  # noqa: SIM115
        self._bar = tqdm(total=n_steps, initial=len(metrics), unit="step", disable=None if rank() == 0 else True)

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
        text = self._describe(line)
        if "val_loss" in line:
            say(f"step {line['step'] + 1}: {text}")
            if rank() == 0:
                plot_losses(self.metrics, self._unigram_loss, self._out / "loss.png")
                plot_norms(self.metrics, self._norm_names, self._eps, self._out / "norms.png")
        self._bar.set_postfix_str(text)
        self._bar.update()

    def _describe(self, line: dict[str, Any]) -> str:
        shown = [f"loss {line['loss']:.3f}"]
        if self.val_loss is not None:
            shown.append(f"validation loss {self.val_loss:.3f}")
        shown.append(f"{line['tokens_per_s']:,.0f} tokens/s")
        if "mfu" in line:
            shown.append(f"MFU {line['mfu']:.1%}")
        return ", ".join(shown)

    def flush_to_disk(self) -> None:
        """Flush metrics.jsonl, of which --resume needs every line up to the state."""
        if rank() == 0:
            os.fsync(self._file.fileno())
