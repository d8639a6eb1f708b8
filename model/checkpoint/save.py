"""Writes checkpoint directories; a run that dies while it saves leaves one whole model, or visibly none."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kernels import InputError
from model.checkpoint.load import INDEX
from model.checkpoint.names import to_file_name
from model.llama import Llama
from model.tokenizer.base import Tokenizer

SHARD_BYTES = 5_000_000_000  # what transformers takes for its own files
SHARD = re.compile(r"(model|weights)-\d{5}-of-\d{5}\.safetensors")
# What another model may have left, and a reader would take for this one's.
STALE_TOKENIZER = {
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
}  # fmt: skip
STALE = {"model.safetensors", INDEX, *STALE_TOKENIZER}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside its place, flush it to the disk and rename it: whoever reads it finds the old or the new.

    Raises InputError where that can't be done.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(f"{path} can't be written ({error.strerror}); free some space, and try again") from error


def save_checkpoint(
    folder: str | Path,
    model: Llama,
    tokenizer: Tokenizer,
    shard_bytes: int = SHARD_BYTES,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write config, weights and tokenizer; a tied head is written once, as the embedding.

    `weights` is model.state_dict() where the model itself holds only a part of it. Weights of more than `shard_bytes`
    go to several files and an index. All files are written beside their places and flushed to the disk before the first
    is renamed. If only the weights are new, one rename replaces them; if the directory held another config or
    tokenizer, its weights go first, so that none can be read with another's.
    Raises InputError where the disk is full or can't be written to; what was there is then left as it was.
    """
    folder = Path(folder)
    tensors = {to_file_name(name): tensor.contiguous() for name, tensor in (weights or model.state_dict()).items()}
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    config = {**model.config.to_dict(), "dtype": dtype, "torch_dtype": dtype}  # transformers 4 spells it the second way
    small = {**tokenizer.files, "config.json": (json.dumps(config, indent=2) + "\n").encode()}
    shards = _shards(folder, tensors, shard_bytes)
    writers: dict[str, Callable[[Path], object]] = {
        name: lambda path, content=content: path.write_bytes(content) for name, content in small.items()
    }
    for name, part in shards.items():
        writers[name] = lambda path, part=part: save_file(part, path, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {key: name for name, part in shards.items() for key in part},
        }
        writers[INDEX] = lambda path: path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    partial = {name: folder / f"{name}.partial" for name in writers}
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            path = folder / name
            partial[name].unlink(missing_ok=True)  # it might be a link to something else
            write(partial[name])
            with partial[name].open("rb") as file:
                os.fsync(file.fileno())
        for name in shards:
            shutil.copymode(partial["config.json"], partial[name])  # safetensors makes it private
        other = any(_content(folder / name) != content for name, content in small.items())
        if other or any((folder / name).exists() for name in STALE_TOKENIZER - small.keys()):
            for name in ("model.safetensors", INDEX, "generation_config.json"):
                (folder / name).unlink(missing_ok=True)
        for name in writers:
            partial[name].replace(folder / name)
        _remove_stale(folder, set(writers))
    except (OSError, SafetensorError) as error:
        for leftover in partial.values():
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise InputError(f"{path} can't be written ({error}); free some space or choose another folder") from error


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _shards(folder: Path, tensors: dict[str, Tensor], shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """The tensors by the file that they go to; each but the last is as large as it may be."""
    parts, room = [{}], shard_bytes
    for name, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > room:
            parts.append({})
            room = shard_bytes
        parts[-1][name] = tensor
        room -= tensor.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    # Until the index is replaced, the shards that it names must stay what they are.
    stem = "weights" if b'"model-0' in (_content(folder / INDEX) or b"") else "model"
    return {f"{stem}-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def _remove_stale(folder: Path, written: set[str]) -> None:
    """Files of another model, and what a save that died has left: those that this module writes, and no others."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "model.safetensors"):  # which beats an index
        name = path.name.removesuffix(".partial")
        ours = name in STALE or name == "config.json" or SHARD.fullmatch(name)
        if ours and path.name not in written:
            path.unlink()
