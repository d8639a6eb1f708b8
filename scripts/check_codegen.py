"""Compile the Triton kernels for GPUs that are not here, and check what the compiler made of them.

The launchers run as ever, on tensors without memory, and every kernel they would launch is compiled instead: same
tile, warps, stages, strides and dtypes. x has 8 x 2048 rows. Checked of each kernel, and what makes it fail:

    registers    nothing may spill to memory. That shows as a stack frame in a cubin, as scratch for AMD.
    launch       shared memory and threads must be within what a block of that GPU may have.
    width        each access to a tensor of x's size must be of 128 bits, if D * itemsize is a multiple of 16. The
                 weight and the partial sums, being one row, must reach the smaller of 128 bits and what the tile has
                 for each thread. Values that a row has one of (rstd, projection) are narrow by nature.
    race         nothing may be read back without a barrier after it was stored.
    float64      not one instruction may be in float64: the dtypes here are float32 and less.
    bytes        counted from the kernel's loads and stores before any optimisation, loops included, columns past D
                 not: moved is that over the elements of x, with the weight, which all programs share in the cache,
                 once. It must be within 1 % of the floor, which is each tensor of x's size once, and rstd, for rows
                 of up to 8192 elements; what is wider may be read twice, h in forward, h and dy in backward. Partial
                 sums of dweight, written and read back to be summed, stand apart as +sums, since they shrink as rows
                 grow; asked is moved with the weight as often as the programs load it.

Which tensor an instruction belongs to is known from the source position that it carries, and which tensor is loaded
there from Triton's intermediate code. An instruction without a position (AMD's compiler merges some) is held to the
least that any access in the kernel must reach; a tensor of x's size with no instruction of its own is a failure.

With --count the kernels run on an emulated GPU (kernels/emulated), on a few rows. The bytes of the sectors that they
move stand beside those that their text tells (scripts/codegen/counting.py says where they may differ), with
their passes over shared memory and their instructions. It is no measure of time.

Exit code 0: all of it holds. 1: something failed, as listed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels import InputError, kernel_errors
from kernels.emulated.gpus import GPUS
from kernels.form import FORMS
from model.cli import Parser, make_folder, positive, run, say, whole_numbers
from scripts.codegen.targets import CASES, N_ROWS, TARGETS, version_of

MAX_THREADS = 1024  # of a block, on all of them
MARGIN = 1.01  # times the floor
READ_ONCE = 8192  # the widest rows that every pass must read once; half of it where rows aren't aligned
PLAIN = ("bfloat16", "float16", "float32")  # the other cases share their tiles, and take a few widths only
COUNTED = ("bfloat16", "float32")  # by --count
FEW_WIDTHS = (256, 4096, 65536)
PASSES = ("forward", "add_forward", "backward", "add_backward")
WIDTHS = sorted([2**i for i in range(6, 18)] + [768, 1000, 1001, 5120, 8191, 14336, 32767, 40000])  # not all aligned


@dataclass
class Kernel:
    """One compiled kernel, and what was found in it; the defaults are those of one that could not be compiled."""

    target: str
    step: str
    case: str
    width: int
    name: str = "?"
    tile: str = "?"
    warps: int = 0
    registers: int = 0
    spill: str = ""
    shared: int = 0
    bits: int = 0  # the narrowest access to a tensor of x's size
    row_bits: int = 0  # and to the weight or the partial sums
    float64: int = 0
    floor: float = 0
    moved: float = 0
    sums: float = 0
    asked: float = 0
    faults: list[str] = field(default_factory=list)


def names_of(table: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """An argparse type: comma-separated names out of `table`."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in table:
                raise argparse.ArgumentTypeError(f"no {what} is called '{name}'; use one or more of {','.join(table)}")
        return list(dict.fromkeys(names))

    return parse


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add, few, plain = parser.add_argument, ",".join(map(str, FEW_WIDTHS)), ",".join(PLAIN)
    add("--targets", type=names_of(TARGETS, "target"), help=f"of {','.join(TARGETS)} (default: all that Triton knows)")
    add("--cases", type=names_of(CASES, "case"), help=f"dtypes and options (default: {','.join(CASES)})")
    add("--form", choices=FORMS, help="form of the norm in every case (default: llama, but gemma in the case gemma)")
    add("--passes", type=names_of(PASSES, "pass"), default=",".join(PASSES), help="what is compiled")
    add("--widths", type=whole_numbers, help=f"D (default: 64 to 131072; {few} for other cases than {plain})")
    add("--jobs", type=positive(int), default=os.cpu_count(), help="processes")
    add("--json", type=Path, help="file for all of the figures")
    add("--count", action="store_true", help="run the kernels on an emulated GPU instead, and count what they ask for")
    add("--verbose", action="store_true", help="a line for each kernel and target as well")
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

