"""model/checkpoint/__main__.py: what a directory holds."""

import subprocess
import sys

import pytest
import torch

from model.checkpoint import __main__ as main
from model.checkpoint import load
from tests.helpers import ROOT
from tests.model.checkpoint.folders import change_tensors


@pytest.mark.parametrize("tied", [False, True])
def test_it_shows_shapes_eps_and_count_and_reads_no_weight(saved, command, monkeypatch, tied):
    """A tied head that a file holds nevertheless is shown, and is not counted."""
    model, folder = saved(torch.bfloat16, tied)
    change_tensors(folder, lambda t: t.setdefault("lm_head.weight", t["model.embed_tokens.weight"].clone()))
    monkeypatch.setattr(load.Stored, "read", None)
    code, out, _ = command(main.main, folder)
    assert code == 0
    assert "   1 x model.embed_tokens.weight                     BF16  61 x 48" in out
    assert "   1 x lm_head.weight                                BF16  61 x 48" in out
    assert "   3 x model.layers.*.self_attn.k_proj.weight        BF16  24 x 48" in out
    assert "rms_norm_eps: 0.003" in out
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters, rms_norm_eps 0.003" in out


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinite_weights_are_found_on_request(saved, command, bad):
    _, folder = saved()
    assert command(main.main, folder, "--finite")[0] == 0

    def spoil(tensors):
        tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = bad

    change_tensors(folder, spoil)
    assert command(main.main, folder)[0] == 0
    code, _, err = command(main.main, folder, "--finite")
    assert code == 2
    assert "model.layers.2.mlp.down_proj.weight has NaN or infinite" in err


def test_help_imports_no_torch():
    command = [sys.executable, "-X", "importtime", "-m", "model.checkpoint", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.startswith("usage: python -m model.checkpoint [-h] [--finite] dir\n")
    assert main.__doc__.strip() in answer.stdout
    assert [line for line in answer.stderr.splitlines() if line.endswith(("| torch", "| numpy"))] == []
