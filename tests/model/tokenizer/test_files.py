"""The small files beside a tokenizer: wrong types are refused by name, damage of any kind ends in one line."""

import json
import random

import pytest
from transformers import AutoTokenizer

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
    config = load(tmp_path, tokenizer_config={"sep_token": "<b>"}, **older)  # the older file wins over a name, too
    assert config.names == {"sep_token": "<sep>"}
    decoder = {"7": {"content": "<new>", "special": False, "lstrip": True}, "8": {"content": "x", "normalized": False}}
    config = load(tmp_path, tokenizer_config={"bos_token": "<b>", "added_tokens_decoder": decoder})
    assert config.added == [AddedToken(7, "<new>", False, lstrip=True, normalized=True), AddedToken(8, "x", False)]
    assert config.names == {"bos_token": "<b>"}


EMPTY = ["", {"content": "", "special": True}]


@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_text_is_no_token(tmp_path, empty):
    names = {"bos_token": empty, "pad_token": empty, "additional_special_tokens": [empty]}
    files = {"tokenizer_config": {**names, "eos_token": "<e>"}, "special_tokens_map": {**names, "eos_token": empty}}
    config = load(tmp_path, **files, added_tokens={"": 5})
    assert (config.names, config.special, config.added) == ({"eos_token": "<e>"}, [], [])
    decoder = {"5": {"content": ""}, "6": {"content": "x"}}
    assert load(tmp_path, tokenizer_config={"added_tokens_decoder": decoder}).added == [
        AddedToken(6, "x", False, normalized=True)
    ]


def test_an_end_after_every_text_is_ignored_in_a_line(tmp_path, capsys):
    load(tmp_path, tokenizer_config={"add_eos_token": False})
    assert capsys.readouterr().err == ""
    load(tmp_path, tokenizer_config={"add_eos_token": True})
    assert "tokenizer_config.json: add_eos_token is ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, [], "holds a list; expected a JSON object"),
        (CONFIG, {"add_bos_token": "false"}, 'add_bos_token is "false"; expected true or false'),
        (CONFIG, {"legacy": 1}, "legacy is 1; expected true or false"),
        (CONFIG, {"split_special_tokens": "no"}, 'split_special_tokens is "no"; expected true or false'),
        (
            CONFIG,
            {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
            "add_prefix_space is true; expected f",
        ),
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


# tokenizer_config.json's keys: those that change what transformers makes of TEXTS are honoured or refused.
HONOURED = {
    "add_bos_token": False, "add_prefix_space": False, "legacy": True, "bos_token": "</s>",
    "added_tokens_decoder": {"330": {"content": "lily", "special": True}},
    "additional_special_tokens": ["up"], "extra_special_tokens": ["up"],
}  # fmt: skip
REFUSED = {"split_special_tokens": True}
BY_CHOICE = {"add_eos_token": True, "pad_token": "lily", "image_token": "lily"}  # as files.py says
IGNORED = {
    "padding_side": "right", "truncation_side": "left", "model_max_length": 4, "max_length": 4, "stride": 2,
    "truncation_strategy": "longest_first", "pad_to_multiple_of": 8, "padding": True, "truncation": True,
    "clean_up_tokenization_spaces": True, "spaces_between_special_tokens": True, "use_default_system_prompt": True,
    "unk_token": "</s>", "do_lower_case": True, "strip_accents": True, "keep_accents": False, "remove_space": True,
    "normalizer": "NFKC", "errors": "ignore", "trim_offsets": True, "dropout": 0.5, "fuse_unk": False,
    "byte_fallback": False, "vocab": {"a": 0}, "backend": "sentencepiece", "from_slow": True, "use_fast": False,
    "sp_model_kwargs": {"enable_sampling": True, "alpha": 0.1, "nbest_size": -1},
    "fix_mistral_regex": True, "model_input_names": ["input_ids"], "bos_token_id": 5, "name_or_path": "x",
}  # fmt: skip
TEXTS = ["Once é upon . a lily ?", "once</s>a lily <s>x", "a\n  lead"]


def test_every_setting_that_changes_ids_is_honoured_or_refused(tmp_path):
    pytest.importorskip("google.protobuf", reason="transformers reads tokenizer.model with it")
    base = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_prefix_space": True}

    def write_config(**values) -> None:
        (tmp_path / CONFIG).write_text(json.dumps(base | values))

    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer([TEXT], 330).files["tokenizer.model"])

    def ours() -> list:
        tokenizer = load_tokenizer(tmp_path)
        ids = [tokenizer.encode_with_control_tokens(text, bos=tokenizer.adds_bos) for text in TEXTS]
        return [*ids, *map(tokenizer.decode, ids)]

    def theirs() -> list:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        ids = [tokenizer(text).input_ids for text in TEXTS]
        return [*ids, *(tokenizer.decode(row, skip_special_tokens=True) for row in ids)]

    write_config()
    plain = ours()
    assert plain == theirs()
    for key, value in {**HONOURED, **REFUSED, **BY_CHOICE, **IGNORED}.items():
        write_config(**{key: value})
        assert (theirs() == plain) is (key in IGNORED), key
        if key in REFUSED:
            with pytest.raises(InputError, match=f"{key} is {json.dumps(value)}; expected"):
                load_tokenizer(tmp_path)
        else:
            assert ours() == (theirs() if key in HONOURED else plain), key


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
