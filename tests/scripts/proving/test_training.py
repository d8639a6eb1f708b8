"""Does it train? The runs that are started, and what their losses say."""

import pytest

from kernels import InputError
from scripts import loss_parity
from scripts.proving import training
from scripts.proving.subject import Subject

RIGHT = Subject("tests.scripts.proving.norms:right")
REFERENCE = [6.0, 5.5, 5.0]
CONTROL = [6.0, 5.500001, 5.000002]
IMPOSTOR = [6.1, 5.7, 5.2]


@pytest.fixture
def parity(monkeypatch, tmp_path):
    """Judge made-up losses in the place of runs; returns the result and the runs that were started."""

    def run(subject=RIGHT, bound=True, **losses):
        started = []

        def train_with(norm, folder, args, bar):
            started.append((norm, folder.parent.name, args.emulate))
            name = "mine" if "norms:" in norm else norm.partition("@")[0].rpartition(":")[2]
            found = {"reference": REFERENCE, "mine": CONTROL, "impostor": IMPOSTOR, **losses}.get(name, CONTROL)
            if isinstance(found, str):
                raise InputError(found)
            return found

        monkeypatch.setattr(loss_parity, "train_with", train_with)
        return training.parity(subject, bound, tmp_path / "parity", lambda words: None), started

    return run


def test_a_norm_that_trains_has_a_picture_in_each_dtype(parity, tmp_path):
    result, started = parity(RIGHT._replace(gpu="sm_90"))
    assert (result["failures"], result["notes"]) == ([], [])
    assert list(result["dtypes"]) == ["float32", "float16"]
    for dtype in result["dtypes"]:
        assert (tmp_path / result["dtypes"][dtype]["picture"]).read_bytes().startswith(b"\x89PNG")
    assert started[0][0] == "reference"  # it prepares the data
    assert len(started) == 12
    assert (f"{RIGHT.name}@float16", "float16", "sm_90") in started
    assert ("scripts.loss_parity:impostor", "float32", "none") in started


def test_a_norm_that_drifts_is_a_failure(parity):
    result, _ = parity(mine=[6.0, 5.6, 5.0])
    assert result["failures"] == [
        f"in {dtype} its loss differs from the reference's by more than rounding explains, from step 1 on"
        for dtype in ("float32", "float16")
    ]


def test_a_norm_that_ends_training_is_a_failure(parity):
    result, _ = parity(mine="train.py --norm mine failed: error: NaN")
    assert result["failures"][0] == "it does not train in float32: train.py --norm mine failed: error: NaN"
    assert result["dtypes"] == {}


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ({"impostor": CONTROL}, "nothing can be told in float32: the impostor passes"),
        ({"control_blocks": [6.0, 5.6, 5.0]}, "nothing can be told in float32: controls refuse each other"),
        ({"reference": "no data"}, "no parity run in float32: no data"),
    ],
)
def test_a_run_that_shows_nothing_is_no_failure(parity, losses, note):
    result, _ = parity(**losses)
    assert result["failures"] == []
    assert result["notes"][0].startswith(note)


def test_a_norm_without_a_form_trains_a_model_that_has_one(parity):
    gemma = RIGHT._replace(form_name="gemma")
    assert not training.form_is_bound(gemma)
    assert training.form_is_bound(RIGHT)
    assert training.form_is_bound(Subject("kernels.reference:rms_norm", "gemma"))
    _, started = parity(gemma, bound=False)
    assert f"scripts.judging.claims:{RIGHT.name}" in [norm for norm, *_ in started]
