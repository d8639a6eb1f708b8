"""What a register holds: bits, which each instruction reads as numbers of the type that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kernels.emulated.rounding import Array

# bfloat16 and smaller numbers have no NumPy type, and packed ones are taken apart by what computes them.
DTYPES = {
    "pred": np.dtype(np.bool_),
    **{f"{kind}8": np.dtype(dtype) for kind, dtype in (("b", np.uint8), ("u", np.uint8), ("s", np.int8))},
    **{f"{kind}16": np.dtype(dtype) for kind, dtype in (("b", np.uint16), ("u", np.uint16), ("s", np.int16))},
    **{f"{kind}32": np.dtype(dtype) for kind, dtype in (("b", np.uint32), ("u", np.uint32), ("s", np.int32))},
    **{f"{kind}64": np.dtype(dtype) for kind, dtype in (("b", np.uint64), ("u", np.uint64), ("s", np.int64))},
    "f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    "f16x2": np.dtype(np.uint32), "bf16x2": np.dtype(np.uint32), "f32x2": np.dtype(np.uint64),
    "u16x2": np.dtype(np.uint32), "s16x2": np.dtype(np.uint32),
    "e4m3x2": np.dtype(np.uint16), "e5m2x2": np.dtype(np.uint16), "tf32": np.dtype(np.uint32),
}  # fmt: skip
PAIRS = {  # what the halves of a packed register are
    "f16x2": np.dtype(np.float16), "bf16x2": np.dtype(np.uint16), "f32x2": np.dtype(np.float32),
    "u16x2": np.dtype(np.uint16), "s16x2": np.dtype(np.int16),
}  # fmt: skip


class Operation(NamedTuple):
    """compute(*sources) -> result, of arrays that broadcast against each other."""

    compute: Callable[..., Array]
    sources: tuple[np.dtype, ...]
    result: np.dtype


def unpack(pairs: Array, part: np.dtype) -> Array:
    """(..., T) -> (..., T, n): the n smaller numbers in each, the one in the lowest bits first."""
    whole = np.ascontiguousarray(pairs)
    return whole.view(part).reshape(*whole.shape, whole.dtype.itemsize // part.itemsize)


def pack(parts: Array, dtype: np.dtype) -> Array:
    """(..., T, n) -> (..., T), the reverse of unpack."""
    return np.ascontiguousarray(parts).view(dtype)[..., 0]


def on_pairs(function: Callable[..., Array], kind: str) -> Callable[..., Array]:
    """The function on packed registers, from the one on their halves."""
    part, dtype = PAIRS[kind], DTYPES[kind]
    return lambda *sources: pack(function(*(unpack(source, part) for source in sources)), dtype)
