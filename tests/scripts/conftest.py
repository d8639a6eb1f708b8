"""A checkpoint with a text, for the scripts that read some."""

import pytest
import torch

import kernels
from model.checkpoint.save import save_checkpoint
from model.config import LlamaConfig
from model.llama import Llama
from model.tokenizer.sentencepiece_model import train_tokenizer
from tests.helpers import CPU, draw_weights

TEXT = "once upon a time\n  there was a lily 🙂\n" * 20


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small model with random weights, norms among them, its tokenizer, and text.txt with 241 tokens."""
    tokenizer = train_tokenizer([TEXT], 300)
    config = LlamaConfig(tokenizer.vocab_size, 32, 48, 2, 4, 2, 8, 64, rms_norm_eps=3e-3, eos_token_id=2)
    torch.manual_seed(0)
    model = Llama(config, kernels.load_backend("reference", CPU))
    draw_weights(model, 0.1)
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, model, tokenizer)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder
