"""The part that all commands share: a parser with one-line errors, messages, signals, the choice of device and dtype.

It imports no torch, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import errno
import io
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from kernels import USAGE, InputError
from kernels.emulated.gpus import DEFAULT, GPUS, chosen_gpu

if TYPE_CHECKING:
    import torch

    from kernels import Backend


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
ALLOCATION = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)  # in PyTorch's messages, whatever the device
LARGEST = 2**31 - 1  # of integer flags: no count is larger, and torch's own integers end at 2^63


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or action.default is False or action.default == ""
        return action.help if nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse whose --help shows the whole description and the defaults, and whose errors are one line."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=_Help)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def add_backend_arguments(self, dtypes: list[str]) -> None:
        """Add --norm, --device, --dtype and --emulate."""
        self.add_argument("--norm", default="auto", help=f"what computes RMSNorm: {USAGE}")
        self.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
        self.add_argument("--dtype", default="auto", choices=["auto", *dtypes], help="precision of the computation")
        self.add_emulation()

    def add_emulation(self) -> None:
        """Add --emulate, which emulate_as_asked does."""
        examples = ", ".join(f"{name} ({gpu.example})" for name, gpu in GPUS.items())
        about = (
            f"compile Triton's kernels for this GPU and run them on CPU tensors, on an emulated one: {examples}; "
            f"none does that where there is no GPU, for {DEFAULT}"
        )
        self.add_argument("--emulate", default="none", choices=["none", *GPUS], metavar="GPU", help=about)

    def refuse_emulation(self) -> None:
        """Add an --emulate that is refused, to a command that measures times."""
        self.add_argument("--emulate", type=_no_stopwatch, help=argparse.SUPPRESS)


def positive(kind: type) -> Callable[[str], int | float]:
    """An argparse type: a positive, finite number; an integer is below 2^31."""
    return _number(kind, "positive", lambda number: 0 < number < math.inf)


def not_negative(kind: type) -> Callable[[str], int | float]:
    """An argparse type: 0 or a positive, finite number; an integer is below 2^31."""
    return _number(kind, "non-negative", lambda number: 0 <= number < math.inf)


def seed(text: str) -> int:
    """An argparse type: an integer from 0 to 2^63 - 1, which every random number generator takes."""
    return int(_number(int, "non-negative", lambda number: number >= 0, largest=2**63 - 1)(text))


def names_in(text: str) -> list[str]:
    """Comma-separated names of a flag, without empty ones."""
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers(text: str) -> list[int]:
    """An argparse type: comma-separated positive integers, sorted and each once."""
    return sorted({int(positive(int)(part)) for part in text.split(",")})


def png(text: str) -> Path:
    """An argparse type: the path of a PNG file."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"'{text}' does not end in .png")
    return Path(text)


def _no_stopwatch(name: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        f"times on an emulated {name} say nothing about a real one; scripts/check_codegen.py counts what kernels do"
    )


def _number(
    kind: type, sign: str, fits: Callable[[int | float], bool], largest: int = LARGEST
) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not fits(number):
            raise argparse.ArgumentTypeError(f"'{text}' is not a {sign} {'integer' if kind is int else 'number'}")
        if kind is int and number > largest:
            raise argparse.ArgumentTypeError(f"'{text}' is above {largest}; use a smaller number")
        return number

    return parse


def run(main: Callable[[], object]) -> None:
    """Run a command. Bad input, a full disk and too little memory end in one line and exit code 2; Ctrl-C in 130."""
    _prepare_streams()
    sys.excepthook = _quiet_interrupt  # for the imports that follow a command's arguments, outside of any try
    try:
        main()
        sys.stdout.flush()
    except InputError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _interrupted()
    except BrokenPipeError:  # the reader of our output has gone, as in `generate.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at exit
        sys.exit(141)
    except OSError as error:
        if error.errno == errno.EBADF and error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _fail(
                "the output cannot be written: stdout is open for reading alone; expected a file or a pipe to write to"
            )
        if error.errno not in FULL:
            raise
        _fail(f"{error.filename or 'the output'} cannot be written ({error.strerror}); free some space and try again")
    except (MemoryError, RuntimeError) as error:
        tried = ALLOCATION.search(str(error))
        if not (tried or isinstance(error, MemoryError)):
            raise
        more = f" ({tried[1]} more were needed)" if tried else ""
        _fail(f"out of memory{more}; make the model, the batch or the text smaller")


