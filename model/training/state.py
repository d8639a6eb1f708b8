"""What a run needs to go on to the bit: its weights and its optimiser's moments, in a folder named after the step.

All else follows from the seed and the step: the learning rate, the windows of the data, the random numbers. The folders
are PyTorch's distributed checkpoints, so a run may go on with another number of processes.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from kernels import InputError
from model.cli import rank
from model.llama import Llama
from model.training.distributed import wait_for_all
from model.training.run_folder import newest_step, step_folder


def save_state(folder: Path, step: int, model: Llama, optimizer: Optimizer) -> None:
    """Write the state after `step` steps, then remove the older ones. To be called in all processes.

    It is written beside its place, flushed to the disk and renamed, so a run that dies meanwhile has the one before.
    Raises InputError where the disk is full or can't be written to; what was there is then left as it was.
    """
    final = step_folder(folder, step)
    partial = final.with_name(f"{final.name}.partial")
    try:
        with _quiet():
            dcp.save(_state(model, optimizer), checkpoint_id=partial)
        if rank() == 0:
            partial.rename(final)
            keep_newest(folder)
    except (OSError, dcp.CheckpointException) as error:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise InputError(
            f"{final} can't be written ({_reason(error)}); what was saved before stands; free some space, then --resume"
        ) from error
    wait_for_all()


def keep_newest(folder: Path) -> None:
    """Remove what is older than the newest whole state, and what a save that died has left."""
    newest = step_folder(folder, newest_step(folder))
    for path in folder.glob("step-*"):
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)


def load_state(folder: Path, step: int, model: Llama, optimizer: Optimizer) -> None:
    """Read the state after `step` steps into the model and the optimiser, which keeps its rates and decay.

    Raises InputError where it is damaged.
    """
    path = step_folder(folder, step)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = _state(model, optimizer)
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=path)
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, dcp.CheckpointException) as error:
        raise InputError(f"{path} can't be read ({_reason(error)}); remove it, and begin without --resume") from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def _state(model: Llama, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)  # both by the weights' names
    return {"model": weights, "optimizer": moments}


def _reason(error: BaseException) -> str:
    """In one line; a CheckpointException has an error of each process that failed, and may hide a Ctrl-C."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if not isinstance(error, Exception):
        raise error
    return " ".join(str(error).split())[:200]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's warnings that there is one process, and about its own use of its tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
