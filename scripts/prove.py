"""Prove a norm: what it is, which promises it keeps, whether it trains, and what it costs, in one command.

    python scripts/prove.py my_kernel:rms_norm                   a function (x, weight, eps) -> y of ./my_kernel.py
    python scripts/prove.py my_kernel:rms_norm --emulate sm_80   its Triton kernels as compiled for an A100, not an H100
    python scripts/prove.py my_kernel:rms_norm --quick           the first three stages

1. Does it fit? It is called as a model calls it, in a process of its own: a segmentation fault is a finding.
2. Which norm is it? Its values, rounding and gradients beside those of the formula and of each known mistake.
3. The contract, as promises: kept, broken (with an example and the pytest line that repeats it), or not claimed.
4. Does it train? Short parity runs (scripts/loss_parity.py) in float32 and in half precision, with an impostor.
5. What does it cost? The benchmark on a GPU; without one, what its kernels move and compute on an emulated GPU.
6. A page to show: out/prove/NAME/report.md.

A stage that makes no sense after what an earlier one has found is left out, with the reason. Exit code 0: every promise
that the norm makes is kept. 1: one is broken. 2: it could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import InputError
from kernels.form import FORMS
from model.cli import Parser, choose_device, emulate_as_asked, make_folder, run, say


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("norm", help="package.module:function, or a name that --norm takes, such as triton or scripts.peers:liger")
    add("--form", choices=FORMS, default="llama", help="the form that it claims; torch is nn.RMSNorm's")
    add("--quick", action="store_true", help="stages 1 to 3 alone")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    parser.add_emulation()
    add("--out", type=Path, help="folder for the page (default: out/prove/NAME)")
    add("--json", type=Path, help="file for all that was found")
    args = parser.parse_args()
    if "," in args.norm:
        raise InputError(f"'{args.norm}' names several norms; expected one, as package.module:function")
    args.out = args.out or Path("out/prove") / folder_name(args.norm)
    return args


def folder_name(norm: str) -> str:
    """The module's name for a function called rms_norm, else both."""
    return norm.removesuffix(":rms_norm").replace(":", ".").replace("@", ".").replace("/", ".")


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

from tqdm import tqdm

from scripts.proving import cost, fits, identity, page, promises, training
from scripts.proving.apart import Apart, Died
from scripts.proving.fits import Line, Traits
from scripts.proving.identity import Identity
from scripts.proving.promises import Promise
from scripts.proving.subject import Subject
from scripts.proving.telling import UNKNOWN, Finding


class Progress:
    """What is running, on stderr, and the text of each stage as it comes, on stdout."""

    def __init__(self) -> None:
        self.bar = tqdm(total=0, unit="step", disable=None, leave=False)

    def expect(self, steps: int) -> None:
        self.bar.total += steps
        self.bar.refresh()

    def doing(self, words: str) -> None:
        self.bar.set_description_str(words[:60])

    def tick(self, words: str = "") -> None:
        self.bar.update()
        if words:
            self.doing(words)

    def show(self, lines: list[str]) -> None:
        for line in lines:
            tqdm.write(line)
        sys.stdout.flush()


def does_it_fit(subject: Subject, apart: Apart, progress: Progress) -> tuple[list[Line], Traits | None]:
    """Stage 1. No traits where later stages make no sense. Raises InputError for a norm that can't be loaded."""
    progress.expect(len(fits.LOOKS) + 1)
    progress.doing("importing it")
    try:
        description = apart.call(fits.loads, subject)
    except Died as death:
        raise InputError(f"norm '{subject.name}': {death}; expected a module that can be imported") from death
    if description.startswith("error: "):
        raise InputError(description.removeprefix("error: "))
    progress.tick()
    lines: list[Line] = []
    for look in fits.LOOKS:
        progress.doing(look.__name__)
        try:
            lines += apart.call(look, subject)
        except Died as death:
            lines.append(Line(False, look.__name__, str(death), fits.after_death(look.__name__)))
        progress.tick()
        if lines[0].what == fits.CANT_RUN:
            raise InputError(lines[0].found)
        if look in fits.ESSENTIAL and not lines[0].ok:
            return lines, None
    try:
        return lines, apart.call(fits.traits, subject)
    except Died as death:
        return [*lines, Line(False, "backward", str(death), "")], None


