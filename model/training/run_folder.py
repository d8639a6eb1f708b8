"""The folder of a training run: what an earlier run left there, and whether another may begin or resume."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import InputError
from model.cli import make_folder, rank, say
from model.json_file import read_object
from model.training.lock_file import locked_by

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from model.tokenizer.base import Tokenizer

RUN, METRICS, STATE, LOCK = "run.json", "metrics.jsonl", "state", ".lock"
STEP = re.compile(r"step-(\d+)")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it during the block; remove it if the block leaves it new and empty.

    The first process alone holds the lock. Raises InputError where another run holds it, or the folder is not writable.
    """
    if rank():
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file; expected a folder, or a name that is free")

    def refuse() -> None:
        raise InputError(f"another run is writing {folder}; wait until it ends, or name another --out")

    new = not folder.exists()
    make_folder("--out", folder)
    try:
        with locked_by(folder / LOCK, refuse):
            yield
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def saved_arguments(folder: Path) -> dict[str, Any]:
    """Arguments that the run in the folder was last started with; none where run.json is lost, but not the state.

    Raises InputError where there is no run.
    """
    arguments = _saved(folder, "arguments")
    if not arguments and not newest_step(folder / STATE):
        raise InputError(f"--resume: {folder} holds no run to continue; leave --resume out to begin one")
    return arguments


def saved_data(folder: Path) -> str:
    """SHA-256 of the data of the run in the folder; '' where run.json is lost or damaged, which is said."""
    known = _saved(folder, "data").get("sha256")
    if not (isinstance(known, str) and _saved(folder, "arguments")):
        say(
            f"{folder / RUN} is lost or damaged: its arguments are replaced by flags and defaults, its data not checked"
        )
    return known if isinstance(known, str) else ""


def newest_step(state: Path) -> int:
    """Step of the newest whole state; 0 if there is none. Raises InputError where that cannot be told."""
    try:
        names = os.listdir(state)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise InputError(f"{state} cannot be read ({error.strerror}); make it a readable folder") from error
    return max((int(found[1]) for name in names if (found := STEP.fullmatch(name))), default=0)


def step_folder(state: Path, step: int) -> Path:
    """Folder of the state after `step` steps, once it is whole."""
    return state / f"step-{step:08}"


def check_folder(folder: Path, config: LlamaConfig, tokenizer: Tokenizer, data: dict[str, Any], resume: bool) -> None:
    """Raises InputError where this run would destroy another one or another model, or resume with other data."""
    state, done = folder / STATE, newest_step(folder / STATE)
    known = _saved(folder, "data").get("sha256")
    if resume and known not in (None, data["sha256"]):
        raise InputError(
            "--data or its vocabulary has changed since the run began; bring it back, or begin again without --resume"
        )
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    if weights or (folder / "config.json").exists():
        try:
            saved = type(config).load(folder / "config.json")
            # Runs of earlier versions did not name a norm that is not RMSNorm.
            same = saved == config or (resume and saved == replace(config, norm=None))
            for name, content in tokenizer.files.items():
                lost = name != "tokenizer.model" and not (folder / name).exists()  # earlier versions wrote no other
                same = same and (lost or (folder / name).read_bytes() == content)
        except (OSError, InputError):
            same = False
        if not same:
            remedy = "give the run's own flags again" if resume else "name another folder"
            raise InputError(f"--out {folder} holds another model; its config or tokenizer is not this run's; {remedy}")
    if resume and weights and not done:
        found = ", ".join(sorted(path.name for path in state.glob("*"))) or "nothing"
        raise InputError(
            f"--resume: {folder} holds trained weights, but no state of the run: {state} holds {found}; "
            "bring that folder back, or begin anew in another --out"
        )
    if resume:
        return
    if done and not _finished(folder, done):
        raise InputError(
            f"--out {folder} holds a run that stopped after step {done}; use --resume, or name another --out"
        )
    if weights:
        say(f"{folder} holds an earlier run of this model; its checkpoint is replaced at the first save")


def earlier_metrics(path: Path, done: int) -> list[dict[str, Any]]:
    """Metrics of the first `done` steps; says how many are missing or damaged, and so a gap in the curves.

    A killed run may have left more lines, and half a line.
    """
    found = {}
    with contextlib.suppress(OSError):
        for text in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if _is_metrics(line) and line["step"] < done:
                    found[line["step"]] = line
    if len(found) < done:
        say(f"{path} has no metrics of {done - len(found)} of {done} steps; the curves have a gap there")
    return [found[step] for step in sorted(found)]


def _is_metrics(line: Any) -> bool:
    """True if a line of metrics.jsonl has what the curve of the losses needs."""
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] < 0:
        return False
    return isinstance(line.get("loss"), float) and isinstance(line.get("val_loss", 0.0), float)


def _finished(folder: Path, done: int) -> bool:
    """True if the run was for `done` steps at most; False where run.json is lost or damaged."""
    return _saved(folder, "arguments").get("steps") in range(done + 1)


def _saved(folder: Path, key: str) -> dict[str, Any]:
    """The object of that name in run.json; empty where it is lost or damaged."""
    try:
        found = read_object(folder / RUN).get(key)
    except InputError:
        return {}
    return found if isinstance(found, dict) else {}
