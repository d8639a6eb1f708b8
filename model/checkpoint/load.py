"""Checkpoint directories that the rest of the world can load: config.json and safetensors, and a tokenizer.

    python -m model.checkpoint DIR      what a directory holds, without loading the weights

Inside the files stand Hugging Face's names for LLaMA's parameters; the model has its own for what is its own.
Read are also Meta's and Mistral's (model/names.py). Files are mapped, so that a weight takes no memory before it
is used, and no second time then. Pickles are never opened: they can run code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels import Backend, InputError, load_backend
from model.checkpoint import names
from model.checkpoint.names import to_file_name, to_model_name
from model.cli import say
from model.config import LlamaConfig, as_list, is_id
from model.json_file import read_object
from model.llama import Llama

ROTARY_BUFFER = re.compile(r"(^|\.)(rotary_emb|rope)\.(inv_freq|freqs|cos_cached|sin_cached)$")  # computed from config
DTYPES = {"F64", "F32", "F16", "BF16"}  # what can be computed with
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, not yet read."""

    name: str  # in the file
    path: Path
    file: Any  # safetensors' handle
    dtype: str  # safetensors' name for it: "BF16"
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        try:
            return self.file.get_tensor(self.name)
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: bytes that start between two numbers
            raise InputError(f"{self.path}: {self.name} can't be read ({error}); fetch or write it again") from error


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
    with ExitStack() as opened:
        config, stored = open_checkpoint(folder, opened, device, rms_norm_eps)
        with torch.device("meta"):  # shapes alone: drawing weights that are about to be replaced takes long
            model = Llama(config, norm)
        if dtype is None:
            _check_dtypes(folder, stored)
        tensors = {}
        for name, tensor in stored.items():
            weight = tensor.read().to(dtype)
            if tensor.name.endswith(("wq.weight", "wq.bias")):
                weight = names.halves_from_pairs(weight, config.num_attention_heads)
            elif tensor.name.endswith(("wk.weight", "wk.bias")):
                weight = names.halves_from_pairs(weight, config.num_key_value_heads)
            tensors[name] = weight
    if config.tie_word_embeddings and "lm_head.weight" in tensors:  # some writers store the embedding twice
        head = tensors.pop("lm_head.weight")
        if not torch.equal(head, tensors["embed_tokens.weight"]):
            say(f"{folder}: lm_head.weight differs from the embedding that it is tied to, and is ignored")
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def load_end_ids(folder: str | Path, config: LlamaConfig) -> set[int]:
    """The ids that end a text, from config.json and generation_config.json, which may name others."""
    path = Path(folder) / "generation_config.json"
    ids = as_list(read_object(path).get("eos_token_id")) if os.path.exists(path) else []
    if unfit := [id for id in ids if id is not None and not is_id(id)]:
        raise InputError(f"{path}: eos_token_id holds {unfit[0]!r}; expected a token id or a list of them")
    return config.end_ids() | set(ids) - {None}


