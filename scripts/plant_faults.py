"""Plant faults in a copy of the repository, one at a time, and see whether the tests find them.

    python scripts/plant_faults.py tests/faults.txt                    every fault of the list
    python scripts/plant_faults.py tests/faults.txt --only rope.py     those whose text holds a word

A list has a paragraph for each fault: what it does, the file, the text there (which must occur once), and the text in
its place. Lines of several may follow each other, but for empty ones.

    # the causal mask lets a query see the next token
    model/attention.py
    - keys <= queries
    + keys <= queries + 1

The tests that mirror the file run first, then those of its folder, then all of them, until one fails. Exit code 0:
every fault was found. 1: some lived, and each of them wants a test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import InputError
from model.cli import Parser, run, say
from model.json_file import decode_text, read_file

LONGEST = 1800  # seconds of a test run, after which a fault counts as found: it hangs
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Fault(NamedTuple):
    effect: str
    path: str
    old: str
    new: str


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("faults", type=Path, help="the list")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose effect or file holds this")
    parser.add_argument("--processes", default="auto", help="of pytest-xdist, for the run of all tests")
    return parser.parse_args()


def read_faults(path: Path) -> list[Fault]:
    """The faults of a list. Raises InputError where one is incomplete, or its text does not occur exactly once."""
    paragraphs = decode_text(path, read_file(path)).strip().split("\n\n")
    return [_parse(path, paragraph.splitlines()) for paragraph in paragraphs if paragraph]


def _parse(path: Path, lines: list[str]) -> Fault:
    effect = " ".join(line[2:] for line in lines if line.startswith("# "))
    old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
    files = [line for line in lines if not line.startswith(("# ", "- ", "+ "))]
    if not effect or not old or len(files) != 1:
        raise InputError(f"{path}: {lines[0]!r} is incomplete; expected # effect, a file, - old text and + new text")
    if not (ROOT / files[0]).is_file():
        raise InputError(f"{path}: {files[0]} is missing; expected a file of this repository")
    if (n := (ROOT / files[0]).read_text(encoding="utf-8").count(old)) != 1:
        raise InputError(f"{path}: {old!r} occurs {n} times in {files[0]}; expected it once; bring the list up to date")
    return Fault(effect, files[0], old, new)


def mirrored_tests(copy: Path, path: str) -> list[str]:
    """The test file that mirrors a source file, and the folder that does, as far as they are there."""
    source = Path("tests") / path
    candidates = [source.with_name(f"test_{source.name}"), source.parent]
    return [str(test) for test in candidates if (copy / test).exists() and test != Path("tests")]


def failure(copy: Path, arguments: list[str]) -> str | None:
    """Name of the first test that fails under pytest, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--durations=0", *arguments]
    # Two faults of one size within a second would share a file of bytecode.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return f"none, but the tests take more than {LONGEST} s"
    if done.returncode == 0:
        return None
    printed = (done.stdout + done.stderr).decode("utf-8", "replace")
    failed = FAILED.search(printed)
    return failed[1] if failed else printed.strip().splitlines()[-1]


def main() -> None:
    args = parse_args()
    faults = [fault for fault in read_faults(args.faults) if args.only in fault.effect + fault.path]
    if not faults:
        raise InputError(f"no fault of {args.faults} holds {args.only!r}; name another --only")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        everything = ["-n", args.processes]
        say("running all tests without a fault")
        if (failed := failure(copy, everything)) is not None:
            raise InputError(f"{failed} fails without any fault; expected tests that pass")
        n_found = 0
        for fault in tqdm(faults, unit="fault", disable=None):
            file, started = copy / fault.path, time.perf_counter()
            content = file.read_text(encoding="utf-8")
            file.write_text(content.replace(fault.old, fault.new), encoding="utf-8")
            rounds = [[test] for test in mirrored_tests(copy, fault.path)] + [everything]
            found_by = next(filter(None, (failure(copy, tests) for tests in rounds)), None)
            file.write_text(content, encoding="utf-8")
            n_found += found_by is not None
            verdict = f"found by {found_by}" if found_by else "LIVED"
            print(f"{fault.path}: {fault.effect}: {verdict} ({time.perf_counter() - started:.0f} s)", flush=True)
    print(f"{n_found} of {len(faults)} found")
    sys.exit(0 if n_found == len(faults) else 1)


if __name__ == "__main__":
    run(main)
