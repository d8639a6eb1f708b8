"""The tokenizer gives every text back, also piece by piece; sentencepiece's own decode is the oracle."""

import io
import random

import pytest
import sentencepiece

from kernels import InputError
from model.tokenizer import SentencePieceTokenizer, Tokenizer, TokenStream, load_tokenizer, train_tokenizer

TEXT = "once upon a time there was a lily\n\n    in 2024:\t「漢字」 and café\nonce upon a time, 1999 lilies\n" * 20
ODD_TEXTS = [
    "", "a\nb", "a\tb", "a\r\nb\r", "\n\n\n", " lead", "trail ", "  two  spaces  ", "   ", "a\0b", "\0", "🙂🏽",
    "\ufeffBOM", "e\u0301", "ﬁ①\u00a0\u2028", "\u2581", "\u2581\u2581a \u2581 b\u2581", "<s>", "</s>", "<unk><0x0A>",
    " \u2047 ", TEXT,
]  # fmt: skip
TEXTS = [text for text in ODD_TEXTS if "\u2581" not in text]  # sentencepiece itself takes U+2581 for a space


def train_directly(**options) -> Tokenizer:
    """A model that isn't trained in our manner: with LLaMA's space before every text, and no byte fallback if asked."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_writer=proto,
        model_type="bpe",
        vocab_size=330,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
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


def test_every_digit_is_a_token_of_its_own(ours):
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


def test_a_character_of_several_tokens_is_shown_when_it_is_whole(ours):
    ids = ours.encode("a🙂")
    assert stream(ours, ids) == ["a", "", "", "", "🙂", ""]


def test_an_unfinished_character_ends_as_a_replacement_mark(ours):
    ids = ours.encode("a🙂")[:-1]
    assert stream(ours, ids) == ["a", "", "", "", "\ufffd"]


def test_unknown_ids_are_shown(without_bytes):
    assert without_bytes.decode(without_bytes.encode("a🙂e")) == "a \u2047 e"


def test_an_unknown_id_keeps_its_space_also_at_the_start(llama_like):
    assert llama_like.decode([0]) == " \u2047 "  # as sentencepiece decodes it


@pytest.mark.parametrize("text", [TEXT, "\n\n a\n\n\n  \u2581\r\n\tb\n", "2024\n once\n\n🙂\n \n"])
def test_parts_that_end_with_a_line_break_have_the_ids_of_the_whole(ours, text):
    parts = text.split("\n")
    ids = [id for part in parts[:-1] for id in ours.encode(part + "\n")] + ours.encode(parts[-1])
    assert ids == ours.encode(text)


@pytest.mark.parametrize("vocab_size", [1, 258, 270])
def test_a_vocabulary_that_is_too_small_is_refused_with_its_size(vocab_size):
    with pytest.raises(InputError, match=f"vocabulary of {vocab_size} pieces is too small"):
        train_tokenizer([TEXT], vocab_size)


def test_a_short_text_gives_a_smaller_vocabulary_that_works():
    tokenizer = train_tokenizer(["ab ab"], 5000)
    assert 259 < tokenizer.vocab_size < 300
    assert max(tokenizer.encode("ab\n漢", bos=True, eos=True)) < tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode("ab\n漢")) == "ab\n漢"


def test_a_saved_tokenizer_loads_as_the_same(ours, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(ours.files["tokenizer.model"])
    loaded = load_tokenizer(tmp_path)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (ours.vocab_size, 1, 2)
    assert loaded.encode(TEXT) == ours.encode(TEXT)


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
def test_what_is_no_sentencepiece_model_is_refused_by_path(tmp_path, content):
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
