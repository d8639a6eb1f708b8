"""A tokenizer.json gives the ids of tokenizers and transformers; text never becomes a control token."""

import json
import random
import sys

import pytest
import tokenizers
from tokenizers import AddedToken
from transformers import AutoTokenizer

from kernels import InputError
from model.tokenizer import load_tokenizer
from model.tokenizer.base import TokenStream
from tests.model.tokenizer.makers import NASTY, TEXT, byte_level, sentencepiece_like

KINDS = {
    "llama3": byte_level,
    "smollm": lambda folder: byte_level(folder, digits=True),
    "llama2": sentencepiece_like,
    "metaspace-first": lambda folder: sentencepiece_like(folder, "first"),
    "metaspace-always": lambda folder: sentencepiece_like(folder, "always"),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ours(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder)


def edited(folder, to, change, **config):
    """A copy of a tokenizer directory, with tokenizer.json edited by `change` and tokenizer_config.json by `config`."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    change(spec)
    to.mkdir(exist_ok=True)
    (to / "tokenizer.json").write_text(json.dumps(spec))
    given = json.loads((folder / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**given, **config}))
    return to


@pytest.mark.parametrize("text", NASTY)
def test_text_has_the_ids_that_transformers_gives_it_and_comes_back(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ours.decode(ids) == theirs.decode(ids)
    if "Metaspace" not in ours.files["tokenizer.json"].decode():  # it adds no space before a leading space
        assert ours.decode(ids) == text


def test_random_text_has_the_ids_that_transformers_gives_it(ours, theirs):
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("aelt '.\n\r\t 1é漢🙂▁<s>|") for _ in range(draw.randrange(30)))
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.decode(ids) == theirs.decode(ids)


def test_streamed_pieces_add_up_and_never_break_a_character(ours):
    for text in NASTY:
        ids = ours.encode(text)
        stream = TokenStream(ours)
        pieces = [stream.push(id) for id in ids] + [stream.finish()]
        assert "".join(pieces) == ours.decode(ids)
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("kind", ["llama3", "smollm"])
def test_broken_characters_are_shown_as_the_package_shows_them(tmp_path, kind):
    folder = KINDS[kind](tmp_path)
    ours = load_tokenizer(folder)
    draw = random.Random(1)
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for _ in range(300):
        ids = [draw.randrange(ours.vocab_size) for _ in range(draw.randrange(12))]
        assert ours.decode(ids) == model.decode(ids, skip_special_tokens=True)


def test_a_piece_outside_the_byte_alphabet_is_its_own_text(tmp_path):
    def change(spec):
        spec["model"]["vocab"]["漢 b"] = 1000

    folder = edited(byte_level(tmp_path), tmp_path, change)
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).decode([1000]) == model.decode([1000]) == "漢 b"


@pytest.mark.parametrize("text", ["once", " once  upon", "漢\n", ""])
@pytest.mark.parametrize("scheme", [None, "first", "always"])
def test_no_space_is_put_where_the_config_says_so(tmp_path, scheme, text):
    folder = edited(
        sentencepiece_like(tmp_path, scheme), tmp_path, lambda spec: None, tokenizer_class="LlamaTokenizer",
        add_prefix_space=False,
    )  # fmt: skip
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids) == text
    chat = f"<s>{text}</s>{text}"
    assert ours.encode_with_control_tokens(chat) == theirs.encode(chat, add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_that_the_file_puts_may_be_named_and_another_is_refused(tmp_path, kind):
    folder = KINDS[kind](tmp_path)
    ids = load_tokenizer(folder).encode("once")
    assert load_tokenizer(edited(folder, tmp_path, lambda spec: None, add_prefix_space=True)).encode("once") == ids
    folder = edited(sentencepiece_like(tmp_path, "never"), tmp_path, lambda spec: None, add_prefix_space=True)
    with pytest.raises(InputError, match=r"tokenizer_config\.json: add_prefix_space is true; expected false, as token"):
        load_tokenizer(folder)


def test_ids_between_pieces_and_added_tokens_are_listed_as_unused(ours, folder, tmp_path):
    n = ours.vocab_size
    assert ours.unused_ids == []
    late = {"content": "<late>", "special": True, "id": n + 3}
    late |= dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)

    def change(spec):
        spec["model"]["vocab"]["<late>"] = n + 3
        spec["added_tokens"].append(late)

    tokenizer = load_tokenizer(edited(folder, tmp_path, change))
    assert (tokenizer.vocab_size, tokenizer.unused_ids) == (n + 4, [n, n + 1, n + 2])
    assert tokenizer.decode([n, n + 3]) == " \u2047 "


@pytest.mark.parametrize("name", ["", {"content": ""}, "<missing>"])
def test_where_the_names_name_nothing_the_files_own_ids_hold(tmp_path, name):
    names = {"bos_token": name, "eos_token": name, "additional_special_tokens": [name]}
    tokenizer = load_tokenizer(edited(sentencepiece_like(tmp_path), tmp_path, lambda spec: None, **names))
    assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.eos_id) == (1, True, None)
    assert tokenizer.token_names["bos_token"] == "<s>"
    added = {"added_tokens_decoder": {"9999": {"content": "", "special": True}}}
    assert load_tokenizer(edited(tmp_path, tmp_path, lambda spec: None, **added)).vocab_size == tokenizer.vocab_size


def test_a_piece_listed_as_special_is_a_control_token(folder, ours, tmp_path):
    name, id = list(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].items())[-1]
    assert len(name) > 1
    assert ours.decode([id]) != ""
    tokenizer = load_tokenizer(edited(folder, tmp_path, lambda spec: None, extra_special_tokens=[name]))
    assert tokenizer.encode_with_control_tokens(f"a{name}")[-1] == id
    assert tokenizer.decode([id]) == ""
    assert tokenizer.vocab_size == ours.vocab_size


CHATS = [
    "{bos}user\nhi{eos}\n{bos}  \n{eos}", "hi", "", "{bos}", " {bos} hi", "{bos}{eos}{bos}hi 🙂\n", "{bos}hi {eos}",
]  # fmt: skip


@pytest.mark.parametrize("chat", CHATS)
def test_named_control_tokens_become_ids_as_in_transformers(ours, theirs, chat):
    text = chat.format(bos=theirs.bos_token, eos=theirs.eos_token)
    expected = theirs.encode(text, add_special_tokens=False)
    assert ours.encode_with_control_tokens(text) == expected
    once = expected if expected[:1] == [theirs.bos_token_id] else [theirs.bos_token_id, *expected]
    assert ours.encode_with_control_tokens(text, bos=True) == once


def test_bos_named_twice_comes_once(ours):
    bos = ours.token_names["bos_token"]
    assert ours.encode_with_control_tokens(bos + bos + "hi", bos=True).count(ours.bos_id) == 1


def test_marked_names_are_text(ours):
    for text in ("<s>hi</s>", "<|begin|><|end|>", "<|be<|begin|>gin|>"):
        ids = ours.encode_with_control_tokens(ours.as_text(text))
        assert ids == ours.encode(text)
        assert ours.decode(ids) == text


def test_control_tokens_print_nothing(ours):
    ids = [ours.bos_id, *ours.encode("a lily"), ours.eos_id]
    assert ours.decode(ids) == "a lily"


@pytest.mark.parametrize("kind", ["llama3", "llama2", "smollm"])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_bos_is_added_as_the_config_says_or_else_the_post_processor(tmp_path, kind, add_bos_token):
    folder = edited(KINDS[kind](tmp_path), tmp_path, lambda spec: None, add_bos_token=add_bos_token)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.adds_bos is (kind != "smollm" if add_bos_token is None else add_bos_token)


def test_without_a_config_the_post_processor_names_bos(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    has = "TemplateProcessing" in (folder / "tokenizer.json").read_text()
    assert (tokenizer.bos_id is not None, tokenizer.adds_bos, tokenizer.eos_id) == (has, has, None)
    assert ("bos_token" in tokenizer.token_names) == has


def test_added_words_apply_as_transformers_applies_them(folder, tmp_path):
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_tokens([AddedToken("lily pad", lstrip=True, rstrip=True, normalized=False), "upon"])
    model.add_special_tokens([AddedToken("[INST]", normalized=False)])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs)
    for text in ("a  lily pad  once", "once upon upon a", "lily pad", "[INST] upon"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        chat = ours.encode_with_control_tokens("[INST]" + text)
        assert chat == theirs.encode("[INST]" + text, add_special_tokens=False)


def test_control_tokens_take_white_space_along_as_in_transformers(folder, tmp_path):
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    flags = [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {}]
    for name, given in zip(["[L]", "[R]", "word", "[R][L]"], flags, strict=True):  # the last and longest holds others
        model.add_special_tokens([AddedToken(name, normalized=False, **given)])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a [L] b", "a \n[R] \n b", "a word b", "awordb word", "a[R][L]b", " [L][R] ", "[L] [R] [L]  a"):
        assert ours.encode_with_control_tokens(text) == theirs.encode(text, add_special_tokens=False), text


def test_tokens_that_only_the_config_adds_are_there(folder, tmp_path):
    n = load_tokenizer(folder).vocab_size
    extra = {
        str(n): {"content": "<pad>", "special": True, "rstrip": True},
        str(n + 1): {"content": "word", "special": False},
    }
    extra[str(n + 1)] |= {"lstrip": True, "rstrip": True, "single_word": True}
    config = {"added_tokens_decoder": extra, "extra_special_tokens": ["<pad>"]}
    tokenizer = load_tokenizer(edited(folder, tmp_path, lambda spec: None, **config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == n + 2
    assert tokenizer.decode([n, n + 1]) == "word"
    assert tokenizer.encode_with_control_tokens("a<pad>  a") == theirs.encode("a<pad>  a", add_special_tokens=False)
    for text in ("a word <pad>", " word  a", "words"):
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


def test_ids_without_a_piece_have_a_visible_placeholder(ours):
    for id in (-1, ours.vocab_size, 10**20):
        assert ours.decode([id]) == " \u2047 "


@pytest.mark.parametrize("scheme", [None, "first", "always"])
def test_a_piece_that_became_special_is_spelled_out(tmp_path, scheme):
    def change(spec):  # as in models whose control tokens are user-defined pieces of sentencepiece
        spec["model"]["ignore_merges"] = True
        spec["model"]["vocab"]["<|im|>"] = len(spec["model"]["vocab"])
        spec["added_tokens"].append(
            {**spec["added_tokens"][0], "content": "<|im|>", "id": len(spec["model"]["vocab"]) - 1}
        )
        regex = {"type": "Split", "pattern": {"String": "<|im|>"}, "behavior": "Isolated", "invert": False}
        splits = [spec["pre_tokenizer"]] if spec["pre_tokenizer"] else []
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, regex]}

    tokenizer = load_tokenizer(edited(sentencepiece_like(tmp_path, scheme), tmp_path, change))
    ids = tokenizer.encode("a<|im|>b")
    assert tokenizer.vocab_size - 1 not in ids
    assert tokenizer.decode(ids) == "a<|im|>b"
    assert tokenizer.vocab_size - 1 in tokenizer.encode_with_control_tokens("a<|im|>b")


def test_truncation_and_padding_left_in_the_file_do_nothing(folder, tmp_path):
    def change(spec):
        spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        spec["padding"] = {
            "strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "x",
        }  # fmt: skip

    tokenizer = load_tokenizer(edited(folder, tmp_path, change))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_without_byte_fallback_the_name_of_a_byte_is_text(tmp_path):
    folder = edited(sentencepiece_like(tmp_path), tmp_path, lambda spec: spec["decoder"]["decoders"].pop(1))
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [model.token_to_id("<0x41>"), *model.encode("a lily", add_special_tokens=False).ids]
    assert load_tokenizer(folder).decode(ids) == model.decode(ids) == "<0x41> a lily"


SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


@pytest.mark.parametrize(
    ("named", "steps"),
    [
        ("null", []),
        ("WordPiece", [{"type": "WordPiece", "prefix": "##", "cleanup": True}]),
        ("Replace, Fuse", [SPACES | {"content": "_"}, {"type": "Fuse"}]),
        ("Replace, Fuse, Strip", [SPACES, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 2, "stop": 0}]),
        ("Fuse, Replace", [{"type": "Fuse"}, SPACES]),
    ],
)
def test_another_decoder_is_refused_by_its_steps(folder, tmp_path, named, steps):
    decoder = {"type": "Sequence", "decoders": steps} if steps else None
    with pytest.raises(InputError, match=f"its decoder is {named}; expected ByteLevel"):
        load_tokenizer(edited(folder, tmp_path, lambda spec: spec.update(decoder=decoder)))


def test_its_files_load_as_the_same_tokenizer(folder, ours, tmp_path):
    assert set(ours.files) == {"tokenizer.json", "tokenizer_config.json"}
    for name, content in ours.files.items():
        (tmp_path / name).write_bytes(content)
    assert load_tokenizer(tmp_path).encode(TEXT) == ours.encode(TEXT)


def test_without_the_package_one_line_says_what_to_install(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "model.tokenizer.tokenizer_json", raising=False)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match="needs the package tokenizers; install it with: pip install tokenizers"):
        load_tokenizer(folder)


class Panic(BaseException):
    """Like pyo3's PanicException, which cannot be imported."""


@pytest.mark.parametrize(
    ("raised", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (Exception, InputError), (Panic, InputError)]
)
def test_errors_of_the_package_are_input_errors_but_ctrl_c_is_not(folder, monkeypatch, raised, seen):
    class Stub:
        def from_str(text):
            raise raised("reason")

    monkeypatch.setattr(tokenizers, "Tokenizer", Stub)
    with pytest.raises(seen, match="reason"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 10**5, b"[]", b"{}", b'{"model": {"type": "BPE"}}'])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match=r"tokenizer\.json") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
