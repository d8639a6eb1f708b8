"""Processes connected over gloo that call functions for tests: started once, for as many calls as there are."""

from datetime import timedelta

import torch
import torch.distributed as dist

from tests.model.training.runs import CONTEXT


class Processes:
    """processes(function, *args) calls it in all of them at once, and returns what each has returned.

    A failure of the first that has one is raised here as AssertionError.
    """

    def __init__(self, n, folder, emulated=None):
        self.pipes = []
        for rank in range(n):
            ours, theirs = CONTEXT.Pipe()
            place = f"file://{folder}/store", rank, n
            CONTEXT.Process(target=_serve, args=(theirs, place, emulated), daemon=True).start()
            theirs.close()
            self.pipes.append(ours)

    def __call__(self, function, *args):
        for pipe in self.pipes:
            pipe.send((function, args))
        results, errors = zip(*(pipe.recv() for pipe in self.pipes), strict=True)
        for rank, error in enumerate(errors):
            if error:
                raise AssertionError(f"process {rank}: {error}")
        return results

    def close(self):
        for pipe in self.pipes:
            pipe.close()


def _serve(pipe, place, emulated):
    torch.set_num_threads(1)
    if emulated:
        from kernels.emulated import emulate

        emulate(emulated)
    init_method, rank, world_size = place
    limit = timedelta(seconds=60)  # for a process that waits for one that has failed
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # closed
            break
        try:
            pipe.send((function(*args), None))
        except (AssertionError, RuntimeError) as error:
            pipe.send((None, f"{error}"))
    dist.destroy_process_group()
