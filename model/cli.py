"""What every command shares: a parser whose errors are one line, and the choice of device and dtype."""

from __future__ import annotations

import argparse
import errno
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kernels import USAGE, InputError

if TYPE_CHECKING:
    import torch


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """States a default where there is one to state."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or action.default is False or action.default == ""
        return action.help if nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse with the whole of --help to read, defaults included, and errors that fit one line."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=_Help)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def add_backend_arguments(self, dtypes: list[str]) -> None:
        """--norm, --device and --dtype."""
        self.add_argument("--norm", default="auto", help=f"what computes RMSNorm: {USAGE}")
        self.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
        self.add_argument("--dtype", default="auto", choices=["auto", *dtypes], help="precision of the computation")


def positive(kind: type) -> Callable[[str], int | float]:
    """An argparse type: a number above 0."""
    return _number(kind, "above 0", lambda number: 0 < number < math.inf)


def not_negative(kind: type) -> Callable[[str], int | float]:
    """An argparse type: 0, or a number above it."""
    return _number(kind, "from 0 on", lambda number: 0 <= number < math.inf)


def names_in(text: str) -> list[str]:
    """The comma-separated names of a flag, without the empty ones."""
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers(text: str) -> list[int]:
    """An argparse type: comma-separated whole numbers above 0, from small to large and each once."""
    return sorted({positive(int)(part) for part in text.split(",")})


def _number(kind: type, where: str, fits: Callable[[int | float], bool]) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not fits(number):
            raise argparse.ArgumentTypeError(f"'{text}' is no {'whole ' if kind is int else ''}number {where}")
        return number

    return parse


def run(main: Callable[[], object]) -> None:
    """Run a command: bad input and a full disk end in one line and exit code 2, Ctrl-C in 130, without a traceback."""
    try:
        main()
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except InputError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as in `generate.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _fail(f"{error.filename or 'the output'} can't be written ({error.strerror}); free some space, and try again")


def _fail(message: str) -> NoReturn:
    text = " ".join(message.split())
    process = f" in process {rank()}" if rank() else ""
    print(f"error{process}: {text if len(text) <= 1000 else text[:1000] + ' ...'}", file=sys.stderr)
    sys.exit(2)


def rank() -> int:
    """The number of this process among those that torchrun has started; 0 for a process alone."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """How many processes torchrun has started; 1 for a process alone."""
    return int(os.environ.get("WORLD_SIZE", 1))


def say(text: str) -> None:
    """One line for the person at the terminal: on stderr, above any progress bar, and from one process alone."""
    from tqdm import tqdm

    if rank() == 0:
        tqdm.write(text, file=sys.stderr)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM, collected for the block to act on. One that comes a second later has its old effect."""
    caught, times = [], []

    def catch(number: int, frame: object) -> None:
        # torchrun passes a Ctrl-C on that the terminal has already brought: the same one twice at nearly one time.
        if times and time.monotonic() - times[0] > 1:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        caught.append(number)
        times.append(time.monotonic())

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_folder(flag: str, folder: Path) -> None:
    """Make the folder that a flag names, before the work whose results it is for.

    Raises InputError where it can't be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{flag} {folder} can't be written ({error.strerror}); name a folder that can") from error


def choose_device(name: str) -> torch.device:
    """The device of that name. Raises InputError when it is not on this machine."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type != "meta":
            return device
        reason = "it computes nothing"
    except (RuntimeError, AssertionError, ImportError) as error:  # AssertionError: a torch built without CUDA
        reason = str(error).split("\n")[0].split(". ")[0].rstrip(".")
    raise InputError(f"--device {name} can't be used here ({reason}); use --device cpu, or auto")


def choose_autocast_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that matrix products are computed in; auto is bfloat16 where the device computes it natively."""
    import torch

    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = _cpu_computes_bfloat16()
    if name == "auto":
        return torch.bfloat16 if native else torch.float32
    if name == "bfloat16" and device.type == "cuda" and not native:
        raise InputError(f"--dtype bfloat16: {torch.cuda.get_device_name(device)} can't; use --dtype float32")
    return getattr(torch, name)


def _cpu_computes_bfloat16() -> bool:
    """Whether the CPU has instructions for it. Linux alone says; elsewhere the answer is no."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpuinfo.read_text().split())