import torch
from tqdm import tqdm

from scripts.codegen import counting
from scripts.codegen.assembly import Access, accesses_of, bytes_told, instructions_of, kind_of, registers_of
from scripts.codegen.offline_gpu import Launch, launches_of


def set_cache(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def compile_and_check(target: str, case_name: str, width: int, steps: list[str], form: str | None) -> list[Kernel]:
    """All kernels of these passes; `form` is a name, or None for the case's own."""
    found, case = [], CASES[case_name]
    if form:
        case = case._replace(form=FORMS[form])
    for step in steps:
        call = {"target": target, "step": step, "case": case_name, "width": width}
        try:
            launches, floor, again = launches_of(step, target, case, width)
            kernels = [inspect(launch, floor=floor, **call) for launch in launches] or [Kernel(**call, name="nothing")]
            moved = sum(kernel.moved for kernel in kernels)
            aligned = width * getattr(torch, case.x).itemsize % 16 == 0
            most = floor if width <= (READ_ONCE if aligned else READ_ONCE // 2) else floor + again
            if not floor / MARGIN <= moved <= most * MARGIN:
                fault = f"moves {moved:.2f} bytes an element, and the floor is {floor:.2f}, the most {most:.2f}"
                kernels[-1].faults.append(fault)
        except (*kernel_errors(), subprocess.SubprocessError) as error:  # a finding about the kernel as well
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            kernels = [Kernel(**call, faults=[fault])]
        found += kernels
    return found


def inspect(launch: Launch, target: str, step: str, case: str, width: int, floor: float) -> Kernel:
    """Everything that is checked of one kernel."""
    compiled, gpu = launch.compiled, TARGETS[target]
    assembly = compiled.asm["amdgcn" if gpu.backend == "hip" else "ptx"]
    accesses = accesses_of(launch)
    kinds = {access.pointer: kind_of(access.pointer, launch.args[access.pointer].shape, width) for access in accesses}
    tile, threads = f"{launch.args['ROWS']}x{launch.args['COLS']}", compiled.metadata.num_warps * gpu.warp_size
    registers, spill = registers_of(compiled)
    faults = [spill] if spill else []
    if compiled.metadata.shared > gpu.shared:
        faults.append(f"needs {compiled.metadata.shared} bytes of shared memory, and a block may have {gpu.shared}")
    if threads > MAX_THREADS:
        faults.append(f"needs {threads} threads, and a block may have {MAX_THREADS}")

    def demanded(access: Access) -> int:
        if kinds[access.pointer] == "column" or width * access.bits % 128:
            return 0
        return 128 if kinds[access.pointer] == "tile" else min(128, access.bits * access.size() // threads)

    narrowest = {}  # by tensor
    for store, bits, place in instructions_of(assembly):
        alike = [access for access in accesses if access.store == store]
        here = [access for access in alike if access.position == place]
        least = min((demanded(access) for access in here or alike), default=0)
        name = "/".join(sorted({access.pointer for access in here})) or "?"
        if bits < least:
            where = f"line {place[0]}" if place else "merged lines"
            fault = f"{'stores' if store else 'loads'} {name} by {bits} bits ({where}), and {least} are possible"
            faults += [fault] if fault not in faults else []
        narrowest[name] = min(bits, narrowest.get(name, bits))
    for access in accesses:
        if kinds[access.pointer] == "tile" and access.pointer not in narrowest:
            faults.append(f"no instruction was found that accesses {access.pointer}")

    float64 = len(re.findall(r"\.f64\b|\bv_\w+_f64(?=[_ ])", assembly))
    if float64:
        faults.append(f"has {float64} instructions in float64")

    told = bytes_told(launch, accesses, width, N_ROWS)
    moved = told["tile"] + told["column"] + told["row once"]
    asked, sums = moved + told["row"] - told["row once"], 2 * told["sums"]
    moved, asked, sums = (total / (N_ROWS * width) for total in (moved, asked, sums))

    def least_of(*wanted: str) -> int:
        return min((bits for name, bits in narrowest.items() if kinds.get(name) in wanted), default=0)

    return Kernel(
        target, step, case, width, name=launch.name, tile=tile, warps=compiled.metadata.num_warps,
        registers=registers, spill=spill, shared=compiled.metadata.shared, bits=least_of("tile"),
        row_bits=least_of("row", "sums"), float64=float64, floor=floor, moved=moved, sums=sums, asked=asked,
        faults=faults,
    )  # fmt: skip


HEADER = (
    f"{'':<13}{'dtypes':<10}{'D':>6} {'tile':>15} {'warps':>9} {'registers':>10} {'AMD':>4} {'spill':>5} {'shared':>6}"
    f"{'bits':>5}{'row':>4}{'f64':>4}{'floor':>7}{'moved':>7}{'+sums':>6}{'asked':>7}"
)


def line_of(kernels: list[Kernel], label: str) -> str:
    """The worst of these kernels, which are those of one pass for one target or several; bytes, a target's together."""
    targets = dict.fromkeys(kernel.target for kernel in kernels)

    def each(field: str) -> list[list[Any]]:
        """For each target, of its kernels."""
        return [[getattr(kernel, field) for kernel in kernels if kernel.target == target] for target in targets]

    def words(field: str) -> str:
        return "|".join(dict.fromkeys("+".join(map(str, values)) for values in each(field)))

    def bytes_of(field: str) -> float:
        return max(map(sum, each(field)))

    def least(field: str) -> int | str:
        return min((bits for bits in chain(*each(field)) if bits), default="-")

    amd = [kernel.registers for kernel in kernels if TARGETS[kernel.target].backend == "hip"]
    nvidia = [(kernel.registers, kernel.target) for kernel in kernels if TARGETS[kernel.target].backend == "cuda"]
    registers = "{} {}".format(*max(nvidia)) if nvidia else "-"
    first = kernels[0]
    return (
        f"{label:<13}{first.case:<10}{first.width:>6} {words('tile'):>15}"
        f" {words('warps'):>9} {registers:>10} {max(amd, default='-'):>4}"
        f" {sum(bool(k.spill) for k in kernels):>5} {max(k.shared for k in kernels):>6}{least('bits'):>5}"
        f"{least('row_bits'):>4}{sum(k.float64 for k in kernels):>4}{first.floor:>7.2f}{bytes_of('moved'):>7.2f}"
        f"{bytes_of('sums'):>6.2f}{bytes_of('asked'):>7.2f}{'  FAILS' if any(k.faults for k in kernels) else ''}"
    )


def work_off(function: Callable[..., Any], tasks: list[tuple], jobs: int) -> list[Any]:
    """The results of function(*task), in any order."""
    found = []
    with (
        tempfile.TemporaryDirectory() as cache,  # Triton's own may hold kernels from before a line moved
        ProcessPoolExecutor(jobs, get_context("spawn"), set_cache, (cache,)) as pool,
    ):
        waiting = {pool.submit(function, *task): task for task in tasks}
        try:
            for done in tqdm(as_completed(waiting), total=len(tasks), unit="call", disable=None):
                found.append(done.result())
                del waiting[done]
        except BrokenProcessPool:
            suspects = "; ".join(" ".join(map(str, task[:3])) for task in list(waiting.values())[: jobs + 1])
            raise InputError(f"the compiler took its process down at one of: {suspects}; try them alone") from None
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def count_all(args: argparse.Namespace, targets: list[str], widths: list[int]) -> None:
    """Print what the kernels ask for, counted as they run; of several targets sm_90, or the first that is emulated."""
    target = "sm_90" if "sm_90" in targets else next((name for name in targets if name in GPUS), None)
    if target is None or args.form:
        raise InputError(f"--count takes a target out of {','.join(GPUS)}, and forms by --cases, not by --form")
    cases = args.cases or COUNTED
    tasks = [(target, step, case, width) for width in widths for case in cases for step in args.passes]
    found = work_off(counting.count, tasks, args.jobs)
    found.sort(key=lambda one: (args.passes.index(one.step), cases.index(one.case), one.width))
    if args.json:
        args.json.write_text(json.dumps({"target": target, "counted": [asdict(one) for one in found]}, indent=1) + "\n")
    for step in args.passes:
        print(counting.HEADER)
        print(*[counting.line_of(one) for one in found if one.step == step], sep="\n")
    failed = [one for one in found if one.faults]
    for one in failed:
        print(f"FAILS {target} {one.step} {one.case} D={one.width}: {'; '.join(one.faults)}")
    print(f"{len(found)} passes as compiled for {target}: {f'{len(failed)} fail' if failed else 'all agree'}")
    sys.exit(1 if failed else 0)


def main() -> None:
    args = parse_args()
    if args.json:
        make_folder("--json", args.json.parent)  # said now, and not after minutes of work
        if args.json.is_dir():
            raise InputError(f"--json {args.json} is a folder; expected a file, or a name that is free")
    if importlib.util.find_spec("triton") is None:
        raise InputError("the package triton is not installed; pip install triton, which is made for Linux")
    os.environ["TRITON_INTERPRET"] = "0"  # before any process imports it
    import triton

    known = [name for name, gpu in TARGETS.items() if version_of(triton) >= gpu.since]
    if missing := [name for name in args.targets or TARGETS if name not in known]:
        text = f"Triton {triton.__version__} compiles for {', '.join(known)} alone, not for {', '.join(missing)}"
        if args.targets:
            raise InputError(f"{text}; drop these, or upgrade Triton")
        say(text)
    targets, widths = args.targets or known, args.widths or WIDTHS
    if args.count:
        return count_all(args, targets, widths)
    tasks = [
        (target, case, width, args.passes, args.form)
        for width in widths
        for case in args.cases or CASES
        for target in targets
        if args.cases or args.widths or case in PLAIN or width in FEW_WIDTHS
    ]
    found: list[Kernel] = list(chain(*work_off(compile_and_check, tasks, args.jobs)))
    order = [list(PASSES), list(CASES), sorted(widths), list(TARGETS)]
    found.sort(key=lambda k: [row.index(v) for row, v in zip(order, (k.step, k.case, k.width, k.target), strict=True)])
    if args.json:
        result = {"triton": triton.__version__, "form": args.form, "kernels": [asdict(kernel) for kernel in found]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")

    for step in args.passes:
        print(HEADER)
        of_step = [kernel for kernel in found if kernel.step == step]
        for _, same in groupby(of_step, key=lambda k: (k.case, k.width)):
            kernels = list(same)
            print(line_of(kernels, step))
            if args.verbose:
                for kernel in kernels:
                    print(line_of([kernel], f"  {kernel.name.strip('_').removesuffix('_kernel')[:4]} {kernel.target}"))
    failed = [kernel for kernel in found if kernel.faults]
    for k in failed:
        where = f"{k.target} {k.step} {k.case} D={k.width} {k.name} {k.tile} {k.warps} warps"
        print(f"FAILS {where}: {'; '.join(k.faults)}")
    what = f"kernels in the form {args.form}" if args.form else "kernels"
    print(f"{len(found)} {what} for {', '.join(targets)}: {f'{len(failed)} fail' if failed else 'all pass'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run(main)
