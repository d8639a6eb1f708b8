"""Turn a text into a sentencepiece tokenizer and one file of token ids for a training run.

The folder holds tokenizer.model, tokens.bin and meta.json, which records the ids' dtype, the size of the vocabulary,
where the held-out tail begins, the source of the text, and checksums. The text is read a line at a time, three times:
to check it, for the tokenizer, and for the ids. So memory does not grow with it.
"""

from __future__ import annotations

import glob
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from kernels import InputError
from model.cli import say
from model.json_file import errors_in, expect
from model.tokenizer.base import Tokenizer
from model.tokenizer.sentencepiece_model import train_tokenizer

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HELD_OUT = 0.1  # fraction of the tokens, at the end, that is never trained on
META, MODEL, TOKENS = "meta.json", "tokenizer.model", "tokens.bin"
KINDS = {"fingerprint": str, "dtype": str, "n_tokens": int, "n_train": int, "vocab_size": int, "sha256": str}
LINE = 1000  # characters of a line that are read at once
SAMPLE = 2**24  # characters that a tokenizer is trained on; of a longer text, lines are drawn
PART = 2**16  # characters that are encoded at once; sentencepiece is slower with more
PART_END = re.compile(r"\n|[^ ](?= )")  # no piece of our tokenizers holds a line break, or a space behind a word
LONGEST_PART = 2**20  # characters after which a text without such an end is cut all the same
BLOCK = 2**20  # ids that are counted, and bytes that are hashed at once
HASHED = 2**28  # bytes; a larger tokens.bin is held to its size alone, since hashing this much takes 0.3 s


def prepare(data: str, vocab_size: int, root: Path, renew: bool = True) -> Path:
    """The folder of prepared data for a corpus ('python', 'shakespeare' or a path), made now if it is missing.

    A folder that is out of date is made again, unless `renew` is False: a resumed run needs the data it started with.
    While another command makes the folder, wait. Raises InputError if the corpus is missing, empty, not UTF-8, cannot
    be fetched, or changes while it is read; no folder is left then.
    """
    with _reading(data):
        files = _corpus_files(data, root)
        fingerprint = _fingerprint(files)
    name = data if data in ("python", "shakespeare") else f"{Path(data).stem}-{fingerprint[:8]}"
    folder = root / f"{name}-{vocab_size}"

    def is_ready() -> bool:
        return (folder / META).exists() and (not renew or read_meta(folder)["fingerprint"] == fingerprint)

    try:
        if is_ready():
            return folder
        root.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if is_ready():
                return folder
            say(f"preparing {folder}: a tokenizer of {vocab_size} pieces, then the ids (files: {len(files)})")
            with _work_folder(folder) as work:
                new = Path(work, "new")
                new.mkdir()
                meta = {"source": data, "fingerprint": fingerprint, **_fill(new, data, files, vocab_size)}
                (new / META).write_text(json.dumps(meta, indent=2) + "\n")
                with _reading(data):
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
        message = f"{folder} cannot be written ({error}); free some space, or name another place"
        raise InputError(message) from error
    return folder


def read_prepared(folder: Path) -> dict[str, Any]:
    """meta.json of a folder of prepared data. Raises InputError where a file is missing or is not what was written."""
    meta = read_meta(folder)
    sizes = {TOKENS: meta["n_tokens"] * np.dtype(meta["dtype"]).itemsize}
    for name, sha256 in ((TOKENS, meta["sha256"]), (MODEL, meta.get("tokenizer_sha256"))):  # older folders lack it
        path = folder / name
        try:
            found = path.stat().st_size
            expected = sizes.get(name, found)
            if found != expected:
                raise InputError(f"{path} has {found:,} bytes; expected {expected:,}; {_make_again(folder)}")
            if sha256 and found <= HASHED and _sha256(path) != sha256:
                raise InputError(f"{path} is damaged; expected the SHA-256 in {META}; {_make_again(folder)}")
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}); {_make_again(folder)}") from error
    return meta


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a folder of prepared data, whatever is beside it. Raises InputError if it is missing or damaged."""
    path, again = folder / META, _make_again(folder)
    try:
        meta = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); expected a JSON object; {again}") from error
    with errors_in(path):
        expect(isinstance(meta, dict), "the content", meta, f"a JSON object; {again}")
        for key, kind in KINDS.items():
            expect(type(meta.get(key)) is kind, key, meta.get(key), f"a value of type {kind.__name__}; {again}")
        expect(meta["dtype"] in ("uint16", "uint32"), "dtype", meta["dtype"], f"uint16 or uint32; {again}")
        n_train, n_tokens = meta["n_train"], meta["n_tokens"]
        expect(0 < n_train <= n_tokens, "n_train", n_train, f"1 to n_tokens, which is {n_tokens}; {again}")
        loss = meta.get("unigram_loss")
        expect(type(loss) is float or n_train == n_tokens, "unigram_loss", loss, f"a value of type float; {again}")
    return meta


def _make_again(folder: Path) -> str:
    return f"remove {folder}, and the next run makes it again"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one command at a time make the folder; say so while this one waits. Remove what a killed one has left."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another command is preparing {folder}; waiting for it")
        lock.acquire()
    except (OSError, NotImplementedError):  # a disk without locks: each command works in a folder of its own
        yield
        return
    try:
        for left in folder.parent.glob(f".{glob.escape(folder.name)}-{'?' * 8}.partial"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        with suppress(OSError):  # Windows removes the file itself
            os.unlink(lock.lock_file)
        lock.release()


def _work_folder(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A hidden folder beside `path`, with a name of its own, that is removed after use."""
    return tempfile.TemporaryDirectory(".partial", f".{path.name}-", path.parent, ignore_cleanup_errors=True)


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
        return sorted(_visible_files(path))
    found = "is neither a file nor a folder" if path.exists() else "does not exist"
    raise InputError(f"--data {data} {found}; expected python, shakespeare, a text file or a folder of them")


