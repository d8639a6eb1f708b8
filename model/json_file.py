"""Read the JSON files of a checkpoint. Errors name the file and fit one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels import InputError

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LARGEST = 2**28  # bytes; published tokenizers and indices take 20 MB at most


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError if there is none."""
    return parse_object(Path(path), read_file(Path(path)))


def read_file(path: Path) -> bytes:
    """The content of a file. Raises InputError if it is missing, unreadable or larger than 256 MiB."""
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path} has {path.stat().st_size:,} bytes; expected at most {LARGEST:,}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing; expected a file there") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); make it readable, or fetch it again") from error


def decode_text(path: Path, content: bytes) -> str:
    """The text of a file at `path`, without a byte-order mark. Raises InputError if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}); fetch it again") from error


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """The JSON object in the `content` of a file at `path`. Raises InputError if it is anything else."""
    text = decode_text(path, content)
    try:
        found = json.loads(text)
        if SURROGATE.search(text):  # half a pair of them is JSON, and fails later, when it is written as UTF-8
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds a {type(found).__name__}; expected a JSON object")
    return found


@contextmanager
def errors_in(place: object) -> Iterator[None]:
    """Put `place`, such as the path of the file that the block takes apart, before an InputError's message."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def expect(fits: bool, key: str, value: Any, expected: str) -> None:
    """Raise InputError naming key and value, unless the value fits."""
    if not fits:
        raise InputError(f"{key} is {show(value)}; expected {expected}")


def show(value: Any) -> str:
    """A value for an error message: as JSON in one line, cut at 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "..."
