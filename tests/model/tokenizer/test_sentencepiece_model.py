"""Every text comes back from its ids, whole and streamed; sentencepiece's own decode is the oracle."""

import io
import json
import random
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer, LlamaTokenizer

from kernels import InputError
from model.tokenizer import load_tokenizer
from model.tokenizer.base import Tokenizer, TokenStream
from model.tokenizer.sentencepiece_model import SentencePieceTokenizer, train_tokenizer
from tests.model.tokenizer.makers import byte_level

TEXT = "once upon a time there was a lily\n\n    in 2024:\t「漢字」 and café\nonce upon a time, 1999 lilies\n" * 20
ODD_TEXTS = [
    "", "a\nb", "a\tb", "a\r\nb\r", "\n\n\n", " lead", "trail ", "  two  spaces  ", "   ", "a\0b", "\0", "🙂🏽",
    "\ufeffBOM", "e\u0301", "ﬁ①\u00a0\u2028", "\u2581", "\u2581\u2581a \u2581 b\u2581", "<s>", "</s>", "<unk><0x0A>",
    " \u2047 ", TEXT,
]  # fmt: skip
TEXTS = [text for text in ODD_TEXTS if "\u2581" not in text]  # sentencepiece itself takes U+2581 for a space


def train_directly(**options) -> Tokenizer:
    """A model without train_tokenizer's options: by default with LLaMA's space before every text."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_writer=proto,
        model_type="bpe",
        vocab_size=330,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options},
    )
    return SentencePieceTokenizer(proto.getvalue())


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return train_tokenizer([TEXT], 330)


@pytest.fixture(scope="module")
def llama_like() -> Tokenizer:
    return train_directly(byte_fallback=True, add_dummy_prefix=True)


@pytest.fixture(scope="module")
def without_bytes() -> Tokenizer:
    return train_directly(byte_fallback=False, add_dummy_prefix=False)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TokenStream(tokenizer)
    return [stream.push(id) for id in ids] + [stream.finish()]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_text_comes_back_as_it_was(ours, text):
    assert ours.decode(ours.encode(text)) == text


def test_random_unicode_comes_back_as_it_was(ours):
    draw = random.Random(0)
    ranges = [(0, 0x80), (0x80, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000)]  # all but the surrogates
    for _ in range(500):
        text = "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(20)))
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("text", ["", "once", "<s>once</s>"])
def test_bos_and_eos_come_once_and_only_on_request(ours, text, bos, eos):
    ids = ours.encode(text, bos=bos, eos=eos)
    assert ids.count(1) == bos  # 1 and 2 are LLaMA's ids for them
    assert ids.count(2) == eos
    assert ids[:1] == [1] or not bos
    assert ids[-1:] == [2] or not eos
    assert ours.decode(ids) == text


def test_every_digit_is_its_own_token(ours):
    assert [ours.decode([id]) for id in ours.encode("2024")] == ["2", "0", "2", "4"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["ours", "llama_like", "without_bytes"])
def test_streaming_adds_up_to_what_sentencepiece_decodes(request, kind, text):
    tokenizer = request.getfixturevalue(kind)
    sp = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.files["tokenizer.model"])
    ids = [sp.bos_id(), *sp.encode(text), sp.eos_id()]
    assert "".join(stream(tokenizer, ids)) == sp.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_llama_like_model_decodes_without_its_leading_space(llama_like, text):
    assert llama_like.decode(llama_like.encode(text, bos=True)) == text


def test_llamas_own_models_read_their_mark_as_a_space(llama_like):
    assert llama_like.encode("a\u2581b\u2581") == llama_like.encode("a b ")  # as sentencepiece does


def test_a_character_of_several_tokens_is_shown_when_it_is_complete(ours):
    ids = ours.encode("a🙂")
    assert stream(ours, ids) == ["a", "", "", "", "🙂", ""]


def test_an_unfinished_character_ends_as_a_replacement_mark(ours):
    ids = ours.encode("a🙂")[:-1]
    assert stream(ours, ids) == ["a", "", "", "", "\ufffd"]


def test_unknown_ids_are_shown(without_bytes):
    assert without_bytes.decode(without_bytes.encode("a🙂e")) == "a \u2047 e"


def test_an_unknown_id_keeps_its_space_at_the_start(llama_like):
    assert llama_like.decode([0]) == " \u2047 "  # as sentencepiece decodes it


@pytest.mark.parametrize("vocab_size", [1, 258, 270])
def test_a_vocabulary_that_is_too_small_is_refused_with_its_size(vocab_size):
    with pytest.raises(InputError, match=f"vocabulary of {vocab_size} pieces is too small"):
        train_tokenizer([TEXT], vocab_size)


def test_a_vocabulary_larger_than_any_models_is_refused_at_once():
    with pytest.raises(InputError, match="size of the vocabulary is 2147483647; expected at most 1048576"):
        train_tokenizer([TEXT], 2**31 - 1)


def test_a_short_text_gives_a_smaller_vocabulary_that_works():
    tokenizer = train_tokenizer(["ab ab"], 5000)
    assert 259 < tokenizer.vocab_size < 300
    assert max(tokenizer.encode("ab\n漢", bos=True, eos=True)) < tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode("ab\n漢")) == "ab\n漢"


def write(folder, files) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("names", [["tokenizer.model", "tokenizer_config.json"], ["tokenizer.model"]])
def test_a_saved_tokenizer_loads_as_the_same(ours, tmp_path, names):
    loaded = load_tokenizer(write(tmp_path, {name: ours.files[name] for name in names}))  # earlier runs have no config
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id, loaded.adds_bos) == (ours.vocab_size, 1, 2, True)
    assert list(loaded.files) == names
    for text in ODD_TEXTS:
        assert loaded.encode(text) == ours.encode(text)
        assert loaded.decode(loaded.encode(text)) == text


def test_transformers_gives_a_trained_tokenizer_the_same_ids(ours, tmp_path):
    pytest.importorskip("google.protobuf", reason="transformers reads tokenizer.model with it")
    theirs = AutoTokenizer.from_pretrained(write(tmp_path, ours.files))
    assert isinstance(theirs, LlamaTokenizer)
    code = "def f(x):\n    if x:\n\t\treturn {'é': 10**6}  # ①\n\n"
    # In a text, transformers takes "<s>" for the token and U+2581 for a space; here both are text.
    plain = [text for text in TEXTS if text not in ("<s>", "</s>", "<unk><0x0A>")]
    for text in [*plain, "import os", code, "<0x0A>", "🙂" * 3, "a" * 300]:
        ids = ours.encode(text, bos=True)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids, skip_special_tokens=True) == text
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (ours.bos_id, ours.eos_id, 0)
    assert len(theirs) == ours.vocab_size


def test_a_trained_tokenizer_has_the_settings_that_llama_cpps_converter_reads(ours):
    # convert_hf_to_gguf.py, LlamaModel.set_vocab: add_space_prefix is add_prefix_space, and true where that is missing.
    # gguf's SpecialVocab takes add_bos_token and add_eos_token. Without a tokenizer.json it takes ids from config.json.
    config = json.loads(ours.files["tokenizer_config.json"])
    assert (config["add_prefix_space"], config["add_bos_token"], config["add_eos_token"]) == (False, True, False)
    assert not ours.drops_space
    assert not config.keys() & {"added_tokens_decoder", "chat_template"}  # would change pieces


def folder_with(tmp_path, tokenizer, **files) -> Path:
    """A checkpoint directory with a tokenizer.model and JSON files beside it."""
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.files["tokenizer.model"])
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_an_added_token_has_its_text_and_an_unknown_id_a_placeholder(ours, tmp_path):
    n = ours.vocab_size
    tokenizer = load_tokenizer(folder_with(tmp_path, ours, added_tokens={"<pad>": n, "<late>": n + 5}))
    assert tokenizer.vocab_size == n + 6
    assert tokenizer.decode([n, n + 5]) == "<pad><late>"
    for id in (-1, n + 1, n + 6, 10**20):  # -1 and a gap between the added tokens, too
        assert tokenizer.decode([id]) == " \u2047 "
    assert tokenizer.encode("a<pad>b") == [*ours.encode("a"), n, *ours.encode("b")]
    assert (ours.unused_ids, tokenizer.unused_ids) == ([], [n + 1, n + 2, n + 3, n + 4])


def test_an_added_token_named_as_special_is_a_control_token(ours, tmp_path):
    n = ours.vocab_size
    folder = folder_with(tmp_path, ours, added_tokens={"<pad>": n}, special_tokens_map={"pad_token": "<pad>"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([n]) == ""
    assert tokenizer.encode("a<pad>b") == ours.encode("a<pad>b")
    assert tokenizer.encode_with_control_tokens("a<pad>b") == [*ours.encode("a"), n, *ours.encode("b")]
    assert tokenizer.token_names == {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def test_the_config_names_other_end_and_begin_tokens(ours, tmp_path):
    n = ours.vocab_size
    config = {
        "added_tokens_decoder": {
            str(n): {"content": "<|im_end|>", "special": True},
            "1": {"content": "<s>", "special": True, "rstrip": True},
        },
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": None,
    }
    tokenizer = load_tokenizer(folder_with(tmp_path, ours, tokenizer_config=config))
    assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.eos_id) == (None, False, n)
    assert tokenizer.encode_with_control_tokens("<s>  a<|im_end|>") == [1, *ours.encode("a"), n]
    with pytest.raises(InputError, match="no beginning-of-text token"):
        tokenizer.encode("a", bos=True)


def test_the_config_may_name_an_ordinary_piece(ours, tmp_path):
    (id,) = ours.encode("on")
    tokenizer = load_tokenizer(folder_with(tmp_path, ours, special_tokens_map={"eos_token": "on"}))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, id)


def test_of_two_tokens_with_one_name_the_later_counts(ours, tmp_path):
    n = ours.vocab_size
    added = {str(id): {"content": "<end>", "special": True} for id in (n, n + 1)}
    config = {"added_tokens_decoder": added, "eos_token": "<end>"}
    added[str(n + 2)] = {"content": "<s>", "special": True}  # but the model's own, where the config names none
    tokenizer = load_tokenizer(folder_with(tmp_path, ours, tokenizer_config=config))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, n + 1)
    assert tokenizer.encode_with_control_tokens("<end>") == [n + 1]


@pytest.mark.parametrize("name", ["", {"content": ""}, "<missing>"])
def test_where_the_names_name_nothing_the_models_own_ids_hold(ours, tmp_path, name):
    names = {"bos_token": name, "eos_token": name}  # empty in conversions of LLaMA 1
    files = {"tokenizer_config": names, "special_tokens_map": names}
    tokenizer = load_tokenizer(folder_with(tmp_path, ours, **files))
    assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.eos_id) == (1, True, 2)
    assert tokenizer.token_names == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "config",
    [{"added_tokens_decoder": {"0": {"content": "<unk>", "special": True}}}, {"extra_special_tokens": ["<unk>"]}],
)
def test_a_listed_unknown_piece_stays_visible(ours, tmp_path, config):
    tokenizer = load_tokenizer(folder_with(tmp_path, ours, tokenizer_config={**config, "unk_token": "<unk>"}))
    assert tokenizer.decode([0]) == " \u2047 "


@pytest.mark.parametrize(("add_bos_token", "adds"), [(None, True), (True, True), (False, False)])
def test_bos_is_added_unless_the_config_says_otherwise(ours, tmp_path, add_bos_token, adds):
    folder = folder_with(tmp_path, ours, tokenizer_config={"add_bos_token": add_bos_token})
    assert load_tokenizer(folder).adds_bos is adds


@pytest.mark.parametrize("legacy", [False, True])
def test_a_space_follows_an_added_token_only_where_the_config_says_legacy(llama_like, tmp_path, legacy):
    n = llama_like.vocab_size
    sp = sentencepiece.SentencePieceProcessor(model_proto=llama_like.files["tokenizer.model"])
    after_break = sp.encode("\nonce")[len(sp.encode("\n")) :]  # no piece reaches across a line break
    files = {"tokenizer_config": {"legacy": legacy}, "added_tokens": {"<word>": n}}
    tokenizer = load_tokenizer(folder_with(tmp_path, llama_like, **files))
    after = sp.encode("once") if legacy else after_break
    assert sp.encode("once") != after_break
    assert tokenizer.encode_with_control_tokens("<s>once</s>once") == [1, *after, 2, *after]
    assert tokenizer.encode_with_control_tokens("once</s>", bos=True) == [1, *sp.encode("once"), 2]
    assert tokenizer.encode("once<word>once") == [*sp.encode("once"), n, *after]


@pytest.mark.parametrize("text", ["once", " once  upon", "漢\n", ""])
def test_a_space_is_put_before_a_text_as_the_config_says(ours, llama_like, tmp_path, text):
    def loaded(model, space):
        return load_tokenizer(folder_with(tmp_path, model, tokenizer_config={"add_prefix_space": space}))

    for model, own in ((ours, False), (llama_like, True)):
        assert loaded(model, None).encode(text) == loaded(model, own).encode(text) == model.encode(text)
        assert loaded(model, own).files["tokenizer.model"] == model.files["tokenizer.model"]
        other = loaded(model, not own)
        assert other.decode(other.encode(text)) == text
    after_break = llama_like.encode("\n" + text)[len(llama_like.encode("\n")) :]  # no piece reaches across
    assert loaded(llama_like, False).encode(text) == after_break
    assert loaded(ours, True).encode(text) == (ours.encode(" " + text) if text else [])
    tokenizer = loaded(llama_like, False)
    assert tokenizer.encode_with_control_tokens(f"<s>{text}</s>{text}") == [1, *after_break, 2, *after_break]
    assert tokenizer.decode(llama_like.encode("once")) == " once"


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi", "<s>", ""])
def test_bos_leads_exactly_once(ours, text):
    ids = ours.encode_with_control_tokens(text, bos=True)
    assert ids == [1, *ours.encode(text.replace("<s>", ""))]
    assert ours.encode_with_control_tokens("a<s>b", bos=True).count(1) == 2  # one of another turn stays


@pytest.mark.parametrize("text", ["<s>hi</s>", "</<s>s>", "\U000f0000<s>", "<unk>"])
def test_marked_names_are_text(ours, text):
    plain = text.replace("\U000f0000", "")  # the mark itself is not text
    assert ours.encode_with_control_tokens(ours.as_text(text)) == ours.encode(plain)


@pytest.mark.parametrize("listed", [False, True])
def test_a_user_defined_piece_that_the_config_makes_special_is_spelled_out(tmp_path, listed):
    model = train_directly(byte_fallback=True, add_dummy_prefix=False, user_defined_symbols=["<|im|>"])
    (id,) = model.encode("<|im|>")
    config = {"added_tokens_decoder": {str(id): {"content": "<|im|>", "special": True}}}
    if listed:
        config = {"additional_special_tokens": ["<|im|>"]}
    tokenizer = load_tokenizer(folder_with(tmp_path, model, tokenizer_config=config))
    ids = tokenizer.encode("a<|im|>b")
    assert id not in ids
    assert tokenizer.decode(ids) == "a<|im|>b"
    assert tokenizer.encode_with_control_tokens("<|im|>") == [id]


def test_a_special_piece_of_one_letter_never_comes_from_text(tmp_path):
    model = train_directly(byte_fallback=True, add_dummy_prefix=False, user_defined_symbols=["¤"])
    (id,) = model.encode("¤")
    config = {"added_tokens_decoder": {str(id): {"content": "¤", "special": True}}}
    tokenizer = load_tokenizer(folder_with(tmp_path, model, tokenizer_config=config))
    assert id not in tokenizer.encode("a¤b")


def test_tokenizer_model_wins_over_tokenizer_json_if_it_is_a_sentencepiece_model(ours, tmp_path):
    folder = byte_level(folder_with(tmp_path, ours))
    assert load_tokenizer(folder).encode(TEXT) == ours.encode(TEXT)
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\nIw== 2\nJA== 3\n")
    assert set(load_tokenizer(folder).files) == {"tokenizer.json", "tokenizer_config.json"}


def test_its_files_load_as_the_same_tokenizer(ours, tmp_path):
    files = {"added_tokens": {"<pad>": 999}, "tokenizer_config": {"chat_template": "x"}, "special_tokens_map": {}}
    first = load_tokenizer(folder_with(tmp_path, ours, **files))
    assert set(first.files) == {"tokenizer.model", *(f"{name}.json" for name in files)}
    (tmp_path / "again").mkdir()
    for name, content in first.files.items():
        (tmp_path / "again" / name).write_bytes(content)
    again = load_tokenizer(tmp_path / "again")
    assert (again.files, again.vocab_size, again.chat_template) == (first.files, 1000, "x")


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"IQ== 0\nIg== 1\nIw== 2\nJA== 3\n",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:9e556afd\nsize 499723\n",
        b'{"version": "1.0", "model": {"type": "BPE"}}',
    ],
    ids=["missing", "empty", "tiktoken", "lfs-pointer", "json"],
)
def test_a_file_that_is_not_a_sentencepiece_model_is_refused_by_path(tmp_path, content):
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path)
    assert str(path if content is not None else tmp_path) in str(error.value)
    assert ("sentencepiece model" if content is not None else "no tokenizer in") in str(error.value)


def test_a_truncated_model_is_refused(ours, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(ours.files["tokenizer.model"][: len(ours.files["tokenizer.model"]) // 2])
    with pytest.raises(InputError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path)
