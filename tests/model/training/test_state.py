"""A resumed run is bit-identical to one that never stopped: after a signal, a kill, a full disk."""

import json
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import train
from model.training.data_folder import sha256_of
from model.training.run_folder import newest_step
from tests.helpers import losses, metrics_of, needs_compiler, needs_triton, train_dtype
from tests.model.training import runs

RUN = "--config config.json --data text.txt --block-size 16 --batch-size 4 --out out/model".split()  # noqa: SIM905
RUN += ["--dtype", train_dtype()]


@pytest.fixture
def stopped(monkeypatch):
    """Send this process a signal while a step of the next run is computed."""

    def at(step, number):
        def rate(now, args, usual=train.learning_rate):
            if now == step:
                signal.raise_signal(number)
            return usual(now, args)

        monkeypatch.setattr(train, "learning_rate", rate)

    yield at
    monkeypatch.undo()


def what_counts(folder):
    """Losses and rates of every step of a finished run, and the bits of its weights."""
    lines = [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in metrics_of(folder)]
    return lines, (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("norm", "step", "more"),
    [
        ("reference", 0, ()),
        ("torch", 3, ("--grad-accum", "3")),
        ("torch", 6, ("--dtype", "bfloat16", "--checkpoint-activations")),
        ("reference", 2, ("--dtype", "bfloat16", "--grad-accum", "2")),
        ("tests.norms:noisy", 4, ("--grad-accum", "2")),
        ("layer_norm_bias", 3, ("--grad-accum", "2")),
        pytest.param("compile", 2, (), marks=[needs_compiler, pytest.mark.long]),
        pytest.param("triton", 1, ("--log-norms", "2", "--steps", "4", "--batch-size", "16"), marks=needs_triton),
    ],
)
def test_an_interrupted_and_resumed_run_is_bit_identical(norm, step, more, trained, workplace, command, stopped):
    run = ["--norm", norm, "--steps", 8, "--save-interval", 3, "--eval-interval", 3, *more]
    trained(*run, out="out/whole")
    whole = what_counts(workplace / "out/whole")

    stopped(step, signal.SIGTERM)
    code, stdout, stderr = command(train.main, *RUN, *run)
    assert (code, stdout) == (128 + signal.SIGTERM, "")
    assert f"SIGTERM: saved after step {step + 1}; continue with --resume --out out/model" in stderr
    assert len((workplace / "out/model/metrics.jsonl").read_text().splitlines()) == step + 1

    code, _, stderr = command(train.main, "--resume", "--out", "out/model")  # all else is known from the run
    assert code == 0, stderr
    assert f"out/model resumes after step {step + 1}" in stderr
    assert what_counts(workplace / "out/model") == whole
    assert len(whole[0]) == (4 if norm == "triton" else 8)


def test_the_noisy_norm_depends_on_the_random_state(trained, monkeypatch):
    noisy = losses(trained("--norm", "tests.norms:noisy", out="out/0")[0])
    monkeypatch.setattr(train, "step_seed", lambda seed, step, process: 5)
    assert noisy != losses(trained("--norm", "tests.norms:noisy", out="out/1")[0])


def test_a_run_whose_text_has_changed_goes_on_with_what_was_prepared(trained, workplace):
    constant = ["--lr", "1e-3", "--min-lr", "1e-3", "--warmup", 2]
    trained("--steps", 5, *constant, out="out/whole")
    trained("--steps", 3, *constant)
    with open("text.txt", "a") as file:
        file.write("def g(y):\n    return y\n")
    _, _, stderr = trained("--resume", "--steps", 5)
    assert "--data text.txt or its preparation has changed; the run goes on with out/data/text-" in stderr
    assert what_counts(workplace / "out/model")[1] == what_counts(workplace / "out/whole")[1]


def test_more_steps_resume_with_the_rate_of_the_longer_run(trained, workplace):
    constant = ["--lr", "1e-3", "--min-lr", "1e-3", "--warmup", 2]  # so that the rates of both lengths are the same
    trained("--steps", 6, *constant, out="out/whole")
    trained("--steps", 3, *constant)
    _, _, stderr = trained("--resume", "--steps", 6)
    assert "resuming with steps 6; the run had 3" in stderr
    whole, extended = what_counts(workplace / "out/whole"), what_counts(workplace / "out/model")
    assert extended[1] == whole[1]
    assert losses(extended[0]) == losses(whole[0])
    assert extended[0][3]["lr"] == 1e-3


