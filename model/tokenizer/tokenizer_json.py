"""Read tokenizer.json, the format of LLaMA 3 and SmolLM2, with the package tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels import InputError
from model.json_file import parse_object, read_file
from model.tokenizer.base import SPACE, UNKNOWN, Tokenizer
from model.tokenizer.files import AddedToken, TokenizerConfig

try:
    import tokenizers
except ImportError as error:
    raise InputError(
        "a tokenizer.json needs the package tokenizers; install it with: pip install tokenizers"
    ) from error

# The steps that a decoder like sentencepiece's may have, in order.
SENTENCEPIECE = [
    ["Replace", *fallback, *fused] for fallback in ([], ["ByteFallback"]) for fused in ([], ["Fuse"], ["Fuse", "Strip"])
]
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json whose pieces are bytes, as in LLaMA 3, or sentencepiece's, as in LLaMA 2. Raises InputError.

    Everything in the file applies but its post-processor: add_bos_token in tokenizer_config.json decides about BOS, and
    only if it is absent does the post-processor.
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
        self._to_bytes, self.drops_space = self._decoder()
        leading = _leading_token(self._spec)
        if leading is not None and "bos_token" not in config.names:
            self.token_names["bos_token"] = leading
        ids = {key: model.token_to_id(name) for key, name in self.token_names.items()}
        self.bos_id, self.eos_id = ids.get("bos_token"), ids.get("eos_token")
        adds_bos = leading == self.token_names.get("bos_token") if config.add_bos is None else config.add_bos
        self.adds_bos = self.bos_id is not None and adds_bos

    def _build(self, text: str) -> tokenizers.Tokenizer:
        """The package's tokenizer from the text of a tokenizer.json, with the tokens that only the config adds."""
        try:
            model = tokenizers.Tokenizer.from_str(text)
            model.no_truncation()  # some files still hold the settings of the training run
            model.no_padding()
            model.post_processor = None  # Tokenizer adds the tokens before and after a text
            model.encode_special_tokens = True  # as ordinary text
            known = {token.content for token in model.get_added_tokens_decoder().values()}
            for token in self._extra:
                if token.text not in known:
                    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
                    model.add_tokens(
                        [tokenizers.AddedToken(token.text, special=token.control, normalized=token.normalized, **flags)]
                    )
            model.encode("a")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises plain Exception, and its panics derive from BaseException
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{self._path} can't be used ({reason}); fetch it again, or use tokenizer.model"
            ) from error
        return model

    def _decoder(self) -> tuple[Callable[[str], bytes], bool]:
        """The function from a piece to its bytes, and True if decoding removes the space before the first word."""
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
        """Ids of the model's own pieces."""
        return set(self._model.get_vocab(with_added_tokens=False).values())

    def _piece_bytes(self, id: int) -> bytes:
        if id in self.added and id not in self._pieces:
            return self.added[id].text.encode()
        piece = self._model.id_to_token(id)
        return UNKNOWN if piece is None else self._to_bytes(piece)

    @cached_property
    def _after_token(self) -> tokenizers.Tokenizer:
        """The model for text after a control token: LLaMA 2's later files put a space only before the whole text."""
        return self._build(json.dumps(_without_space(self._spec, "first")))

    @cached_property
    def _continued(self) -> tokenizers.Tokenizer:
        """The model for text that continues another: it adds no space."""
        return self._build(json.dumps(_without_space(self._spec, "first", "always")))

    def _encode(self, text: str, first: bool) -> list[int]:
        model = self._model if first else self._after_token
        return model.encode(text, add_special_tokens=False).ids

    def _encode_continuation(self, text: str) -> list[int]:
        return self._continued.encode(text, add_special_tokens=False).ids


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The normalizers, pre-tokenizers, decoders or post-processors of a file, in order."""
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


def _without_space(spec: dict[str, Any], *schemes: str) -> dict[str, Any]:
    """The file without the space that it puts before a text ("first") or before each stretch of one ("always")."""
    normalizers = _steps(spec.get("normalizer"))
    if "always" in schemes:
        normalizers = [step for step in normalizers if step.get("type") != "Prepend"]
    splits = []
    for step in _steps(spec.get("pre_tokenizer")):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") in schemes:
            step = {**step, "prepend_scheme": "never", "add_prefix_space": False}
        splits.append(step)
    return {
        **spec,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
    }


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet for bytes: printable ones stand for themselves, the others for characters from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{chr(byte): byte for byte in printed}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


LETTERS = _byte_letters()


def _bytes_of_byte_level(piece: str) -> bytes:
    if LETTERS.keys() >= set(piece):
        return bytes(LETTERS[letter] for letter in piece)
    return piece.encode()  # as the package decodes a piece outside the alphabet


def _bytes_of_sentencepiece(piece: str) -> bytes:
    return bytes([int(piece[3:5], 16)]) if BYTE_PIECE.fullmatch(piece) else _bytes_of_text(piece)


def _bytes_of_text(piece: str) -> bytes:
    return piece.replace(SPACE, " ").encode()
