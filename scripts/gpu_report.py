"""Report on the norms on one GPU: contract tests, parity, benchmark and training runs, in one folder.

The contract tests and the parity runs, which check, share the GPU. The benchmark and the training runs, which time,
have it to themselves. --out then holds

    report.md      the summary, with the pictures      report.json    the same figures, to compute with
    bench.png, parity-float32.png, parity-bfloat16.png, and under logs/ what each part has printed

The whole takes 8 minutes at most: a part that would take longer is stopped. Exit code 0: every part has run and passed.
1: one has failed or taken too long; the report says which.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import BACKENDS, USAGE, InputError
from model.cli import Parser, choose_autocast_dtype, choose_device, make_folder, names_in, positive, run, say

DEADLINE_S = 470  # for all parts together
FIGURES = {"bench": "norm", "parity-float32": "parity", "parity-bfloat16": "parity"}  # the name of a part's files
TESTS = "tests/kernels/test_norm_contract.py,tests/kernels/test_triton_rms_norm.py"


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/gpu_report"), help="folder for the report")
    add("--device", default="auto", help="cuda, cuda:1, ...; cpu only to try the script itself")
    add("--norms", help=f"comma-separated: {USAGE} (default: {','.join(BACKENDS)}, and in the benchmark its peers)")
    add("--widths", help="D in the benchmark, as bench_norm.py takes it; its own choice, if left out")
    add("--steps", type=positive(int), default=300, help="optimizer steps of each training run")
    add("--parity-steps", type=positive(int), default=100, help="optimizer steps of each parity run")
    add("--config", help="the model's shape, a config.json (default: configs/tiny.json)")
    add("--data", default="python", help="the corpus, as train.py takes it")
    add("--tests", default=TESTS, help="test files, comma-separated")
    args = parser.parse_args()
    args.config = args.config or str(ROOT / "configs/tiny.json")
    return args


if __name__ == "__main__":
    run(parse_args)  # answer --help and wrong flags before the imports below, which take seconds

from tqdm import tqdm

from kernels import load_backend
from model.config import LlamaConfig
from model.training.prepare import prepare
from scripts.bench.measuring import describe
from scripts.loss_parity import norms_to_compare


class Part(NamedTuple):
    """A command of its own process."""

    name: str
    title: str
    limit_s: int
    command: tuple[str, ...]


def python(*script: str | Path, **flags: str | int | Path | None) -> tuple[str, ...]:
    """The command that runs a script with those flags that have a value."""
    given = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items() if value]
    return (sys.executable, *map(str, script), *(str(word) for flag in given for word in flag))


def plan(args: argparse.Namespace, norms: list[str], dtype: str, work: Path) -> list[list[Part]]:
    """The parts, in groups that run at the same time. `dtype` is that of the training runs."""
    device, names = args.device, args.norms  # without names the tests take less of compile, and the benchmark its peers
    model = {"device": device, "config": args.config, "data": args.data}
    tests = [ROOT / test for test in args.tests.split(",")]
    command = python("-m", "pytest", "-q", *tests, device=device, norm=names, junitxml=work / "contract.xml")
    checks = [Part("contract", "Contract tests", 300, command)]
    for name, norm_dtype in (("float32", None), ("bfloat16", "bfloat16")):
        flags = {"dtype": name, "norm_dtype": norm_dtype, "steps": args.parity_steps, "out": work / f"parity-{name}"}
        command = python(ROOT / "scripts/loss_parity.py", norms=",".join(norms), **model, **flags)
        checks.append(Part(f"parity-{name}", f"Loss parity in {name}", 300, command))

    flags = {"device": device, "norms": names, "widths": args.widths, "out": work / "bench"}
    groups = [checks, [Part("bench", "Benchmark", 150, python(ROOT / "scripts/bench_norm.py", **flags))]]
    for norm in norms:
        steps = dict.fromkeys(["steps", "eval_interval", "save_interval"], args.steps)
        command = python(ROOT / "train.py", norm=norm, dtype=dtype, **model, **steps, out=work / f"train-{norm}")
        groups.append([Part(f"train-{norm}", f"Training with {norm} in {dtype}", 60, command)])
    return groups


def run_parts(parts: list[Part], logs: Path, deadline: float) -> dict[str, dict[str, Any]]:
    """Run the parts at the same time. Returns how each ended and its seconds, by name.

    What a part prints goes to logs/NAME.txt and NAME.err. It is stopped after its own limit, or when
    time.perf_counter() reaches the deadline.
    """
    started, running, results = time.perf_counter(), {}, {}
    for part in parts:
        with (logs / f"{part.name}.txt").open("w") as log, (logs / f"{part.name}.err").open("w") as errors:
            running[part] = subprocess.Popen(part.command, stdout=log, stderr=errors, start_new_session=True)
    try:
        while running:
            time.sleep(0.2)
            seconds = time.perf_counter() - started
            for part, process in list(running.items()):
                limit_s = min(part.limit_s, max(0, deadline - started))
                if process.poll() is None and seconds < limit_s:
                    continue
                code = stop(running.pop(part))
                ended = "passed" if code == 0 else "failed" if seconds < limit_s else f"over {limit_s:.0f} s"
                result = {"title": part.title, "result": ended, "seconds": round(seconds, 1)}
                results[part.name] = result | {"command": part.command[1:]}
                say(f"{part.title}: {ended}")
    finally:
        for process in running.values():  # after Ctrl-C
            stop(process)
    return {part.name: results[part.name] for part in parts}


def stop(process: subprocess.Popen) -> int:
    """Kill what still runs of a part and of what it started: the next one needs the GPU. Returns its exit code."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def collect(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Add to each result the figures that its part has left, and copy the pictures to `out`."""
    work = out / "work"
    if (work / "contract.xml").exists():
        cases = list(ElementTree.parse(work / "contract.xml").iter("testcase"))
        bad = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
        skipped = sum(case.find("skipped") is not None for case in cases)
        results["contract"] |= {"passed": len(cases) - len(bad) - skipped, "skipped": skipped, "failed": bad}
    for name, file in FIGURES.items():
        if (work / name / f"{file}.png").exists():  # drawn after the figures are written
            results[name]["figures"] = json.loads((work / name / f"{file}.json").read_text())
            shutil.copy(work / name / f"{file}.png", out / f"{name}.png")
    for name, result in results.items():
        if name.startswith("train-") and result["result"] == "passed":
            lines = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
            result |= {"loss": lines[-1]["loss"], "val_loss": lines[-1]["val_loss"]}
            compiled = lines[len(lines) // 2 :]  # by then everything is
            result["tokens_per_s"] = statistics.median(line["tokens_per_s"] for line in compiled)


def write_markdown(results: dict[str, dict[str, Any]], machine: str, out: Path) -> None:
    total = sum(result["seconds"] for result in results.values())
    lines = ["# RMSNorm on one GPU", "", f"{machine}. The parts took {total:.0f} s, added up.", ""]
    lines += ["| part | result | s |", "|---|---|---|"]
    lines += [f"| {result['title']} | {result['result']} | {result['seconds']:.0f} |" for result in results.values()]
    contract = results["contract"]
    if "passed" in contract:
        counts = f"{contract['passed']} passed, {len(contract['failed'])} failed, {contract['skipped']} skipped."
        lines += ["", "## Contract tests", "", counts, *(f"- {name}" for name in contract["failed"])]
    lines += ["", "## Training", "", "| norm | tokens/s | loss | validation loss |", "|---|---|---|---|"]
    for name, result in results.items():
        if "tokens_per_s" in result:
            figures = f"{result['tokens_per_s']:,.0f} | {result['loss']:.4f} | {result['val_loss']:.4f}"
            lines.append(f"| {name.removeprefix('train-')} | {figures} |")
    for name in FIGURES:
        title, printed = results[name]["title"], out / "logs" / f"{name}.txt"
        text = printed.read_text("utf-8", "replace").rstrip() or "nothing printed"
        if results[name]["result"] != "passed":
            errors = (out / "logs" / f"{name}.err").read_bytes().decode("utf-8", "replace")  # read_text takes \r for \n
            text += "\n" + re.sub(r".*\r", "", errors).rstrip()[-2000:]
        lines += ["", f"## {title}", "", "```", text, "```"]
        if "figures" in results[name]:
            lines += ["", f"![{title}]({name}.png)"]
    (out / "report.md").write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    args = parse_args()
    device = choose_device(args.device)
    if device.type == "cpu" and args.device == "auto":
        raise InputError("there is no GPU here and this script reports on one; --device cpu tries the script itself")
    args.device = str(device)
    dtype = str(choose_autocast_dtype("auto", device)).removeprefix("torch.")

    norms = names_in(args.norms) if args.norms else list(BACKENDS)
    norms_to_compare(",".join(norms))  # raises what the parity runs would raise later
    for norm in norms:
        load_backend(norm, device)
    out = args.out.resolve()
    shutil.rmtree(out / "work", ignore_errors=True)  # no figure of an earlier run may pass for one of this
    for folder in (out, out / "logs", out / "work"):
        make_folder("--out", folder)
    # Once, before several runs want it at the same time.
    prepare(args.data, LlamaConfig.load(args.config).vocab_size, Path("out/data"))

    started, results = time.perf_counter(), {}
    with tqdm(plan(args, norms, dtype, out / "work"), unit="group", disable=None) as bar:
        for group in bar:
            bar.set_description(", ".join(part.title for part in group))
            results |= run_parts(group, out / "logs", started + DEADLINE_S)
    collect(results, out)
    shutil.rmtree(out / "work")
    machine = f"{describe(device)}, Python {platform.python_version()}"
    report = {"machine": machine, "seconds": round(time.perf_counter() - started, 1), "parts": results}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    write_markdown(results, machine, out)
    say(f"wrote {out / 'report.md'}, in {report['seconds']:.0f} s")
    failed = [result["title"] for result in results.values() if result["result"] != "passed"]
    print("failed: " + "; ".join(failed) if failed else "every part passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run(main)