def test_ctrl_c_saves_and_a_second_one_a_second_later_ends_at_once(workplace, command, monkeypatch, stopped):
    stopped(2, signal.SIGINT)
    code, _, stderr = command(train.main, *RUN, "--steps", 9)
    assert code == 130
    assert "SIGINT: saved after step 3" in stderr
    code, _, stderr = command(train.main, *RUN, "--steps", 9)
    assert code == 2
    assert "holds a run that stopped after step 3; use --resume, or name another --out" in stderr

    def twice(model, batch):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train, "summed_loss", twice)
    code, _, stderr = command(train.main, "--resume", *RUN)
    assert (code, stderr.splitlines()[-1]) == (130, "interrupted")


@pytest.mark.long
def test_a_run_killed_ten_times_at_random_is_the_run_left_alone(workplace):
    run = [*RUN, "--steps", 50, "--save-interval", 1, "--eval-interval", 50, "--norm", "torch"]
    assert runs.finish(workplace, run, "log")[0] == 0
    whole = what_counts(workplace / "out/model")
    shutil.rmtree(workplace / "out/model")

    chance, went_on = random.Random(5), []
    for _ in range(10):
        went_on.append(newest_step(workplace / "out/model/state"))
        process = runs.start(workplace, [*run, *(["--resume"] if went_on[-1] else [])], "log")
        more = chance.randint(1, 3)  # steps, and then a moment of a step and its save
        while newest_step(workplace / "out/model/state") < went_on[-1] + more:
            assert process.is_alive(), (workplace / "log").read_text()
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert went_on == sorted(set(went_on))  # each run began later than the one before it
    assert runs.finish(workplace, [*run, "--resume"], "log")[0] == 0
    assert what_counts(workplace / "out/model") == whole
    assert not list((workplace / "out/model").rglob("*.partial"))


def test_a_run_killed_at_many_points_of_a_save_is_the_run_left_alone(workplace):
    run = [*RUN, "--steps", 2, "--save-interval", 1, "--eval-interval", 2]
    assert runs.finish(workplace, run, "log")[0] == 0
    whole = what_counts(workplace / "out/model")
    for call in range(1, 100, 7):
        shutil.rmtree(workplace / "out/model")
        code, _ = runs.finish(workplace, run, "log", dies_at=call)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        resume = ["--resume"] if newest_step(workplace / "out/model/state") else []
        code, message = runs.finish(workplace, [*run, *resume], "log")
        assert code == 0, (call, message)
        assert what_counts(workplace / "out/model") == whole, call
        assert not list((workplace / "out/model").rglob("*.partial")), call
        assert len(list((workplace / "out/model/state").iterdir())) == 1, call
    assert 20 < call < 90  # so often do two saves flush, rename and remove


def test_files_are_fsynced_before_the_rename(trained, workplace, monkeypatch):
    flushed, placed = set(), set()

    def fsync(descriptor, usual=os.fsync):
        usual(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def checked(usual):
        def move(path, target):
            for file in path.rglob("*") if path.is_dir() else [path]:
                assert file.stat().st_ino in flushed or "out/data" in str(path), file
            placed.add(Path(target).name)
            return usual(path, target)

        return move

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, checked(getattr(Path, name)))
    trained("--steps", 2)
    assert (workplace / "out/model/metrics.jsonl").stat().st_ino in flushed
    assert placed > {"run.json", "metrics.jsonl", "loss.png", "model.safetensors", "config.json", "step-00000002"}


@pytest.mark.parametrize(("largest_file", "named"), [(100_000, "model.safetensors"), (250_000, "step-00000004")])
def test_a_full_disk_ends_in_one_line_and_what_was_saved_stands(largest_file, named, workplace, trained, command):
    trained("--steps", 2)
    model, state = workplace / "out/model/model.safetensors", workplace / "out/model/state"
    assert (model.stat().st_size > largest_file) == (named == "model.safetensors")
    saved = model.read_bytes()
    run = ["--resume", "--out", "out/model", "--steps", 4]
    code, message = runs.finish(workplace, run, "log", largest_file=largest_file)
    assert code == 2
    assert message.startswith("error: ")
    assert f"{named} can" in message
    assert "Traceback" not in (workplace / "log").read_text()
    assert [path.name for path in state.iterdir()] == ["step-00000002"]
    assert (model.read_bytes() == saved) == (named == "model.safetensors")
    assert not list((workplace / "out/model").rglob("*.partial"))

    assert command(train.main, *run)[0] == 0
    resumed = what_counts(workplace / "out/model")
    trained("--steps", 2, out="out/other")
    trained("--steps", 4, "--resume", out="out/other")
    assert resumed == what_counts(workplace / "out/other")


