"""tokenizer.json, as LLaMA 3 and SmolLM2 have it, through the package tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels import InputError
from model.json_file import parse_object, read_file
from model.tokenizer.base import UNKNOWN, Tokenizer
from model.tokenizer.files import AddedToken, TokenizerConfig
from model.tokenizer.text import SPACE, Cuts

try:
    import tokenizers
except ImportError as error:
    raise InputError(
        "a tokenizer.json needs the package tokenizers; install it with: pip install tokenizers"
    ) from error

# The regular expressions that divide LLaMA 3's and Qwen 2's texts into words; GPT-2's is built into the package.
WORDS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("{1,3}", "")
}
WORD_END = re.compile(r"(?<=[^\W_])(?=[ \t\r\n])")  # where all three end a word, whatever comes before or after
SENTENCEPIECE = [
    ["Replace", *fallback, *fused] for fallback in ([], ["ByteFallback"]) for fused in ([], ["Fuse"], ["Fuse", "Strip"])
]
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json whose pieces are bytes, as in LLaMA 3, or sentencepiece's, as in LLaMA 2. Raises InputError.

    It is taken as it is written, its post-processor excepted: BOS comes where add_bos_token in tokenizer_config.json
    says so, and the post-processor is asked only if that says nothing.
    """

    def __init__(self, path: Path, config: TokenizerConfig) -> None:
        content = read_file(path)
        self._path, self._spec = path, parse_object(path, content)
        self._extra = config.added
        self._model = model = self._build(content.decode())
        added = [
            AddedToken(id, token.content, token.special, token.lstrip, token.rstrip, token.single_word)
            for id, token in model.get_added_tokens_decoder().items()
        ]
        super().__init__({"tokenizer.json": content}, config, added)
        self.vocab_size = 1 + max(model.get_vocab().values(), default=-1)
        self._bytes, self.drops_space = self._decoder()
        leading = _leading_token(self._spec)
        if leading is not None and "bos_token" not in config.names:
            self.token_names["bos_token"] = leading
        ids = {key: model.token_to_id(name) for key, name in self.token_names.items()}
        self.bos_id, self.eos_id = ids.get("bos_token"), ids.get("eos_token")
        self.adds_bos = self.bos_id is not None and (
            leading == self.token_names["bos_token"] if config.add_bos is None else config.add_bos
        )

    def _build(self, text: str) -> tokenizers.Tokenizer:
        try:
            model = tokenizers.Tokenizer.from_str(text)
            model.no_truncation()  # some files still hold the settings of the training run
            model.no_padding()
            model.post_processor = None  # what comes before and after a text is added here
            model.encode_special_tokens = True  # as ordinary text
            known = {token.content for token in model.get_added_tokens_decoder().values()}
            for token in self._extra:
                if token.text not in known:
                    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
                    model.add_tokens(
                        [tokenizers.AddedToken(token.text, special=token.control, normalized=token.normalized, **flags)]
                    )
            model.encode("a")
        except BaseException as error:  # the package raises plain Exception, and what a panic in it raises is none
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{self._path} can't be used ({reason}); fetch it again, or use tokenizer.model"
            ) from error
        return model

    def _decoder(self) -> tuple[Callable[[str], bytes], bool]:
        """What gives a piece's bytes, and whether the first word loses its space."""
        steps = _steps(self._spec.get("decoder"))
        kinds = [str(step.get("type")) for step in steps]
        if kinds == ["ByteLevel"]:
            return _bytes_of_byte_level, False
        spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        strips = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if kinds in SENTENCEPIECE and steps[0] == spaces and (kinds[-1] != "Strip" or steps[-1] == strips):
            return _bytes_of_sentencepiece if "ByteFallback" in kinds else _bytes_of_text, kinds[-1] == "Strip"
        raise InputError(
            f"{self._path}: its decoder is {', '.join(kinds) or 'null'}; expected ByteLevel, or "
            "sentencepiece's Replace, ByteFallback, Fuse and Strip, which LLaMA's tokenizers have"
        )

    @cached_property
    def _pieces(self) -> set[int]:
        """The ids that the model itself has a piece for."""
        return set(self._model.get_vocab(with_added_tokens=False).values())

    def _piece_bytes(self, id: int) -> bytes:
        if id in self.added and id not in self._pieces:
            return self.added[id].text.encode()
        piece = self._model.id_to_token(id)
        return UNKNOWN if piece is None else self._bytes(piece)

    @cached_property
    def _after_token(self) -> tokenizers.Tokenizer:
        """For text after a control token: LLaMA 2's later files put a space before the first word of a text only."""
        return self._build(json.dumps(_without_space(self._spec, "first")))

    @cached_property
    def _continued(self) -> tokenizers.Tokenizer:
        """For text that continues another: without any space that isn't in it."""
        return self._build(json.dumps(_without_space(self._spec, "first", "always")))

    @cached_property
    def _cut(self) -> Callable[[str, int], int] | None:
        """Where a text may be divided; None where that depends on what isn't known here."""
        model, normalizers = self._spec["model"], _steps(self._spec.get("normalizer"))
        words = _steps(self._spec.get("pre_tokenizer"))
        if model.get("type") != "BPE" or model.get("dropout"):
            return None
        if all(map(_keeps_words, words)) and any(map(_divides, words)) and normalizers in ([], [{"type": "NFC"}]):
            return lambda text, at: match.start() if (match := WORD_END.search(text, at)) else len(text)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        own = [step for step in normalizers if step != spaces and step.get("type") != "Prepend"]
        if not own and all(step.get("type") == "Metaspace" for step in words) and not model.get("ignore_merges"):
            vocab = model["vocab"]
            whole = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
            return Cuts(vocab, fuses=not whole)
        return None

    def _parts(self, text: str, first: bool, size: int) -> Iterator[list[int]]:
        words = [token.text for token in self.added.values() if not token.control]
        divisible = size < len(text) and self._cut and not any(word in text for word in words)
        begin = 0
        while begin < len(text):
            end = self._cut(text, begin + size) if divisible else len(text)
            if begin:
                yield self._middle(text[begin:end])
            else:
                model = self._model if first else self._after_token
                yield model.encode(text[:end], add_special_tokens=False).ids
            begin = end

    def _middle(self, text: str) -> list[int]:
        return self._continued.encode(text, add_special_tokens=False).ids


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The normalizers, pre-tokenizers, decoders or post-processors of a file, one after the other."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for key in ("normalizers", "pretokenizers", "decoders", "processors") for step in part.get(key, [])]


