"""docs/rmsnorm.md: its code is that of the files it names, its examples run, and so do the READMEs' commands."""

import doctest
import importlib
import inspect
import re
import shlex
import sys

import pytest
import torch

from kernels import reference
from tests.helpers import ROOT, needs_compiler

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


@needs_compiler
def test_the_norm_on_the_page_keeps_its_inputs_alone():
    [code] = re.findall(r"```python\n# recompute.py[^\n]*\n(.*?)```", TEXT, re.DOTALL)
    found: dict = {}
    exec(code, found)
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((5, 48), (48,)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = found["rms_norm"](x, weight, 3e-3)
    assert {tensor.shape for tensor in kept} == {x.shape, weight.shape}  # and no row's root
    expected = reference.rms_norm(x, weight, 3e-3)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(5, 48)
    gradients = (torch.autograd.grad(each, (x, weight), dy) for each in (y, expected))
    torch.testing.assert_close(*gradients)


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
