"""A folder of prepared data that lost or changed anything is refused in a line that names the file."""

import json
import shutil

import pytest

from kernels import InputError
from model.training import data_folder
from model.training.data_folder import read_meta, read_prepared
from model.training.prepare import prepare
from scripts.prepare_data import main
from tests.helpers import TEXT


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared")
    (root / "text").write_text(TEXT)
    return prepare(str(root / "text"), 300, root / "data")


@pytest.fixture
def folder(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "data")


def test_what_was_prepared_is_read(folder):
    assert read_prepared(folder) == read_meta(folder) == json.loads((folder / "meta.json").read_text())


def flip(content):
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("tokens.bin", None, "No such file"),
        ("tokens.bin", lambda content: b"", "has 0 bytes; expected N;"),
        ("tokens.bin", lambda content: content[:-1], "bytes; expected N;"),
        ("tokens.bin", lambda content: content[: len(content) // 2], "bytes; expected N;"),
        ("tokens.bin", lambda content: content[: len(content) * 95 // 200 * 2], "bytes; expected N;"),
        ("tokens.bin", lambda content: content + b"x", "bytes; expected N;"),
        ("tokens.bin", flip, "is damaged: its SHA-256"),
        ("tokenizer.model", None, "No such file"),
        ("tokenizer.model", lambda content: b"", "is damaged: its SHA-256"),
        ("tokenizer.model", flip, "is damaged: its SHA-256"),
        ("meta.json", None, "No such file"),
        ("meta.json", lambda content: b"", "Expecting value"),
        ("meta.json", lambda content: content[:50], "expected a JSON object"),
        ("meta.json", lambda content: b"\xff" + content, "expected a JSON object"),
        ("meta.json", lambda content: b"[" * 100_000, "expected a JSON object"),
        ("meta.json", lambda content: b"[1]", "the content is [1]; expected a JSON object"),
    ],
)
def test_a_missing_or_damaged_file_is_refused_by_name(folder, name, damage, said):
    path = folder / name
    size = path.stat().st_size
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(InputError) as error:
        read_prepared(folder)
    message = str(error.value)
    assert message.startswith(f"{path}")
    assert said.replace("N", f"{size:,}", said.count("expected N")) in message
    assert message.endswith(f"; remove {folder}, and the next run makes it again")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float32"), ("dtype", 16), ("dtype", None), ("n_tokens", "many"), ("n_tokens", True), ("n_tokens", 0),
        ("n_train", -1), ("n_train", 0), ("n_train", 10**9), ("n_train", 3.0), ("vocab_size", True),
        ("unigram_loss", None), ("unigram_loss", "low"), ("fingerprint", 1), ("sha256", None), ("sha256", []),
    ],
)  # fmt: skip
def test_a_wrong_value_in_meta_json_is_refused_by_key(folder, key, value):
    meta = json.loads((folder / "meta.json").read_text())
    for changed in ({**meta, key: value}, {name: meta[name] for name in meta if name != key}):
        (folder / "meta.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=rf"meta.json: \w+ is .*; expected .*; remove {folder}, and the next run"):
            read_meta(folder)


def test_a_large_file_is_held_to_its_size_alone(folder, monkeypatch):
    content = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(flip(content))
    monkeypatch.setattr(data_folder, "HASHED", len(content) - 3)
    read_prepared(folder)
    (folder / "tokens.bin").write_bytes(content[:-2])
    with pytest.raises(InputError, match="bytes; expected"):
        read_prepared(folder)


def test_a_folder_from_before_the_tokenizer_had_a_checksum_is_read(folder):
    meta = json.loads((folder / "meta.json").read_text())
    del meta["tokenizer_sha256"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert read_prepared(folder) == meta


@pytest.mark.parametrize(("name", "content"), [("meta.json", b""), ("meta.json", b"{}"), ("tokens.bin", b"cut")])
def test_prepare_data_refuses_damaged_data(tmp_path, command, name, content):
    (tmp_path / "text").write_text(TEXT)
    arguments = ["--data", tmp_path / "text", "--vocab-size", 300, "--out", tmp_path / "data"]
    assert command(main, *arguments)[0] == 0
    [folder] = (tmp_path / "data").iterdir()
    (folder / name).write_bytes(content)
    code, _, err = command(main, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {folder / name}")
    shutil.rmtree(folder)  # as it says
    assert command(main, *arguments)[0] == 0
