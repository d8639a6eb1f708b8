"""model/training/flops.py: operations against a counter of PyTorch's, and the peaks of GPUs by name."""

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

import kernels
from model.llama import Llama, summed_loss
from model.training.flops import PEAK_FLOPS, forward_flops, peak_flops, peak_tokens_per_s, training_flops
from tests.helpers import CPU


def test_flops_match_pytorchs_counter(config):
    model = Llama(replace(config, head_dim=16), kernels.load_backend("reference", CPU))
    batch = torch.zeros(3, 33, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = summed_loss(model, batch)
        forward = counter.get_total_flops()
        loss.backward()
    masked = 2 * 3 * 3 * 2 * (4 * 16) * (32 * 32 - 32 * 33 // 2)  # which unfused attention computes
    assert forward_flops(model, 32, 3, 32) + masked == forward
    assert counter.get_total_flops() == 3 * forward
    assert 3 * 32 * training_flops(model, 32) == 3 * (forward - masked)
    assert forward_flops(model, 32, 3, 32) - forward_flops(model, 32, 3, 1) == 2 * 3 * 31 * 61 * 48


PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA RTX A1000": None,
    "Tesla T4": None,
}


def test_the_peak_is_that_of_the_very_gpu():
    assert {device_name: peak_flops(device_name) for device_name in PEAKS} == PEAKS
    assert set(PEAKS.values()) - {None} == set(PEAK_FLOPS.values())  # none is left out above


def test_the_peak_in_tokens_is_that_of_all_processes_in_bfloat16(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    peaks = [peak_tokens_per_s("NVIDIA L4", dtype, 1e9) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert peaks == [4 * 121e3, None, None]
    assert peak_tokens_per_s("Tesla T4", torch.bfloat16, 1e9) is None