def test_metrics_that_a_full_disk_cannot_hold_end_in_one_line(workplace, trained):
    trained("--steps", 1, out="out/other")  # so that the data is there
    code, message = runs.finish(workplace, [*RUN, "--steps", 40, "--eval-interval", 40], "log", largest_file=3_000)
    assert code == 2
    assert message == "error: the output cannot be written (File too large); free some space and try again"
    assert not (workplace / "out/model/state").exists()


def test_an_infinite_gradient_stops_the_run_before_the_weights_take_it(workplace, trained, command):
    trained("--steps", 2)
    saved = what_counts(workplace / "out/model")
    run = [
        "--resume",
        "--out",
        "out/model",
        "--steps",
        4,
        "--norm",
        "tests.norms:infinite_gradient",
    ]
    code, _, stderr = command(train.main, *run)
    assert code == 2
    assert stderr.splitlines()[-1].startswith("error: step 3: the loss is ")
    assert "stopped before the update; the last checkpoint is unchanged" in stderr
    assert what_counts(workplace / "out/model") == saved
    assert newest_step(workplace / "out/model/state") == 2


def test_weights_that_a_step_has_ruined_are_not_saved(workplace, trained, command, monkeypatch):
    trained("--steps", 2)
    saved = what_counts(workplace / "out/model")
    monkeypatch.setattr(train, "learning_rate", lambda step, args: math.inf)  # loss and gradient of the step are finite
    code, _, stderr = command(train.main, "--resume", "--out", "out/model", "--steps", 4, "--save-interval", 1)
    assert code == 2
    assert stderr.splitlines()[-1].startswith(
        "error: step 3 has left NaN or infinite weights or validation loss; stopped "
    )
    assert what_counts(workplace / "out/model") == saved
    assert newest_step(workplace / "out/model/state") == 2


def test_weights_that_give_no_finite_validation_loss_are_not_saved(workplace, command):
    code, _, stderr = command(train.main, *RUN, "--steps", 2, "--norm", "tests.norms:nan_in_evaluation")
    assert code == 2
    assert "error: step 2 has left NaN or infinite weights or validation loss" in stderr
    assert not (workplace / "out/model/model.safetensors").exists()


def test_a_damaged_state_ends_in_one_line_with_nothing_of_pytorchs_above_it(workplace, trained):
    trained("--steps", 3)
    garble_metadata(workplace / "out/model")
    code, message = runs.finish(workplace, ["--resume", "--out", "out/model", "--steps", 5], "log")
    assert code == 2
    assert "state/step-00000003 cannot be read" in message
    assert "Traceback" not in (workplace / "log").read_text()


def damage_state(folder):
    for file in (folder / "state/step-00000003").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:5000])


def zero_weights(folder):
    [file] = (folder / "state/step-00000003").glob("*.distcp")
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(4096) + content[middle + 4096 :])


def garble_checksums(folder):
    (folder / "state/step-00000003/checksums.json").write_text('{"__0_0.distcp": 1}')


def lose_metadata(folder):
    (folder / "state/step-00000003/.metadata").unlink()


def garble_metadata(folder):
    (folder / "state/step-00000003/.metadata").write_bytes(b"\x80\x04nothing")


def change_data(folder):
    with open("text.txt", "a") as file:
        file.write("def g(y):\n    return y\n")
    shutil.rmtree("out/data")


