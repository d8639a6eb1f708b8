"""Tokenizers of checkpoints: sentencepiece_model.py reads tokenizer.model, tokenizer_json.py reads tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from kernels import InputError
from model.cli import say
from model.json_file import read_file
from model.tokenizer.base import Tokenizer
from model.tokenizer.files import TokenizerConfig
from model.tokenizer.sentencepiece_model import SentencePieceTokenizer


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory; a sentencepiece tokenizer.model wins over tokenizer.json.

    Many checkpoints publish both, and LLaMA was trained with sentencepiece. Raises InputError if neither can be used.
    """
    model, json = Path(folder) / "tokenizer.model", Path(folder) / "tokenizer.json"
    if not model.exists() and not json.exists():
        raise InputError(f"no tokenizer in {folder}; expected a tokenizer.model or a tokenizer.json")
    config = TokenizerConfig.load(Path(folder))
    if model.exists():
        proto = read_file(model)
        try:
            return SentencePieceTokenizer(proto, config)
        except (RuntimeError, ValueError) as error:  # LLaMA 3 is published with a tiktoken file of that name
            if not json.exists():
                remedy = "put the checkpoint's tokenizer.json beside it, or fetch it again if it should be one"
                raise InputError(f"{model} is not a sentencepiece model; {remedy}") from error
            say(f"{model} is not a sentencepiece model; using {json.name} beside it")
    from model.tokenizer.tokenizer_json import JsonTokenizer  # lazy: its package `tokenizers` is optional

    return JsonTokenizer(json, config)
