"""A model on LayerNorm becomes the same function on RMSNorm."""

import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from torch import nn

from kernels import InputError, load_backend
from scripts import from_layer_norm
from tests.helpers import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def gpt2():
    pytest.importorskip("transformers", reason="GPT-2 comes from transformers (extra `test`)")
    torch.manual_seed(3)
    return from_layer_norm.random_gpt2(2, 48)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", ["reference", "torch", "triton"])
def test_a_converted_gpt2_is_the_same_function(gpt2, name, dtype, bound):
    """Within rounding of about 30 operations, whose terms are up to 10 times the logits; copied weights are not."""
    if name == "triton":
        pytest.importorskip("triton", reason="triton is made for Linux alone")
    backend, tokens = load_backend(name, CPU), torch.randint(512, (3, 40))
    (_, converted), (_, copied) = from_layer_norm.compare(gpt2.to(dtype), backend, tokens)
    assert converted < bound
    assert copied > 0.1


def test_nothing_of_layer_norm_is_left_and_the_original_stays(gpt2):
    before, backend = deepcopy(gpt2.state_dict()), load_backend("reference", CPU)
    from_layer_norm.compare(gpt2, backend, torch.randint(512, (3, 40)))
    for name, tensor in gpt2.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    from_layer_norm.to_rms_norm(gpt2, backend)
    assert not [name for name, module in gpt2.named_modules() if isinstance(module, nn.LayerNorm)]
    assert gpt2.transformer.ln_f.norm.eps == from_layer_norm.EPS


def test_the_stream_has_no_mean_in_a_converted_model(gpt2):
    """Between all layers, for every position: a writer that was left out would show in its block alone."""
    model = gpt2.double()
    from_layer_norm.to_rms_norm(model, load_backend("reference", CPU))
    for state in model(torch.randint(512, (2, 40)), output_hidden_states=True).hidden_states[:-1]:
        assert state.mean(-1).abs().max() < 1e-13 * state.abs().max()
        assert state.std(-1).min() > 0.1


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_the_mean_over_outputs_is_removed(kind):
    """Also of a square weight, whose shape does not tell the axes apart."""
    writer = kind(8, 8).double()
    inputs = torch.randn(5, 8).double() if kind is nn.Linear else torch.arange(5)
    before = writer(inputs)
    from_layer_norm.centre(writer)
    torch.testing.assert_close(writer(inputs), before - before.mean(-1, keepdim=True), rtol=0, atol=1e-14)


@pytest.mark.parametrize("bias", [True, False])
def test_a_norms_bias_moves_into_the_layer_behind_it(bias):
    norm, reader, x = nn.LayerNorm(8).double(), nn.Linear(8, 8, bias=bias).double(), torch.randn(5, 8).double()
    nn.init.normal_(norm.bias)
    before = reader(norm(x))
    from_layer_norm.fold_bias(norm, reader)
    nn.init.zeros_(norm.bias)
    torch.testing.assert_close(reader(norm(x)), before, rtol=0, atol=1e-14)


def test_what_would_become_another_function_is_refused_and_left_as_it_is(gpt2):
    transformers = pytest.importorskip("transformers")
    backend, own_norm = load_backend("reference", CPU), deepcopy(gpt2)
    own_norm.transformer.h[1].ln_2 = nn.RMSNorm(48)
    crossed = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, add_cross_attention=True)
    cases = {
        "is of type GPT2Model": gpt2.transformer,
        "has cross attention": transformers.GPT2LMHeadModel(crossed),
        "has a norm of type RMSNorm": own_norm,
    }
    for said, model in cases.items():
        before = deepcopy(model.state_dict())
        with pytest.raises(InputError, match=f"{said}.*; expected a GPT2LMHeadModel without cross attention"):
            from_layer_norm.to_rms_norm(model, backend)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    from_layer_norm.to_rms_norm(gpt2, backend)
    with pytest.raises(InputError, match="the model has a norm of type Normed; expected"):
        from_layer_norm.to_rms_norm(gpt2, backend)


@pytest.mark.parametrize("norm", ["layer_norm", "layer_norm_bias", "layer_norm@float16", "scripts.peers:layer_norm"])
def test_layer_norm_is_not_what_is_converted_to(norm, command):
    done = command(from_layer_norm.main, "--norm", norm, "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: --norm is {norm}, which is LayerNorm; expected an RMSNorm")


def test_the_command(gpt2):
    command = [sys.executable, ROOT / "scripts" / "from_layer_norm.py", "--layers", "1", "--hidden-size", "16"]
    done = subprocess.run([*command, "--norm", "reference"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "GPT-2 of 1 layers on reference",
        *(f"{dtype}, {what}" for dtype in ("float64", "float32")
          for what in ("centred, with the bias folded", "weights copied")),
    ]  # fmt: skip
    done = subprocess.run([*command[:-1], "18"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --hidden-size is 18; expected a multiple of 4, the number of heads\n"
