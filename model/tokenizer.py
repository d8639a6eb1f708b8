"""sentencepiece tokenizers: train, encode, decode, and decode while the ids are still coming."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from kernels import InputError

SPACE = "\u2581"  # sentencepiece writes a space as this character, so the character itself can't be encoded as text
UNKNOWN = " \u2047 ".encode()  # sentencepiece's own mark for an id that has no text


class Tokenizer:
    """A sentencepiece model; ids run from 0 to vocab_size - 1. `proto` is the content of its tokenizer.model."""

    def __init__(self, proto: bytes) -> None:
        self.proto = proto
        self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id: int | None = self._id_or_none(self._model.bos_id())
        self.eos_id: int | None = self._id_or_none(self._model.eos_id())
        # LLaMA's own models put a space before every text, and take it away again when decoding; ours don't.
        self._adds_space = self._model.encode("a", out_type=str)[0].startswith(SPACE)
        self._byte_ids = {}
        for id in range(self.vocab_size):
            if self._model.is_byte(id):
                self._byte_ids[int(self._model.id_to_piece(id)[1:-1], 16)] = id  # the piece of byte 10 is <0x0A>

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.model. Raises InputError when it isn't sentencepiece's."""
        try:
            proto = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"{path} can't be read ({error.strerror}); expected a sentencepiece model") from error
        try:
            return cls(proto)
        except RuntimeError as error:
            raise InputError(
                f"{path} is not a sentencepiece model; a tiktoken or tokenizer.json vocabulary can't be read"
            ) from error

    @staticmethod
    def _id_or_none(id: int) -> int | None:
        return id if id >= 0 else None

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of any text. Control tokens come from `bos` and `eos` alone, never from the text."""
        ids = []
        if SPACE in text and self._byte_ids and not self._adds_space:
            for i, part in enumerate(text.split(SPACE)):
                if i:
                    ids += [self._byte_ids[byte] for byte in SPACE.encode()]
                ids += self._model.encode(part)
        else:
            ids = self._model.encode(text)
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Control tokens have none; bytes that are no UTF-8 become U+FFFD."""
        stream = TokenStream(self)
        return "".join(stream.push(id) for id in ids) + stream.finish()

    def piece_bytes(self, id: int) -> bytes:
        """What one id adds to the text, in UTF-8: perhaps only a part of a character."""
        if self._model.is_control(id):
            return b""
        if self._model.is_byte(id):
            return bytes([int(self._model.id_to_piece(id)[1:-1], 16)])
        if self._model.is_unknown(id):
            return UNKNOWN
        return self._model.id_to_piece(id).replace(SPACE, " ").encode()


class TokenStream:
    """Decodes ids one by one: what push and finish return adds up to the text that decode gives for all of them.

    A character that spans several ids is held back until it is whole, and a space belongs to the word after it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer._adds_space

    def push(self, id: int) -> str:
        piece = self._tokenizer.piece_bytes(id)
        if self._drop_space and piece:
            self._drop_space = False
            if piece != UNKNOWN:
                piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left when no more ids come: an unfinished character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-pair encoding of `texts` in LLaMA's manner: byte fallback, single digits, nothing normalised away.

    Texts with too few distinct pieces give a smaller vocabulary than asked for. No piece holds a line break, so a
    text may be encoded in parts that end with one. Raises InputError when vocab_size can't hold the 256 bytes, the
    3 special tokens and the characters that make up 99.95 % of the text.
    """
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
            # Any text comes back as it was: no Unicode normalisation, no trimming, runs of spaces as pieces.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            minloglevel=2,
        )
    except RuntimeError as error:
        if vocab_size < 260 or "Vocabulary size is smaller than required_chars" in str(error):
            raise InputError(
                f"a vocabulary of {vocab_size} pieces is too small for this text; expected room for 256 bytes, "
                "3 special tokens and the common characters; raise --vocab-size"
            ) from error
        raise InputError(f"no tokenizer can be trained on this text; expected words in it ({error})") from error
    return Tokenizer(proto.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines in parts of 1000 characters, which stay below sentencepiece's limit of 4192 bytes for a sentence."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), 1000):
                yield line[start : start + 1000]
