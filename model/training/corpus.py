"""The text to train on: its files, found or fetched, and their content."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import sysconfig
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels import InputError
from model.training.data_folder import FILES, sha256_of, work_folder
from model.training.run_folder import RUN

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def corpus_files(data: str, root: Path) -> list[Path]:
    """Files of a corpus: 'python', 'shakespeare' (fetched into `root`) or a path. Raises InputError for any other."""
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
    """Files in a folder and below, but for hidden ones, prepared data and runs: --out may lie within --data."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        is_run = RUN in names and parent != str(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not is_run]
        if not is_run and not set(FILES) <= set(names):
            paths = [Path(parent, name) for name in names if not name.startswith(".")]
            yield from (path for path in paths if path.is_file())


def fetch(url: str, sha256: str, path: Path) -> Path:
    """Download once to `path`. Raises InputError when offline, or where content or file have another checksum."""
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
            with work_folder(path) as work:
                Path(work, path.name).write_bytes(content)
                Path(work, path.name).replace(path)
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error}); free some space, or name another place") from error
    elif sha256_of(path) != sha256:
        raise InputError(f"{path} is not what {url} has; remove it to fetch it again, or use --data PATH")
    return path


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Raise InputError, which names the file or else `place`, where the block cannot read one."""
    try:
        yield
    except OSError as error:
        remedy = "make it readable, or leave it out of --data"
        raise InputError(f"{error.filename or place} cannot be read ({error.strerror}); {remedy}") from error


def read_text(file: Path, size: int, by_line: bool = False) -> Iterator[str]:
    """The text of a file without a byte-order mark at its start, in pieces of at most `size` characters.

    With `by_line` a piece ends at the first line break, too. Raises InputError if the file is not UTF-8 or unreadable.
    """
    with reading(file), file.open("rb") as content, io.TextIOWrapper(content, "utf-8-sig", newline="\n") as source:
        read = source.readline if by_line else source.read
        try:
            while piece := read(size):
                yield piece
        except UnicodeDecodeError as error:
            position = content.tell() - len(error.object) + error.start
            found = f"byte {error.object[error.start]:#x} at {position}: {error.reason}"
            raise InputError(f"{file} is not UTF-8 text ({found}); convert it, or leave it out of --data") from error
