"""The form of an RMSNorm: what is added to its weight, and when it rounds."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    offset: float = 0.0
    round_once: bool = False


LLAMA = Form()
