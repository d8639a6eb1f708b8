"""Turn a text into a sentencepiece tokenizer and one file of token ids for a training run.

The folder holds the tokenizer, tokens.bin and meta.json, which records the ids' dtype, the size of the vocabulary,
where the held-out tail begins, the source of the text, and checksums. The text is read in pieces, three times: to
check it, for the tokenizer, and for the ids. So memory does not grow with it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kernels import InputError
from model.cli import say
from model.json_file import errors_in
from model.tokenizer.base import Tokenizer
from model.tokenizer.sentencepiece_model import train_tokenizer
from model.training.corpus import corpus_files, read_text, reading
from model.training.data_folder import META, MODEL, TOKENS, locked, read_meta, work_folder

LINE = 1000  # characters of a line that train_tokenizer takes at once
HELD_OUT = 0.1  # fraction of the tokens, at the end, that is never trained on
SAMPLE = 2**24  # characters that a tokenizer is trained on; of a longer text, lines are drawn
PART = 2**16  # characters that are encoded at once; sentencepiece is slower with more
PART_END = re.compile(r"\n|[^ ](?= )")  # no piece of our tokenizers holds a line break, or a space behind a word
LONGEST_PART = 2**20  # characters after which a text without such an end is cut all the same
BLOCK = 2**20  # ids that are counted at once


def prepare(data: str, vocab_size: int, root: Path, wanted: str | None = None) -> Path:
    """The folder of prepared data for a corpus ('python', 'shakespeare' or a path), made now if it is missing.

    A folder that is out of date is made again, unless a resumed run needs the data it started with. `wanted` is the
    SHA-256 of that, or '' if it is unknown: then the folder is taken as it is.
    While another command makes the folder, wait. Raises InputError if the corpus is missing, empty, not UTF-8, cannot
    be fetched, or changes while it is read; no folder is left then.
    """
    with reading(data):
        files = corpus_files(data, root)
        fingerprint = _fingerprint(files)
    name = data if data in ("python", "shakespeare") else f"{Path(data).stem}-{fingerprint[:8]}"
    folder = root / f"{name}-{vocab_size}"
    for path in sorted(root.glob(f"{glob.escape(Path(data).stem)}-*{vocab_size}/{META}")) if wanted else ():
        with contextlib.suppress(InputError):  # of another, damaged folder
            meta = read_meta(path.parent)
            if meta["sha256"] == wanted:
                if meta["fingerprint"] != fingerprint:
                    say(f"--data {data} or its preparation has changed; the run goes on with {path.parent}")
                return path.parent

    def is_ready() -> bool:
        return (folder / META).exists() and (wanted is not None or read_meta(folder)["fingerprint"] == fingerprint)

    try:
        if is_ready():
            return folder
        root.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if is_ready():
                return folder
            say(f"preparing {folder}: a tokenizer of {vocab_size} pieces, then the ids (files: {len(files)})")
            with work_folder(folder) as work:
                new = Path(work, "new")
                new.mkdir()
                meta = {"source": data, "fingerprint": fingerprint, **_fill(new, data, files, vocab_size)}
                (new / META).write_text(json.dumps(meta, indent=2) + "\n")
                with reading(data):
                    if _fingerprint(files) != fingerprint:
                        raise InputError(f"--data {data} has changed while it was read; try again once it is complete")
                try:
                    if folder.exists() and not is_ready():
                        folder.rename(Path(work, "old"))  # prepared from an earlier state of the corpus
                    new.rename(folder)
                except OSError:
                    if not is_ready():  # on a disk without locks, another command may have made it
                        raise
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error}); free some space, or name another place") from error
    return folder


def _fingerprint(files: list[Path]) -> str:
    """Hash that changes when a file of the corpus is added, removed or written to."""
    stats = ((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    # The name is that of meta.json's newest key: folders written before that key existed are out of date.
    return hashlib.sha256(json.dumps([HELD_OUT, "tokenizer_sha256", *stats]).encode()).hexdigest()


def _fill(folder: Path, data: str, files: list[Path], vocab_size: int) -> dict[str, Any]:
    """Write the tokenizer and the ids. Returns their entries in meta.json."""
    lengths = {file: sum(map(len, read_text(file, PART))) for file in files}
    documents = [file for file in files if lengths[file]]
    if not documents:
        raise InputError(f"--data {data} holds no text; expected a UTF-8 text file, or a folder of them")
    share = SAMPLE / sum(lengths.values())
    if share < 1:
        say(f"the tokenizer is trained on {share:.1%} of the text, in lines drawn at random")
    with errors_in(f"--data {data}"):
        tokenizer = train_tokenizer(_drawn_lines(documents, share), vocab_size)
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    return {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": hashlib.sha256(tokenizer.files[MODEL]).hexdigest(),
        **_write_tokens(documents, tokenizer, folder / TOKENS),
    }


def _drawn_lines(documents: list[Path], share: float) -> Iterator[str]:
    """Lines of the text, each with probability `share`; the same text gives the same lines."""
    draw = random.Random(0)
    for file in documents:
        for line in read_text(file, LINE, by_line=True):
            if draw.random() < share:
                yield line


def _write_tokens(documents: list[Path], tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
    """Write the ids of all documents, each between bos_id and eos_id. Returns their entries in meta.json."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    digest, n_tokens = hashlib.sha256(), 0
    bar = tqdm(unit="token", unit_scale=True, disable=None)
    with path.open("wb") as out, bar:
        for ids in _encode(documents, tokenizer):
            content = np.array(ids, dtype).tobytes()
            out.write(content)
            digest.update(content)
            n_tokens += len(ids)
            bar.update(len(ids))
    n_train = n_tokens - int(n_tokens * HELD_OUT)
    return {
        "dtype": dtype.name,
        "n_tokens": n_tokens,
        "n_train": n_train,
        "unigram_loss": _unigram_loss(path, dtype, n_train, n_tokens, tokenizer.vocab_size),
        "sha256": digest.hexdigest(),  # lets --resume recognize the data
    }


