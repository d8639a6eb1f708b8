"""The benchmark of data preparation: an honest text, and figures that are those of the process that prepared it."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from scripts import bench_data

resource = pytest.importorskip("resource")  # Windows has none


def test_the_text_has_its_size_and_hardly_a_line_twice(tmp_path):
    path, again = tmp_path / "text", tmp_path / "again"
    bench_data.write_text(path, 10**6)
    bench_data.write_text(again, 10**6)
    text = path.read_text()
    lines, words = text.splitlines(), re.findall("[a-z]+", text)
    assert text == again.read_text()
    assert 10**6 <= len(text) < 10**6 + 20 * bench_data.BLOCK
    assert len({line for line in lines if len(line) > 30}) > 0.99 * sum(len(line) > 30 for line in lines)
    first, second = (set(half) for half in (words[: len(words) // 2], words[len(words) // 2 :]))
    assert len(second - first) > 5000  # new words keep coming


def test_it_prints_the_memory_and_tokens_of_the_preparation(command, monkeypatch):
    ran, unit = [], 1 if sys.platform == "darwin" else 1024
    usages = {resource.RUSAGE_CHILDREN: SimpleNamespace(ru_maxrss=3 * 10**6 / unit)}
    write_text = bench_data.write_text

    def run(command, usual=subprocess.run):
        ran.append(command)
        return usual(command, stderr=subprocess.DEVNULL)

    monkeypatch.setattr(bench_data, "write_text", lambda path, size: write_text(path, size // 10))
    monkeypatch.setattr(bench_data.subprocess, "run", run)
    monkeypatch.setattr(bench_data.resource, "getrusage", usages.get)
    code, out, _ = command(bench_data.main, "--mb", 1, "--vocab-size", 300)
    first, second = out.splitlines()
    assert code == 0
    assert ran[0][-2:] == ["--vocab-size", "300"]
    assert re.fullmatch(r"text 0\.1 MB, [\d,]{6,} tokens", first)
    assert re.fullmatch(r"peak memory 3 MB, 2\d\.\d\d bytes a byte of text; \d+\.\d s", second)


def test_a_failed_preparation_is_an_error_of_the_benchmark(command, monkeypatch):
    monkeypatch.setattr(bench_data, "write_text", lambda path, size: path.touch())
    monkeypatch.setattr(bench_data.subprocess, "run", lambda command: SimpleNamespace(returncode=2))
    code, out, err = command(bench_data.main, "--mb", 1)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "error: prepare_data.py ended with exit code 2; its message is above"
