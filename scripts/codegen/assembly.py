"""What a kernel does, read from Triton's intermediate code (TTIR) and from PTX, cubins and AMD's assembly."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from scripts.codegen.offline_gpu import Launch


class Access(NamedTuple):
    """A load or a store in Triton's intermediate code."""

    store: bool
    pointer: str  # the kernel's argument
    bits: int  # of an element
    shape: tuple[int, int]  # of the tile
    row_steps: int  # how often its program runs it, in loops to a number given at launch
    col_steps: int  # and in loops to a number known to the compiler
    position: tuple[int, int] | None  # line and column of the source

    def size(self) -> int:
        """Elements of the tile."""
        return self.shape[0] * self.shape[1]


def accesses_of(launch: Launch) -> list[Access]:
    """The loads and stores of a kernel, from its intermediate code.

    Raises ValueError at what can't be counted, and where a tensor is read back with no barrier after it was stored to.
    """
    lines = launch.compiled.asm["ttir"].splitlines()
    source = launch.compiled.src
    known = {name for name in launch.args if source.signature.get(name, "constexpr") == "constexpr"}
    known |= set(source.constants)  # where Triton 3.2 has the arguments that are 1
    runtime = [name for name in source.fn.arg_names if name not in known]
    positions = dict(re.match(r"(#loc\d*) = (.*)", line).groups() for line in lines if line.startswith("#loc"))
    arguments, origin, constants, loops, found, stored = {}, {}, {}, [], [], set()

    def position(text: str) -> tuple[int, int] | None:
        if place := re.search(r'\.py":(\d+):(\d+)', text):
            return int(place[1]), int(place[2])
        inner = re.search(r"#loc\d*", text)
        return position(positions[inner[0]]) if inner and inner[0] in positions else None

    def value(name: str) -> tuple[int, bool]:
        """A bound of a loop, and whether it is known only at launch."""
        if name in arguments:
            return int(launch.args[arguments[name]]), True
        if name in constants:
            return constants[name], False
        raise ValueError(f"can't count a loop to {name}, which the kernel computes")

    for line in map(str.strip, lines):
        if unknown := re.search(r"\b(tt\.atomic\w*|tt\.\w*descriptor\w*|tt\.call|scf\.while|scf\.if|cf\.\w+)", line):
            raise ValueError(f"can't count {unknown[0]}")
        if line.startswith("}"):
            loops.pop()
        if line.startswith("tt.func"):
            names = re.findall(r"(%\w+): ", line)
            arguments = dict(zip(names, runtime, strict=True))
        elif result := re.match(r"(%\w+)(?::\d+)? = (.*)", line):
            name, operation = result.groups()
            if constant := re.match(r"arith\.constant (-?\d+) : i\d+", operation):
                constants[name] = int(constant[1])
            elif operand := re.search(r"%\w+", operation):
                origin[name] = operand[0]
        if loop := re.search(r"scf\.for %\w+ = (%\w+) to (%\w+) step (%\w+)", line):
            (first, _), (last, late), (step, _) = map(value, loop.groups())
            origin |= dict(re.findall(r"(%\w+) = (%\w+)", line.partition("iter_args")[2]))
            trips = -(-(last - first) // step)
            loops.append((trips, 1) if late else (1, trips))
        elif line.endswith("{"):
            loops.append((1, 1))
        if re.search(r"\b(gpu|ttg|tt)\.\w*barrier\b", line):
            stored.clear()
        if access := re.search(r"tt\.(load|store) (%\w+).*: (?:tensor<((?:\d+x)+))?!tt\.ptr<[a-z]+(\d+)", line):
            pointer = access[2]
            while pointer not in arguments:
                pointer = origin[pointer]
            shape = tuple(int(size) for size in re.findall(r"\d+", access[3] or "1x1x"))
            if len(shape) != 2:
                raise ValueError(f"can't count an access of shape {shape}; expected rows and columns")
            rows, cols = 1, 1
            for row_trips, col_trips in loops:
                rows, cols = rows * row_trips, cols * col_trips
            place = position(line.rpartition("loc(")[2])
            is_store = access[1] == "store"
            if is_store:
                stored.add(arguments[pointer])
            elif arguments[pointer] in stored:
                raise ValueError(f"{arguments[pointer]} is read back with no barrier after it was stored to")
            found.append(Access(is_store, arguments[pointer], int(access[4]), shape, rows, cols, place))
    return found


def instructions_of(assembly: str) -> Iterator[tuple[bool, int, tuple[int, int] | None]]:
    """Of each access to global memory in PTX or AMD's assembly: whether it stores, its bits, its source position."""
    ptx = re.compile(r"\b(ld|st)\.\S*global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s")
    ptx_copy = re.compile(r"cp\.async\.c[ag]\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(\w+)")
    amd = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(?:lds_)?[us]?(byte|short|dword)(?:x(\d))?")
    sizes = {"byte": 8, "short": 16, "dword": 32}
    place, left = None, None  # left: positions to come, where that is limited
    for line in assembly.splitlines():
        if "inline asm" in line:  # the lines of one piece of it get a position each, counted up from the true one
            left = 1 if "begin" in line else None
        elif location := re.match(r"\s*\.loc\s+\d+ (\d+) (\d+)", line):
            if left != 0:
                place = (int(location[1]), int(location[2])) if location[1] != "0" else None
                left = left and left - 1
        elif "cp.async.bulk" in line:
            raise ValueError("can't tell the width of cp.async.bulk")
        elif copy := ptx_copy.search(line):
            yield False, 8 * int(copy[1], 0), place
        elif access := ptx.search(line):
            yield access[1] == "st", int(access[2] or 1) * int(access[3]), place
        elif access := amd.search(line):
            yield access[1] == "store", sizes[access[2]] * int(access[3] or 1), place


def registers_of(compiled: Any) -> tuple[int, str]:
    """Registers a thread, and in words what was spilled."""
    if "amdgcn" in compiled.asm:
        keys = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        found = [int(re.search(rf"\.{key}: +(\d+)", compiled.asm["amdgcn"])[1]) for key in keys]
        words = "spills {} vector and {} scalar registers, {} bytes of scratch".format(*found[1:])
        return found[0], words if found[1] or found[3] else ""  # scalar ones alone go to vector ones, not to memory
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def output_of(tool: str, *options: str) -> str:
            command = [str(tools / tool), *options, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", output_of("cuobjdump", "-res-usage")).groups()
        if stack == "0":  # nothing lies in local memory without a frame, and nvdisasm takes a second
            return int(registers), ""
        code = output_of("nvdisasm", "-c")
    stores, loads = (len(re.findall(rf"\b{name}\b", code)) for name in ("STL", "LDL"))
    return int(registers), f"spills {stack} bytes, {stores} stores and {loads} loads"
