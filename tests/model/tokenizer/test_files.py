"""The small files beside a tokenizer: wrong types are refused by name, damage of any kind ends in one line."""

import json
import random

import pytest

from kernels import InputError
from model import json_file
from model.tokenizer import load_tokenizer
from model.tokenizer.files import ADDED, CONFIG, SPECIAL, TEMPLATE, AddedToken, TokenizerConfig
from model.tokenizer.sentencepiece_model import train_tokenizer
from tests.model.tokenizer.makers import TEXT, byte_level, sentencepiece_like


def load(folder, **files) -> TokenizerConfig:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return TokenizerConfig.load(folder)


def test_the_template_file_wins_over_the_config(tmp_path):
    assert load(tmp_path).chat_template is None
    assert load(tmp_path, tokenizer_config={"chat_template": "in the config"}).chat_template == "in the config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "by name"}]
    assert load(tmp_path, tokenizer_config={"chat_template": named}).chat_template == "by name"
    (tmp_path / TEMPLATE).write_text("in a file")
    config = load(tmp_path)
    assert config.chat_template == "in a file"
    assert set(config.files) == {CONFIG, TEMPLATE}


def test_a_list_of_added_tokens_with_attributes_replaces_the_older_files(tmp_path):
    older = {"added_tokens": {"<old>": 5, "<sep>": 6}, "special_tokens_map": {"sep_token": "<sep>"}}
    older["added_tokens"] |= {"<more>": 7, "<extra>": 8}
    older["special_tokens_map"]["additional_special_tokens"] = ["<more>"]
    config = load(tmp_path, tokenizer_config={"bos_token": "<b>", "extra_special_tokens": {"x": "<extra>"}}, **older)
    controls = [AddedToken(6, "<sep>", True), AddedToken(7, "<more>", True), AddedToken(8, "<extra>", True)]
    assert config.added == [AddedToken(5, "<old>", False, normalized=True), *controls]
    assert config.names == {"bos_token": "<b>", "sep_token": "<sep>"}
    decoder = {"7": {"content": "<new>", "special": False, "lstrip": True}}
    config = load(tmp_path, tokenizer_config={"bos_token": "<b>", "added_tokens_decoder": decoder})
    assert config.added == [AddedToken(7, "<new>", False, lstrip=True, normalized=True)]
    assert config.names == {"bos_token": "<b>"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, [], "holds a list; expected a JSON object"),
        (CONFIG, {"add_bos_token": "false"}, 'add_bos_token is "false"; expected true or false'),
        (CONFIG, {"legacy": 1}, "legacy is 1; expected true or false"),
        (CONFIG, {"bos_token": 1}, "bos_token is 1; expected a text"),
        (CONFIG, {"eos_token": {"text": "x"}}, 'eos_token is {"text": "x"}; expected a text'),
        (CONFIG, {"chat_template": 5}, "chat_template is 5; expected a text"),
        (CONFIG, {"chat_template": [{"name": "default"}]}, "expected a name and a template"),
        (CONFIG, {"added_tokens_decoder": []}, "added_tokens_decoder is []; expected an object"),
        (CONFIG, {"added_tokens_decoder": {"x": {"content": "a"}}}, 'the id of "a" is "x"; expected a non-negative'),
        (CONFIG, {"added_tokens_decoder": {"-1": {"content": "a"}}}, 'the id of "a" is "-1"; expected a non-negative'),
        (CONFIG, {"added_tokens_decoder": {"9" * 30: {"content": "a"}}}, "expected a non-negative integer"),
        (CONFIG, {"added_tokens_decoder": {"1": "a"}}, 'added_tokens_decoder "1" is "a"; expected an object'),
        (CONFIG, {"added_tokens_decoder": {"1": {"content": 1}}}, "expected a text, or an object"),
        (CONFIG, {"added_tokens_decoder": {"1": {"content": "a", "special": "no"}}}, 'special is "no"; expected true'),
        (CONFIG, {"additional_special_tokens": "<a>"}, 'additional_special_tokens is "<a>"; expected a list'),
        (ADDED, {"<pad>": "32000"}, 'the id of "<pad>" is "32000"; expected a non-negative integer'),
        (ADDED, {"<pad>": -1}, 'the id of "<pad>" is -1; expected a non-negative integer'),
        (ADDED, {"<pad>": True}, 'the id of "<pad>" is true; expected a non-negative integer'),
        (ADDED, {"<pad>": 2**40}, "expected a non-negative integer"),
        (SPECIAL, {"unk_token": ["<unk>"]}, "unk_token is [...]; expected a text".replace("...", '"<unk>"')),
        (SPECIAL, "x" * 1000, "holds a str"),
    ],
)
def test_wrong_types_are_refused_by_file_key_and_value(tmp_path, name, content, message):
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        TokenizerConfig.load(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path / name) in str(error.value)
    assert len(str(error.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("name", [CONFIG, SPECIAL, ADDED, TEMPLATE])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"[" * 10**5, b"", None], ids=["binary", "deep", "empty", "folder"]
)
def test_content_that_is_not_json_or_text_is_refused_by_path(tmp_path, name, content):
    if name == TEMPLATE and content in (b"[" * 10**5, b""):
        return  # a valid template
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=str(tmp_path / name)) as error:
        TokenizerConfig.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_far_too_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "LARGEST", 100)
    (tmp_path / "tokenizer.model").write_bytes(bytes(101))
    with pytest.raises(InputError, match=r"tokenizer\.model has 101 bytes; expected at most 100"):
        load_tokenizer(tmp_path)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """`content` cut short, replaced, or with some bytes changed; in JSON perhaps a value of another type."""
    kind = draw.randrange(5)
    if kind == 0:
        return content[: draw.randrange(len(content))]
    if kind == 1:
        return draw.randbytes(draw.randrange(1, 2000))
    if kind == 2 and content[:2] in (b'{"', b"{\n"):
        values = json.loads(content)
        place = values
        while isinstance(place, (dict, list)) and len(place):
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = draw.choice(keys)
            if draw.random() < 0.4 or not isinstance(place[key], (dict, list)) or not place[key]:
                place[key] = draw.choice([None, -1, 2**70, "x", "\ud800", [], {}, True, [1], {"a": {}}, 0.5])
                break
            place = place[key]
        return json.dumps(values).encode()
    changed = bytearray(content)
    for _ in range(draw.randrange(1, 20)):
        at = draw.randrange(len(changed))
        changed[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
    return bytes(changed)


SMALL_FILES = {
    ADDED: b'{"<pad>": 700, "<more>": 701}',
    SPECIAL: b'{"pad_token": {"content": "<pad>"}, "additional_special_tokens": ["<more>"]}',
    TEMPLATE: b"{{ bos_token }}{{ messages[0]['content'] }}",
    CONFIG: b'{"added_tokens_decoder": {"702": {"content": "<x>", "special": true}}, "bos_token": "<s>"}',
}


@pytest.mark.parametrize("kind", ["sentencepiece", "llama3", "llama2"])
def test_a_randomly_damaged_tokenizer_works_or_is_refused_in_one_line(tmp_path, kind):
    if kind == "sentencepiece":
        for name, content in {**train_tokenizer([TEXT], 300).files, **SMALL_FILES}.items():
            (tmp_path / name).write_bytes(content)
    else:
        (byte_level if kind == "llama3" else sentencepiece_like)(tmp_path)
    draw = random.Random(kind)
    n_refused = 0
    for name in sorted(path.name for path in tmp_path.iterdir()):
        path = tmp_path / name
        content = path.read_bytes()
        for _ in range(25 if kind == "sentencepiece" else 50):
            path.write_bytes(damaged(content, draw))
            try:
                tokenizer = load_tokenizer(tmp_path)
                ids = tokenizer.encode("a lily <pad> 🙂\n")
                ids += tokenizer.encode_with_control_tokens("<s>a<pad>", bos=True)
                tokenizer.decode([*ids, *range(tokenizer.vocab_size if tokenizer.vocab_size < 1000 else 1000), -1])
            except InputError as error:
                n_refused += 1
                assert "\n" not in str(error)  # noqa: PT017
        path.write_bytes(content)
    assert n_refused > 20
