"""Tokenizers: sentencepiece_model.py reads tokenizer.model, tokenizer_json.py reads tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from kernels import InputError
from model.cli import say
from model.json_file import read_file
from model.tokenizer.base import Tokenizer
from model.tokenizer.files import TokenizerConfig
from model.tokenizer.sentencepiece_model import SentencePieceTokenizer


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory; tokenizer.model, if it is sentencepiece's, wins over tokenizer.json.

    Both are published side by side, and sentencepiece is the one that LLaMA was trained with. Raises InputError.
    """
    folder = Path(folder)
    model, json = folder / "tokenizer.model", folder / "tokenizer.json"
    if not model.exists() and not json.exists():
        raise InputError(f"no tokenizer in {folder}; expected a tokenizer.model or a tokenizer.json")
    config = TokenizerConfig.load(folder)
    if model.exists():
        proto = read_file(model)
        try:
            return SentencePieceTokenizer(proto, config)
        except (RuntimeError, ValueError) as error:
            if not json.exists():  # LLaMA 3 is published with a tiktoken file of that name
                raise InputError(
                    f"{model} is not a sentencepiece model; put the checkpoint's tokenizer.json beside it, or fetch "
                    "it again if it should be one"
                ) from error
            say(f"{model} is not a sentencepiece model; {json.name} beside it is used")
    from model.tokenizer.tokenizer_json import JsonTokenizer  # needs a package of the extra `json`

    return JsonTokenizer(json, config)
