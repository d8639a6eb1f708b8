"""Pictures need no backend of matplotlib, and nothing but model/training/picture.py imports it."""

import ast
import os
import subprocess
import sys

import pytest

from model.training.picture import new_figure, why_not_drawn
from tests.helpers import ROOT

DRAW = """
import os, sys
from model.training.picture import new_figure
figure = new_figure(1, 1)
figure.subplots().plot([1, 2])
figure.savefig(sys.argv[1])
assert os.environ["MPLBACKEND"] == sys.argv[2]
"""


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "nonsense"])
def test_a_picture_needs_no_backend(backend, tmp_path):
    command = [sys.executable, "-c", DRAW, str(tmp_path / "picture.png"), backend]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "MPLBACKEND": backend}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_matplotlib_is_imported_in_one_place_and_only_to_draw():
    found = set()
    for path in [*ROOT.glob("*.py"), *(ROOT / "model").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing = [node for node in tree.body if isinstance(node, ast.If)]  # if TYPE_CHECKING
        left_out = {id(inner) for node in typing for inner in ast.walk(node)}
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
            )
            if id(node) not in left_out and any(f"{name}".startswith("matplotlib") for name in names):
                found.add(str(path.relative_to(ROOT)))
    assert found == {"model/training/picture.py"}


@pytest.mark.parametrize("error", [ImportError, AttributeError, OSError, RuntimeError, ValueError])
def test_why_a_picture_is_missing_is_one_line(error):
    def plot(numbers, path):
        raise error("no\nfont")

    assert (
        why_not_drawn(plot, [1], "out/a.png") == f"out/a.png is not drawn ({error.__name__}: no font); all else goes on"
    )
    assert why_not_drawn(lambda path: None, "out/a.png") == ""
    assert new_figure(7, 4).get_size_inches().tolist() == [7, 4]
