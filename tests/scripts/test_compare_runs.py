"""scripts/compare_runs.py: the same run passes, and any other metric, weight, config or tokenizer fails."""

import json
import os
import shutil

import pytest

from scripts.compare_runs import differences, main


def slower(folder):
    lines = [json.loads(line) | {"tokens_per_s": 1.0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_loss(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"loss": 5.0})
    (folder / "metrics.jsonl").write_text("\n".join(lines))


def one_step_less(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:-1]))


def other_bit(folder):
    path = folder / "model.safetensors"
    content, before = bytearray(path.read_bytes()), path.stat()
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # so that neither size nor time tells


def other_eps(folder):
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 1e-4}
    (folder / "config.json").write_text(json.dumps(config))


def other_tokenizer(folder):
    (folder / "tokenizer.model").write_bytes(b"other")


def no_settings(folder):
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (slower, None),
        (other_loss, "step 1: loss is "),
        (one_step_less, "metrics.jsonl has 5 steps and 4"),
        (other_bit, "model.safetensors differs"),
        (other_eps, "config.json differs"),
        (other_tokenizer, "tokenizer.model differs"),
        (no_settings, "tokenizer_config.json differs"),
    ],
)
def test_a_difference_is_exit_code_1(change, message, trained, workplace, command):
    trained(out="out/before")
    shutil.copytree(workplace / "out/before", workplace / "out/after")
    change(workplace / "out/after")
    code, stdout, _ = command(main, "out/before", "out/after")
    if message is None:
        assert (code, stdout) == (0, "the same: 5 steps, weights, config, tokenizer\n")
    else:
        assert code == 1
        assert stdout.startswith(message)


STEP = {"step": 0, "loss": 1.5, "val_loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 9.0, "mfu": 0.25}
STEP |= {"norm_mean_square": [0.5, 2.0], "norm_least_square": [0.25, 0.125]}


@pytest.mark.parametrize("key", STEP)
def test_every_metric_but_the_speed_is_compared(key, tmp_path):
    """A different value, and one that a run lacks; only the first step that differs is told."""
    others = [STEP | {key: 7}, {name: value for name, value in STEP.items() if name != key}]
    for name, steps in {"before": [STEP] * 3, "changed": [others[0]] * 3, "lacking": [STEP, others[1], STEP]}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        for file in ("model.safetensors", "tokenizer.model", "config.json"):
            (folder / file).write_text("{}")
    for old, new in (("before", "changed"), ("before", "lacking"), ("lacking", "before")):
        found = differences(tmp_path / old, tmp_path / new)
        assert len(found) == (key not in ("tokens_per_s", "mfu"))
        assert all(f": {key} is " in line for line in found)


def test_a_run_that_has_saved_nothing_is_refused_in_one_line(trained, workplace, command):
    trained(out="out/before")
    shutil.copytree(workplace / "out/before", workplace / "out/after")
    (workplace / "out/after/model.safetensors").unlink()
    code, _, stderr = command(main, "out/before", "out/after")
    assert code == 2
    assert stderr.startswith("error: out/after/model.safetensors is missing")


def test_a_folder_without_a_run_is_refused_in_one_line(workplace, command):
    code, stdout, stderr = command(main, "out/before", "out/after")
    assert (code, stdout) == (2, "")
    assert stderr == "error: out/before/metrics.jsonl is missing; expected a file there\n"


@pytest.mark.parametrize("content", [b"1\n", b'{"loss": 1}\n', b"\xff\n", b""])
def test_metrics_that_are_none_end_in_one_line(content, trained, workplace, command):
    trained(out="out/before")
    shutil.copytree(workplace / "out/before", workplace / "out/after")
    (workplace / "out/after/metrics.jsonl").write_bytes(content)
    for folders in (("out/before", "out/after"), ("out/after", "out/before")):
        code, stdout, stderr = command(main, *folders)
        assert code == (1 if b"loss" in content else 2)
        assert len((stdout + stderr).splitlines()) == (2 if code == 1 else 1)
