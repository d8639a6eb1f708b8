"""The flags of commands that read a text with a checkpoint. It imports no torch, so that --help answers at once."""

from __future__ import annotations

from pathlib import Path

from model.cli import Parser, positive


def add_text_arguments(parser: Parser, max_tokens: int | None = None) -> None:
    """Add what names a checkpoint, a text and its windows. `max_tokens` is the default; None takes the whole text."""
    add = parser.add_argument
    add("--ckpt", default="out/tiny", help="directory with config.json, safetensors and a tokenizer")
    add("--text", type=Path, help="UTF-8 file (default: the held-out part of the training data)")
    tokens_help = "read this many tokens of the text" + ("" if max_tokens else " (default: all)")
    add("--max-tokens", type=positive(int), default=max_tokens, help=tokens_help)
    add("--context", type=positive(int), help="most tokens of a window (default: all that the model can take)")
    add("--stride", type=positive(int), help="tokens between the beginnings of windows (default: half the context)")
    parser.add_backend_arguments(["float32", "bfloat16", "float16"])