def which_norm(subject: Subject, traits: Traits, apart: Apart, progress: Progress) -> Identity:
    """Stage 2."""
    progress.expect(1)
    progress.doing("beside the known mistakes")
    try:
        return apart.call(identity.identify_apart, subject, traits.backward, traits.adds, traits.interpreted)
    except Died as death:
        finding = Finding("values", UNKNOWN, f"it ends its process: {death}")
        return Identity([finding])
    finally:
        progress.tick()


def which_promises(
    subject: Subject, traits: Traits, lines: list[Line], apart: list[Apart], progress: Progress
) -> list[Promise]:
    """Stage 3."""
    keys = apart[0].call(promises.keys_of, subject)
    progress.expect(len(keys))
    float64 = next((line.found for line in lines if line.what == "computes float64" and not line.ok), "")
    return promises.keep(subject, traits, float64, apart, progress.tick, keys)


def does_it_train(subject: Subject, traits: Traits, apart: Apart, out: Path, progress: Progress) -> dict[str, Any]:
    """Stage 4."""
    if not traits.backward:
        return {"failures": [], "notes": ["it has no backward"], "dtypes": {}}
    bound = apart.call(training.form_is_bound, subject)
    progress.expect(len(training.runs_of(subject, bound)))
    progress.doing("training")
    return training.parity(subject, bound, out / "parity", progress.tick)


def what_it_costs(
    subject: Subject, traits: Traits, apart: list[Apart], out: Path, progress: Progress
) -> dict[str, Any]:
    """Stage 5."""
    if why := cost.nothing_to_count(subject, traits):
        return {"why_not": why}
    if subject.device != "cpu":
        progress.expect(1)
        progress.doing("the benchmark")
        return {"benchmark": cost.benchmark(subject, out / "bench")}
    progress.expect(1 + len(cost.beside(subject, traits.triton)))
    return {"counted": cost.emulated(subject, traits, apart, progress.tick)}


def prove(args: argparse.Namespace, subject: Subject, progress: Progress) -> dict[str, Any]:
    """All stages, printed as they come. Returns what was found."""
    result: dict[str, Any] = {"norm": subject.name, "form": subject.form_name, "stages": {}}
    stages, apart = result["stages"], [Apart(progress.doing, str(args.out / "log.txt")) for _ in range(2)]
    try:
        apart[1].warm_up(fits.loads, subject)  # imports, while the other one works
        lines, traits = does_it_fit(subject, apart[0], progress)
        stages["fits"] = [line._asdict() for line in lines]
        result["runs"] = traits.runs if traits else ""
        progress.show(page.fits(lines))
        if traits is None:
            result["left_out"] = "the other stages make no sense before it runs"
            return result
        found = which_norm(subject, traits, apart[0], progress)
        stages["identity"] = [asdict(finding) for finding in found.findings]
        progress.show(page.identity(found, subject))
        kept = which_promises(subject, traits, lines, apart, progress)
        stages["promises"] = [asdict(promise) for promise in kept]
        progress.show(page.promises(kept))
        if args.quick:
            return result
        if found.values_are_right():
            stages["parity"] = does_it_train(subject, traits, apart[0], args.out, progress)
            progress.show(page.parity(stages["parity"], subject.name))
            stages["cost"] = what_it_costs(subject, traits, apart, args.out, progress)
            progress.show(page.cost(stages["cost"]))
        else:
            result["left_out"] = "training and costs of another function than it claims to be say nothing"
            progress.show(["", f"4. and 5. are left out: {result['left_out']}"])
    finally:
        for one in apart:
            one.close()
    return result


def main() -> None:
    args = parse_args()
    emulate_as_asked(args)
    started = time.perf_counter()
    subject = Subject(args.norm, args.form, str(choose_device(args.device)), args.emulate)
    if args.json:
        make_folder("--json", args.json.parent)
    make_folder("--out", args.out)
    for name in ("log.txt", "report.md"):  # of an earlier run, which no longer holds
        (args.out / name).unlink(missing_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process that it starts
    progress = Progress()
    try:
        result = prove(args, subject, progress)
    finally:
        progress.bar.close()
    result |= {"seconds": round(time.perf_counter() - started, 1), "versions": page.versions(subject)}
    result |= {"command": page.command(args)}
    broken = page.broken(result)
    result |= {"verdict": page.verdict(result), "exit_code": 1 if broken else 0}
    page.write(result, args.out)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{result['verdict']}")
    say(f"wrote {args.out / 'report.md'}, in {result['seconds']:.0f} s")
    sys.exit(result["exit_code"])


if __name__ == "__main__":
    run(main)
