"""The report on a GPU: the commands it runs, parts that fail or hang, and the files it writes."""

import json
import re
import sys
import time

import pytest
import torch

import train
from scripts import bench_norm, gpu_report, loss_parity
from scripts.bench.measuring import describe
from tests.helpers import CPU, ROOT

PYTHON = sys.executable


def part(name, code, limit_s=20, title=""):
    return gpu_report.Part(name, title or name.title(), limit_s, (PYTHON, "-c", code))


@pytest.fixture
def arguments(monkeypatch, tmp_path):
    def parse(*extra):
        monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--device", "cpu", "--out", str(tmp_path / "out"), *extra])
        return gpu_report.parse_args()

    return parse


def test_every_command_is_one_that_its_script_takes(monkeypatch, tmp_path, arguments):
    groups = gpu_report.plan(arguments("--widths", "64,128"), ["torch", "triton"], "bfloat16", tmp_path)
    assert [[part.name for part in group] for group in groups] == [
        ["contract", "parity-float32", "parity-bfloat16"], ["bench"], ["train-torch"], ["train-triton"]
    ]  # fmt: skip
    together, [bench], *training = groups
    parsed = {}
    for part, parse_args in [
        *((part, loss_parity.parse_args) for part in together[1:]),
        (bench, bench_norm.parse_args),
        *((part, train.parse_args) for [part] in training),
    ]:
        monkeypatch.setattr(sys, "argv", list(part.command[1:]))
        parsed[part.name] = parse_args()
    assert parsed["parity-float32"].norm_dtype is None
    assert parsed["parity-bfloat16"].norm_dtype == parsed["parity-bfloat16"].dtype == "bfloat16"
    assert parsed["parity-float32"].dtype == "float32"
    assert parsed["bench"].widths == [64, 128]
    assert parsed["bench"].norms is None
    assert all(each.device == "cpu" for each in parsed.values())
    assert parsed["train-torch"].steps == 300
    assert parsed["train-torch"].dtype == "bfloat16"  # by name: what auto is depends on the machine
    assert parsed["train-torch"].config == parsed["parity-float32"].config == str(ROOT / "configs/tiny.json")
    assert parsed["parity-float32"].steps == 100
    assert parsed["train-triton"].norm == "triton"
    assert {"--device", "cpu"} <= set(together[0].command)
    assert "--norm" not in together[0].command
    assert sum(file.endswith(".py") for file in together[0].command) == 2


def test_norms_that_are_named_are_those_of_every_part(tmp_path, arguments):
    groups = gpu_report.plan(arguments("--norms", "torch,triton"), ["torch", "triton"], "float32", tmp_path)
    commands = [" ".join(part.command) for group in groups[:2] for part in group]
    assert " --norm torch,triton " in commands[0]
    assert all(" --norms torch,triton " in command for command in commands[1:])


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path, capsys):
    parts = [
        part("fine", "print('text'); import sys; print('noise', file=sys.stderr)"),
        part("failing", "raise SystemExit(3)"),
        part("hanging", "import time; time.sleep(60)", limit_s=1),
    ]
    deadline = time.perf_counter() + 60
    results = gpu_report.run_parts(parts, tmp_path, deadline)
    ended = {name: result["result"] for name, result in results.items()}
    assert ended == {"fine": "passed", "failing": "failed", "hanging": "over 1 s"}
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == ["Failing: failed", "Fine: passed", "Hanging: over 1 s"]
    assert (tmp_path / "fine.txt").read_text() == "text\n"
    assert (tmp_path / "fine.err").read_text() == "noise\n"


def test_what_a_part_has_started_ends_with_it(tmp_path):
    """A training run left on the GPU would slow down what is timed next."""
    alive = tmp_path / "alive"
    grandchild = f"import pathlib, time\nwhile True:\n    pathlib.Path({str(alive)!r}).touch()\n    time.sleep(0.05)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    gpu_report.run_parts([part("parent", code, limit_s=3)], tmp_path, time.perf_counter() + 60)
    alive.unlink()  # it was there
    time.sleep(0.3)
    assert not alive.exists()


def test_the_deadline_ends_every_part(tmp_path):
    sleeper = part("sleeper", "import time; time.sleep(60)", limit_s=50)
    results = gpu_report.run_parts([sleeper], tmp_path, time.perf_counter() + 1)
    assert results["sleeper"]["result"] == "over 1 s"


def test_ctrl_c_ends_every_part(tmp_path, monkeypatch):
    started, popen = [], gpu_report.subprocess.Popen
    monkeypatch.setattr(
        gpu_report.subprocess, "Popen", lambda *a, **k: (started.append(popen(*a, **k)), started[-1])[1]
    )

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_report.time, "sleep", interrupt)
    parts = [part(name, "import time; time.sleep(60)") for name in ("one", "two")]
    with pytest.raises(KeyboardInterrupt):
        gpu_report.run_parts(parts, tmp_path, time.perf_counter() + 60)
    assert [process.returncode for process in started] == [-9, -9]


