"""docs/rmsnorm.md: its code is that of the files it names, its examples run, and so do the READMEs' commands."""

import doctest
import importlib
import inspect
import re
import shlex
import sys

import pytest

from tests.helpers import ROOT

PAGE = ROOT / "docs" / "rmsnorm.md"
TEXT = PAGE.read_text(encoding="utf-8")
QUOTED = re.findall(r"<!-- from (\S+): ([\w., ]+) -->\n```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("file", "names", "code"), QUOTED, ids=[f"{file}:{names}" for file, names, _ in QUOTED])
def test_the_code_on_the_page_is_that_of_the_file(file, names, code):
    if "triton" in file:
        pytest.importorskip("triton", reason="triton is made for Linux alone")
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    sources = []
    for name in names.split(", "):
        found = module
        for part in name.split("."):
            found = getattr(found, part)
        sources.append(inspect.cleandoc("\n" + inspect.getsource(getattr(found, "fn", found))))
    assert code.strip() == "\n\n\n".join(sources)


def test_the_examples_on_the_page_give_what_stands_there():
    text = TEXT.replace("```", "")  # a fence would be taken for what an example prints
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(examples.examples) > 20
    report = []
    doctest.DocTestRunner().run(examples, out=report.append)
    assert not report, "".join(report)


def commands():
    """Every `python FILE ...` of the documents, in a block or within a line, without its comment."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", PAGE, *ROOT.glob("*/README.md")]
    for path in [*documents, ROOT / "model/training/README.md"]:
        text = path.read_text(encoding="utf-8")
        blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
        for command in [
            *blocks.splitlines(),
            *re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)),
        ]:
            found = re.search(r"python ((?:scripts/|model/)?\w+\.py\b[^;&|#]*)", command.replace("\n", " "))
            if found and "$" not in command:  # a shell fills it in
                yield path.relative_to(ROOT).as_posix(), found[1].strip()


@pytest.mark.parametrize(("document", "line"), sorted(set(commands())))
def test_the_documents_commands_have_the_flags_that_they_use(document, line, monkeypatch):
    file, *arguments = shlex.split(line)
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    arguments = [argument for argument in arguments if argument != "--resume"]  # it wants a run to continue
    monkeypatch.setattr(sys, "argv", [file, *arguments])
    monkeypatch.setattr(module, "emulate_as_asked", lambda args: None, raising=False)  # it would last
    module.parse_args()
