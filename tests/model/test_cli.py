"""model/cli.py: errors of one line, and the choice of device and dtype."""

import argparse
import ast
import io
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import generate
import train
from kernels import InputError
from model.cli import Parser, choose_autocast_dtype, choose_device, not_negative, positive, run, seed, whole_numbers
from scripts import bench_model, bench_norm, loss_parity, prepare_data
from tests.helpers import CPU, ROOT


@pytest.mark.parametrize("main", [train.main, generate.main, prepare_data.main])
@pytest.mark.parametrize("arguments", [["--no-such-flag"], ["stray"], ["--vocab-size", "x"], ["--norm"]])
def test_wrong_arguments_are_one_line_and_exit_code_2(command, main, arguments):
    code, out, err = command(main, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "--help" in err


def test_an_input_error_becomes_one_line(command):
    def main():
        raise InputError("found a\n  b;\r\n\texpected c")

    assert command(main) == (2, "", "error: found a b; expected c\n")


@pytest.mark.parametrize(("local_rank", "waits"), [(None, []), ("0", []), ("1", [5])])
def test_the_first_process_of_a_machine_speaks_first(local_rank, waits, command, monkeypatch):
    def main():
        raise InputError("found a; expected b")

    seen = []
    monkeypatch.setattr(time, "sleep", seen.append)
    monkeypatch.setenv("RANK", "3")
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert command(main) == (2, "", "error in process 3: found a; expected b\n")
    assert seen == waits


def test_an_interrupt_is_exit_code_130_without_a_traceback(command):
    def main():
        raise KeyboardInterrupt

    code, out, err = command(main)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_a_fault_of_ours_keeps_its_traceback(command, kind):
    def main():
        raise kind("a bug")

    with pytest.raises(kind, match="a bug"):
        command(main)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has"),
            " (20.50 GiB more were needed);",
        ),
        (MemoryError(), ";"),
        (None, f" ({2**62} bytes more were needed);"),
    ],
)
def test_a_full_memory_is_one_line(command, error, found):
    def main():
        if error:
            raise error
        torch.empty(2**62, dtype=torch.uint8)

    code, out, err = command(main)
    assert (code, out) == (2, "")
    assert err == f"error: out of memory{found} make the model, the batch or the text smaller\n"


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_closed_standard_streams_lose_what_goes_to_them_and_nothing_else(tmp_path, closed):
    program = """
import os, subprocess, sys
from kernels import InputError
from model.cli import run, say
def main():
    with open(sys.argv[1], "w") as file:
        os.write(2, b"a library's")
        say("ours")
        subprocess.run(["sh", "-c", "echo a child >&2 && echo child"], check=True)
        file.write("saved")
    print("text", sys.stdin.read(), end="", flush=True)
    raise InputError("the end")
run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "new"],
        cwd=ROOT,
        input=b"given",
        capture_output=True,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert (tmp_path / "new").read_text() == "saved"
    assert done.returncode == 2
    assert done.stdout == (b"" if 1 in closed else b"child\ntext " + (b"" if 0 in closed else b"given"))
    assert done.stderr == (b"" if 2 in closed else b"a library'sours\na child\nerror: the end\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_messages_that_cannot_be_written_end_nothing():
    program = "from model.cli import run, say; run(lambda: [say('lost'), print('text')])"
    full, unwritable = os.open("/dev/full", os.O_WRONLY), os.open(os.devnull, os.O_RDONLY)
    for stderr, flags in ((full, []), (full, ["-u"]), (unwritable, [])):
        command = [sys.executable, *flags, "-c", program]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr)
        assert (done.returncode, done.stdout) == (0, b"text\n")


def test_an_output_that_is_open_for_reading_alone_is_one_line():
    program = "from model.cli import run; run(lambda: print('text'))"
    with open(os.devnull) as stdout:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


WRITTEN = "é \u2047 🙂"


@pytest.mark.parametrize(
    ("environment", "out", "err"),
    [
        ({}, WRITTEN.encode(), WRITTEN.encode()),
        ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, WRITTEN.encode(), WRITTEN.encode()),
        ({"PYTHONIOENCODING": "cp1252"}, b"\xe9 ? ?", b"\xe9 \\u2047 \\U0001f642"),
        ({"PYTHONIOENCODING": "latin-1:strict"}, b"\xe9 ? ?", b"\xe9 \\u2047 \\U0001f642"),
        ({"PYTHONIOENCODING": "ascii:xmlcharrefreplace"}, b"&#233; &#8263; &#128578;", b"\\xe9 \\u2047 \\U0001f642"),
    ],
)
def test_no_character_ends_a_command(environment, out, err):
    """Python itself gives stderr, and only it, backslashes."""
    show = f"print({WRITTEN!a}, len(input())), print({WRITTEN!a}, file=sys.stderr)"
    program = f"import sys; from model.cli import run; run(lambda: ({show}))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_"))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=kept | environment, input=b"ab\xff", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, out + b" 3\n", err + b"\n")


def test_a_terminal_keeps_its_encoding(monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    stream = Terminal(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    run(lambda: print(WRITTEN))
    assert stream.buffer.getvalue() == b"\xe9 ? ?\n"


def test_streams_that_a_notebook_has_put_there_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with open(os.devnull) as closed:
        monkeypatch.setattr(sys, "stdin", closed)
    run(lambda: print(WRITTEN))
    assert sys.stdout.getvalue() == WRITTEN + "\n"


def test_a_closed_pipe_ends_without_a_traceback():
    program = "from model.cli import run\nrun(lambda: print('x\\n' * 10**6))"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141  # 128 + SIGPIPE, as the shell has it


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")),
        "cuda:99",
        "nonsense",
        "cpu:x",
        "",
        "vulkan",
        "hpu",
        "meta",
    ],
)
def test_a_device_that_is_not_here_is_refused_in_one_short_line(name):
    with pytest.raises(InputError, match="--device cpu") as error:
        choose_device(name)
    assert f"--device {name} " in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400  # PyTorch's own message can be a page that lists its backends


@pytest.fixture
def emulated(monkeypatch):
    """Names of the GPUs that commands ask for; the last is taken for emulated, without Triton."""
    asked: list[str] = []
    monkeypatch.setattr("kernels.emulated.gpus._chosen", [])

    def emulate(name):
        asked.append(name)
        monkeypatch.setattr("kernels.emulated.gpus._chosen", [name])

    monkeypatch.setattr("kernels.emulated.emulate", emulate)
    return asked


COMMANDS = [train, generate, loss_parity]


@pytest.mark.parametrize("script", COMMANDS)
def test_the_gpu_that_is_named_is_emulated_and_said_once(script, command, emulated):
    assert command(script.parse_args, "--emulate", "none") == (0, "", "")
    assert not emulated
    said = "Triton's kernels are compiled for sm_90 and run on an emulated one; their times say nothing\n"
    assert command(script.parse_args, "--emulate", "sm_90") == (0, "", said)
    assert command(script.parse_args, "--emulate", "sm_90") == (
        0,
        "",
        "",
    )  # as a command does, before and after imports
    assert emulated == ["sm_90"] * 2


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--emulate sm_70", "invalid choice: 'sm_70' (choose from"),
        ("--emulate", "--emulate: expected one argument"),
        ("--emulate sm_90 --device cuda:1", "--device cuda:1: an emulated GPU takes CPU tensors; leave --device or"),
        ("--emulate sm_90 --device meta", "--device meta: an emulated GPU takes CPU tensors; leave --device or"),
    ],
)
def test_what_cannot_be_emulated_is_one_line(script, arguments, reason, command, emulated):
    code, out, err = command(script.parse_args, *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err


@pytest.mark.parametrize("script", [train, generate])
def test_another_ones_kernel_is_not_compiled_with_the_model_where_it_is_emulated(script, command, emulated):
    code, _, err = command(script.parse_args, "--emulate", "sm_90", "--compile", "--norm", "my_kernel:norm")
    assert (code, emulated) == (2, [])
    assert err.startswith("error: --emulate sm_90 and --compile: PyTorch would compile my_kernel:norm for the CPU, ")
    for arguments in ("--compile --norm my_kernel:norm", "--emulate sm_90 --compile --norm triton"):
        assert command(script.parse_args, *arguments.split())[0] == 0


@pytest.mark.parametrize("main", [bench_norm.main, bench_model.main])
def test_a_stopwatch_refuses_an_emulated_gpu(main, command, emulated):
    code, out, err = command(main, "--emulate", "sm_90")
    assert (code, out, err.count("\n"), emulated) == (2, "", 1, [])
    assert "times on an emulated sm_90 say nothing about a real one; scripts/check_codegen.py counts" in err


def test_tensors_are_on_the_cpu_where_a_gpu_is_emulated_also_beside_a_real_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("kernels.emulated.gpus._chosen", ["sm_90"])
    assert choose_device("auto") == choose_device("cpu") == CPU


def test_auto_device_is_one_that_works():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", torch.bfloat16),
        ("flags\t\t: fpu amx_bf16\n", torch.bfloat16),
        ("Features\t: fp asimd bf16 i8mm", torch.bfloat16),
        ("flags\t\t: fpu avx512f no_avx512_bf16", torch.float32),
        ("", torch.float32),
        (None, torch.float32),
    ],
    ids=["avx512", "amx", "arm", "without", "empty", "no-cpuinfo"],
)
def test_auto_dtype_on_a_cpu_follows_its_flags(monkeypatch, tmp_path, cpuinfo, dtype):
    if cpuinfo is not None:
        (tmp_path / "proc-cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr("model.cli.Path", lambda name: tmp_path / name[1:].replace("/", "-"))
    assert choose_autocast_dtype("auto", CPU) == dtype
    assert choose_autocast_dtype("float32", CPU) == torch.float32
    assert choose_autocast_dtype("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "text", "number"),
    [
        (positive(int), "1", 1),
        (positive(int), "1_000", 1000),  # as Python writes it
        (positive(int), str(2**31 - 1), 2**31 - 1),
        (positive(float), "1e308", 1e308),
        (positive(float), "1e-300", 1e-300),
        (not_negative(int), "0", 0),
        (not_negative(float), "0", 0.0),
        (not_negative(float), "-0.0", 0.0),
    ],
)
def test_numbers_in_range_are_taken(kind, text, number):
    assert kind(text) == number


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (positive(int), ["0", "-1", "1.5", "1e3", "x", "", "inf"]),
        (positive(float), ["0", "-1", "nan", "inf", "1e999", "x", ""]),
        (not_negative(int), ["-1", "0.5", "x", ""]),
        (not_negative(float), ["-1e-9", "nan", "inf", "-inf", "x", ""]),
    ],
)
def test_numbers_out_of_range_are_refused_as_they_were_written(kind, texts):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not a "):
            kind(text)


@pytest.mark.parametrize("kind", [positive(int), not_negative(int), whole_numbers])
def test_integers_end_below_2_to_the_31(kind):
    for text in (str(2**31), "9" * 4000):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is above 2147483647; use a smaller number$"):
            kind(text)


def test_backend_arguments_take_the_dtypes_that_the_command_computes_in(command):
    parser = Parser("A command")
    parser.add_backend_arguments(["float32"])
    code, _, err = command(lambda: parser.parse_args(["--dtype", "float16"]))
    assert code == 2
    assert "float16" in err


def test_ctrl_c_during_the_imports_is_one_line():
    source = "import time; from model.cli import run; run(lambda: print('ready', flush=True)); time.sleep(60)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == "interrupted\n"
    assert process.returncode == 130


def test_a_seed_is_below_2_to_the_63():
    assert seed("0") == 0
    assert seed(str(2**63 - 1)) == 2**63 - 1
    for text in ("-1", "x", str(2**63)):
        with pytest.raises(argparse.ArgumentTypeError):
            seed(text)


COMMANDS = [path for path in [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")] if "run(main)" in path.read_text()]


@pytest.mark.parametrize("path", [*COMMANDS, ROOT / "model/checkpoint/__main__.py"], ids=lambda path: path.name)
def test_help_shows_the_whole_docstring_and_the_norms_without_importing_torch(tmp_path, path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is imported')")
    result = subprocess.run(
        [sys.executable, *(["-m", "model.checkpoint"] if path.name == "__main__.py" else [path]), "--help"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    shown = " ".join(result.stdout.split())
    assert " ".join(ast.get_docstring(ast.parse(path.read_text())).split()) in shown
    assert str(ROOT) not in shown
    names_norms = "--norms" in shown and path.name != "league.py"  # which takes other packages' alone
    if names_norms or "generate.py" in path.name or "train.py" in path.name:
        assert "reference, torch, compile, triton, auto, or your own" in shown


def test_the_commands_are_found():
    assert {path.name for path in COMMANDS} >= {"train.py", "generate.py", "plan.py", "loss_parity.py", "bench_norm.py"}