def _leading_token(spec: dict[str, Any]) -> str | None:
    """The special token that the post-processor puts before a text."""
    for step in _steps(spec.get("post_processor")):
        if step.get("type") == "TemplateProcessing" and step["single"] and "SpecialToken" in step["single"][0]:
            return step["single"][0]["SpecialToken"]["id"]
    return None


def _divides(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer divides a text into words by one of the expressions known here."""
    if step.get("type") == "ByteLevel":
        return step.get("use_regex", True)
    return step.get("type") == "Split" and step["pattern"].get("Regex") in WORDS and not step["invert"]


def _keeps_words(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer treats what stands on one side of a WORD_END as it would without the other side."""
    if step.get("type") == "ByteLevel":
        return not step.get("add_prefix_space", True)
    return step.get("type") == "Digits" or (_divides(step) and step["behavior"] == "Isolated")


def _without_space(spec: dict[str, Any], *schemes: str) -> dict[str, Any]:
    """The file without the space that it puts before a text ("first"), or before each stretch of it ("always")."""
    normalizers = [
        step for step in _steps(spec.get("normalizer")) if "always" not in schemes or step.get("type") != "Prepend"
    ]
    words = []
    for step in _steps(spec.get("pre_tokenizer")):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") in schemes:
            step = {**step, "prepend_scheme": "never", "add_prefix_space": False}
        words.append(step)
    return {
        **spec,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words} if words else None,
    }


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: bytes that print stand for themselves, the others for the characters from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{chr(byte): byte for byte in printed}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


LETTERS = _byte_letters()


def _bytes_of_byte_level(piece: str) -> bytes:
    found = [LETTERS.get(letter) for letter in piece]
    return piece.encode() if None in found else bytes(found)


def _bytes_of_sentencepiece(piece: str) -> bytes:
    return bytes([int(piece[3:5], 16)]) if BYTE_PIECE.fullmatch(piece) else _bytes_of_text(piece)


def _bytes_of_text(piece: str) -> bytes:
    return piece.replace(SPACE, " ").encode()
