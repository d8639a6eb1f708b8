"""Real trained tokenizers: Mistral's sentencepiece models and SmolLM2's tokenizer.json. Run with pytest -m real."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import sentencepiece

from model.tokenizer import load_tokenizer
from model.tokenizer.base import TokenStream
from model.tokenizer.chat import encode_chat, render_chat
from tests.helpers import ROOT
from tests.model.tokenizer.makers import NASTY
from tests.real_model import FOLDER, make_real_model

pytestmark = pytest.mark.real

SOURCES = [ROOT / "README.md", ROOT / "model/llama.py", ROOT / "tests/model/tokenizer/makers.py"]
TEXTS = [*NASTY, *(path.read_text(encoding="utf-8") for path in SOURCES)]
MISTRAL = [
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
]


def package_file(package: str, pattern: str) -> Path:
    """A file of an installed package, found without an import, which may need further packages."""
    return next(Path(find_spec(package).origin).parent.glob(pattern))


@pytest.fixture(scope="module", params=MISTRAL)
def mistral(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral")
    (folder / "tokenizer.model").write_bytes(package_file("mistral_common", f"data/{request.param}").read_bytes())
    return load_tokenizer(folder), sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.fixture(scope="module")
def smollm():
    from transformers import AutoTokenizer

    make_real_model(FOLDER)
    return load_tokenizer(FOLDER), AutoTokenizer.from_pretrained(FOLDER)


def check(tokenizer, text, ids, decoded):
    """Compare ids, decoded text and streamed text with the oracle's `ids` and `decoded`."""
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == decoded
    stream = TokenStream(tokenizer)
    assert "".join([*map(stream.push, ids), stream.finish()]) == decoded


@pytest.mark.parametrize("text", TEXTS)
def test_mistral_has_the_ids_and_text_of_sentencepiece(mistral, text):
    tokenizer, sp = mistral
    check(tokenizer, text, sp.encode(text), sp.decode(sp.encode(text)))
    assert tokenizer.decode(tokenizer.encode(text, bos=True, eos=True)) == text.replace("\u2581", " ")  # its own space


def test_mistral_control_tokens_are_named_and_not_written(mistral):
    tokenizer, sp = mistral
    names = [sp.id_to_piece(id) for id in range(sp.vocab_size()) if sp.is_control(id)]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (
        sp.vocab_size(),
        1,
        2,
        True,
    )
    assert tokenizer.encode_with_control_tokens("".join(names)) == [sp.piece_to_id(name) for name in names]
    assert not set(map(sp.piece_to_id, names)) & set(tokenizer.encode("".join(names)))


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_has_the_ids_and_text_of_transformers(smollm, text):
    ours, theirs = smollm
    ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    check(ours, text, ids, theirs.decode(ids))
    assert ours.decode(ids) == text


def test_smollm_chats_as_with_transformers(smollm):
    ours, theirs = smollm
    user = {"role": "user", "content": "What is a lily?\n\n  It's 漢字 🙂"}
    answer = {"role": "assistant", "content": "A flower."}
    for messages in ([user], [user, answer, user], [{"role": "system", "content": "Be brief."}, user]):
        given = {"add_generation_prompt": True}
        assert render_chat(ours, messages) == theirs.apply_chat_template(messages, tokenize=False, **given)
        expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **given)
        assert encode_chat(ours, messages) == expected
        assert ours.bos_id not in ours.encode("<|im_start|>")
