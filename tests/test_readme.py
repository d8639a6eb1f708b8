"""README.md: its commands are found by their marks, wherever they stand, and nothing else is taken for one."""

import re
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


def anchors(path):
    """The names that links give to the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_and_heading_that_the_documents_name_is_there():
    documents = [
        ROOT / "README.md",
        *ROOT.glob("*/README.md"),
        ROOT / "model/training/README.md",
        *ROOT.glob("docs/*.md"),
    ]
    for document in documents:
        for target in (part.split(")")[0] for part in document.read_text(encoding="utf-8").split("](")[1:]):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            assert (document.parent / path).exists(), (document, target)
            assert not anchor or anchor in anchors(document.parent / path), (document, target)
