"""Checks of the norm's contract on kernels whose PTX was edited after they were compiled."""

import re
from unittest import mock

import torch

import kernels
from kernels import triton_rms_norm
from kernels.emulated import driver, ptx
from tests.kernels import contract

KERNELS = ("_forward_kernel", "_projection_kernel", "_backward_kernel")


def outcome(kernel, pattern, replacement, check, *args):
    """How often the pattern was replaced, in the one place or all, and the error of the check, by type and text.

    `replacement` is a text and which of the places to change; None: all.
    """
    text, which = replacement
    places = 0

    def edited(found):
        nonlocal places
        if f".entry {kernel}(" not in found:
            return ptx.parse(found)
        matches = list(re.finditer(pattern, found))
        places = max(places, len(matches))
        for match in reversed(matches if which is None else [matches[which]]):
            found = found[: match.start()] + match.expand(text) + found[match.end() :]
        return ptx.parse(found)

    backend = kernels.load_backend("triton", torch.device("cpu"))
    try:
        with mock.patch.object(driver, "parse", edited):
            _forget_what_is_compiled()
            getattr(contract, check)(backend if check.startswith("add_") else backend.rms_norm, *args)
    except (AssertionError, ptx.EmulationError) as error:
        return places, type(error).__name__, str(error)
    finally:
        _forget_what_is_compiled()
    return places, None, ""


def _forget_what_is_compiled():
    """Have the next launch read its PTX anew, from Triton's cache of files."""
    for kernel in KERNELS:
        getattr(triton_rms_norm, kernel).device_caches.clear()
