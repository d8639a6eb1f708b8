"""A process apart, in which a norm may do what it likes: end in a segmentation fault, hang, or patch what it finds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from typing import Any

# A fork of this process would take along what CUDA and Triton have set up. Its server is a clean one, imports what
# takes seconds once, and forks from then on: two processes, and a third where one dies.
CONTEXT = get_context("forkserver") if "forkserver" in get_all_start_methods() else get_context("spawn")
LIMIT_S = 120  # for one step of a call; a kernel that hangs never ends by itself

_to_parent: list[Connection] = []  # in the process apart: where it says what it is about to do


class Died(Exception):
    """The process apart has ended. `how` says how in words, and `doing` what it was about to do."""

    def __init__(self, how: str, doing: str) -> None:
        super().__init__(f"{how}, at {doing}" if doing else how)
        self.how, self.doing = how, doing


class Apart:
    """Call functions in a process apart. After it has died, the next call starts another one."""

    def __init__(self, notice: Callable[[str], None] = lambda doing: None, log: str = os.devnull) -> None:
        self.notice = notice  # told what is about to be done
        self.log = log  # the file where it goes what is printed there
        self.start()

    def start(self) -> None:
        self.pipe, child = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(child, self.log), daemon=True)
        self.process.start()
        child.close()
        self.unanswered = 0

    def warm_up(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin function(*arguments) while others work. Its result is dropped; the next call comes after it."""
        self.pipe.send((function, arguments))
        self.unanswered += 1

    def call(self, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> Any:
        """function(*arguments), both of them picklable. Raises Died."""
        if not self.process.is_alive():
            self.start()
        doing = ""
        try:
            self.pipe.send((function, arguments))
            while self.pipe.poll(limit_s):
                kind, value = self.pipe.recv()
                if kind == "doing":
                    doing = value
                    self.notice(doing)
                elif self.unanswered:
                    self.unanswered -= 1
                else:
                    return value
        except (EOFError, OSError):
            self.process.join()
            raise Died(_words(self.process.exitcode), doing) from None
        self.process.kill()
        self.process.join()
        raise Died(f"it did not end within {limit_s:.0f} s", doing)

    def close(self) -> None:
        """End the process, which is asked first: what is killed leaves semaphores behind."""
        self.pipe.close()
        self.process.join(5)
        self.process.kill()
        self.process.join()


def about_to(doing: str) -> None:
    """Tell the parent what comes next, in words; if this process dies of it, the parent knows its input."""
    for pipe in _to_parent:
        pipe.send(("doing", doing))


def _serve(pipe: Connection, log: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, whose end of the pipe closes
    _to_parent[:] = [pipe]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.setdefault("NORM_TEST_DEVICE", "cpu")  # the contract's checks ask for it when they are imported
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(("result", function(*arguments)))


def _words(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return "a segmentation fault" if name == "SIGSEGV" else f"the process was ended by {name}"
    return f"the process ended with exit code {code}"
