"""A lock file, for folders that one command at a time may fill. The operating system frees that of a killed one."""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from kernels import InputError

WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def locked_by(path: Path, if_taken: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file at `path` during the block: True, or False on a disk without locks, where nothing is held.

    Where another process holds it, call `if_taken`, which may raise, and wait. Raises InputError if locking fails.
    """
    from filelock import FileLock, Timeout  # not at the top, which train.py --help waits for

    lock = FileLock(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # filelock's, of a disk without locks
            lock.acquire(timeout=0)
    except Timeout:
        if_taken()
        lock.acquire()
    except PermissionError as error:
        raise InputError(
            f"{path} is another user's; expected a folder of your own, or one without that file"
        ) from error
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise InputError(
                f"{path} cannot be locked ({error.strerror}); remove it, or name another folder"
            ) from error
    except NotImplementedError:
        pass  # an older filelock's, of a disk without locks
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # Windows removes no open file: there filelock does it in release()
                path.unlink()
            lock.release()
