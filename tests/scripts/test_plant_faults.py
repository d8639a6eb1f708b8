"""scripts/plant_faults.py: a fault that a test finds is found, another one lived, and the sources stay as they were."""

import subprocess
import sys

import pytest

from kernels import InputError
from scripts import plant_faults
from scripts.plant_faults import main, mirrored_tests, read_faults

SOURCE = "def area(width, height):\n    return width * height\n\n\ndef name():\n    return 'area'\n"
FAULTS = """# a sum in place of the product
model/area.py
- width * height
+ width + height

# another name
model/area.py
- return 'area'
+ return 'volume'

# a line is lost, which another file's test finds
model/area.py
- def area(width, height):
-     return width * height
+ def area(width, height):
+     return None
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    files = {
        "model/__init__.py": "",  # or an environment's PYTHONPATH would find another one first
        "model/area.py": SOURCE,
        "tests/model/test_area.py": "from model.area import area\ndef test_area(): assert area(2, 3) in (6, None)\n",
        "tests/test_all.py": "from model.area import area\ndef test_all(): assert area(1, 1) is not None\n",
        "faults.txt": FAULTS,
        "pytest.ini": "[pytest]\npythonpath = .\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    monkeypatch.setattr(plant_faults, "ROOT", tmp_path)
    return tmp_path


def plant(repository, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["plant_faults.py", str(repository / "faults.txt"), "--processes", "0", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_says_which_faults_were_found_and_by_what(repository, monkeypatch, capsys):
    assert plant(repository, monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ", 2)[2].split(" (")[0] for line in lines[:3]] == [
        "found by tests/model/test_area.py::test_area",
        "LIVED",
        "found by tests/test_all.py::test_all",
    ]
    assert lines[3] == "2 of 3 found"
    assert (repository / "model/area.py").read_text() == SOURCE


def test_all_found_is_exit_code_0(repository, monkeypatch):
    assert plant(repository, monkeypatch, "--only", "sum") == 0


def test_a_suite_that_fails_without_a_fault_is_refused(repository, monkeypatch):
    (repository / "tests/test_all.py").write_text("def test_all(): assert False\n")
    monkeypatch.setattr(sys, "argv", ["plant_faults.py", str(repository / "faults.txt"), "--processes", "0"])
    with pytest.raises(InputError, match="test_all fails without any fault"):
        main()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("- width * height", "- width / height", "occurs 0 times"),
        ("- width * height", "- width", "occurs 2 times"),
        ("model/area.py\n- width", "model/other.py\n- width", "is missing"),
        ("# another name\n", "", "incomplete"),
    ],
)
def test_a_fault_that_does_not_fit_is_refused(repository, old, new, reason):
    path = repository / "faults.txt"
    path.write_text(FAULTS.replace(old, new, 1))
    with pytest.raises(InputError, match=reason):
        read_faults(path)


def test_mirrored_tests(repository):
    assert mirrored_tests(repository, "model/area.py") == ["tests/model/test_area.py", "tests/model"]
    assert mirrored_tests(repository, "model/other.py") == ["tests/model"]
    assert mirrored_tests(repository, "other.py") == []
    assert mirrored_tests(repository, "configs/tiny.json") == []
