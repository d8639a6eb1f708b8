"""Several processes over gloo: the losses, checkpoints and stops of one process, and none that waits for a dead one."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train
from kernels import InputError
from model.training import distributed
from model.training.distributed import finite, process_group
from model.training.run_folder import newest_step
from tests.helpers import CPU, ROOT, losses, metrics_of, train_dtype
from tests.model.training import runs
from train import NORM_METRICS

RUN = "--config config.json --data text.txt --block-size 16 --batch-size 7 --norm torch".split()  # noqa: SIM905
RUN += ["--dtype", train_dtype()]
CONSTANT = ["--lr", "1e-3", "--min-lr", "1e-3", "--warmup", "1"]  # a rate that the number of steps doesn't change
HAS_FSDP = hasattr(torch.cpu.Stream, "record_event")
DIVIDED = {"--fsdp", "--tp=2"}  # what divides the weights
needs_fsdp = pytest.mark.skipif(not HAS_FSDP, reason="no FSDP2 on a CPU in this torch")


def same_run(got, expected, controls=()):
    """Sums of float32 in another order, carried through a few steps.

    bfloat16 rounds each sum's parts, so what is allowed there is 4 times what equally right runs in one process show.
    """
    assert sorted(path.name for path in got.iterdir()) == sorted(path.name for path in expected.iterdir())
    weights, reference_weights = load_file(got / "model.safetensors"), load_file(expected / "model.safetensors")
    assert weights.keys() == reference_weights.keys()
    if train_dtype() == "bfloat16":
        allowed = 4 * np.max([distance(control, expected) for control in controls], axis=0)
        assert (distance(got, expected) <= allowed).all(), (distance(got, expected), allowed)
        return
    assert losses(metrics_of(got)) == pytest.approx(losses(metrics_of(expected)), rel=1e-6)
    assert metrics_of(got)[-1]["val_loss"] == pytest.approx(metrics_of(expected)[-1]["val_loss"], rel=1e-6)
    norms, reference_norms = ([line["grad_norm"] for line in metrics_of(folder)] for folder in (got, expected))
    assert norms == pytest.approx(reference_norms, rel=1e-5)
    for line, reference in zip(metrics_of(got), metrics_of(expected), strict=True):
        for name in line.keys() & set(NORM_METRICS):
            assert line[name] == pytest.approx(reference[name], rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, reference_weights[name], rtol=1e-3, atol=1e-5, msg=name)


def distance(a, b):
    """Distance of two runs: the largest difference of a loss, of a gradient's norm, of a weight."""
    a_metrics, b_metrics = metrics_of(a), metrics_of(b)
    a_weights, b_weights = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return np.array(
        [
            np.abs(np.subtract(losses(a_metrics), losses(b_metrics))).max(),
            max(abs(x["grad_norm"] - y["grad_norm"]) for x, y in zip(a_metrics, b_metrics, strict=True)),
            max((a_weights[name] - b_weights[name]).abs().max().item() for name in a_weights),
        ]
    )


@pytest.fixture
def controls(trained, workplace):
    """Runs of one process that are as right as `run`: the batch summed in other parts, and with a bfloat16 stream.

    FSDP has such a stream, and tensor parallel adds up bfloat16 parts of what goes into it.

    None in float32, where 1e-6 is the measure.
    """

    def train_them(run, narrow):
        parts = [["--grad-accum", n] for n in ("2", "4", "5", "7")]
        ways = [*parts, *([["--norm", "torch@bfloat16"]] if narrow else [])]
        for i, way in enumerate(ways if train_dtype() == "bfloat16" else []):
            trained(*(argument for argument in run if argument not in DIVIDED), *way, out=f"out/control{i}")
            yield workplace / f"out/control{i}"

    return lambda run, narrow: list(train_them(run, narrow))


@pytest.mark.parametrize(
    ("n", "more"),
    [
        (2, ["--grad-accum", "3"]),
        (3, []),
        pytest.param(2, ["--fsdp", "--grad-accum", "2", "--checkpoint-activations"], marks=needs_fsdp),
        pytest.param(3, ["--fsdp", "--log-norms", "2"], marks=needs_fsdp),
        (2, ["--log-norms", "2", "--checkpoint-activations", "--tp=2"]),
        pytest.param(4, ["--grad-accum", "2", "--tp=2"], marks=pytest.mark.long),
        pytest.param(4, ["--fsdp", "--log-norms", "2", "--tp=2"], marks=[needs_fsdp, pytest.mark.long]),
    ],
)
def test_n_processes_give_the_run_of_one(n, more, workplace, trained, controls):
    run = [*RUN, *more, "--steps", "4"]
    trained(*(argument for argument in run if argument not in DIVIDED), out="out/one")
    codes = runs.finish_connected(workplace, [*run, "--out", "out/several"], n)
    assert codes == [0] * n, (workplace / "0.log").read_text()
    same_run(workplace / "out/several", workplace / "out/one", controls(run, not DIVIDED.isdisjoint(more)))
    assert json.loads((workplace / "out/several/run.json").read_text())["processes"] == n
    output = [(workplace / f"{i}.log").read_text() for i in range(n)]
    how = ["2 divide each matrix (tensor parallel)"] * ("--tp=2" in more)
    if not how or n > 2:
        how.append("FSDP2: each holds a shard of the weights" if "--fsdp" in more else "data parallel")
    assert f"{n} processes, {', '.join(how)}\n" in output[0]
    assert output[1:] == [""] * (n - 1)  # one of them speaks for all


