"""The arrows of the layout: commands -> training, checkpoint, tokenizer -> the network -> kernels, and no circle."""

import ast

import pytest

from tests.helpers import ROOT

SOURCES = [path for top in ("kernels", "model", "scripts", "tests") for path in (ROOT / top).rglob("*.py")]
SOURCES += ROOT.glob("*.py")


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in SOURCES}


def imports(path):
    """Our own modules that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in NAMES else node.module for name in found]
        else:
            continue
        yield from (name for name in found if name in NAMES)


GRAPH = {name_of(path): set(imports(path)) for path in SOURCES}


def layer(name):
    """0 kernels, 1 the network, 2 what stands around it, 3 training, 4 commands, 5 tests."""
    if name.startswith("model."):
        return {"checkpoint": 2, "tokenizer": 2, "training": 3}.get(name.split(".")[1], 1)
    return {"kernels": 0, "model": 1, "tests": 5}.get(name.split(".")[0], 4)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_file_imports_from_its_own_layer_and_those_below(name):
    above = {other for other in GRAPH[name] if layer(other) > layer(name)}
    if name == "scripts.judging.judge":  # the league holds norms to the contract's own lists of checks
        assert above == {"tests.kernels.contract", "tests.kernels.test_norm_contract"}
        return
    assert not above
    tests = {other for other in GRAPH[name] if other.startswith("tests.") and ".test_" in f".{other.split('.', 1)[1]}"}
    assert not tests, "what tests share belongs in a module that holds no tests"


def test_no_file_imports_itself_by_way_of_others():
    done = set()

    def visit(name, way):
        assert name not in way, " -> ".join([*way, name])
        if name not in done:
            for other in GRAPH[name]:
                visit(other, [*way, name])
            done.add(name)

    for name in GRAPH:
        visit(name, [])
