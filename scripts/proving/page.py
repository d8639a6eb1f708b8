"""What is said of a norm: a stage at a time at the terminal, then on a page whose verdict comes first."""

from __future__ import annotations

import argparse
import platform
import re
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

from kernels.form import FORMS
from scripts import loss_parity
from scripts.judging.report import FLOORS
from scripts.proving import cost as costs
from scripts.proving.fits import Line
from scripts.proving.identity import Identity
from scripts.proving.promises import BROKEN, KEPT, Promise
from scripts.proving.subject import Subject
from scripts.proving.telling import UNKNOWN
from scripts.proving.variants import RIGHT

CLAIMS = {"llama": "LLaMA's norm", "torch": "nn.RMSNorm's form", "gemma": "Gemma's norm"}


def fits(lines: list[Line]) -> list[str]:
    text = ["1. Does it fit?"]
    for line in lines:
        mark = {True: "yes", False: "NO", None: "--"}[line.ok]
        text.append(f"   {mark:<4}{line.what}{': ' if line.found else ''}{line.found}")
        if line.fix:
            text.append(f"       {'to change' if line.ok is False else 'to have it'}: {line.fix}")
    return text


def identity(found: Identity, subject: Subject) -> list[str]:
    text = ["", "2. Which norm is it?", f"   {sentence([vars(one) for one in found.findings], subject.form_name)}"]
    for finding in found.findings:
        if finding.name == RIGHT:
            text.append(f"   yes {finding.words}")
            continue
        text.append(f"   NO  {finding.part}: {finding.words}")
        if finding.example:
            text.append(f"       smallest that shows it: {finding.example}")
    return text


def sentence(findings: list[dict[str, str]], form_name: str) -> str:
    """Which norm it is."""
    mistakes = [one for one in findings if one["name"] != RIGHT]
    claim = CLAIMS[form_name]
    if not mistakes:
        return f"It is {claim} ({FORMS[form_name]})."
    if all(one["part"].startswith("rounding") and one["name"].startswith("rounded") for one in mistakes):
        order = "nn.RMSNorm" if mistakes[0]["name"] == "rounded_once" else "LLaMA"
        return f"It is {claim} with the rounding order of {order}."
    if any(one["name"] == UNKNOWN and one["part"] == "values" for one in mistakes):
        return f"It is not {claim}, and none of the known mistakes."
    names = dict.fromkeys(
        one["part"] if one["name"] == UNKNOWN else re.split("[,:;] ", one["words"])[0] for one in mistakes
    )
    if {one["part"] for one in mistakes} <= {"strides"}:
        return f"It is {claim} for a contiguous x alone."
    if any(one["part"] == "values" for one in mistakes):
        return f"It is not {claim}: {'; '.join(names)}."
    return f"It is {claim}, but for this: {'; '.join(names)}."


def promises(kept: list[Promise]) -> list[str]:
    text = ["", "3. The contract"]
    for promise in kept:
        if promise.state == KEPT:
            note = f"; {promise.why}" if promise.why else ""
            text.append(f"   kept    {promise.words} ({promise.passed} of {promise.cases} cases{note})")
        elif promise.state == BROKEN:
            failed = promise.cases - promise.passed
            text.append(f"   BROKEN  {promise.words} ({failed} of {promise.cases} cases fail)")
            text += [f"           {promise.example}", f"           {promise.pytest}"]
        else:
            text.append(f"   --      {promise.words}: {promise.state}, {promise.why}")
    return text


def parity(found: dict[str, Any], norm: str) -> list[str]:
    text = ["", "4. Does it train?"]
    for dtype, one in found["dtypes"].items():
        verdicts = one["verdicts"]
        controls = [verdicts[name]["largest_difference"] for name in loss_parity.CONTROLS]
        mine, impostor = verdicts[norm], verdicts["impostor"]
        said = "found" if not impostor["passes"] else "not found"
        mark = ("yes" if mine["passes"] else "NO ") if _is_told(found, dtype) else "-- "
        text.append(
            f"   {mark} {dtype}: its loss differs from the reference's by at most "
            f"{mine['largest_difference']:.1e} over {len(one['losses'][norm])} steps, the controls' by "
            f"{min(controls):.1e} to {max(controls):.1e}; the impostor is {said} ({impostor['largest_difference']:.1e})"
        )
    text += [f"   NO  {words}" for words in found["failures"] if words.startswith("it does not train")]
    return text + [f"   --  {words}" for words in found["notes"]]


def cost(found: dict[str, Any]) -> list[str]:
    text = ["", "5. What does it cost?"]
    if "why_not" in found:
        return [*text, f"   {found['why_not']}"]
    if "benchmark" in found:
        return [*text, *found["benchmark"]["printed"].splitlines()]
    text.append(f"   {costs.SHAPE}; bytes an element of x: tensors of its size + all others")
    for name, passes in found["counted"].items():
        text.append(f"   {name}" + (f": {passes['died']}" if "died" in passes else ""))
        for pass_name, one in passes.items():
            if pass_name == "died":
                continue
            moved, instructions, registers = costs.cells(one, None)
            floor = f"{moved} bytes (floor {FLOORS[pass_name]})"
            text.append(f"     {pass_name:<9}{floor}, {instructions} instructions, registers {registers}")
    return text


def broken(result: dict[str, Any]) -> list[str]:
    """What is wrong, in words, whatever stage found it."""
    stages = result["stages"]
    found = [f"it does not fit: {line['found']}" for line in stages.get("fits", []) if line["ok"] is False]
    found += [one["words"] for one in stages.get("identity", []) if one["name"] != RIGHT]
    found += [f"broken: {one['words']}" for one in stages.get("promises", []) if one["state"] == BROKEN]
    parity = stages.get("parity", {})
    found += parity.get("failures", [])
    return found