def test_without_norms_to_compare_it_says_so(command, tmp_path):
    code, _, stderr = command(gpu_report.main, "--device", "cpu", "--norms", "reference", "--out", tmp_path / "out")
    assert (code, stderr.count("\n")) == (2, 1)
    assert "expected norms to compare with the reference" in stderr


MAKE_BENCH = """
import pathlib, sys
out = pathlib.Path(sys.argv[-1])
out.mkdir()
(out / "norm.json").write_text('{"machine": "this"}')
(out / "norm.png").write_bytes(b"picture")
print("bench table")
"""
TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    assert False

def test_broken(no_such_fixture):
    pass

@pytest.mark.skip
def test_left_out():
    pass
"""
LONG_ERROR = "import sys; print('y' * 3000 + '\\nbar\\rno such GPU', file=sys.stderr); sys.exit(2)"
TRAIN = "".join(
    json.dumps({"step": step, "loss": 5 - step, "tokens_per_s": speed, "val_loss": 4.5}) + "\n"
    for step, speed in enumerate([1, 2, 1000, 3000])
)


@pytest.fixture
def stand_ins(monkeypatch):
    """Each part replaced by a short one that leaves the same files; two of four real tests fail."""

    def plan(args, norms, dtype, work):
        test = work / "test_two.py"
        test.write_text(TESTS)
        pytest_command = (PYTHON, "-m", "pytest", "-q", str(test), "--junitxml", str(work / "contract.xml"))
        checks = [
            gpu_report.Part("contract", "Contract tests", 60, pytest_command),
            part("parity-float32", "print('parity table')"),
            part("parity-bfloat16", LONG_ERROR),
        ]
        bench = gpu_report.Part("bench", "Benchmark", 20, (PYTHON, "-c", MAKE_BENCH, str(work / "bench")))
        code = "import pathlib, sys, time; p = pathlib.Path(sys.argv[1]); p.mkdir(); "
        code += f"(p / 'metrics.jsonl').write_text({TRAIN!r}); time.sleep(int(sys.argv[2]))"

        def training(norm, seconds, limit_s):
            command = (PYTHON, "-c", code, str(work / f"train-{norm}"), str(seconds))
            return gpu_report.Part(f"train-{norm}", f"Training with {norm} in {dtype}", limit_s, command)

        return [checks, [bench], [training("torch", 0, 20), training("triton", 60, 1)]]

    monkeypatch.setattr(gpu_report, "plan", plan)
    monkeypatch.setattr(gpu_report, "prepare", lambda *_: None)
    monkeypatch.setattr(gpu_report, "choose_autocast_dtype", lambda *_: torch.bfloat16)  # as on a recent GPU


def test_the_report_says_what_passed_and_what_did_not(command, tmp_path, stand_ins):
    out = tmp_path / "out"
    code, stdout, stderr = command(gpu_report.main, "--device", "cpu", "--norms", "torch", "--out", out)
    assert code == 1
    assert stdout == "failed: Contract tests; Parity-Bfloat16; Training with triton in bfloat16\n"
    assert "Benchmark: passed" in stderr

    parts = json.loads((out / "report.json").read_text())["parts"]
    assert parts["contract"]["passed"] == 1
    assert parts["contract"]["failed"] == ["test_bad", "test_broken"]
    assert parts["bench"]["figures"] == {"machine": "this"}
    assert parts["train-torch"]["tokens_per_s"] == 2000  # the second half's median
    assert (out / "bench.png").read_bytes() == b"picture"

    text = (out / "report.md").read_text()
    assert "1 passed, 2 failed, 1 skipped." in text
    assert "- test_bad" in text
    assert "| torch | 2,000 | 2.0000 | 4.5000 |" in text
    assert "| triton |" not in text  # the figures of a training run that was stopped are no result
    assert "| Training with torch in bfloat16 | passed |" in text
    assert f"{describe(CPU)}, Python" in text
    assert "bench table" in text
    assert "![Benchmark](bench.png)" in text
    assert "no such GPU" in text
    assert "bar" not in text.replace("no such GPU", "")  # what a progress bar has overwritten
    assert not (out / "work").exists()
    for picture in re.findall(r"\]\((.*?)\)", text):
        assert (out / picture).exists()


def test_figures_of_an_earlier_run_are_not_reported(command, tmp_path, stand_ins):
    stale = tmp_path / "out/work/parity-float32"
    stale.mkdir(parents=True)
    (stale / "parity.json").write_text("{}")
    (stale / "parity.png").write_bytes(b"old picture")
    command(gpu_report.main, "--device", "cpu", "--norms", "torch", "--out", tmp_path / "out")
    assert "figures" not in json.loads((tmp_path / "out/report.json").read_text())["parts"]["parity-float32"]
    assert not (tmp_path / "out/parity-float32.png").exists()


def test_without_a_gpu_it_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "choose_device", lambda name: CPU)
    code, _, stderr = command(gpu_report.main, "--out", tmp_path / "out")
    assert (code, stderr.count("\n")) == (2, 1)
    assert "there is no GPU here" in stderr
    assert not (tmp_path / "out").exists()
