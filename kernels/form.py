"""The form of a norm: what its weight means, and in which order it rounds."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """y = (x_hat, rounded to x's dtype unless round_once) * (offset + weight), rounded to x's dtype.

    offset + weight and the product are formed in float32 (float64 for a float64 x).
    """

    offset: float = 0.0
    round_once: bool = False

    def __str__(self) -> str:
        words = [f"weight + {self.offset:g}"] if self.offset else []
        return ", ".join([*words, "rounded once" if self.round_once else "rounded twice"])


LLAMA = Form()
FORMS = {"llama": LLAMA, "torch": Form(0.0, True), "gemma": Form(1.0, True)}  # torch: nn.RMSNorm's, and OLMo 2's
