"""A folder of prepared data: one command at a time makes it, and what it holds is checked before use."""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kernels import InputError
from model.cli import say
from model.json_file import errors_in, expect
from model.training.lock_file import locked_by

FILES = META, MODEL, TOKENS = "meta.json", "tokenizer.model", "tokens.bin"
KINDS = {"fingerprint": str, "dtype": str, "n_tokens": int, "n_train": int, "vocab_size": int, "sha256": str}
HASHED = 2**28  # bytes; a larger file is held to its size alone, since hashing this much takes 0.3 s


def read_prepared(folder: Path) -> dict[str, Any]:
    """meta.json of a folder of prepared data. Raises InputError where a file is missing or is not what was written."""
    meta = read_meta(folder)
    with _made_again(folder):
        check_file(folder / TOKENS, meta["sha256"], meta["n_tokens"] * np.dtype(meta["dtype"]).itemsize)
        check_file(folder / MODEL, meta.get("tokenizer_sha256"))  # which older folders lack
    return meta


def check_file(path: Path, sha256: str | None, size: int | None = None) -> None:
    """Raise InputError where a file has another size or SHA-256; None is not checked, nor a large file's SHA-256."""
    try:
        found = path.stat().st_size
        if size is not None and found != size:
            raise InputError(f"{path} has {found:,} bytes; expected {size:,}")
        if sha256 and found <= HASHED and sha256_of(path) != sha256:
            raise InputError(f"{path} is damaged: its SHA-256 is not that of what was written")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a folder of prepared data, whatever is beside it. Raises InputError if it is missing or damaged."""
    path = folder / META
    with _made_again(folder):
        try:
            meta = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read ({error}); expected a JSON object") from error
        with errors_in(path):
            expect(isinstance(meta, dict), "the content", meta, "a JSON object")
            for key, kind in KINDS.items():
                expect(type(meta.get(key)) is kind, key, meta.get(key), f"a value of type {kind.__name__}")
            expect(meta["dtype"] in ("uint16", "uint32"), "dtype", meta["dtype"], "uint16 or uint32")
            n_train, n_tokens, loss = meta["n_train"], meta["n_tokens"], meta.get("unigram_loss")
            expect(0 < n_train <= n_tokens, "n_train", n_train, f"1 to n_tokens, which is {n_tokens}")
            expect(type(loss) is float or n_train == n_tokens, "unigram_loss", loss, "a value of type float")
    return meta


@contextmanager
def _made_again(folder: Path) -> Iterator[None]:
    """Append the remedy to the block's InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}; remove {folder}, and the next run makes it again") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one command at a time make the folder; say so while this one waits. Remove what a killed one has left.

    On a disk without locks each command works in a folder of its own.
    """
    path = folder.with_name(f".{folder.name}.lock")
    with locked_by(path, lambda: say(f"another command is preparing {folder}; waiting for it")) as held:
        if held:
            for left in folder.parent.glob(f".{glob.escape(folder.name)}-{'?' * 8}.partial"):
                shutil.rmtree(left, ignore_errors=True)
        yield


def work_folder(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A hidden folder beside `path`, with a name of its own, that is removed after use."""
    return tempfile.TemporaryDirectory(".partial", f".{path.name}-", path.parent, ignore_cleanup_errors=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
