"""The package `kernels` of PyPI, which this repository's folder shadows: a stand-in for it, in processes of its own."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

# Like the real one: its modules import each other by the full name, also from __init__.py while that is loading.
FILES = {
    "kernels/__init__.py": """
__version__ = "9.9"
from kernels.layer import Layer, kernelize
__all__ = ["Layer", "kernelize"]
""",
    "kernels/layer.py": """
from kernels import __version__
class Layer: version = __version__
def kernelize(): return "kernelized"
""",
    "kernels/reference.py": "raise RuntimeError('ours comes first')",
    "kernels-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 9.9\n",
}
LOADED = "print('kernels.shadowed' in sys.modules, 'kernels.layer' in sys.modules)"


def run(code, site):
    """What Python prints for `code` with the repository's root first on the path, and `site` behind it."""
    code = f"import sys\nsys.path[:0] = [{str(ROOT)!r}]\nsys.path.append({str(site)!r})\n{code}"
    answer = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split("\n")[:-1]


@pytest.fixture
def site(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_its_names_and_modules_are_found_and_ours_come_first(site):
    code = f"""
from importlib.util import find_spec
import kernels
from kernels import InputError, load_backend, shadowed
{LOADED}
from kernels import Layer, kernelize, layer
from kernels.layer import Layer as same
print(Layer.version, kernelize(), Layer is same is layer.Layer, kernels.__version__)
print(kernels.__file__, find_spec("kernels.reference").origin, layer.__file__, sep="\\n")
"""
    folder = ROOT / "kernels"
    assert run(code, site) == [
        "True False",
        "9.9 kernelized True 9.9",
        *map(str, (folder / "__init__.py", folder / "reference.py", site / "kernels/layer.py")),
    ]


MISSING = """
for name in ("load_backends", "Layerr"):
    try:
        exec(f"from kernels import {name}")
    except ImportError as error:
        print(type(error).__name__, error)
    try:
        getattr(kernels, name)
    except AttributeError as error:
        print(error)
"""


@pytest.mark.parametrize("installed", [True, False])
def test_a_misspelt_name_is_answered_as_usual(site, installed):
    lines = run(f"import kernels\n{MISSING}", site if installed else site / "nothing")
    assert lines == [
        line
        for name in ("load_backends", "Layerr")
        for line in (
            f"ImportError cannot import name '{name}' from 'kernels' ({ROOT / 'kernels/__init__.py'})",
            f"module 'kernels' has no attribute '{name}'",
        )
    ]


def test_nothing_is_looked_for_before_a_name_is_missing(site):
    assert run(f"import kernels\n{LOADED}\nprint('importlib.metadata' in sys.modules)", site) == [
        "False False",
        "False",
    ]


@pytest.mark.parametrize("fault", ["raise ImportError('needs more')", "import kernels.no_such_module"])
def test_one_that_cannot_be_imported_says_so_every_time(site, fault):
    (site / "kernels/layer.py").write_text(fault)
    code = """
import kernels
for _ in range(2):
    try:
        from kernels import Layer
    except ImportError as error:
        print(error)
print(len(kernels.__path__))
"""
    said = "needs more" if "more" in fault else "No module named 'kernels.no_such_module'"
    assert run(code, site) == [said, said, "1"]


def test_a_distribution_without_its_files_is_none(site):
    """As after an editable install, whose files are elsewhere."""
    (site / "kernels/__init__.py").unlink()
    assert run("import kernels\nprint(hasattr(kernels, 'Layer'))", site) == ["False"]
