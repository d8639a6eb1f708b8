"""The folder of a training run: what an earlier run left there, and whether another may begin or resume."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import InputError
from model.cli import say
from model.json_file import read_object

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from model.tokenizer.base import Tokenizer

RUN, METRICS, STATE = "run.json", "metrics.jsonl", "state"
STEP = re.compile(r"step-(\d+)")


def saved_arguments(folder: Path) -> dict[str, Any]:
    """Arguments that the run in the folder was last started with. Raises InputError where there is no run."""
    if not (folder / RUN).exists():
        raise InputError(f"--resume: {folder} holds no run to continue; leave --resume out to begin one")
    return _object(folder, "arguments")


def newest_step(state: Path) -> int:
    """Step of the newest whole state; 0 if there is none."""
    return max((int(found[1]) for path in state.glob("step-*") if (found := STEP.fullmatch(path.name))), default=0)


def step_folder(state: Path, step: int) -> Path:
    """Folder of the state after `step` steps, once it is whole."""
    return state / f"step-{step:08}"


def check_folder(folder: Path, config: LlamaConfig, tokenizer: Tokenizer, data: dict[str, Any], resume: bool) -> None:
    """Raises InputError where this run would destroy another one or another model, or resume with other data."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file; expected a folder, or a name that is free")
    if resume and _object(folder, "data").get("sha256") != data["sha256"]:
        raise InputError(
            "--data or its vocabulary has changed since the run began; bring it back, or begin again without --resume"
        )
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    if weights or (folder / "config.json").exists():
        try:
            saved = type(config).load(folder / "config.json")
            # Runs of earlier versions did not name a norm that is not RMSNorm.
            same = saved == config or (resume and saved == replace(config, norm=None))
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
            f"--out {folder} holds a run that stopped after step {done}; use --resume, name another folder, or "
            f"remove {folder / STATE} to begin again"
        )
    if weights:
        say(f"{folder} holds an earlier run of this model; its checkpoint is replaced at the first save")


def earlier_metrics(path: Path, done: int) -> list[dict[str, Any]]:
    """Metrics of the first `done` steps; a killed run may have left more lines, and half a line.

    Raises InputError where there are too few.
    """
    lines = path.read_text().splitlines()[:done] if done and path.exists() else []
    try:
        metrics = [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); {_begin_again(path.parent)}") from error
    if len(metrics) < done:
        raise InputError(f"{path} has {len(metrics)} lines; expected {done}, one a step; {_begin_again(path.parent)}")
    return metrics


def _finished(folder: Path, done: int) -> bool:
    """True if the run was for `done` steps at most; False where run.json is lost or damaged."""
    try:
        return _object(folder, "arguments").get("steps") in range(done + 1)
    except InputError:
        return False


def _object(folder: Path, key: str) -> dict[str, Any]:
    found = read_object(folder / RUN).get(key)
    if not isinstance(found, dict):
        raise InputError(f"{folder / RUN} has no {key}; expected those of a run; {_begin_again(folder)}")
    return found


def _begin_again(folder: Path) -> str:
    return f"remove {folder / STATE} and begin again, without --resume"