def _encode(documents: list[Path], tokenizer: Tokenizer) -> Iterator[Sequence[int | None]]:
    """The ids of all documents, in parts. (A tokenizer may lack bos_id and eos_id, but not one of ours.)"""
    for file in documents:
        yield [tokenizer.bos_id]
        for part in _parts(read_text(file, PART)):
            yield tokenizer.encode(part)
        yield [tokenizer.eos_id]


def _parts(text: Iterable[str]) -> Iterator[str]:
    """Parts of a text of about PART characters that have the ids of the whole, because no piece reaches across.

    Only where none could end for LONGEST_PART characters (no space, no line break) may a few ids at the cut differ.
    """
    part = ""
    for piece in text:
        searched = len(part)
        part += piece
        if found := PART_END.search(part, max(searched, PART - 1)):
            yield part[: found.end()]
            part = part[found.end() :]
        elif len(part) >= LONGEST_PART:
            yield part
            part = ""
    if part:
        yield part


def _unigram_loss(path: Path, dtype: np.dtype, n_train: int, n_tokens: int, vocab_size: int) -> float | None:
    """Nats per held-out token, each predicted by its frequency before: the loss of a model that ignores context."""
    counts = _count(path, dtype, 0, n_train, vocab_size) + 1  # add one, so that no token has probability 0
    held_out = _count(path, dtype, n_train, n_tokens, vocab_size)
    return float(held_out @ -np.log(counts / counts.sum()) / held_out.sum()) if n_train < n_tokens else None


def _count(path: Path, dtype: np.dtype, start: int, end: int, vocab_size: int) -> np.ndarray:
    """Number of times that each id occurs in file[start:end], in ids; (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(start, end, BLOCK):
        ids = np.fromfile(path, dtype, min(BLOCK, end - first), offset=first * dtype.itemsize)
        counts += np.bincount(ids, minlength=vocab_size)
    return counts
