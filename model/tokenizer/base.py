"""What every kind of tokenizer does: encode, decode, and decode while the ids are still coming."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from kernels import InputError
from model.tokenizer.files import AddedToken, TokenizerConfig
from model.tokenizer.text import AS_TEXT, Splitter

UNKNOWN = " \u2047 ".encode()  # sentencepiece's own mark for an id that has no text
PART = 2**16  # characters that encode_parts takes at a time; sentencepiece is slower with more


class Tokenizer:
    """What every kind of tokenizer can do; a kind adds how text without control tokens is encoded, and pieces' bytes.

    Ids run from 0 to vocab_size - 1, perhaps with gaps. `files` is what a checkpoint directory needs to carry it, as
    name and content; `adds_bos` whether a text should begin with bos_id; `token_names` what chat templates ask for.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    drops_space: bool  # whether decoding takes away the space that encoding put before the first word

    def __init__(self, files: dict[str, bytes], config: TokenizerConfig, added: Iterable[AddedToken]) -> None:
        self.files = {**files, **config.files}
        self.chat_template = config.chat_template
        self.token_names = {key: text for key, text in config.names.items() if text is not None}
        self.added = {token.id: token for token in added}
        self.controls = Splitter(token for token in self.added.values() if token.control)

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of any text. Control tokens come from `bos` and `eos` alone, never from the text."""
        for wanted, id, name in ((bos, self.bos_id, "beginning"), (eos, self.eos_id, "end")):
            if wanted and id is None:
                raise InputError(f"this tokenizer has no {name}-of-text token; encode without it")
        ids = [id for part in self.encode_parts(text, len(text) + 1) for id in part]
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def encode_with_control_tokens(self, text: str, bos: bool = False) -> list[int]:
        """Ids of a text in which the names of control tokens stand for them, as chat templates write it.

        At most one bos_id leads, whether the text names it or `bos` asks for it.
        """
        ids = [self.bos_id] * (bos and self.bos_id is not None)
        for start, stretch in self.controls.split(text):
            if isinstance(stretch, AddedToken):
                ids.append(stretch.id)
            else:
                for part in self._plain(stretch.replace(AS_TEXT, ""), start == 0, len(text)):
                    ids += part
        while self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            del ids[0]
        return ids

    def as_text(self, text: str) -> str:
        """`text`, marked so that encode_with_control_tokens takes the names of control tokens in it for plain text."""
        return self.controls.pattern.sub(lambda name: AS_TEXT + name[0], text.replace(AS_TEXT, ""))

    def encode_parts(self, text: str, size: int = PART) -> Iterator[list[int]]:
        """The ids of encode(text), for texts too long to be encoded at once: parts of `size` characters or more.

        A part ends where no token can reach across; where there is no such place, the part is larger.
        """
        return self._plain(text, True, size)

    def _plain(self, text: str, first: bool, size: int) -> Iterator[list[int]]:
        controls = {token.id for token in self.added.values() if token.control}
        for ids in self._parts(text, first, size):
            if not controls.isdisjoint(ids):  # a piece of the model that the checkpoint's files have made special
                spelled = {id: [i for letter in self.added[id].text for i in self._middle(letter)] for id in controls}
                ids = [i for id in ids for i in spelled.get(id, [id]) if i not in controls]
            yield ids

    def _parts(self, text: str, first: bool, size: int) -> Iterator[list[int]]:
        """Ids of a text; `first` says that nothing comes before it, not even a control token."""
        raise NotImplementedError

    def _middle(self, text: str) -> list[int]:
        """Ids of a text that continues another."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Control tokens have none; bytes that are no UTF-8 become U+FFFD."""
        stream = TokenStream(self)
        return "".join(stream.push(id) for id in ids) + stream.finish()

    def piece_bytes(self, id: int) -> bytes:
        """What one id adds to the text, in UTF-8: perhaps only a part of a character. UNKNOWN if it is no piece's."""
        if id in self.added and self.added[id].control:
            return b""
        return self._piece_bytes(id) if 0 <= id < self.vocab_size else UNKNOWN

    def _piece_bytes(self, id: int) -> bytes:
        raise NotImplementedError


class TokenStream:
    """Decodes ids one by one: what push and finish return adds up to the text that decode gives for all of them.

    A character that spans several ids is held back until it is whole, and a space belongs to the word after it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_space

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
