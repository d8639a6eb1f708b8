"""Read loads, stores and registers of a kernel from Triton's TTIR, from PTX, cubins and AMD's assembly."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
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
    reader = _Reader(launch)
    found, stored = [], set()
    for line in map(str.strip, launch.compiled.asm["ttir"].splitlines()):
        reader.follow(line)
        if re.search(r"\b(gpu|ttg|tt)\.\w*barrier\b", line):
            stored.clear()
        access = reader.access_in(line)
        if access is None:
            continue
        if access.store:
            stored.add(access.pointer)
        elif access.pointer in stored:
            raise ValueError(f"{access.pointer} is read back with no barrier after it was stored to")
        found.append(access)
    return found


def kind_of(name: str, shape: tuple[int, ...], width: int) -> str:
    """Of a tensor of our kernels. tile: of x's size. row: one row of it. sums: the partial sums. column: one a row."""
    if name == "partial_ptr":
        return "sums"
    if tuple(shape) == (width,):
        return "row"
    return "tile" if len(shape) == 3 and shape[-1] == width else "column"


def bytes_told(launch: Launch, accesses: list[Access], width: int, n_rows: int) -> Counter[str]:
    """Bytes of all loads and stores, loops included and columns past D not, by the kind of the tensor.

    "row once" is what is left of "row" if all programs find it in the cache but the first.
    """
    programs, columns = (*launch.grid, 1)[:2]
    told: Counter[str] = Counter()
    for access in accesses:
        kind = kind_of(access.pointer, launch.args[access.pointer].shape, width)
        covered_rows = min(programs * access.row_steps * access.shape[0], n_rows)
        covered_cols = min(columns * access.col_steps * access.shape[1], width)
        size = access.bits // 8
        if kind == "tile":
            told[kind] += size * covered_rows * covered_cols
        elif kind == "column":
            told[kind] += size * covered_rows * columns * access.col_steps
        else:
            told[kind] += size * covered_cols * programs * access.row_steps
            told[f"{kind} once"] += size * covered_cols
    return told


class _Reader:
    """Origins of the values of a kernel's intermediate code, and the loops around the line being read."""

    def __init__(self, launch: Launch) -> None:
        source = launch.compiled.src
        constants = {name for name in launch.args if source.signature.get(name, "constexpr") == "constexpr"}
        constants |= set(source.constants)  # where Triton 3.2 has the arguments that are 1
        self.parameters = [name for name in source.fn.arg_names if name not in constants]
        self.args = launch.args
        self.positions = dict(re.findall(r"^(#loc\d*) = (.*)", launch.compiled.asm["ttir"], re.MULTILINE))
        self.arguments: dict[str, str] = {}  # a value of the code -> the kernel's name for it
        self.origin: dict[str, str] = {}  # a value -> the first operand of what computes it
        self.constants: dict[str, int] = {}
        self.loops: list[tuple[int, int]] = []  # trips to a number given at launch, and to one known to the compiler

    def follow(self, line: str) -> None:
        """Note what the line defines, and the loop that it begins or ends."""
        if unknown := re.search(r"\b(tt\.atomic\w*|tt\.\w*descriptor\w*|tt\.call|scf\.while|scf\.if|cf\.\w+)", line):
            raise ValueError(f"can't count {unknown[0]}")
        if line.startswith("}"):
            self.loops.pop()
        if line.startswith("tt.func"):
            self.arguments = dict(zip(re.findall(r"(%\w+): ", line), self.parameters, strict=True))
        elif result := re.match(r"(%\w+)(?::\d+)? = (.*)", line):
            name, operation = result.groups()
            if constant := re.match(r"arith\.constant (-?\d+) : i\d+", operation):
                self.constants[name] = int(constant[1])
            elif operand := re.search(r"%\w+", operation):
                self.origin[name] = operand[0]
        if loop := re.search(r"scf\.for %\w+ = (%\w+) to (%\w+) step (%\w+)", line):
            self.origin |= dict(re.findall(r"(%\w+) = (%\w+)", line.partition("iter_args")[2]))
            first, last, step = map(self.bound, loop.groups())
            trips = -(-(last - first) // step)
            self.loops.append((trips, 1) if loop[2] in self.arguments else (1, trips))
        elif line.endswith("{"):
            self.loops.append((1, 1))

    def bound(self, value: str) -> int:
        """A bound of a loop."""
        if value in self.arguments:
            return int(self.args[self.arguments[value]])
        if value in self.constants:
            return self.constants[value]
        raise ValueError(f"can't count a loop to {value}, which the kernel computes")

    def access_in(self, line: str) -> Access | None:
        access = re.search(r"tt\.(load|store) (%\w+).*: (?:tensor<((?:\d+x)+))?!tt\.ptr<[a-z]+(\d+)", line)
        if access is None:
            return None
        pointer = access[2]
        while pointer not in self.arguments:
            pointer = self.origin[pointer]
        shape = tuple(int(size) for size in re.findall(r"\d+", access[3] or "1x1x"))
        if len(shape) != 2:
            raise ValueError(f"can't count an access of shape {shape}; expected rows and columns")
        row_steps, col_steps = (math.prod(trips) for trips in zip(*self.loops, strict=True))
        place = self.position(line.rpartition("loc(")[2])
        return Access(access[1] == "store", self.arguments[pointer], int(access[4]), shape, row_steps, col_steps, place)

    def position(self, text: str) -> tuple[int, int] | None:
        """Line and column of the source that a location of the code stands for; a helper's own, where one is called."""
        if place := re.search(r'\.py":(\d+):(\d+)', text):
            return int(place[1]), int(place[2])
        inner = re.search(r"#loc\d*", text)
        return self.position(self.positions[inner[0]]) if inner and inner[0] in self.positions else None


def instructions_of(assembly: str) -> Iterator[tuple[bool, int, tuple[int, int] | None]]:
    """Each access to global memory in PTX or AMD's assembly: True for a store, its bits, and its source position."""
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
        found = [int(_groups(rf"\.{key}: +(\d+)", compiled.asm["amdgcn"])[0]) for key in keys]
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

        registers, stack = _groups(r"REG:(\d+) STACK:(\d+)", output_of("cuobjdump", "-res-usage"))
        if stack == "0":  # nothing lies in local memory without a frame, and nvdisasm takes a second
            return int(registers), ""
        code = output_of("nvdisasm", "-c")
    stores, loads = (len(re.findall(rf"\b{name}\b", code)) for name in ("STL", "LDL"))
    return int(registers), f"spills {stack} bytes, {stores} stores and {loads} loads"


def _groups(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"found no {pattern} in what the compiler says of a kernel")
    return found.groups()
