"""Windows of the data: each that fits and no other, the same for a step whatever came before."""

import os

import numpy as np
import pytest
import torch

from kernels import InputError
from model.training import data
from model.training.data import batch_starts, load_tokens, step_seed, windows
from model.training.prepare import prepare
from tests.helpers import TEXT


@pytest.mark.parametrize(("n_tokens", "n_starts"), [(9, 1), (10, 2), (12, 4)])
def test_every_window_that_fits_is_drawn_and_no_other(n_tokens, n_starts):
    starts = batch_starts(n_tokens, 0, seed=1, batch_size=200, block_size=8)
    assert set(starts) == set(range(n_starts))  # 200 draws miss one of four with probability 4 * 0.75^200
    assert windows(np.arange(n_tokens), starts, 8).shape == (200, 9)


def test_a_step_draws_the_same_windows_whatever_came_before():
    draws = [batch_starts(10**6, step, seed=1, batch_size=5, block_size=8).tolist() for step in (3, 4, 3)]
    assert draws[0] == draws[2] != draws[1]


@pytest.mark.parametrize(("n_train", "n_held_out"), [(8, 90), (90, 8), (7, 90)])
def test_a_part_shorter_than_a_window_is_refused(tmp_path, monkeypatch, n_train, n_held_out):
    monkeypatch.setattr(data, "read_prepared", lambda folder: {"dtype": "uint16", "n_train": n_train})
    np.zeros(n_train + n_held_out, np.uint16).tofile(tmp_path / "tokens.bin")
    with pytest.raises(InputError, match=f"has {min(n_train, n_held_out)} tokens; --block-size 8 needs 9"):
        load_tokens(tmp_path, 8)


def test_a_window_is_its_tokens_and_the_one_after_them():
    tokens = np.array([5, 65535, 7, 8, 9, 10], np.uint16)
    expected = torch.tensor([[65535, 7, 8], [8, 9, 10]])
    assert torch.equal(windows(tokens, np.array([1, 3]), 2), expected)
    assert windows(tokens, np.array([], np.int64), 2).shape == (0, 3)  # of a process that has no sequence


def test_every_step_and_process_draws_numbers_of_its_own():
    seeds = [step_seed(seed, step, process) for seed in (1, 2) for step in (0, 1) for process in (0, 1)]
    assert len(set(seeds)) == 8
    assert seeds == [step_seed(seed, step, process) for seed in (1, 2) for step in (0, 1) for process in (0, 1)]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_damaged_tokens_are_refused_before_they_are_trained_on(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    folder = prepare(str(tmp_path / "text"), 300, tmp_path)
    train, held_out, meta = load_tokens(folder, 8)
    assert np.concatenate([train, held_out]).tolist() == np.fromfile(folder / "tokens.bin", np.uint16).tolist()
    assert (len(train), len(train) + len(held_out)) == (meta["n_train"], meta["n_tokens"])
    os.truncate(folder / "tokens.bin", 2 * (meta["n_tokens"] * 95 // 100))
    with pytest.raises(
        InputError, match=f"{folder}/tokens.bin has .* bytes; expected {2 * meta['n_tokens']:,}; remove"
    ):
        load_tokens(folder, 8)
