"""Prepared data decodes to its text, stale data is prepared again, and failures leave nothing behind."""

import errno
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from filelock import FileLock

from kernels import InputError
from model.tokenizer.sentencepiece_model import train_tokenizer
from model.training import corpus as corpora
from model.training import prepare as preparing
from model.training.prepare import prepare
from scripts.prepare_data import main
from tests.helpers import ROOT

LINE = "a fox ran\tover 12 dogs\r\n\n  🙂 and slept\n"
VOCAB_SIZE = 300


def documents_in(folder: Path) -> list[str]:
    """The texts between begin and end tokens, decoded by sentencepiece itself."""
    dtype = json.loads((folder / "meta.json").read_text())["dtype"]
    tokens = np.fromfile(folder / "tokens.bin", dtype).tolist()
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    documents = []
    while tokens:
        end = tokens.index(sp.eos_id())
        assert tokens[0] == sp.bos_id()
        documents.append(sp.decode(tokens[1:end]))
        tokens = tokens[end + 1 :]
    return documents


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "a [corpus].txt"
    path.write_bytes((LINE * 30).encode())
    return path


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "data"


def test_a_file_comes_back_from_its_tokens(corpus, root):
    folder = prepare(str(corpus), VOCAB_SIZE, root)
    assert documents_in(folder) == [LINE * 30]
    assert folder.stat().st_mode == root.stat().st_mode  # others may read it, unlike a temporary folder


def test_a_folder_is_its_visible_files_in_sorted_order(tmp_path, root):
    for name in ["b.txt", "a/z.txt", "c", ".hidden", ".git/config", "a/.cache/x"]:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{name}\n{LINE}".encode())
    (tmp_path / "corpus/empty").touch()
    folder = prepare(str(tmp_path / "corpus"), VOCAB_SIZE, root)
    assert documents_in(folder) == [f"{name}\n{LINE}" for name in ["a/z.txt", "b.txt", "c"]]


def test_meta_describes_the_tokens(corpus, root, command):
    code, out, err = command(main, "--data", corpus, "--vocab-size", VOCAB_SIZE, "--out", root)
    [folder] = root.iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    tokens = np.fromfile(folder / "tokens.bin", "uint16").tolist()
    n_train = len(tokens) - len(tokens) // 10
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    counts = Counter(tokens[:n_train])
    loss = [-math.log((counts[id] + 1) / (n_train + sp.vocab_size())) for id in tokens[n_train:]]
    assert (code, out) == (0, "")
    assert f"{len(tokens):,} tokens" in err
    assert (meta["dtype"], meta["vocab_size"]) == ("uint16", sp.vocab_size())
    assert (meta["n_tokens"], meta["n_train"]) == (len(tokens), n_train)
    # A float64 mean of n terms is off by at most n * 2^-53, relatively; n is below 1000.
    assert meta["unigram_loss"] == pytest.approx(sum(loss) / len(loss), rel=1e-12)


class FakeTokenizer:
    bos_id, eos_id = 1, 2

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [self.vocab_size - 1, *map(ord, text)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65535, "uint16"), (65536, "uint16"), (65537, "uint32"), (128256, "uint32")]
)
def test_the_vocabulary_decides_the_dtype_of_the_ids(tmp_path, vocab_size, dtype):
    (tmp_path / "a").write_text("a")
    meta = preparing._write_tokens([tmp_path / "a"], FakeTokenizer(vocab_size), tmp_path / "tokens.bin")
    assert meta["dtype"] == dtype
    assert np.fromfile(tmp_path / "tokens.bin", dtype).tolist() == [1, vocab_size - 1, ord("a"), 2]


def test_unchanged_data_is_not_prepared_again(corpus, root):
    folder = prepare(str(corpus), VOCAB_SIZE, root)
    (folder / "tokens.bin").write_bytes(b"untouched")
    assert prepare(str(corpus), VOCAB_SIZE, root) == folder
    assert (folder / "tokens.bin").read_bytes() == b"untouched"


@pytest.mark.parametrize("data", ["PATH", "shakespeare"])
def test_changed_data_is_prepared_again(corpus, root, data, monkeypatch):
    monkeypatch.setattr(corpora, "sha256_of", lambda path: corpora.SHAKESPEARE_SHA256)
    if data == "shakespeare":  # as if fetched before; its folder's name has no fingerprint, so it is replaced
        corpus = corpus.rename(root.parent / "shakespeare.txt")
        root = root.parent
    else:
        data = str(corpus)
    prepare(data, VOCAB_SIZE, root)
    corpus.write_text("a dog ran\n" * 50)
    assert documents_in(prepare(data, VOCAB_SIZE, root)) == ["a dog ran\n" * 50]


