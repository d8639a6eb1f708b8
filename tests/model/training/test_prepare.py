"""Prepared data decodes to its text, stale data is prepared again, and failures leave nothing behind."""

import hashlib
import json
import math
import os
import random
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from kernels import InputError
from model.tokenizer.sentencepiece_model import train_tokenizer
from model.training import prepare as preparing
from model.training.prepare import fetch, prepare
from scripts.prepare_data import main

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
    path = tmp_path / "corpus.txt"
    path.write_bytes((LINE * 30).encode())
    return path


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "data"


def test_a_file_comes_back_from_its_tokens(corpus, root):
    assert documents_in(prepare(str(corpus), VOCAB_SIZE, root)) == [LINE * 30]


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
    meta = preparing._write_tokens(["a"], FakeTokenizer(vocab_size), tmp_path / "tokens.bin")
    assert meta["dtype"] == dtype
    assert np.fromfile(tmp_path / "tokens.bin", dtype).tolist() == [1, vocab_size - 1, ord("a"), 2]


def test_unchanged_data_is_not_prepared_again(corpus, root):
    folder = prepare(str(corpus), VOCAB_SIZE, root)
    (folder / "tokens.bin").write_bytes(b"untouched")
    assert prepare(str(corpus), VOCAB_SIZE, root) == folder
    assert (folder / "tokens.bin").read_bytes() == b"untouched"


@pytest.mark.parametrize("data", ["PATH", "shakespeare"])
def test_changed_data_is_prepared_again(corpus, root, data):
    if data == "shakespeare":  # as if fetched before; its folder's name has no fingerprint, so it is replaced
        corpus = corpus.rename(root.parent / "shakespeare.txt")
        root = root.parent
    else:
        data = str(corpus)
    prepare(data, VOCAB_SIZE, root)
    corpus.write_text("a dog ran\n" * 50)
    assert documents_in(prepare(data, VOCAB_SIZE, root)) == ["a dog ran\n" * 50]


def test_leftovers_of_an_interrupted_run_are_replaced(corpus, root):
    folder = prepare(str(corpus), VOCAB_SIZE, root)
    partial = folder.rename(f"{folder}.partial")
    (partial / "junk").touch()
    prepare(str(corpus), VOCAB_SIZE, root)
    assert not partial.exists()
    assert sorted(os.listdir(folder)) == ["meta.json", "tokenizer.model", "tokens.bin"]
    assert documents_in(folder) == [LINE * 30]


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
    assert not root.exists()


def test_too_small_a_vocabulary_is_refused_and_leaves_nothing(corpus, root):
    with pytest.raises(InputError, match="--vocab-size"):
        prepare(str(corpus), 10, root)
    assert not root.exists()


def test_the_default_corpus_is_the_standard_library_without_its_tests(tmp_path):
    library = Path(os.__file__).parent
    names = [path.relative_to(library).as_posix() for path in preparing._corpus_files("python", tmp_path)]
    assert {"os.py", "json/decoder.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"} == set()


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
        parts = list(preparing._parts(text))
        assert "".join(parts) == text
        assert [id for part in parts for id in tokenizer.encode(part)] == tokenizer.encode(text), text
        assert all(size <= len(part) < size + 400 for part in parts[:-1])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("Content-Length", "20" if self.path == "/cut" else "7")
        self.end_headers()
        self.wfile.write(b"content")

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.paths = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


SHA256 = hashlib.sha256(b"content").hexdigest()


def test_a_file_is_fetched_once(server, tmp_path):
    path = tmp_path / "new/file.txt"
    for _ in range(2):
        assert fetch(f"{server.url}/file", SHA256, path).read_bytes() == b"content"
    assert server.paths == ["/file"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "sha256", "found"),
    [("/file", "0" * 64, SHA256), ("/missing", SHA256, "404"), ("/cut", SHA256, "IncompleteRead")],
    ids=["wrong-checksum", "not-found", "cut-short"],
)
def test_a_failed_fetch_says_why_and_leaves_nothing(server, tmp_path, path, sha256, found):
    with pytest.raises(InputError, match=found) as error:
        fetch(server.url + path, sha256, tmp_path / "file")
    assert f"{server.url}{path}" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_server_is_an_input_error(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as bound:  # but not listening, so a connection is refused
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match="cannot be fetched"):
            fetch(f"http://127.0.0.1:{bound.getsockname()[1]}/", SHA256, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_keeps_the_data_it_started_with(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(LINE * 200)
    monkeypatch.setattr(preparing, "_corpus_files", lambda data, root: [text])  # its folder's name has no fingerprint
    folder = preparing.prepare("python", 300, tmp_path / "data")
    before = (folder / "tokens.bin").read_bytes()
    text.write_text(LINE * 300)
    assert preparing.prepare("python", 300, tmp_path / "data", renew=False) == folder
    assert (folder / "tokens.bin").read_bytes() == before
    assert preparing.prepare("python", 300, tmp_path / "data") == folder
    assert (folder / "tokens.bin").read_bytes() != before
