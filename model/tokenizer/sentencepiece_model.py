"""Read tokenizer.model, the format of LLaMA 1 and 2 and Mistral, with the package sentencepiece; train new ones."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from functools import cached_property

import sentencepiece

from kernels import InputError
from model.config_keys import LARGEST_SIZE
from model.json_file import expect
from model.tokenizer.base import SPACE, UNKNOWN, Splitter, Tokenizer
from model.tokenizer.files import CONFIG, AddedToken, TokenizerConfig

# normalizer_spec.add_dummy_prefix as protobuf; appended to a model it counts, because the last value does.
SPACE_BEFORE_TEXT = {False: b"\x1a\x02\x18\x00", True: b"\x1a\x02\x18\x01", None: b""}
# A trained tokenizer's settings for other programs: without them transformers' AutoTokenizer adds no BOS, and a model
# converted for llama.cpp puts a space before a text.
HUGGING_FACE = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, from the bytes of its tokenizer.model. Raises RuntimeError or ValueError for other bytes.

    Text is encoded as by sentencepiece, so LLaMA's models put a space before it, even if it already begins with one,
    unless the checkpoint says add_prefix_space: false. (transformers 5 omits that space, and splits runs of spaces
    differently.) After an added or control token the space is put only if the checkpoint says `legacy`.
    """

    def __init__(self, proto: bytes, config: TokenizerConfig | None = None) -> None:
        config = config or TokenizerConfig()
        if not proto:  # the library accepts it, and complains at every call
            raise RuntimeError("empty")
        spaced = proto + SPACE_BEFORE_TEXT[config.add_prefix_space]
        self._model = model = sentencepiece.SentencePieceProcessor(model_proto=spaced)
        self._n_pieces = model.vocab_size()
        pieces = [model.id_to_piece(id) for id in range(self._n_pieces)]  # UnicodeDecodeError in a damaged file
        special = [id for id, piece in enumerate(pieces) if model.is_control(id) or piece in config.special]
        tokens = [AddedToken(id, pieces[id], True) for id in special] + config.added
        unknown = model.unk_id()  # stays a piece, whose ids are shown, though many checkpoints list it as special
        super().__init__({"tokenizer.model": proto}, config, [token for token in tokens if token.id != unknown])
        self._known_ids = {*range(self._n_pieces), *self.added}
        self._words = Splitter(token for token in self.added.values() if not token.control)
        self._legacy = config.legacy
        # LLaMA's own models put a space before every text and remove it when decoding; ours do not.
        self.drops_space = model.normalize("a").startswith(SPACE)
        self._bytes = {id: int(piece[1:-1], 16) for id, piece in enumerate(pieces) if model.is_byte(id)}  # <0x0A> is 10
        self._byte_ids = {byte: id for id, byte in self._bytes.items()}
        self.bos_id = self._special_id("bos_token", config, model.bos_id())
        self.eos_id = self._special_id("eos_token", config, model.eos_id())
        self.adds_bos = self.bos_id is not None and config.add_bos is not False

    def _special_id(self, key: str, config: TokenizerConfig, own: int) -> int | None:
        """The id of the token that the checkpoint names, or else the model's `own`, where -1 means none."""
        if key in config.names:
            name = config.names[key]
            if name is None:
                return None
            ids = {token.text: id for id, token in self.added.items()}  # of two with one name, the later counts
            if name in ids:
                return ids[name]
            id = self._model.piece_to_id(name)  # perhaps an ordinary piece
            if not self._model.is_unknown(id):
                return id
        if own < 0:
            return None
        self.token_names[key] = self._model.id_to_piece(own)
        return own

    @cached_property
    def _continued(self) -> sentencepiece.SentencePieceProcessor:
        """This model without the space that LLaMA's puts before a text."""
        return sentencepiece.SentencePieceProcessor(
            model_proto=self.files["tokenizer.model"] + SPACE_BEFORE_TEXT[False]
        )

    def _encode(self, text: str, first: bool) -> list[int]:
        ids = []
        for start, stretch in self._words.split(text):
            if isinstance(stretch, AddedToken):
                ids.append(stretch.id)
            else:
                spaced = self._legacy or (first and start == 0)
                ids += self._encode_with(self._model if spaced else self._continued, stretch)
        return ids

    def _encode_continuation(self, text: str) -> list[int]:
        return self._encode_with(self._continued, text)

    def _encode_with(self, model: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
        if not self._byte_ids or self.drops_space:
            return model.encode(text)
        # sentencepiece would read U+2581 as a space; spelled in bytes, it comes back as itself.
        spelled = [self._byte_ids[byte] for byte in SPACE.encode()]
        before, *others = text.split(SPACE)
        ids = model.encode(before)
        for part in others:
            ids += spelled + model.encode(part)
        return ids

    def _piece_bytes(self, id: int) -> bytes:
        if id in self.added:
            return self.added[id].text.encode()
        if id >= self._n_pieces or self._model.is_unknown(id):
            return UNKNOWN
        if id in self._bytes:
            return bytes([self._bytes[id]])
        return self._model.id_to_piece(id).replace(SPACE, " ").encode()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-pair encoding on `texts` in LLaMA's manner: byte fallback, single digits, no normalization.

    Texts with too few distinct pieces give a smaller vocabulary than asked for. No piece holds a line break, and no
    space is put before a text, so a text encoded in parts that end in a line break has the same ids as the whole.
    Raises InputError if the texts hold no words, or if vocab_size is larger than any model's or has no room for the 256
    bytes, the 3 special tokens and the characters that make up 99.95 % of the text.
    """
    expect(vocab_size <= LARGEST_SIZE, "the size of the vocabulary", vocab_size, f"at most {LARGEST_SIZE}")
    proto = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=proto,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9995,
            # Decoding restores any text: no Unicode normalization, no trimming, runs of spaces as pieces.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            minloglevel=2,
        )
    except RuntimeError as error:
        if vocab_size < 260 or "Vocabulary size is smaller than required_chars" in str(error):
            room = "256 bytes, 3 special tokens and the common characters; raise --vocab-size"
            raise InputError(f"a vocabulary of {vocab_size} pieces is too small; expected room for {room}") from error
        raise InputError(f"no tokenizer can be trained on this text; expected words in it ({error})") from error
    tokenizer = SentencePieceTokenizer(proto.getvalue())
    tokenizer.files[CONFIG] = json.dumps(HUGGING_FACE, indent=2).encode()
    return tokenizer


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines, in parts of 1000 characters to stay below sentencepiece's limit of 4192 bytes a sentence."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), 1000):
                yield line[start : start + 1000]
