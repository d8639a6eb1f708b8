"""Count what our kernels ask of memory, by running them on an emulated GPU, beside what their text says.

Both are for a few rows. They agree where a row is a whole number of sectors, but for what several warps load for
themselves and the text has once (the weight beside short rows, and what a row has one of, as rstd), and for a float32
tensor beside one in half precision: a thread has 32 bytes of it, in two accesses, each of which touches their sector.
Elsewhere more is counted than told: rows share a sector, and where elements are loaded one by one, a warp's accesses
touch its sectors again and again. What of it a cache answers, and how fast, no count says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from kernels.emulated.counts import SECTOR, Counts
from scripts.codegen.assembly import accesses_of, bytes_told, kind_of
from scripts.codegen.offline_gpu import launch, launches_of
from scripts.codegen.targets import CASES, Case

FEW = (2, 4)  # of the rows
KINDS = ("tile", "row", "sums")


@dataclass
class Counted:
    """One pass: bytes an element by the kind of the tensor, as the text tells and as they were counted."""

    step: str
    case: str
    width: int
    floor: float
    told: dict[str, float]
    counted: dict[str, float]
    conflicts: float  # share of the passes over shared memory that bank conflicts add
    instructions: dict[str, float]  # an element, by class
    faults: list[str] = field(default_factory=list)


def count(target: str, step: str, case_name: str, width: int) -> Counted:
    """Count one pass, in a process that counts for no other target: Triton keeps what it has compiled."""
    case, n_rows = CASES[case_name], FEW[0] * FEW[1]
    launches, floor, _ = launches_of(step, target, case, width, FEW)
    told: Counter[str] = Counter()
    for each in launches:
        told += bytes_told(each, accesses_of(each), width, n_rows)
    found = run(target, step, case, width)
    counted: Counter[str] = Counter()
    for counts in found:
        for (name, _), sectors in counts.sectors.items():
            counted[kind_of(name, counts.tensors[name][0], width)] += SECTOR * sectors
    executed = sum((counts.executed for counts in found), Counter())
    elements = n_rows * width
    result = Counted(
        step, case_name, width, floor,
        told={kind: told[kind] / elements for kind in KINDS},
        counted={kind: counted[kind] / elements for kind in (*KINDS, "column")},
        conflicts=sum(counts.conflicts for counts in found) / max(1, sum(counts.wavefronts for counts in found)),
        instructions={kind: number / elements for kind, number in executed.items()},
    )  # fmt: skip
    result.faults = disagreements(step, case, width, told, counted)
    return result


def disagreements(step: str, case: Case, width: int, told: Counter[str], counted: Counter[str]) -> list[str]:
    """Where bytes differ though they should not."""
    if width * getattr(torch, case.x).itemsize % SECTOR:
        return []
    mixed = step.startswith("add") and case.x != case.residual
    least, exact = (("row", "tile"), ("sums",)) if mixed else (("row",), ("tile", "sums"))
    wrong = [kind for kind in least if counted[kind] < told[kind]]
    wrong += [kind for kind in exact if counted[kind] != told[kind]]
    return [f"{kind}: {told[kind]} bytes are told and {counted[kind]} counted" for kind in wrong]


def run(target: str, step: str, case: Case, width: int) -> list[Counts]:
    """The counts of each launch of a pass."""
    from kernels import emulated, triton_rms_norm

    emulated.emulate(target)
    from kernels.emulated.driver import counting

    triton_rms_norm.wrap_triton = torch.library.wrap_triton
    with counting() as found:
        launch(triton_rms_norm, step, case, width, FEW, "cpu")
    return found


HEADER = (
    f"{'':<13}{'dtypes':<9}{'D':>7}{'floor':>7}{'moved: told':>13}{'counted':>8}{'weight: told':>14}{'counted':>8}"
    f"{'sums: told':>12}{'counted':>8}{'by row':>7}{'conflicts':>10}  instructions an element"
)


def line_of(found: Counted) -> str:
    numbers = "".join(
        f"{found.told[kind]:>{width}.2f}{found.counted[kind]:>8.2f}"
        for kind, width in zip(KINDS, (13, 14, 12), strict=True)
    )
    classes = sorted(found.instructions.items(), key=lambda item: -item[1])
    return (
        f"{found.step:<13}{found.case:<9}{found.width:>7}{found.floor:>7.2f}{numbers}{found.counted['column']:>7.2f}"
        f"{found.conflicts:>10.1%}  {sum(found.instructions.values()):.1f}: "
        + ", ".join(f"{name} {number:.1f}" for name, number in classes)
        + ("  FAILS" if found.faults else "")
    )
