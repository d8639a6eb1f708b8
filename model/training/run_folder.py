"""The folder of a training run: arguments and metrics beside the checkpoint, and what a further run may do there."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import InputError
from model.cli import say, world_size
from model.json_file import read_object

if TYPE_CHECKING:
    import argparse

    from model.config import LlamaConfig
    from model.tokenizer.base import Tokenizer

RUN, METRICS, STATE = "run.json", "metrics.jsonl", "state"
PACKAGES = ("triton", "numpy", "sentencepiece", "safetensors")  # whose versions run.json names, beside torch's
STEP = re.compile(r"step-(\d+)")


def saved_arguments(folder: Path) -> dict[str, Any]:
    """Those that the run in the folder was last started with. Raises InputError where there is no run."""
    if not (folder / RUN).exists():
        raise InputError(f"--resume: {folder} holds no run to go on with; leave --resume out to begin one")
    return _object(folder, "arguments")


def newest_step(state: Path) -> int:
    """Steps that the newest whole state has behind it; 0 if there is none."""
    return max((int(found[1]) for path in state.glob("step-*") if (found := STEP.fullmatch(path.name))), default=0)


def step_folder(state: Path, step: int) -> Path:
    """Where the state after `step` steps lies once it is whole."""
    return state / f"step-{step:08}"


def check_folder(folder: Path, config: LlamaConfig, tokenizer: Tokenizer, data: dict[str, Any], resume: bool) -> None:
    """Raises InputError where this run would destroy another one or another model, or go on with other data."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file; expected a folder, or a name that is free")
    if resume and _object(folder, "data").get("sha256") != data["sha256"]:
        raise InputError("--data has changed since the run began; bring it back, or begin anew without --resume")
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    if weights or (folder / "config.json").exists():
        try:
            same = type(config).load(folder / "config.json") == config
            same = same and all((folder / name).read_bytes() == content for name, content in tokenizer.files.items())
        except (OSError, InputError):
            same = False
        if not same:
            raise InputError(
                f"--out {folder} holds another model; its config or tokenizer is not this run's; name another folder"
            )
    if resume:
        return
    done = newest_step(folder / STATE)
    if done and not _finished(folder, done):
        raise InputError(
            f"--out {folder} holds a run that stopped after step {done}; go on with --resume, name another folder, or "
            f"remove {folder / STATE} to begin anew"
        )
    if weights:
        say(f"{folder} holds an earlier run of this model; its checkpoint is replaced at the first save")


def earlier_metrics(path: Path, done: int) -> list[dict[str, Any]]:
    """The lines of the steps that the state has behind it; a run that was killed may have left more, and half a line.

    Raises InputError where there are too few.
    """
    lines = path.read_text().splitlines()[:done] if done and path.exists() else []
    try:
        metrics = [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); {_anew(path.parent)}") from error
    if len(metrics) < done:
        raise InputError(f"{path} has {len(metrics)} lines; expected {done}, one a step; {_anew(path.parent)}")
    return metrics


def begin_run(folder: Path, args: argparse.Namespace, metrics: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write run.json, which says what it takes to repeat the run, and the metrics of the steps that lie behind it.

    Where none do, the folder is cleared of what an earlier run left to resume from. Raises InputError.
    """
    import torch

    from model.checkpoint.save import replace_file

    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # triton isn't everywhere
            packages[name] = version(name)
    run = {
        "arguments": {name: value for name, value in vars(args).items() if name not in ("out", "resume", "plan")},
        "begins_after_step": len(metrics),
        **about,
        "processes": world_size(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **packages},
        "machine": platform.platform(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not metrics:
            shutil.rmtree(folder / STATE, ignore_errors=True)
            for picture in ("loss.png", "norms.png"):
                (folder / picture).unlink(missing_ok=True)
        replace_file(folder / RUN, (json.dumps(run, indent=2) + "\n").encode())
        replace_file(folder / METRICS, "".join(json.dumps(line) + "\n" for line in metrics).encode())
    except OSError as error:
        raise InputError(f"--out {folder} can't be made ({error.strerror}); name a folder that can") from error


def _finished(folder: Path, done: int) -> bool:
    """Whether `done` steps are all that its run was for; not, where run.json is lost or damaged."""
    try:
        return _object(folder, "arguments").get("steps") in range(done + 1)
    except InputError:
        return False


def _object(folder: Path, key: str) -> dict[str, Any]:
    found = read_object(folder / RUN).get(key)
    if not isinstance(found, dict):
        raise InputError(f"{folder / RUN} has no {key}; expected those of a run; {_anew(folder)}")
    return found


def _anew(folder: Path) -> str:
    return f"remove {folder / STATE} and begin anew, without --resume"
