"""README.md: its commands are found by their marks, wherever they stand, and nothing else is taken for one."""

import shutil
import subprocess

import pytest

from tests.helpers import ROOT


def command(name, root=ROOT):
    done = subprocess.run(["bash", root / ".ci/readme", name], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [("train", "train.py --norm triton"), ("test", ".venv/bin/pytest -q -n auto"), ("real", "-m real")],
)
def test_a_marked_command_is_found(name, text):
    code, stdout, _ = command(name)
    assert code == 0
    assert stdout.strip().endswith(text)
    assert stdout.count("\n") == 1


def test_a_command_is_found_wherever_it_stands(tmp_path):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    text = (ROOT / "README.md").read_text()
    start = text.index("<!-- ci: test -->")
    end = text.index("```\n", text.index("```sh", start)) + 4
    (tmp_path / "README.md").write_text(text[:start] + text[end:] + "\n```sh\nother\n```\n" + text[start:end])
    assert command("test", tmp_path) == command("test")
    (tmp_path / "README.md").write_text(text[:start] + text[end:])
    code, stdout, stderr = command("test", tmp_path)
    assert (code, stdout) == (1, "")
    assert "README.md has no command marked <!-- ci: test -->" in stderr


def test_every_file_that_the_readmes_name_is_there():
    for readme in [ROOT / "README.md", *ROOT.glob("*/README.md"), ROOT / "model/training/README.md"]:
        for target in (part.split(")")[0] for part in readme.read_text().split("](")[1:]):
            assert target.startswith("http") or (readme.parent / target).exists(), (readme, target)
