"""Load a checkpoint directory: config.json and safetensors, in Hugging Face's, Meta's or Mistral's names.

Files are memory-mapped: a weight takes no memory before it is used, and none a second time. Pickles are never
opened, since they can run code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels import LAYER_NORMS, Backend, InputError, layer_norm_in, load_backend
from model.checkpoint.names import config_values, to_file_name, to_model_name, to_model_rows
from model.cli import say
from model.config import LlamaConfig
from model.config_keys import as_list, family_of, is_id
from model.json_file import errors_in, expect, read_object
from model.llama import Llama

# Tensors that some files hold and the model computes from its config.
ROTARY_BUFFER = re.compile(r"(^|\.)(rotary_emb|rope)\.(inv_freq|freqs|cos_cached|sin_cached)$")
DTYPES = {"F64", "F32", "F16", "BF16"}  # of weights that PyTorch can multiply
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, not yet read."""

    name: str  # in the file
    path: Path
    file: Any  # the open safe_open, which has no public type
    dtype: str  # in safetensors' spelling: "BF16"
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor, on the device that the file was opened for. Raises InputError if the file is damaged."""
        try:
            return self.file.get_tensor(self.name)
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: bytes that start between two numbers
            raise InputError(f"{self.path}: {self.name} cannot be read ({error}); fetch or write it again") from error


def load_checkpoint(
    folder: str | Path,
    norm: Backend,
    device: torch.device,
    dtype: torch.dtype | None = None,
    rms_norm_eps: float | None = None,
) -> Llama:
    """Load a model onto `device`, in evaluation mode.

    `dtype` None keeps the dtype of the files, and `rms_norm_eps` None the eps of the config. `norm` computes the norms;
    whoever calls checks that it is the formula that the config's `norm` names.
    Raises InputError if a file is missing or damaged, or the tensors are not exactly those of the config.
    """
    folder = Path(folder)
    with ExitStack() as opened:
        config, stored = open_checkpoint(folder, opened, device, rms_norm_eps)
        if norm.has_bias != LAYER_NORMS.get(layer_norm_in(config.norm) or "", False):
            expected = f"{config.norm}, the norm of {folder}" if config.norm else f"RMSNorm, which {folder} has"
            raise InputError(f"--norm is {norm.description}; expected {expected}: one of the two has a bias")
        with torch.device("meta"):  # shapes without values: the weights are about to be replaced
            model = Llama(config, norm)
        if dtype is None:
            _check_dtypes(stored)
        tensors = {name: to_model_rows(t.name, t.read().to(dtype), config) for name, t in stored.items()}
    if config.tie_word_embeddings and "lm_head.weight" in tensors:  # some writers store the embedding twice
        head = tensors.pop("lm_head.weight")
        if not torch.equal(head, tensors["embed_tokens.weight"]):
            path = stored["lm_head.weight"].path
            say(f"{path}: lm_head.weight differs from the embedding that it is tied to, and is ignored")
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def check_norm(folder: str | Path, config: LlamaConfig, name: str) -> None:
    """Raises InputError unless `name` is the checkpoint's norm, where that is not RMSNorm.

    It is not taken from the config instead, since importing a function that a file names runs code.
    """
    if config.norm is not None and config.norm != name:
        raise InputError(f"--norm is {name}; expected {config.norm}, the norm of {folder}, which is not RMSNorm")


def load_end_ids(folder: str | Path, config: LlamaConfig) -> set[int]:
    """The ids that end a text: those of config.json and of generation_config.json. Raises InputError."""
    path = Path(folder) / "generation_config.json"
    ids = as_list(read_object(path).get("eos_token_id")) if os.path.exists(path) else []
    expect(all(id is None or is_id(id) for id in ids), f"{path}: eos_token_id", ids, "a token id or a list of them")
    return config.end_ids() | set(ids) - {None}


def open_checkpoint(
    folder: Path, opened: ExitStack, device: torch.device, rms_norm_eps: float | None
) -> tuple[LlamaConfig, dict[str, Stored]]:
    """Read the config and the headers of the files, which `opened` keeps open: (config, tensors by the model's names).

    Raises InputError if the names, shapes and dtypes are not those of the config's model.
    """
    if not os.path.isdir(folder):  # unlike Path's, it takes a name that is too long
        raise InputError(f"no checkpoint directory at {folder}; name one, or make it with train.py --out {folder}")
    stored: dict[str, Stored] = {}
    source, files = _weight_files(folder)
    config_file, values = _read_values(folder)
    with errors_in(config_file):
        norms = family_of(values).norms
    for path in files:
        for tensor in _tensors(path, opened, device):
            name = to_model_name(tensor.name, norms)
            if ROTARY_BUFFER.search(name):
                continue
            if tensor.dtype not in DTYPES:
                raise InputError(f"{path}: {tensor.name} is {tensor.dtype}; expected F32, F16 or BF16, not quantised")
            if first := stored.get(name):
                raise InputError(f"{path}: {tensor.name} is also {first.name} of {first.path}; expected it once")
            stored[name] = tensor
    config = _make_config(config_file, values, stored, rms_norm_eps)
    if config.tie_word_embeddings and "embed_tokens.weight" not in stored and "lm_head.weight" in stored:
        stored["embed_tokens.weight"] = stored.pop("lm_head.weight")  # safetensors' save_model keeps one of two names
    _check_tensors(config, stored, source)
    return config, stored


def _weight_files(folder: Path) -> tuple[Path, list[Path]]:
    """The file to read the weights from, and the safetensors that it is or lists; says so if there is another choice.

    It is model.safetensors, which transformers takes first too, an index of shards, or Meta's and Mistral's files.
    """
    names = ("model.safetensors", INDEX, "consolidated.safetensors.index.json")
    found = [folder / name for name in names if os.path.lexists(folder / name)]  # a link that leads nowhere, too
    parts = sorted(folder.glob("consolidated*.safetensors"))
    if parts and folder / names[-1] not in found:
        found.append(parts[0])
    if not found:
        raise _no_weights(folder)
    configs = [folder / name for name in ("config.json", "params.json") if os.path.exists(folder / name)]
    if left := [path.name for path in configs[1:] + found[1:]]:
        read = " and ".join(path.name for path in configs[:1] + found[:1])
        say(f"{folder}: reading {read}; ignoring {' and '.join(left)}, which could be read instead")
    if found[0].suffix == ".json":
        return found[0], _indexed_files(found[0])
    return found[0], parts if found[0] in parts else found[:1]


def _no_weights(folder: Path) -> InputError:
    """The error to raise for a directory without safetensors: what it has instead, and how to convert that."""
    for name in sorted(path.name for path in folder.iterdir()):
        if name.endswith(".gguf"):
            return InputError(
                f"{folder} has no safetensors, but {name}; convert it: transformers' AutoModelForCausalLM"
                f'.from_pretrained(DIR, gguf_file="{name}") and save_pretrained(NEW_DIR)'
            )
        if name.endswith((".bin", ".pth", ".pt", ".ckpt")):
            return InputError(
                f"{folder} has no safetensors, but {name}, which is not opened, since a pickle can run code; if you "
                "trust it, torch.load it with weights_only=True and write its tensors with safetensors.torch.save_file"
            )
    return InputError(f"no weights at {folder / 'model.safetensors'}; expected one, or {INDEX} and its shards")


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
    return "incomplete or not a safetensors file" if start else "empty"


def _read_values(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that describes the model, and its content: config.json, or else Meta's and Mistral's params.json."""
    path, params = folder / "config.json", folder / "params.json"
    path = params if os.path.exists(params) and not os.path.exists(path) else path
    return path, read_object(path)


def _make_config(
    path: Path, values: dict[str, Any], stored: dict[str, Stored], rms_norm_eps: float | None
) -> LlamaConfig:
    with errors_in(path):
        if path.name == "params.json":
            tables = [stored[name] for name in ("embed_tokens.weight", "lm_head.weight") if name in stored]
            values = config_values(values, tables[0].shape[0] if tables else None)
            values.setdefault("tie_word_embeddings", len(tables) < 2)
        if rms_norm_eps is not None:
            found = values.get("norm_eps", values.get("rms_norm_eps"))
            say(f"rms_norm_eps {rms_norm_eps:g} overrides {'none' if found is None else found} of {path}")
        return LlamaConfig.from_dict(values, rms_norm_eps, path)


def _check_tensors(config: LlamaConfig, stored: dict[str, Stored], source: Path) -> None:
    """Refuse names and shapes that are not those of the config's model. `source` is where a missing one should be."""
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if len(layers) < config.num_hidden_layers:  # a damaged config may ask for a million of them
        raise InputError(f"{source}: tensors are missing: {len(layers)} of {config.num_hidden_layers} layers are there")
    with torch.device("meta"):
        model = Llama(config, load_backend(layer_norm_in(config.norm) or "reference", torch.device("cpu")))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        shapes["lm_head.weight"] = shapes["embed_tokens.weight"]
    if missing := sorted(shapes.keys() - stored.keys()):
        first = to_file_name(missing[0], config.family.norms)
        raise InputError(f"{source}: tensors are missing ({len(missing)}), the first is {first}")
    if unexpected := sorted((stored[name] for name in stored.keys() - shapes.keys()), key=lambda tensor: tensor.name):
        first = unexpected[0]
        known = f"tensors that model_type {config.model_type} does not have ({len(unexpected)})"
        raise InputError(f"{first.path}: {known}, the first is {first.name}")
    for name, tensor in stored.items():
        if tensor.shape != shapes[name]:
            named = f"{tensor.path}: {tensor.name} has shape {tensor.shape}"
            raise InputError(f"{named}; the config asks for {shapes[name]}")


def _check_dtypes(stored: dict[str, Stored]) -> None:
    """Refuse matrices of different dtypes, which cannot be multiplied. A norm's vectors may have another dtype."""
    embedding = stored["embed_tokens.weight"]
    for name, tensor in stored.items():
        if not name.endswith(("norm.weight", "norm.bias")) and tensor.dtype != embedding.dtype:
            difference = f"{tensor.name} is {tensor.dtype}, {embedding.name} of {embedding.path.name} {embedding.dtype}"
            raise InputError(f"{tensor.path}: {difference}; expected one dtype for both: choose one with --dtype")
