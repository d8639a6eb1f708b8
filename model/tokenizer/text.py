"""Where a tokenizer may divide a text: at the names of added tokens, and between characters that no piece joins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from model.tokenizer.files import AddedToken

SPACE = "\u2581"  # sentencepiece writes a space as this character, so the character itself can't be encoded as text
AS_TEXT = "\U000f0000"  # private use: before the name of a control token it says that only the text is meant
WHITE_SPACE = re.compile(r"\s*")


class Splitter:
    """Finds the names of added tokens in a text, the longest first, with the white space that they take along."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        self.pattern = re.compile("|".join(map(self._regex, sorted(self._tokens, key=len, reverse=True))) or "(?!)")
        self._marked = re.compile(f"{AS_TEXT}?(?:{self.pattern.pattern})")

    def _regex(self, name: str) -> str:
        return rf"(?<!\w){re.escape(name)}(?!\w)" if self._tokens[name].single_word else re.escape(name)

    def split(self, text: str) -> Iterator[tuple[int, str | AddedToken]]:
        """Alternating stretches of text and tokens, each with its place; names after AS_TEXT stay text."""
        start = 0
        for match in self._marked.finditer(text):
            if match[0].startswith(AS_TEXT):
                continue
            token = self._tokens[match[0]]
            before = text[start : match.start()]
            yield start, before.rstrip() if token.lstrip else before
            yield match.start(), token
            start = WHITE_SPACE.match(text, match.end()).end() if token.rstrip else match.end()
        yield start, text[start:]


class Cuts:
    """Where a text can be cut so that its parts have the ids of the whole: between characters that no piece joins.

    Byte-pair encoding merges neighbours, and only into pieces, so what it does on one side can't matter on the other.
    `fuses` says that characters outside the vocabulary, one after the other, become a single unknown id.
    """

    def __init__(self, pieces: Iterable[str], fuses: bool) -> None:
        self._joined, self._known = set(), set()
        for piece in pieces:
            self._known.add(piece)
            self._joined.update(piece[i : i + 2] for i in range(len(piece) - 1))
        self._fuses = fuses

    def __call__(self, text: str, at: int) -> int:
        """The first such place from `at` on, or the end of the text."""
        while at < len(text):
            pair = text[at - 1 : at + 1].replace(" ", SPACE)
            if pair not in self._joined and (not self._fuses or pair[0] in self._known):
                return at
            at += 1
        return len(text)