def test_a_run_resumes_in_another_number_of_processes(workplace, trained, command, controls):
    more = ["--fsdp"] if HAS_FSDP else []
    run = [*RUN, *CONSTANT]
    trained(*run, "--steps", "6", out="out/one")
    out = ["--out", "out/several"]
    assert runs.finish_connected(workplace, [*run, *out, "--steps", "2", *more], 3) == [0] * 3
    assert runs.finish_connected(workplace, ["--resume", *out, "--steps", "4", "--no-fsdp", "--tp=2"], 2) == [0] * 2
    assert command(train.main, "--resume", *out, "--steps", "6", "--tp=1")[0] == 0
    same_run(workplace / "out/several", workplace / "out/one", controls([*run, "--steps", "6"], HAS_FSDP))


@pytest.mark.long
@needs_fsdp
def test_a_divided_run_resumes_in_every_layout(workplace, trained, controls):
    run = [*RUN, *CONSTANT]
    trained(*run, "--steps", "5", out="out/one")
    out = ["--out", "out/several"]
    ways = [(2, ["--tp=2"]), (4, ["--tp=2", "--fsdp"]), (2, ["--tp=1", "--fsdp"]), (4, ["--tp=2", "--no-fsdp"])]
    for steps, (n, way) in enumerate(ways, 2):
        begins = ["--resume"] if steps > 2 else run
        codes = runs.finish_connected(workplace, [*begins, *out, "--steps", steps, *way], n)
        assert codes == [0] * n, (workplace / "0.log").read_text()
    same_run(workplace / "out/several", workplace / "out/one", controls([*run, "--steps", "5"], True))


def when_saved(processes, state):
    """Wait for the first state of a run of many steps."""
    until = time.monotonic() + 120
    while not newest_step(state):
        assert time.monotonic() < until
        assert all(process.is_alive() for process in processes)
        time.sleep(0.01)


LONG = [*RUN, "--steps", "100000", "--save-interval", "2", "--out", "out/long"]


def test_a_signal_to_one_process_stops_all_at_the_same_step(workplace, trained):
    processes = runs.start_connected(workplace, LONG, 2)
    when_saved(processes, workplace / "out/long/state")
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [128 + signal.SIGTERM] * 2
    step = newest_step(workplace / "out/long/state")
    assert len(metrics_of(workplace / "out/long")) == step
    assert f"SIGTERM: saved after step {step}" in (workplace / "0.log").read_text()


@pytest.mark.parametrize(("n", "more"), [(3, []), (2, ["--tp=2"])])
def test_a_process_that_dies_ends_the_others_with_a_message(n, more, workplace):
    processes = runs.start_connected(workplace, [*LONG, *more], n)
    when_saved(processes, workplace / "out/long/state")
    processes[1].kill()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [2, -signal.SIGKILL, 2][:n]
    for i, name in ((0, "error: "), (2, "error in process 2: "))[: n - 1]:
        last = (workplace / f"{i}.log").read_text().splitlines()[-1]
        assert last.startswith(f"{name}another process has ended or cannot be reached")
        assert "--resume continues from the last save" in last
        assert "Traceback" not in (workplace / f"{i}.log").read_text()


def test_neighbours_compute_one_part_of_the_batch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    parts = []
    for i in range(6):
        monkeypatch.setenv("RANK", str(i))
        parts.append(distributed.part_of(np.arange(7), tp=2).tolist())
    assert parts == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4], [5, 6], [5, 6]]


def test_fsdp_computes_in_the_dtype_and_reduces_gradients_in_float32(config, make_model, monkeypatch):
    policies = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "init_device_mesh", lambda *shape, mesh_dim_names: {"data": None})
    monkeypatch.setattr(distributed, "fully_shard", lambda module, mesh, mp_policy: policies.append(mp_policy))
    monkeypatch.setattr(torch.cpu.Stream, "record_event", None, raising=False)  # torch 2.6 lacks it
    distributed.divide(make_model(config), CPU, fsdp=True, tp=1, dtype=torch.bfloat16)
    dtypes = [(policy.param_dtype, policy.reduce_dtype) for policy in policies]
    assert dtypes == [(torch.bfloat16, torch.float32)] * (config.num_hidden_layers + 1)  # each layer, and the rest