def remove_run(folder):
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_state, "state/step-00000003/__0_0.distcp has 5,000 bytes; expected "),
        (zero_weights, "state/step-00000003/__0_0.distcp is damaged: its SHA-256 is not that of what was written"),
        (garble_checksums, "state/step-00000003 cannot be read"),
        (lose_metadata, "state/step-00000003 cannot be read (out/model/state/step-00000003/.metadata cannot be read "),
        (garble_metadata, "state/step-00000003 cannot be read"),
        (change_data, "--data or its vocabulary has changed since the run began"),
        (remove_run, "out/model holds no run to continue; leave --resume out"),
    ],
)
def test_what_cannot_resume_is_refused_in_one_line(damage, message, workplace, trained, command):
    trained("--steps", 3)
    damage(workplace / "out/model")
    before = sorted(path.name for path in workplace.rglob("*"))
    code, stdout, stderr = command(train.main, "--resume", "--out", "out/model", "--steps", 5)
    assert (code, stdout) == (2, "")
    assert stderr.splitlines()[-1].startswith("error: ")
    assert message in stderr.splitlines()[-1]
    assert "remove" not in stderr  # a state is never to be thrown away
    assert "Traceback" not in stderr
    assert sorted(path.name for path in workplace.rglob("*")) == before or damage is change_data


def test_a_state_of_an_earlier_version_and_one_over_a_killed_save_resume(workplace, trained, monkeypatch):
    trained("--steps", 3)
    state = workplace / "out/model/state"
    (state / "step-00000003/checksums.json").unlink()
    (state / "step-00000004.partial").mkdir()
    (state / "step-00000004.partial/checksums.json").write_text('{"__0_0.distcp": [1, null]}')
    trained("--steps", 4, "--resume")
    saved = json.loads((state / "step-00000004/checksums.json").read_text())
    assert saved.keys() == {".metadata", "__0_0.distcp"}
    monkeypatch.setattr("model.training.state.HASHED", saved["__0_0.distcp"][0] - 1)  # too large to hash
    trained("--steps", 5, "--resume")
    saved = json.loads((state / "step-00000005/checksums.json").read_text())
    size = (state / "step-00000005/__0_0.distcp").stat().st_size
    assert saved["__0_0.distcp"] == [size, None]
    assert saved[".metadata"][1] == sha256_of(state / "step-00000005/.metadata")
    trained("--steps", 6, "--resume")


@pytest.mark.parametrize("content", [None, "{}", '{"arguments": {}}', '{"arguments": {"steps": "3"}}'])
def test_a_state_whose_run_is_unknown_is_not_begun_over(content, workplace, trained, command):
    trained("--steps", 3)
    (workplace / "out/model/run.json").unlink()
    if content:
        (workplace / "out/model/run.json").write_text(content)
    code, _, stderr = command(train.main, *RUN, "--steps", 3)
    assert code == 2
    assert "error: --out out/model holds a run that stopped after step 3; " in stderr
    assert newest_step(workplace / "out/model/state") == 3


def test_a_finished_run_says_so_and_is_left_alone(workplace, trained):
    trained("--steps", 3)
    before = what_counts(workplace / "out/model")
    _, stdout, stderr = trained("--steps", 3, "--resume")
    assert "the run in out/model has 3 steps behind it; --steps N takes it further" in stderr
    assert stdout == ""
    assert what_counts(workplace / "out/model") == before


def test_a_new_run_leaves_no_state_of_the_one_before(workplace, trained, command, stopped):
    trained("--steps", 4, "--seed", 1)
    stopped(0, signal.SIGTERM)
    assert command(train.main, *RUN, "--steps", 4, "--seed", 2)[0] == 128 + signal.SIGTERM
    assert newest_step(workplace / "out/model/state") == 1
    about = json.loads((workplace / "out/model/run.json").read_text())
    assert about["arguments"]["seed"] == 2
    assert about["versions"]["torch"] == torch.__version__


def test_flags_given_at_the_resume_hold(workplace, trained, command):
    trained("--steps", 3)
    shutil.copytree(workplace / "out/model", workplace / "out/other")
    weights = []
    for out, decay in (("out/model", "0.1"), ("out/other", "90")):
        run = ["--resume", "--out", out, "--steps", 5, "--weight-decay", decay]
        assert command(train.main, *run)[0] == 0
        weights.append(what_counts(workplace / out)[1])
    assert weights[0] != weights[1]


def test_ctrl_c_while_a_state_is_read_is_not_reported_as_damage(workplace, trained, command, monkeypatch):
    trained("--steps", 2)

    def interrupted(*arguments, **keywords):
        raise CheckpointException("", {0: (KeyboardInterrupt(), None)})  # what dcp makes of it

    monkeypatch.setattr("model.training.state.load", interrupted)
    code, _, stderr = command(train.main, "--resume", "--out", "out/model", "--steps", 4)
    assert (code, stderr.splitlines()[-1]) == (130, "interrupted")
    assert newest_step(workplace / "out/model/state") == 2