def open_checkpoint(
    folder: Path, opened: ExitStack, device: torch.device, rms_norm_eps: float | None
) -> tuple[LlamaConfig, dict[str, Stored]]:
    """The config, and the tensors by the model's names, whose names and shapes are those of the config."""
    if not os.path.isdir(folder):  # unlike Path's, it takes any name
        raise InputError(f"no checkpoint directory at {folder}; name one, or make it with train.py --out {folder}")
    stored: dict[str, Stored] = {}
    for path in _weight_files(folder):
        for tensor in _tensors(path, opened, device):
            name = to_model_name(tensor.name)
            if ROTARY_BUFFER.search(name):
                continue
            if name in stored:
                raise InputError(
                    f"{folder}: {tensor.name} in {path.name} is {stored[name].name} in {stored[name].path.name} again; "
                    "expected each tensor once"
                )
            stored[name] = tensor
    config = _read_config(folder, stored, rms_norm_eps)
    _check_tensors(config, stored, folder)
    return config, stored


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a directory: one, those that an index lists, or consolidated ones."""
    if os.path.exists(folder / "model.safetensors"):
        return [folder / "model.safetensors"]
    for index in (folder / INDEX, folder / "consolidated.safetensors.index.json"):
        if os.path.exists(index):
            return _indexed_files(index)
    if files := sorted(folder.glob("consolidated*.safetensors")):
        return files
    names = sorted(path.name for path in folder.iterdir())
    if found := [name for name in names if name.endswith(".gguf")]:
        raise InputError(
            f"{folder} has no safetensors, but {found[0]}; convert it: transformers' AutoModelForCausalLM"
            f'.from_pretrained(DIR, gguf_file="{found[0]}") and save_pretrained(NEW_DIR)'
        )
    if found := [name for name in names if name.endswith((".bin", ".pth", ".pt", ".ckpt"))]:
        raise InputError(
            f"{folder} has no safetensors, but {found[0]}, which isn't opened, since a pickle can run code; where you "
            "trust it, torch.load it with weights_only=True and write its tensors with safetensors.torch.save_file"
        )
    raise InputError(f"no weights at {folder / 'model.safetensors'}; expected one, or {INDEX} and its shards")


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InputError(f"{index} has no weight_map from tensors to files; fetch or write it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            raise InputError(f"{index} names the file {name!r}; expected safetensors files beside it")
    if missing := [name for name in names if not os.path.exists(index.parent / name)]:
        raise InputError(f"{index} lists files that are missing: {', '.join(missing)}; fetch them")
    return [index.parent / name for name in names]


def _tensors(path: Path, opened: ExitStack, device: torch.device) -> Iterator[Stored]:
    try:
        file = opened.enter_context(safe_open(path, framework="pt", device=str(device)))
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            yield Stored(name, path, file, part.get_dtype(), tuple(part.get_shape()))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is {_what_is_wrong(path)} ({error}); fetch or write it again") from error


def _what_is_wrong(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(40)
    except OSError:
        return "unreadable"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer and not the file itself"
    return "incomplete or no safetensors file" if start else "empty"


def _read_config(folder: Path, stored: dict[str, Stored], rms_norm_eps: float | None) -> LlamaConfig:
    path, params = folder / "config.json", folder / "params.json"
    if os.path.exists(path) or not os.path.exists(params):
        values = read_object(path)
    else:
        path, embedding = params, stored.get("embed_tokens.weight")
        try:
            values = names.config_values(read_object(path), embedding.shape[0] if embedding else None)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        values.setdefault("tie_word_embeddings", "lm_head.weight" not in stored)
    if rms_norm_eps is not None:
        found = values.get("rms_norm_eps")
        say(f"rms_norm_eps {rms_norm_eps:g} overrides {'none' if found is None else found} of {path}")
    return LlamaConfig.from_file_values(path, values, rms_norm_eps)


def _check_tensors(config: LlamaConfig, stored: dict[str, Stored], folder: Path) -> None:
    """Dtypes, names and shapes, against those of a model of one layer: a million of them must not be built."""
    for tensor in stored.values():
        if tensor.dtype not in DTYPES:
            raise InputError(
                f"{folder}: {tensor.name} is {tensor.dtype}, and quantised weights can't be computed here; "
                "expected F32, BF16 or F16: fetch the original, or convert it"
            )
    found = {match[1] for name in stored if (match := re.match(r"layers\.(\d+)\.", name))}
    if len(found) < config.num_hidden_layers:
        raise InputError(
            f"{folder}: tensors are missing; it has {len(found)} layers, and num_hidden_layers is "
            f"{config.num_hidden_layers}"
        )
    with torch.device("meta"):
        one = Llama(replace(config, num_hidden_layers=1), load_backend("reference", torch.device("cpu"))).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in one.items()}
    layer = {name: shape for name, shape in shapes.items() if name.startswith("layers.0.")}
    for i in range(1, config.num_hidden_layers):
        shapes |= {name.replace("layers.0.", f"layers.{i}.", 1): shape for name, shape in layer.items()}
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        shapes["lm_head.weight"] = shapes["embed_tokens.weight"]

    if missing := sorted(shapes.keys() - stored.keys()):
        raise InputError(f"{folder}: tensors are missing ({len(missing)}), the first is {to_file_name(missing[0])}")
    if unexpected := sorted(stored[name].name for name in stored.keys() - shapes.keys()):
        raise InputError(f"{folder}: tensors that no LLaMA has ({len(unexpected)}), the first is {unexpected[0]}")
    for name, tensor in stored.items():
        if tensor.shape != shapes[name]:
            raise InputError(f"{folder}: {tensor.name} has shape {tensor.shape}; the config asks for {shapes[name]}")


def _check_dtypes(folder: Path, stored: dict[str, Stored]) -> None:
    """Matrices must share a dtype to be multiplied; norms are free, as the norm's contract allows."""
    embedding = stored["embed_tokens.weight"]
    for name, tensor in stored.items():
        if not name.endswith("norm.weight") and tensor.dtype != embedding.dtype:
            raise InputError(
                f"{folder}: {tensor.name} is {tensor.dtype} and {embedding.name} {embedding.dtype}; expected one "
                "dtype for both: choose one with --dtype"
            )
