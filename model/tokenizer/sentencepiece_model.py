"""tokenizer.model, as LLaMA 1 and 2 and Mistral have it, through the package sentencepiece."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import cached_property

import sentencepiece

from kernels import InputError
from model.tokenizer.base import UNKNOWN, Tokenizer
from model.tokenizer.files import AddedToken, TokenizerConfig
from model.tokenizer.text import SPACE, Cuts, Splitter

NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec.add_dummy_prefix = false: in protobuf, what comes last counts


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, given as the content of its tokenizer.model. Raises RuntimeError when it isn't one.

    Text is encoded as sentencepiece does, so LLaMA's models put a space before it, also before one that begins with a
    space. (transformers 5 leaves it out there, and divides runs of spaces otherwise.) After an added or control token
    they put it if the checkpoint says `legacy`.
    """

    def __init__(self, proto: bytes, config: TokenizerConfig | None = None) -> None:
        config = config or TokenizerConfig({}, [], {}, None, False, None)
        if not proto:  # the library takes it, and complains at every call
            raise RuntimeError("empty")
        self._model = model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        n_pieces = model.vocab_size()
        pieces = [model.id_to_piece(id) for id in range(n_pieces)]  # UnicodeDecodeError where the file is damaged
        controls = [AddedToken(id, piece, True) for id, piece in enumerate(pieces) if model.is_control(id)]
        added = [token for token in config.added if token.id >= n_pieces or not model.is_unknown(token.id)]
        super().__init__({"tokenizer.model": proto}, config, controls + added)
        self.vocab_size = max([n_pieces, *(id + 1 for id in self.added)])
        self._n_pieces = n_pieces
        self._words = Splitter(token for token in self.added.values() if not token.control)
        self._legacy = config.legacy
        # LLaMA's own models put a space before every text, and take it away again when decoding; ours don't.
        self.drops_space = model.normalize("a").startswith(SPACE)
        self._byte_ids = {}
        for id in range(n_pieces):
            if model.is_byte(id):
                self._byte_ids[int(model.id_to_piece(id)[1:-1], 16)] = id  # the piece of byte 10 is <0x0A>
        self.bos_id = self._special_id("bos_token", config, model.bos_id())
        self.eos_id = self._special_id("eos_token", config, model.eos_id())
        self.adds_bos = self.bos_id is not None and config.add_bos is not False

    def _special_id(self, key: str, config: TokenizerConfig, own: int) -> int | None:
        """The id of the token that the checkpoint calls so, or else the model's own; the model says -1 for none."""
        if key in config.names:
            name = config.names[key]
            ids = [id for id, token in self.added.items() if token.text == name]
            if name is not None and not ids:  # perhaps an ordinary piece
                ids = [id for id in [self._model.piece_to_id(name)] if not self._model.is_unknown(id)]
            return ids[-1] if ids else None
        if own < 0:
            return None
        self.token_names[key] = self._model.id_to_piece(own)
        return own

    @cached_property
    def _continued(self) -> sentencepiece.SentencePieceProcessor:
        """The same model for text that continues another: without the space that LLaMA's put before the first."""
        return sentencepiece.SentencePieceProcessor(model_proto=self.files["tokenizer.model"] + NO_DUMMY_PREFIX)

    @cached_property
    def _cuts(self) -> Cuts | None:
        probe = "  A\n\r\t \ufb01\u2460 e\u0301  "  # changed by any normaliser but the identity, LLaMA's
        if self._model.normalize(probe) != SPACE * self.drops_space + probe.replace(" ", SPACE):
            return None
        pieces = (self._model.id_to_piece(id) for id in range(self._n_pieces) if self._is_text(id))
        return Cuts(pieces, fuses=not self._byte_ids)

    def _is_text(self, id: int) -> bool:
        return not (self._model.is_control(id) or self._model.is_unknown(id) or self._model.is_byte(id))

    def _parts(self, text: str, first: bool, size: int) -> Iterator[list[int]]:
        for start, stretch in self._words.split(text):
            if isinstance(stretch, AddedToken):
                yield [stretch.id]
                continue
            begin = 0
            while begin < len(stretch):
                end = begin + size
                if end < len(stretch):
                    end = self._cuts(stretch, end) if self._cuts else len(stretch)
                spaced = begin == 0 and (self._legacy or (first and start == 0))
                yield self._encode(stretch[begin:end], self._model if spaced else self._continued)
                begin = end

    def _middle(self, text: str) -> list[int]:
        return self._encode(text, self._continued)

    def _encode(self, text: str, model: sentencepiece.SentencePieceProcessor) -> list[int]:
        if SPACE not in text or not self._byte_ids or self.drops_space:
            return model.encode(text)
        ids = []
        for i, part in enumerate(text.split(SPACE)):
            if i:
                ids += [self._byte_ids[byte] for byte in SPACE.encode()]
            ids += model.encode(part)
        return ids

    def _piece_bytes(self, id: int) -> bytes:
        if id in self.added:
            return self.added[id].text.encode()
        if id >= self._n_pieces or self._model.is_unknown(id):
            return UNKNOWN
        if self._model.is_byte(id):
            return bytes([int(self._model.id_to_piece(id)[1:-1], 16)])
        return self._model.id_to_piece(id).replace(SPACE, " ").encode()


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
    return SentencePieceTokenizer(proto.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines in parts of 1000 characters, which stay below sentencepiece's limit of 4192 bytes for a sentence."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), 1000):
                yield line[start : start + 1000]