def verdict(result: dict[str, Any]) -> str:
    """One line."""
    stages, wrong = result["stages"], broken(result)
    if "promises" not in stages:
        return f"{result['norm']} can't be used: {wrong[0]}"
    kept = [one for one in stages["promises"] if one["state"] == KEPT]
    failed = [one for one in stages["promises"] if one["state"] == BROKEN]
    claimed = f"{len(kept)} of {len(kept) + len(failed)} promises kept"
    which = sentence(stages["identity"], result["form"]).rstrip(".")
    which = which[0].lower() + which[1:]
    parts, found = [which, claimed], stages.get("parity", {"failures": [], "notes": [], "dtypes": {}})
    told = [dtype for dtype in found["dtypes"] if _is_told(found, dtype)]
    if told and not found["failures"]:
        parts.append(f"trains as the reference does in {' and '.join(told)}")
    return f"{result['norm']}: {'; '.join([*parts, *found['failures']])}"


def _is_told(parity: dict[str, Any], dtype: str) -> bool:
    """True for a run that could tell a wrong norm from a right one."""
    return not any(f"told in {dtype}" in note for note in parity["notes"])


def versions(subject: Subject) -> str:
    """What the findings depend on."""
    found = []
    for name in ("torch", "triton"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    where = f"emulated {subject.gpu}" if subject.gpu != "none" else subject.device
    return ", ".join([*found, f"Python {platform.python_version()}", platform.machine(), where])


def command(args: argparse.Namespace) -> str:
    """The command, without folders."""
    words = ["python scripts/prove.py", shlex.quote(args.norm)]
    words += [f"--form {args.form}"] if args.form != "llama" else []
    words += [f"--emulate {args.emulate}"] if args.emulate != "none" else []
    words += [f"--device {args.device}"] if args.device != "auto" else []
    words += ["--quick"] if args.quick else []
    return " ".join(words)


def write(result: dict[str, Any], out: Path) -> None:
    """report.md."""
    stages = result["stages"]
    lines = [
        f"# {result['norm']}",
        "",
        f"**{result['verdict']}.**",
        "",
        f"`{result['command']}`, {result['versions']},",
    ]
    lines += [f"{result['seconds']:.0f} s. {result['runs']}.", "", "## Does it fit?", ""]
    lines += ["| | | |", "|---|---|---|"]
    for line in stages["fits"]:
        mark = {True: "yes", False: "**no**", None: "-"}[line["ok"]]
        fix = f" ({line['fix']})" if line["fix"] else ""
        lines.append(f"| {mark} | {line['what']} | {_cell(line['found'] + fix)} |")
    if "identity" in stages:
        lines += ["", "## Which norm is it?", "", sentence(stages["identity"], result["form"]), ""]
        for one in stages["identity"]:
            mark = "" if one["name"] == RIGHT else f"**{one['part']}**: "
            example = f" Smallest that shows it: {one['example']}." if one["example"] else ""
            lines.append(f"- {mark}{one['words']}.{example}")
    if "promises" in stages:
        lines += ["", "## The contract", "", "| promise | | cases passed |", "|---|---|---|"]
        for one in stages["promises"]:
            state = f"**{one['state']}**" if one["state"] == BROKEN else one["state"]
            why = f": {one['why']}" if one["why"] else ""
            lines.append(f"| {one['words']} | {state}{_cell(why)} | {one['passed']}/{one['cases']} |")
        for one in stages["promises"]:
            if one["state"] == BROKEN:
                lines += ["", f"{one['words']}: {one['example']}", "", "```sh", one["pytest"], "```"]
    if "parity" in stages:
        lines += ["", "## Does it train?", "", *_parity_table(stages["parity"])]
    if "cost" in stages:
        lines += ["", "## What does it cost?", "", *_cost_table(stages["cost"])]
    if "left_out" in result:
        lines += ["", f"Left out: {result['left_out']}."]
    (out / "report.md").write_text("\n".join(lines) + "\n", "utf-8")


def _cell(text: str) -> str:
    """Text in a table."""
    return text.replace("|", "\\|")


def _parity_table(found: dict[str, Any]) -> list[str]:
    lines = []
    for dtype, one in found["dtypes"].items():
        if one["picture"]:
            lines += [f"![Training loss with each norm, in {dtype}]({one['picture']})", ""]
        lines += [f"| {dtype} | step 0 differs by | largest difference | |", "|---|---|---|---|"]
        for name, verdict in one["verdicts"].items():
            word = "passes" if verdict["passes"] else f"differs from step {verdict['first_step_over']} on"
            first, largest = verdict["first_difference"], verdict["largest_difference"]
            lines.append(f"| {name} | {first:.1e} | {largest:.1e} | {word} |")
        lines.append("")
    return [*lines, *(f"- {words}" for words in (*found["failures"], *found["notes"]))]


def _cost_table(found: dict[str, Any]) -> list[str]:
    if "why_not" in found:
        return [f"{found['why_not'][0].upper()}{found['why_not'][1:]}."]
    if "benchmark" in found:
        one = found["benchmark"]
        picture = [f"![Share of a copy's bandwidth]({one['picture']})", ""] if one["picture"] else []
        return [*picture, "```", one["printed"], "```"]
    about = f"{costs.SHAPE}, counted on an emulated GPU, which tells no time. Bytes an element of x, of tensors of its"
    about += " size + of all others; instructions an element; registers a thread, with what spills."
    return [about, "", *costs.table(found["counted"])]
