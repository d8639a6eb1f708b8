"""Checkpoint directories that the rest of the world can load: config.json, model.safetensors, tokenizer.model.

Inside the file stand Hugging Face's names for LLaMA's parameters; the model has its own for what is its own.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kernels import Backend, InputError
from model.config import LlamaConfig
from model.llama import Llama
from model.tokenizer import Tokenizer

# (in the file, in the model), applied in this order
NAMES = [
    ("model.", ""),
    (".input_layernorm.", ".attention_norm."),
    (".self_attn.", ".attention."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".mlp.", ".feed_forward."),
]


def to_file_name(name: str) -> str:
    for theirs, ours in NAMES[1:]:
        name = name.replace(ours, theirs)
    return name if name.startswith("lm_head.") else NAMES[0][0] + name


def to_model_name(name: str) -> str:
    name = name.removeprefix(NAMES[0][0])
    for theirs, ours in NAMES[1:]:
        name = name.replace(theirs, ours)
    return name


def save_checkpoint(folder: str | Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write config, weights and the tokenizer's files, or leave those that are there; a tied head is written once.

    All are written beside their places and flushed to the disk before the first of them is renamed.
    """
    folder = Path(folder)
    tensors = {to_file_name(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    config = {**model.config.to_dict(), "dtype": dtype, "torch_dtype": dtype}  # transformers 4 spells it the second way
    writers: dict[str, Callable[[Path], object]] = {
        **{name: lambda path, data=data: path.write_bytes(data) for name, data in tokenizer.files.items()},
        "config.json": lambda path: path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8"),
        "model.safetensors": lambda path: save_file(tensors, path, metadata={"format": "pt"}),
    }
    partial = {name: folder / f"{name}.partial" for name in writers}
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            path = folder / name
            write(partial[name])
            with partial[name].open("rb") as file:
                os.fsync(file.fileno())
        shutil.copymode(partial["config.json"], partial["model.safetensors"])  # safetensors makes it private
        for name in writers:
            partial[name].replace(folder / name)
    except (OSError, SafetensorError) as error:
        for leftover in partial.values():
            leftover.unlink(missing_ok=True)
        raise InputError(f"{path} can't be written ({error}); free some space or choose another folder") from error


def load_checkpoint(
    folder: str | Path,
    norm: Backend,
    device: torch.device,
    dtype: torch.dtype | None = None,
    rms_norm_eps: float | None = None,
) -> Llama:
    """The model of a checkpoint directory, in the file's own dtype if `dtype` is None, with the eps of its config.

    Raises InputError when a file is missing or damaged, or its tensors aren't exactly those of the config.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"no checkpoint directory at {folder}; name one, or make it with train.py --out {folder}")
    config = LlamaConfig.load(folder / "config.json", rms_norm_eps)
    tensors = _read_tensors(folder / "model.safetensors", device, dtype)
    with torch.device("meta"):  # shapes alone: drawing weights that are about to be replaced takes long
        model = Llama(config, norm)
    if config.tie_word_embeddings and "lm_head.weight" in tensors:  # some writers store the embedding twice
        head = tensors.pop("lm_head.weight")
        if not torch.equal(head, tensors.get("embed_tokens.weight", head)):
            warnings.warn(f"{folder}: lm_head.weight differs from the embedding it is tied to; ignored", stacklevel=2)
    _check_tensors(model, tensors, folder)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _read_tensors(path: Path, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {to_model_name(name): file.get_tensor(name).to(dtype) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise InputError(f"no weights at {path}; expected a model.safetensors beside config.json") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is incomplete or no safetensors file ({error}); fetch or write it again") from error


def _check_tensors(model: Llama, tensors: dict[str, Tensor], folder: Path) -> None:
    expected = model.state_dict()
    if missing := sorted(expected.keys() - tensors.keys()):
        raise InputError(f"{folder}: {len(missing)} tensors are missing, the first is {to_file_name(missing[0])}")
    if unexpected := sorted(tensors.keys() - expected.keys()):
        raise InputError(f"{folder}: {len(unexpected)} tensors too many, the first is {to_file_name(unexpected[0])}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise InputError(
                f"{folder}: {to_file_name(name)} has shape {tuple(tensors[name].shape)}; "
                f"config.json asks for {tuple(tensor.shape)}"
            )
