"""What the tests of several scripts share."""

import os
import subprocess
import sys

from tests.helpers import ROOT


def help_of(script, folder):
    """The --help of a script of scripts/, in a process where torch can't be imported."""
    (folder / "torch.py").write_text("raise ImportError('torch is imported')")
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--help"],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert str(ROOT) not in result.stdout
    return " ".join(result.stdout.split())
