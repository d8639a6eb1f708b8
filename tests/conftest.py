"""Fixtures and options of the tests: a small model with weights worth testing, and commands called in this process."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import kernels
from kernels.emulated import GPUS, description, emulate, emulate_without_gpu, emulated_gpu
from kernels.emulated.gpus import DEFAULT
from kernels.form import FORMS
from model.cli import choose_autocast_dtype, choose_device, names_in, run
from model.config import LlamaConfig
from model.llama import Llama
from tests.helpers import CPU, TEXT, TRAINED, draw_weights, metrics_of, train_dtype

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children
# The models are tiny, and threads that wait for each other cost more than they bring, in commands started here too.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or Inductor starts processes that import torch again


def pytest_addoption(parser):
    parser.addoption("--norm", help=f"norms for test_norm_contract.py, comma-separated: {kernels.USAGE}")
    form_help = "form of the norm that test_norm_contract.py holds --norm to; one without offset and round_once too"
    parser.addoption("--form", default="llama", choices=list(FORMS), help=form_help)
    parser.addoption("--device", default="cpu", help="where test_norm_contract.py and test_triton_rms_norm.py run")
    emulate_help = f"run Triton's kernels as compiled for {', '.join(GPUS)}; without a GPU {DEFAULT} (default)"
    parser.addoption("--emulate", default="none", choices=["none", *GPUS], metavar="GPU", help=emulate_help)
    parser.addoption(
        "--train-dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="what training runs compute in; by name, since train.py's auto is bfloat16 on CPUs with its instructions",
    )


def pytest_configure(config):
    device = config.getoption("--device")
    os.environ["NORM_TEST_DEVICE"] = device
    os.environ["TRAIN_DTYPE"] = config.getoption("--train-dtype")
    if device == "cpu":  # most of the suite compares with CPU results, and runs Triton's kernels on an emulated GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        if (gpu := config.getoption("--emulate")) != "none":
            emulate(gpu)
        emulate_without_gpu()
        chosen = choose_device(device)
        for norm in names_in(config.getoption("--norm") or ""):
            kernels.load_backend(norm, chosen)
    except kernels.InputError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n, neighbours stay in one process, and share what they compute once; one that is done takes tests over."""
    if config.getoption("dist") == "load":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)
    return None


def pytest_report_header(config):
    auto = str(choose_autocast_dtype("auto", CPU)).removeprefix("torch.")
    lines = [f"training runs: {config.getoption('--train-dtype')} by name; --dtype auto would be {auto} on this CPU"]
    return [*lines, f"norm triton: {description()}"] if emulated_gpu() else lines


def pytest_collection_modifyitems(config, items):
    if config.getoption("--norm"):  # then nothing but that is tested
        items[:] = [item for item in items if not item.name.startswith("test_compile_backend")]


@pytest.fixture
def config() -> LlamaConfig:
    """Grouped heads, sizes that are not powers of two, and an eps unlike any default."""
    return LlamaConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        rms_norm_eps=3e-3,
        rope_theta=5000.0,
    )


@pytest.fixture
def make_model():
    """A model whose every weight matters, with rows small enough for eps to show."""

    def make(config: LlamaConfig, norm: str = "reference", seed: int = 0) -> Llama:
        torch.manual_seed(seed)
        model = Llama(config, kernels.load_backend(norm, CPU)).eval()
        draw_weights(model, std=0.06)
        return model

    return make


class Done(NamedTuple):
    """What a command has left."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capsys, tmp_path_factory):
    """Call a command's main with arguments: (exit code, stdout, stderr). Standard input is bytes in a file, or none."""

    def call(main, *arguments, stdin=None):
        path = Path(os.devnull)
        if stdin is not None:
            path = tmp_path_factory.mktemp("stdin") / "stdin"
            path.write_bytes(stdin)
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", path.open())
        capsys.readouterr()
        code = 0
        try:
            run(main)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a text and a config; out/ of the runs goes there too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "config.json").write_text(json.dumps(TRAINED))
    return tmp_path


@pytest.fixture
def trained(workplace, command):
    """Train in the workplace with small defaults; returns metrics, stdout and stderr."""
    import train  # not at the top: it settles how Triton runs, and pytest_configure may hide the GPU first

    def run(*arguments, out="out/model"):
        defaults = "--config config.json --data text.txt --block-size 16 --batch-size 4 --steps 5"
        defaults += f" --dtype {train_dtype()}"
        code, stdout, stderr = command(train.main, *defaults.split(), "--out", out, *arguments)
        assert code == 0, stderr
        return metrics_of(workplace / out), stdout, stderr

    return run
