"""Bytes that a step is planned to send are those of its collectives."""

import pytest
import torch

from kernels import load_backend
from kernels.torch_version import TORCH_2_13
from scripts.plan import fake_forward
from tests.helpers import CPU
from tests.model.divided import config_of
from tests.model.training import runs, sending

needs_fsdp = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="no FSDP2 on a CPU")

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


KEPT = [("tiny", torch.float32, False), ("tiny", torch.bfloat16, True)]


def check(results):
    for sendings, _ in results:
        for sent, planned in sendings:
            assert sent == planned
            assert sum(sent.values())


@pytest.mark.skipif(not TORCH_2_13, reason="torch 2.6 recomputes fewer collectives")
def test_two_processes_send_and_keep_what_is_planned(tmp_path):
    results = runs.results(tmp_path, sending.cases, 2, TWO, KEPT)
    check(results)
    norm = load_backend("torch", CPU)
    for i, (name, dtype, recomputed) in enumerate(KEPT):
        planned = fake_forward(config_of(name), norm, dtype, 3, 8, recomputed, False, 2)[1]
        assert [kept[i] for _, kept in results] == [planned] * 2


@needs_fsdp
@pytest.mark.long
def test_four_processes_send_what_is_planned(tmp_path):
    check(runs.results(tmp_path, sending.cases, 4, FOUR))
