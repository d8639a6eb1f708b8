"""Commands and functions in processes of their own, which a test may kill, limit or connect.

All are forked from one process that knows torch.
"""

import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
from pathlib import Path

import torch

import train
from model.cli import run
from model.training.distributed import process_group

# The server that forks imports this file by name; without its path it can't, and every child would import torch again.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
CONTEXT = multiprocessing.get_context("forkserver")
# The imports of train.py, and of PyTorch's first optimizer, take seconds, so they happen before the fork.
PRELOADED = ["tests.model.training.runs", "pytest", "torch._dynamo", "model.checkpoint.load", "model.generation"]
PRELOADED += ["matplotlib.figure", "matplotlib.backends.backend_agg"]
PRELOADED += [f"model.{name}" for name in ("tokenizer", "training.curves", "training.prepare", "training.state")]
CONTEXT.set_forkserver_preload(PRELOADED)


def start(folder, arguments, log, environment=(), largest_file=None, dies_at=None, main=train.main):
    """Begin a run in `folder` with its output in the file `log`; returns the process."""
    what = (folder, arguments, log, environment, largest_file, dies_at, main)
    process = CONTEXT.Process(target=_run, args=what, daemon=True)  # ends with a test that fails while it runs
    process.start()
    return process


def finish(folder, arguments, log, **options):
    """The exit code of a run (negative: the signal that killed it), and its last line."""
    process = start(folder, arguments, log, **options)
    process.join(300)
    return process.exitcode, (Path(log).read_text().splitlines() or [""])[-1]


def places(n):
    """The environments of n processes that will find each other, as torchrun sets them.

    LOCAL_RANK is left out: without a torchrun that ends the others after an error, none has to wait for that.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n)}
    return [{**common, "RANK": str(i)} for i in range(n)]


def start_connected(folder, arguments, n, **options):
    """Begin n processes of one run; their outputs are in 0.log, 1.log, ..."""
    return [start(folder, arguments, f"{folder}/{i}.log", place, **options) for i, place in enumerate(places(n))]


def finish_connected(folder, arguments, n, **options):
    """The exit codes of the processes of one run."""
    processes = start_connected(folder, arguments, n, **options)
    for process in processes:
        process.join(120)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in processes]


def results(folder, function, n, *arguments):
    """What a function returns in each of n connected processes."""
    processes = []
    for i, place in enumerate(places(n)):
        what = (folder, function, arguments, folder / f"{i}.log", place, folder / f"{i}.pickle")
        processes.append(CONTEXT.Process(target=_call, args=what, daemon=True))
        processes[-1].start()
    for i, process in enumerate(processes):
        process.join(120)
        assert process.exitcode == 0, (folder / f"{i}.log").read_text()
    return [pickle.loads((folder / f"{i}.pickle").read_bytes()) for i in range(n)]


def _call(folder, function, arguments, log, environment, path):
    _begin(folder, log, environment)
    with process_group(torch.device("cpu")):
        path.write_bytes(pickle.dumps(function(*arguments)))


def _begin(folder, log, environment):
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.update(environment)
    torch.set_num_threads(1)


def _run(folder, arguments, log, environment, largest_file, dies_at, main):
    _begin(folder, log, environment)
    if largest_file:  # in place of a full disk: writing on ends in an OSError as it does there
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if dies_at:
        _die_at(dies_at)
    sys.argv = [f"{main.__module__}.py", *map(str, arguments)]
    run(main)


def _die_at(call):
    """Kill this process when it flushes, renames or removes a file for the time `call`."""
    calls = []

    def counted(function):
        def counting(*arguments, **keywords):
            calls.append(function)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return counting

    for name in ("fsync", "replace", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    if sys.version_info < (3, 11):  # where Path has its own references to them
        for name in ("replace", "rename", "unlink"):
            setattr(Path, name, counted(getattr(Path, name)))
