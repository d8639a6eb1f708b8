"""Save checkpoint directories. A run that dies while saving leaves one whole model, or visibly none."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kernels import InputError
from model.checkpoint.load import INDEX
from model.checkpoint.names import to_file_name
from model.llama import Llama
from model.tokenizer.base import Tokenizer
from model.tokenizer.files import SMALL_FILES

SHARD_BYTES = 5_000_000_000  # transformers' default
# Files that another model may have left, and that a reader would take for this one's.
WEIGHTS = re.compile(r"model\.safetensors(\.index\.json)?|(model|weights)-\d{5}-of-\d{5}\.safetensors")
TOKENIZER = {"tokenizer.model", "tokenizer.json", *SMALL_FILES}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: temporary file, fsync, rename. Raises InputError if it cannot be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        _flush(partial)
        partial.replace(path)
    except OSError as error:
        raise _not_written(path, error, [partial]) from error


def save_checkpoint(
    folder: str | Path,
    model: Llama,
    tokenizer: Tokenizer,
    shard_bytes: int = SHARD_BYTES,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write config, weights and tokenizer; a tied head is written once, as the embedding.

    `weights` is the whole state dict if the model itself holds a part of it. Weights of more than `shard_bytes` go to
    several files and an index. Saves are atomic: every file is written beside its place and flushed to the disk before
    the first is renamed. If only the weights are new, one rename replaces them. If the directory held another config or
    tokenizer, its weights are removed first: they are never read with this one's.
    Raises InputError if the disk is full or cannot be written to; the old checkpoint then stays as it was.
    """
    folder = Path(folder)
    norms = model.config.family.norms
    tensors = {to_file_name(name, norms): t.contiguous() for name, t in (weights or model.state_dict()).items()}
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    config = {**model.config.to_dict(), "dtype": dtype, "torch_dtype": dtype}  # transformers 4 spells it the second way
    small = {**tokenizer.files, "config.json": _json(config)}
    shards = _shards(folder, tensors, shard_bytes)
    contents: dict[str, bytes | dict[str, Tensor]] = {**small, **shards}  # in the order of the renames
    if len(shards) > 1:
        weight_map = {key: name for name, part in shards.items() for key in part}
        total = sum(tensor.nbytes for tensor in tensors.values())
        contents[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": weight_map})
    partial = {name: folder / f"{name}.partial" for name in contents}

    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            path, file = folder / name, partial[name]
            file.unlink(missing_ok=True)  # it might be a link to something else
            if isinstance(content, bytes):
                file.write_bytes(content)
            else:
                save_file(content, file, metadata={"format": "pt"})
                shutil.copymode(partial["config.json"], file)  # safetensors makes it private
            _flush(file)
        if any(_content(folder / name) != small.get(name) for name in TOKENIZER | small.keys()):
            for name in ("model.safetensors", INDEX, "generation_config.json"):
                path = folder / name
                path.unlink(missing_ok=True)
        for name, file in partial.items():
            path = folder / name
            file.replace(path)
        # What another model or an interrupted save has left; model.safetensors first, since it beats an index.
        for path in sorted(folder.iterdir(), key=lambda path: path.name != "model.safetensors"):
            name = path.name.removesuffix(".partial")
            if path.name not in contents and (name in TOKENIZER or WEIGHTS.fullmatch(name)):
                path.unlink()
    except (OSError, SafetensorError) as error:
        raise _not_written(path, error, partial.values()) from error


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _not_written(path: Path, error: OSError | SafetensorError, partial: Iterable[Path]) -> InputError:
    """The error to raise when `path` cannot be written; removes the `partial` files."""
    for leftover in partial:
        with contextlib.suppress(OSError):
            leftover.unlink()
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{path} cannot be written ({reason}); free some space, or choose another folder")


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


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
    # Until the index is replaced, the shards that it names must not change.
    stem = "weights" if b'"model-0' in (_content(folder / INDEX) or b"") else "model"
    return {f"{stem}-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}
