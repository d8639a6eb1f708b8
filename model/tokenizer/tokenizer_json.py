"""Read tokenizer.json, the format of LLaMA 3 and SmolLM2, with the package tokenizers."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels import InputError
from model.json_file import decode_text, errors_in, expect, parse_object, read_file
from model.tokenizer.base import SPACE, UNKNOWN, Tokenizer
from model.tokenizer.files import CONFIG, FLAGS, AddedToken, TokenizerConfig

try:
    import tokenizers
except ImportError as error:
    raise InputError("tokenizer.json needs the package tokenizers; install it with: pip install tokenizers") from error

DECODERS = re.compile("ByteLevel|Replace( ByteFallback)?( Fuse( Strip)?)?")  # LLaMA 3's, and sentencepiece's
DECODER_STEPS = {
    "Replace": {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    "Strip": {"type": "Strip", "content": " ", "start": 1, "stop": 0},
}
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
# GPT-2's alphabet for bytes: printable ones stand for themselves, the others for characters from U+0100 on.
PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {chr(byte): byte for byte in PRINTED}
LETTERS |= {chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(PRINTED)))}


class JsonTokenizer(Tokenizer):
    """A tokenizer.json whose pieces are bytes, as in LLaMA 3, or sentencepiece's, as in LLaMA 2. Raises InputError.

    Everything in the file applies but its post-processor: add_bos_token in tokenizer_config.json decides about BOS, and
    only if it is absent does the post-processor. add_prefix_space: false there takes away sentencepiece's space before
    a text; `legacy` is for tokenizer.model. (transformers 5 reads both, but only for the class LlamaTokenizer.)
    """

    def __init__(self, path: Path, config: TokenizerConfig) -> None:
        content = read_file(path)
        self._path, self._spec = path, parse_object(path, content)
        self._extra, self._special = config.added, config.special
        self._model = self._build(decode_text(path, content))
        self._decoder = self._decoder_steps()
        self.drops_space = "Strip" in self._decoder
        if config.add_prefix_space is not None and "ByteLevel" not in self._decoder:
            self._set_space(config.add_prefix_space)
        model = self._model
        added = [
            AddedToken(id, token.content, token.special, token.lstrip, token.rstrip, token.single_word)
            for id, token in model.get_added_tokens_decoder().items()
        ]
        super().__init__({"tokenizer.json": content}, config, added)
        self._known_ids = set(model.get_vocab().values())
        self._pieces = set(model.get_vocab(with_added_tokens=False).values())
        leading = _leading_token(self._spec)
        named = config.names.get("bos_token", "")
        if leading and named is not None and model.token_to_id(named) is None:
            self.token_names["bos_token"] = leading
        ids = {key: model.token_to_id(name) for key, name in self.token_names.items()}
        self.bos_id, self.eos_id = ids.get("bos_token"), ids.get("eos_token")
        adds_bos = leading == self.token_names.get("bos_token") if config.add_bos is None else config.add_bos
        self.adds_bos = self.bos_id is not None and adds_bos

    def _set_space(self, wanted: bool) -> None:
        """Take sentencepiece's space before a text away. Raises InputError if one is wanted where the file has none."""
        if wanted:
            first = "".join(self._model.encode("a", add_special_tokens=False).tokens)
            with errors_in(self._path.parent / CONFIG):
                expect(first.startswith(SPACE), "add_prefix_space", wanted, f"false, as {self._path.name} puts none")
        else:
            self._spec, self.drops_space = _without_space(self._spec, "first", "always"), False
            self._model = self._build(json.dumps(self._spec))

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
                    flags = {name: getattr(token, name) for name in FLAGS}
                    model.add_tokens([tokenizers.AddedToken(token.text, special=token.control, **flags)])
            known |= {token.text for token in self._extra}
            for text in self._special:
                if text not in known and model.token_to_id(text) is not None:
                    model.add_special_tokens([tokenizers.AddedToken(text, normalized=False)])
            model.encode("a")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises plain Exception, and its panics derive from BaseException
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{self._path} cannot be used ({reason}); fetch it again, or tokenizer.model") from error
        return model

    def _decoder_steps(self) -> list[str]:
        """The types of the decoder's steps. Raises InputError unless they are LLaMA 3's or sentencepiece's."""
        steps = _steps(self._spec.get("decoder"))
        kinds = [str(step.get("type")) for step in steps]
        strange = [step for kind, step in zip(kinds, steps, strict=True) if step != DECODER_STEPS.get(kind, step)]
        if strange or not DECODERS.fullmatch(" ".join(kinds)):
            raise InputError(
                f"{self._path}: its decoder is {', '.join(kinds) or 'null'}; expected ByteLevel, or "
                "sentencepiece's Replace, ByteFallback, Fuse and Strip, which LLaMA's tokenizers have"
            )
        return kinds

    def _piece_bytes(self, id: int) -> bytes:
        if id in self.added and id not in self._pieces:
            return self.added[id].text.encode()
        piece = self._model.id_to_token(id)
        if piece is None:
            return UNKNOWN
        if "ByteLevel" in self._decoder:  # the package decodes a piece outside the alphabet as its own text
            return bytes(LETTERS[letter] for letter in piece) if LETTERS.keys() >= set(piece) else piece.encode()
        if "ByteFallback" in self._decoder and BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE, " ").encode()

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
