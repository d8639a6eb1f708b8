"""The package `kernels` of PyPI, which transformers imports where it is installed, and which this folder shadows."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

NAME = "kernels.shadowed.package"


def attribute(name: str) -> Any:
    """The package's attribute `name`. Raises AttributeError if the package is not installed or has no such name."""
    # Python asks here too before it imports a module of ours for `from kernels import reference`.
    package = None if importlib.util.find_spec(f"kernels.{name}") else _package()
    if package is None or not hasattr(package, name):
        raise AttributeError(f"module 'kernels' has no attribute '{name}'")
    return getattr(package, name)


def _package() -> ModuleType | None:
    if NAME in sys.modules:  # also while it is loading, for the modules in it that import from it
        return sys.modules[NAME]
    try:
        init = str(metadata.distribution("kernels").locate_file("kernels/__init__.py"))
    except metadata.PackageNotFoundError:
        return None
    spec = importlib.util.spec_from_file_location(NAME, init)
    if spec is None or spec.loader is None or not os.path.exists(init):
        return None
    # Its modules import each other as kernels.x: they are looked for in its folder, after ours.
    places = sys.modules["kernels"].__path__
    places.append(os.path.dirname(init))
    package = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[NAME], places[-1]
        raise
    return package
