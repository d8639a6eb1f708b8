"""The one place that imports matplotlib. Pictures are files, so they need no backend; a failed one ends no run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Raised where matplotlib, its fonts or its settings are broken or missing, or where the disk is full.
NOT_DRAWN = (AttributeError, ImportError, OSError, RuntimeError, ValueError)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window: MPLBACKEND is ignored.

    Raises ImportError if matplotlib cannot be imported.
    """
    backend = os.environ.pop("MPLBACKEND", None)  # matplotlib's first import would refuse one that isn't installed
    try:
        from matplotlib.figure import Figure
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return Figure(figsize=(width, height), layout="constrained")


def why_not_drawn(plot: Callable[..., None], *arguments: Any) -> str:
    """Call a plot function whose last argument is the path. Returns "", or a line that says why there is no picture."""
    try:
        plot(*arguments)
    except NOT_DRAWN as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"{arguments[-1]} is not drawn ({reason[:200]}); all else goes on"
    return ""
