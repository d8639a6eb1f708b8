"""Turn a text into a sentencepiece tokenizer and one file of token ids for a training run.

The folder holds tokenizer.model, tokens.bin and meta.json, which records the ids' dtype, the size of the vocabulary,
where the held-out tail begins, and the source of the text.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import shutil
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kernels import InputError
from model.cli import say
from model.json_file import errors_in
from model.tokenizer.base import Tokenizer
from model.tokenizer.sentencepiece_model import train_tokenizer

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HELD_OUT = 0.1  # fraction of the tokens, at the end, that is never trained on
PART = 2**16  # characters that are encoded at once; sentencepiece is slower with more
PART_END = re.compile(r"\n|[^ ](?= )")  # no piece of our tokenizers holds a line break, or a space behind a word


def prepare(data: str, vocab_size: int, root: Path, renew: bool = True) -> Path:
    """The folder of prepared data for a corpus ('python', 'shakespeare' or a path), made now if it is missing.

    A folder that is out of date is made again, unless `renew` is False: a resumed run needs the data it started with.
    Raises InputError if the corpus is missing, empty, not UTF-8 or cannot be fetched; no folder is left then.
    """
    files = _corpus_files(data, root)
    fingerprint = _fingerprint(files)
    name = data if data in ("python", "shakespeare") else f"{Path(data).stem}-{fingerprint[:8]}"
    folder = root / f"{name}-{vocab_size}"
    meta_file = folder / "meta.json"
    if meta_file.exists() and (not renew or json.loads(meta_file.read_text())["fingerprint"] == fingerprint):
        return folder

    say(f"preparing {folder}: a tokenizer of {vocab_size} pieces, then the ids (files: {len(files)})")
    documents = [text for text in map(_read_text, files) if text]
    if not documents:
        raise InputError(f"--data {data} holds no text; expected a UTF-8 text file, or a folder of them")
    with errors_in(f"--data {data}"):
        tokenizer = train_tokenizer(documents, vocab_size)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted run
    try:
        partial.mkdir(parents=True)
        for name, content in tokenizer.files.items():
            (partial / name).write_bytes(content)
        counts = _write_tokens(documents, tokenizer, partial / "tokens.bin")
        meta = {"source": data, "fingerprint": fingerprint, "vocab_size": tokenizer.vocab_size, **counts}
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # prepared from an earlier state of the corpus
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{folder} cannot be written ({error}); free some space, or name another place") from error
    return folder


def _corpus_files(data: str, root: Path) -> list[Path]:
    if data == "shakespeare":
        return [fetch(SHAKESPEARE_URL, SHAKESPEARE_SHA256, root / "shakespeare.txt")]
    if data == "python":
        library = Path(sysconfig.get_paths()["stdlib"])
        left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        return sorted(path for path in library.rglob("*.py") if left_out.isdisjoint(path.relative_to(library).parts))
    path = Path(data)
    if path.is_file():
        return [path]
    if path.is_dir():
        hidden = set(path.rglob(".*"))
        return sorted(file for file in path.rglob("*") if file.is_file() and hidden.isdisjoint([file, *file.parents]))
    raise InputError(f"--data {data} does not exist; expected python, shakespeare, a text file or a folder of them")


def fetch(url: str, sha256: str, path: Path) -> Path:
    """Download once to `path`. Raises InputError when offline, or when the content has another checksum."""
    if not path.exists():
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"{url} cannot be fetched ({error}); use --data python, or --data PATH") from error
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise InputError(f"{url} has SHA-256 {found}; expected {sha256}; use --data PATH with a file you trust")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        partial.rename(path)
    return path


def _fingerprint(files: list[Path]) -> str:
    """Hash that changes when a file of the corpus is added, removed or written to."""
    stats = ((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    # "sha256" names a key of meta.json: folders written before that key existed are out of date.
    return hashlib.sha256(json.dumps([HELD_OUT, "sha256", *stats]).encode()).hexdigest()


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text ({error}); convert it, or leave it out of --data") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); leave it out of --data") from error


def _write_tokens(documents: list[str], tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
    """Write the ids of all documents, each between bos_id and eos_id. Returns their entries in meta.json."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    bar = tqdm(unit="token", unit_scale=True, disable=None)
    with path.open("wb") as out, bar:
        for text in documents:
            np.array([tokenizer.bos_id], dtype).tofile(out)
            for part in _parts(text):
                ids = tokenizer.encode(part)
                np.array(ids, dtype).tofile(out)
                bar.update(len(ids))
            np.array([tokenizer.eos_id], dtype).tofile(out)
    tokens = np.fromfile(path, dtype)
    n_train = len(tokens) - int(len(tokens) * HELD_OUT)
    return {
        "dtype": dtype.name,
        "n_tokens": len(tokens),
        "n_train": n_train,
        "unigram_loss": _unigram_loss(tokens[:n_train], tokens[n_train:], tokenizer.vocab_size),
        "sha256": hashlib.sha256(tokens.data).hexdigest(),  # lets --resume recognize the data
    }


def _parts(text: str) -> Iterator[str]:
    """Parts of a text of about PART characters that have the ids of the whole, because no piece reaches across."""
    start = 0
    while start < len(text):
        found = PART_END.search(text, start + PART - 1)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


def _unigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float | None:
    """Nats per token when each is predicted by its frequency: the loss of a model that ignores context."""
    counts = np.bincount(train, minlength=vocab_size) + 1  # add one, so that no token has probability 0
    surprise = -np.log(counts / counts.sum())
    return float(surprise[held_out].mean()) if len(held_out) else None