@pytest.mark.parametrize("wanted", [True, False])
def test_data_parallel_gradients_wait_until_they_are_wanted(wanted, config, make_model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.parallel.DistributedDataParallel(make_model(config))
        with distributed.gradient_sync(module, wanted):
            assert module.require_backward_grad_sync == wanted
        assert module.require_backward_grad_sync
    finally:
        torch.distributed.destroy_process_group()


def test_one_nan_in_one_weight_is_found(config, make_model):
    model = make_model(config)
    assert finite(model, CPU)
    with torch.no_grad():
        model.layers[1].feed_forward.up_proj.weight[3, 5] = torch.nan
    assert not finite(model, CPU)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9", True),
        ("failed to recv, got 0 bytes: the TCPStore has gone", True),
        ("Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected", True),
        ("the restored cache has another size", False),
    ],
)
def test_only_a_process_that_is_lost_is_called_that(text, lost, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: None)
    with pytest.raises(InputError if lost else RuntimeError) as caught, process_group(CPU):
        raise RuntimeError(text)
    assert ("another process has ended or cannot be reached" in str(caught.value)) == lost


@needs_fsdp
def test_norms_keep_float32_statistics_when_fsdp_computes_in_bfloat16(workplace):
    run = [
        *RUN,
        "--norm",
        "tests.norms:checked",
        "--fsdp",
        "--dtype",
        "bfloat16",
        "--steps",
        "2",
    ]
    codes = runs.finish_connected(workplace, [*run, "--out", "out/bfloat16"], 2)
    assert codes == [0, 0], (workplace / "0.log").read_text()
    saved = load_file(workplace / "out/bfloat16/model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


def test_each_process_draws_random_numbers_of_its_own(workplace):
    run = [*RUN, "--norm", "tests.norms:seen", "--steps", "2", "--out", "out/seen"]
    assert runs.finish_connected(workplace, run, 2) == [0, 0], (workplace / "0.log").read_text()
    first, second = ({*(workplace / f"{i}.seeds").read_text().split()} for i in range(2))
    assert len(second) == 2  # one a step
    assert not first & second


def test_torchrun_ends_when_a_process_dies(workplace):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = [
        *RUN,
        "--norm",
        "tests.norms:dying",
        "--steps",
        "100000",
        "--save-interval",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(ROOT / "train.py"), *run, "--out", "out/torchrun"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert newest_step(workplace / "out/torchrun/state") >= 2
    assert "another process has ended" in done.stderr


@pytest.mark.parametrize(
    ("n", "arguments", "message"),
    [
        (1, ["--fsdp"], "--fsdp divides the weights among processes; start several: torchrun"),
        (
            2,
            ["--grad-accum", "4"],
            "--batch-size 7 has too few sequences for --grad-accum 4 parts in each of 2 processes",
        ),
        (1, ["--tp=2"], "--tp 2 divides each matrix among 2 processes, and 1 run; start a multiple of 2: torchrun"),
        (2, ["--tp=4"], "--tp 4 divides each matrix among 4 processes, and 2 run"),
        (2, ["--tp=2", "--fsdp"], "--fsdp divides the weights among processes, beside the 2 of --tp; start several"),
        (2, ["--tp=2", "--compile"], "--compile and --tp 2: PyTorch compiles a divided model for minutes"),
        (2, ["--tp=2", "--block-size", "15"], "--tp 2 does not divide --block-size 15"),
        (2, ["--data", "nothing.txt"], "--data nothing.txt does not exist"),
    ],
)
def test_what_processes_cannot_do_is_refused_in_one_line(n, arguments, message, workplace):
    codes = runs.finish_connected(workplace, [*RUN, *arguments, "--out", "out/refused"], n)
    assert codes == [2] * n
    output = (workplace / "0.log").read_text()
    assert message in output.splitlines()[-1]
    assert "Traceback" not in output
    assert not (workplace / "out/refused").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fed", "--data text.txt is not the same for all processes"),
        ("def", "--out out/refused is not one folder for all processes"),
    ],
)
def test_processes_that_share_no_data_or_folder_are_refused(word, message, workplace):
    other = workplace / "other"
    other.mkdir()
    (other / "text.txt").write_text((workplace / "text.txt").read_text().replace("def", word))
    (other / "config.json").write_text((workplace / "config.json").read_text())
    folders, n = [workplace, other], 2
    places = runs.places(n)
    processes = [
        runs.start(folders[i], [*RUN, "--out", "out/refused"], folders[i] / "log", places[i]) for i in range(n)
    ]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [2, 2]
    for folder in folders:
        assert message in (folder / "log").read_text().splitlines()[-1]
        assert not list(folder.glob("out/refused/state"))
