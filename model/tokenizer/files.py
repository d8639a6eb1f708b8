"""Read the small files beside a tokenizer: added tokens, names of special tokens, the chat template."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels import InputError
from model.cli import say
from model.config_keys import is_id
from model.json_file import decode_text, errors_in, expect, parse_object, read_file, show

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE = "chat_template.jinja"
SMALL_FILES = (CONFIG, SPECIAL, ADDED, TEMPLATE)
# The keys of tokenizer_config.json that change ids or text in transformers, by what becomes of them here:
#   honoured  add_bos_token, add_prefix_space, legacy, bos_token, eos_token, added_tokens_decoder, chat_template,
#             additional_special_tokens, extra_special_tokens (of tokens that the vocabulary has)
#   refused   split_special_tokens, if it is true
#   ignored   add_eos_token, because a prompt is there to be continued; pad_token and other names without an id: that
#             which transformers gives them is not one that the model was trained with
# All others are ignored, because they change neither.
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # of an added token, as all files call them


@dataclass(frozen=True)
class AddedToken:
    """A token beside the trained pieces. A control token decodes to nothing and ordinary text never encodes to one."""

    id: int
    text: str
    control: bool
    lstrip: bool = False  # takes the white space before it along
    rstrip: bool = False  # takes the white space after it along
    single_word: bool = False  # never part of a longer word
    normalized: bool = False  # searched for in the text as tokenizer.json's normalizer leaves it


@dataclass(frozen=True)
class TokenizerConfig:
    """Content of the small files. `names` maps bos_token, eos_token and the like to their text, or to None.

    An empty text is the same as none at all. `special` holds the names of further control tokens.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    added: list[AddedToken] = field(default_factory=list)
    names: dict[str, str | None] = field(default_factory=dict)
    special: list[str] = field(default_factory=list)
    add_bos: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool = False
    chat_template: str | None = None

    @classmethod
    def load(cls, folder: Path) -> TokenizerConfig:
        """Read the files that exist in a directory. Raises InputError naming the file and what is wrong in it."""
        files = {name: read_file(folder / name) for name in SMALL_FILES if (folder / name).exists()}
        config, special_map, plainly_added = (
            parse_object(folder / name, files.get(name, b"{}")) for name in (CONFIG, SPECIAL, ADDED)
        )
        with errors_in(folder / CONFIG):
            expect(not _flag(config, "split_special_tokens"), "split_special_tokens", True, "false")
            names, template, special = _token_names(config), _chat_template(config), _extra_special(config)
            add_bos, space, legacy = (_flag(config, key) for key in ("add_bos_token", "add_prefix_space", "legacy"))
            byte_level = space and str(config.get("tokenizer_class")).startswith("GPT2")
            expect(not byte_level, "add_prefix_space", space, "false with the tokenizer_class GPT2Tokenizer")
            if _flag(config, "add_eos_token"):
                say(f"{folder / CONFIG}: add_eos_token is ignored, because a prompt is there to be continued")
            decoder = config.get("added_tokens_decoder")
            expect(decoder is None or isinstance(decoder, dict), "added_tokens_decoder", decoder, "an object")
            added = [_added_token(id, token) for id, token in (decoder or {}).items()]
        if decoder is None:  # otherwise its list with all attributes replaces the two older files, as in transformers
            with errors_in(folder / SPECIAL):
                names |= _token_names(special_map)
                special += _extra_special(special_map)
            with errors_in(folder / ADDED):
                for text, id in plainly_added.items():
                    control = text in special or text in names.values()
                    added.append(AddedToken(_id(text, id), text, control, normalized=not control))
        if TEMPLATE in files:  # transformers prefers the file, too
            template = decode_text(folder / TEMPLATE, files[TEMPLATE])
        added = sorted((token for token in added if token.text), key=lambda token: token.id)
        return cls(files, added, names, special, add_bos, space, bool(legacy), template)


def _flag(values: dict[str, Any], key: str) -> bool | None:
    found = values.get(key)
    expect(found is None or isinstance(found, bool), key, found, "true or false")
    return found


def _id(name: str, id: Any) -> int:
    expect(is_id(id), f"the id of {show(name)}", id, "a non-negative integer below 2^31")
    return id


def _token_text(key: str, value: Any) -> str:
    """The text of a token, which the files write as the text itself or as an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InputError(f"{key} is {show(value)}; expected a text, or an object with the text as its content")
    return text


def _token_names(values: dict[str, Any]) -> dict[str, str | None]:
    # add_bos_token and add_eos_token look like names of tokens but are flags.
    keys = [key for key in values if key.endswith("_token") and not key.startswith("add_")]
    names = {key: None if values[key] is None else _token_text(key, values[key]) for key in keys}
    return {key: text for key, text in names.items() if text != ""}


def _extra_special(values: dict[str, Any]) -> list[str]:
    texts = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        found = values.get(key) or []
        expect(isinstance(found, (list, dict)), key, found, "a list of tokens")
        texts += [_token_text(key, token) for token in (found.values() if isinstance(found, dict) else found)]
    return [text for text in texts if text]


def _added_token(id: str, token: Any) -> AddedToken:
    key = f"added_tokens_decoder {show(id)}"
    expect(isinstance(token, dict), key, token, "an object with content and special")
    text, control = _token_text(key, token), bool(_flag(token, "special"))
    token = {"normalized": not control, **token}
    flags = {name: bool(_flag(token, name)) for name in FLAGS}
    # JSON's keys are strings; isdecimal, because isdigit is True for superscripts, which int refuses
    number = int(id) if id.isdecimal() and len(id) < 12 else id
    return AddedToken(_id(text, number), text, control, **flags)


def _chat_template(config: dict[str, Any]) -> str | None:
    """The template; of several named ones, the one named default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        for named in found:
            complete = isinstance(named, dict) and isinstance(named.get("template"), str)
            expect(complete, "an item of chat_template", named, "a name and a template")
        found = next((named["template"] for named in found if named.get("name") == "default"), None)
    expect(found is None or isinstance(found, str), "chat_template", found, "a text, or a list of named templates")
    return found
