"""Read the small files beside a tokenizer: added tokens, names of special tokens, the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import InputError
from model.json_file import decode_text, parse_object, read_file, show

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE = "chat_template.jinja"


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
    """Content of the small files. `names` maps bos_token, eos_token and the like to their text, or to None."""

    files: dict[str, bytes]
    added: list[AddedToken]
    names: dict[str, str | None]
    add_bos: bool | None
    legacy: bool
    chat_template: str | None

    @classmethod
    def load(cls, folder: Path) -> TokenizerConfig:
        """Read the files that exist in a directory. Raises InputError naming the file and what is wrong in it."""
        paths = [folder / name for name in (CONFIG, SPECIAL, ADDED, TEMPLATE)]
        files = {path.name: read_file(path) for path in paths if path.exists()}
        path = folder / CONFIG
        config = parse_object(path, files.get(CONFIG, b"{}"))
        special_map = parse_object(folder / SPECIAL, files.get(SPECIAL, b"{}"))
        plainly_added = parse_object(folder / ADDED, files.get(ADDED, b"{}"))
        decoder = _typed(path, config, "added_tokens_decoder", dict)
        names = _token_names(path, config)
        if decoder is None:
            names |= _token_names(folder / SPECIAL, special_map)
            special = set(names.values()) | set(_extra_special(path, config) + _extra_special(path, special_map))
            added = [
                AddedToken(_id(folder / ADDED, text, id), text, text in special, normalized=text not in special)
                for text, id in plainly_added.items()
            ]
        else:  # the list with all attributes replaces the two older files, as in transformers
            added = [_added_token(path, id, token) for id, token in decoder.items()]
        template = _chat_template(path, config)
        if TEMPLATE in files:  # transformers prefers the file, too
            template = decode_text(folder / TEMPLATE, files[TEMPLATE])
        return cls(
            files,
            sorted(added, key=lambda token: token.id),
            names,
            _typed(path, config, "add_bos_token", bool),
            bool(_typed(path, config, "legacy", bool)),
            template,
        )


def _typed(path: Path, values: dict[str, Any], key: str, kind: type) -> Any:
    """The value under `key`, or None. Raises InputError if it is of another kind."""
    found = values.get(key)
    if found is not None and not isinstance(found, kind):
        expected = {bool: "true or false", dict: "an object"}[kind]
        raise InputError(f"{path}: {key} is {show(found)}; expected {expected}")
    return found


def _id(path: Path, name: str, id: Any) -> int:
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < 2**32:
        raise InputError(f"{path}: {show(name)} has the id {show(id)}; expected a non-negative integer")
    return id


def _token_text(path: Path, key: str, value: Any) -> str:
    """The text of a token, which the files write as the text itself or as an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InputError(f"{path}: {key} is {show(value)}; expected a text, or an object with the text as its content")
    return text


def _token_names(path: Path, values: dict[str, Any]) -> dict[str, str | None]:
    # add_bos_token and add_eos_token look like names of tokens but are flags.
    keys = [key for key in values if key.endswith("_token") and not key.startswith("add_")]
    return {key: None if values[key] is None else _token_text(path, key, values[key]) for key in keys}


def _extra_special(path: Path, values: dict[str, Any]) -> list[str]:
    texts = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        found = values.get(key) or []
        if not isinstance(found, (list, dict)):
            raise InputError(f"{path}: {key} is {show(found)}; expected a list of tokens")
        texts += [_token_text(path, key, token) for token in (found.values() if isinstance(found, dict) else found)]
    return texts


def _added_token(path: Path, id: str, token: Any) -> AddedToken:
    key = f"added_tokens_decoder {show(id)}"
    if not isinstance(token, dict):
        raise InputError(f"{path}: {key} is {show(token)}; expected an object with content and special")
    control = bool(_typed(path, token, "special", bool))
    flags = {name: bool(_typed(path, token, name, bool)) for name in ("lstrip", "rstrip", "single_word")}
    flags["normalized"] = bool(_typed(path, {"normalized": not control, **token}, "normalized", bool))
    text = _token_text(path, key, token)
    # JSON's keys are strings; isdecimal, because isdigit is True for superscripts, which int refuses
    number = int(id) if id.isdecimal() and len(id) < 12 else id
    return AddedToken(_id(path, text, number), text, control, **flags)


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """The template; of several named ones, the one named default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        for named in found:
            if not isinstance(named, dict) or not isinstance(named.get("template"), str):
                raise InputError(f"{path}: chat_template holds {show(named)}; expected a name and a template")
        found = next((named["template"] for named in found if named.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise InputError(f"{path}: chat_template is {show(found)}; expected a text, or a list of named templates")
    return found
