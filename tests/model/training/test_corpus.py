"""The corpus: which files it has, how they are fetched, and that their pieces are their text."""

import hashlib
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kernels import InputError
from model.training.corpus import corpus_files, fetch, read_text


def test_the_default_corpus_is_the_standard_library_without_its_tests(tmp_path):
    library = Path(os.__file__).parent
    names = [path.relative_to(library).as_posix() for path in corpus_files("python", tmp_path)]
    assert {"os.py", "json/decoder.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"} == set()


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


def test_a_fetched_file_that_was_damaged_since_is_refused(server, tmp_path):
    path = fetch(f"{server.url}/file", SHA256, tmp_path / "file")
    path.write_bytes(b"conten")
    with pytest.raises(InputError, match=f"{path} is not what {server.url}/file has; remove it"):
        fetch(f"{server.url}/file", SHA256, path)


def test_two_fetches_at_once_have_files_of_their_own(server, tmp_path, monkeypatch):
    path, write = tmp_path / "file", Path.write_bytes

    def both_write(self, content):
        written = write(self, content[:3])  # the other begins and ends while this one is in the middle
        monkeypatch.setattr(Path, "write_bytes", write)
        assert fetch(f"{server.url}/file", SHA256, path).read_bytes() == b"content"
        return written and write(self, content)

    monkeypatch.setattr(Path, "write_bytes", both_write)
    assert fetch(f"{server.url}/file", SHA256, path).read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_neither_a_file_nor_a_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is neither a file nor a folder; expected"):
        corpus_files(str(tmp_path / "pipe"), tmp_path)
    assert corpus_files(str(tmp_path), tmp_path) == []  # and opening it would wait for ever


def test_the_folder_of_a_run_within_the_corpus_is_not_part_of_it(tmp_path):
    for name in ("text", "run.json", "sub/text", "sub/out/run.json", "sub/out/loss.png", "sub/out/state/step/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = corpus_files(f"{tmp_path}/", tmp_path)
    # The root itself was asked for.
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["run.json", "sub/text", "text"]


TEXTS = ["", "\n", "a", "a\r\nb\r", "\n\nx\n", "x" * 1000, "x" * 1000 + "\n", "x" * 2001, "a\ufeff\n\ufeff\u2028"]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_without_its_byte_order_mark(tmp_path, text, bom):
    (tmp_path / "file").write_bytes(bom + text.encode())
    for by_line in (False, True):
        pieces = list(read_text(tmp_path / "file", 1000, by_line))
        assert "".join(pieces) == text
        assert all(0 < len(piece) <= 1000 for piece in pieces)
    assert not any("\n" in line[:-1] for line in pieces)


@pytest.mark.parametrize("before", [0, 1, 8191, 8192, 100_000])  # Python decodes 8192 bytes at once
def test_a_character_may_lie_across_any_border_and_half_of_one_is_refused(tmp_path, before):
    path = tmp_path / "file"
    path.write_bytes(b"x" * before + "漢".encode())
    assert "".join(read_text(path, 1000)) == "x" * before + "漢"
    for damaged, reason in ((b"\xe6\xbcx", "invalid continuation byte"), (b"\xe6\xbc", "unexpected end of data")):
        path.write_bytes(b"x" * before + damaged)
        with pytest.raises(InputError, match=f"{path} is not UTF-8 text .byte 0xe6 at {before}: {reason}"):
            list(read_text(path, 1000))


def test_a_file_that_has_gone_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path}/gone cannot be read .No such file"):
        list(read_text(tmp_path / "gone", 1000))
