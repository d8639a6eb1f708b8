"""A lock file, for folders that one command at a time may fill. The operating system frees that of a killed one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kernels import InputError


@contextlib.contextmanager
def locked_by(path: Path, if_taken: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file at `path` during the block: True, or False on a disk without locks, where nothing is held.

    Where another process holds it, call `if_taken`, which may raise, and wait. Raises InputError if it is not our file.
    """
    from filelock import FileLock, Timeout  # not at the top, which train.py --help waits for

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if_taken()
        lock.acquire()
    except PermissionError as error:
        raise InputError(
            f"{path} is another user's; expected a folder of your own, or one without that file"
        ) from error
    except (OSError, NotImplementedError):
        pass  # a disk without locks
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # Windows removes no open file: there filelock does it in release()
                path.unlink()
            lock.release()
