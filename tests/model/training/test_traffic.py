"""Bytes that a step is planned to send are those of its collectives."""

import pytest
import torch

from tests.model.training import runs, sending

TWO = [
    ("tiny", {}, 2, False, torch.float32, False),
    ("tiny", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, 2, False, torch.bfloat16, True),
    ("tiny-gemma3", {}, 2, False, torch.float32, False),
]
FOUR = [
    ("tiny", {}, 2, False, torch.float32, False),
    ("tiny", {}, 2, True, torch.bfloat16, True),
    ("tiny", {}, 2, True, torch.bfloat16, False),
]


def check(results):
    for result in results:
        for sent, planned in result:
            assert sent == pytest.approx(planned, rel=0.0), (sent, planned)


def test_two_processes_send_what_is_planned(tmp_path):
    check(runs.results(tmp_path, sending.cases, 2, TWO))


@pytest.mark.long
def test_four_processes_send_what_is_planned(tmp_path):
    check(runs.results(tmp_path, sending.cases, 4, FOUR))