SLOW = """
import pathlib, time
from model.cli import run
from model.training import prepare
from scripts.prepare_data import main
train = prepare.train_tokenizer
def slow(*arguments):
    pathlib.Path("begun").touch()
    for _ in range(3000):  # 30 seconds, in which a fault becomes a failure and not a test that never ends
        if not pathlib.Path("go").exists():
            time.sleep(0.01)
    return train(*arguments)
prepare.train_tokenizer = slow
run(main)
"""


@pytest.fixture
def start(corpus, root, monkeypatch):
    """Start prepare_data.py in a process that waits in the middle for a file `go`; returns it once it is there."""
    monkeypatch.chdir(corpus.parent)
    processes = []

    def start():
        arguments = ["--data", str(corpus), "--vocab-size", str(VOCAB_SIZE), "--out", str(root)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SLOW, *arguments]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
        while not Path("begun").exists():
            assert processes[-1].poll() is None
            time.sleep(0.01)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_of_two_commands_one_prepares_and_the_other_waits(start, root):
    first = start()
    second = start()
    said = second.stderr.readline()  # before `go`, so while the first works
    Path("go").touch()
    outputs = [process.communicate(timeout=60)[1] for process in (first, second)]
    [folder] = root.iterdir()
    assert said == f"another command is preparing {folder}; waiting for it\n"
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert ["preparing" in output for output in outputs] == [True, False]
    assert ["tokens, the last" in output for output in outputs] == [True, True]
    assert documents_in(folder) == [LINE * 30]


def test_what_a_killed_command_leaves_is_removed_and_stops_nobody(start, corpus, root, command):
    killed = start()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    [partial] = root.glob("*.partial")
    near = partial.with_name(f"{partial.name.removesuffix('.partial')}-1024-abcdefgh.partial")
    near.mkdir()  # of a file whose name begins like that of our folder
    code, _, err = command(main, "--data", corpus, "--vocab-size", VOCAB_SIZE, "--out", root)
    assert (code, "waiting" in err) == (0, False)
    near.rmdir()
    [folder] = root.iterdir()
    names = ["meta.json", "tokenizer.model", "tokenizer_config.json", "tokens.bin"]
    assert sorted(os.listdir(folder)) == names
    assert documents_in(folder) == [LINE * 30]


