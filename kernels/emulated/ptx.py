"""Read PTX, the assembly that Triton emits for NVIDIA GPUs, into a program for machine.py.

Grammar and instructions: NVIDIA, Parallel Thread Execution ISA, https://docs.nvidia.com/cuda/parallel-thread-execution
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kernels import InputError

LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
AMBIGUOUS = -1  # places
KINDS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}  # bits of a register


class Place(NamedTuple):
    """The source line that an instruction was compiled from, and the kernel's own line if that is another's."""

    file: str
    line: int
    column: int
    kernels: Place | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}"
        return f"{place}, called at {self.kernels}" if self.kernels else place


class Instruction(NamedTuple):
    """One instruction, such as `@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1 + 8]`."""

    name: str  # ld.global.v2.b32
    operands: tuple[str, ...]  # "{%r1, %r2}", "[%rd1 + 8]"
    predicate: str | None  # %p1
    negated: bool
    place: Place | None

    @property
    def parts(self) -> list[str]:
        return self.name.replace("::", ":").split(".")


class Program(NamedTuple):
    """A kernel: its parameters in order, the bits of its registers, its instructions, and where its labels stand."""

    name: str
    parameters: tuple[str, ...]
    threads: int  # of a block
    registers: dict[str, int]
    static_shared: dict[str, int]  # bytes of the shared variables whose size is known
    instructions: list[Instruction]
    labels: dict[str, int]  # AMBIGUOUS, where blocks of inline assembly have one of the same name
    local: dict[str, int]  # bytes of each thread's own variables
    constants: dict[str, bytes]  # tables in global memory, as of the digits of 2 / pi


class EmulationError(InputError):
    """A kernel does what a GPU would not forgive, or what the emulated one does not know."""


def parse(text: str) -> Program:
    """The one kernel in PTX `text`. Raises EmulationError where it has another shape than Triton's."""
    entry = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)(.*?)\{", text, re.DOTALL)
    if entry is None:
        raise EmulationError("the PTX has no .entry; expected a kernel as Triton compiles it")
    name, parameters, limits = entry.groups()
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", limits)
    if threads is None:
        raise EmulationError(f"{name}: the PTX does not say how many threads a block has (.reqntid)")
    files = {number: path.rpartition("/")[2] for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    shared = re.findall(r"\.shared\s+(?:\.align\s+\d+\s+)?\.b8\s+([\w$]+)\[(\d+)\]", text)
    body = _body(text, entry.end())
    local = re.findall(r"\.local\s+(?:\.align\s+\d+\s+)?\.b8\s+([\w$]+)\[(\d+)\]", body)
    tables = re.findall(r"\.global\s+(?:\.align\s+\d+\s+)?\.b8\s+([\w$]+)\[\d+\]\s*=\s*\{([\d,\s]*)\}", text)
    registers, instructions, labels = {}, [], {}
    places: dict[tuple[str, ...], Place] = {}
    place, statement, inline = None, "", False
    for line in body.splitlines():
        line, _, comment = line.partition("//")
        line = line.strip()
        if comment.endswith(" inline asm"):
            inline = comment.strip().startswith("begin")
        if location := LOCATION.match(line):
            at, outer = location.groups()[:3], location.groups()[3:]
            if (
                at[1] != "0" and not inline
            ):  # in line 0 the compiler knows none; inside, it counts the lines of the text
                caller = places.get(outer)
                kernels = caller and (caller.kernels or caller)
                places[at] = place = Place(files.get(at[0], at[0]), int(at[1]), int(at[2]), kernels)
        elif label := re.match(r"([\w$.]+):$", line):
            labels[label[1]] = AMBIGUOUS if label[1] in labels else len(instructions)
        else:
            *complete, statement = (statement + " " + line).split(";")
            for each in complete:
                _statement(each.strip(" \t{}"), each.strip(), place, registers, instructions)
    sizes = {variable: int(size) for variable, size in shared}
    found = re.findall(r"\.param\s+(\.\w+)[^,]*?([\w$]+)(\[\d+\])?\s*(?:,|$)", parameters)
    if any(array for _, _, array in found):
        raise EmulationError(f"{name}: takes a parameter in memory (a tensor descriptor), which is not emulated")
    count = 1
    for size in threads.groups():
        count *= int(size or 1)
    names = tuple(parameter for _, parameter, _ in found)
    own = {variable: int(size) for variable, size in local}
    constants = {table: bytes(int(byte) for byte in values.split(",")) for table, values in tables}
    return Program(name, names, count, registers, sizes, instructions, labels, own, constants)


def _body(text: str, start: int) -> str:
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    raise EmulationError("the PTX ends inside a kernel")


def _statement(
    bare: str, text: str, place: Place | None, registers: dict[str, int], instructions: list[Instruction]
) -> None:
    if declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", bare, re.DOTALL):
        bits = KINDS.get("b" + declared[1][1:] if declared[1] != "pred" else "pred")
        if bits is None:
            raise EmulationError(f"the emulated GPU does not know registers of type .{declared[1]}")
        for name in declared[2].split(","):
            prefix, _, count = name.strip().partition("<")
            names = [f"{prefix}{i}" for i in range(int(count.rstrip(">")))] if count else [prefix]
            registers |= dict.fromkeys(names, bits)
        return
    if not bare or bare.startswith("."):
        return
    # Braces around inline assembly open a scope; those of a vector stand after the instruction's name.
    text = text.lstrip("{} \t\n")
    match = re.match(r"(?:@(!?)\s*([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text, re.DOTALL)
    if match is None:
        raise EmulationError(f"can't read the PTX statement '{text}'")
    negated, predicate, name, operands = match.groups()
    instructions.append(Instruction(name, tuple(split(operands)), predicate, negated == "!", place))


def split(text: str) -> list[str]:
    """The operands of a list, where {a, b} and [a, b] each are one: "%r1, {%r2, %r3}" -> ["%r1", "{%r2, %r3}"]."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
