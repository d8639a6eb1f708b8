"""State from which a run resumes bit for bit: weights and the optimizer's moments, in a folder named after the step.

Everything else follows from seed and step: learning rate, windows of the data, random numbers. The folders are
PyTorch's distributed checkpoints, so a run may resume with another number of processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from kernels import InputError
from model.cli import rank
from model.json_file import read_object
from model.llama import Llama
from model.training.data_folder import HASHED, check_file, sha256_of
from model.training.distributed import wait_for_all
from model.training.run_folder import newest_step, step_folder

CHECKSUMS = "checksums.json"  # size in bytes, and SHA-256 unless the file is large, of each file of a state


def save_state(folder: Path, step: int, model: Llama, optimizer: Optimizer) -> None:
    """Save the state after `step` steps atomically, then remove older ones. Call it in all processes.

    Raises InputError where the disk is full or cannot be written to; the state before it then stands.
    """
    final = step_folder(folder, step)
    partial = final.with_name(f"{final.name}.partial")
    try:
        with _quiet():
            save(_state(model, optimizer), checkpoint_id=partial)
        if rank() == 0:
            _write_checksums(partial)
            partial.rename(final)
            keep_newest(folder)
    except (OSError, CheckpointException) as error:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise InputError(
            f"{final} cannot be written ({_reason(error)}); the state before it stands; free some space, then --resume"
        ) from error
    wait_for_all()


def keep_newest(folder: Path) -> None:
    """Remove states older than the newest whole one, and what a crashed save has left."""
    newest = step_folder(folder, newest_step(folder))
    for path in folder.glob("step-*"):
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)


def load_state(folder: Path, step: int, model: Llama, optimizer: Optimizer) -> None:
    """Read the state after `step` steps into the model and the optimizer, which keeps its rates and decay.

    Raises InputError where the state is damaged.
    """
    path = step_folder(folder, step)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = _state(model, optimizer)
    try:
        with _quiet():
            _check_files(path)
            load(state, checkpoint_id=path)
    except (OSError, ValueError, TypeError, EOFError, pickle.UnpicklingError, CheckpointException) as error:
        raise InputError(
            f"{path} cannot be read ({_reason(error)}); bring it back from a copy, or begin anew in another --out"
        ) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def _write_checksums(folder: Path) -> None:
    """Write CHECKSUMS, once all processes have written theirs."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != CHECKSUMS:  # which a killed save may have left
            size = path.stat().st_size
            found[path.name] = size, sha256_of(path) if size <= HASHED else None
    with (folder / CHECKSUMS).open("w") as file:
        json.dump(found, file)
        file.flush()
        os.fsync(file.fileno())


def _check_files(folder: Path) -> None:
    """Raise InputError, naming the file, where one is not as it was written. Older states lack CHECKSUMS."""
    if (folder / CHECKSUMS).exists():
        for name, (size, sha256) in read_object(folder / CHECKSUMS).items():
            check_file(folder / name, sha256, size)


def _state(model: Llama, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)  # both by the weights' names
    return {"model": weights, "optimizer": moments}


def _reason(error: BaseException) -> str:
    """One line for an error; a CheckpointException holds one of each process that failed, and may hide a Ctrl-C."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if not isinstance(error, Exception):
        raise error
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's warnings about a single process and its own tensors, and its log of errors that we report."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logging.disable(disabled)
