"""The folder of a run: one run at a time, nothing trained overwritten, and a state that needs no file beside it."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

import train
from kernels import InputError
from model.training.run_folder import earlier_metrics, locked, newest_step, saved_arguments
from tests.helpers import TEXT, metrics_of
from tests.model.training import runs

RESUME = ["--resume", "--out", "out/model"]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def curve(folder):
    """Losses and rates: what doesn't depend on the clock."""
    return [(line["step"], line["loss"], line["lr"]) for line in metrics_of(folder)]


@pytest.mark.parametrize("n", [1, 2])
def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(n, trained, workplace, command):
    trained("--steps", 3)
    before, arguments = contents(workplace / "out/model"), ["--config", "config.json", "--data", "text.txt"]
    with FileLock(workplace / "out/model/.lock"):
        for more in (["--block-size", "16", "--steps", "2"], ["--resume", "--steps", "5"])[: 3 - n]:
            run = [*arguments, *more, "--out", "out/model"]
            if n == 1:
                code, _, stderr = command(train.main, *run)
                assert code == 2
            else:
                assert runs.finish_connected(workplace, run, n) == [2] * n  # the second doesn't wait for ever
                stderr = (workplace / "0.log").read_text()
            message = "another run is writing out/model; wait until it ends, or name another --out"
            assert stderr.splitlines()[-1] == f"error: {message}"
            assert contents(workplace / "out/model") == before
    trained("--resume", "--steps", 4)  # now that the lock is free
    assert not (workplace / "out/model/.lock").exists()


def test_the_lock_is_held_from_before_the_first_write_to_after_the_last(trained, workplace, monkeypatch):
    seen, lock = [], workplace / "out/model/.lock"

    def watch(name):
        usual = getattr(train, name)

        def watched(*arguments):
            with pytest.raises(Timeout):
                FileLock(lock).acquire(timeout=0)
            seen.append(name)
            return usual(*arguments)

        monkeypatch.setattr(train, name, watched)

    names = ["load_data", "check_folder", "begin_run", "save_state", "sample_text"]
    for name in names:
        watch(name)
    trained("--steps", 1)
    assert seen == names
    assert not lock.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_stops_no_run(tmp_path, monkeypatch, recwarn, number):
    def flock(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "model"):
        assert (tmp_path / "model").is_dir()
    assert not recwarn.list


def test_a_filelock_that_knows_no_locks_stops_no_run(tmp_path, monkeypatch):
    def no_lock(*arguments, **keywords):
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", no_lock)
    with locked(tmp_path / "model"):
        assert (tmp_path / "model").is_dir()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.mkdir, r"cannot be locked \(Is a directory\); remove it"),
        (lambda path: path.symlink_to("/nowhere"), r"cannot be locked \(.*\); remove it"),
        (Path.touch, "is another user's; expected a folder of your own"),
    ],
    ids=["folder", "link", "private"],
)
def test_a_lock_that_is_no_file_of_ours_is_one_line(make, said, tmp_path, monkeypatch):
    lock = tmp_path / ".lock"
    make(lock)

    def refuse(name, *arguments, usual=os.open, **keywords):
        if make is Path.touch and Path(name) == lock:  # chmod would not stop root
            raise PermissionError(errno.EACCES, "Permission denied", str(lock))
        return usual(name, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match=f"^{lock} {said}"), locked(tmp_path):
        pass
    assert os.path.lexists(lock)


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_state_that_cannot_be_read_is_not_none(more, trained, workplace, command, monkeypatch):
    trained("--steps", 3)
    before = contents(workplace / "out/model")

    def listdir(path, usual=os.listdir):
        if Path(path).name == "state":  # chmod would not stop root
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path)

    monkeypatch.setattr(os, "listdir", listdir)
    arguments = "--config config.json --data text.txt --block-size 16 --steps 4 --out out/model".split()  # noqa: SIM905
    code, _, stderr = command(train.main, *arguments, *more)
    assert code == 2
    assert stderr.splitlines()[-1].startswith("error: out/model/state cannot be read (Permission denied); ")
    assert contents(workplace / "out/model") == before


def lose(state):
    shutil.rmtree(state)


def empty(state):
    lose(state)
    state.mkdir()


def leave_partial(state):
    (state / "step-00000003").rename(state / "step-00000003.partial")


@pytest.mark.parametrize(
    ("damage", "found"), [(lose, "nothing"), (empty, "nothing"), (leave_partial, "step-00000003.partial")]
)
def test_weights_without_a_state_are_not_overwritten_by_a_resume(damage, found, trained, workplace, command):
    trained("--steps", 3)
    damage(workplace / "out/model/state")
    before = contents(workplace / "out/model")
    code, stdout, stderr = command(train.main, *RESUME, "--steps", 5)
    assert (code, stdout) == (2, "")
    message = f"out/model holds trained weights, but no state of the run: out/model/state holds {found}; "
    assert message in stderr.splitlines()[-1]
    assert contents(workplace / "out/model") == before