class _Messages(io.FileIO):
    """stderr: what cannot be written there, since its disk is full or its reader has gone, is dropped."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(content)


def _prepare_streams() -> None:
    """Open the standard streams that our caller has closed, and let no message and no character end a command.

    Output is UTF-8 unless it goes to a terminal or PYTHONIOENCODING names another encoding.
    """
    chosen = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # or the next file to be opened gets this number, and what libraries write to it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        binary = getattr(stream, "buffer", None)
        if number == 2 and isinstance(getattr(binary, "raw", binary), io.FileIO):  # raw itself under python -u
            messages = io.BufferedWriter(_Messages(stream.fileno(), "w", closefd=False))
            stream = sys.stderr = io.TextIOWrapper(messages, stream.encoding, stream.errors, line_buffering=True)
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:  # a notebook puts something else there
            encoding = None if chosen or stream.isatty() else "utf-8"
            errors = "replace" if stream.errors in ("strict", "surrogateescape") else stream.errors
            stream.reconfigure(encoding=encoding, errors=errors if number else "surrogateescape")


def _quiet_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _interrupted()
    sys.__excepthook__(kind, error, trace)


def _interrupted() -> NoReturn:
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def _fail(message: str) -> NoReturn:
    text = " ".join(message.split())
    if os.environ.get("LOCAL_RANK", "0") != "0":  # torchrun ends this process meanwhile, if the first one failed too
        time.sleep(5)
    process = f" in process {rank()}" if rank() else ""
    print(f"error{process}: {text if len(text) <= 1000 else text[:1000] + ' ...'}", file=sys.stderr)
    sys.exit(2)


def rank() -> int:
    """Number of this process among those that torchrun has started; 0 for a single process."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Number of processes that torchrun has started; 1 for a single process."""
    return int(os.environ.get("WORLD_SIZE", 1))


def say(text: str) -> None:
    """Write one line for the person at the terminal: on stderr, above any progress bar, from the first process only."""
    from tqdm import tqdm

    if rank() == 0:
        tqdm.write(text, file=sys.stderr)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM for the block to act on. One more than a second after the first acts as usual."""
    caught: list[int] = []
    times: list[float] = []

    def catch(number: int, frame: object) -> None:
        # torchrun passes on a Ctrl-C that the terminal has sent already: two signals for one key press.
        if times and time.monotonic() - times[0] > 1:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        caught.append(number)
        times.append(time.monotonic())

    before: dict[int, Any] = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_folder(flag: str, folder: Path) -> None:
    """Make the folder that a flag names, before the work that fills it. Raises InputError where it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{flag} {folder} cannot be written ({error.strerror}); name a writable folder") from error


def emulate_as_asked(args: argparse.Namespace) -> None:
    """Emulate the GPU that --emulate names, and say so. Call it before anything imports Triton in its interpreter.

    Raises InputError where that can't be.
    """
    if args.emulate == "none":
        return
    if ":" in getattr(args, "norm", "") and getattr(args, "compile", False):
        raise InputError(
            f"--emulate {args.emulate} and --compile: PyTorch would compile {args.norm} for the CPU, where a Triton "
            "kernel has no compiler; leave one of the two out"
        )
    from kernels.emulated import emulate

    new = chosen_gpu() is None
    emulate(args.emulate)
    choose_device(args.device)  # refuses a GPU
    if new:
        say(f"Triton's kernels are compiled for {args.emulate} and run on an emulated one; their times say nothing")


def check_compilable(name: str, norm: Backend, device: torch.device) -> None:
    """Raise InputError where --compile would fail: without a C++ compiler, or in a Triton norm without a GPU."""
    from kernels import load_backend
    from kernels.emulated import runs_emulated

    load_backend("compile", device)  # raises InputError where Inductor finds no C++ compiler
    if ":" in name and runs_emulated(norm):
        raise InputError(
            f"--compile: PyTorch would compile {name} for the CPU, where a Triton kernel has no compiler; "
            "leave --compile out"
        )


def choose_device(name: str) -> torch.device:
    """Device of that name. Raises InputError where this machine has none, or where --emulate has put one on its CPU."""
    import torch

    if chosen_gpu():
        if name not in ("auto", "cpu"):
            raise InputError(f"--device {name}: an emulated GPU takes CPU tensors; leave --device or --emulate out")
        return torch.device("cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type != "meta" and not (device.type == "cpu" and device.index):
            return device
        reason = "its tensors hold no data" if device.type == "meta" else "the CPU is one device"
    except (RuntimeError, AssertionError, ImportError) as error:  # AssertionError: a torch built without CUDA
        reason = str(error).split("\n")[0].split(". ")[0].rstrip(".")
    raise InputError(f"--device {name} cannot be used here ({reason}); use --device cpu, or auto")


def choose_autocast_dtype(name: str, device: torch.device) -> torch.dtype:
    """Dtype of the matrix products; auto is bfloat16 where the device computes it natively, else float32."""
    import torch

    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = _cpu_computes_bfloat16()
    if name == "auto":
        return torch.bfloat16 if native else torch.float32
    if name == "bfloat16" and device.type == "cuda" and not native:
        raise InputError(f"--dtype bfloat16: {torch.cuda.get_device_name(device)} lacks it; use --dtype float32")
    return getattr(torch, name)


def _cpu_computes_bfloat16() -> bool:
    """True if the CPU has bfloat16 instructions. Read from /proc/cpuinfo, so False where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpuinfo.read_text().split())
