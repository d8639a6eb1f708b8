"""A fixture for the tests of checkpoint directories."""

from dataclasses import replace

import pytest
import torch

from model.checkpoint.save import save_checkpoint
from tests.model.checkpoint.folders import TOKENIZER


@pytest.fixture
def saved(tmp_path, config, make_model):
    """Save a new model: (model, its folder)."""

    def save(dtype=torch.float32, tied=False):
        model = make_model(replace(config, tie_word_embeddings=tied)).to(dtype)
        save_checkpoint(tmp_path / "model", model, TOKENIZER)
        return model, tmp_path / "model"

    return save
