"""Checks of the norm's contract on kernels whose PTX was edited after they were compiled."""

import re

import torch

import kernels
from kernels import triton_rms_norm
from kernels.emulated import ptx
from tests.kernels import contract
from tests.kernels.emulated.elsewhere import parsed_by


def outcome(kernel, pattern, replacement, which, check, *args):
    """In how many places the pattern stands, and the error of the check, by type and text, after the replacement.

    `which` of the places is changed; None: all.
    """
    places = 0

    def edited(text):
        nonlocal places
        if f".entry {kernel}(" not in text:
            return ptx.parse(text)
        matches = list(re.finditer(pattern, text))
        places = max(places, len(matches))
        for match in reversed(matches if which is None or not matches else [matches[which]]):
            text = text[: match.start()] + match.expand(replacement) + text[match.end() :]
        return ptx.parse(text)

    backend = kernels.load_backend("triton", torch.device("cpu"))
    try:
        with parsed_by(edited, triton_rms_norm):
            getattr(contract, check)(backend if check.startswith("add_") else backend.rms_norm, *args)
    except (AssertionError, ptx.EmulationError) as error:
        return places, type(error).__name__, str(error)
    return places, None, ""