def test_a_run_killed_before_its_first_save_resumes_from_the_start(trained, workplace):
    trained("--steps", 3, out="out/whole")
    trained("--steps", 3)
    shutil.rmtree(workplace / "out/model/state")
    (workplace / "out/model/model.safetensors").unlink()
    _, _, stderr = trained("--steps", 3, "--resume")
    assert "out/model has saved nothing yet: the run begins at step 0\n" in stderr
    assert curve(workplace / "out/model") == curve(workplace / "out/whole")
    assert json.loads((workplace / "out/model/run.json").read_text())["begins_after_step"] == 0


def test_a_run_of_an_earlier_version_resumes_with_data_that_is_prepared_anew(trained, workplace, command):
    trained("--steps", 3)
    (workplace / "out/model/tokenizer_config.json").unlink()  # which is not the only file of a tokenizer any more
    _, _, stderr = trained("--resume", "--steps", 4)
    assert "out/model resumes after step 3\n" in stderr
    (workplace / "out/model/tokenizer_config.json").write_text("{}")
    code, _, stderr = command(train.main, *RESUME, "--steps", 5)
    assert (code, "holds another model" in stderr) == (2, True)


LINES = [json.dumps({"step": step, "loss": 5.0}) for step in range(3)]


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        (None, []),
        ("", []),
        ("\n".join(LINES[:2]), [0, 1]),
        ("\n".join([LINES[0], LINES[1][:9]]), [0]),
        ("\n".join([LINES[0], "\0" * 9, '{"step": 1}', "[]", LINES[2]]), [0, 2]),
        ("\n".join([*LINES, '{"step": 3, "loss": 4.0}', '{"st']), [0, 1, 2]),
    ],
    ids=["missing", "empty", "short", "half a line", "damaged", "more"],
)
def test_metrics_that_are_lost_are_a_gap_and_no_more(content, steps, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    assert [line["step"] for line in earlier_metrics(path, 3)] == steps
    said = f"{path} has no metrics of {3 - len(steps)} of 3 steps; the curves have a gap there\n"
    assert capsys.readouterr().err == ("" if len(steps) == 3 else said)
    assert earlier_metrics(path, 0) == []


def test_a_run_without_its_metrics_goes_on_from_its_state(trained, workplace, monkeypatch):
    def begin_run(*arguments, usual=train.begin_run):
        usual(*arguments)
        states.append(newest_step(workplace / arguments[0].out / "state"))

    states = []
    monkeypatch.setattr(train, "begin_run", begin_run)
    logged = ["--log-norms", 1, "--save-interval", 3, "--lr", "1e-3", "--min-lr", "1e-3"]
    trained("--steps", 5, *logged, out="out/whole")
    trained("--steps", 3, *logged)
    (workplace / "out/model/metrics.jsonl").unlink()
    _, _, stderr = trained("--resume", "--steps", 5)
    assert "metrics.jsonl has no metrics of 3 of 3 steps; the curves have a gap there\n" in stderr
    assert "out/model resumes after step 3\n" in stderr
    assert states == [0, 0, 3]  # which a crash before the next save would leave
    assert curve(workplace / "out/model") == curve(workplace / "out/whole")[3:]
    weights = [(workplace / out / "model.safetensors").read_bytes() for out in ("out/model", "out/whole")]
    assert weights[0] == weights[1]
    assert json.loads((workplace / "out/model/run.json").read_text())["begins_after_step"] == 3
    assert (workplace / "out/model/norms.png").exists()


@pytest.mark.parametrize("content", [None, "{}", '{"arguments": {"ste', '{"arguments": [3], "data": 5}'])
def test_a_lost_run_json_costs_no_state(content, tmp_path):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match="holds no run to continue"):
        saved_arguments(tmp_path)
    (tmp_path / "state/step-00000003").mkdir(parents=True)
    assert saved_arguments(tmp_path) == {}


def test_a_run_without_its_run_json_goes_on_with_the_flags_given_again(trained, workplace):
    flags = ["--seed", 5, "--save-interval", 3, "--lr", "1e-3", "--min-lr", "1e-3", "--warmup", 2]
    trained("--steps", 5, *flags, out="out/whole")
    trained("--steps", 3, *flags)
    (workplace / "out/model/run.json").unlink()
    _, _, stderr = trained("--resume", "--steps", 5, *flags)
    assert stderr.count("out/model/run.json is lost or damaged: its arguments are replaced by flags and defaults") == 1
    assert curve(workplace / "out/model") == curve(workplace / "out/whole")


