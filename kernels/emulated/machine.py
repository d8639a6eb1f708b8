"""A machine that runs PTX: blocks side by side, all threads of them in lockstep, as NumPy arrays.

It computes what a GPU computes and refuses what a GPU would not forgive. It is no measure of time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from kernels.emulated.accesses import access, space_of, width_of
from kernels.emulated.arithmetic import operation
from kernels.emulated.blocks import Blocks
from kernels.emulated.carries import carrying
from kernels.emulated.counts import Counts
from kernels.emulated.matrix_unit import matrix_product
from kernels.emulated.memory import GlobalMemory, Incomplete, Violation
from kernels.emulated.operands import Operands, Read, Step
from kernels.emulated.ptx import AMBIGUOUS, EmulationError, Instruction, Program
from kernels.emulated.registers import DTYPES, PAIRS, Operation, pack, unpack
from kernels.emulated.rounding import Array
from kernels.emulated.warps import together

SIDE_BY_SIDE = 16384  # threads: their registers fit the cache, and NumPy's own time a call is small beside them
PATIENCE = 10**6  # times that one stretch of code may run in a launch, before it counts as waiting for ever


class Stretch(NamedTuple):
    """Instructions that run one after another, and what follows: where the threads of a mask go on."""

    instructions: list[Instruction]
    steps: list[Step]
    leave: Callable[[Blocks, Array | None], list[tuple[int, Array | None]]]


class Machine:
    """One kernel, decoded once, ready to run any of its blocks."""

    def __init__(self, program: Program, shared: int) -> None:
        self.program = program
        self.operands = Operands(program)
        widths = [width for i in program.instructions if space_of(i) == "shared" and (width := width_of(i))]
        fixed = sum(-(-size // 16) * 16 for size in program.static_shared.values())
        self.shared = (max(shared, fixed), min([16, *widths]))
        names = [i.parts for i in program.instructions]
        self.synchronises = any(parts[0] in ("atom", "red") for parts in names)
        self.waits = any("cas" in parts for parts in names)  # for other blocks
        self.loaded, self.stored = self._pointers()
        self.stretches = self._stretches()

    def run(
        self, grid: tuple[int, int, int], arguments: Sequence[int], memory: GlobalMemory, counts: Counts | None = None,
        only: Sequence[int] | None = None, workers: ThreadPoolExecutor | None = None,
    ) -> None:  # fmt: skip
        """Run the blocks of a grid, or `only` some of them. Raises EmulationError at what a GPU would not forgive."""
        memory.add_constants(self.program.constants)
        ids = np.arange(grid[0] * grid[1] * grid[2]) if only is None else np.asarray(only)
        given = dict(enumerate(arguments))
        memory.watch(*([given.get(i, 0) for i in parameters] for parameters in (self.loaded, self.stored)))
        each = 1 if self.waits else max(1, SIDE_BY_SIDE // self.program.threads)
        parts = [ids[start : start + each] for start in range(0, len(ids), each)]

        def run_part(part: Array) -> None:
            state = self.program, part, grid, arguments, memory, self.shared, self.synchronises, counts
            with np.errstate(all="ignore"):
                self._run(Blocks(*state))

        if workers is None or self.synchronises or counts is not None or len(parts) == 1:
            for part in parts:
                run_part(part)
        else:
            list(workers.map(run_part, parts))

    def _run(self, blocks: Blocks) -> None:
        """Follow the threads. Those at the lowest address go first, so that they meet again after a branch.

        Threads that come to a barrier or a shuffle before others of their group wait there for these.
        """
        going: dict[int, Array | None] = {0: None}
        waiting: dict[int, Array | None] = {}
        patience = PATIENCE
        while going or waiting:
            nobody_comes = not going
            if nobody_comes:
                going, waiting = waiting, {}
            start = min(going)
            mask = going.pop(start)
            patience -= 1
            if not patience:
                raise EmulationError(f"{self.program.name}: waits for ever, or runs a loop a million times")
            stretch = self.stretches[start]
            at = -1
            try:
                for at, step in enumerate(stretch.steps):  # noqa: B007
                    step(blocks, mask)
            except Violation as violation:
                if nobody_comes or not isinstance(violation, Incomplete):
                    raise self._error(stretch.instructions[at], blocks, violation) from None
                if blocks.counts:
                    blocks.counts.instructions(stretch.instructions[:at], blocks, mask)
                here = start + at
                self.stretches[here] = Stretch(stretch.instructions[at:], stretch.steps[at:], stretch.leave)
                if here in waiting:
                    _join(waiting, here, mask)
                    _join(going, here, waiting.pop(here))  # they may be complete now
                else:
                    waiting[here] = mask
                continue
            if blocks.counts:
                blocks.counts.instructions(stretch.instructions, blocks, mask)
            for target, there in stretch.leave(blocks, mask):
                _join(going, target, there)

    def _error(self, instruction: Instruction, blocks: Blocks, violation: Violation) -> EmulationError:
        row, thread = violation.at or (0, 0)
        block = int(blocks.ids[row, 0])
        x, y = (int(blocks.special[f"%nctaid.{axis}"].flat[0]) for axis in "xy")
        where = f"block ({block % x}, {block // x % y}, {block // (x * y)}), thread {thread}"
        return EmulationError(f"{self._place(instruction)}: {where}: {violation}")

    def _place(self, instruction: Instruction) -> str:
        return f"{self.program.name} at {instruction.place or 'an unknown line'} ({instruction.name})"

    def _pointers(self) -> tuple[list[int], list[int]]:
        """The numbers of the parameters whose memory may be loaded, and of those whose memory may be stored to."""
        reached = {name: {number} for number, name in enumerate(self.program.parameters)}  # and by which registers
        loaded, stored, before = set(), set(), -1
        while before != (before := sum(map(len, reached.values()))):  # again, for what loops carry
            for instruction in self.program.instructions:
                first, *rest = instruction.parts
                names = [re.findall(r"%?[A-Za-z_$][\w$.]*", operand) for operand in instruction.operands]
                sources: set[int] = set().union(*(reached.get(name, set()) for part in names[1:] for name in part))
                if (first in ("ld", "ldu") and rest[0] != "param") or instruction.name.startswith("cp.async.c"):
                    loaded |= sources
                    continue
                if first == "st":
                    stored |= set().union(*(reached.get(name, set()) for name in names[0]))
                    continue
                for name in names[0] if names else []:
                    reached[name] = reached.get(name, set()) | sources
        return sorted(loaded), sorted(stored)

    def _stretches(self) -> dict[int, Stretch]:
        code, labels = self.program.instructions, self.program.labels
        leaders = {0, *labels.values()} - {AMBIGUOUS}
        leaders |= {at + 1 for at, instruction in enumerate(code) if instruction.parts[0] in ("bra", "ret", "exit")}
        found = {}
        for start in sorted(leaders):
            end = start
            while end < len(code) and code[end].parts[0] not in ("bra", "ret", "exit"):
                end += 1
                if end in leaders:
                    break
            inside = code[start:end]
            last = code[end] if end < len(code) and (end == start or end not in leaders) else None
            if last is not None and last.parts[0] not in ("bra", "ret", "exit"):
                last = None
            found[start] = Stretch(inside, [self._step(i) for i in inside], self._leave(last, end))
        return found

    def _leave(self, last: Instruction | None, end: int) -> Callable:
        """What follows a stretch that ends with the branch `last`, or runs into the one at `end`."""
        beyond = len(self.program.instructions)
        if last is None:
            return lambda blocks, mask: [(end, mask)] if end < beyond else []
        target = [self.program.labels.get(last.operands[0], AMBIGUOUS)] if last.parts[0] == "bra" else []
        if AMBIGUOUS in target:
            raise EmulationError(f"{self._place(last)}: label {last.operands[0]} stands nowhere or at several places")
        if last.predicate is None:
            return lambda blocks, mask: [(at, mask) for at in target]
        read = self.operands.read(last.predicate, DTYPES["pred"])

        def branch(blocks: Blocks, mask: Array | None) -> list[tuple[int, Array | None]]:
            goes = read(blocks) ^ last.negated
            stays = ~goes
            if mask is not None:
                goes, stays = goes & mask, stays & mask
            ways = []
            if goes.any():
                ways += [(at, goes if stays.any() else mask) for at in target]
            if stays.any():
                ways.append((end + 1, stays if goes.any() else mask))
            return ways

        return branch

    def _step(self, instruction: Instruction) -> Step:
        try:
            step = self._decode(instruction)
        except EmulationError as error:
            raise EmulationError(f"{self._place(instruction)}: the emulated GPU does not know {error}") from None
        if step is None:
            raise EmulationError(f"{self._place(instruction)}: the emulated GPU does not know this instruction")
        if instruction.predicate is None:
            return step
        read = self.operands.read(instruction.predicate, DTYPES["pred"])
        negated = instruction.negated

        def predicated(blocks: Blocks, mask: Array | None) -> None:
            chosen = read(blocks)
            if negated:
                chosen = ~chosen
            if chosen.all():
                step(blocks, mask)
            else:
                chosen = chosen if mask is None else chosen & mask
                if chosen.any():
                    step(blocks, chosen)

        return predicated

    def _decode(self, instruction: Instruction) -> Step | None:
        name = instruction.parts[0]
        if name in ("ld", "st", "ldu", "cp", "ldmatrix", "stmatrix", "atom", "red"):
            return access(instruction, self.operands)
        if name == "mma":
            return matrix_product(instruction, self.operands)
        if name == "mov" or instruction.name.startswith("cvta"):
            return self._move(instruction)
        if name == "selp":
            return self._select(instruction)
        for known in (together, carrying):
            if step := known(instruction, self.operands):
                return step
        return self._compute(instruction)

    def _compute(self, instruction: Instruction) -> Step | None:
        target, *sources = instruction.operands or ("",)
        known = operation(instruction.parts, len(sources))
        if known is None:
            return None
        reads = [self.operands.read(source, dtype) for source, dtype in zip(sources, known.sources, strict=True)]
        pairs = known.result == DTYPES["pred"] and instruction.parts[-1] in PAIRS
        if pairs != ("|" in target):
            return None
        if pairs:
            return self._compare_pairs(target, known, reads)
        write, compute = self.operands.write(target, known.result), known.compute
        if len(reads) == 1:
            [first] = reads
            return lambda blocks, mask: write(blocks, compute(first(blocks)), mask)
        if len(reads) == 2:
            first, second = reads
            return lambda blocks, mask: write(blocks, compute(first(blocks), second(blocks)), mask)
        return lambda blocks, mask: write(blocks, compute(*[read(blocks) for read in reads]), mask)

    def _compare_pairs(self, targets: str, known: Operation, reads: list[Read]) -> Step:
        """setp p|q, of packed numbers."""
        writes = [self.operands.write(target, known.result) for target in targets.split("|")]

        def compare(blocks: Blocks, mask: Array | None) -> None:
            truth = known.compute(*[read(blocks) for read in reads])
            for half, write in enumerate(writes):
                write(blocks, truth[..., half], mask)

        return compare

    def _move(self, instruction: Instruction) -> Step | None:
        """mov: a register, or several smaller ones that are packed into it or taken out of it."""
        if instruction.parts[-1] not in DTYPES:
            return None
        target, source = instruction.operands
        dtype = DTYPES[instruction.parts[-1]]
        if target.startswith("{"):
            names = self.operands.vector(target)
            part = np.dtype(f"u{dtype.itemsize // len(names)}")
            read, writes = self.operands.read(source, dtype), [self.operands.write(name, part) for name in names]

            def take_apart(blocks: Blocks, mask: Array | None) -> None:
                values = unpack(read(blocks), part)
                for number, write in enumerate(writes):
                    write(blocks, values[..., number], mask)

            return take_apart
        write = self.operands.write(target, dtype)
        if source.startswith("{"):
            names = self.operands.vector(source)
            part = np.dtype(f"u{dtype.itemsize // len(names)}")
            reads = [self.operands.read(name, part) for name in names]

            def put_together(blocks: Blocks, mask: Array | None) -> None:
                values = np.broadcast_arrays(*(each(blocks) for each in reads))
                write(blocks, pack(np.stack(values, axis=-1), dtype), mask)

            return put_together
        read = self.operands.read(source, dtype)
        return lambda blocks, mask: write(blocks, read(blocks), mask)

    def _select(self, instruction: Instruction) -> Step:
        dtype = DTYPES[instruction.parts[-1]]
        target, yes, no, chooser = instruction.operands
        write = self.operands.write(target, dtype)
        read_yes, read_no = self.operands.read(yes, dtype), self.operands.read(no, dtype)
        choose = self.operands.read(chooser, DTYPES["pred"])
        return lambda blocks, mask: write(blocks, np.where(choose(blocks), read_yes(blocks), read_no(blocks)), mask)


def _join(threads: dict[int, Array | None], at: int, mask: Array | None) -> None:
    """Let the threads of the mask go on at an address, together with those that already do."""
    mine = threads.get(at, mask)
    both = None if mine is None or mask is None else mine | mask
    threads[at] = None if both is None or both.all() else both
