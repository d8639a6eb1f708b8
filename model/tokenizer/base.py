"""The parts that all tokenizers share: encoding, decoding, and decoding while the ids are still arriving."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from kernels import InputError
from model.tokenizer.files import AddedToken, TokenizerConfig

SPACE = "\u2581"  # sentencepiece writes a space as this character, so the character itself cannot be encoded as text
UNKNOWN = " \u2047 ".encode()  # sentencepiece's own mark for an id that has no text
AS_TEXT = "\U000f0000"  # private use: marks the name of a control token that is meant as text


class Tokenizer:
    """Base of all tokenizers; a subclass adds _known_ids, _encode, _encode_continuation and _piece_bytes.

    Ids run from 0 to vocab_size - 1; those in `unused_ids` have no piece. `files` is the name and content of each file
    that a checkpoint directory needs, `token_names` the text of bos_token, eos_token and the like for chat templates.
    """

    _known_ids: set[int]  # of all pieces and added tokens
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool  # True if a text should begin with bos_id
    drops_space: bool  # True if decoding removes the space that encoding put before the first word

    def __init__(self, files: dict[str, bytes], config: TokenizerConfig, added: Iterable[AddedToken]) -> None:
        self.files = {**files, **config.files}
        self.chat_template = config.chat_template
        self.token_names = {key: text for key, text in config.names.items() if text is not None}
        self.added = {token.id: token for token in added}
        controls = [token for token in self.added.values() if token.control]
        self._control_ids = {token.id for token in controls}
        self._controls = Splitter(controls)

    @cached_property
    def vocab_size(self) -> int:
        return 1 + max(self._known_ids, default=-1)

    @cached_property  # not computed before vocab_size is checked: a damaged file may name an id of 4 * 10^9
    def unused_ids(self) -> list[int]:
        return [id for id in range(self.vocab_size) if id not in self._known_ids]

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of any text. Control tokens come from `bos` and `eos` alone, never from the text.

        Raises InputError when the tokenizer lacks the control token asked for.
        """
        before = [_existing(self.bos_id, "beginning")] if bos else []
        after = [_existing(self.eos_id, "end")] if eos else []
        return before + self._encode_text(text, first=True) + after

    def encode_with_control_tokens(self, text: str, bos: bool = False) -> list[int]:
        """Ids of a text in which the names of control tokens stand for those tokens, as in chat templates.

        At most one bos_id leads, whether the text names it or `bos` asks for it.
        """
        ids = [self.bos_id] if bos and self.bos_id is not None else []
        for start, stretch in self._controls.split(text):
            if isinstance(stretch, AddedToken):
                ids.append(stretch.id)
            else:
                ids += self._encode_text(stretch.replace(AS_TEXT, ""), first=start == 0)
        while ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def as_text(self, text: str) -> str:
        """`text`, marked so that encode_with_control_tokens takes the names of control tokens in it as plain text."""
        return self._controls.pattern.sub(lambda name: AS_TEXT + name[0], text.replace(AS_TEXT, ""))

    def _encode_text(self, text: str, first: bool) -> list[int]:
        """Ids of a text, none of them a control token's; `first` as in _encode."""
        ids = self._encode(text, first)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The checkpoint's files have made an ordinary piece special: spell it letter by letter.
        spelled = []
        for id in ids:
            if id in self._control_ids:
                for letter in self.added[id].text:
                    spelled += self._encode_continuation(letter)
            else:
                spelled.append(id)
        return [id for id in spelled if id not in self._control_ids]

    def _encode(self, text: str, first: bool) -> list[int]:
        """Ids of a text; `first` is True if nothing precedes it, not even a control token."""
        raise NotImplementedError

    def _encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that continues another."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Control tokens have none; bytes that are not UTF-8 become U+FFFD."""
        stream = TokenStream(self)
        return "".join([stream.push(id) for id in ids]) + stream.finish()

    def piece_bytes(self, id: int) -> bytes:
        """UTF-8 bytes that an id adds to the text, possibly part of a character; UNKNOWN if the id has no piece."""
        if id in self._control_ids:
            return b""
        return self._piece_bytes(id) if 0 <= id < self.vocab_size else UNKNOWN

    def _piece_bytes(self, id: int) -> bytes:
        """UTF-8 bytes of an id below vocab_size that is not a control token's."""
        raise NotImplementedError


def _existing(id: int | None, name: str) -> int:
    if id is None:
        raise InputError(f"this tokenizer has no {name}-of-text token; encode without it")
    return id


class TokenStream:
    """Decoder that takes ids one by one; the texts from push and finish add up to what decode gives for all of them.

    A character that spans several ids is held back until it is complete.
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
        """The rest when no more ids come: U+FFFD for an incomplete character, or nothing."""
        return self._utf8.decode(b"", final=True)


class Splitter:
    """Finder of added tokens in a text, the longest name first, with the white space that each takes along."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        names = map(self._regex, sorted(self._tokens, key=len, reverse=True))
        self.pattern = re.compile(f"{AS_TEXT}?(?:{'|'.join(names) or '(?!)'})")

    def _regex(self, name: str) -> str:
        return rf"(?<!\w){re.escape(name)}(?!\w)" if self._tokens[name].single_word else re.escape(name)

    def split(self, text: str) -> Iterator[tuple[int, str | AddedToken]]:
        """Alternating stretches of text and added tokens, each with its position; names after AS_TEXT stay text."""
        start = 0
        for match in self.pattern.finditer(text):
            if match[0].startswith(AS_TEXT):
                continue
            token = self._tokens[match[0]]
            before = text[start : match.start()]
            yield start, before.rstrip() if token.lstrip else before
            yield match.start(), token
            start = match.end()
            while token.rstrip and text[start : start + 1].isspace():
                start += 1
        yield start, text[start:]