def test_a_lost_run_json_is_said_before_anything_is_prepared(trained, workplace, command):
    trained("--steps", 3)
    (workplace / "out/model/run.json").unlink()
    (workplace / "other.txt").write_text(TEXT[::-1])
    flags = ["--config", "config.json", "--data", "other.txt", "--block-size", 16, "--steps", 5]
    code, _, stderr = command(train.main, *RESUME, *flags)
    assert code == 2
    lost, preparing, *_, refused = [line for line in stderr.splitlines() if "warms up" not in line]
    assert lost.startswith("out/model/run.json is lost or damaged: its arguments are replaced by flags and defaults")
    assert preparing.startswith("preparing out/data/other-")
    assert refused.endswith("its config or tokenizer is not this run's; give the run's own flags again")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", [3], "argument --steps: '[3]' is not a positive integer"),
        ("lr", {"x": 1}, "argument --lr: "),
        ("dtype", 16, "argument --dtype: invalid choice: '16'"),
        ("fsdp", "maybe", "argument --fsdp/--no-fsdp: ignored explicit argument 'maybe'"),
        ("warmup", True, "unrecognized arguments: "),
    ],
)
def test_an_argument_of_another_type_is_one_line(name, value, message, trained, workplace, command):
    trained("--steps", 3)
    path = workplace / "out/model/run.json"
    run = json.loads(path.read_text())
    run["arguments"][name] = value
    path.write_text(json.dumps(run))
    code, stdout, stderr = command(train.main, *RESUME, "--steps", 5)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith(
        f"error: out/model/run.json: {message}" if name != "warmup" else "error: out/model/run.json"
    )
    assert stderr.endswith("; or remove that file, and give the run's flags again\n")


def test_a_longer_run_keeps_the_warm_up_that_it_began_with(trained, workplace, command, monkeypatch):
    trained("--steps", 5)
    run = json.loads((workplace / "out/model/run.json").read_text())
    assert run["arguments"]["warmup"] == 1
    run["arguments"] |= {"of_another_version": 3, "out": "elsewhere", "resume": False}
    (workplace / "out/model/run.json").write_text(json.dumps(run))
    seen = []
    monkeypatch.setattr(train, "train", lambda args, config, device: seen.append(args) or 0)
    assert command(train.main, *RESUME, "--steps", 1000)[0] == 0
    assert (seen[0].warmup, seen[0].steps, str(seen[0].out), seen[0].resume) == (1, 1000, "out/model", True)


@pytest.mark.parametrize(
    ("saved", "flags", "refused"),
    [
        ({"warmup": 20}, [], None),
        ({"warmup": 3}, ["--steps", 3], None),
        ({"min_lr": 1.0}, [], None),
        ({}, ["--warmup", 10], "--warmup 10 leaves none of --steps 10"),
        ({}, ["--min-lr", 1], "--min-lr 1 is above --lr 0.002"),
        ({"min_lr": 1e-3}, ["--lr", "1e-4"], "--min-lr 0.001 is above --lr 0.0001"),
    ],
)
def test_what_the_run_began_with_is_taken_as_it_is(saved, flags, refused, workplace, command, monkeypatch):
    (workplace / "out/model").mkdir(parents=True)
    arguments = {"config": "config.json", "block_size": 16, "steps": 10, "warmup": 2, "lr": 2e-3, **saved}
    (workplace / "out/model/run.json").write_text(json.dumps({"arguments": arguments}))
    seen = []
    monkeypatch.setattr(train, "train", lambda args, config, device: seen.append(vars(args)) or 0)
    code, _, stderr = command(train.main, *RESUME, *flags)
    if refused:
        assert code == 2
        assert stderr.startswith(f"error: {refused}")
    else:
        assert code == 0, stderr
        assert seen[0].items() >= {**arguments, "steps": 3 if flags else 10}.items()


def test_a_run_of_the_default_config_resumes_in_a_checkout_that_was_moved(workplace, command, monkeypatch):
    monkeypatch.setattr(train, "TINY", workplace / "config.json")
    run = ["--data", "text.txt", "--block-size", 16, "--batch-size", 4, "--dtype", "float32", "--out", "out/model"]
    assert command(train.main, *run, "--steps", 2)[0] == 0
    path = workplace / "out/model/run.json"
    about = json.loads(path.read_text())
    assert about["arguments"]["config"] is None
    (workplace / "config.json").rename(workplace / "moved.json")
    monkeypatch.setattr(train, "TINY", workplace / "moved.json")
    code, _, stderr = command(train.main, *RESUME, "--steps", 3)
    assert code == 0, stderr
    assert "with config" not in stderr
    # Earlier versions saved where it was.
    about["arguments"]["config"] = "/gone/configs/tiny.json"
    path.write_text(json.dumps(about))
    code, _, stderr = command(train.main, *RESUME, "--steps", 4)
    assert (code, "/gone/configs/tiny.json is missing, which" in stderr) == (2, True)
    remedy = stderr.strip().rpartition(": ")[2].split()
    assert remedy == ["--config", "out/model/config.json"]
    _, _, stderr = command(train.main, *RESUME, "--steps", 4, "--config", "nowhere.json")
    assert "error: nowhere.json is missing; expected a file there\n" in stderr
    code, _, stderr = command(train.main, *RESUME, "--steps", 4, *remedy)
    assert code == 0, stderr
    assert len(metrics_of(workplace / "out/model")) == 4