@pytest.mark.parametrize("error", [NotImplementedError, OSError(errno.ENOLCK, "No locks available")])
def test_without_locks_nothing_is_mixed(corpus, root, monkeypatch, error):
    def no_lock(*arguments, **keywords):
        raise error

    barrier = threading.Barrier(2, timeout=60)

    def meet(*arguments):
        barrier.wait()
        tokenizer = train_tokenizer(*arguments)
        barrier.wait()
        return tokenizer

    monkeypatch.setattr(FileLock, "acquire", no_lock)
    monkeypatch.setattr(preparing, "train_tokenizer", meet)
    found = []
    threads = [threading.Thread(target=lambda: found.append(prepare(str(corpus), VOCAB_SIZE, root))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [*root.iterdir()] * 2
    assert documents_in(found[0]) == [LINE * 30]


def test_a_text_that_changes_while_it_is_read_is_refused_and_leaves_nothing(corpus, root, monkeypatch):
    def train(*arguments):
        with corpus.open("a") as file:
            file.write("one more line\n")
        return train_tokenizer(*arguments)

    monkeypatch.setattr(preparing, "train_tokenizer", train)
    with pytest.raises(InputError, match=re.escape(f"--data {corpus} has changed while it was read")):
        prepare(str(corpus), VOCAB_SIZE, root)
    assert not list(root.iterdir())


def test_a_folder_that_cannot_be_read_is_refused_not_skipped(tmp_path, root, monkeypatch):
    (tmp_path / "locked").mkdir()
    (tmp_path / "text").write_text(LINE)

    def scandir(path, usual=os.scandir):
        if Path(path).name == "locked":  # chmod would not stop root
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"locked cannot be read .Permission denied.; make it readable, or leave"):
        prepare(str(tmp_path), VOCAB_SIZE, root)


def test_prepared_data_within_the_corpus_is_not_part_of_it(tmp_path):
    (tmp_path / "text").write_text(LINE * 30)
    folders = [prepare(str(tmp_path), VOCAB_SIZE, tmp_path / out) for out in ("data", "data", "", "")]
    assert [folder.parent.name for folder in folders] == ["data", "data", tmp_path.name, tmp_path.name]
    assert folders[0].name == folders[2].name
    assert documents_in(folders[2]) == [LINE * 30]


def test_a_byte_order_mark_is_dropped_at_the_start_of_each_file(tmp_path, root):
    texts = {"a": LINE * 30, "b": f"in the \ufeff middle\n{LINE}", "c": ""}
    (tmp_path / "corpus").mkdir()
    for name, text in texts.items():
        (tmp_path / "corpus" / name).write_text("\ufeff" + text, newline="")
    assert documents_in(prepare(str(tmp_path / "corpus"), VOCAB_SIZE, root)) == [texts["a"], texts["b"]]


@pytest.mark.parametrize(
    ("files", "data", "said"),
    [
        ({"x": b""}, "x", "holds no text"),
        ({"d/x": b"", "d/y": b""}, "d", "holds no text"),
        ({}, ".", "holds no text"),
        ({".hidden": b"text"}, ".", "holds no text"),
        ({}, "missing", "does not exist"),
        ({"x": b"text\xff"}, "x", "is not UTF-8 text"),
        ({"x": b"\n\n"}, "x", "expected words"),
        ({"x": b"\0\0"}, "x", "expected words"),
    ],
    ids=["empty", "empty-files", "empty-folder", "hidden-only", "missing", "not-utf-8", "line-breaks", "nul"],
)
def test_a_corpus_without_text_is_refused_and_leaves_nothing(tmp_path, root, command, files, data, said):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, content in files.items():
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_bytes(content)
    code, out, err = command(main, "--data", corpus / data, "--vocab-size", VOCAB_SIZE, "--out", root)
    error = err.splitlines()[-1]  # an earlier line may name the folder being prepared
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert str(corpus / data) in error
    assert said in error
    assert not list(root.glob("*"))


def test_too_small_a_vocabulary_is_refused_and_leaves_nothing(corpus, root):
    with pytest.raises(InputError, match="--vocab-size"):
        prepare(str(corpus), 10, root)
    assert not list(root.glob("*"))


def test_a_text_of_several_parts_has_the_ids_of_the_whole(corpus, root):
    text = LINE * (3 * preparing.PART // len(LINE))
    corpus.write_text(text, newline="")
    folder = prepare(str(corpus), VOCAB_SIZE, root)
    sp = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert np.fromfile(folder / "tokens.bin", np.uint16).tolist() == [1, *sp.encode(text), 2]


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_parts_have_the_ids_of_the_whole(monkeypatch, size):
    monkeypatch.setattr(preparing, "PART", size)
    tokenizer = train_tokenizer([LINE * 30], VOCAB_SIZE)
    draw = random.Random(size)
    bits = ["a", "fox", "over 12", " ", "  ", "\n", "\r", "\r\n", "\x0b", "\u2028", "!", "🙂", "漢", "\u2581", "<s>"]
    texts = ["", "\n", "\n\n\n", "\r\n\r\n", "no break", "x" * 300, "\n" + "x" * 300 + "\n", " lead\n  lead", LINE * 30]
    for text in [*texts, *("".join(draw.choices(bits, k=60)) for _ in range(200))]:
        given = [text[i : i + 3] for i in range(0, len(text), 3)]
        parts = list(preparing._parts(given))
        assert "".join(parts) == text
        assert [id for part in parts for id in tokenizer.encode(part)] == tokenizer.encode(text), text
        assert all(size <= len(part) < size + 400 for part in parts[:-1])


def test_a_text_without_any_end_is_cut_all_the_same(monkeypatch):
    monkeypatch.setattr(preparing, "LONGEST_PART", 10)
    monkeypatch.setattr(preparing, "PART", 5)
    assert list(preparing._parts(["xxxx"] * 7)) == ["x" * 12, "x" * 12, "x" * 4]


def test_a_tokenizer_of_a_text_in_lines_is_that_of_the_whole_text(tmp_path, root):
    text = LINE * 30 + "\n\n".join(f"{'wo rd ' * 400:.{n}}" for n in (9, 999, 1000, 1001, 2000)) + LINE + "end"
    (tmp_path / "text").write_text(text, newline="")
    folder = prepare(str(tmp_path / "text"), VOCAB_SIZE, root)
    assert (folder / "tokenizer.model").read_bytes() == train_tokenizer([text], VOCAB_SIZE).files["tokenizer.model"]


@pytest.mark.parametrize("sample", [30_000, 29_999, 3_000])
def test_the_tokenizer_of_a_long_text_is_trained_on_a_sample_of_its_lines(tmp_path, root, monkeypatch, capsys, sample):
    text = [f"{i:06} {i % 7} fox\n" for i in range(2000)]
    text = "".join(line.rjust(15) for line in text)
    (tmp_path / "text").write_text(text, newline="")
    monkeypatch.setattr(preparing, "SAMPLE", sample)
    seen = []

    def train(lines, vocab_size):
        seen.append(list(lines))
        return train_tokenizer(seen[-1], vocab_size)

    monkeypatch.setattr(preparing, "train_tokenizer", train)
    folders = [prepare(str(tmp_path / "text"), VOCAB_SIZE, root / name) for name in "ab"]
    assert seen[0] == seen[1]
    assert documents_in(folders[0]) == [text]
    said = f"the tokenizer is trained on {sample / 30_000:.1%} of the text, in lines drawn at random\n"
    assert capsys.readouterr().err.count(said) == (0 if sample == 30_000 else 2)
    if sample == 30_000:
        assert "".join(seen[0]) == text
    if sample == 3_000:
        assert 200 - 5 * 14 < len(seen[0]) < 200 + 5 * 14  # five standard deviations of 2000 draws
        assert sorted(set(seen[0])) == seen[0]
        assert seen[0][0] < "  000200"
        assert seen[0][-1] > "  001800"


@pytest.mark.parametrize("line", ["a line of the text\n", "x"], ids=["lines", "no-line-breaks"])
def test_memory_does_not_grow_with_the_text(tmp_path, root, monkeypatch, line):
    tokenizer = FakeTokenizer(256)
    tokenizer.files = {"tokenizer.model": b""}
    monkeypatch.setattr(preparing, "train_tokenizer", lambda lines, size: sum(map(len, lines)) and tokenizer)
    for name in ("PART", "LONGEST_PART", "BLOCK"):
        monkeypatch.setattr(preparing, name, 2**12)
    text = tmp_path / "text"
    text.write_text(line * (2**19 // len(line)))
    tracemalloc.start()
    prepare(str(text), VOCAB_SIZE, root)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18  # half of the text's bytes, a quarter of the ids'


def test_a_resumed_run_keeps_the_data_it_started_with(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(LINE * 200)
    monkeypatch.setattr(preparing, "corpus_files", lambda data, root: [text])  # its folder's name has no fingerprint
    folder = preparing.prepare("python", 300, tmp_path / "data")
    before = (folder / "tokens.bin").read_bytes()
    text.write_text(LINE * 300)
    assert preparing.prepare("python", 300, tmp_path / "data", wanted="") == folder
    assert (folder / "tokens.bin").read_bytes() == before
    assert preparing.prepare("python", 300, tmp_path / "data") == folder
    assert (folder / "tokens.bin").read_bytes() != before


def test_a_resumed_run_finds_its_data_under_another_fingerprint(corpus, root, capsys):
    folder = prepare(str(corpus), VOCAB_SIZE, root)
    wanted = json.loads((folder / "meta.json").read_text())["sha256"]
    corpus.write_text("a dog ran\n" * 50)
    other = prepare(str(corpus), VOCAB_SIZE, root)
    (root / f"{corpus.stem}-0-{VOCAB_SIZE}").mkdir()
    (root / f"{corpus.stem}-0-{VOCAB_SIZE}/meta.json").write_text("damaged")  # no reason to stop
    capsys.readouterr()
    assert prepare(str(corpus), VOCAB_SIZE, root, wanted) == folder
    assert capsys.readouterr().err == f"--data {corpus} or its preparation has changed; the run goes on with {folder}\n"
    assert prepare(str(corpus), VOCAB_SIZE, root, "0" * 64) == other
    assert capsys.readouterr().err == ""
