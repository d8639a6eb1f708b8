"""What does it cost? The table of what was counted, and what is said where nothing can be."""

import pytest

from scripts.proving import cost
from scripts.proving.apart import Died
from scripts.proving.fits import Traits
from scripts.proving.subject import Subject

PLAIN = Traits("a norm", "plain PyTorch", False, False, True, False)
TRITON = PLAIN._replace(triton=True)
KERNELS = [{"name": "forward", "warps": 4, "registers": 26, "spills": "none"}]
SPILLED = [{"name": "forward", "warps": 4, "registers": 255, "spills": "spills 8 bytes, 1 stores and 1 loads"}]
FOUND = {
    "mine": {"forward": {"figures": [4.0, 2.03, 14.6], "kernels": KERNELS}},
    "triton": {
        "forward": {"figures": [4.0, 1.02, 12.9], "kernels": SPILLED},
        "add": {"figures": "RuntimeError: too wide", "kernels": []},
    },
    "liger": {"died": "a segmentation fault"},
}


def test_the_table_has_a_row_a_norm_and_a_column_a_pass():
    head, _, mine, ours, liger = cost.table(FOUND)
    assert head.count("|") == mine.count("|") == ours.count("|") == liger.count("|") == 8
    assert mine == "| mine | 4.00 + 2.03 | 15 | 26 | - | - | - |"
    assert "255 (spills 8 bytes, 1 stores and 1 loads) | RuntimeError: too wide | - | - |" in ours
    assert "a segmentation fault" in liger
    assert "forward: bytes, floor 4" in head


@pytest.mark.parametrize(
    ("subject", "traits", "words"),
    [
        (Subject("a:b"), PLAIN, "it launches no Triton kernel"),
        (Subject("a:b", gpu="sm_90"), PLAIN, "it launches no Triton kernel"),
        (Subject("a:b"), TRITON._replace(interpreted=True), "--emulate sm_90 counts"),
        (Subject("a:b", gpu="sm_90"), TRITON, ""),
        (Subject("a:b", device="cuda"), PLAIN, ""),
    ],
)
def test_why_there_is_nothing_to_count(subject, traits, words):
    found = cost.nothing_to_count(subject, traits)
    assert words in found if words else found == ""


def test_a_norm_is_counted_beside_ours_and_peers(monkeypatch):
    monkeypatch.setattr(cost.peers, "installed", lambda: ["torch_fused", "liger", "quack"])
    assert cost.beside(Subject("a:b"), triton=True) == ["triton", "scripts.peers:liger"]
    assert cost.beside(Subject("triton", "torch"), triton=True) == []  # liger does not claim that form
    asked = []

    class Here:
        def call(self, function, subject, backward, adds):
            asked.append((subject.name, backward, adds))
            if "liger" in subject.name:
                raise Died("a segmentation fault", "forward")
            return {"forward": 1}

    result = cost.emulated(Subject("a:b"), TRITON._replace(backward=False), [Here(), Here()], lambda words: None)
    assert asked == [("a:b", False, False), ("triton", True, True), ("scripts.peers:liger", True, False)]
    assert result["scripts.peers:liger"] == {"died": "a segmentation fault, at forward"}


def test_the_benchmark_is_that_of_bench_norm(monkeypatch, tmp_path):
    monkeypatch.setattr(cost.peers, "installed", lambda: ["liger"])
    asked = []

    def run(command, **_):
        asked.append(command)
        (tmp_path / "norm.png").touch()
        return cost.subprocess.CompletedProcess(command, 0, "a table", "")

    monkeypatch.setattr(cost.subprocess, "run", run)
    found = cost.benchmark(Subject("a:b", device="cuda:0"), tmp_path)
    assert found == {"printed": "a table", "picture": f"{tmp_path.name}/norm.png", "returncode": 0}
    words = asked[0]
    assert words[words.index("--norms") + 1] == "a:b,torch,triton,scripts.peers:liger"
    assert words[words.index("--device") + 1] == "cuda:0"
