"""What does it cost? On a GPU the benchmark; without one, what its kernels move and compute on an emulated GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from kernels.emulated.gpus import DEFAULT
from scripts import peers
from scripts.codegen.assembly import registers_of
from scripts.judging import judge
from scripts.judging.report import FLOORS
from scripts.proving.apart import Apart, Died, about_to
from scripts.proving.fits import Traits
from scripts.proving.subject import ERRORS, Subject, load, watching
from scripts.proving.telling import one_line

SHAPE = f"x of {judge.ROWS} x {judge.WIDTH}, bfloat16"


def beside(subject: Subject, triton: bool) -> list[str]:
    """Ours and the peers that are installed and claim the form, where they run here too."""
    ours = ["triton"] if triton else []
    theirs = [
        f"scripts.peers:{name}"
        for name in peers.installed()
        if name in peers.PACKAGES and name != "quack" and subject.form_name in peers.PACKAGES[name].forms
    ]
    return [name for name in [*ours, *theirs] if name != subject.name]


def counted(subject: Subject, backward: bool, adds: bool) -> dict[str, Any]:
    """Bytes, instructions, registers and spills of each pass, in a process apart that emulates a GPU."""
    backend, figures = load(subject), {}
    for pass_name, has in (("forward", True), ("backward", backward), ("add", adds)):
        if not has:
            continue
        about_to(f"{pass_name} of {SHAPE}")
        found = judge.table_figures(backend, pass_name)
        with watching() as launched:
            try:
                judge.counts_of(backend, pass_name, judge.FEW_ROWS, judge.WIDTH)
                kernels = [_kernel(name, compiled) for name, compiled in launched.compiled.items()]
            except ERRORS as error:
                found, kernels = one_line(error), []
        figures[pass_name] = {"figures": found, "kernels": kernels}
    return figures


def _kernel(name: str, compiled: Any) -> dict[str, Any]:
    try:
        registers, spill = registers_of(compiled)
    except (*ERRORS, subprocess.SubprocessError, KeyError):  # no cubin, or no tool that reads it
        registers, spill = None, "unknown"
    return {"name": name, "warps": compiled.metadata.num_warps, "registers": registers, "spills": spill or "none"}


def emulated(subject: Subject, traits: Traits, apart: list[Apart], tick: Any) -> dict[str, Any]:
    """The figures of the norm, and of ours and the peers', by name."""
    result = {}
    names = [subject.name, *beside(subject, triton=True)]
    for i, name in enumerate(names):
        own = name == subject.name
        gpu = DEFAULT if subject.gpu == "none" else subject.gpu  # peers want one by name
        one = subject._replace(name=name, gpu=gpu)
        adds = traits.adds if own else name == "triton"
        worker = apart[i % len(apart)]
        try:
            result[name] = worker.call(counted, one, traits.backward if own else True, adds)
        except Died as death:
            result[name] = {"died": str(death)}
        tick(name)
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Markdown: a row a norm, a column a pass."""
    passes = [name for name in judge.PASSES if any(name in found for found in result.values())]
    heads = [f"{name}: bytes, floor {FLOORS[name]}" for name in passes]
    lines = ["| norm | " + " | ".join(f"{head} | instructions | registers" for head in heads) + " |"]
    lines.append("|---" * (1 + 3 * len(passes)) + "|")
    for name, found in result.items():
        row = []
        for pass_name in passes:
            row += cells(found.get(pass_name), found.get("died"))
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return lines


def cells(found: dict[str, Any] | None, died: str | None) -> list[str]:
    if found is None:
        return [died or "-", "-", "-"]
    figures = found["figures"]
    if isinstance(figures, str):
        return [figures, "-", "-"]
    registers = ", ".join(
        f"{kernel['registers'] or '?'}" + (f" ({kernel['spills']})" if kernel["spills"] != "none" else "")
        for kernel in found["kernels"]
    )
    moved, rest, instructions = figures
    return [f"{moved:.2f} + {rest:.2f}", f"{instructions:.0f}", registers or "-"]


def nothing_to_count(subject: Subject, traits: Traits) -> str:
    """Why there are no figures on this machine, and what gives some; nothing if there are."""
    if subject.device != "cpu":
        return ""
    if not traits.triton:
        how = f"python scripts/bench_norm.py --norms {subject.name},torch times it"
        return f"it launches no Triton kernel, so that there is nothing to count; {how}"
    return "Triton's interpreter tells no cost; --emulate sm_90 counts what it moves" if traits.interpreted else ""


def benchmark(subject: Subject, out: Path) -> dict[str, Any]:
    """scripts/bench_norm.py on the GPU, beside ours, PyTorch's and the peers': what it printed, and its picture."""
    names = [subject.name, *dict.fromkeys(["torch", *beside(subject, triton=True)])]
    command = [sys.executable, str(judge.ROOT / "scripts/bench_norm.py"), "--norms", ",".join(names), "--out", str(out)]
    command += ["--form", subject.form_name, "--device", subject.device, "--widths", "1024,4096,16384"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]
    picture = f"{out.name}/norm.png" if (out / "norm.png").exists() and done.returncode == 0 else None
    return {"printed": text, "picture": picture, "returncode": done.returncode}