def _visible_files(folder: Path) -> Iterator[Path]:
    """Files in a folder and below, but for hidden ones and prepared data: --out may lie within --data."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if not {META, MODEL, TOKENS} <= set(names):
            paths = [Path(parent, name) for name in names if not name.startswith(".")]
            yield from (path for path in paths if path.is_file())


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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _work_folder(path) as work:
                Path(work, path.name).write_bytes(content)
                Path(work, path.name).replace(path)
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error}); free some space, or name another place") from error
    elif _sha256(path) != sha256:
        raise InputError(f"{path} is not what {url} has; remove it to fetch it again, or use --data PATH")
    return path


def _fingerprint(files: list[Path]) -> str:
    """Hash that changes when a file of the corpus is added, removed or written to."""
    stats = ((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    # The name is that of meta.json's newest key: folders written before that key existed are out of date.
    return hashlib.sha256(json.dumps([HELD_OUT, "tokenizer_sha256", *stats]).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _reading(place: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "make it readable, or leave it out of --data"
        raise InputError(f"{error.filename or place} cannot be read ({error.strerror}); {remedy}") from error


def _lines(file: Path) -> Iterator[str]:
    """The text of a file by lines, without a byte-order mark at its start; a long line comes LINE characters at a time.

    Raises InputError if the file is not UTF-8 or cannot be read.
    """
    with _reading(file), file.open(encoding="utf-8", newline="\n") as source:
        try:
            line = source.readline(LINE).removeprefix("\ufeff")
            while line:
                yield line
                line = source.readline(LINE)
        except UnicodeDecodeError as error:
            position = source.buffer.tell() - len(error.object) + error.start
            found = f"byte {error.object[error.start]:#x} at {position}: {error.reason}"
            raise InputError(f"{file} is not UTF-8 text ({found}); convert it, or leave it out of --data") from error


def _fill(folder: Path, data: str, files: list[Path], vocab_size: int) -> dict[str, Any]:
    """Write the tokenizer and the ids. Returns their entries in meta.json."""
    lengths = {file: sum(map(len, _lines(file))) for file in files}
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
    """Each line with probability `share`, the same ones for the same text."""
    draw = random.Random(0)
    for file in documents:
        for line in _lines(file):
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


def _encode(documents: list[Path], tokenizer: Tokenizer) -> Iterator[list[int]]:
    for file in documents:
        yield [tokenizer.bos_id]
        for part in _parts(_lines(file)):
            yield tokenizer.encode(part)
        yield [tokenizer.eos_id]


def _parts(lines: Iterable[str]) -> Iterator[str]:
    """Parts of a text of about PART characters that have the ids of the whole, because no piece reaches across.

    Only where none could end for LONGEST_PART characters (no space, no line break) may a few ids at the cut differ.
    """
    text = ""
    for line in lines:
        seen = len(text) - 1  # without the last character: an end is known by what follows
        text += line
        if found := PART_END.search(text, max(seen, PART - 1)):
            yield text[: found.end()]
            text = text[found.end() :]
        elif len(text) >= LONGEST_PART:
            yield text
            text = ""
    if text:
        yield text


def _unigram_loss(path: Path, dtype: np.dtype, n_train: int, n_tokens: int, vocab_size: int) -> float | None:
    """Nats per held-out token, each predicted by its frequency before: the loss of a model that ignores context."""
    counts = _count(path, dtype, 0, n_train, vocab_size) + 1  # add one, so that no token has probability 0
    held_out = _count(path, dtype, n_train, n_tokens, vocab_size)
    return float(held_out @ -np.log(counts / counts.sum()) / held_out.sum()) if n_train < n_tokens else None


def _count(path: Path, dtype: np.dtype, start: int, end: int, vocab_size: int) -> np.ndarray:
    """How often each id stands in a stretch of the file, (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(start, end, BLOCK):
        ids = np.fromfile(path, dtype, min(BLOCK, end - first), offset=first * dtype.itemsize)
        counts += np.bincount(ids, minlength=vocab_size)
    return counts
